"""Kernels of our own beside what they replaced, on a GPU: microseconds, best of several.

    python bench/llama_kernels.py

Attention of one layer of 40,960 tokens, with nine query heads over three of 64 numbers, forward and
backward: torch's with the rotation of its gradients, and ours. Gate, up and SwiGLU of one layer, by
cuBLAS and a kernel, and in one kernel, forward and backward. Then a whole decode step of
SmolLM2-135M's shape, random weights, as a CUDA graph: in five kernels per layer and in nine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from marlhf.models import layer_kernels
from marlhf.rollout.llama import LlamaDecoder

HEADS, GROUPS, WIDTH, TOKENS = 9, 3, 64, 40960
LENGTHS = (320, 640, 1024)
GATED = (4096, 16384, 40960, 81920)
STEPS = (*((slots, 288) for slots in (16, 32, 64, 128, 192, 256, 384, 512, 768)), (16, 600))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here, and the kernels are for one")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}\n")
    print(f"{'rows of':>8}{'torch forward':>15}{'ours':>8}{'torch backward':>16}{'ours':>8}")
    for length in LENGTHS:
        numbers = attention(length)
        print(f"{length:8}{numbers[0]:15.0f}{numbers[1]:8.0f}{numbers[2]:16.0f}{numbers[3]:8.0f}")
    print(f"\n{'tokens':>8}{'product, SwiGLU':>17}{'in one':>8}{'backward':>10}{'in one':>8}")
    for tokens in GATED:
        numbers = gates(tokens)
        print(f"{tokens:8}{numbers[0]:17.0f}{numbers[1]:8.0f}{numbers[2]:10.0f}{numbers[3]:8.0f}")
    print(f"\n{'slots':>8}{'keys':>8}{'nine kernels':>15}{'five':>8}")
    for slots, keys in STEPS:
        plain, ours = decode_steps(slots, keys)
        print(f"{slots:8}{keys:8}{plain:15.0f}{ours:8.0f}")


def attention(length: int, device: str = "cuda") -> list[float]:
    """Forward by torch and by ours, and backward by both, for rows of some length."""
    rows, heads = TOKENS // length, HEADS + 2 * GROUPS
    qkv = torch.randn(rows, length, heads, WIDTH, device=device, dtype=torch.bfloat16)
    angles = torch.rand(length, WIDTH // 2, device=device).repeat(1, 2)
    rotary, scale = (angles.cos(), angles.sin()), WIDTH**-0.5
    parts = qkv.transpose(1, 2).split((HEADS, GROUPS, GROUPS), dim=1)
    query, key, value = leaves = [part.detach().requires_grad_() for part in parts]

    def by_torch() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )

    theirs, grad = by_torch(), torch.randn(rows, length, HEADS, WIDTH, device=device).to(qkv)
    positions = torch.arange(length, device=device).repeat(rows)

    def back_by_torch() -> torch.Tensor:
        grads = torch.autograd.grad(theirs, leaves, grad.transpose(1, 2), retain_graph=True)
        return layer_kernels.rotate_backward((grads[0], grads[1], grads[2]), rotary, positions)

    def by_ours() -> tuple[torch.Tensor, torch.Tensor]:
        return layer_kernels.attention(qkv, HEADS, scale)

    out, lse = by_ours()

    def back_by_ours() -> torch.Tensor:
        return layer_kernels.attention_backward(grad, qkv, out, lse, rotary, scale)

    check_close(out, theirs.transpose(1, 2))
    check_close(back_by_ours().flatten(), back_by_torch().flatten())
    with torch.no_grad():
        forward = microseconds(by_torch), microseconds(by_ours)
    return [*forward, microseconds(back_by_torch), microseconds(back_by_ours)]


@torch.no_grad()
def gates(tokens: int, device: str = "cuda") -> list[float]:
    """A product and SwiGLU for so many tokens, and both in one kernel; the same backward."""
    kernels = layer_kernels.triton_gates
    x = torch.randn(tokens, 576, device=device, dtype=torch.bfloat16)
    weight = torch.randn(2 * 1536, 576, device=device, dtype=torch.bfloat16) / 24
    gate_up, down = F.linear(x, weight), weight[:1536].T.contiguous()
    ways = [
        lambda: (layer_kernels.swiglu(F.linear(x, weight)),),
        lambda: (kernels.gated(x, weight),),
        lambda: layer_kernels.swiglu_backward(x @ down, gate_up),
        lambda: kernels.gated_backward(x, down, gate_up),
    ]
    for two, one in (ways[:2], ways[2:]):
        for theirs, ours in zip(two(), one()):
            check_close(ours, theirs)
    return [microseconds(way) for way in ways]


@torch.no_grad()
def decode_steps(slots: int, keys: int, device: str = "cuda") -> list[float]:
    """A step as nine kernels per layer, and as five."""
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        intermediate_size=1536,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config).eval()
        tokens = torch.randint(0, config.vocab_size, (slots,))
        positions = torch.full((slots,), keys)
    decoder = LlamaDecoder(model, slots, 640, torch.bfloat16)
    decoder.cache.normal_()
    found, logits = [], []
    with decoder.ready():
        for step in (decoder.plain_step, decoder.step):
            logits.append(step(tokens, positions, None))
            found.append(microseconds(recorded(lambda step=step: step(tokens, positions, None))))
    check_close(*(x.float().log_softmax(dim=1) for x in logits))
    return found


def recorded(work: Callable[[], object]) -> Callable[[], None]:
    """As one CUDA graph. `work` has run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def microseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """The best mean of three, once warm."""
    work()
    means = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize()
        means.append(start.elapsed_time(end) * 1000 / repeats)
    return min(means)


def check_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Refuse to time what is wrong; bfloat16 rounds differently on both ways."""
    off = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    if not off < 0.02:
        raise SystemExit(f"the kernels give other numbers: off by {off:.1%}")


if __name__ == "__main__":
    main()
