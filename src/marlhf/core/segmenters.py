"""Termination rules: where macro actions start.

A segmenter is any callable `(Responses) -> starts`, a bool tensor [B, T] that is True where a
macro action begins. The ones here are frozen dataclasses, so that a rule is its own config.

Axes: B rows, T response tokens, S spans, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from marlhf.core.masked import shift, since
from marlhf.core.responses import Responses, Vocabulary
from marlhf.core.segments import Segments

Segmenter = Callable[[Responses], Tensor]
Need = Literal["ref_logprobs", "logprobs", "spans", "vocabulary", "seeds", "entropy", "values"]
"""What a rule reads of `Responses` beside tokens and mask. A class says so in `needs`."""

READ = {
    "ref_logprobs": "the reference's log-probs",
    "logprobs": "the policy's log-probs",
    "spans": "from a parser that has seen the response",
    "vocabulary": "what each token's text looks like: marlhf.spans.vocabulary(tokenizer)",
    "entropy": "that of the policy's choices",
    "values": "those of the critic",
}
"""What a rule that lacks something is told."""

LooksAt = Literal["prefix", "token", "response"]
"""What decides whether a macro action starts at a token: those before it, it as well, or all. A
class says so in `looks_at`; a rule that does not is taken to look at the token."""


def needs(segmenter: Segmenter, what: Need, *, unless_said: bool = False) -> bool:
    """Whether a rule reads `what`; `unless_said` of a rule that does not declare its `needs`.

    >>> needs(Perplexity(), "ref_logprobs"), needs(NGram(5), "ref_logprobs")
    (True, False)
    """
    declared = getattr(segmenter, "needs", None)
    return unless_said if declared is None else what in declared


def parser_of(segmenter: Segmenter) -> str | None:
    """The name of the parser that gives a rule its spans; None for a rule that needs none.

    >>> parser_of(Constituents(cutoff=4)), parser_of(NGram(5))
    ('english', None)
    """
    return getattr(segmenter, "parser", "english") if needs(segmenter, "spans") else None


def segment(segmenter: Segmenter, responses: Responses, *, split_last: bool = False) -> Segments:
    """Apply a rule. What a user's rule returns is checked.

    >>> responses = Responses(torch.tensor([[7, 8, 9]]), mask=torch.ones(1, 3).bool())
    >>> segment(NGram(2), responses).ids
    tensor([[0, 0, 1]])
    """
    segments = Segments.from_starts(segmenter(responses), responses.mask, split_last=split_last)
    if type(segmenter).__module__ != __name__:
        segments.validate()  # waits for the device, which rules of our own need not
    return segments


BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda n: n >= 1 and (n == math.inf or n % 1 == 0), "a whole number from 1, or infinity"),
    "lengths": (lambda lengths: min(lengths, default=0) >= 1, "whole numbers from 1"),
    "kind": (("macro", "prefix", "token").__contains__, "one of macro, prefix, token"),
    "probability": (lambda p: 0.0 < p <= 1.0, "above 0 and at most 1"),
    "quantile": (lambda share: 0.0 <= share < 1.0, "at least 0 and below 1"),
    **dict.fromkeys(("repeats", "cutoff", "every", "max_length"), (lambda n: n >= 1, "at least 1")),
}
"""What a setting must be, in whichever rule it is, and how that is said."""


class _Rule:
    """What rules share: what they declare, how they read responses, and how actions are bounded."""

    needs: ClassVar[tuple[Need, ...]] = ()
    looks_at: ClassVar[LooksAt] = "token"
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name, (holds, words) in BOUNDS.items():
            if (value := getattr(self, name, None)) is not None and not holds(value):
                raise ValueError(f"{name} must be {words}; got {value!r}.")

    def read(self, responses: Responses, what: Need) -> Tensor:
        """What the rule needs of the responses, if it is there."""
        found = getattr(responses, what)
        if found is None:
            raise ValueError(f"{type(self).__name__} needs Responses.{what}, {READ[what]}.")
        return found

    def vocabulary(self, responses: Responses) -> tuple[Vocabulary, Tensor]:
        """The tables of tokens, and where in them each token stands."""
        table: Any = self.read(responses, "vocabulary")
        return table, torch.where(responses.mask, responses.tokens, 0)

    def finish(self, starts: Tensor, mask: Tensor) -> Tensor:
        """Start at the first token, and again whenever `max_length` tokens have passed."""
        starts = starts | (_place(mask) == 0)
        return starts if self.max_length is None else since(starts, mask) % self.max_length == 0


@dataclass(frozen=True)
class NGram(_Rule):
    """End a macro action after every `n` tokens. `NGram(1)` is ordinary PPO.

    `NGram(math.inf)` makes the whole response one action, a bandit.

    >>> responses = Responses(torch.tensor([[7, 8, 9, 7, 5]]), torch.ones(1, 5).bool())
    >>> NGram(2)(responses).int()
    tensor([[1, 0, 1, 0, 1]], dtype=torch.int32)
    """

    looks_at = "prefix"

    n: int | float = 5
    """Tokens in a macro action: a whole number from 1, or infinity (`.inf` in YAML)."""

    def __call__(self, responses: Responses) -> Tensor:
        place = _place(responses.mask)
        return place == 0 if self.n == math.inf else place % int(self.n) == 0


@dataclass(frozen=True)
class RandomNGram(_Rule):
    """Lengths drawn for each response: the list, `repeats` times over, shuffled.

    What the list does not cover is one last action. The draw follows `responses.seeds`, so it
    depends neither on the device nor on how rows are batched; without seeds it follows torch's
    own generator.

    >>> mask = torch.ones(1, 6).bool()
    >>> responses = Responses(torch.arange(6)[None], mask, seeds=torch.tensor([3]))
    >>> RandomNGram(lengths=(3,))(responses).int()
    tensor([[1, 0, 0, 1, 0, 0]], dtype=torch.int32)
    """

    needs = ("seeds",)
    looks_at = "prefix"

    lengths: tuple[int, ...] = (2, 3, 5, 10)
    """Lengths to draw from. The authors' code has (1, 2, 3, 5, 10)."""
    repeats: int = 3
    """How often each length is in the list."""

    def __call__(self, responses: Responses) -> Tensor:
        mask, size = responses.mask, len(self.lengths) * self.repeats
        if responses.seeds is None:
            keys = torch.rand(len(mask), size, device=mask.device)
        else:
            column = torch.arange(1, size + 1, device=mask.device)
            keys = mix(mix(responses.seeds.to(mask.device))[:, None] ^ mix(column))
        order = keys.argsort(dim=1) % len(self.lengths)  # [B, kinds * repeats]
        drawn = sum(length * (order == kind) for kind, length in enumerate(self.lengths))
        ends = torch.as_tensor(drawn).cumsum(dim=1)
        before = mask.cumsum(dim=1) - 1  # [B, T], tokens before each
        return (before[:, :, None] == ends[:, None]).any(dim=2) | (_place(mask) == 0)


@dataclass(frozen=True)
class Perplexity(_Rule):
    """Keep tokens together while the reference model finds them ever easier.

    The paper describes this rule in three ways that are not the same; each has a name here.

    >>> logprobs = torch.tensor([[-2.0, -1.0, -4.0, -1.0]])
    >>> responses = Responses(torch.arange(4)[None], torch.ones(1, 4).bool(), ref_logprobs=logprobs)
    >>> Perplexity("token")(responses).int()
    tensor([[1, 0, 1, 0]], dtype=torch.int32)
    """

    needs = ("ref_logprobs",)

    kind: Literal["macro", "prefix", "token"] = "macro"
    """`macro` (section 3.2.1): a token joins while it does not raise the mean negative
    log-likelihood of the macro action. `prefix` (appendix B.4): while the perplexity of the
    response so far keeps falling. `token` (the listing): unless the token is itself more
    surprising than the one before it."""
    max_length: int | None = None
    """The most tokens in a macro action. Repetitive text makes long ones; 20 is a fair cap."""

    def __call__(self, responses: Responses) -> Tensor:
        logprobs = self.read(responses, "ref_logprobs").double()
        nll = torch.where(responses.mask, -logprobs, 0.0)
        if self.kind == "macro":
            return _greedy_starts(nll, responses.mask, self.max_length)
        if self.kind == "prefix":
            nll = nll.cumsum(dim=1) / responses.mask.cumsum(dim=1).clamp(min=1)
        rises = nll[:, 1:] > _tie(nll[:, :-1])
        return self.finish(pad(rises, (1, 0)), responses.mask)


@dataclass(frozen=True)
class Constituents(_Rule):
    """Follow the constituents of a parse, given as `responses.spans`.

    Depth first, the first node small enough is a macro action; a single token that no such node
    covers joins the action before it. Spans must nest. A row without any span could not be
    parsed or aligned: there every token is its own action, plain PPO, as in the paper.

    >>> from marlhf.core import pack_spans
    >>> spans = pack_spans([[(0, 6), (0, 2), (2, 6)]])
    >>> responses = Responses(torch.arange(6)[None], torch.ones(1, 6).bool(), spans=spans)
    >>> Constituents(cutoff=5)(responses).int()
    tensor([[1, 0, 1, 0, 0, 0]], dtype=torch.int32)
    """

    needs = ("spans",)
    looks_at = "response"

    cutoff: int = 5
    """A node with fewer tokens than this is one macro action."""
    inclusive: bool = False
    """Let a node of exactly `cutoff` tokens be one, too (section 3.2.1; appendix B.4 does not)."""
    max_length: int | None = None
    """The most tokens in a macro action; runs of single tokens are otherwise unbounded."""
    sentences: bool = False
    """Start an action at every sentence, or statement of a program: at a node in no other."""
    parser: str = "english"
    """Who gives the spans in training: `english`, `python`, `auto` (English with code in it),
    `spacy:NAME`, `stanza:LANGUAGE` or `benepar:NAME`."""

    def __call__(self, responses: Responses) -> Tensor:
        mask = responses.mask
        width = mask.shape[1]
        begin, end = self.read(responses, "spans").clamp(0, width).unbind(dim=2)  # [B, S]
        size = end - begin
        largest = self.cutoff if self.inclusive else self.cutoff - 1
        starts = _outermost_starts(begin, end, (size >= 2) & (size <= largest), width)
        if self.sentences:
            starts = starts | _outermost_starts(begin, end, size > 0, width)
        unparsed = ~(size > 0).any(dim=1, keepdim=True)
        return self.finish(starts | unparsed, mask)


@dataclass(frozen=True)
class _TextRule(_Rule):
    """Rules that look at the text of tokens."""

    needs = ("vocabulary",)

    max_length: int | None = None
    """The most tokens in a macro action. Text without spaces, or without line breaks, needs one."""


@dataclass(frozen=True)
class Words(_TextRule):
    """One macro action a word: undo the splitting of words into sub-words.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> from marlhf.spans import vocabulary
    >>> tokenizer = tiny_tokenizer()
    >>> tokens = torch.tensor([tokenizer.encode("a shy xyz.")])
    >>> table = vocabulary(tokenizer, len(tokenizer))
    >>> responses = Responses(tokens, torch.ones_like(tokens).bool(), vocabulary=table)
    >>> Words()(responses).sum()
    tensor(3)
    """

    def __call__(self, responses: Responses) -> Tensor:
        vocabulary, tokens = self.vocabulary(responses)
        begins, space = vocabulary.begins_word[tokens], vocabulary.is_space[tokens]
        # White space belongs to the word it stands before, but for a line break that some
        # tokenizers join to the full stop before it.
        closed = vocabulary.has_newline[tokens] & ~space
        return self.finish((begins & ~shift(space)) | shift(closed), responses.mask)


@dataclass(frozen=True)
class Sentences(_TextRule):
    """One macro action a sentence or line. The number of a list item is not one.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> from marlhf.spans import vocabulary
    >>> tokenizer = tiny_tokenizer()
    >>> tokens = torch.tensor([tokenizer.encode("The fox ran. The end.")])
    >>> table = vocabulary(tokenizer, len(tokenizer))
    >>> responses = Responses(tokens, torch.ones_like(tokens).bool(), vocabulary=table)
    >>> Sentences()(responses).sum()
    tensor(2)
    """

    def __call__(self, responses: Responses) -> Tensor:
        vocabulary, tokens = self.vocabulary(responses)
        newline, closing = vocabulary.has_newline[tokens], vocabulary.is_closing[tokens]
        # A number that begins a line is that of a list item: "1." ends no sentence.
        number = _look_up(vocabulary.is_number, tokens)
        item = number & (shift(newline) | (_place(responses.mask) == 0))
        for _ in range(2):  # numbers of up to three tokens
            item = item | (number & shift(item))
        inside = shift(item | _look_up(vocabulary.is_abbreviation, tokens))
        ends = vocabulary.ends_sentence[tokens] & ~inside
        ends = ends | (closing & shift(ends))
        wide = _look_up(vocabulary.ends_wide, tokens)
        wide = wide | (closing & shift(wide))
        # A full stop ends a sentence only before white space (not in 3.5), a full-width one and a
        # line break always; blank lines stay with the line they close.
        after_stop = (shift(ends) & vocabulary.begins_word[tokens]) | (shift(wide) & ~closing)
        return self.finish((after_stop | shift(newline)) & ~newline, responses.mask)


@dataclass(frozen=True)
class Lines(_TextRule):
    """One macro action per line: a step of a derivation, a statement, an item of a list.

    The line break ends its line, and blank lines stay with the line that they close.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> from marlhf.spans import vocabulary
    >>> tokenizer = tiny_tokenizer()
    >>> tokens = torch.tensor([tokenizer.encode("7+5=2\\n5+2=7\\n")])
    >>> table = vocabulary(tokenizer, len(tokenizer))
    >>> responses = Responses(tokens, torch.ones_like(tokens).bool(), vocabulary=table)
    >>> Lines()(responses).sum()
    tensor(2)
    """

    looks_at = "prefix"  # blank lines aside

    def __call__(self, responses: Responses) -> Tensor:
        vocabulary, tokens = self.vocabulary(responses)
        newline = vocabulary.has_newline[tokens]
        blank = newline & vocabulary.is_space[tokens]  # but "}\n" is a line of its own
        return self.finish(shift(newline) & ~blank, responses.mask)


@dataclass(frozen=True)
class Turns(_Rule):
    """One macro action for each unbroken run of response tokens: a turn of a dialogue or agent.

    >>> mask = torch.tensor([[True, True, False, True]])  # tool output between two turns
    >>> Turns()(Responses(torch.arange(4)[None], mask)).int()
    tensor([[1, 0, 0, 1]], dtype=torch.int32)
    """

    looks_at = "prefix"

    max_length: int | None = None
    """The most tokens in a macro action."""

    def __call__(self, responses: Responses) -> Tensor:
        mask = responses.mask
        return self.finish(torch.zeros_like(mask), mask) & mask


@dataclass(frozen=True)
class Surprise(_Rule):
    """Start where the policy found the token it sampled unlikely: there it decided something.

    >>> logprobs = torch.tensor([[0.5, 0.9, 0.1, 0.6]]).log()
    >>> mask = torch.ones(1, 4).bool()
    >>> Surprise()(Responses(torch.arange(4)[None], mask, logprobs=logprobs)).int()
    tensor([[1, 0, 1, 0]], dtype=torch.int32)
    """

    needs = ("logprobs",)

    probability: float = 0.2
    """A token of at most this probability starts a macro action."""
    every: int = 1
    """Start at every so many of these tokens only."""
    max_length: int | None = None
    """The most tokens in a macro action. A policy that is sure of all makes long ones."""

    def __call__(self, responses: Responses) -> Tensor:
        unlikely = self.read(responses, "logprobs") <= math.log(self.probability)
        starts = unlikely & responses.mask
        return self.finish(starts & (starts.cumsum(dim=1) % self.every == 0), responses.mask)


@dataclass(frozen=True)
class _Peaks(_Rule):
    """Rules that start where a number is high."""

    quantile: float = 0.9
    """Start at the highest numbers of their response: 0.9 takes a tenth of them."""
    threshold: float | None = None
    """Start at numbers of more than this, instead of by quantile."""
    max_length: int | None = None
    """The most tokens in a macro action. Where nothing stands out, they are long."""

    @property
    def looks_at(self) -> LooksAt:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A quantile is known at the end of the response, a number before its token."""
        return "response" if self.threshold is None else "prefix"

    def peaks(self, x: Tensor, among: Tensor) -> Tensor:
        """Where x is above the threshold, or in the highest part of its row: [B, T] bool."""
        if self.threshold is not None:
            return among & (x > self.threshold)
        count = ((1 - self.quantile) * among.sum(dim=1, keepdim=True)).round()
        return _highest(x, among, count)


@dataclass(frozen=True)
class Entropy(_Peaks):
    """Start where the policy was unsure which token to write: at high entropy of its choice.

    `threshold` is in nats.

    >>> entropy = torch.tensor([[0.9, 0.1, 2.0, 0.3]])
    >>> mask = torch.ones(1, 4).bool()
    >>> Entropy(quantile=0.75)(Responses(torch.arange(4)[None], mask, entropy=entropy)).int()
    tensor([[1, 0, 1, 0]], dtype=torch.int32)
    """

    needs = ("entropy",)

    def __call__(self, responses: Responses) -> Tensor:
        mask = responses.mask
        return self.finish(self.peaks(self.read(responses, "entropy"), mask), mask)


@dataclass(frozen=True)
class ValueChange(_Peaks):
    """Start after a token that moved the critic's value most: termination that the critic learns.

    Changes count up or down.

    >>> values = torch.tensor([[0.5, 0.5, 0.9, 0.8]])  # the second token raised it by 0.4
    >>> mask = torch.ones(1, 4).bool()
    >>> ValueChange(quantile=0.7)(Responses(torch.arange(4)[None], mask, values=values)).int()
    tensor([[1, 0, 1, 0]], dtype=torch.int32)
    """

    needs = ("values",)

    def __call__(self, responses: Responses) -> Tensor:
        mask, values = responses.mask, self.read(responses, "values")
        changes = (values - shift(values)).abs()
        return self.finish(self.peaks(changes, mask & shift(mask)), mask)


@dataclass(frozen=True)
class Learned(_Peaks):
    """Start where a weighted sum of features is high: a linear head on what is known of a token.

    `marlhf credit RUN --learn-cuts` finds the weights. Each feature is standardised within its
    response, so weights keep their meaning while entropy falls and the critic's scale changes.

    >>> numbers = torch.tensor([[0.5, 0.5, 0.9, 0.8]])
    >>> table = Vocabulary(*torch.zeros(5, 9).bool())
    >>> responses = Responses(
    ...     torch.arange(4)[None], torch.ones(1, 4).bool(), ref_logprobs=numbers, vocabulary=table,
    ...     logprobs=numbers, entropy=numbers, values=numbers,
    ... )
    >>> Learned(quantile=0.7, value_fall=-1.0)(responses).int()  # where the value rose
    tensor([[1, 0, 1, 0]], dtype=torch.int32)
    """

    needs = ("entropy", "logprobs", "ref_logprobs", "values", "vocabulary")
    looks_at = "response"  # pyright: ignore  # features are standardised within it

    entropy: float = 0.0
    """Weight of the policy's entropy at the token."""
    surprise: float = 0.0
    """Of the negative log-prob of the token under the policy."""
    ref_surprise: float = 0.0
    """Of that under the reference."""
    value_change: float = 0.0
    """Of how far the token before moved the critic's value, up or down."""
    value_fall: float = 0.0
    """Of how far it lowered it; a rise counts against."""
    word: float = 0.0
    """Of beginning a word."""
    line: float = 0.0
    """Of standing after a line break."""
    sentence: float = 0.0
    """Of standing after a full stop."""
    vocabulary_size: int | None = None
    """Tokens of the tokenizer that weights were learned with; another one is refused."""

    def __call__(self, responses: Responses) -> Tensor:
        table, tokens = self.vocabulary(responses)
        size = len(table.begins_word)
        if self.vocabulary_size not in (None, size):
            raise ValueError(
                f"These cuts were learned with a tokenizer of {self.vocabulary_size} tokens, and "
                f"this one has {size}: learn them on a run with this one."
            )
        values = self.read(responses, "values")
        fall = shift(values) - values
        features = (
            (self.entropy, self.read(responses, "entropy")),
            (self.surprise, -self.read(responses, "logprobs")),
            (self.ref_surprise, -self.read(responses, "ref_logprobs")),
            (self.value_change, fall.abs()),
            (self.value_fall, fall),
            (self.word, table.begins_word[tokens]),
            (self.line, shift(table.has_newline[tokens])),
            (self.sentence, shift(table.ends_sentence[tokens])),
        )
        # A first token starts in any case, and no value before it is known.
        among = responses.mask & shift(responses.mask)
        score = sum(weight * _standardised(feature, among) for weight, feature in features)
        return self.finish(self.peaks(torch.as_tensor(score), among), responses.mask)


FEATURES = tuple(field.name for field in fields(Learned) if field.default == 0.0)
"""What `Learned` has weights for."""
BOUNDS.update(dict.fromkeys(FEATURES, (math.isfinite, "a finite number")))


def thin_out(segments: Segments, scores: Tensor, count: int) -> Segments:
    """Keep the start of each response and its `count` other starts with the highest scores [B, T].

    What began elsewhere joins the macro action before it; after a hole in the mask one starts
    in any case.

    >>> mask = torch.ones(1, 4).bool()
    >>> scores = torch.tensor([[9.0, 1.0, 3.0, 2.0]])
    >>> thin_out(Segments.from_starts(mask, mask), scores, count=1).ids
    tensor([[0, 0, 1, 1]])
    """
    if count < 1:
        raise ValueError(f"count must be at least 1; got {count}.")
    first = segments.mask & (segments.mask.cumsum(dim=1) == 1)
    kept = _highest(scores, segments.starts & ~first, count)
    return Segments.from_starts(first | kept, segments.mask)


def _standardised(x: Tensor, among: Tensor) -> Tensor:
    """With mean 0 and variance 1 over the chosen tokens of each row; 0 where all are equal."""
    x = torch.where(among, x.double(), 0.0)
    count = among.sum(dim=1, keepdim=True).clamp(min=1)
    x = torch.where(among, x - x.sum(dim=1, keepdim=True) / count, 0.0)
    deviation = (x.square().sum(dim=1, keepdim=True) / count).sqrt()
    return x / deviation.clamp(min=1e-6)


def _highest(x: Tensor, among: Tensor, count: Tensor | int) -> Tensor:
    """The `count` largest of each row, [B, 1] or for all; of equal ones the first: [B, T] bool."""
    order = torch.where(among, x, -math.inf).argsort(dim=1, descending=True, stable=True)
    return among & (order.argsort(dim=1) < count)


def _outermost_starts(begin: Tensor, end: Tensor, chosen: Tensor, width: int) -> Tensor:
    """Where a chosen span begins that lies strictly inside no other chosen one: [B, T] bool.

    Counting how many are open at each token finds that without walking the tree.
    """
    ones = chosen.long()
    zeros = torch.zeros(len(begin), width + 2, dtype=torch.int64, device=begin.device)
    begins = zeros.scatter_add(1, begin, ones)
    opened = zeros.scatter_add(1, begin + 1, ones).scatter_add(1, end, -ones)
    return ((begins > 0) & (opened.cumsum(dim=1) == 0))[:, :width]


def _place(mask: Tensor) -> Tensor:
    """0 at the first response token, 1 at the second, ..., and again after each hole: [B, T]."""
    return since(mask & ~shift(mask), mask)


def _greedy_starts(nll: Tensor, mask: Tensor, max_length: int | None) -> Tensor:
    """Starts of the macro actions that each grow while their mean does not rise.

    Where an action ends depends on where it began, so all beginnings are tried at once: an
    action begun at s would end before the first s + k whose token lies above the mean of
    s .. s + k - 1. The real starts are then those reached from the first token by following
    these jumps, or from the first after a hole, found by doubling. Work is B x T x max_length, in
    blocks of bounded memory.
    """
    rows, width = mask.shape
    reach = min(max_length or width, width)
    if not width:
        return mask
    sums = pad(nll.cumsum(dim=1), (1, reach - 1))  # [B, T + reach], before each token
    level = pad(torch.where(mask, nll, math.inf), (0, reach - 1), value=math.inf)  # ends all
    ahead = torch.arange(reach, device=mask.device)  # k
    # Views: [B, T, k], but for the first [B, T, 1].
    views = sums[:, :width, None], sums[:, :-1].unfold(1, reach, 1), level.unfold(1, reach, 1)
    block = max(1, 2**22 // max(1, rows * reach))
    jumps: list[Tensor] = []
    for so_far, later, token in zip(*(torch.split(view, block, dim=1) for view in views)):
        rises = (token * ahead > _tie(later - so_far)) & (ahead > 0)
        jumps.append(torch.where(rises.any(dim=2), rises.int().argmax(dim=2), reach))
    jump = (torch.arange(width, device=mask.device) + torch.cat(jumps, dim=1)).clamp(max=width)
    jump = pad(torch.where(mask, jump, width), (0, 1), value=width)  # holes lead nowhere
    reached = pad((_place(mask) == 0) & mask, (0, 1)).int()
    for _ in range(width.bit_length()):
        reached = (reached + torch.zeros_like(reached).scatter_add(1, jump, reached)).clamp(max=1)
        jump = jump.gather(1, jump)
    return reached[:, :width].bool()


def _tie(x: Tensor) -> Tensor:
    """What a number must exceed to be larger than `x` by more than rounding in float64."""
    return x + 1e-9 * (1 + x.abs())


def mix(x: Tensor) -> Tensor:
    """Scramble int64 numbers (the finaliser of SplitMix64, on signed wrap-around arithmetic)."""
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return x ^ (x >> 31)


def _look_up(table: Tensor | None, tokens: Tensor) -> Tensor:
    """A table at some tokens; False everywhere where there is none."""
    return torch.zeros_like(tokens, dtype=torch.bool) if table is None else table[tokens]
