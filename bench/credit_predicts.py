"""Does measured credit predict training? Cosines by `marlhf credit` beside what each rule gained.

    marlhf sweep evidence/predict --jobs 2
    python bench/credit_predicts.py runs/evidence/predict-sweep
    python bench/credit_predicts.py runs/evidence/predict-tldr-sweep --batches 96

All rules train from one policy and one critic, so what is measured there is the same for all. A
sweep without its weights needs `--measured FOLDER`, with what `marlhf credit RUN --step 0 --json`
printed for the first run of each start: early.json, late.json, end.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from evidence.results import Results, objective, read_results, score
from scipy.stats import spearmanr

from marlhf.credit.measure import measure
from marlhf.credit.state import open_state
from marlhf.text_table import text_table

RULES = {
    "ppo": "token lam=0.95",
    "lam80": "token lam=0.8",
    "lam90": "token lam=0.9",
    "lam99": "token lam=0.99",
    "lam1": "token lam=1",
    "n5": "ngram n=5 lam=0.95",
    "lines": "lines lam=0.95",
    "boundary": "lines lam=0.95 credit=boundary",
    "equal": "lines lam=0.95 sigma=equal",
    "n5-equal": "ngram n=5 lam=0.95 sigma=equal",
    "sentences": "sentences lam=0.95",
    "perplexity": "perplexity lam=0.95",
}
"""Methods of recipes/evidence/predict.yaml and predict-tldr.yaml as `marlhf credit` names them."""
STARTS = {"early": "the SFT model", "late": "PPO after 30 steps", "end": "PPO after 100 steps"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--batches", type=int, default=24, help="batches to measure on")
    parser.add_argument("--measured", type=Path, help="a folder with what was measured before")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    results = read_results(args.sweep)
    [teacher] = results.teachers  # "" where the reward is a function
    for start, text in STARTS.items():
        methods = [name for name in RULES if (f"{start}-{name}", teacher) in results.runs]
        if "ppo" not in methods:
            continue  # not trained yet
        if args.measured:
            rows = json.loads((args.measured / f"{start}.json").read_text("utf-8"))["rows"]
        else:
            state = open_state(args.sweep / f"{start}-ppo", step=0, device=args.device)
            rules = tuple(RULES[name] for name in methods)
            rows = measure(state, rules, batches=args.batches).rows()
        print(f"\nfrom {text}")
        print_start(results, start, teacher, methods, {row["name"]: row for row in rows})


def print_start(
    results: Results,
    start: str,
    teacher: str,
    methods: list[str],
    measured: dict[str, dict[str, Any]],
) -> None:
    """A right answer counts as such; a reward model's score less what was paid for it in KL."""
    gained_by, unit = (objective, "score - 0.05 KL") if teacher else (score, "points")
    table: list[tuple[float, float, list[str]]] = []
    for method in methods:
        name, row = f"{start}-{method}", measured[RULES[method]]
        if row["cosine"] is None or row["error"] is None:
            continue
        gain = results.gain(gained_by, name, teacher, results.last_step(name, teacher))
        text = gain.text(lambda x: f"{x:+.2f}" if teacher else f"{100 * x:+.0f}")
        cells = [RULES[method], f"{row['cosine']:.2f}", f"{row['error']:.2f}", text]
        table.append((row["cosine"], gain.mean, cells))
    table.sort(reverse=True)
    print(text_table(["rule", "cosine", "+-", f"{unit} gained"], [cells for *_, cells in table]))
    correlation, p_value = spearmanr([line[0] for line in table], [line[1] for line in table])
    print(f"rank correlation {correlation:.2f} (p = {p_value:.3f}, {len(table)} rules)")


if __name__ == "__main__":
    main()
