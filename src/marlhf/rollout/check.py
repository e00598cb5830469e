"""Whether a way of sampling is right for a model: tried before it is used.

Model families differ in more ways than can be listed: windows, chunks, states, what they make of
padding. So each way of sampling is run on a few fixed tokens, and its logits are compared with
those of one pass without a cache, which is what training computes.
Axes: B rows, N positions compared, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from marlhf.models.base import Model
from marlhf.models.compile import uncompiled
from marlhf.rollout.plain import PlainEngine
from marlhf.rollout.slots import Decoder, forward_parameters

SHORT = 6
"""Tokens of the check where nothing changes with length."""
SIZE_SETTINGS = re.compile(r"window|chunk|topk|block_size|compress")
"""Names of settings with a number of tokens beyond which attention changes."""
BEYOND = 4
"""The check has this many times as many tokens: just beyond its size a window changes little."""
STEPS = 16
"""Tokens that the check of the plain engine feeds one at a time."""


def check_length(config: Any, longest: int) -> int:
    """How many tokens the check needs for texts of at most `longest` tokens.

    A window or chunk matters beyond its size only, so a model with sizes that no text exceeds is
    checked on few tokens.
    """
    settings = config.get_text_config().to_dict()
    sizes = [
        size
        for name, value in settings.items()
        if SIZE_SETTINGS.search(name)
        for size in _numbers(value)
        if size < longest
    ]
    length = BEYOND * max(sizes, default=0)
    return max(SHORT, min(length, settings.get("max_position_embeddings") or length))


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        value = list(value.values())
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, int) and not isinstance(each, bool):
            yield each


def decoder_error(
    decoder_class: Callable[[Model, int, int, torch.dtype | None], Decoder],
    model: Model,
    dtype: torch.dtype | None,
    length: int = SHORT,
    *,
    extends: bool = False,
) -> float:
    """The error of a decoder's logits, relative to their spread.

    Two prompts in slots 2 and 0, with slot 1 at rest between them. With `extends` the prompts come
    in two parts, the second at other positions in each.
    """
    ids = _probe(model, length)
    device = ids.device
    slots = torch.tensor([2, 0], device=device)
    last = torch.tensor([length - 1, length - 3], device=device)
    tokens = torch.zeros(3, dtype=torch.int64, device=device)
    positions = torch.zeros_like(tokens)
    tokens[slots], positions[slots] = ids.gather(1, last[:, None]).squeeze(1), last
    decoder = decoder_class(model, 3, length + 2, dtype)
    with decoder.ready():
        if extends:
            half = length // 2
            decoder.prefill(ids[:, :half], slots)
            starts = last - last[0] + half
            rest = starts[:, None] + torch.arange(length - 1 - half, device=device)
            decoder.extend(ids.gather(1, rest), slots, rest, length)
        else:
            decoder.prefill(ids[:, :-1], slots)
        ours = decoder.step(tokens, positions, None)[slots].clone()
    return _relative_error(ours[:, None], _without_cache(model, ids, last[:, None]))


def plain_error(engine: PlainEngine, length: int = SHORT, *, together: bool) -> float:
    """The same for the plain engine, with rows of different lengths in one batch or each alone."""
    steps = min(STEPS, length // 2 - 1)
    lengths = [length, length // 2 + 1, steps + 2]  # from no padding to little else
    ids = _probe(engine.model, length, len(lengths))
    ours: list[Tensor] = []
    for batch in [[0, 1, 2]] if together else [[0], [1], [2]]:
        rows = [ids[i, : lengths[i]] for i in batch]
        decode = engine.decode([row[:-steps].tolist() for row in rows], steps + 1)
        logits = [next(decode)]
        for step in range(-steps, 0):
            logits.append(decode.send(torch.stack([row[step] for row in rows])))
        ours.append(torch.stack(logits, dim=1))
    ends = torch.tensor(lengths, device=ids.device)[:, None]
    last = ends - 1 - torch.arange(steps, -1, -1, device=ids.device)
    return _relative_error(torch.cat(ours), _without_cache(engine.model, ids, last))


def _probe(model: Model, length: int, rows: int = 2) -> Tensor:
    """Rows of tokens from all over the vocabulary.

    Its first tokens are often special and untrained, and their logits in bfloat16 can be little
    but rounding.
    """
    size = model.config.get_text_config().vocab_size
    count = torch.arange(rows * length, device=model.device).view(rows, length)
    return (size // 3 + count * 7919) % size


@uncompiled()
def _without_cache(model: Model, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits at some positions, [B, N], of one pass: [B, N, V]."""
    if forward_parameters(model) & {"logits_to_keep", "kwargs"}:
        kept = positions.unique()  # sorted
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits
        columns = torch.searchsorted(kept, positions)
    else:
        logits, columns = model(input_ids=ids, use_cache=False).logits, positions
    return logits[torch.arange(len(ids), device=ids.device)[:, None], columns]


def _relative_error(ours: Tensor, reference: Tensor) -> float:
    ours, reference = ours.float(), reference.float()
    return float((ours - reference).norm() / (reference - reference.mean()).norm())
