"""Whose responses are judged, and by what: run folders and plain model folders, made alike.

A run says what its data, sampling, reward model and reference are. An SFT run, a DPO run or a plain
model folder says less; what it lacks comes from another run, so that all are asked the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from marlhf.data import DataConfig
from marlhf.errors import MarlhfError
from marlhf.rollout import Sampling
from marlhf.runs.read import find_runs, read_run
from marlhf.runs.stage_facts import facts_of

EDGE = 1 << 16
"""Bytes at each end of a file of weights that tell it from others."""


class EvaluationError(MarlhfError, ValueError):
    """Something that cannot be evaluated, with what to do about it."""


@dataclass(frozen=True)
class Question:
    """What to ask, and how; what is None or empty is as in the run."""

    prompts: int = 2000
    """The first so many of the held-out prompts."""
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    rewards: tuple[str, ...] = ()
    """Reward models (folders, runs, hub names), or functions as `module:name`."""
    reference: str | None = None
    """What KL is measured to; `none` leaves it out."""
    like: str | None = None
    """A run that lends what others lack."""
    source: str | None = None
    """With source, path or split all rows of that data are asked, not the held-out ones."""
    path: str | None = None
    split: str | None = None
    train: bool = False
    """Ask prompts of the training part in place of held-out ones."""
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise EvaluationError(f"--prompts must be at least 1; got {self.prompts}.")
        if self.train and (self.source or self.path or self.split):
            raise EvaluationError("Give either --train or other data, not both.")


@dataclass(frozen=True)
class Subject:
    """A model to ask, the folder that results go into, and what its run says, if it has one."""

    folder: Path
    model: str
    name: str
    stage: str = ""
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """All that decides what a subject is asked and by what it is judged."""

    data: DataConfig
    part: str
    """The part of the data that training prompts come from."""
    all_rows: bool
    train: bool
    sampling: Sampling
    rewards: tuple[tuple[str, float], ...]
    """Paths or names, each with its weight."""
    reference: str | None
    reference_seed: int
    trust_remote_code: bool
    precision: Any


def find_subjects(paths: Sequence[Path | str]) -> list[Subject]:
    """Every policy under `paths`; of a folder of runs those that write text and are finished."""
    found: dict[str, Subject] = {}
    for path in map(Path, paths):
        for subject in _subjects(path):
            found.setdefault(str(Path(subject.model).resolve()), subject)
    if not found:
        raise EvaluationError("No path was given. Give the folder of at least one run.")
    return list(found.values())


def _subjects(path: Path) -> list[Subject]:
    if not path.is_dir():
        raise EvaluationError(
            f"There is no folder {path}. Give the folder of a run (its `output_dir`), or of a "
            "model."
        )
    if is_run(path):
        return [_of_run(path)]
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        if not is_run(path.parent):
            return [Subject(path, str(path), path.resolve().name)]
        if path.name == "model":
            return [_of_run(path.parent)]
        run = read_run(path.parent)  # such as its `best/`
        return [Subject(path, str(path), f"{run.name}/{path.name}", run.stage, run.config)]
    runs = [run for run in find_runs([path]) if facts_of(run.stage).writes_text]
    named = [_of_run(run.path) for run in runs if (run.path / "model").is_dir()]
    if not named:
        raise EvaluationError(f"{path} holds no finished run whose model writes text.")
    return named


def _of_run(folder: Path) -> Subject:
    run = read_run(folder)
    if not (folder / "model").is_dir():
        raise EvaluationError(
            f"{folder} has no model yet: the run is not finished. Finish it first, by the command "
            "that began it."
        )
    return Subject(folder, str(folder / "model"), run.name, run.stage, run.config)


def is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file() or (folder / "metrics.jsonl").is_file()


def find_donor(subjects: Sequence[Subject], like: str | None) -> Subject | None:
    """Who lends what others lack: the run that was named, else the first that has rewards."""
    if like is not None:
        [donor, *_] = _subjects(Path(like))
        return donor
    return next((each for each in subjects if _rewards(each)), None)


def make_plan(subject: Subject, question: Question, donor: Subject | None) -> Plan:
    """The question with all that it leaves open filled in from the run, or else from the donor."""
    lender = donor or subject
    sampling = subject.config.get("sampling") or lender.config.get("sampling")
    if not sampling and (length := subject.config.get("max_response_tokens")):
        sampling = {"max_new_tokens": length}
    told = {"temperature": question.temperature, "max_new_tokens": question.max_new_tokens}
    raw = dict(sampling or {}) | {k: v for k, v in told.items() if v is not None}
    if question.rewards:
        rewards = tuple((folder_of(path), 1.0) for path in question.rewards)
    else:
        rewards = _rewards(subject) or _rewards(lender)
    if not rewards:
        raise EvaluationError(
            f"{subject.folder} names no reward model. Give one with --reward PATH, or name a run "
            "that has one with --like RUN."
        )
    with_reference = [s for s in (subject, lender) if s.stage and facts_of(s.stage).has_reference]
    tied = next(iter(with_reference), None)
    reference = question.reference
    if reference is None and tied is not None:
        reference = tied.config.get("ref_model") or tied.config.get("model")
        reference = reference and located(reference, tied)
    return Plan(
        data=_data(subject, lender, question),
        part=subject.config.get("part") or facts_of(subject.stage).part,
        all_rows=bool(question.source or question.path or question.split),
        train=question.train,
        sampling=_valid(Sampling, raw, subject),
        rewards=rewards,
        reference=None if reference in (None, "", "none") else folder_of(reference),
        reference_seed=int((tied or subject).config.get("seed") or 0),
        trust_remote_code=bool(subject.config.get("trust_remote_code")),
        precision=subject.config.get("precision") or "auto",
    )


def _data(subject: Subject, lender: Subject, question: Question) -> DataConfig:
    """The run's own data, or other data, of which all rows count."""
    raw = dict(subject.config.get("data") or lender.config.get("data") or {})
    told = {"source": question.source, "path": question.path, "split": question.split}
    told = {name: value for name, value in told.items() if value is not None}
    if told:
        if "source" in told or "path" in told:  # another data set altogether
            raw = {k: v for k, v in raw.items() if k in ("max_prompt_tokens", "too_long")}
        raw |= {**told, "parts": {}, "eval_size": 0, "limit": None}
    if not raw:
        raise EvaluationError(
            f"{subject.folder} is not a run, so it does not say which prompts to ask. Name a run "
            "that does with --like RUN, or data with --path FILE."
        )
    return _valid(DataConfig, raw, subject)


def _valid(kind: Any, raw: dict[str, Any], subject: Subject) -> Any:
    """Settings that a run wrote down, which were checked when it began."""
    try:
        return kind(**raw)
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"{subject.folder}: {error}") from None


def _rewards(subject: Subject) -> tuple[tuple[str, float], ...]:
    """What scored a run, and with which weights."""
    config = subject.config
    named = [config.get("reward_model"), *(config.get("reward_funcs") or ())]
    named = [name for name in named if name]
    weights = config.get("reward_weights") or [1.0] * len(named)
    return tuple((folder_of(located(n, subject)), float(w)) for n, w in zip(named, weights))


def located(path: str, subject: Subject) -> str:
    """A path of a run's settings; beside the run where both were moved together."""
    if Path(path).exists():
        return path
    beside = str(Path(subject.config.get("output_dir") or ".").parent) + "/"
    run = subject.folder if is_run(subject.folder) else subject.folder.parent  # of its `best/`
    moved = run.parent / path.removeprefix(beside)
    return str(moved) if path.startswith(beside) and moved.exists() else path


def folder_of(path: str) -> str:
    """A model's folder, where the folder of its run was given."""
    inner = Path(path) / "model"
    return str(inner) if is_run(Path(path)) and inner.is_dir() else path


def stamp(path: str) -> str:
    """A short name for a model's weights, the same wherever the folder lies."""
    digest = hashlib.sha256()
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            digest.update(data.read(EDGE))
            data.seek(max(0, size - EDGE))
            digest.update(data.read())
    if not files:
        digest.update(path.encode())
    return digest.hexdigest()[:12]


def setting_of(subject: Subject, plan: Plan, seed: int, *more: object) -> str:
    """A short name for all that decides a response, and whatever else `more` says."""
    data = plan.data
    which = [stamp(subject.model), asdict(plan.sampling), seed, plan.all_rows, plan.train, *more]
    which += [data.source, data.path, data.split, data.max_prompt_tokens, data.too_long]
    return hashlib.sha256(json.dumps(which, default=str).encode()).hexdigest()[:12]


def file_name(plan: Plan, seed: int) -> str:
    """How a file of responses is called: what a reader would ask first."""
    sampling, data = plan.sampling, plan.data
    words = [f"t{sampling.temperature:g}", f"m{sampling.max_new_tokens}", f"s{seed}"]
    if plan.all_rows:
        words.append("-".join(filter(None, (Path(data.path or data.source).stem, data.split))))
    return "-".join([*words, "train"] if plan.train else words)
