"""A recipe trained at many settings: one command for an ablation, resumable, with a report."""

from marlhf.sweep.plan import Plan, Point, describe_plan, make_plan
from marlhf.sweep.run import Outcome, Sweep, describe, sweep

__all__ = ["Outcome", "Plan", "Point", "Sweep", "describe", "describe_plan", "make_plan", "sweep"]
