"""A decode step of a small Llama on a CPU. Axes: S slots, K key-value heads, C positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from marlhf.rollout.llama_weights import LlamaWeights


class CPUStep:
    """A step of the first `rows` slots on a CPU, in which nothing is allocated but the logits.

    The step of a small model is more than a hundred calls, most of which take longer to call than
    to compute. Here each result is written where the next call reads it, and views are made once:
    what is left are the calls that compute. `LlamaDecoder.plain_step` gives the same bits.
    """

    def __init__(self, decoder: LlamaWeights, rows: int) -> None:
        heads, groups, width = decoder.heads, decoder.groups, decoder.width
        # Not the decoder, which would then outlive its session, until garbage is collected.
        self.embedding, self.blocks, self.scale = decoder.embedding, decoder.blocks, decoder.scale
        self.norm, self.head = decoder.norm, decoder.head
        block = decoder.blocks[0]  # all have the same sizes

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype)

        self.residual, self.normed, self.delta = (
            empty(decoder.embedding.shape[1]) for _ in range(3)
        )
        self.size = empty(1)
        # Numbers of a norm as tensors: a call with a Python number takes three times as long.
        norms = [decoder.norm, *(norm for b in decoder.blocks for norm in b.norms)]
        self.epsilons = {epsilon: torch.tensor(epsilon) for _, epsilon in norms}
        self.share = torch.tensor(1 / self.residual.shape[1])
        # Rotation is as in `Positions.rotary`, but half by half, which saves the roll.
        cos, sin = decoder.rotary
        sin = torch.cat((-sin[:, : width // 2], sin[:, width // 2 :]), dim=1)
        self.table = torch.cat((cos, sin), dim=1)  # [C, 2 D]
        self.angles = empty(2 * width)
        self.cos, sin = (x[:, None] for x in self.angles.chunk(2, dim=1))
        self.sin = sin.chunk(2, dim=2)
        projected, qkv = (empty(heads + 2 * groups, width) for _ in range(2))
        self.projected = block.qkv.columns(projected.flatten(1))
        self.unrotated, self.rotated = projected[:, :-groups], qkv[:, :-groups]
        self.unrotated_halves = self.unrotated.chunk(2, dim=2)
        self.rotated_halves = self.rotated.chunk(2, dim=2)
        self.projected_value, self.value = projected[:, -groups:], qkv[:, -groups:]
        self.stored = qkv[:, heads:, None]  # keys and values, [S, 2 K, 1, D]
        self.query = qkv[:, :heads].view(rows, groups, -1, width)  # grouped as in `attend`
        self.attended = torch.empty_like(self.query, memory_format=torch.contiguous_format)
        self.attended_flat = self.attended.flatten(1)
        gate_up = empty(block.gate_up.outputs)
        self.gate_up, (self.gate, self.up) = block.gate_up.columns(gate_up), gate_up.chunk(2, dim=1)
        self.gated = empty(block.gate_up.outputs // 2)
        self.column = torch.arange(decoder.capacity)
        self.hidden = empty(decoder.capacity, dtype=torch.bool)
        self.bias = empty(decoder.capacity)
        self.zero, self.minus_infinity = torch.tensor(0.0), torch.tensor(-torch.inf)
        self.cache = [layer[:rows] for layer in decoder.cache]
        self.reach = 0
        self.keys_values: list[tuple[Tensor, ...]] = []  # of each layer, up to `reach`

    @staticmethod
    def fits(decoder: LlamaWeights) -> bool:
        """Whether a decoder's steps are computed here."""
        return (
            decoder.embedding.is_cpu
            and decoder.embedding.dtype == decoder.dtype == torch.float32
            and all(
                b.head_norms is None and (b.window is None or decoder.capacity <= b.window)
                for b in decoder.blocks
            )
        )

    def __call__(self, tokens: Tensor, positions: Tensor, reach: int) -> Tensor:
        torch.index_select(self.embedding, 0, tokens, out=self.residual)
        torch.index_select(self.table, 0, positions, out=self.angles)
        if reach != self.reach:
            self.reach = reach
            self.keys_values = [layer[:, :, :reach].chunk(2, dim=1) for layer in self.cache]
        hidden, bias = self.hidden[:, :reach], self.bias[:, :reach]
        torch.gt(self.column[:reach], positions[:, None], out=hidden)
        torch.where(hidden, self.minus_infinity, self.zero, out=bias)
        bias = bias[:, None, None]
        place = positions[:, None, None, None].expand_as(self.stored)
        added = False
        for block, cache, (key, value) in zip(self.blocks, self.cache, self.keys_values):
            self._norm(block.norms[0], add=added)
            block.qkv.into(self.projected, self.normed)
            self._rotate()
            cache.scatter_(2, place, self.stored)
            out = F.scaled_dot_product_attention(
                self.query, key, value, attn_mask=bias, scale=self.scale
            )
            self.attended.copy_(out)
            block.out.into([self.delta], self.attended_flat)
            self._norm(block.norms[1])
            block.gate_up.into(self.gate_up, self.normed)
            torch.mul(F.silu(self.gate, inplace=True), self.up, out=self.gated)
            block.down.into([self.delta], self.gated)
            added = True
        self._norm(self.norm)
        return self.head(self.normed)

    def _norm(self, norm: tuple[Tensor, float], *, add: bool = True) -> None:
        """As `add_norm`; before the first block there is nothing to add."""
        weight, epsilon = norm
        if add:
            self.residual.add_(self.delta)
        torch.linalg.vector_norm(self.residual, dim=1, keepdim=True, out=self.size)
        square = self.size.mul_(self.size).mul_(self.share)
        scale = square.add_(self.epsilons[epsilon]).rsqrt_()
        torch.mul(self.residual, scale, out=self.normed).mul_(weight)

    def _rotate(self) -> None:
        torch.mul(self.unrotated, self.cos, out=self.rotated)
        (first, second), (to_first, to_second) = self.unrotated_halves, self.rotated_halves
        to_first.addcmul_(second, self.sin[0])
        to_second.addcmul_(first, self.sin[1])
        self.value.copy_(self.projected_value)
