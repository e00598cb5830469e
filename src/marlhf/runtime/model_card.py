"""The model card: what a model is, how it came about, what it scored, how to load and cite it.

Cards are published, so nothing of the machine goes into one: models and files appear by name,
never by path, and secrets were left out of the run's config when it was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from marlhf._version import __version__
from marlhf.data.load import is_hub_name
from marlhf.data.sources import PUBLISHED
from marlhf.fields import settings_with
from marlhf.models.heads import SCALAR
from marlhf.runs.atomic import write_text
from marlhf.runs.jsonl import read_jsonl
from marlhf.runs.layout import BEST, METRICS, MODEL, RunError, read_config, read_object, to_yaml
from marlhf.runs.stage_facts import facts_of
from marlhf.runs.write import RunFolder

LABELS = {
    "eval/score": "score",
    "eval/kl": "KL to the reference (nats a response)",
    "eval/length": "length (tokens)",
    "eval/win_rate": "win rate against the start, by score",
    "eval/repetition": "repeated 4-grams",
    "eval/ended": "responses that end by themselves",
    "eval/gold": "true score",
}
PAPER = """\
@inproceedings{chai2025marlhf,
  title     = {{MA-RLHF}: Reinforcement Learning from Human Feedback with Macro Actions},
  author    = {Chai, Yekun and Sun, Haoran and Fang, Huang and Wang, Shuohuan and Sun, Yu and
               Wu, Hua},
  booktitle = {International Conference on Learning Representations},
  year      = {2025},
  url       = {https://arxiv.org/abs/2410.02743}
}"""
SOFTWARE = """\
@software{marlhf,
  title   = {marlhf: reinforcement learning from human feedback with macro actions},
  author  = {{The marlhf authors}},
  version = {VERSION}
}"""


def write_card(
    run: RunFolder,
    *,
    folder: Path | None = None,
    summary: Mapping[str, Any] | None = None,
    rows: Mapping[str, int] | None = None,
    repo_id: str = "",
    base_model: str = "",
    dataset: str = "",
) -> Path:
    """Write README.md into the model's folder.

    `summary` are the final metrics, those of the run unless given; `rows` counts the data, as in
    `{"training": 1000, "held-out": 50}`. `base_model` and `dataset` are for runs that were given
    Python objects, whose config names neither.
    """
    folder = folder or run.model
    metrics = dict(run.state["summary"] if summary is None else summary)
    base = base_model or _origin(str(run.config.get("model") or ""))
    data = run.config.get("data") or {}
    dataset = dataset or _dataset(data)
    loading = _Loading.of(folder, run.stage)
    name = repo_id.rpartition("/")[2] or run.path.name
    parts = [
        f"---\n{yaml.safe_dump(_metadata(run, loading, base, dataset), sort_keys=False)}---",
        f"# {name}",
        _what(run, loading, base, dataset),
        "## How it was trained",
        _training(run, base, dataset, data, rows),
        "## Results",
        _results(run, metrics),
        "## How to load it",
        loading.code(repo_id or name, base),
        "## Limits",
        _limits(run.stage),
        "## How to cite",
        f"```bibtex\n{PAPER}\n\n{SOFTWARE.replace('VERSION', __version__)}\n```",
        "## Versions",
        "\n".join(f"- {package} {number}" for package, number in _versions(loading.adapter)),
    ]
    write_text(folder / "README.md", "\n\n".join(parts) + "\n")
    return folder / "README.md"


def push(
    folder: Path | str,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload a model trained with marlhf",
) -> str:
    """Upload a folder to the hub as a model repository, made if it is not there; its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    api = HfApi(token=token)
    try:
        made = api.create_repo(repo_id, private=private, repo_type="model", exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id, folder_path=str(folder), commit_message=message, repo_type="model"
        )
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
        raise RunError(
            f"{folder} is not on the hub: {why} The model itself is whole; upload it with "
            f"`hf upload {repo_id} {folder}`."
        ) from error
    return str(made)


class _Loading:
    """How transformers or peft loads what is in a folder."""

    def __init__(self, scalar: bool, adapter: bool, base: str) -> None:
        self.scalar, self.adapter, self.base = scalar, adapter, base

    @classmethod
    def of(cls, folder: Path, stage: str) -> _Loading:
        settings = folder / "adapter_config.json"
        adapter, base = settings.is_file(), ""
        if adapter:  # what it stands on need not be what training began with
            base = read_object(settings).get("base_model_name_or_path") or ""
        if architectures := read_object(folder / "config.json").get("architectures"):
            scalar = any(SCALAR in str(name) for name in architectures)
        else:  # adapters have none
            scalar = not facts_of(stage).writes_text
        return cls(scalar, adapter, base)

    def code(self, name: str, base: str) -> str:
        kind = "SequenceClassification" if self.scalar else "CausalLM"
        auto = f"AutoPeftModelFor{kind}" if self.adapter else f"AutoModelFor{kind}"
        options = ", num_labels=1" if self.scalar and self.adapter else ""
        imports = "from transformers import AutoTokenizer"
        if self.adapter:
            imports = f"from peft import {auto}\n{imports}"
        else:
            imports = imports.replace("import ", f"import {auto}, ")
        use = (
            'inputs = tokenizer("a prompt" + " and a response", return_tensors="pt")\n'
            "score = model(**inputs).logits[0, 0]"
            if self.scalar
            else 'inputs = tokenizer("a prompt", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))"
        )
        base = self.base or base
        there = _on_hub(base) or not re.search(r"[\\/]", base)
        over = f"\n\nIt is an adapter over `{_shown(base)}`, " + (
            "which is loaded with it."
            if there
            else "a folder where it was trained. To load it elsewhere, set "
            "`base_model_name_or_path` in adapter_config.json."
        )
        return (
            f'```python\n{imports}\n\nmodel = {auto}.from_pretrained("{name}"{options})\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n{use}\n```'
            + (over if self.adapter and base else "")
        )


def _metadata(run: RunFolder, loading: _Loading, base: str, dataset: str) -> dict[str, Any]:
    tags = ["marlhf", "rlhf", "reward-model" if loading.scalar else run.stage]
    metadata: dict[str, Any] = {
        "library_name": "peft" if loading.adapter else "transformers",
        "pipeline_tag": "text-classification" if loading.scalar else "text-generation",
        "tags": [*tags, "macro-actions"] if _is_macro(run.config.get("segmenter")) else tags,
    }
    if _on_hub(base):
        metadata["base_model"] = base
    if _on_hub(dataset):
        metadata["datasets"] = [dataset]
    return metadata


def _what(run: RunFolder, loading: _Loading, base: str, dataset: str) -> str:
    kind = "A reward model" if loading.scalar else "A language model"
    start = f", from {_link(base)}" if base else ""
    on = f", on {_link(dataset, 'datasets/')}" if dataset else ""
    macro = _is_macro(run.config.get("segmenter"))
    method = facts_of(run.stage).label + (" over macro actions" if macro else "")
    lines = [f"{kind}, trained by {method}{start}{on}, with marlhf {__version__}."]
    if macro:
        lines.append(
            "Responses were cut into macro actions, groups of tokens that are credited as one "
            "([MA-RLHF](https://arxiv.org/abs/2410.02743)). They exist in training only: the "
            "model samples token by token, as any other does."
        )
    return "\n\n".join(lines)


def _training(
    run: RunFolder, base: str, dataset: str, data: Any, rows: Mapping[str, int] | None
) -> str:
    private = settings_with(run.settings, "private")
    config = _clean({k: v for k, v in run.config.items() if k not in private})
    lines = [f"- stage: {run.stage}"]
    begun = str(run.config.get("model") or base)
    if begun:
        came = f", which began as {_link(base)}" if base and base != begun else ""
        lines.append(f"- start: {_link(begun)}{came}")
    if dataset:
        counted = ", ".join(f"{count} {name} rows" for name, count in (rows or {}).items())
        source = f" (form: {data['source']})" if data.get("source") and data.get("path") else ""
        about = [f"{_link(dataset, 'datasets/')}{source}", *([counted] if counted else [])]
        lines.append(f"- data: {', '.join(about)}")
    if config.get("segmenter"):
        lines.append(f"- termination rule of macro actions: `{_inline(config['segmenter'])}`")
    table = [("setting", "value"), ("---", "---")]
    for name in settings_with(run.settings, "on_card"):
        value = config.get(name)
        if value not in (None, "", [], {}):
            table.append((f"`{name}`", f"`{_inline(value)}`".replace("|", "\\|")))
    whole = to_yaml(config)
    lines += ["", *(f"| {name} | {value} |" for name, value in table), ""]
    lines += ["<details><summary>All settings</summary>", "", f"```yaml\n{whole}```", ""]
    return "\n".join([*lines, "</details>"])


def _results(run: RunFolder, metrics: Mapping[str, Any]) -> str:
    before = _before(run)
    names = [name for name in LABELS if name in metrics]
    names += [name for name in metrics if name not in LABELS and name != "steps"]
    lines = ["| held out | before | after |", "| --- | --- | --- |"]
    for name in names:
        label = LABELS.get(name, name.removeprefix("eval/"))
        lines.append(f"| {label} | {_number(before.get(name))} | {_number(metrics[name])} |")
    steps = f"{metrics['steps']} steps, " if "steps" in metrics else ""
    seed = run.config.get("seed")
    lines += ["", f"{steps}{run.seconds:.0f} seconds, one run with seed {seed}."]
    if run.state.get("note"):
        lines += ["", _without_paths(str(run.state["note"]))]
    return "\n".join(lines)


def _limits(stage: str) -> str:
    lines = []
    if not facts_of(stage).writes_text:
        lines.append(
            "Scores compare responses to the same prompt. Their zero and their unit mean nothing, "
            "and far from the training data they are guesses."
        )
    elif facts_of(stage).samples:
        lines.append(
            "The score is what the policy was trained to raise, so it flatters. Read it together "
            "with KL and length, and judge samples before relying on it."
        )
    lines += [
        "The numbers are of one seed; small differences between models may be chance.",
        "It has the faults and biases of its base model and its data, and their licences apply.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _versions(adapter: bool) -> Iterator[tuple[str, str]]:
    yield "marlhf", __version__
    for package in ("torch", "transformers", *["peft"] * adapter, "tokenizers", "datasets"):
        if number := _installed_version(package):
            yield package, number


@cache  # a package's whole description is read and parsed for it
def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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


def _before(run: RunFolder) -> dict[str, Any]:
    """The evaluation before the first step."""
    rows = read_jsonl(run.path / METRICS).rows
    return next((row for row in rows if row.get("kind") == "eval" and row.get("step") == 0), {})


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
    return re.sub(r"(?<![\w:/])(?:~|\.{1,2}|[A-Za-z]:)?(?:[\\/][\w.+-]+)+[\\/]?", _last_part, text)


def _last_part(match: re.Match[str]) -> str:
    return _shown(match.group())


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
