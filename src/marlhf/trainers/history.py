"""What transformers' trainers keep of a training, read from its run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerState

from marlhf.runs.jsonl import read_jsonl
from marlhf.runs.layout import METRICS


def trainer_state(folder: Path) -> TrainerState:
    """The steps and evaluations of a run, under the names that transformers gives them."""
    history = [_renamed(row) for row in read_jsonl(folder / METRICS).rows]
    last = max((row["step"] for row in history), default=0)
    return TrainerState(global_step=last, max_steps=last, log_history=history)


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    """`eval/score` is `eval_score` there, and the loss of any method is `loss`."""
    named = {key.replace("eval/", "eval_", 1): x for key, x in row.items() if key != "kind"}
    losses = [x for key, x in row.items() if key.endswith(("/loss", "/policy_loss"))]
    return named | ({"loss": losses[0]} if losses and row["kind"] == "train" else {})


def training_loss(state: TrainerState) -> float:
    """The mean loss of the steps taken; NaN before the first."""
    losses = [row["loss"] for row in state.log_history if "loss" in row]
    return sum(losses) / len(losses) if losses else float("nan")


def last_evaluation(state: TrainerState) -> dict[str, float]:
    """The metrics of the last evaluation on held-out rows; nothing before it."""
    rows = (row for row in reversed(state.log_history) if any("eval_" in key for key in row))
    return {key: x for key, x in next(rows, {}).items() if key.startswith("eval_")}
