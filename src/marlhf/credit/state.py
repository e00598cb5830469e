"""A run at one of its steps: everything that its next step would use, with nothing that trains.

Weights come from a checkpoint, from the model of a finished run, or from where the run begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from marlhf.config.build import build, make_segmenter, raise_problems
from marlhf.config.settings import SegmenterSpec
from marlhf.errors import MarlhfError
from marlhf.evaluate.eval_plan import PolicySource, check_environment, check_rewards, located
from marlhf.runs.atomic import append_jsonl, read_keyed
from marlhf.runs.layout import CHECKPOINTS, CRITIC, GIVEN, MODEL, is_run, read_score_scale
from marlhf.runs.read import Run, read_run
from marlhf.runtime.checkpoint import list_checkpoints, load_weights, read_checkpoint_state
from marlhf.runtime.distributed import start
from marlhf.runtime.memory_plan import checkpoints_activations
from marlhf.runtime.progress import Steps, say
from marlhf.runtime.stage import NO_OBJECTS, Example, batch_rows
from marlhf.train.credit_choice import CreditChooser
from marlhf.train.experience import Experience, RolloutScorer
from marlhf.train.held_out import sample_held_out, score_scale
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models, load_models, load_prompts
from marlhf.train.rloo_config import RLOOConfig
from marlhf.train.sampling import sample_examples
from marlhf.train.stages import METHODS


class CreditError(MarlhfError, ValueError):
    """Credit that cannot be measured, with what to do about it."""


@dataclass(frozen=True)
class RunState:
    """Everything that a step of the run would use."""

    folder: Path
    config: PPOConfig | RLOOConfig
    models: Models
    score: RolloutScorer
    examples: list[Example]
    step: int
    kl_coef: float

    @property
    def ppo(self) -> PPOConfig:
        assert isinstance(self.config, PPOConfig)
        return self.config


def open_state(
    folder: Path,
    *,
    step: int | None = None,
    device: str = "auto",
    trust_code: bool = False,
    without_critic: bool = False,
) -> RunState:
    """A run at a step; at its latest unless given. Runs `without_critic` are refused otherwise."""
    run = _run(folder, without_critic)
    config = _config(run, trust_code)
    where, at_step = _weights(run, step, _has_critic(config))
    saved: dict[str, Any] = {}
    if where is not None and where.name != MODEL:
        saved = read_checkpoint_state(where)
    elif where is not None:
        config = replace(config, model=str(where), ref_model=config.ref_model or config.model)
        if config.lora is not None and config.lora.merge:
            config = replace(config, lora=None)  # the folders have whole models
        if _has_critic(config):
            config = replace(config, critic_model=str(folder / CRITIC))
        saved = _last_state(folder)
    scale = read_score_scale(folder) if config.normalize_scores else (0.0, 1.0)
    if scale is None and where is not None:
        raise CreditError(
            f"The scores of {folder} are normalised (normalize_scores), and nothing there says by "
            f"what at step {at_step}. Measure it at a step that was saved, or at step 0."
        )
    config = _chosen(config, saved)
    world = start(device)
    checkpointing = checkpoints_activations(config, world.device)
    config = replace(config, gradient_checkpointing=checkpointing)
    models = load_models(config, NO_OBJECTS, world, critic=_has_critic(config))
    trained = {"policy": models.policy}
    if _has_critic(config):
        trained["critic"] = models.critic
    if where is not None and where.name != MODEL:
        load_weights(where, trained, world)
    for model in trained.values():
        model.requires_grad_(False).eval()
    models.engine.update_weights(models.policy)
    examples, held_out = load_prompts(config, models, NO_OBJECTS)
    if len(examples) < config.batch_size:
        raise CreditError(
            f"{folder} has {len(examples)} prompts, fewer than a batch of {config.batch_size}."
        )
    score = RolloutScorer(models, config)
    if scale is None:  # what a run that begins with these models will normalise its scores by
        held_out = held_out[: config.eval_prompts]
        scale = score_scale(score(*sample_held_out(held_out, models)).raw_scores)
    score.mean, score.std = scale
    kl_coef = float(saved.get("kl_coef", config.kl_coef))
    return RunState(folder, config, models, score, examples, at_step, kl_coef)


def _has_critic(config: PPOConfig | RLOOConfig) -> bool:
    return isinstance(config, PPOConfig) and config.has_critic


def _run(folder: Path, without_critic: bool) -> Run:
    if not folder.is_dir() or not is_run(folder):
        raise CreditError(f"{folder} is not the folder of a run (its `output_dir`).")
    run = read_run(folder)
    method, stage = METHODS.get(run.stage or ""), run.stage or "an unknown stage"
    if without_critic:
        if method is None or not issubclass(method.config, (PPOConfig, RLOOConfig)):
            raise CreditError(
                f"{folder} is a run of {stage}: headroom is measured for PPO, RLOO and GRPO. Give "
                "the folder of such a run."
            )
        return run
    if method is None or not issubclass(method.config, PPOConfig):
        raise CreditError(
            f"{folder} is a run of {stage}, which has no critic: credit is measured for PPO. Give "
            "the folder of a PPO run, or add --headroom, which needs none."
        )
    if (values := run.config.get("values", "critic")) != "critic":
        raise CreditError(
            f"{folder} was trained with values: {values} and has no critic to measure. Give a run "
            "with values: critic, or add --headroom."
        )
    return run


def _config(run: Run, trust_code: bool) -> PPOConfig | RLOOConfig:
    """The run's settings, with code that its folder names only where the user trusts it."""
    raw, policy = dict(run.config), PolicySource(run.path, "", run.name, run.stage, run.config)
    given = [key for key in ("model", "ref_model", "critic_model") if raw.get(key) == GIVEN]
    if given or str((raw.get("data") or {}).get("path") or "").startswith(GIVEN):
        raise CreditError(
            f"{run.path} was trained on {', '.join(given) or 'rows'} given in Python, which its "
            "folder does not hold. Measure a run that names files."
        )
    check_rewards(policy, trust_code)
    check_environment(policy, trust_code)
    for key in ("model", "ref_model", "critic_model", "reward_model", "process_model"):
        if raw.get(key):
            raw[key] = located(str(raw[key]), policy)
    raw |= {"engine": "native", "vllm_url": "", "compile": False, "parallel": "data"}
    raw |= {"gold_model": None, "trust_remote_code": trust_code and raw.get("trust_remote_code")}
    problems: list[str] = []
    method: Any = METHODS[str(run.stage)]
    config = build(method.config, raw, str(run.path), problems)
    raise_problems(problems)
    rule: Any = config.segmenter
    if isinstance(rule, SegmenterSpec) and rule.is_user_code and not trust_code:
        raise CreditError(
            f"{run.path} names {rule.type} as its segmenter, which is code. Add --trust-code if "
            "you trust the folder."
        )
    config = make_segmenter(config, "segmenter", problems)
    raise_problems(problems)
    return config


def _weights(run: Run, step: int | None, needs_critic: bool) -> tuple[Path | None, int]:
    """A checkpoint, the finished model, or None for where the run begins; and the step."""
    saved = {int(p.name.removeprefix("step-")): p for p in list_checkpoints(run.path / CHECKPOINTS)}
    final = run.path / MODEL
    last = run.last_step or 0
    critic = (run.path / CRITIC).is_dir() or not needs_critic
    if critic and final.is_dir() and last not in saved:
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
    for checkpoint in reversed(list_checkpoints(folder / CHECKPOINTS)):
        state = read_checkpoint_state(checkpoint)
        return {key: state[key] for key in ("kl_coef", "credit") if key in state}
    return {}


def _chosen(config: PPOConfig | RLOOConfig, saved: dict[str, Any]) -> PPOConfig | RLOOConfig:
    """With `credit: auto`, what it had chosen."""
    if isinstance(config, RLOOConfig) or config.credit != "auto":
        return config
    chooser = CreditChooser(config)
    if "credit" in saved:
        chooser.load_state(saved["credit"])
    return chooser.config


def sample_batch(
    state: RunState, number: int, seed: int, most: int | None = None, group: int = 1
) -> tuple[Experience, list[Example]]:
    """A batch that training could meet next, or the first `most` rows of it.

    With a `group`, so many responses to each of its first prompts.
    """
    prompts, config = state.config.batch_size, state.config
    size = prompts * (config.num_samples if isinstance(config, PPOConfig) else 1)
    rows = batch_rows(state.step + number, len(state.examples), prompts, config.seed)
    examples = [state.examples[rows[i // group]] for i in range(size)][:most]
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    seeds = torch.randint(2**62, (size,), generator=generator).tolist()[:most]
    examples, rollout = sample_examples(examples, state.models, seeds, group)
    return state.score(examples, rollout), examples


def measured_parts(
    file: Path,
    setting: str,
    keys: Sequence[Any],
    measure: Callable[[Any], tuple[dict[str, Any], float]],
    name: str,
    intro: Callable[[int], str],
) -> list[dict[str, Any]]:
    """A line of `file` for each key: one written before, or what `measure` gives with its score.

    `intro` says what is measured, from the number of those that were.
    """
    lines = read_keyed(file, setting)
    left = [key for key in keys if str(key) not in lines]
    before = len(keys) - len(left)
    say(intro(before))
    with Steps(name, len(keys), before) as bar:
        for done, key in enumerate(left, before + 1):
            line, score = measure(key)
            lines[str(key)] = {"setting": setting, "key": str(key)} | line
            append_jsonl(file, [lines[str(key)]])
            bar.advance(done, {"score": score})
    return [lines[str(key)] for key in keys]


def shown(value: float | None, unit: str = "") -> str:
    """For tables; a dash for what is not known."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}{unit}"
