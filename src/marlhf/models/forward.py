"""Forward passes over prompts and responses: log-probs, values, scores.

Axes: B rows, W tokens of prompt and response, R response tokens. Rows begin in the first column
and are padded on the right. Under causal attention no real token ever sees that padding, so no
mask is needed: attention takes its fastest path, and there are no rows without anything to attend
to, whose gradients some GPU kernels get wrong.

Texts that branch off a row at several places follow it in one sequence, so that the row itself is
read once. A branch sees the row up to its own place, and itself; its positions count from there.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from marlhf.data.collate import pad_right
from marlhf.errors import SettingError
from marlhf.models.adapters import AdaptedModel
from marlhf.models.compile import compile_blocks, uncompiled
from marlhf.models.heads import members_of
from marlhf.models.llama import (
    LENGTH_DEPENDENT_ROPE,
    is_plain_llama,
    is_unchanged,
    selected_hidden,
    unwrapped,
)
from marlhf.models.logprobs import LogitRule, TokenScores, chosen_logprobs, fit_rule, probe
from marlhf.models.sequences import Sequences, send


@dataclass
class PassChoice:
    """How the passes of a model run. It is an attribute of the model, set when it is loaded."""

    by_llama: bool = False
    """Whether `llama.py` computes them, as long as no hook or the like needs the modules."""
    logit_rule: LogitRule | None = None
    """What the model does to its head's output, found in its first pass; None if no rule fits."""
    rule_known: bool = False
    branches_until: int = 0
    """Up to how many tokens passes over branches were seen to give the numbers of plain passes."""


def pass_choice(model: nn.Module) -> PassChoice:
    """Where nothing was chosen, passes go through the model's own modules."""
    return vars(model).setdefault("_marlhf_passes", PassChoice())


def choose_passes(model: nn.Module) -> None:
    """Let a model take its fastest passes; layers must not be replaced after this.

    They round differently than transformers' modules, and on a CPU depending on the rows of a
    batch. On a GPU the layers of other families are compiled, unless they have adapters.
    """
    if cast(Any, model).device.type == "cuda" and not isinstance(model, AdaptedModel):
        compile_blocks(model)
    for member in members_of(cast(Any, model)):
        pass_choice(member).by_llama = is_plain_llama(member)


def check_rotary(model: Any, longest: int) -> None:
    """Refuse texts so long that their rotary angles depend on the rest of the batch."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = each.get("rope_type")
        if kind not in LENGTH_DEPENDENT_ROPE:
            continue
        limit = each.get("original_max_position_embeddings") or config.max_position_embeddings
        if longest > limit:
            raise SettingError(
                f"The rotary embeddings of this {type(model).__name__} ({kind}) change beyond "
                f"{limit} tokens, so a response would depend on the others in its batch, but "
                f"prompt and response may have {longest}. Lower max_new_tokens or "
                "max_prompt_tokens, or set another rope_type in the model's config."
            )


class TokenStats(NamedTuple):
    logprobs: Tensor  # [B, R]
    entropy: Tensor | None  # [B, R]


def token_stats(
    model: nn.Module,
    sequences: Sequences,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    scores: TokenScores | None = None,
) -> TokenStats:
    """Log-probs of the response tokens at a temperature, float32: [B, R]. 0 at padding.

    The temperature must be the one sampled at: otherwise the ratio of new to old policy is that
    of two policies that nobody sampled from.

    The logits [B, R, V] are never in memory as a whole: they would be most of it. The model's own
    forward stops short of its head, and `chosen_logprobs` applies the head a few positions at a
    time. Where what the model does to logits afterwards is not known, `plain_token_stats` is used.
    `scores` watches the pass, for the gradients of other losses of the same log-probs.
    """
    head = cast(Any, model).get_output_embeddings()
    options: dict[str, Any] = {"entropy": entropy, "scores": scores}
    choice = pass_choice(model)
    unruly = choice.rule_known and choice.logit_rule is None
    if not sum(sequences.lengths) or unruly or not is_plain_head(head):
        return plain_token_stats(model, sequences, temperature, **options)
    real = sequences.real_tokens()  # [N]
    tokens = sequences.responses.flatten()[real]
    hidden = _llama_hidden(model, sequences, sequences.before_responses())
    if hidden is not None:
        rule = _rule(model)
    else:
        rows, width = real // sequences.mask.shape[1], sequences.ids.shape[1]
        positions = rows * width + sequences.before.flatten()[real]
        hidden, rule = hidden_at(model, sequences.ids, positions)
    if rule is None:
        return plain_token_stats(model, sequences, temperature, **options)
    if scores is not None and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()  # of a frozen model: scores end here
    logprobs, surprise = chosen_logprobs(
        hidden,
        head.weight,
        head.bias,
        tokens,
        rule=rule,
        temperature=temperature,
        entropy=entropy,
        dtype=cast_dtype(hidden),
    )
    if scores is not None:
        scores.watch(hidden, logprobs)
    entropies = None if surprise is None else sequences.spread(surprise)
    return TokenStats(sequences.spread(logprobs), entropies)


def plain_token_stats(
    model: nn.Module,
    sequences: Sequences,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    scores: TokenScores | None = None,
) -> TokenStats:
    """What `token_stats` gives, through the model's own head and with all logits at once."""
    with _head_at(model, sequences.before, leaf=scores is not None) as hidden:
        logits = model(input_ids=sequences.ids, use_cache=False).logits  # [B, R, V]
    logits = logits.float() / temperature
    chosen = logits.gather(2, sequences.responses[:, :, None]).squeeze(2)
    normaliser = logits.logsumexp(dim=2)
    logprobs = torch.where(sequences.mask, chosen - normaliser, 0.0)
    if scores is not None:
        scores.watch(hidden[0], logprobs, sequences.real_tokens())
    if not entropy:
        return TokenStats(logprobs, None)
    with torch.no_grad():
        spread = normaliser - ((logits - normaliser[:, :, None]).exp() * logits).sum(dim=2)
    return TokenStats(logprobs, torch.where(sequences.mask, spread, 0.0))


def token_values(model: nn.Module, sequences: Sequences) -> Tensor:
    """The value of the state before each response token, float32: [B, R]. 0 at padding."""
    if sum(sequences.lengths):
        hidden = _llama_hidden(model, sequences, sequences.before_responses())
        if hidden is not None:
            return sequences.spread(_score(model, hidden))
    return torch.where(sequences.mask, _scalar(model, sequences.ids, sequences.before), 0.0)


def token_scores(model: nn.Module, sequences: Sequences) -> Tensor:
    """The scalar at each response token, which that token has been read for: [B, R], float32."""
    if sum(sequences.lengths):
        own = list(zip(sequences.prompt_lengths, sequences.lengths))
        hidden = _llama_hidden(model, sequences, own)
        if hidden is not None:
            return sequences.spread(_score(model, hidden))
    scores = _scalar(model, sequences.ids, sequences.before + 1)
    return torch.where(sequences.mask, scores, 0.0)


def final_scores(model: nn.Module, sequences: Sequences) -> Tensor:
    """The scalar at each row's last real token, float32: [B]; of an ensemble [B, M]."""
    if len(members := members_of(model)) > 1:
        return torch.stack([final_scores(member, sequences) for member in members], dim=1)
    hidden = _llama_hidden(model, sequences, sequences.last_tokens())
    if hidden is not None:
        return _score(model, hidden)
    last = send(torch.tensor(sequences.total_lengths), sequences.ids.device) - 1
    return _scalar(model, sequences.ids, last[:, None]).squeeze(1)


def _llama_hidden(
    model: nn.Module, sequences: Sequences, selected: Sequence[tuple[int, int]]
) -> Tensor | None:
    """The last hidden states at some tokens of each row, (first column, count), by `llama.py`."""
    llama: Any = model
    if hasattr(model, "config"):
        check_rotary(llama, sequences.ids.shape[1])
    if not pass_choice(model).by_llama or not is_unchanged(llama, sequences.ids.shape[1]):
        return None
    dtype = cast_dtype(unwrapped(model)[0].base_model.embed_tokens.weight)
    return selected_hidden(llama, sequences.ids, sequences.total_lengths, selected, dtype)


def position_ids(attention: Tensor) -> Tensor:
    """Positions that count real tokens, so that padding on the left moves nothing."""
    return (attention.long().cumsum(dim=1) - 1).clamp(min=0)


@contextlib.contextmanager
def _head_at(model: nn.Module, columns: Tensor, *, leaf: bool = False) -> Iterator[list[Tensor]]:
    """Let the language model's head see only some columns of each row, [B, R].

    What it saw, [B, R, H], is in the list, with a gradient if it is to be a `leaf`.

    The head is most of the arithmetic of a small model and most of its memory. Going through the
    model's own forward keeps whatever it does to logits afterwards, such as soft caps.
    """

    seen: list[Tensor] = []

    def pick(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = _at(args[0], columns)
        if leaf and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        seen.append(hidden)
        return (seen[-1], *args[1:])

    head = cast(Any, model).get_output_embeddings()
    handle = head.register_forward_pre_hook(pick)
    try:
        yield seen
    finally:
        handle.remove()


def hidden_at(
    model: nn.Module, ids: Tensor, positions: Tensor, **more: Any
) -> tuple[Tensor, LogitRule | None]:
    """The head's input at flat positions [N], [N, H]; and what the model does to its output.

    Hooks on the head take its input and let it compute nothing. In a model's first pass they also
    replace its output by known numbers: the logits then show whether the model scales or caps
    them, or does something that no rule describes.
    """
    inputs: list[Tensor] = []
    head = cast(Any, model).get_output_embeddings()
    choice = pass_choice(model)
    known = None if choice.rule_known else probe(head.out_features, head.weight.device)

    def take_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs.append(args[0].flatten(0, 1).index_select(0, positions))
        return (args[0][:, :0], *args[1:])  # no columns: the head has nothing to multiply

    def replace_output(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        return output if known is None else known[None, None]

    handles = (
        head.register_forward_pre_hook(take_input),
        head.register_forward_hook(replace_output),
    )
    try:
        logits = model(input_ids=ids, use_cache=False, **more).logits
    finally:
        for handle in handles:
            handle.remove()
    if known is not None:
        choice.logit_rule, choice.rule_known = fit_rule(known, logits.detach().flatten()), True
    return inputs[0], choice.logit_rule


@torch.no_grad()
def _rule(model: nn.Module) -> LogitRule | None:
    """What a model does to its head's output, by a pass over one token if there was none yet."""
    choice = pass_choice(model)
    if not choice.rule_known:
        first = torch.zeros(1, dtype=torch.int64, device=cast(Any, model).device)
        with uncompiled():
            hidden_at(model, first[None], first)
    return choice.logit_rule


def is_plain_head(head: nn.Module) -> bool:
    """Whether a head is a matrix and no more: not adapted, sharded, quantised or hooked."""
    hooked = head._forward_hooks or head._forward_pre_hooks  # they may change its output
    return type(head) is nn.Linear and type(head.weight.data) is Tensor and not hooked


def _scalar(model: nn.Module, ids: Tensor, columns: Tensor) -> Tensor:
    """The scalar head at some columns of each row, in float32 even under autocast: [B, R]."""
    backbone = cast(nn.Module, model.base_model)
    hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
    return _score(model, _at(hidden, columns))


def _score(model: nn.Module, hidden: Tensor) -> Tensor:
    """The scalar head, in float32 even under autocast: [..., H] -> [...]; [..., M] of several."""
    head = cast(nn.Module, model.score)
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.float()).squeeze(-1)


def _at(hidden: Tensor, columns: Tensor) -> Tensor:
    """[B, W, H] at columns [B, R]: [B, R, H]."""
    return hidden.gather(1, columns[:, :, None].expand(-1, -1, hidden.shape[2]))


def cast_dtype(hidden: Tensor) -> torch.dtype:
    """What matrices are multiplied in: autocast's type, or the hidden states' own."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


@cache
def keeps_logits(cls: type[nn.Module]) -> bool:
    return "logits_to_keep" in inspect.signature(cls.forward).parameters


@dataclass(frozen=True)
class Branch:
    """Tokens that follow the first `place` tokens of a row; those from `first` on are scored."""

    place: int
    tokens: list[int]
    first: int


def branch_logprobs(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    branches: Sequence[Sequence[Branch]],
    temperature: float = 1.0,
) -> Tensor | None:
    """The sum of log-probs of each branch's scored tokens, row by row, [S], without gradients.

    None where it is not known what the model makes of its head's output.
    """
    head = cast(Any, model).get_output_embeddings()
    if not is_plain_head(head):
        return None
    device = head.weight.device
    joined = [[*row, *chain(*(b.tokens for b in of_row))] for row, of_row in zip(rows, branches)]
    ids, _ = pad_right(joined, 0)
    shape = ids.shape
    # Of each token: its branch (0 is the row itself, -1 padding), how much of the row it sees, and
    # its position.
    owner, reach, position = (np.full(shape, fill, dtype=np.int64) for fill in (-1, 0, 0))
    before: list[int] = []  # the flat place before each scored token
    scored: list[int] = []
    counts: list[int] = []
    for i, (row, of_row) in enumerate(zip(rows, branches)):
        end = len(row)
        owner[i, :end], reach[i, :end], position[i, :end] = 0, end, np.arange(end)
        for number, branch in enumerate(of_row, start=1):
            begin, end = end, end + len(branch.tokens)
            owner[i, begin:end], reach[i, begin:end] = number, branch.place
            position[i, begin:end] = branch.place + np.arange(end - begin)
            places = [branch.place - 1, *range(begin, end - 1)][branch.first :]
            before += [i * shape[1] + place for place in places]
            scored += branch.tokens[branch.first :]
            counts.append(len(places))
    of, sees, positions = (send(torch.from_numpy(x), device) for x in (owner, reach, position))
    column = torch.arange(shape[1], device=device)
    own = of[:, :, None] == of[:, None]
    shared = (of[:, None] == 0) & (column < sees[:, :, None])
    visible = (column <= column[:, None]) & (own | shared)  # [B, W, W]
    dtype = cast_dtype(head.weight)
    bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    where, tokens, sizes = (send(torch.tensor(x), device) for x in (before, scored, counts))
    with torch.no_grad(), uncompiled():
        hidden, rule = hidden_at(
            model,
            send(ids, device),
            where,
            attention_mask=bias[:, None],
            position_ids=positions,
        )
        if rule is None:
            return None
        logprobs, _ = chosen_logprobs(
            hidden,
            head.weight,
            head.bias,
            tokens,
            rule=rule,
            temperature=temperature,
            dtype=cast_dtype(hidden),
        )
    branch = torch.arange(len(counts), device=device).repeat_interleave(
        sizes, output_size=len(scored)
    )
    return logprobs.new_zeros(len(counts)).index_add_(0, branch, logprobs)
