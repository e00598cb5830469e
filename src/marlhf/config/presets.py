"""Published methods by name: `preset: vineppo` sets what makes a method, and nothing else.

A preset is a few settings beneath those of a stage, which override them: see `presets.yaml`.
Estimators are tested against the papers' equations. Numbers were compared with the sources that
`same` names. Those of sae and vc-ppo could not be; gamma and lam of turn-ppo only with summaries of
the paper.

Loads without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from marlhf.fields import read_table


@dataclass(frozen=True)
class Preset:
    """A method of a paper, in settings of `marlhf ppo`, or of `marlhf rloo` and `marlhf grpo`.

    >>> PRESETS["vineppo"].needs_critic, PRESETS["vapo"].needs_critic
    (False, True)
    """

    name: str
    kind: str
    """The stage it is for: ppo, or rloo and grpo."""
    paper: str
    arxiv: str
    cost: str
    """Sampled tokens per prompt, where PPO samples one response."""
    settings: Mapping[str, Any]
    same: str
    """What is as in the paper."""
    differs: str
    """What is not."""

    @property
    def needs_critic(self) -> bool:
        return self.kind == "ppo" and self.settings.get("values", "critic") == "critic"


PRESETS = {name: Preset(name, **facts) for name, facts in read_table("presets").items()}
"""Every preset by its name."""


@cache
def presets_of(kind: str) -> dict[str, dict[str, Any]]:
    """The settings of each preset for a kind of stage."""
    return {name: dict(p.settings) for name, p in PRESETS.items() if p.kind == kind}
