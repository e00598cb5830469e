"""Best of k blocks on the offline task: what each way of choosing scores, and is truly worth.

    marlhf best-of-n RUN --like PPO --blocks "ngram n=12" --k 2 4 8 --value critic    # and others
    python bench/evidence_blocks.py RUN

Reads what these commands keep in `blocks/` of the run folder and prints a table: a row for each
rule and value, a column for each k. A cell has the mean score by the reward that chose, and the
true score of the task, which chose nothing. With k candidates for every block a response costs k
times its tokens, so a column compares equal samples; `monte_carlo` samples continuations besides,
so the last column has its tokens. Brackets: 95% intervals over prompts, seeds averaged.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from marlhf.data.toy import gold_score
from marlhf.intervals import bootstrap_mean, mean
from marlhf.runs.evaluations import read_evaluations
from marlhf.runs.layout import BLOCKS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    lines: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = defaultdict(dict)
    for file in read_evaluations(args.run / BLOCKS):
        for line in file.lines:
            way = str(line["blocks"]), str(line["value"])
            lines[way].setdefault(line["k"], []).append(dict(line))
    ks = sorted({k for ways in lines.values() for k in ways})
    print(f"| blocks | by | {' | '.join(f'k = {k}' for k in ks)} | tokens at k = {ks[-1]} |")
    print(f"| --- | --- | {'---: | ' * (len(ks) + 1)}".rstrip())
    for (blocks, value), of_way in sorted(lines.items()):
        cells = [cell(of_way[k]) if k in of_way else "" for k in ks]
        last = of_way.get(ks[-1], [])
        tokens = f"{mean([line['num_sampled'] for line in last]):,.0f}" if last else ""
        print(f"| {blocks} | {value} | {' | '.join(cells)} | {tokens} |")


def cell(lines: list[dict[str, Any]]) -> str:
    """Score by the reward, and true score with its interval over prompts."""
    scores, golds = defaultdict(list), defaultdict(list)
    for line in lines:
        scores[line["key"]].append(line["score"])
        golds[line["key"]].append(gold_score(str(line["prompt"]), str(line["response"])))
    gold = bootstrap_mean([mean(values) for values in golds.values()])
    score = mean([mean(values) for values in scores.values()])
    return f"{score:.2f}, {gold.mean:.2f} [{gold.low:.2f}, {gold.high:.2f}]"


if __name__ == "__main__":
    main()
