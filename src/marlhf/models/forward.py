"""Forward passes over prompts and responses: log-probs, values, scores.

Axes: B rows, W tokens of prompt and response, R response tokens. Rows begin in the first column
and are padded on the right. Under causal attention no real token ever sees that padding, so no
mask is needed: attention takes its fastest path, and there are no rows without anything to attend
to, whose gradients some GPU kernels get wrong.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from marlhf.models.compile import uncompiled
from marlhf.models.fast_passes import FastPass, fast_pass
from marlhf.models.logprobs import LogitRule, chosen_logprobs, fit_rule, probe
from marlhf.models.packed import one_text_per_row
from marlhf.models.scores import TokenScores
from marlhf.models.sequences import Sequences, send
from marlhf.models.unpadded import Rows, StillPlain, in_cpu_floats, is_plain_llama, unpadded_hidden


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
    if not sum(sequences.lengths) or _RULES.get(model, LogitRule()) is None or not _plain(head):
        return plain_token_stats(model, sequences, temperature, **options)
    real = sequences.real_tokens()  # [N]
    tokens, picked = sequences.responses.flatten()[real], sequences.before_responses()
    if (fast := fast_pass(model, sequences, picked, _cast_dtype(head.weight))) is not None:
        rule = _rule(model)
        if rule is not None and not entropy and scores is None:
            logprobs = _fast_logprobs(model, fast, tokens, rule, temperature)
            return TokenStats(sequences.spread(logprobs), None)
        hidden = fast.plain_hidden()  # a graph replays without hooks
    elif _can_unpad(model, sequences):
        hidden, rule = _unpadded(model, sequences, picked), _rule(model)
    else:
        rows, width = real // sequences.mask.shape[1], sequences.ids.shape[1]
        positions = rows * width + sequences.before.flatten()[real]
        hidden, rule = _hidden_at(model, sequences.ids, positions)
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
        dtype=_cast_dtype(hidden),
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
    with _head_at(model, sequences.before, leaf=scores is not None) as hidden, one_text_per_row():
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
        scalars = _fast_scalars(model, sequences, sequences.before_responses())
        if scalars is not None:
            return sequences.spread(scalars)
    return torch.where(sequences.mask, _scalar(model, sequences.ids, sequences.before), 0.0)


def final_scores(model: nn.Module, sequences: Sequences) -> Tensor:
    """The scalar at each row's last real token, float32: [B]."""
    if (scalars := _fast_scalars(model, sequences, sequences.last_tokens())) is not None:
        return scalars
    prompts = send(torch.tensor(sequences.prompt_lengths), sequences.ids.device)
    last = prompts + sequences.mask.sum(dim=1) - 1
    return _scalar(model, sequences.ids, last[:, None]).squeeze(1)


def _fast_logprobs(
    model: nn.Module, fast: FastPass, tokens: Tensor, rule: LogitRule, temperature: float
) -> Tensor:
    """Log-probs of tokens [N] by a fast pass to the tokens before them: [N]."""

    def read(hidden: Tensor, tokens: Tensor) -> Tensor:
        head = cast(Any, model).get_output_embeddings()
        options: dict[str, Any] = {"rule": rule, "temperature": temperature}
        dtype = _cast_dtype(hidden)
        return chosen_logprobs(hidden, head.weight, head.bias, tokens, dtype=dtype, **options)[0]

    return fast(("logprobs", temperature), read, F.pad(tokens, (0, fast.size - fast.count)))


def _fast_scalars(
    model: nn.Module, sequences: Sequences, picked: Sequence[tuple[int, int]]
) -> Tensor | None:
    """The scalar head at some tokens of each row, (first column, count): [N]."""
    if _can_unpad(model, sequences):
        return cast(nn.Module, model.score)(_unpadded(model, sequences, picked)).squeeze(1)
    fast = fast_pass(model, sequences, picked, _cast_dtype(next(model.parameters())))

    def read(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return cast(nn.Module, model.score)(hidden.float()).squeeze(1)

    return None if fast is None else fast("scalars", read)


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


_RULES: WeakKeyDictionary[nn.Module, LogitRule | None] = WeakKeyDictionary()
"""What each model does to its head's output, found in its first pass; None if no rule fits."""


def _hidden_at(model: nn.Module, ids: Tensor, positions: Tensor) -> tuple[Tensor, LogitRule | None]:
    """The head's input at flat positions [N], [N, H]; and what the model does to its output.

    Hooks on the head take its input and let it compute nothing. In a model's first pass they also
    replace its output by known numbers: the logits then show whether the model scales or caps
    them, or does something that no rule describes.
    """
    inputs: list[Tensor] = []
    head = cast(Any, model).get_output_embeddings()
    known = None if model in _RULES else probe(head.out_features, head.weight.device)

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
        with one_text_per_row():
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    if known is not None:
        _RULES[model] = fit_rule(known, logits.detach().flatten())
    return inputs[0], _RULES[model]


@torch.no_grad()
def _rule(model: nn.Module) -> LogitRule | None:
    """What a model does to its head's output, by a pass over one token if there was none yet."""
    if model not in _RULES:
        first = torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
        with uncompiled():
            _hidden_at(model, first[None], first)
    return _RULES[model]


def _plain(head: nn.Module) -> bool:
    """Whether a head is a matrix and no more: not adapted, sharded, quantised or hooked."""
    hooked = head._forward_hooks or head._forward_pre_hooks  # they may change its output
    return type(head) is nn.Linear and type(head.weight.data) is Tensor and not hooked


def _scalar(model: nn.Module, ids: Tensor, columns: Tensor) -> Tensor:
    """The scalar head at some columns of each row, in float32 even under autocast: [B, R]."""
    backbone, head = cast(nn.Module, model.base_model), cast(nn.Module, model.score)
    with one_text_per_row():
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
    hidden = _at(hidden, columns)
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.float()).squeeze(2)


def _at(hidden: Tensor, columns: Tensor) -> Tensor:
    """[B, W, H] at columns [B, R]: [B, R, H]."""
    return hidden.gather(1, columns[:, :, None].expand(-1, -1, hidden.shape[2]))


_UNPADDED: WeakKeyDictionary[nn.Module, StillPlain] = WeakKeyDictionary()


def unpad_rows(model: nn.Module) -> None:
    """Let passes of this model on a CPU do without padding, where they can.

    For training, where nothing needs the bits of the padded pass: its rounding is another, and
    depends on the rows of a batch. Layers must not be replaced after this.
    """
    if is_plain_llama(cast(Any, model)):
        _UNPADDED[model] = StillPlain(cast(Any, model))


def _can_unpad(model: nn.Module, sequences: Sequences) -> bool:
    plain = _UNPADDED.get(model)
    if plain is None or not in_cpu_floats(cast(Any, model)):
        return False
    return plain(cast(Any, model), sequences.ids.shape[1])


def _unpadded(model: nn.Module, sequences: Sequences, picked: Sequence[tuple[int, int]]) -> Tensor:
    rows = Rows.of(sequences.total_lengths, sequences.ids.shape[1], picked)
    return unpadded_hidden(cast(Any, model), sequences.ids, rows)


def _cast_dtype(hidden: Tensor) -> torch.dtype:
    """What matrices are multiplied in: autocast's type, or the hidden states' own."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


@cache
def keeps_logits(cls: type[nn.Module]) -> bool:
    return "logits_to_keep" in inspect.signature(cls.forward).parameters
