"""The settings of macro actions in another engine, under the names that recipes use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from marlhf.config.build import build, make_segmenter, raise_problems
from marlhf.core import NGram, Segmenter, needs
from marlhf.errors import MarlhfError
from marlhf.fields import check_settings, setting

# The same as in marlhf.core; spelled out, so that the engine's log shows what may be written.
Sigma = Literal["equal", "unit", "position", "start"]
Pooling = Literal["sum", "mean"]


class EngineError(MarlhfError, ValueError):
    """An engine's configuration that cannot work with macro actions, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class MacroSettings:
    """How responses become macro actions, and how these are credited.

    gamma and lambda are not here: every engine has settings of its own for them.

    >>> MacroSettings(sigma="start").segmenter
    NGram(n=5)
    """

    segmenter: Segmenter = field(default_factory=NGram)
    """Where macro actions start: `ngram`, or `{type: ngram, n: 5}`; the types of recipes."""
    sigma: Sigma = "start"
    """How a macro action's value weighs its tokens' values."""
    pooling: Pooling = "sum"
    """Macro reward as a sum of token rewards (the paper's equation) or a mean."""
    rho: float = setting(1.0, least=0, most=1)
    """Discount of rewards inside a macro action."""
    whiten: Literal["tokens", "macros", "none"] = "tokens"
    """Scale advantages to mean 0 and deviation 1 over the batch, counting tokens or actions."""
    value_level: Literal["token", "macro"] = "token"
    """What the critic learns: each token's value, or that of the macro action."""
    credit: Literal["macro", "boundary"] = "macro"
    """`macro`: one advantage per macro action. `boundary`: GAE over tokens that bootstraps at the
    ends of macro actions only."""
    lam_value: float | None = setting(None, least=0, most=1)
    """Lambda of the returns that the critic learns from; the engine's lambda unless given."""

    def __post_init__(self) -> None:
        check_settings(self)
        by_token = {"value_level": "token", "pooling": "sum", "rho": 1.0}
        for name, needed in by_token.items():
            if self.credit == "boundary" and getattr(self, name) != needed:
                raise EngineError(
                    f"credit: boundary credits tokens, so {name} must be {needed}; got "
                    f"{getattr(self, name)}."
                )


def read_settings(raw: Mapping[str, Any] | None, where: str) -> MacroSettings:
    """Settings from plain data; all mistakes at once, under the name `where` they were given.

    >>> read_settings({"segmenter": {"type": "ngram", "n": 3}}, "algorithm.macro").segmenter
    NGram(n=3)
    >>> read_settings({"pooling": "sum", "sigmaa": "start"}, "algorithm.macro")
    Traceback (most recent call last):
    marlhf.config.recipe_files.ConfigError: 1 mistake
      algorithm.macro.sigmaa: unknown name 'sigmaa'. Did you mean sigma?
    """
    problems: list[str] = []
    settings = build(MacroSettings, dict(raw or {}), where, problems, rules=True)
    if not problems:
        settings = make_segmenter(settings, f"{where}.segmenter", problems)
    raise_problems(problems)
    return settings


def needs_reference(segmenter: Segmenter) -> bool:
    """Whether a segmenter reads the log-probs of the reference model."""
    return needs(segmenter, "ref_logprobs")


def needs_logprobs(segmenter: Segmenter) -> bool:
    """Whether a segmenter reads the log-probs of the policy that sampled."""
    return needs(segmenter, "logprobs")


def needs_text(segmenter: Segmenter) -> bool:
    """Whether a segmenter reads the text of tokens, so that a tokenizer is needed."""
    return needs(segmenter, "vocabulary") or needs(segmenter, "spans")
