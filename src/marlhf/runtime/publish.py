"""Models for others: plain folders that any program loads, model cards, and the hub.

A card says what a model is, how it came about, what it scored, how to load and cite it.

Cards are published, so nothing of the machine goes into one: models and files appear by name,
never by path, and secrets were left out of the run's config when it was written.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import yaml
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from transformers import AutoModelForCausalLM, AutoTokenizer

from marlhf._version import __version__
from marlhf.config.stage import StageConfig
from marlhf.data.load import is_hub_name
from marlhf.data.sources import PUBLISHED
from marlhf.fields import settings_with
from marlhf.models.base import Model, quiet_transformers
from marlhf.models.facts import STEP_SEPARATOR
from marlhf.models.heads import SCALAR
from marlhf.models.load import load_policy, load_tokenizer
from marlhf.runs.atomic import read_jsonl, replacing_folder, write_text
from marlhf.runs.layout import (
    BEST,
    METRICS,
    MODEL,
    RunError,
    facts_of,
    is_run,
    model_folder,
    read_config,
    read_object,
    read_state,
    to_yaml,
)
from marlhf.runs.write import RunFolder

ADAPTER = "adapter_config.json"
PATH_IN_TEXT = re.compile(r"(?<![\w:/])(?:~|\.{1,2}|[A-Za-z]:)?(?:[\\/][\w.+-]+)+[\\/]?")
LABELS = {
    "eval/score": "score",
    "eval/kl": "KL to the reference (nats per response)",
    "eval/length": "length (tokens)",
    "eval/win_rate": "win rate against the start, by score",
    "eval/repetition": "repeated 4-grams",
    "eval/ended": "responses that end by themselves",
    "eval/gold": "true score",
}


def write_card(
    run: RunFolder,
    *,
    rows: Mapping[str, int] | None = None,
    repo_id: str = "",
    base_model: str = "",
    dataset: str = "",
) -> Path:
    """Write README.md into the model's folder.

    `rows` counts the data, as in `{"training": 1000, "held-out": 50}`. `base_model` and `dataset`
    are for runs that were given Python objects, whose config names neither.
    """
    folder, summary = run.model, dict(run.state["summary"])
    config, facts = run.config, facts_of(run.stage)
    data = config.get("data") or {}
    base = base_model or _origin(str(config.get("model") or ""))
    dataset = dataset or _dataset(data)
    macro = _is_macro(config.get("segmenter"))
    loading = _how_to_load(folder, base, writes_text=facts.writes_text)
    tags = ["marlhf", "rlhf", "reward-model" if loading["scalar"] else run.stage]
    metadata = {
        "library_name": "peft" if loading["adapter"] else "transformers",
        "pipeline_tag": "text-classification" if loading["scalar"] else "text-generation",
        "tags": [*tags, "macro-actions"] if macro else tags,
        **({"base_model": base} if _on_hub(base) else {}),
        **({"datasets": [dataset]} if _on_hub(dataset) else {}),
    }
    name = repo_id.rpartition("/")[2] or run.path.name
    private = settings_with(run.settings, "private")
    metrics = read_jsonl(run.path / METRICS).rows
    evaluations = (row for row in metrics if row.get("kind") == "eval" and row.get("step") == 0)
    text = _template().render(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        name=name,
        loaded_as=repo_id or name,
        stage=run.stage,
        facts=facts,
        macro=macro,
        base=base,
        start=str(config.get("model") or base),
        dataset=dataset,
        data=data,
        rows=rows or {},
        settings=_clean({k: v for k, v in config.items() if k not in private}),
        shown_settings=settings_with(run.settings, "on_card"),
        labels=LABELS,
        metrics=[m for m in dict.fromkeys((*LABELS, *summary)) if m in summary and m != "steps"],
        before=next(evaluations, {}),
        summary=summary,
        seconds=run.seconds,
        seed=config.get("seed"),
        note=str(run.state.get("note") or ""),
        version=__version__,
        versions=list(_versions(loading["adapter"])),
        **loading,
    )
    write_text(folder / "README.md", text)
    return folder / "README.md"


def _how_to_load(folder: Path, base: str, *, writes_text: bool) -> dict[str, Any]:
    """What the template needs to know about the files of a model."""
    adapter = (folder / ADAPTER).is_file()
    if adapter:  # what it stands on need not be what training began with
        base = read_object(folder / ADAPTER).get("base_model_name_or_path") or base
    scalar = not writes_text
    model = read_object(folder / "config.json")
    if architectures := model.get("architectures"):
        scalar = any(SCALAR in str(name) for name in architectures)  # adapters have none
    kind = "SequenceClassification" if scalar else "CausalLM"
    separator = model.get(STEP_SEPARATOR)
    if separator is not None:
        kind = "TokenClassification"
    return {
        "separator": separator,
        "adapter": adapter,
        "scalar": scalar,
        "auto": f"AutoPeftModelFor{kind}" if adapter else f"AutoModelFor{kind}",
        "adapter_base": base,
        "base_travels": _on_hub(base) or not re.search(r"[\\/]", base),
    }


@functools.cache  # it takes longer to compile than to fill in
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it is Markdown
        undefined=StrictUndefined,
    )
    filters = (_link, _shown, _inline, _number, _without_paths, to_yaml)
    environment.filters |= {filter.__name__.lstrip("_"): filter for filter in filters}
    return environment.get_template("model_card.md.jinja")


def hub_name(config: StageConfig) -> str:
    """What `push_to_hub` calls the model."""
    return config.hub_model_id or Path(config.output_dir).name


def check_push(repo_id: str, *, private: bool = False) -> None:
    """Make the repository before training: a name or a login that will not do shows at once."""
    with _explained(repo_id, "push_to_hub cannot work", "Nothing has been trained yet."):
        huggingface_hub.HfApi().create_repo(
            repo_id, private=private, repo_type="model", exist_ok=True
        )


def push(
    folder: Path | str,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload a model trained with marlhf",
) -> str:
    """Upload a folder to the hub as a model repository, made if it is not there; its address."""
    remedy = f"The model itself is whole; upload it with `hf upload {repo_id} {folder}`."
    with _explained(repo_id, f"{folder} is not on the hub", remedy):
        api = huggingface_hub.HfApi(token=token)
        made = api.create_repo(repo_id, private=private, repo_type="model", exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id, folder_path=str(folder), commit_message=message, repo_type="model"
        )
    return str(made)


@contextlib.contextmanager
def _explained(repo_id: str, problem: str, remedy: str) -> Iterator[None]:
    """The hub's refusals as sentences."""
    try:
        yield
    except Exception as error:
        response = error.response if isinstance(error, HfHubHTTPError) else None
        status = None if response is None else response.status_code
        if isinstance(error, HFValidationError):
            why = f"{repo_id!r} is no name for a repository. Write owner/name."
        elif isinstance(error, LocalTokenNotFoundError) or status == 401:
            why = "you are not logged in. Run `hf auth login`, or set HF_TOKEN."
        elif status == 403:
            why = f"your token may not write to {repo_id}. Give one that may, or another name."
        elif isinstance(error, OfflineModeIsEnabled):
            why = "HF_HUB_OFFLINE is set. Unset it."
        else:
            first = (str(error).splitlines() or [""])[0]
            why = f"the hub could not be reached ({type(error).__name__}: {first})."
        raise RunError(f"{problem}: {why} {remedy}") from error


def _versions(adapter: bool) -> Iterator[tuple[str, str]]:
    yield "marlhf", __version__
    for package in ("torch", "transformers", *["peft"] * adapter, "tokenizers", "datasets"):
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)


def _origin(name: str) -> str:
    """What training began with, followed back through runs that started from runs."""
    for _ in range(10):
        folder = Path(name).expanduser()
        before = read_config(folder.parent).get("model") if name and folder.is_dir() else None
        if not before or not isinstance(before, str):
            break
        name = before
    return name


def _dataset(data: Mapping[str, Any]) -> str:
    path, source = data.get("path"), str(data.get("source") or "")
    if path:
        return str(path)
    return PUBLISHED[source].hub_name if source in PUBLISHED else source


def _is_macro(segmenter: Any) -> bool:
    plain = isinstance(segmenter, dict) and segmenter.get("type") == "ngram"
    return bool(segmenter) and not (plain and segmenter["n"] == 1)


def _on_hub(name: str) -> bool:
    """Whether it is a name there: neither built in nor a file or folder here."""
    ours = name in ("", "tiny", "toy") or name.endswith(".gguf")
    return not ours and is_hub_name(name) and not Path(name).expanduser().exists()


def _link(name: str, kind: str = "") -> str:
    if _on_hub(name):
        return f"[{name}](https://huggingface.co/{kind}{name})"
    return f"`{_shown(name)}`"


def _shown(name: str) -> str:
    """A model or file by its name alone; that of the run for a run's model."""
    parts = [part for part in re.split(r"[\\/]", name) if part not in ("", ".", "..", "~")]
    if len(parts) < 2 and not name.startswith(("/", "~", ".")):
        return name
    if _on_hub(name):
        return name
    last = parts[-1] if parts else ""
    return parts[-2] if last in (MODEL, BEST) and len(parts) > 1 else last


def _without_paths(text: str) -> str:
    """A sentence in which every path is a name."""
    return PATH_IN_TEXT.sub(lambda path: _shown(path[0]), text)


def _clean(value: Any) -> Any:
    """Settings fit to be published."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if v != "(hidden)"}
        return {k: _clean(v) for k, v in kept.items()}
    if isinstance(value, list):
        return [_clean(v) for v in value]
    if isinstance(value, str) and re.search(r"[\\/]", value):
        return _without_paths(value) if re.search(r"\s", value) else _shown(value)
    return value


def _inline(value: Any) -> str:
    if isinstance(value, str):
        return value
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.strip().removesuffix("\n...")


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "-"
    return "-" if value is None else str(value)


PROMPT = "The quick brown fox"


def export_plain(run: Path, output: Path, *, trust_code: bool = False) -> Path:
    """Save a run's model, or a model folder, as a plain folder, and check that it loads."""
    if is_run(run) and not facts_of(str(read_state(run).get("stage", ""))).writes_text:
        raise RunError(f"{run} is a reward model, which cannot write text. Give a policy's run.")
    if is_run(run) and model_folder(str(run)) == str(run):
        raise RunError(f"{run} has no model yet. Train it to the end, and export it then.")
    if output.exists():
        raise RunError(f"{output} exists. Choose another folder with -o, or remove it.")
    source = model_folder(str(run))
    model = load_policy(source, trust_remote_code=trust_code).eval()
    tokenizer = load_tokenizer(source, trust_remote_code=trust_code)
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(output) as folder:
        with quiet_transformers():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        _check_loads(folder, model, trust_code)
    return output


def _check_loads(folder: Path, model: Model, trust_code: bool) -> None:
    """Refuse a folder that transformers alone does not load as the same model."""
    with quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=trust_code
        ).eval()
        tokens = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_code)
    ids = torch.tensor([tokens(PROMPT)["input_ids"]])
    with torch.no_grad():
        same = torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-4)
    if not same:
        raise RunError(f"The model saved in {folder} computes something else when it is loaded.")


def gguf_advice(folder: Path) -> str:
    """How to make a GGUF file of a plain folder: by llama.cpp, which is no Python package."""
    return (
        f"{folder} holds the plain model. Only llama.cpp converts it to GGUF, and its converter is "
        "not on PyPI. Run\n"
        "  git clone https://github.com/ggml-org/llama.cpp\n"
        "  pip install -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt\n"
        f"  python llama.cpp/convert_hf_to_gguf.py {folder} --outfile {folder}.gguf"
    )
