"""Settings that every stage has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from marlhf.configs.model import LoRA, Precision
from marlhf.configs.schedule import Schedule, learning_rate_at
from marlhf.data import DataConfig
from marlhf.errors import SettingError

Parallel = Literal["data", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Settings that every stage has."""

    model: str = ""
    """Where training starts: a folder, a hub name, a GGUF file, `tiny`, or `@stage`."""
    output_dir: str = ""
    """The run folder. The same command goes on with an unfinished run there."""
    data: DataConfig = field(default_factory=lambda: DataConfig(source="toy"))
    """Which rows, from where, and how they are split."""
    seed: int = 0
    """Decides every random choice of the run but the data split (`data.seed`)."""
    batch_size: int = 64
    """Rows in an update."""
    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Schedule = "cosine"
    """How the rate falls after warm-up."""
    warmup_ratio: float = 0.1
    """Share of the updates in which the rate rises."""
    weight_decay: float = 0.0
    """Decay of weights, not of biases and norms."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    num_epochs: int = 1
    """Passes over the data."""
    num_steps: int | None = None
    """Stop after so many steps, whatever the epochs."""
    token_budget: int = 16384
    """Padded tokens in one forward pass: lower it when memory runs out. Changes no result."""
    precision: Precision = "auto"
    """What to compute in. `auto`: bfloat16 on GPUs that have it, else float32."""
    compile: bool = True
    """On a GPU, compile the decoder layers: half a minute at first, then about twice the speed.
    Not with LoRA or `parallel: fsdp`."""
    gradient_checkpointing: bool = False
    """Trade time for memory in the backward pass."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:1`."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Only for sources you trust."""
    eval_every: int = 20
    """Steps between evaluations on held-out rows; 0 for only the last."""
    save_every: int = 50
    """Steps between checkpoints; 0 for none."""
    keep_checkpoints: int = 2
    """How many of the last checkpoints stay."""
    lora: LoRA | None = None
    """Train adapters of low rank instead of all weights: `{r: 16, alpha: 32}`."""
    parallel: Parallel = "data"
    """With several processes (torchrun): `data` has all weights on each, `fsdp` shards them."""
    report_to: str | tuple[str, ...] = ()
    """Where to send metrics as well: tensorboard, wandb, trackio."""
    run_name: str = ""
    """What those call the run; the folder's name unless given."""
    push_to_hub: bool = False
    """Upload the finished model, with a card."""
    hub_model_id: str = ""
    """Where to, as `owner/name`; the folder's name under your own unless given."""
    hub_private: bool = False
    """Make a new repository there private."""

    def __post_init__(self) -> None:
        positive = ("batch_size", "learning_rate", "num_epochs", "token_budget", "max_grad_norm")
        check_numbers(self, (*positive, "keep_checkpoints"), positive=True)
        check_numbers(self, ("eval_every", "save_every", "weight_decay"), least=0)
        if abs(self.seed) >= 2**32:
            raise SettingError(f"seed must be below 2 to the 32; got {self.seed}.")
        if self.num_steps is not None and self.num_steps < 1:
            raise SettingError(f"num_steps must be at least 1; got {self.num_steps}.")
        if not 0 <= self.warmup_ratio <= 1:
            raise SettingError(f"warmup_ratio must lie between 0 and 1; got {self.warmup_ratio}.")

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


def check_numbers(
    config: StageConfig,
    names: Sequence[str],
    *,
    positive: bool = False,
    least: float = -math.inf,
    most: float = math.inf,
) -> None:
    """Refuse settings outside their range, infinite or not a number; None is no setting."""
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if not math.isfinite(value) or not least <= value <= most or (positive and value <= 0):
            limits = [f"{word} {x:g}" for word, x in (("at least", least), ("at most", most))]
            wanted = ["positive"] * positive + [x for x in limits if "inf" not in x] or ["finite"]
            raise SettingError(f"{name} must be {' and '.join(wanted)}; got {value}.")
