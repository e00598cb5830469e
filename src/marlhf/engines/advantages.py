"""Advantages and returns over macro actions from what an engine has at hand, and their settings.

Pure functions: no engine is imported here, and nothing is kept between calls but the text of the
vocabulary. The settings have the names that recipes use.

Axes: B rows, T response tokens, M macro actions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from marlhf.config.build import build, make_segmenter, raise_problems
from marlhf.core import (
    NGram,
    Responses,
    Segmenter,
    Segments,
    Turns,
    Vocabulary,
    adaptive_lam,
    boundary_gae,
    group_advantages,
    macro_gae,
    moments,
    needs,
    rloo_advantages,
    state_advantages,
    whiten,
)
from marlhf.core.segmenters import mix
from marlhf.engines.batch import (
    EngineBatch,
    EngineError,
    EpisodeSteps,
    move_to_policy_tokens,
    number,
    place_turn_rewards,
    turn_states,
)
from marlhf.fields import check_settings, setting
from marlhf.spans import vocabulary
from marlhf.spans.apply import Parsing, apply_segmenter, open_parsing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The same as in marlhf.core; spelled out, so that the engine's log shows what may be written.
Sigma = Literal["equal", "unit", "position", "start"]
Pooling = Literal["sum", "mean"]

Estimator = Literal["macro_gae", "macro_rloo", "macro_grpo", "macro_state"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
"""`macro_gae` needs a critic. The others compare the responses to one prompt: `macro_rloo` with the
mean of the others, `macro_grpo` with the mean of all in units of their deviation, `macro_state` the
same plus each turn among the turns in its state (GiGPO)."""


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
    whiten: Literal["auto", "tokens", "macros", "none"] = "auto"
    """Scale advantages to mean 0 and deviation 1 over the batch, counting tokens or actions.
    `auto`: tokens with a critic, none without."""
    value_level: Literal["token", "macro"] = "token"
    """What the critic learns: each token's value, or that of the macro action."""
    credit: Literal["macro", "boundary"] = "macro"
    """`macro`: one advantage per macro action. `boundary`: GAE over tokens that bootstraps at the
    ends of macro actions only."""
    lam_value: float | None = setting(None, least=0, most=1)
    """Lambda of the returns that the critic learns from; the lambda of advantages unless given."""
    lam: Literal["engine", "adaptive"] = "engine"
    """Lambda of advantages: the engine's, or 1 - 1 / (lam_alpha L) where a response has L macro
    actions (VAPO)."""
    lam_alpha: float = setting(0.05, above=0)
    """With `lam: adaptive`, the share of a response that credit reaches over."""
    turn_rewards: str = ""
    """The field of a sample with one reward per turn; they are added at the ends of turns."""
    turn_states: str = ""
    """For `macro_state`: the field of a sample that names the state of each turn. Turns are in the
    same state if they follow the same tokens, unless given."""

    def __post_init__(self) -> None:
        check_settings(self)
        by_token = {"value_level": "token", "pooling": "sum", "rho": 1.0}
        for name, needed in by_token.items():
            if self.credit == "boundary" and getattr(self, name) != needed:
                raise EngineError(
                    f"credit: boundary credits tokens, so {name} must be {needed}; got "
                    f"{getattr(self, name)}."
                )


def read_settings(
    raw: Mapping[str, Any] | None, where: str, estimator: Estimator = "macro_gae"
) -> MacroSettings:
    """Settings from plain data; all mistakes at once, under the name `where` they were given.

    >>> read_settings({"segmenter": {"type": "ngram", "n": 3}}, "algorithm.macro").segmenter
    NGram(n=3)
    >>> read_settings({"pooling": "sum", "sigmaa": "start"}, "algorithm.macro")
    Traceback (most recent call last):
    marlhf.config.build.ConfigError: 1 mistake
      algorithm.macro.sigmaa: unknown name 'sigmaa'. Did you mean sigma?
    """
    problems: list[str] = []
    settings = build(MacroSettings, dict(raw or {}), where, problems)
    if not problems:
        settings = make_segmenter(settings, f"{where}.segmenter", problems)
    raise_problems(problems)
    _check_estimator(settings, where, estimator)
    return settings


def _check_estimator(settings: MacroSettings, where: str, estimator: Estimator) -> None:
    """Refuse settings that this estimator would not read."""
    with_critic = ("sigma", "pooling", "rho", "value_level", "credit", "lam", "lam_value")
    for name in with_critic if estimator != "macro_gae" else ():
        if getattr(settings, name) != getattr(MacroSettings(), name):
            raise EngineError(
                f"{where}.{name} is a setting of macro_gae, and {estimator} has no critic. Leave "
                "it out."
            )
    if estimator != "macro_state" and settings.turn_states:
        raise EngineError(
            f"{where}.turn_states is for macro_state, and the estimator is {estimator}. Leave it "
            "out, or change the estimator."
        )
    if estimator == "macro_state" and not isinstance(settings.segmenter, Turns):
        raise EngineError(
            f"macro_state compares turns, but {where}.segmenter is {settings.segmenter}. Set it to "
            "turns."
        )


def refuse_unseen(settings: MacroSettings, engine: str) -> None:
    """For engines whose estimators see no field of a sample, and critics no macro action."""
    if settings.value_level != "token":
        raise EngineError(
            f"value_level: macro needs the macro actions in the critic's loss, and {engine}'s "
            "critic does not see them. Set value_level: token."
        )
    for name in ("turn_rewards", "turn_states"):
        if getattr(settings, name):
            raise EngineError(
                f"{name} names a field of samples, and {engine} shows an estimator none. Leave it "
                "out; rewards of turns go into the rewards of tokens."
            )


def needs_text(segmenter: Segmenter) -> bool:
    """Whether a segmenter reads the text of tokens, so that a tokenizer is needed."""
    return needs(segmenter, "vocabulary") or needs(segmenter, "spans")


class TokenText:
    """What segmenters need of a tokenizer: tables over the vocabulary, and a parser."""

    vocabulary: Vocabulary | None = None
    parsing: Parsing | None = None

    def __init__(self, segmenter: Segmenter, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None or not needs_text(segmenter):
            return
        self.parsing = open_parsing(segmenter, tokenizer)
        if self.parsing is None:
            self.vocabulary = vocabulary(tokenizer, len(tokenizer))

    def tables(self, tokens: Tensor) -> Vocabulary | None:
        """The tables, long enough for every token: models may embed more than tokenizers have."""
        if self.vocabulary is None:
            return None
        most = int(tokens.max()) + 1 if tokens.numel() else 0
        missing = max(0, most - len(self.vocabulary.begins_word))
        tables = {name: table for name, table in vars(self.vocabulary).items() if table is not None}
        tables = {name: pad(table, (0, missing)) for name, table in tables.items()}
        self.vocabulary = Vocabulary(**tables)
        return Vocabulary(**{name: table.to(tokens.device) for name, table in tables.items()})

    def spans(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        """Constituents of each response, [B, S, 2], parsed now."""
        if self.parsing is None:
            return None
        lengths = [max(keep.nonzero().flatten().tolist(), default=-1) + 1 for keep in mask]
        rows = [row[:length].tolist() for row, length in zip(tokens, lengths)]
        return self.parsing.begin(rows)().to(mask.device)


def macro_advantages(
    batch: EngineBatch,
    settings: MacroSettings,
    *,
    gamma: float,
    lam: float,
    text: TokenText | None = None,
    estimator: Estimator = "macro_gae",
    scale: bool = True,
) -> tuple[Tensor, Tensor]:
    """Advantages, whitened as the settings say, and returns: both [B, T].

    >>> from marlhf.core import NGram
    >>> ones = torch.ones(1, 4)
    >>> batch = EngineBatch(rewards=ones, mask=ones, values=torch.zeros(1, 4))
    >>> advantages, returns = macro_advantages(
    ...     batch, MacroSettings(segmenter=NGram(2), whiten="none"), gamma=1.0, lam=1.0)
    >>> returns
    tensor([[4., 4., 2., 2.]])
    """
    segments = segment_batch(batch, settings, text)
    return credit_segments(batch, segments, settings, gamma, lam, estimator, scale)


@torch.no_grad()
def segment_batch(
    batch: EngineBatch, settings: MacroSettings, text: TokenText | None = None
) -> Segments:
    """The macro actions of a batch, or a sentence about what the segmenter lacks."""
    rule, mask = settings.segmenter, batch.mask.bool()
    if needs(rule, "ref_logprobs") and batch.ref_logprobs is None:
        raise EngineError(
            f"{rule} reads the reference model's log-probs, and this batch has none. Let the "
            "engine compute them (a KL penalty in the reward or the loss does), or choose another "
            "segmenter."
        )
    if needs(rule, "logprobs") and batch.logprobs is None:
        raise EngineError(
            f"{rule} reads the log-probs of the policy that sampled, and this batch has none. "
            "Choose another segmenter."
        )
    if needs_text(rule) and (batch.tokens is None or text is None):
        raise EngineError(
            f"{rule} reads the text of the tokens, and this engine shows the estimator none. "
            "Choose ngram, random, perplexity, surprise or turns."
        )
    tokens = torch.zeros_like(mask, dtype=torch.int64) if batch.tokens is None else batch.tokens
    tokens = torch.where(mask, tokens.long(), 0) if text is None else tokens.long()
    responses = Responses(
        tokens,
        mask,
        ref_logprobs=batch.ref_logprobs,
        spans=None if text is None else text.spans(tokens, mask),
        vocabulary=None if text is None else text.tables(tokens),
        seeds=_row_seeds(tokens, mask),
        logprobs=batch.logprobs,
    )
    return apply_segmenter(rule, responses)


@torch.no_grad()
def credit_segments(
    batch: EngineBatch,
    segments: Segments,
    settings: MacroSettings,
    gamma: float,
    lam: float,
    estimator: Estimator = "macro_gae",
    scale: bool = True,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of macro actions that are known already: both [B, T].

    `scale`: whether `macro_grpo` and `macro_state` divide by the deviation of a group. Without a
    critic there are no returns to learn from, and the advantages are given as these.
    """
    rewards = batch.rewards
    if batch.turn_rewards is not None:
        rewards = rewards + place_turn_rewards(batch.turn_rewards, segments.mask)
    if estimator == "macro_gae":
        advantages, returns = _critic_credit(batch, rewards, segments, settings, gamma, lam)
    else:
        advantages = _group_credit(batch, rewards, segments, estimator, gamma, scale)
        returns = advantages
    by = settings.whiten
    if by == "none" or (by == "auto" and estimator != "macro_gae"):
        return advantages, returns
    stats = None
    if by == "macros":
        stats = moments(segments.first(advantages), segments.macro_mask)
    return whiten(advantages, segments.mask, stats=stats), returns


def _critic_credit(
    batch: EngineBatch,
    rewards: Tensor,
    segments: Segments,
    settings: MacroSettings,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over macro actions: advantages and returns, [B, T]."""
    values, episodes = batch.values, batch.episodes
    if values is None:
        raise EngineError(
            "Advantages over macro actions need a critic, and this batch has no values. Give the "
            "engine a critic, as for its own GAE, or choose macro_rloo, macro_grpo or macro_state."
        )
    rewards = move_to_policy_tokens(rewards, segments.mask)
    if episodes is not None:
        segments, rewards, values = _joined(episodes, segments, rewards, values)
    estimate = boundary_gae
    if settings.credit == "macro":
        pooled = {"rho": settings.rho, "sigma": settings.sigma, "pooling": settings.pooling}
        estimate = functools.partial(macro_gae, **pooled)
    if settings.lam == "adaptive":
        lam = adaptive_lam(segments, settings.lam_alpha)
    discounts = {"gamma": gamma, "lam": lam, "lam_value": settings.lam_value}
    advantages, returns = estimate(rewards, values, segments, **discounts)
    if episodes is not None:
        advantages, returns = episodes.split(advantages), episodes.split(returns)
    return advantages, returns


def _group_credit(
    batch: EngineBatch,
    rewards: Tensor,
    segments: Segments,
    estimator: Estimator,
    gamma: float,
    scale: bool,
) -> Tensor:
    """The reward still to come from each macro action on, against the responses of its group.

    A response that is alone in its group gets 0, since nothing compares with it.
    """
    if batch.groups is None or len(set(batch.groups)) == len(batch.groups):
        raise EngineError(
            f"{estimator} compares the responses to one prompt, and no prompt of this batch has "
            "two. Sample more: actor_rollout_ref.rollout.n in verl, generator.n_samples_per_prompt "
            "in SkyRL, --n-samples-per-prompt in slime."
        )
    groups, episodes, mask = number(batch.groups).to(rewards.device), batch.episodes, segments.mask
    states = None
    if estimator == "macro_state":
        states = turn_states(batch, groups.tolist(), mask)
    # A response that is masked as a whole trains nothing, but its score counts in the baseline.
    counted = mask.clone()
    counted[:, :1] |= ~mask.any(dim=1, keepdim=True)
    rewards = move_to_policy_tokens(rewards, counted)
    scored = Segments(segments.ids, counted)
    if episodes is not None:
        segments, _ = _joined(episodes, segments, rewards)
        scored, rewards = _joined(episodes, scored, rewards)
        states = None if states is None else episodes.join(states)
        groups = groups.new_empty(len(rewards)).index_copy(0, episodes.episode, groups)
    group_scale = {"gamma": gamma, "scale": scale, "eps": 1e-6}  # added to a deviation, as in verl
    advantages = torch.zeros_like(rewards)
    for size, rows in _rows_by_group_size(groups):
        part = rewards[rows], size, Segments(scored.ids[rows], scored.mask[rows])
        if size > 1 and estimator == "macro_rloo":
            advantages[rows] = rloo_advantages(*part, gamma=gamma)
        elif size > 1:
            advantages[rows] = group_advantages(*part, **group_scale)
    if states is not None:
        same_state = {"baseline": "group", **group_scale}
        advantages = advantages + state_advantages(rewards, states, segments, **same_state)
    return (advantages if episodes is None else episodes.split(advantages)) * mask


def _rows_by_group_size(groups: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each size of groups, and the rows of all groups of that size, group by group.

    Engines drop and add responses, while the core wants groups of one size, side by side.
    """
    sizes = groups.bincount()[groups]
    by_group = groups.argsort(stable=True)
    for size in sizes.unique().tolist():
        yield size, by_group[sizes[by_group] == size]


def _joined(episodes: EpisodeSteps, segments: Segments, *tensors: Tensor) -> Any:
    """Macro actions and tensors with one row per episode."""
    mask, starts = episodes.join(segments.mask), episodes.join(segments.starts)
    return Segments.from_starts(starts, mask), *map(episodes.join, tensors)


def segment_metrics(segments: Segments) -> dict[str, float]:
    """Numbers about the macro actions of a batch, for the engine's log."""
    lengths = segments.lengths[segments.macro_mask].float()
    if not len(lengths):
        return {"macro/actions": 0.0}
    return {
        "macro/actions": float(len(lengths)),
        "macro/actions_per_response": len(lengths) / len(segments.mask),
        "macro/tokens_per_action": lengths.mean().item(),
        "macro/longest_action": lengths.max().item(),
    }


def _row_seeds(tokens: Tensor, mask: Tensor) -> Tensor:
    """A seed per response that depends on its tokens alone, [B] int64.

    Engines keep no generator of ours in their checkpoints. So a run that resumes draws the same
    random n-grams, on any rank and in any order of rows.
    """
    position = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return mix(torch.where(mask, mix((tokens + 1) * position), 0).sum(dim=1))
