"""The runs of `marlhf sweep evidence/ensembles` as tables: true score, KL, and disagreement.

    python bench/ensembles_table.py runs/evidence/ensembles-sweep

A row per run: the true score (`eval/gold`) where it peaked and at the end, and where the
disagreement was first 1.5 times that at the start. Then a row per reward: means over its runs, how
many kept half of their gain to the end, and of the others how many had it left at the warning.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from marlhf.config.rl import Guards
from marlhf.evaluate.results import text_table
from marlhf.runs.read import Run, find_runs


class Found(NamedTuple):
    """What became of the true score in a run."""

    reward: str
    run: str
    start: float
    peak: float
    peak_step: int
    end: float
    kl: float
    warned: int | None
    at_warning: float | None

    def has_gain(self, gold: float | None) -> bool:
        """Whether half of the gain is there."""
        return gold is not None and gold >= (self.start + self.peak) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path)
    sweep = parser.parse_args().sweep
    runs = [run for run in find_runs([sweep]) if run.is_policy and run.status == "finished"]
    found = [_found(run, sweep) for run in runs if run.stage == "ppo"]
    header = ["run", "peak", "at step", "end", "KL at end", "warned at", "gold then"]
    print(text_table(header, [_of_run(x) for x in found]))
    header = ["reward", "runs", "peak", "end", "lowest", "highest", "KL", "kept", "warned in time"]
    names = sorted({x.reward for x in found})
    print(text_table(header, [_of_reward([x for x in found if x.reward == n]) for n in names]))


def _found(run: Run, sweep: Path) -> Found:
    gold = {step: value for step, _, value in run.curve("eval/gold")}
    spread = [(step, value) for step, _, value in run.curve("eval/disagreement")]
    limit = Guards().warn_disagreement * spread[0][1] if spread else None
    warned = next((step for step, value in spread if limit and value > limit), None)
    peak = max(gold, key=gold.__getitem__)
    return Found(
        run.path.name,
        str(run.path.relative_to(sweep)),
        gold[min(gold)],
        gold[peak],
        peak,
        gold[max(gold)],
        run.final("eval/kl"),
        warned,
        gold.get(warned) if warned is not None else None,
    )


def _of_run(x: Found) -> list[str]:
    warned = [str(x.warned or "-"), _two(x.at_warning)]
    return [x.run, _two(x.peak), str(x.peak_step), _two(x.end), f"{x.kl:.0f}", *warned]


def _of_reward(runs: list[Found]) -> list[str]:
    ends = [x.end for x in runs]
    gamed = [x for x in runs if not x.has_gain(x.end)]
    in_time = sum(x.has_gain(x.at_warning) for x in gamed)
    return [
        runs[0].reward,
        str(len(runs)),
        _two(mean(x.peak for x in runs)),
        _two(mean(ends)),
        _two(min(ends)),
        _two(max(ends)),
        f"{mean(x.kl for x in runs):.0f}",
        f"{len(runs) - len(gamed)} of {len(runs)}",
        f"{in_time} of {len(gamed)}",
    ]


def _two(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"


if __name__ == "__main__":
    main()
