"""Reward models with and without a length head on TL;DR pairs: accuracy, and how far length goes.

    python bench/length_head.py pairs_a.jsonl pairs_b.jsonl --model tiny --seeds 0 1
    python bench/length_head.py pairs_a.jsonl pairs_b.jsonl --seeds 0 1 2 --steps 220 \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --learning-rate 1e-4 --prompt-tokens 240   a GPU

Files in the form of summarize_from_feedback's comparisons: post, chosen, rejected. The shares of
posts are those of seed 0, for both kinds of model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from marlhf import DataConfig, RewardConfig
from marlhf.evaluate.results import text_table
from marlhf.intervals import mean
from marlhf.train.reward import train

MEASURES = ("accuracy", "accuracy_short", "length_correlation", "calibration_error")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pairs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/length-head"))
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    together = args.out / "pairs.jsonl"
    together.write_text("".join(file.read_text("utf-8") for file in args.pairs), "utf-8")
    data = DataConfig(
        source="tldr",
        path=str(together),
        eval_size=1000,
        max_prompt_tokens=args.prompt_tokens,
        too_long="truncate",
        parts={},
    )
    rows: list[list[str]] = []
    for length_head in (False, True):
        ends = [_end(args, data, length_head, seed) for seed in args.seeds]
        means = [f"{mean([end[f'eval/{name}'] for end in ends]):.3f}" for name in MEASURES]
        rows.append(["with a length head" if length_head else "plain", *means])
    print(text_table(["reward model", *MEASURES], rows))


def _end(
    args: argparse.Namespace, data: DataConfig, length_head: bool, seed: int
) -> dict[str, float]:
    """The last held-out measures of a training."""
    folder = args.out / f"{'length-head' if length_head else 'plain'}-{seed}"
    config = RewardConfig(
        model=args.model,
        output_dir=str(folder),
        data=data,
        seed=seed,
        length_head=length_head,
        batch_size=64,
        num_steps=args.steps,
        learning_rate=args.learning_rate,
        max_response_tokens=192,
        eval_every=max(20, args.steps // 2),
        token_budget=16384,
        compile=False,  # takes longer than it saves with so few steps
        save_every=0,
    )
    train(config)
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    return json.loads(lines[-1])


if __name__ == "__main__":
    main()
