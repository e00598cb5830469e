"""What `marlhf doctor RECIPE` says: how much of a GPU's memory each stage takes, and what helps."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from marlhf.evaluate.results import text_table
from marlhf.runtime.memory_plan import GIB, plan_run, remedies, size_named
from marlhf.train.preflight import first_model
from marlhf.train.recipe import ConfigError, Stage, check_recipe, stage_of

CARDS = (16, 24, 48, 80, 141)
"""GB, where neither the command nor this machine names one."""
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"shared_base": True}},
    "qlora": {"lora": {"shared_base": True, "quantize": "4bit"}},
}
EXAMPLE = {
    "output_dir": "runs/memory",
    "data": {"source": "toy", "max_prompt_tokens": 256},
    "sampling": {"max_new_tokens": 256},
}
"""What `--model` is asked about, where no override says otherwise."""


def planned_stages(
    recipe: str | None, overrides: list[str], model: str | None, train: str
) -> list[Stage]:
    """The stages of a recipe with models that exist, or PPO with one model in all roles."""
    if recipe is None:
        if train not in WAYS:
            raise ConfigError(f"--train must be one of {', '.join(WAYS)}; got {train}.")
        raw = copy.deepcopy(EXAMPLE) | WAYS[train] | {"model": model, "reward_model": model}
        return [stage_of("ppo", raw, overrides)]
    stages = check_recipe(recipe, overrides)
    made_by = {str(Path(s.config.output_dir) / "model"): s for s in stages}
    found: list[Stage] = []
    for stage in stages:
        names = ("model", "reward_model", "critic_model", "ref_model")
        named = {name: getattr(stage.config, name, None) for name in names}
        real = {name: first_model(x, made_by) for name, x in named.items() if x}
        found.append(replace(stage, config=replace(stage.config, **real)))
    return found


def explain_memory(stages: Sequence[Stage], gpu: float | None) -> Iterator[str]:
    """Each stage's parts and peak, whether it fits, and the settings that would make it fit."""
    card, name = _card(gpu)
    for stage in stages:
        config, size = stage.config, size_named(stage.config.model)
        fitting = None if card else smallest_card(config)
        plan = plan_run(config, card or card_bytes(fitting or CARDS[-1]))
        yield (
            f"{stage.name}: {config.model}, {size.total / 1e9:.2f}B parameters, {plan.rows} rows "
            f"of up to {plan.length} tokens, {plan.tokens} tokens in a pass"
        )
        rows = [[f"  {part}", _gib(x)] for part, x in plan.kept.items() if x >= 0.05 * GIB]
        rows += [[f"  for the time of {part}", _gib(x)] for part, x in plan.passes.items()]
        rows.append(["  at most", _gib(plan.peak)])
        yield text_table(["  what stays, and what comes and goes", "GiB"], rows)
        if card is None and fitting:
            yield f"  fits a GPU of {fitting} GB"
            continue
        where = card or card_bytes(CARDS[-1])
        fits = plan.fits(where)
        yield f"  {'fits' if fits else 'does not fit'} {name or f'a GPU of {CARDS[-1]} GB'}"
        if not fits:
            yield from _advice(config, where)


def _advice(config: Any, card: float) -> Iterator[str]:
    fits = False
    for changes, plan in remedies(config, card):
        fits = plan.fits(card)
        yield f"  {_gib(plan.peak):>6} GiB, {'fits' if fits else 'no'}: {changes}"
    if not fits:
        yield (
            "  Nothing else helps but shorter sampling.max_new_tokens and data.max_prompt_tokens, "
            "a smaller batch_size, a smaller model, or several GPUs with parallel: fsdp."
        )


def _card(gpu: float | None) -> tuple[float | None, str]:
    """The bytes of the card in question and what to call it; of the one here, if none is named."""
    if gpu is not None:
        return card_bytes(gpu), f"a GPU of {gpu:g} GB"
    if not torch.cuda.is_available():
        return None, ""
    properties = torch.cuda.get_device_properties(0)
    return float(properties.total_memory), properties.name


def smallest_card(config: Any) -> float | None:
    """The smallest of the usual cards that a run fits."""
    return next((x for x in CARDS if plan_run(config, card_bytes(x)).fits(card_bytes(x))), None)


def card_bytes(gigabytes: float) -> float:
    """Of a card that is sold by this number: drivers keep some."""
    return gigabytes * 0.99 * GIB


def _gib(x: float) -> str:
    return f"{x / GIB:.1f}"
