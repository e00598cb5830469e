"""One forward and backward pass over rows of varying length: compiled, packed, by our kernels.

    python bench/passes.py                  # SmolLM2-135M's shape on a GPU
    python bench/passes.py --shape tiny     # a CPU, where nothing is packed

Random weights; prompts and responses with the lengths of TL;DR. Milliseconds of the device and of
the host, which is free again once everything is launched.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import transformers
from ppo_step import SHAPES, random_model, tldr_prompts
from torch import Tensor, nn

from marlhf.models.base import autocast
from marlhf.models.compile import compile_blocks
from marlhf.models.fast_passes import pack_rows, use_kernels
from marlhf.models.forward import Sequences, token_stats, token_values

REPEATS = 12


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="smollm2" if gpu else "tiny")
    parser.add_argument("--rows", type=int, default=128)
    args = parser.parse_args()
    shape, device = SHAPES[args.shape], torch.device("cuda" if gpu else "cpu")
    name = torch.cuda.get_device_name() if gpu else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    torch.manual_seed(0)
    sequences = rows_like_tldr(args.rows, shape.vocabulary, device)
    used, padded = sum(sequences.total_lengths), sequences.ids.numel()
    print(f"{args.shape}: {args.rows} rows, {used} tokens, {padded} with padding\n")
    print(f"{'pass':34}{'best ms':>9}{'median':>9}{'host':>9}")
    for role, scalar in (("policy", False), ("critic", True)):
        model = random_model(shape, device, scalar, False)
        packed, kernels = copy.deepcopy(model), copy.deepcopy(model)
        if gpu:
            compile_blocks(model)
            compile_blocks(packed)
            pack_rows(packed)
            use_kernels(kernels)
        for kind, one in (("padded", model), ("packed", packed), ("kernels", kernels)):
            read = token_values if scalar else logprobs
            report(f"{role}, {kind}: forward, backward", partial(learn, one, read, sequences))
            report(f"{role}, {kind}: forward", partial(look, one, read, sequences))


def rows_like_tldr(rows: int, vocabulary: int, device: torch.device) -> Sequences:
    """Prompts of 228 tokens in the mean, responses of 33."""
    prompts = tldr_prompts(rows)
    responses = (torch.randn(rows) * 12 + 33).clamp(4, 48).int().tolist()

    def tokens(lengths: list[int]) -> list[list[int]]:
        return [torch.randint(2, vocabulary, (n,)).tolist() for n in lengths]

    return Sequences.from_lists(tokens(prompts), tokens(responses), 0, device)


def logprobs(model: nn.Module, sequences: Sequences) -> Tensor:
    return token_stats(model, sequences).logprobs


def learn(model: nn.Module, read: Callable[..., Tensor], sequences: Sequences) -> None:
    with autocast(sequences.ids.device, "auto"):
        found = read(model, sequences)
    found.square().sum().backward()


@torch.no_grad()
def look(model: nn.Module, read: Callable[..., Tensor], sequences: Sequences) -> None:
    with autocast(sequences.ids.device, "auto"):
        read(model, sequences)


def report(name: str, run: Callable[[], None]) -> None:
    gpu = torch.cuda.is_available()
    for _ in range(3):  # compile, record, replay
        run()
    times: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        if gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start, host))
    whole, host = zip(*times)
    columns = (min(whole), statistics.median(whole), min(host))
    print(f"{name:34}" + "".join(f"{1000 * x:9.1f}" for x in columns), flush=True)


if __name__ == "__main__":
    main()
