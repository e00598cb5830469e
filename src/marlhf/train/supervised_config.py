"""The settings of what learns from given data: fine-tuning, reward and process reward models."""

from __future__ import annotations

from dataclasses import dataclass

from marlhf.config.stage import Sampling, StageConfig
from marlhf.errors import SettingError
from marlhf.fields import check_settings, setting


@dataclass(frozen=True, kw_only=True)
class SFTConfig(StageConfig):
    """Settings of supervised fine-tuning. The paper, Gemma-2B: batch 512, 3 epochs, 5e-5.

    >>> SFTConfig(model="tiny", output_dir="runs/sft", num_steps=100).learning_rate
    5e-05
    """

    learning_rate: float = 5e-5
    """Peak learning rate of AdamW. The paper: 5e-5 for 2B, 2e-5 for 7B, 5e-6 for 27B."""
    max_response_tokens: int = setting(512, above=0)
    """Rows with longer responses are left out: cut short they would teach never to end."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(StageConfig):
    """Settings of the reward model. The paper, Gemma-2B: batch 64, 1 epoch, 1e-5.

    >>> RewardConfig(model="tiny", output_dir="runs/reward").batch_size
    64
    """

    max_response_tokens: int = setting(512, above=0)
    """Pairs with a longer response are left out."""
    center_coef: float | None = setting(None, least=0)
    """Pull scores towards zero, which the loss itself leaves free. 0.01 is usual, and set where
    there are several `members`, whose scores are comparable only so; otherwise 0."""
    label_smoothing: float = setting(0.0, least=0)
    """Share of pairs believed to be labelled the wrong way round."""
    members: int = setting(1, least=1, on_card=True)
    """Members of an ensemble, each trained on pairs drawn anew with replacement: heads, or with
    `lora` an adapter and a head each. Where they disagree, the reward is a guess: see
    `reward_combine`."""
    length_head: bool = setting(False, on_card=True)
    """A second head takes up what length explains (ODIN), and is dropped after training."""

    columns = ("prompt", "chosen", "rejected")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing >= 0.5:
            raise SettingError(
                "label_smoothing must be below 0.5, where pairs would teach nothing; "
                f"got {self.label_smoothing}."
            )
        if self.length_head and self.members > 1:
            raise SettingError(
                "length_head trains one reward head, and members several. Leave out one of them."
            )
        if self.length_head and self.parallel == "fsdp":
            raise SettingError(
                "length_head compares its two heads, which parallel: fsdp shards. Set parallel: "
                "data, with lora where memory is short."
            )
        if self.members > 1 and self.lora is not None and self.lora.merge:
            raise SettingError(
                "With lora each of the members has an adapter, and one model cannot have them all "
                "merged in. Set lora.merge: false."
            )

    @property
    def centering(self) -> float:
        """`center_coef`, or what it is where none is set."""
        if self.center_coef is not None:
            return self.center_coef
        return 0.01 if self.members > 1 else 0.0


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
