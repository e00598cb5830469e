"""The settings of process reward modelling."""

from __future__ import annotations

from dataclasses import dataclass

from marlhf.config.model import Sampling
from marlhf.config.stage import StageConfig
from marlhf.errors import SettingError
from marlhf.fields import check_settings, setting


@dataclass(frozen=True)
class LabelsFrom:
    """Label the steps of sampled responses by what becomes of them (Math-Shepherd).

    >>> LabelsFrom(policy="runs/sft/model", reward_funcs=("marlhf.reward.sums:solved",)).hard
    False
    """

    policy: str = ""
    """What writes and continues responses: a folder, a hub name, or `@stage`."""
    reward_funcs: tuple[str, ...] = ()
    """Functions as `module:name` that verify: a response is right where their sum is above .5."""
    code: tuple[str, ...] = ()
    """Modules of your own that `reward_funcs` names."""
    responses: int = setting(2048, least=1)
    """Responses to label, to all prompts in turn; a tenth as many to held-out prompts."""
    continuations: int = setting(8, least=0)
    """Continuations of each step but the last, whose label is that of its response. 0 where
    `reward_funcs` verify steps: they return one number per line, and that is its label."""
    hard: bool = False
    """Label a step good where any continuation is right; else with the share that is."""
    sampling: Sampling = setting(factory=Sampling)
    """How responses and continuations are drawn."""

    def __post_init__(self) -> None:
        check_settings(self, "labels_from.")
        if not self.policy or not self.reward_funcs:
            raise SettingError(
                "labels_from needs `policy`, the model that continues responses, and "
                "`reward_funcs`, the functions that verify them."
            )


@dataclass(frozen=True, kw_only=True)
class PRMConfig(StageConfig):
    """Settings of the process reward model.

    >>> PRMConfig(model="tiny", output_dir="runs/prm").columns
    ('prompt', 'completions', 'labels')
    """

    step_separator: str = setting("\n", on_card=True)
    """What stands between the steps of a response. The model keeps it: where it scores responses,
    they are cut by it."""
    max_response_tokens: int = setting(512, above=0)
    """Rows with a longer response are left out."""
    labels_from: LabelsFrom | None = None
    """Sample responses and label their steps before training; the data then needs only prompts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.step_separator:
            raise SettingError('step_separator must not be empty. TRL\'s is a line break, "\\n".')
        if self.lora is not None and not self.lora.merge:
            raise SettingError(
                "lora.merge: false saves an adapter alone, which cannot say how a process model "
                "cuts steps. Leave merge out."
            )

    @property
    def columns(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What a row of its data must have."""
        steps = () if self.labels_from is not None else ("completions", "labels")
        return ("prompt", *steps)
