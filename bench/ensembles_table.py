"""The runs of `marlhf sweep evidence/ensembles` as tables: true score, KL, and disagreement.

    python bench/ensembles_table.py runs/evidence/ensembles-sweep

A row per run: the true score (`eval/gold`) where it peaked and at the end, and where the
disagreement was first 1.5 times that at the start.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from marlhf.config.rl import Guards
from marlhf.evaluate.results import text_table
from marlhf.runs.read import Run, find_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path)
    sweep = parser.parse_args().sweep
    runs = [run for run in find_runs([sweep]) if run.is_policy and run.status == "finished"]
    header = ["run", "peak", "at step", "end", "KL at end", "warned at", "gold then"]
    print(text_table(header, [_row(run, sweep) for run in runs]))


def _row(run: Run, sweep: Path) -> list[str]:
    gold = {step: value for step, _, value in run.curve("eval/gold")}
    spread = [(step, value) for step, _, value in run.curve("eval/disagreement")]
    limit = Guards().warn_disagreement * spread[0][1] if spread else math.inf
    warned = next((step for step, value in spread if value > limit), None)
    peak = max(gold, key=gold.__getitem__)
    return [
        str(run.path.relative_to(sweep)),
        f"{gold[peak]:.2f}",
        str(peak),
        f"{gold[max(gold)]:.2f}",
        f"{run.final('eval/kl'):.0f}",
        "-" if warned is None else str(warned),
        "-" if warned is None else f"{gold[warned]:.2f}",
    ]


if __name__ == "__main__":
    main()
