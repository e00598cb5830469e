"""Commands that show something: recipes, config, segment, doctor, version."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from marlhf._version import __version__
from marlhf.cli.app import Overrides, StageName, app, read_segmenter
from marlhf.errors import SettingError
from marlhf.train.stages import STAGES

NEEDED = ("torch", "transformers", "accelerate", "safetensors", "pydantic", "rich", "typer")
EXTRAS = {
    "hub": ("datasets", "data sets by their hub name"),
    "gguf": ("gguf", "models from GGUF files"),
    "lora": ("peft", "LoRA adapters"),
    "quant": ("bitsandbytes", "QLoRA: adapters on a 4- or 8-bit base"),
    "memory": ("torchao", "optimizer: adamw_8bit, bfloat16 weights"),
    "code": ("tree-sitter-python", "macro actions in Python code"),
    "spacy": ("spacy", "macro actions by spaCy's parses"),
    "stanza": ("stanza", "macro actions by stanza's parses"),
    "benepar": ("benepar", "macro actions by the Berkeley parser"),
    "judge": ("openai", "judging by an API"),
    "annotate": ("fastapi", "the page on which people vote"),
    "lm-eval": ("lm-eval", "published benchmarks: evaluate --lm-eval"),
    "textarena": ("textarena", "games for one player"),
    "vllm": ("vllm", "sampling with vLLM"),
    "verl": ("verl", "macro actions inside verl's trainer"),
    "tensorboard": ("tensorboard", "report_to: tensorboard"),
    "wandb": ("wandb", "report_to: wandb"),
    "trackio": ("trackio", "report_to: trackio"),
    "docs": ("mkdocs-material", "building the docs site"),
}
"""Each extra of pyproject.toml: the package that shows whether it is there, and what it gives."""


@app.command()
def recipes() -> None:
    """List the shipped recipes."""
    from marlhf.config.build import shipped_recipes

    for name, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{name:28}{first.removeprefix('# ') if first.startswith('#') else ''}")


@app.command()
def config(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(STAGES)}.")],
    recipe: Annotated[str | None, typer.Argument(help="A recipe to show in full.")] = None,
    overrides: Overrides = None,
    stage: StageName = None,
) -> None:
    """List the settings of a stage with defaults and help, or show a recipe with all settings."""
    from marlhf.config.settings import describe, to_raw
    from marlhf.train.recipe import check_stage, kind_class, make_segmenters

    if recipe:
        import yaml

        checked = [check_stage(recipe, kind, overrides, stage)]
        [shown] = make_segmenters(checked, user_code=False)  # which looking must not run
        typer.echo(yaml.safe_dump(to_raw(shown.config), sort_keys=False, allow_unicode=True))
        return
    for name, type_, default, text in describe(kind_class(kind)):
        head = typer.style(name, bold=True)
        typer.echo(f"{head}: {type_} = {default}" if type_ else head)
        typer.echo(textwrap.fill(text, 92, initial_indent="    ", subsequent_indent="    "))


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method to show in full.")] = None,
) -> None:
    """List the published methods that `preset:` knows, or show one with its paper and settings."""
    import yaml

    from marlhf.config.candidates import presets
    from marlhf.evaluate.results import text_table
    from marlhf.train.recipe import ConfigError, unknown

    def settings(preset: str, flow: bool) -> str:
        shown = dict(presets()[preset].settings)
        text = yaml.safe_dump(shown, default_flow_style=flow, sort_keys=False, width=1000)
        return text.strip()

    if name is None:
        rows = [
            [p.name, p.kind, p.arxiv, "yes" if p.needs_critic else "no", p.cost, settings(n, True)]
            for n, p in presets().items()
        ]
        header = ["preset", "stage", "paper (arXiv)", "critic", "cost", "settings"]
        typer.echo(text_table(header, rows, words=len(header)))
        typer.echo("\nCounts and thresholds may differ from a paper's tables: see docs/methods.md.")
        return
    if name not in presets():
        raise ConfigError(unknown("NAME", name, presets()))
    preset = presets()[name]
    typer.echo(f"{preset.paper}\nhttps://arxiv.org/abs/{preset.arxiv}\n")
    critic = "needs a critic" if preset.needs_critic else "needs no critic"
    typer.echo(f"# marlhf {preset.kind}; {critic}; sampled tokens relative to PPO: {preset.cost}")
    typer.echo(f"preset: {name}  # which sets\n{textwrap.indent(settings(name, False), '# ')}\n")
    typer.echo(textwrap.fill(f"Same: {preset.same}", 92))
    typer.echo(textwrap.fill(f"Different: {preset.differs}", 92))


@app.command()
def segment(
    text: Annotated[str | None, typer.Option(help="Text to split.")] = None,
    file: Annotated[Path | None, typer.Option(help="File with the text.")] = None,
    segmenter: Annotated[
        str, typer.Option("--segmenter", "-s", help="ngram, 'ngram n=3', 'words max_length=4' ...")
    ] = "ngram",
    tokenizer: Annotated[
        str, typer.Option(help="A folder, a hub name, a GGUF file, or tiny.")
    ] = "tiny",
    model: Annotated[
        str | None, typer.Option(help="Reference model, needed by perplexity rules.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random rules.")] = 0,
) -> None:
    """Show a text with its macro actions marked, and the parse trees of constituents."""
    from marlhf.core import parser_of
    from marlhf.spans.show import cut_text, draw_trees, paint
    from marlhf.train.recipe import ConfigError

    if (text is None) == (file is None):
        raise ConfigError("Give either --text or --file.")
    rule = read_segmenter(segmenter, "--segmenter")
    content = text if text is not None else _read(file)
    actions = cut_text(content, rule, tokenizer=tokenizer, model=model, seed=seed)
    if parser := parser_of(rule):
        typer.echo("\n".join([*draw_trees(content, parser), ""]))
    typer.echo(paint(actions, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    tokens = sum(len(action) for action in actions)
    mean = tokens / len(actions) if actions else 0
    typer.secho(
        f"{tokens} tokens in {len(actions)} macro actions, {mean:.1f} tokens each ({rule})",
        err=True,
    )


@app.command()
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe: say how much GPU memory its stages take.")
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(help="The same for PPO with this model: a folder, a hub name, qwen3-4b ..."),
    ] = None,
    train: Annotated[str, typer.Option(help="With --model: full, lora or qlora.")] = "full",
    gpu: Annotated[
        float | None,
        typer.Option(min=1, metavar="GB", help="The card's memory (default: this one's)."),
    ] = None,
) -> None:
    """Show versions, devices and installed extras; or what a recipe or model takes of a GPU."""
    if model is None and train != "full":
        raise SettingError("--train goes with --model. In a recipe set `lora` of its stages.")
    if recipe is None and model is None:
        if gpu is not None:
            raise SettingError("--gpu asks what fits: give a recipe, or --model NAME.")
        for line in _examine():
            typer.echo(line)
        return
    from marlhf.cli.memory import explain_memory, planned_stages

    words = [*([recipe] if recipe and model else []), *(overrides or [])]
    stages = planned_stages(None if model else recipe, words, model, train)
    for line in explain_memory(stages, gpu):
        typer.echo(line)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback(help=app.info.help)
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None: ...


def _read(file: Path | None) -> str:
    from marlhf.train.recipe import ConfigError

    assert file is not None
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start}).") from None


def _examine() -> Iterator[str]:
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
