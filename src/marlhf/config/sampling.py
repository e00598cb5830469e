"""Settings of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from marlhf.errors import SettingError
from marlhf.fields import check_settings, setting


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
