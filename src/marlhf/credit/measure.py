"""Which rule's gradient agrees best with the true gradient, from batches of a PPO run.

The run is opened at one of its steps, and nothing in it trains: weights come from a checkpoint,
from the model of a finished run, or from where the run begins. The measure is that of
`credit: auto` (train/credit_choice.py), with more candidates and as many batches as wanted. Every
batch is written down, so a measurement that was interrupted resumes where it stopped.

Axes: E ways to assign credit, M batches, D numbers of a sketch.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlhf.config.build import build, make_segmenter, raise_problems
from marlhf.config.candidates import CANDIDATES, TURN_CANDIDATES, Candidate, parse_candidates
from marlhf.config.settings import SegmenterSpec
from marlhf.core import Agreement, gradient_agreement
from marlhf.environments import scored_row, turn_rewards
from marlhf.errors import MarlhfError
from marlhf.evaluate.eval_plan import PolicySource, check_environment, check_rewards, located
from marlhf.evaluate.text_table import text_table
from marlhf.models.scores import BLOCKS
from marlhf.runs.jsonl import append_jsonl, read_keyed
from marlhf.runs.layout import (
    CHECKPOINTS,
    CREDIT_LINES,
    CRITIC,
    GIVEN,
    MODEL,
    is_run,
    read_score_scale,
)
from marlhf.runs.read import Run, read_run
from marlhf.runtime.checkpoint import checkpoints_in, load_weights, read_checkpoint_state
from marlhf.runtime.distributed import start
from marlhf.runtime.objects import NO_OBJECTS
from marlhf.runtime.progress import Steps, say, warn
from marlhf.runtime.stage import Example, batch_rows
from marlhf.train.credit_choice import (
    ERRORS,
    CreditChooser,
    Measurement,
    Option,
    better,
    decode_sketch,
    encode_sketch,
    options_of,
    unbiased,
)
from marlhf.train.critic_quality import NOTHING, THIRDS, advice, explained_by_thirds
from marlhf.train.experience import Credit, Experience, RolloutScorer, sample_examples
from marlhf.train.held_out import sample_held_out, score_scale
from marlhf.train.ppo import assign_credit, by_each, lambda_one_returns, shape_and_segment
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models, load_models, load_prompts
from marlhf.train.stages import METHODS

MEASURED = (
    *CANDIDATES,
    "token lam=0.5",
    "ngram n=5 lam=0.95 sigma=equal",
    "ngram n=10 lam=0.95",
    "words lam=0.95",
    "sentences lam=0.95 credit=boundary",
    "perplexity lam=0.77",
)
"""What `marlhf credit` compares unless told otherwise; with an environment, turns as well."""


class CreditError(MarlhfError, ValueError):
    """Credit that cannot be measured, with what to do about it."""


@dataclass(frozen=True)
class RunState:
    """Everything that a step of the run would use."""

    folder: Path
    config: PPOConfig
    models: Models
    score: RolloutScorer
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
    score = RolloutScorer(models, config)
    if scale is None:  # what a run that begins with these models will normalise its scores by
        held_out = held_out[: config.eval_prompts]
        scale = score_scale(score(*sample_held_out(held_out, models)).raw_scores)
    score.mean, score.std = scale
    kl_coef = float(saved.get("kl_coef", config.kl_coef))
    return RunState(folder, config, models, score, examples, at_step, kl_coef)


def _ppo_run(folder: Path) -> Run:
    if not folder.is_dir() or not is_run(folder):
        raise CreditError(f"{folder} is not the folder of a run (its `output_dir`).")
    run = read_run(folder)
    method = METHODS.get(run.stage or "")
    if method is None or not issubclass(method.config, PPOConfig):
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
    check_environment(policy, trust_code)
    for key in ("model", "ref_model", "critic_model", "reward_model", "process_model"):
        if raw.get(key):
            raw[key] = located(str(raw[key]), policy)
    raw |= {"engine": "native", "vllm_url": "", "compile": False, "parallel": "data"}
    raw |= {"gold_model": None, "trust_remote_code": trust_code and raw.get("trust_remote_code")}
    problems: list[str] = []
    config = build(PPOConfig, raw, str(run.path), problems)
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


@dataclass(frozen=True)
class Measured:
    """The agreement of every option with the true gradient; the run's own option is the first."""

    options: list[Option]
    agreement: Agreement
    batches: int
    responses: int
    config: PPOConfig
    explained: list[float]
    """Of the returns by the critic, in the first, second and last third of a response: the median
    over the batches."""

    @property
    def best(self) -> int:
        """The option to use: the run's own unless another is ahead by more than noise."""
        return better(self.agreement, 0)

    def rows(self) -> list[dict[str, Any]]:
        """Best first; NaN as None."""
        cosine = self.agreement.known_cosines().tolist()
        rows: list[dict[str, Any]] = []
        for i, option in enumerate(self.options):
            ahead = self.agreement.difference_error(i, 0)
            # More samples of a gradient that points the other way are no progress.
            compares = cosine[0] > 0 and cosine[i] > 0
            rows.append(
                {
                    "name": option.name,
                    "cosine": _finite(cosine[i]),
                    "error": _finite(float(self.agreement.error[i])),
                    "consistency": _finite(float(self.agreement.consistency[i])),
                    "samples": (cosine[0] / cosine[i]) ** 2 if compares else None,
                    "difference": _finite(cosine[i] - cosine[0]),
                    "difference_error": _finite(float(ahead)),
                    "own": i == 0,
                }
            )
        return sorted(rows, key=lambda row: -(row["cosine"] if row["cosine"] is not None else -2))

    def summary(self) -> dict[str, Any]:
        best = self.options[self.best]
        return {
            "batches": self.batches,
            "responses": self.responses,
            "own": self.options[0].name,
            "best": best.name,
            "recipe": recipe_of(best) if self.best else "",
            "explained_variance": self.explained,
            "rows": self.rows(),
        }


def recipe_of(option: Option) -> str:
    """The settings to put into a recipe."""
    return Candidate.parse(option.name).recipe


def measure(state: RunState, rules: tuple[str, ...] = (), *, batches: int = 24, seed: int = 0):
    """Compare ways to assign credit on `batches` batches of the size that the run trains with."""
    if batches < 3:
        raise CreditError(f"--batches must be at least 3 to compare anything; got {batches}.")
    turns = TURN_CANDIDATES if state.config.environment else ()
    options = options_of(state.config, parse_candidates(rules or (*MEASURED, *turns)))
    state.score.provide_for(option.config.segmenter for option in options)
    configs = [*(option.config for option in options), unbiased(options[0].config)]
    size = state.config.batch_size
    file = state.folder / CREDIT_LINES
    setting = _setting(state, [o.name for o in options], seed)
    lines = read_keyed(file, setting)
    done = {key: decode_sketch(line["sketch"]) for key, line in lines.items()}
    left = [n for n in range(batches) if str(n) not in done]
    say(
        f"{state.folder.name}, step {state.step}: {len(options)} ways to assign credit on "
        f"{batches} batches of {size} responses"
        + (f", {batches - len(left)} of them measured before" if len(left) < batches else "")
    )
    with Steps("credit", batches, batches - len(left)) as bar:
        for count, number in enumerate(left, batches - len(left) + 1):
            experience, of_batch, explained = _batch(state, configs, number, seed)
            done[str(number)] = of_batch
            line = {"setting": setting, "key": str(number), "sketch": encode_sketch(of_batch)}
            lines[str(number)] = line | {"explained": explained}
            append_jsonl(file, [lines[str(number)]])
            bar.advance(count, {"score": float(experience.scores.mean())})
    gradients = torch.stack([done[str(n)] for n in range(batches)], dim=1).double()
    agreement = gradient_agreement(gradients[:-1], gradients[-1], blocks=BLOCKS)
    if not bool(agreement.known_cosines()[0].isfinite()):
        warn(
            "the batches are too few, or too noisy, to tell the true gradient from noise. "
            f"Raise --batches, which is {batches}."
        )
    explained = [lines[str(n)]["explained"] for n in range(batches)]
    medians = [statistics.median(third) for third in zip(*explained)]
    return Measured(options, agreement, batches, batches * size, state.config, medians)


def _batch(
    state: RunState, configs: list[Any], number: int, seed: int
) -> tuple[Experience, Tensor, list[float]]:
    """One batch's gradient by each way, and by the unbiased one: [E + 1, D]; and what the critic
    explains of its returns, by thirds of a response."""
    models = state.models
    experience, examples = sample_batch(state, number, seed)
    if number == 0:
        _check_reward(state, experience, examples)
    shuffler = torch.Generator().manual_seed(seed * 1_000_003 + number)
    credit = credit_of(state, experience, shuffler)
    advantages = by_each(experience, credit, models, shuffler, configs)
    measurement = Measurement(advantages, [seed] * BLOCKS)
    part = measurement.begin()
    for micro in experience.micro_batches(models):
        models.logprobs(models.policy, micro.sequences, part.watch())
        part.add(micro)
    part.end()
    returns = lambda_one_returns(credit.rewards, credit.segments, state.config)
    thirds = explained_by_thirds(credit.values, returns, experience.mask)
    gradients = measurement.over_ranks(models.world).cpu()
    return experience, gradients, [float(thirds[name]) for name in THIRDS]


def credit_of(state: RunState, experience: Experience, shuffler: torch.Generator) -> Credit:
    """Credit by the run's own settings."""
    models, config = state.models, state.config
    rewards, segments = shape_and_segment(experience, models, config, state.kl_coef, shuffler)
    return assign_credit(rewards, experience.critic_values(models), segments, config)


def sample_batch(
    state: RunState, number: int, seed: int, most: int | None = None
) -> tuple[Experience, list[Example]]:
    """A batch that training could meet next, or the first `most` rows of it."""
    size, run_seed = state.config.batch_size, state.config.seed
    rows = batch_rows(state.step + number, len(state.examples), size, run_seed)
    examples = [state.examples[i] for i in rows[:most]]
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    seeds = torch.randint(2**62, (len(rows),), generator=generator).tolist()
    examples, rollout = sample_examples(examples, state.models, seeds[:most])
    return state.score(examples, rollout), examples


def _check_reward(state: RunState, experience: Experience, examples: list[Example]) -> None:
    responses = experience.response_tokens()
    rows = [scored_row(e.row, e.episode) for e in examples]
    again = state.models.reward([e.prompt for e in examples], responses, rows)
    again = again if again.ndim == 1 else again.sum(dim=1)
    if experience.episodes is not None:
        again = again + turn_rewards(experience.episodes, experience.mask).sum(dim=1)
    if not torch.allclose(again, experience.raw_scores, rtol=1e-3, atol=1e-3):
        warn(
            "the reward gives the same responses other scores the second time. Its noise counts "
            "as noise of every rule, so all cosines are lower than they could be."
        )


def table(measured: Measured) -> str:
    """For the terminal: best first."""
    rows = [
        [
            row["name"] + (" (this run)" if row["own"] else ""),
            _show(row["cosine"]),
            _show(row["error"]),
            _show(row["consistency"]),
            _show(row["samples"], "x"),
        ]
        for row in measured.rows()
    ]
    return text_table(["credit by", "cosine", "+-", "consistency", "samples needed"], rows)


def critic_verdict(measured: Measured) -> str:
    """What the critic knows, in a sentence or two."""
    shown = ", ".join(f"{each:.2f}" for each in measured.explained)
    said = (
        f"The critic explains {shown} of the returns in the first, second and last third of a "
        "response."
    )
    nothing = max(measured.explained) < NOTHING
    return f"{said} That is nothing: {_lower(advice(measured.config))}" if nothing else said


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def verdict(measured: Measured) -> str:
    """What to do about it, in a sentence."""
    own, best = measured.options[0], measured.options[measured.best]
    cosine = measured.agreement.known_cosines()
    own_cosine = float(cosine[0])
    if not math.isfinite(own_cosine):
        return f"The batches are too few, or too noisy, to judge {own.name}. Raise --batches."
    away = f"whose gradient does not point along the true one (cosine {own_cosine:.2f})"
    if best is own:
        nothing = f"Nothing is ahead of {own.name} by more than {ERRORS:g} standard errors"
        if own_cosine > 0:
            return f"{nothing}: keep it."
        return f"{nothing}, {away}: more steps may gain nothing. Raise --batches to be sure."
    if own_cosine <= 0:
        return (
            f"{best.name} is ahead of {own.name}, {away}: more steps with it may do harm. In the "
            f"recipe: {recipe_of(best)}"
        )
    gain = (float(cosine[measured.best]) / own_cosine) ** 2
    return (
        f"{best.name} is ahead of {own.name}: about {gain:.2g} times the progress from the same "
        f"samples. In the recipe: {recipe_of(best)}"
    )


def _show(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _setting(state: RunState, names: list[str], seed: int) -> str:
    """Changes with everything that decides a batch's numbers."""
    which = [BLOCKS, THIRDS, state.step, state.config.batch_size, state.kl_coef, names, seed]
    return hashlib.sha256(json.dumps(which).encode()).hexdigest()[:12]
