"""A recipe trained at many settings: one command for an ablation, resumable, with a report."""

from marlhf.sweep.plan import Plan, SweepPoint, describe_plan, make_plan
from marlhf.sweep.run import SweepResult, TrainingOutcome, describe, sweep

__all__ = [
    "Plan",
    "SweepPoint",
    "SweepResult",
    "TrainingOutcome",
    "describe",
    "describe_plan",
    "make_plan",
    "sweep",
]
