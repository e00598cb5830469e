"""Limits past which reward hacking is likely, or sampling and training disagree."""

from __future__ import annotations

from dataclasses import dataclass

from marlhf.fields import check_settings, setting


@dataclass(frozen=True)
class Guards:
    """Limits, on held-out responses except for the gap. Past `warn_*` there is a warning, past
    `max_*` the run stops.

    >>> start = {"eval/kl": 0, "eval/repetition": 0.1, "eval/length": 40, "eval/ended": 0.9}
    >>> warnings, verdict = Guards(max_kl=20).judge(start | {"eval/kl": 25.0}, start)
    >>> verdict
    'Stopped early: the KL to the reference is 25, past the limit of 20.'
    """

    warn_kl: float = setting(50.0, least=0)
    """KL of a response to the reference, in nats."""
    max_kl: float | None = setting(None, above=0)
    """Stop beyond this KL."""
    warn_repetition: float = setting(0.2, least=0)
    """Share of repeated 4-grams, above that of the starting policy."""
    max_repetition: float | None = setting(None, least=0)
    """Stop beyond this share, above that of the starting policy."""
    warn_length: float = setting(2.0, least=1)
    """Mean length over that of the starting policy, or the other way round."""
    max_length: float | None = setting(None, least=1)
    """Stop beyond this ratio of lengths."""
    warn_cut: float = setting(0.3, least=0)
    """Share of responses that run to `max_new_tokens`, above that of the starting policy."""
    max_cut: float | None = setting(None, least=0)
    """Stop beyond this share, above that of the starting policy."""
    warn_logprob_gap: float = 0.1
    """Nats per token between log-probs while sampling and while training, at every step: both are
    of one policy, so more than rounding is a fault."""
    max_logprob_gap: float | None = 1.0
    """Stop beyond this gap; None never stops."""

    def __post_init__(self) -> None:
        check_settings(self, "guards.")

    def judge(self, now: dict[str, float], start: dict[str, float]) -> tuple[list[str], str]:
        """Warnings, and why to stop: empty while nothing is past its limit."""
        repeated = now["eval/repetition"] - start["eval/repetition"]
        ratio = max(now["eval/length"], 1.0) / max(start["eval/length"], 1.0)
        drift = max(ratio, 1 / ratio)
        cut = start["eval/ended"] - now["eval/ended"]
        signs = (
            ("the KL to the reference is", now["eval/kl"], self.warn_kl, self.max_kl),
            ("repetition has risen by", repeated, self.warn_repetition, self.max_repetition),
            ("mean length has changed by a factor of", drift, self.warn_length, self.max_length),
            ("the share of responses cut off has risen by", cut, self.warn_cut, self.max_cut),
        )
        warnings = []
        for what, value, noticed, limit in signs:
            if limit is not None and value > limit:
                return warnings, f"Stopped early: {what} {value:.3g}, past the limit of {limit:g}."
            if value > noticed:
                warnings.append(f"{what} {value:.3g}: the policy may be gaming the reward model.")
        return warnings, ""
