"""Llama, Mistral, Qwen 2 and Qwen 3, computed without transformers' modules.

The same arithmetic in a third of the operations, over the policy's own weights. Where autocast
computes in bfloat16, copies of the matrices are kept in bfloat16, those with the same input joined
into one: two bytes per weight, instead of casting them all at every step. Norms, embeddings and the
residual stream keep their type, so the numbers are those of autocast.
Axes: B rows, P prompt tokens, T = B * P, S slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from marlhf.models.base import Model
from marlhf.models.graphs import GraphedPasses
from marlhf.models.unpadded import attention_window, is_plain_llama
from marlhf.rollout.fused_step import MAX_ROWS, can_fuse, fused_hidden
from marlhf.rollout.kernels import (
    Positions,
    add_norm,
    attend,
    causal_attention,
    fused,
    rotate_and_store,
    swiglu,
)
from marlhf.rollout.slots import PREFILL_TOKENS, copy_prefixes
from marlhf.rollout.state import Prefixes

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SMALL_MATRIX = 1 << 20
"""Up to so many weights, matrices with the same input are joined in a copy where nothing else needs
one. The call of a product is then as expensive as its arithmetic, and the copy costs little."""
LAUNCHED_NUMBERS = 1 << 26
"""Numbers of hidden states, tokens times hidden size, in one prefill on a GPU, which would be done
with less of a small model before the host has launched the next."""
RECORDED_WORK = 1 << 42
"""Weights times tokens of the largest prefill that is recorded as a CUDA graph, where its shape
comes again. A GPU does more than that while the host launches a prefill."""


class Projection:
    """Linear layers with the same input: one matrix product where their weights are copied."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.outputs = sum(self.sizes)
        first = layers[0]
        small = len(layers) > 1 and self.outputs * first.in_features <= SMALL_MATRIX
        self.copied = first.weight.dtype != dtype or small
        self.weight, self.bias = first.weight, first.bias
        if self.copied:
            self.weight = first.weight.new_empty(self.outputs, first.in_features, dtype=dtype)
            if self.bias is not None:
                self.bias = first.weight.new_empty(self.outputs, dtype=dtype)
        # Where nothing is copied, each layer writes into its columns of one output.
        parts = [(self.weight, self.bias)] if self.copied else [(x.weight, x.bias) for x in layers]
        self.transposed = [(weight.detach().T, bias) for weight, bias in parts]

    @property
    def is_one(self) -> bool:
        """Whether `weight` and `bias` are those of all the layers."""
        return len(self.transposed) == 1

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each copy with its original."""
        if not self.copied:
            return []
        pairs = list(zip(self.weight.split(self.sizes), (x.weight for x in self.layers)))
        if self.bias is not None:
            pairs += zip(self.bias.split(self.sizes), (x.bias for x in self.layers))
        return pairs

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if self.copied or len(self.layers) == 1:
            return F.linear(x, self.weight, self.bias)
        out = x.new_empty(x.shape[0], self.outputs)
        self.into(self.columns(out), x)
        return out

    def columns(self, out: Tensor) -> list[Tensor]:
        """The parts of an output [T, out] that one product each fills."""
        return [out] if self.is_one else list(out.split(self.sizes, dim=1))

    def into(self, columns: list[Tensor], x: Tensor) -> None:
        """The same, written to the `columns` of an output that is there already."""
        for (weight, bias), out in zip(self.transposed, columns):
            if bias is None:
                torch.mm(x, weight, out=out)
            else:
                torch.addmm(bias, x, weight, out=out)


class Block:
    """One layer of the model."""

    def __init__(self, layer: Any, config: Any, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = [_norm(n) for n in (layer.input_layernorm, layer.post_attention_layernorm)]
        self.qkv, self.out, self.gate_up, self.down = (
            Projection(layers, dtype)
            for layers in (
                [attention.q_proj, attention.k_proj, attention.v_proj],
                [attention.o_proj],
                [mlp.gate_proj, mlp.up_proj],
                [mlp.down_proj],
            )
        )
        self.head_norms: tuple[Tensor, Tensor, float] | None = None
        if hasattr(attention, "q_norm"):
            query, epsilon = _norm(attention.q_norm)
            self.head_norms = query, attention.k_norm.weight, epsilon
        self.window = attention_window(attention, config)

    @property
    def projections(self) -> list[Projection]:
        return [self.qkv, self.out, self.gate_up, self.down]


class LlamaDecoder:
    """A `slots.Decoder`."""

    def __init__(self, model: Model, slots: int, capacity: int, dtype: torch.dtype | None) -> None:
        config, trunk = model.config, model.model
        self.embedding: Tensor = trunk.embed_tokens.weight
        self.dtype = dtype or self.embedding.dtype
        self.width = trunk.layers[0].self_attn.head_dim
        self.scale = trunk.layers[0].self_attn.scaling
        self.heads = config.num_attention_heads
        self.blocks = [Block(layer, config, self.dtype) for layer in trunk.layers]
        self.norm, self.head = _norm(trunk.norm), Projection([model.lm_head], self.dtype)
        device = self.embedding.device
        self.groups = config.num_key_value_heads
        shape = (len(self.blocks), slots, 2 * self.groups, capacity, self.width)
        # Zeros: plain attention multiplies masked values by 0, and 0 times a leftover NaN is NaN.
        self.cache = torch.zeros(shape, dtype=self.dtype, device=device)
        self.layers = [(layer, *layer.chunk(2, dim=1)) for layer in self.cache]  # keys, values
        # The angles of every position that fits, once: these families' do not change with length.
        positions = torch.arange(capacity, device=device)
        tables = trunk.rotary_emb(self.embedding[:1], position_ids=positions[None])
        self.rotary = cast(tuple[Tensor, Tensor], tuple(table[0].contiguous() for table in tables))
        self.slots, self.capacity = torch.arange(slots, device=device), capacity
        self.prefill_tokens = PREFILL_TOKENS
        if device.type == "cuda":
            most = LAUNCHED_NUMBERS // self.embedding.shape[1]
            self.prefill_tokens = min(max(PREFILL_TOKENS, most), 4 * PREFILL_TOKENS)
        weights = sum(p.weight.numel() for block in self.blocks for p in block.projections)
        self.recorded_tokens = RECORDED_WORK // weights
        self.passes = GraphedPasses(model)
        # The kernel then reads a prefix from memory once, and from the GPU's L2 cache after that.
        self.borrows = fused(self.embedding)
        self.uses_cpu_steps = CPUStep.fits(self)
        self.cpu_steps: dict[int, CPUStep] = {}  # by the number of slots
        self.fused_rows = MAX_ROWS if can_fuse(self) else 0

    @staticmethod
    def fits(model: Model) -> bool:
        """Whether this model is computed here: a known family with no layer replaced."""
        return type(model).__name__ in FAMILIES and is_plain_llama(model)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Update the copies of weights in place, so that recorded graphs stay valid."""
        projections = [self.head, *(p for block in self.blocks for p in block.projections)]
        pairs = [pair for projection in projections for pair in projection.pairs()]
        if pairs:
            copies, originals = zip(*pairs)
            torch._foreach_copy_(copies, originals)  # pyright: ignore[reportPrivateImportUsage]
        off = torch.autocast(self.embedding.device.type, enabled=False)  # types are chosen by hand
        with off, torch.inference_mode():  # saves a tenth of the time of a small model on a CPU
            yield

    @property
    def cache_bytes(self) -> int:
        return self.cache.nbytes

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        if ids.is_cuda and ids.numel() <= self.recorded_tokens:
            ids, slots = _round_up(ids, slots, self.capacity)
            self.passes("prefill", self._prefill, (ids, slots))
        else:
            self._prefill(ids, slots)

    def _prefill(self, ids: Tensor, slots: Tensor) -> Tensor:
        """Gives `slots` back: a recorded pass has a result."""
        rows, length = ids.shape
        positions = torch.arange(length, device=ids.device).repeat(rows)
        at = Positions(positions, slots.repeat_interleave(length, output_size=rows * length))

        def attention(qkv: Tensor, layer: int) -> Tensor | None:
            self._rotate(qkv, layer, at)
            if layer == len(self.blocks) - 1:
                return None  # a prefill needs the last layer's keys and values, nothing after
            split = [self.heads, self.groups, self.groups]
            qkv = qkv.view(rows, length, -1, self.width).transpose(1, 2)
            window = self.blocks[layer].window
            query, key, value = qkv.split(split, dim=1)
            out = causal_attention(query, key, value, self.scale, window)
            return out.transpose(1, 2).reshape(rows * length, -1)

        self._forward(ids.flatten(), attention)
        return slots

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        reach: int | None,
        prefixes: Prefixes | None = None,
    ) -> Tensor:
        if len(tokens) <= self.fused_rows:
            return self.head(fused_hidden(self, tokens, Positions(positions, prefixes=prefixes)))
        if not self.uses_cpu_steps or prefixes is not None:
            return self.plain_step(tokens, positions, reach, prefixes)
        rows = len(tokens)
        if rows not in self.cpu_steps:
            self.cpu_steps[rows] = CPUStep(self, rows)
        return self.cpu_steps[rows](tokens, positions, reach or self.capacity)

    def plain_step(
        self,
        tokens: Tensor,
        positions: Tensor,
        reach: int | None,
        prefixes: Prefixes | None = None,
    ) -> Tensor:
        at = Positions(positions, self.slots[: len(tokens)], prefixes)

        def attention(qkv: Tensor, layer: int) -> Tensor:
            self._rotate(qkv, layer, at)
            (_, keys, values), window = self.layers[layer], self.blocks[layer].window
            query = qkv[:, : self.heads]
            return attend(query, keys, values, at, reach, self.scale, window).flatten(1)

        hidden = self._forward(tokens, attention)
        assert hidden is not None
        return self.head(hidden)

    def move(self, source: Tensor, target: Tensor, length: int | None = None) -> None:
        for layer in self.cache:  # one by one: what is copied exists twice for a moment
            layer[target, :, :length] = layer[source, :, :length]

    def copy_prefixes(self, source: Tensor, target: Tensor, ends: Tensor) -> None:
        for layer in self.cache:
            copy_prefixes(layer, source, target, ends)

    def _forward(self, ids: Tensor, attention: Any) -> Tensor | None:
        """Tokens [T] through all layers: hidden states [T, hidden], or None if attention stops.

        Each block's output is added to the residual by the norm that follows it, in one kernel.
        """
        residual = self.embedding.index_select(0, ids)
        delta, shape = None, (ids.shape[0], -1, self.width)
        for layer, block in enumerate(self.blocks):
            x = self._norm(residual, delta, block.norms[0])
            attended = attention(block.qkv(x).view(shape), layer)
            if attended is None:
                return None
            x = self._norm(residual, block.out(attended), block.norms[1])
            delta = block.down(swiglu(block.gate_up(x)))
        return self._norm(residual, delta, self.norm)

    def _norm(self, residual: Tensor, delta: Tensor | None, norm: tuple[Tensor, float]) -> Tensor:
        return add_norm(residual, delta, *norm, self.dtype)

    def _rotate(self, qkv: Tensor, layer: int, at: Positions) -> None:
        cache, norms = self.layers[layer][0], self.blocks[layer].head_norms
        rotate_and_store(qkv, self.rotary, at, cache, norms)


class CPUStep:
    """A step of the first `rows` slots on a CPU, in which nothing is allocated but the logits.

    The step of a small model is more than a hundred calls, most of which take longer to call than
    to compute. Here each result is written where the next call reads it, and views are made once:
    what is left are the calls that compute. `LlamaDecoder.plain_step` gives the same bits.
    """

    def __init__(self, decoder: LlamaDecoder, rows: int) -> None:
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
    def fits(decoder: LlamaDecoder) -> bool:
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


def _round_up(ids: Tensor, slots: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """A prefill of one of few shapes, which does the same.

    Positions after a prompt are written anew before they are read, and a row that comes again is
    written over by its like.
    """
    rows, length = ids.shape
    ids = F.pad(ids, (0, min(length + -length % 32, capacity) - length))
    more = -rows % 8 if rows > 8 else (1 << (rows - 1).bit_length()) - rows
    if more:
        ids, slots = (torch.cat((x, x[-1:].expand(more, *x.shape[1:]))) for x in (ids, slots))
    return ids, slots


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, module.variance_epsilon
