"""What readers of run folders must know about a stage, without importing any training code.

Reinforcement learning is the rule, the other stages are listed: a new RL method needs no line here.
"""

from __future__ import annotations

from dataclasses import dataclass


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


NOT_RL = {
    "sft": StageFacts("supervised fine-tuning", samples=False, has_reference=False, part="sft"),
    "reward": StageFacts(
        "reward modelling",
        samples=False,
        has_reference=False,
        writes_text=False,
        part="reward",
    ),
    "prm": StageFacts(
        "process reward modelling",
        samples=False,
        has_reference=False,
        writes_text=False,
        part="reward",
    ),
    "label": StageFacts("labelling", samples=False, has_reference=False, writes_text=False),
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
