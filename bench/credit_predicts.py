"""Does measured credit predict training? Cosines by `marlhf credit` beside what each rule gained.

    marlhf sweep evidence/predict --jobs 2
    python bench/credit_predicts.py runs/evidence/predict-sweep

All rules train from one policy and one critic, so what is measured there is the same for all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evidence.results import Results, read_results, score
from scipy.stats import spearmanr

from marlhf.credit.measure import measure
from marlhf.credit.state import open_state
from marlhf.text_table import text_table

RULES = {
    "ppo": "token lam=0.95",
    "lam80": "token lam=0.8",
    "lam99": "token lam=0.99",
    "lam1": "token lam=1",
    "n5": "ngram n=5 lam=0.95",
    "lines": "lines lam=0.95",
    "boundary": "lines lam=0.95 credit=boundary",
    "equal": "lines lam=0.95 sigma=equal",
}
"""Methods of recipes/evidence/predict.yaml as `marlhf credit` names them."""
STARTS = {"early": "the SFT model, its critic untrained", "late": "PPO after 30 steps"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--batches", type=int, default=24, help="batches to measure on")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    results = read_results(args.sweep)
    for start, text in STARTS.items():
        if (f"{start}-ppo", "") not in results.runs:
            continue  # not trained yet
        state = open_state(args.sweep / f"{start}-ppo", step=0, device=args.device)
        rows = measure(state, tuple(RULES.values()), batches=args.batches).rows()
        cosines = {row["name"]: (row["cosine"], row["error"]) for row in rows}
        print(f"\nfrom {text}")
        print_start(results, start, cosines)


def print_start(
    results: Results, start: str, cosines: dict[str, tuple[float | None, float | None]]
) -> None:
    [nobody] = results.teachers
    table, measured, gained = [], [], []
    for method, rule in RULES.items():
        name = f"{start}-{method}"
        cosine, error = cosines[rule]
        if (name, nobody) not in results.runs or cosine is None or error is None:
            continue
        gain = results.gain(score, name, nobody, results.last_step(name, nobody))
        points = gain.text(lambda x: f"{100 * x:+.0f}")
        table.append([rule, f"{cosine:.2f}", f"{error:.2f}", points])
        measured.append(cosine)
        gained.append(gain.mean)
    print(text_table(["rule", "cosine", "+-", "points gained"], table))
    correlation, p_value = spearmanr(measured, gained)
    print(f"rank correlation {correlation:.2f} (p = {p_value:.3f}, {len(table)} rules)")


if __name__ == "__main__":
    main()
