"""Settings that every stage has, and of models: precision, LoRA, how responses are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from marlhf.config.settings import hint_for
from marlhf.data import DataConfig
from marlhf.errors import SettingError, UnknownNameError
from marlhf.fields import check_settings, setting

Precision = Literal["auto", "float32", "bfloat16"]
Parallel = Literal["data", "fsdp"]
Schedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adamw_8bit", "adafactor"]

Config = TypeVar("Config", bound="StageConfig")
DEFAULT_DATA = DataConfig(source="toy")
GIVEN = "(given in Python)"
"""How the settings of a run name a model or data that were Python objects."""
AUTO_TOKENS = 16384
"""What `token_budget: auto` begins with."""


@dataclass(frozen=True)
class LoRA:
    """Train adapters of low rank instead of the model.

    There is no dropout: PPO compares the log-probs of two passes.

    >>> LoRA(r=8, target_modules=("q_proj", "v_proj")).alpha
    32
    """

    r: int = setting(16, least=1)
    """Rank of the adapters."""
    alpha: float = setting(32, above=0)
    """Their output is scaled by alpha / r."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Which layers have one: `all-linear`, or names such as [q_proj, v_proj]."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead, which suits high ranks."""
    shared_base: bool = False
    """PPO: one base for policy, reference, critic and an adapter-form reward model."""
    quantize: Literal["none", "4bit", "8bit"] = "none"
    """Hold the frozen base in fewer bits, by bitsandbytes (QLoRA)."""
    merge: bool = True
    """Save a plain model with the adapter merged in, and the adapter alone beside it in
    `adapter/`. Otherwise the adapter alone, which needs peft and the base to load."""

    def __post_init__(self) -> None:
        check_settings(self, "lora.")
        if not self.target_modules:
            raise SettingError("lora.target_modules names no layer. Leave it out for all-linear.")


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    >>> Sampling(max_new_tokens=64, temperature=0.8, top_k=50).truncated
    True
    """

    max_new_tokens: int = setting(512, least=1)
    """Longest response. The paper: 512."""
    temperature: float = setting(1.0, least=0)
    """Softens (above 1) or sharpens the distribution; 0 takes the likeliest token. Log-probs are
    taken at the same temperature. The paper samples at 0.8, code at 1."""
    top_k: int = setting(0, least=0)
    """Draw from the k likeliest tokens only; 0 for all. Log-probs stay those of the whole
    distribution, so the KL penalty is then an estimate from the wrong samples."""
    top_p: float = setting(1.0, most=1, above=0)
    """Draw from the smallest set of tokens with this much probability; 1 for all. As `top_k`."""

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def truncated(self) -> bool:
        """Whether tokens were drawn from less than the whole distribution."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def scale(self) -> float:
        """The temperature of log-probs: greedy decoding has none, so 1."""
        return self.temperature or 1.0


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Settings that every stage has."""

    model: str = ""
    """Where training starts: a folder, a hub name, a GGUF file, `tiny`, or `@stage`."""
    output_dir: str = setting("", may_change=True, private=True)
    """The run folder; the same command resumes an unfinished run there. At the top of a recipe,
    and with `marlhf run`, the folder of all stages, where each has one of its name. With the
    command of one stage, such as `marlhf ppo`, that stage's own; `@sft` is looked for beside it."""
    data: DataConfig = field(default_factory=lambda: DEFAULT_DATA)
    """Which rows, from where, and how they are split."""
    seed: int = setting(0, affects_identity=False)
    """Decides every random choice of the run but the data split (`data.seed`)."""
    batch_size: int = setting(64, above=0, on_card=True)
    """Rows in an update."""
    learning_rate: float = setting(1e-5, above=0, on_card=True)
    """Peak learning rate of the optimizer."""
    schedule: Schedule = setting("cosine", on_card=True)
    """How the rate falls after warm-up."""
    warmup_ratio: float = setting(0.1, least=0, most=1, on_card=True)
    """Share of the updates in which the rate rises."""
    optimizer: OptimizerName = setting("adamw", on_card=True)
    """Bytes that it keeps per weight: `adamw` 8; `adamw_8bit` 2, by torchao; `adafactor` next to
    none, without momentum."""
    adam_betas: tuple[float, float] = setting((0.9, 0.95))
    """How much of its past AdamW keeps in the mean of gradients, and in that of their squares."""
    trained_weights: Literal["float32", "bfloat16"] = setting("float32", on_card=True)
    """What trained weights and their gradients are kept in. `bfloat16` takes half the memory, and
    rounds at random so that small updates are not lost: with `optimizer: adamw_8bit`."""
    weight_decay: float = setting(0.0, least=0)
    """Decay of weights, not of biases and norms."""
    max_grad_norm: float = setting(1.0, above=0)
    """Gradients are scaled down to this norm."""
    num_epochs: int = setting(1, above=0, on_card=True)
    """Passes over the data."""
    num_steps: int | None = setting(None, least=1, on_card=True)
    """Stop after so many steps, whatever the epochs."""
    token_budget: int | Literal["auto"] = setting("auto", above=0, may_change=True)
    """Padded tokens in one forward pass. `auto`: 16384 at first, and on a GPU as many as keep it
    busy (32768 for a model of 135M, 4096 for 1.5B) as far as two steps have shown that they fit.
    Where memory runs out, passes are halved until they fit. Changes no result."""
    precision: Precision = "auto"
    """What to compute in. `auto`: bfloat16 on GPUs that have it, else float32."""
    compile: bool = setting(True, may_change=True)
    """On a GPU, compile what layers compute between matrix products, which takes half a minute at
    first. About twice the speed. Not with LoRA or `parallel: fsdp`."""
    deterministic: bool = setting(False, may_change=True)
    """On a GPU, only kernels that repeat bit for bit, none that add up in any order. Slower, also
    since `token_budget: auto` stays at 16384. A CPU repeats anyway."""
    gradient_checkpointing: bool | Literal["auto"] = setting("auto", may_change=True)
    """Trade time for memory in the backward pass. `auto`: where a GPU's memory is too small
    without, by the arithmetic of `marlhf doctor RECIPE`."""
    device: str = setting("auto", may_change=True, private=True)
    """`auto`, `cpu`, `cuda` or `cuda:1`."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Only for sources you trust."""
    eval_every: int = setting(20, least=0)
    """Steps between evaluations on held-out rows; 0 for only the last."""
    save_every: int = setting(50, least=0, may_change=True)
    """Steps between checkpoints; 0 for none."""
    keep_checkpoints: int = setting(2, above=0, may_change=True)
    """How many of the last checkpoints stay."""
    lora: LoRA | None = None
    """Train adapters of low rank instead of all weights: `{r: 16, alpha: 32}`."""
    parallel: Parallel = setting("data", may_change=True)
    """With several processes (torchrun): `data` has all weights on each, `fsdp` shards them."""
    report_to: str | tuple[str, ...] = setting((), may_change=True, private=True)
    """Where to send metrics as well: tensorboard, wandb, trackio."""
    run_name: str = setting("", may_change=True, private=True)
    """What those call the run; the folder's name unless given."""
    push_to_hub: bool = setting(False, may_change=True, private=True)
    """Upload the finished model, with a card."""
    hub_model_id: str = setting("", may_change=True, private=True)
    """Where to, as `owner/name`; the folder's name under your own unless given."""
    hub_private: bool = setting(False, may_change=True, private=True)
    """Make a new repository there private."""

    columns: ClassVar[tuple[str, ...]] = ("prompt", "chosen")
    """What a row of its data must have."""
    preset_kind: ClassVar[str] = ""
    """Whose presets (`marlhf.config.candidates`) recipes may give by name, as `preset:`."""

    def __new__(cls: type[Config], *values: Any, **settings: Any) -> Config:
        if values:  # the first field is not output_dir, as in TRL
            raise TypeError(f"{cls.__name__} takes settings by name, such as output_dir='runs/x'.")
        known = {f.name for f in fields(cls)}
        hints = {name: hint_for(name, known) for name in settings if name not in known}
        refuse_unknown(cls.__name__, "setting", hints)
        return object.__new__(cls)

    @classmethod
    def required(cls, raw: Mapping[str, Any]) -> list[str]:
        """What a recipe must name; in Python it may be given as objects instead."""
        return ["model", "output_dir"]

    def __post_init__(self) -> None:
        check_settings(self)
        if abs(self.seed) >= 2**32:
            raise SettingError(f"seed must be below 2 to the 32; got {self.seed}.")
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise SettingError(f"adam_betas lie from 0 to below 1; got {self.adam_betas}.")
        if self.trained_weights == "bfloat16" and self.optimizer != "adamw_8bit":
            raise SettingError(
                "trained_weights: bfloat16 needs an optimizer that rounds at random, or small "
                "updates are lost. Set optimizer: adamw_8bit, or leave trained_weights out."
            )
        if self.trained_weights == "bfloat16" and self.precision == "float32":
            raise SettingError(
                "trained_weights: bfloat16 and precision: float32 contradict each other. Leave one "
                "of them out."
            )
        if self.trained_weights == "bfloat16" and self.lora is not None:
            raise SettingError(
                "trained_weights: bfloat16 is of no use with lora, whose adapters are small. Leave "
                "one of them out."
            )
        if self.optimizer != "adamw" and self.parallel == "fsdp":
            raise SettingError(
                f"optimizer: {self.optimizer} is not for weights in shards, and parallel: fsdp "
                "shards the optimizer's state anyway. Leave one of them out."
            )

    @property
    def pass_tokens(self) -> int:
        """The tokens of a pass, before anything is known about memory."""
        return AUTO_TOKENS if self.token_budget == "auto" else self.token_budget

    def warmup(self, total: int) -> int:
        """Steps of warm-up in a run of `total`."""
        return round(self.warmup_ratio * total)

    def rate(self, step: int, total: int, peak: float | None = None) -> float:
        """The learning rate of step number `step`, counted from 1; of another peak, if given."""
        return learning_rate_at(
            step - 1,
            self.learning_rate if peak is None else peak,
            total=total,
            warmup=self.warmup(total),
            schedule=self.schedule,
        )


def refuse_unknown(owner: str, thing: str, hints: Mapping[str, str]) -> None:
    """Name all unknown settings or arguments at once, each with what to write instead."""
    lines = [f"{name}. {hint}".rstrip() for name, hint in hints.items()]
    if len(lines) == 1:
        raise UnknownNameError(f"{owner} has no {thing} {lines[0]}")
    if lines:
        raise UnknownNameError("\n  ".join([f"{owner} has no {thing}s", *lines]))


def learning_rate_at(
    step: int, peak: float, *, total: int, warmup: int, schedule: Schedule
) -> float:
    """The rate of update number `step`, counted from 0: linear warm-up, then the schedule.

    >>> [learning_rate_at(s, 1.0, total=4, warmup=2, schedule="constant") for s in range(3)]
    [0.5, 1.0, 1.0]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    done = (step - warmup) / max(1, total - warmup)
    if schedule == "linear":
        return peak * max(0.0, 1 - done)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
