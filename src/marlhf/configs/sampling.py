"""Settings of sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from urllib.parse import urlsplit

from marlhf.errors import SettingError


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    >>> Sampling(max_new_tokens=64, temperature=0.8, top_k=50).truncated
    True
    """

    max_new_tokens: int = 512
    """Longest response. The paper: 512."""
    temperature: float = 1.0
    """Softens (above 1) or sharpens the distribution; 0 takes the likeliest token. Log-probs are
    taken at the same temperature. The paper samples at 0.8, code at 1."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 for all. Log-probs stay those of the whole
    distribution, so the KL penalty is then an estimate from the wrong samples."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this much probability; 1 for all. As `top_k`."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise SettingError(f"max_new_tokens must be at least 1; got {self.max_new_tokens}.")
        if not 0 <= self.temperature < math.inf:
            raise SettingError(f"temperature must be a number from 0; got {self.temperature}.")
        if self.top_k < 0:
            raise SettingError(f"top_k must be 0, for all tokens, or more; got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise SettingError(f"top_p must be above 0 and at most 1; got {self.top_p}.")

    @property
    def truncated(self) -> bool:
        """Whether tokens were drawn from less than the whole distribution."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def scale(self) -> float:
        """The temperature of log-probs: greedy decoding has none, so 1."""
        return self.temperature or 1.0


def check_url(url: str) -> str:
    """The address of a server, without a path and without secrets, which would get into logs."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingError("vllm_url must be like http://127.0.0.1:8000.")
    if "@" in parts.netloc:
        raise SettingError("vllm_url holds a password. Put the key into VLLM_API_KEY instead.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
