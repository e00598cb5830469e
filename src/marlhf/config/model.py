"""Settings of models: precision, LoRA, and how responses are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from marlhf.errors import SettingError
from marlhf.fields import check_settings, setting

Precision = Literal["auto", "float32", "bfloat16"]


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


def check_url(url: str) -> None:
    """Refuse what is not the address of a server, and secrets in it, which would get into logs."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingError("vllm_url must be like http://127.0.0.1:8000.")
    if "@" in parts.netloc:
        raise SettingError("vllm_url holds a password. Put the key into VLLM_API_KEY instead.")
