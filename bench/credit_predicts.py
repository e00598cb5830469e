"""Does measured credit predict training? Cosines by `marlhf credit` beside what each rule gained.

    marlhf sweep evidence/predict --jobs 2
    python bench/credit_predicts.py runs/evidence/predict-sweep
    python bench/credit_predicts.py runs/evidence/predict-tldr-sweep --batches 96

All rules train from one policy and one critic, so what is measured there is the same for all. It is
kept in `measured/` of the sweep, and not measured again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evidence.predicted import (
    RULES,
    STARTS,
    methods_of,
    predictions,
    rank_correlation,
    read_measured,
    write_measured,
)
from evidence.results import read_results

from marlhf.credit.measure import measure
from marlhf.credit.state import open_state
from marlhf.evaluate.results import text_table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--batches", type=int, default=24, help="batches to measure on")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    results = read_results(args.sweep)
    points = results.teachers == [""]  # rewarded for the right answer
    for start, text in STARTS.items():
        methods = methods_of(results, start)
        if "ppo" not in methods:
            continue  # not trained yet
        rows = read_measured(args.sweep, start)
        if rows is None:
            state = open_state(args.sweep / f"{start}-ppo", step=0, device=args.device)
            rules = tuple(RULES[name] for name in methods)
            rows = measure(state, rules, batches=args.batches).rows()
            write_measured(args.sweep, start, rows)
        predicted = predictions(results, start, rows)
        table = [
            [
                each.rule,
                f"{each.cosine:.2f}",
                f"{each.error:.2f}",
                each.gained.text(lambda x: f"{100 * x:+.0f}" if points else f"{x:+.2f}"),
            ]
            for each in predicted
        ]
        unit = "points" if points else "score - 0.05 KL"
        print(f"\nfrom {text}")
        print(text_table(["rule", "cosine", "+-", f"{unit} gained"], table))
        correlation, p_value = rank_correlation(predicted)
        print(f"rank correlation {correlation:.2f} (p = {p_value:.3f}, {len(table)} rules)")


if __name__ == "__main__":
    main()
