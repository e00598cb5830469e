"""A PPO run at one of its steps, opened to be measured: nothing in it trains.

Weights come from a checkpoint, from the model of a finished run, or from where the run begins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marlhf.config.build import build, make_segmenter, raise_problems
from marlhf.config.settings import SegmenterSpec
from marlhf.errors import MarlhfError
from marlhf.evaluate.eval_plan import PolicySource, check_rewards, located
from marlhf.runs.layout import CHECKPOINTS, CRITIC, GIVEN, MODEL, is_run, read_score_scale
from marlhf.runs.read import Run, read_run
from marlhf.runtime.checkpoint import checkpoints_in, load_weights, read_checkpoint_state
from marlhf.runtime.distributed import start
from marlhf.runtime.objects import NO_OBJECTS
from marlhf.runtime.stage import Example
from marlhf.train.credit_choice import CreditChooser
from marlhf.train.experience import Scorer
from marlhf.train.held_out import sample_held_out, score_scale
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models, load_models, load_prompts


class CreditError(MarlhfError, ValueError):
    """Credit that cannot be measured, with what to do about it."""


@dataclass(frozen=True)
class RunState:
    """Everything that a step of the run would use."""

    folder: Path
    config: PPOConfig
    models: Models
    score: Scorer
    examples: list[Example]
    step: int
    kl_coef: float


def open_state(
    folder: Path, *, step: int | None = None, device: str = "auto", trust_code: bool = False
) -> RunState:
    """A run at a step; at its latest unless given."""
    run = _ppo_run(folder)
    config = _config(run, trust_code)
    where, at_step = _weights(run, step)
    saved: dict[str, Any] = {}
    if where is not None and where.name != MODEL:
        saved = read_checkpoint_state(where)
    elif where is not None:
        critic = str(folder / CRITIC)
        reference = config.ref_model or config.model
        config = replace(config, model=str(where), ref_model=reference, critic_model=critic)
        saved = _last_state(folder)
    scale = read_score_scale(folder) if config.normalize_scores else (0.0, 1.0)
    if scale is None and where is not None:
        raise CreditError(
            f"The scores of {folder} are normalised (normalize_scores), and nothing there says by "
            f"what at step {at_step}. Measure it at a step that was saved, or at step 0."
        )
    config = _chosen(config, saved)
    world = start(device)
    models = load_models(config, NO_OBJECTS, world, critic=True)
    if where is not None and where.name != MODEL:
        load_weights(where, {"policy": models.policy, "critic": models.critic}, world)
    for model in (models.policy, models.critic):
        model.requires_grad_(False).eval()
    models.engine.update_weights(models.policy)
    examples, held_out = load_prompts(config, models, NO_OBJECTS)
    if len(examples) < config.batch_size:
        raise CreditError(
            f"{folder} has {len(examples)} prompts, fewer than a batch of {config.batch_size}."
        )
    score = Scorer(models, config)
    if scale is None:  # what a run that begins with these models will normalise its scores by
        held_out = held_out[: config.eval_prompts]
        scale = score_scale(score(held_out, sample_held_out(held_out, models)).raw_scores)
    score.mean, score.std = scale
    kl_coef = float(saved.get("kl_coef", config.kl_coef))
    return RunState(folder, config, models, score, examples, at_step, kl_coef)


def _ppo_run(folder: Path) -> Run:
    if not folder.is_dir() or not is_run(folder):
        raise CreditError(f"{folder} is not the folder of a run (its `output_dir`).")
    run = read_run(folder)
    if run.stage != "ppo":
        raise CreditError(
            f"{folder} is a run of {run.stage or 'an unknown stage'}, which has no critic: credit "
            "is measured for PPO. Give the folder of a PPO run."
        )
    if run.config.get("values") == "monte_carlo":
        raise CreditError(
            f"{folder} takes its values from continuations (values: monte_carlo) and has no "
            "critic to measure. Give a run with values: critic."
        )
    return run


def _config(run: Run, trust_code: bool) -> PPOConfig:
    """The run's settings, with code that its folder names only where the user trusts it."""
    raw, policy = dict(run.config), PolicySource(run.path, "", run.name, run.stage, run.config)
    given = [key for key in ("model", "ref_model", "critic_model") if raw.get(key) == GIVEN]
    if given or str((raw.get("data") or {}).get("path") or "").startswith(GIVEN):
        raise CreditError(
            f"{run.path} was trained on {', '.join(given) or 'rows'} given in Python, which its "
            "folder does not hold. Measure a run that names files."
        )
    check_rewards(policy, trust_code)
    for key in ("model", "ref_model", "critic_model", "reward_model"):
        if raw.get(key):
            raw[key] = located(str(raw[key]), policy)
    raw |= {"engine": "native", "vllm_url": "", "compile": False, "parallel": "data"}
    raw |= {"gold_model": None, "trust_remote_code": trust_code and raw.get("trust_remote_code")}
    problems: list[str] = []
    config = build(PPOConfig, raw, str(run.path), problems, rules=True)
    raise_problems(problems)
    rule: Any = config.segmenter
    if isinstance(rule, SegmenterSpec) and ":" in rule.type and not trust_code:
        raise CreditError(
            f"{run.path} names {rule.type} as its segmenter, which is code. Add --trust-code if "
            "you trust the folder."
        )
    config = make_segmenter(config, "segmenter", problems)
    raise_problems(problems)
    return config


def _weights(run: Run, step: int | None) -> tuple[Path | None, int]:
    """A checkpoint, the finished model, or None for where the run begins; and the step."""
    saved = {int(p.name.removeprefix("step-")): p for p in checkpoints_in(run.path / CHECKPOINTS)}
    final = run.path / MODEL
    last = run.last_step or 0
    if (run.path / CRITIC).is_dir() and final.is_dir() and last not in saved:
        saved[last] = final
    if step is None:
        step = max(saved, default=0)
    if step in saved:
        return saved[step], step
    if step == 0:
        return None, 0
    there = ", ".join(map(str, sorted({0, *saved})))
    raise CreditError(f"{run.path} has nothing saved of step {step}. There is {there}.")


def _last_state(folder: Path) -> dict[str, Any]:
    """The state of the newest checkpoint, for what does not change in a run."""
    for checkpoint in reversed(checkpoints_in(folder / CHECKPOINTS)):
        state = read_checkpoint_state(checkpoint)
        return {key: state[key] for key in ("kl_coef", "credit") if key in state}
    return {}


def _chosen(config: PPOConfig, saved: dict[str, Any]) -> PPOConfig:
    """With `credit: auto`, what it had chosen."""
    if config.credit != "auto":
        return config
    chooser = CreditChooser(config)
    if "credit" in saved:
        chooser.load_state(saved["credit"])
    return chooser.config
