"""The names of the files in a run folder, what identifies one, and what is known of its stage.

config.yaml      the resolved config
run.json         the state: stage, status, seconds, summary
metrics.jsonl    one line per step, one per evaluation
eval.jsonl       every held-out prompt's numbers, one line per evaluation
samples.jsonl    held-out prompts with their responses
labelled_steps.jsonl  what a process reward model with `labels_from` learns from
checkpoints/     what a killed run resumes from
model/           the result, as `save_pretrained` writes it
best/            the policy of the best evaluation, where it is kept
critic/          PPO's trained critic
evaluation/      responses and scores of `marlhf evaluate`, one file per setting
best_of_n/       samples of `marlhf best-of-n`, one file per setting
blocks/          responses of `marlhf best-of-n --blocks`, one file per setting
pass_at_k.jsonl  results of `marlhf pass-at-k`, one line per problem
pass_at_k.json   their summary
credit.json      what `marlhf credit` found; credit.jsonl has its batches
cuts.json        weights of `segmenter: learned`, from `marlhf credit --learn-cuts`
headroom.json    what `marlhf credit --headroom` found; headroom.jsonl has its parts
judged/          verdicts of `marlhf judge` and `marlhf annotate`

A stage is finished only for the inputs it had. Their digests, short names for the contents of
models and data files, stand in run.json from its start on, so that a model trained again or a data
file edited since is noticed. Settings have dotted names there, as `flatten` gives them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from marlhf.config.stage import GIVEN as GIVEN
from marlhf.errors import MarlhfError

CONFIG = "config.yaml"
STATE = "run.json"
METRICS = "metrics.jsonl"
EVAL = "eval.jsonl"
SAMPLES = "samples.jsonl"
CHECKPOINTS = "checkpoints"
CHECKPOINT_STATE = "state.json"
MODEL = "model"
BEST = "best"
CRITIC = "critic"
EVALUATION = "evaluation"
BEST_OF_N = "best_of_n"
BLOCKS = "blocks"
PASS_AT_K_LINES = "pass_at_k.jsonl"
PASS_AT_K = "pass_at_k.json"
JUDGED = "judged"
CREDIT = "credit.json"
CREDIT_LINES = "credit.jsonl"
CUTS = "cuts.json"
HEADROOM = "headroom.json"
HEADROOM_LINES = "headroom.jsonl"

SCORE_SCALE = "score_scale"
"""What run.json calls the mean and deviation by which scores are normalised."""

PAIRS = "pairs.jsonl"
"""What labelling leaves: rows with prompt, chosen and rejected."""

EDGE = 1 << 16
"""Bytes read at each end of a file of weights: training changes all of it."""
MAX_READ = 1 << 30
"""Data files up to so many bytes are read whole; of larger ones only both ends are."""


class RunError(MarlhfError, RuntimeError):
    """A run that cannot start or resume, with what to do about it."""


def is_run(folder: Path) -> bool:
    return (folder / STATE).is_file() or (folder / METRICS).is_file()


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder in `checkpoints/` is a checkpoint: others are unfinished, or not ours."""
    return re.fullmatch(r"step-\d{6,}", name) is not None


def leads_out(path: Path) -> bool:
    """Whether symbolic links take a path out of the run or model folder that it lies in.

    A folder may come from somebody else: a link in it could have us read a private file into a
    report, or write to one.
    """
    for folder in path.parents:
        if is_run(folder) or (folder / "config.json").is_file():
            return not path.resolve().is_relative_to(folder.resolve())
    return False


def check_inside(path: Path) -> None:
    """Refuse a path that leads out of its run folder."""
    if leads_out(path):
        raise RunError(
            f"{path} leads out of its run folder, to {path.resolve()}, by a symbolic link. Nothing "
            "is written there. Remove the link; a run folder as a whole may be one."
        )


def model_folder(path: str) -> str:
    """The model of a run, where the run's folder is given; else the path itself."""
    inner = Path(path) / MODEL
    return str(inner) if is_run(Path(path)) and inner.is_dir() else path


def has_model(folder: Path, state: Mapping[str, Any]) -> bool:
    """Whether the model of a finished run is there, none of its files missing or cut short.

    Labelling leaves pairs in its place.
    """
    if (folder / PAIRS).is_file():
        return True
    files = state.get("model_files") or {}
    model = folder / MODEL
    return model.is_dir() and all(
        (model / name).is_file() and (model / name).stat().st_size == size
        for name, size in files.items()
    )


def read_state(folder: Path) -> dict[str, Any]:
    """What run.json says; nothing where it is missing or damaged."""
    return read_object(folder / STATE)


def read_score_scale(folder: Path) -> tuple[float, float] | None:
    """Mean and deviation by which a run normalises scores, where its folder says so."""
    scale = read_state(folder).get(SCORE_SCALE)
    return (float(scale[0]), float(scale[1])) if scale else None


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a run; nothing where config.yaml is missing or damaged.

    Read by libyaml where PyYAML has it, in a tenth of the time. It does not notice that values are
    nested too deep for the stack, so that a file long enough for that is left to Python.
    """
    try:
        text = _read_inside(folder / CONFIG)
        short = len(text) < 10_000
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if short else yaml.SafeLoader
        config = yaml.load(text, loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def to_yaml(value: Any) -> str:
    """As YAML, by libyaml where PyYAML has it, which takes a quarter of the time."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True)


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where the file is missing or damaged."""
    try:
        value = json.loads(_read_inside(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_inside(file: Path) -> str:
    if leads_out(file):
        raise FileNotFoundError(file)
    return file.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True)
class StageFacts:
    """What a stage does, for people and for code that reads its run."""

    label: str
    samples: bool = True
    """Whether it learns from its own responses: reinforcement learning."""
    has_reference: bool = True
    """Whether there is a model to which KL is measured."""
    writes_text: bool = True
    """Whether its model writes; a reward model gives numbers."""
    part: str = "ppo"
    """The part of the data that it learns from."""


# Reinforcement learning is the rule: a new RL method needs no line here.
_SCORER: dict[str, Any] = {"samples": False, "has_reference": False, "writes_text": False}
NOT_RL = {
    "sft": StageFacts("supervised fine-tuning", samples=False, has_reference=False, part="sft"),
    "reward": StageFacts("reward modelling", **_SCORER, part="reward"),
    "prm": StageFacts("process reward modelling", **_SCORER, part="reward"),
    "label": StageFacts("labelling", **_SCORER),
    "dpo": StageFacts("DPO (direct preference optimisation)", samples=False, part="reward"),
}
"""In the order in which reports show them, before those that learn by reinforcement."""


def facts_of(stage: str) -> StageFacts:
    """The facts of a stage by its name.

    >>> facts_of("rloo").label, facts_of("rloo").samples, facts_of("dpo").samples
    ('RLOO', True, False)
    """
    return NOT_RL.get(stage) or StageFacts(stage.upper().replace("-", " "))


def order_of(stage: str) -> tuple[int, str]:
    """Where a stage stands in reports."""
    names = list(NOT_RL)
    return names.index(stage) if stage in names else len(names), stage


def digest_of(what: Any, length: int = 12) -> str:
    """A short name for plain data; anything else in it counts by its text."""
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:length]


def weights_digest(path: str) -> str:
    """A short name for a model's weights, the same wherever its folder lies."""
    digest = hashlib.sha256()
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        digest.update(_edges(file))
    if not files:
        digest.update(path.encode())
    return digest.hexdigest()[:12]


def input_digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """The digest of each model and data file that settings name and that is on this disk."""
    digests: dict[str, str] = {}
    for key, value in _paths(settings):
        path = Path(value).expanduser()
        try:
            if any(path.glob("*.safetensors")):
                digests[key] = weights_digest(str(path))
            elif path.suffix == ".gguf" and path.is_file():
                digests[key] = _file_digest(path, _version(path), most=0)
            elif key.startswith("data.") and path.exists():
                files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
                parts = [f"{f.name} {_file_digest(f, _version(f))}" for f in sorted(files)]
                digests[key] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
        except (OSError, ValueError):  # not a path, or one that may not be read: training says so
            continue
    return digests


def changed_inputs(settings: Mapping[str, Any], recorded: Mapping[str, str]) -> list[str]:
    """A phrase for each input that is no longer what it was: `model: /runs/sft/model is gone`."""
    if not recorded:
        return []
    now, paths = input_digests(settings), dict(_paths(settings))
    return [
        f"{key}: {paths.get(key, '')} {'has changed' if key in now else 'is gone'}"
        for key, digest in recorded.items()
        if now.get(key) != digest
    ]


def _paths(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings that may be paths: text, but for where the run itself is written."""
    for key, value in settings.items():
        values = {key: value}
        if isinstance(value, list):
            values = {f"{key}.{i}": each for i, each in enumerate(value)}
        for name, each in values.items():
            if isinstance(each, str) and 0 < len(each) < 1000 and name != "output_dir":
                yield name, each


def _version(file: Path) -> tuple[int, int]:
    return file.stat().st_size, file.stat().st_mtime_ns


@lru_cache(maxsize=4096)
def _file_digest(file: Path, version: tuple[int, int], most: int = MAX_READ) -> str:
    """`version` makes the cache forget a file that was written since."""
    size, _ = version
    if size > most:
        return hashlib.sha256(str(size).encode() + _edges(file)).hexdigest()
    with file.open("rb") as data:
        digest = hashlib.sha256()
        while block := data.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _edges(file: Path) -> bytes:
    with file.open("rb") as data:
        start = data.read(EDGE)
        data.seek(max(0, file.stat().st_size - EDGE))
        return start + data.read()
