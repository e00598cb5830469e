"""Seconds of a conversation beside those of one response with as many tokens.

    python bench/turns.py                        # SmolLM2-135M's shape on a GPU
    python bench/turns.py --shape qwen2-1.5b     # a larger one
    python bench/turns.py --shape tiny           # a CPU

Every turn is as long as may be, and so is every reply, which comes at once. One response is
measured twice: with as many sampled tokens as all turns have, and with the world's as well, as if
they had been sampled, too. Random weights; the best of a few runs after one that warms up.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import torch
import transformers
from decode import SHAPES as DECODE_SHAPES
from decode import Shape
from transformers import AutoModelForCausalLM

from marlhf.rollout.engine import Rollout, Sampling
from marlhf.rollout.native import NativeEngine

SHAPES = DECODE_SHAPES | {
    "qwen2-1.5b": Shape(1536, 28, 12, 2, 8960, 151936, 256, 256, 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="smollm2" if gpu else "tiny")
    parser.add_argument("--rows", type=int, help="conversations at a time")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn", type=int, help="tokens of a turn; the shape's response if left")
    parser.add_argument("--reply", type=int, help="tokens of a reply; half a turn if left out")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    rows, turn = args.rows or shape.rows, args.turn or shape.response
    reply = turn // 2 if args.reply is None else args.reply
    sampled = args.turns * turn
    whole = sampled + (args.turns - 1) * reply
    torch.manual_seed(0)
    config = shape.config("llama")
    config.max_position_embeddings = max(1024, shape.prompt + whole)
    with torch.device("cuda" if gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config).eval()
    engine = NativeEngine(model, [-1], 0)
    prompts = torch.randint(1, shape.vocabulary, (rows, shape.prompt)).tolist()
    replies = torch.randint(1, shape.vocabulary, (rows, reply)).tolist()

    def respond(tokens: int) -> Rollout:
        return engine.generate(prompts, Sampling(tokens), range(rows))

    def converse() -> Rollout:
        limits = [whole] * rows
        return engine.generate(
            prompts, Sampling(turn), range(rows), limits, lambda r, _: replies[r]
        )

    systems: dict[str, Callable[[], Rollout]] = {
        f"{args.turns} turns of {turn}, replies of {reply}": converse,
        f"one response of {sampled}": lambda: respond(sampled),
        f"one response of {whole}": lambda: respond(whole),
    }
    name = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{args.shape}: {rows} rows, prompts of {shape.prompt} tokens\n")
    print(f"{'system':36}{'first s':>9}{'best s':>9}{'turns take':>12}")
    # In turns, so that what else the machine does is shared by all.
    runs = [[seconds(work) for work in systems.values()] for _ in range(args.repeats + 1)]
    best = [min(times[1:]) for times in zip(*runs)]
    for system, first, shortest in zip(systems, runs[0], best):
        print(f"{system:36}{first:9.3f}{shortest:9.3f}{best[0] / shortest:11.2f}x")
    if gpu:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


def seconds(work: Callable[[], Rollout]) -> float:
    """Of a call whose result is waited for."""
    start = time.perf_counter()
    work().logprobs.tolist()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
