"""Reductions that see only what the mask counts, and the checks every core function shares.

Axes: B rows, T response tokens. Padding may hold anything, NaN included: it is replaced before
it is used, never multiplied by zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def masked_mean(x: Tensor, mask: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Sum over the mask, divided by `count`.

    `count` is the number of tokens over all micro-batches and ranks: with it, the parts of a
    batch add up to exactly what the whole batch would give. Without it, this batch is the whole.

    >>> masked_mean(torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[True, True, False]]))
    tensor(2.)
    """
    check_tokens(mask, x=x)
    return keep(x, mask).sum() / (mask.sum().clamp(min=1) if count is None else count)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares as one tensor [3], ready for one all-reduce.

    float64 where the device has it: the variance is a small difference of large sums.

    >>> moments(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]])).tolist()
    [2.0, 4.0, 10.0]
    """
    check_tokens(mask, x=x)
    x = keep(x, mask).to(torch.float32 if x.device.type == "mps" else torch.float64)
    return torch.stack((mask.sum().to(x.dtype), x.sum(), x.square().sum()))


def whiten(
    x: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    stats: Tensor | None = None,  # [3] from `moments`, summed over ranks and micro-batches
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Scale to unit variance over the mask and, unless `shift_mean` is off, to zero mean.

    To weight macro actions equally instead of tokens, take the statistics there:
    `whiten(x, mask, stats=moments(segments.first(x), segments.macro_mask))`.

    >>> whiten(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]]))
    tensor([[-0.7071,  0.7071,  0.0000]])
    """
    check_tokens(mask, x=x)
    x = keep(x, mask)
    count, total, squares = (moments(x, mask) if stats is None else stats).unbind()
    mean = total / count.clamp(min=1)
    variance = (squares - total * mean).clamp(min=0) / (count - 1).clamp(min=1)  # unbiased
    centre = mean if shift_mean else torch.zeros_like(mean)
    scale = (variance + eps).rsqrt()
    return keep((x - centre.to(x.dtype)) * scale.to(x.dtype), mask)


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where the mask counts and 0 elsewhere, in float32 or wider."""
    return torch.where(mask, wide(x), 0.0)


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def shift(x: Tensor, by: int = 1) -> Tensor:
    """Each row moved `by` places to the right, or to the left where it is negative; 0 comes in."""
    if not x.shape[1]:
        return x
    return pad(x[:, :-by], (by, 0)) if by > 0 else pad(x[:, -by:], (0, -by))


def since(starts: Tensor, mask: Tensor) -> Tensor:
    """Tokens that the mask counts since the latest start: [B, T] int64."""
    place = mask.cumsum(dim=1) - 1
    return place - torch.where(starts, place, 0).cummax(dim=1).values if mask.shape[1] else place


def last_token(mask: Tensor) -> Tensor:
    """True on the last token of each row that counts, whatever holes the mask has: [B, T] bool."""
    return mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))


def check_tokens(mask: Tensor, **tensors: Tensor) -> None:
    """A mask [B, T] and numbers for its tokens."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}. Use `mask.bool()`.")
    if mask.ndim != 2:
        raise ValueError(f"mask must be [B, T], got shape {list(mask.shape)}.")
    check_shape(mask, **tensors)
    _check_floating(**tensors)


def check_shape(mask: Tensor, **tensors: Tensor) -> None:
    """Shapes and dtypes live on the host: no check of them waits for the device."""
    for name, x in tensors.items():
        if x.shape != mask.shape:
            raise ValueError(
                f"{name} must have the shape of the mask, {list(mask.shape)}, "
                f"got {list(x.shape)}. Cut both to the response tokens."
            )


def check_rows(**tensors: Tensor) -> None:
    """One number for each row: floating point [B], all of one length."""
    rows = None
    for name, x in tensors.items():
        if x.ndim != 1 or (rows is not None and len(x) != rows):
            wanted = "[B]" if rows is None else f"[{rows}]"
            raise ValueError(f"{name} must have shape {wanted}, got {list(x.shape)}.")
        rows = len(x)
    _check_floating(**tensors)


def _check_floating(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {x.dtype}. Use `{name}.float()`.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")


def complain(wrong: Tensor, what: str, remedy: str = "") -> None:
    """Name the rows in which anything is wrong. Waits for the device: for `validate` only."""
    if rows := sorted({int(row) for row in wrong.nonzero()[:, 0]}):
        named = f"{rows[:10]}{' and more' if len(rows) > 10 else ''}"
        raise ValueError(f"{what} rows {named}. {remedy}".strip())
