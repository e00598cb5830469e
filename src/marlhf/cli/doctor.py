"""What this machine has, and what marlhf could do with more."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import warnings
from collections.abc import Iterator

from marlhf._version import __version__

NEEDED = ("torch", "transformers", "accelerate", "safetensors", "pydantic", "rich", "typer")
EXTRAS = {
    "hub": ("datasets", "data sets by their hub name"),
    "gguf": ("gguf", "models from GGUF files"),
    "lora": ("peft", "LoRA adapters"),
    "quant": ("bitsandbytes", "QLoRA: adapters on a 4- or 8-bit base"),
    "code": ("tree-sitter-python", "macro actions in Python code"),
    "spacy": ("spacy", "macro actions by spaCy's parses"),
    "stanza": ("stanza", "macro actions by stanza's parses"),
    "benepar": ("benepar", "macro actions by the Berkeley parser"),
    "judge": ("openai", "judging by an API"),
    "annotate": ("fastapi", "the page on which people vote"),
    "vllm": ("vllm", "sampling with vLLM"),
    "verl": ("verl", "macro actions inside verl's trainer"),
    "tensorboard": ("tensorboard", "report_to: tensorboard"),
    "wandb": ("wandb", "report_to: wandb"),
    "trackio": ("trackio", "report_to: trackio"),
    "docs": ("mkdocs-material", "building the docs site"),
}
"""Each extra of pyproject.toml: the package that shows whether it is there, and what it gives."""


def examine() -> Iterator[str]:
    """A line for each thing worth knowing."""
    yield f"marlhf {__version__}, Python {platform.python_version()}, {platform.platform()}"
    for name in NEEDED:
        yield f"  {name:14}{_version(name) or 'MISSING: pip install marlhf again'}"
    yield "devices"
    yield from _devices()
    yield "extras (pip install 'marlhf[NAME]')"
    for extra, (package, gives) in EXTRAS.items():
        version = _version(package)
        state = f"yes  {gives} ({package} {version})" if version else f"no   {gives}"
        yield f"  {extra:14}{state}"
    yield "sandbox for programs"
    yield from _sandbox()
    yield "hub"
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    yield f"  {'offline (HF_HUB_OFFLINE is set)' if offline else 'online, if the network is'}"


def _devices() -> Iterator[str]:
    import torch

    disk = shutil.disk_usage(os.getcwd())
    yield f"  {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads for torch"
    yield f"  {disk.free / 2**30:.0f} GiB of {disk.total / 2**30:.0f} free on this disk"
    if not torch.cuda.is_available():
        yield "  no CUDA device: small models only, in float32"
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        half = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
        yield f"  cuda:{i} {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {half}"


def _sandbox() -> Iterator[str]:
    from marlhf.reward.sandbox import Sandbox, SandboxUnavailable

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is among the layers
            sandbox = Sandbox(workers=1, preload=())
    except SandboxUnavailable as error:
        yield f"  none: {error}"
        return
    with sandbox:
        for layer, status in sandbox.layers.items():
            yield f"  {layer:14}{status if isinstance(status, str) else 'yes' if status else 'no'}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
