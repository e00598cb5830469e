"""Which policies are evaluated, on which prompts, with which rewards.

A run says what its data, sampling, reward model and reference are. An SFT run, a DPO run or a plain
model folder says less. What it lacks comes from another run, so that all have the same settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from marlhf.config.rl import RLConfig, parse_combine
from marlhf.data import DataConfig
from marlhf.errors import MarlhfError
from marlhf.rollout import Sampling
from marlhf.runs.layout import GIVEN, MODEL, facts_of, is_run, model_folder
from marlhf.runs.read import find_runs, nearest_folder, read_run

SHIPPED_FUNCTIONS = (
    "marlhf.reward.code:unit_tests",
    "marlhf.reward.sums:solved",
    "marlhf.reward.sums:each_line",
    "marlhf.reward.sums:share_right",
    "marlhf.reward.gsm8k:right_answer",
)
"""Reward functions of marlhf itself, which a run folder may name."""


SHIPPED_ENVIRONMENTS = ("textarena",)
"""Prefixes of environments of marlhf itself, which a run folder may name."""


class EvaluationError(MarlhfError, ValueError):
    """Something that cannot be evaluated, with what to do about it."""


@dataclass(frozen=True)
class EvaluationOptions:
    """What the user chose; what is None or empty is as in the run."""

    prompts: int = 2000
    """How many held-out prompts, from the first on."""
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    rewards: tuple[str, ...] = ()
    """Reward models (folders, runs, hub names), or functions as `module:name`."""
    combine: str | None = None
    """How an ensemble's scores become one, as `reward_combine`."""
    reference: str | None = None
    """What KL is measured to; `none` leaves it out."""
    like: str | None = None
    """A run whose settings are used where another run has none."""
    source: str | None = None
    """With source, path or split, all rows of that data are used instead of held-out ones."""
    path: str | None = None
    split: str | None = None
    train: bool = False
    """Use prompts of the training part instead of held-out ones."""
    environment: str | None = None
    """What prompts are played in as conversations; `none` for single responses."""
    device: str = "auto"
    trust_code: bool = False
    """Run Python code that a run names or that comes with a model."""

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise EvaluationError(f"--prompts must be at least 1; got {self.prompts}.")
        if self.train and (self.source or self.path or self.split):
            raise EvaluationError("Give either --train or other data, not both.")
        if self.combine is not None:
            parse_combine(self.combine)


@dataclass(frozen=True)
class PolicySource:
    """A model that writes responses, the folder for its results, and its run's settings, if any."""

    folder: Path
    model: str
    name: str
    stage: str = ""
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EnvironmentPlan:
    """What answers between the turns of a conversation, as in a run's settings."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    max_turns: int = RLConfig.max_turns
    episode_tokens: int = RLConfig.episode_tokens
    timeout: float = RLConfig.environment_timeout
    raw_turns: bool = RLConfig.raw_turns
    weight: float = 1.0
    """Of its rewards in the total score: 0 where the user named another reward."""


@dataclass(frozen=True)
class EvaluationPlan:
    """All that decides the responses of a policy and their scores."""

    data: DataConfig
    part: str
    """The part of the data that training prompts come from."""
    all_rows: bool
    train: bool
    sampling: Sampling
    rewards: tuple[tuple[str, float], ...]
    """Paths or names, each with its weight."""
    random_reward_head: bool
    """Whether the run accepts a language model with a random head as its reward model."""
    reference: str | None
    reference_seed: int
    trust_remote_code: bool
    precision: Any
    environment: EnvironmentPlan | None = None
    combine: str = "mean"


def without_none(**values: Any) -> dict[str, Any]:
    """What the user chose, or a run says: for the rest defaults count."""
    return {name: value for name, value in values.items() if value is not None}


def find_policies(paths: Sequence[Path | str]) -> list[PolicySource]:
    """Every policy under `paths`; of a folder of runs those that write text and are finished."""
    policies: dict[str, PolicySource] = {}
    for path in map(Path, paths):
        for policy in _policies(path):
            policies.setdefault(str(Path(policy.model).resolve()), policy)
    if not policies:
        raise EvaluationError("No path was given. Give the folder of at least one run.")
    return named_apart(policies.values())


def named_apart(policies: Iterable[PolicySource]) -> list[PolicySource]:
    """Runs of one name, such as the seeds of a sweep, are called by their folders."""
    found = list(policies)
    count = Counter(policy.name for policy in found)
    return [p if count[p.name] == 1 else replace(p, name=str(p.folder)) for p in found]


def find_policy(path: Path | str) -> PolicySource:
    """The one policy under a path."""
    policies = find_policies([path])
    if len(policies) > 1:
        raise EvaluationError(f"{path} holds {len(policies)} runs. Give the folder of one.")
    return policies[0]


def _policies(path: Path) -> list[PolicySource]:
    if not path.is_dir():
        raise EvaluationError(
            f"There is no folder {path}. {nearest_folder(path)}Give the folder of a run (its "
            "`output_dir`), or of a model."
        )
    if is_run(path):
        return [_of_run(path)]
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        if not is_run(path.parent):
            return [PolicySource(path, str(path), path.resolve().name)]
        if path.name == MODEL:
            return [_of_run(path.parent)]
        run = read_run(path.parent)  # such as its `best/`
        return [PolicySource(path, str(path), f"{run.name}/{path.name}", run.stage, run.config)]
    runs = [run for run in find_runs([path]) if facts_of(run.stage).writes_text]
    named = [_of_run(run.path) for run in runs if (run.path / MODEL).is_dir()]
    if not named:
        raise EvaluationError(f"{path} has no finished run of a language model.")
    return named


def _of_run(folder: Path) -> PolicySource:
    run = read_run(folder)
    if not (folder / MODEL).is_dir():
        raise EvaluationError(
            f"{folder} has no model yet: the run is not finished. Finish it first, by the command "
            "that began it."
        )
    return PolicySource(folder, str(folder / MODEL), run.name, run.stage, run.config)


def find_fallback(policies: Sequence[PolicySource], like: str | None) -> PolicySource | None:
    """The run whose settings fill gaps: the one named by --like, else the first that is scored."""
    if like is not None:
        [fallback, *_] = _policies(Path(like))
        return fallback
    return next((each for each in policies if _is_scored(each)), None)


def make_plan(
    policy: PolicySource, options: EvaluationOptions, fallback: PolicySource | None
) -> EvaluationPlan:
    """The options, with gaps filled from the policy's run, else from the fallback."""
    fallback = fallback or policy
    sampling = policy.config.get("sampling") or fallback.config.get("sampling")
    if not sampling and (length := policy.config.get("max_response_tokens")):
        sampling = {"max_new_tokens": length}
    raw = dict(sampling or {}) | without_none(
        temperature=options.temperature, max_new_tokens=options.max_new_tokens
    )
    random_reward_head = False
    scored = policy if _is_scored(policy) else fallback
    environment = _environment(scored, options)
    if options.rewards:
        rewards = tuple((model_folder(path), 1.0) for path in options.rewards)
    else:
        rewards = _rewards(scored)
        random_reward_head = bool(scored.config.get("random_reward_head"))
        check_rewards(scored, options.trust_code)
    if not rewards and environment is None:
        raise EvaluationError(
            f"{policy.folder} names no reward model. Give one with --reward PATH, or name a run "
            "that has one with --like RUN."
        )
    with_reference = [s for s in (policy, fallback) if s.stage and facts_of(s.stage).has_reference]
    against = next(iter(with_reference), None)
    reference = options.reference
    if reference is None and against is not None:
        reference = against.config.get("ref_model") or against.config.get("model")
        reference = reference and located(reference, against)
        if (reference or "").startswith(GIVEN):
            raise EvaluationError(
                f"{against.folder} started from a model given in Python, which KL would be "
                "measured to. Name its folder with --reference PATH, or --reference none."
            )
    return EvaluationPlan(
        data=_data(policy, fallback, options),
        part=policy.config.get("part") or facts_of(policy.stage).part,
        all_rows=bool(options.source or options.path or options.split),
        train=options.train,
        sampling=_valid(Sampling, raw, policy),
        rewards=rewards,
        random_reward_head=random_reward_head,
        reference=None if reference in (None, "", "none") else model_folder(reference),
        reference_seed=int((against or policy).config.get("seed") or 0),
        trust_remote_code=options.trust_code,
        precision=policy.config.get("precision") or "auto",
        environment=environment,
        combine=options.combine or scored.config.get("reward_combine") or "mean",
    )


def _environment(policy: PolicySource, options: EvaluationOptions) -> EnvironmentPlan | None:
    """The one that the user named, else the run's; settings of the run's own are kept."""
    own = str(policy.config.get("environment") or "")
    name = own if options.environment is None else options.environment
    if name in ("", "none"):
        return None
    if options.environment is None:
        check_environment(policy, options.trust_code)
    config = policy.config if own else {}
    settings = without_none(
        max_turns=config.get("max_turns"),
        episode_tokens=config.get("episode_tokens"),
        timeout=config.get("environment_timeout"),
        raw_turns=config.get("raw_turns"),
        options=config.get("environment_options") if name == own else None,
    )
    return EnvironmentPlan(name, **settings, weight=0.0 if options.rewards else 1.0)


def check_environment(policy: PolicySource, trust_code: bool) -> None:
    """Refuse an environment that only the training's own process had, or that must be trusted."""
    name = str(policy.config.get("environment") or "")
    if name.startswith(GIVEN):
        raise EvaluationError(
            f"{policy.folder} was trained in an environment given in Python, which is not in its "
            "folder. Name it with --environment MODULE:CLASS, or --environment none."
        )
    if is_user_environment(name) and not trust_code:
        raise EvaluationError(
            f"{policy.folder} names {name} as its environment, and playing in it runs that code. "
            "Add --trust-code if you trust the folder, or give --environment none."
        )


def is_user_environment(name: str) -> bool:
    """Whether an environment is a class as `module:Class`, and not one that comes along."""
    return ":" in name and name.partition(":")[0] not in SHIPPED_ENVIRONMENTS


def _data(policy: PolicySource, fallback: PolicySource, options: EvaluationOptions) -> DataConfig:
    """The run's own data, or other data, of which all rows count."""
    own, other = policy.config.get("data") or {}, fallback.config.get("data") or {}
    raw = dict(other if not own or (_given(own) and not _given(other)) else own)
    chosen = without_none(source=options.source, path=options.path, split=options.split)
    if chosen:
        if "source" in chosen or "path" in chosen:  # another data set altogether
            raw = {k: v for k, v in raw.items() if k in ("max_prompt_tokens", "too_long", "chat")}
        if options.source == "cnn_dailymail":
            # Most articles are longer than the posts that a policy was trained on.
            raw["too_long"] = "truncate"
            if options.path is None:
                chosen.setdefault("split", "test")
        raw |= {**chosen, "parts": {}, "eval_size": 0, "limit": None}
        raw |= {"eval_split": None, "eval_path": None}
    if _given(raw):
        raise EvaluationError(
            f"{policy.folder} was trained on rows given in Python, which are not in its folder. "
            "Name a file of prompts with --path FILE, or a run on data files with --like RUN."
        )
    if not raw:
        raise EvaluationError(
            f"{policy.folder} is not a run, so it does not say which prompts to use. Name a run "
            "that does with --like RUN, or data with --path FILE."
        )
    return _valid(DataConfig, raw, policy)


def _valid(kind: Any, raw: dict[str, Any], policy: PolicySource) -> Any:
    """Settings that a run wrote down, which were checked when it began."""
    try:
        return kind(**raw)
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"{policy.folder}: {error}") from None


def _rewards(policy: PolicySource) -> tuple[tuple[str, float], ...]:
    """What scored a run, and with which weights."""
    config = policy.config
    named = [config.get("reward_model"), *(config.get("reward_funcs") or ())]
    named = [name for name in named if name]
    weights = config.get("reward_weights") or [1.0] * len(named)
    return tuple((model_folder(located(n, policy)), float(w)) for n, w in zip(named, weights))


def _is_scored(policy: PolicySource) -> bool:
    return bool(_rewards(policy) or policy.config.get("environment"))


def _given(data: Mapping[str, Any]) -> bool:
    return str(data.get("path") or "").startswith(GIVEN)


def check_rewards(policy: PolicySource, trust_code: bool) -> None:
    """Refuse rewards that only the training's own process had, or that the user must trust."""
    functions = [str(name) for name in policy.config.get("reward_funcs") or ()]
    for name in functions:
        if name.startswith(GIVEN):
            raise EvaluationError(
                f"{policy.folder} was scored by a model given in Python, which is not in its "
                "folder. Name it with --reward PATH."
            )
        if name.isidentifier() and not Path(name).exists():
            raise EvaluationError(
                f"{policy.folder} was scored by the function {name}, given in Python. Name it "
                f"with --reward MODULE:{name}."
            )
    for name in (str(policy.config.get("reward_model") or ""), *functions):
        if is_function(name) and name not in SHIPPED_FUNCTIONS and not trust_code:
            raise EvaluationError(
                f"{policy.folder} names {name} as its reward, and scoring with it runs that code. "
                "Add --trust-code if you trust the folder, or name a reward with --reward."
            )


def is_function(name: str) -> bool:
    """Whether a reward is `module:name` rather than a model."""
    return ":" in name and not Path(name).exists()


def located(path: str, policy: PolicySource) -> str:
    """A path of a run's settings; beside the run where both were moved together."""
    if Path(path).exists():
        return path
    beside = str(Path(policy.config.get("output_dir") or ".").parent) + "/"
    run = policy.folder if is_run(policy.folder) else policy.folder.parent  # of its `best/`
    moved = run.parent / path.removeprefix(beside)
    return str(moved) if path.startswith(beside) and moved.exists() else path
