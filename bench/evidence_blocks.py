"""Best of k blocks: what each way of choosing scores, and is worth to a judge that chose nothing.

    marlhf best-of-n RUN --like PPO --blocks "ngram n=12" --k 2 4 8 --value critic    # and others
    python bench/evidence_blocks.py RUN
    python bench/evidence_blocks.py RUN --like PPO --gold GOLD    # GOLD: another reward model

Reads what the first command keeps in `blocks/` of the run folder and prints a table: a row for each
rule and value, a column for each k. A cell has the mean score by the reward that chose, and that of
the judge: the true score of the offline task, or a reward model that trained nobody. With k
candidates for every block a response costs k times its tokens, so a column compares equal samples;
`monte_carlo` samples continuations besides, so the last column has its tokens. Brackets: 95%
intervals over prompts, seeds averaged.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marlhf.data.toy import gold_score
from marlhf.evaluate.best_of_n import find_task
from marlhf.evaluate.eval_plan import EvaluationOptions
from marlhf.evaluate.sampling import key_of
from marlhf.intervals import bootstrap_mean, mean
from marlhf.runs.evaluations import read_evaluations
from marlhf.runs.layout import BLOCKS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--gold", metavar="MODEL", help="a reward model, as the judge")
    parser.add_argument("--like", metavar="RUN", help="as for the first command")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    lines = [dict(line) for file in read_evaluations(args.run / BLOCKS) for line in file.lines]
    if not lines:
        parser.error(f"{args.run} has no {BLOCKS}/: run marlhf best-of-n --blocks first")
    if args.gold:
        if any("response_ids" not in line for line in lines):
            parser.error(f"{args.run}/{BLOCKS} is of an earlier version: sample its blocks again")
        judge(lines, args.run, args.gold, args.like, args.device)
    else:
        for line in lines:
            line["gold"] = gold_score(str(line["prompt"]), str(line["response"]))
    print_table(lines)


def judge(
    lines: Sequence[dict[str, Any]], run: Path, gold: str, like: str | None, device: str
) -> None:
    """Give every line the score of a reward model under `gold`."""
    options = EvaluationOptions(prompts=1 << 30, rewards=(gold,), like=like, device=device)
    task = find_task(run, options)
    prompts = {key_of(prompt.row): prompt for prompt in task.prompts}
    scores = task.scores(
        task.rewards[0],
        [prompts[line["key"]] for line in lines],
        [line["response_ids"] for line in lines],
    )
    for line, score in zip(lines, scores):
        line["gold"] = score


def print_table(all_lines: Sequence[dict[str, Any]]) -> None:
    lines: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = defaultdict(dict)
    for line in all_lines:
        way = str(line["blocks"]), str(line["value"])
        lines[way].setdefault(line["k"], []).append(line)
    ks = sorted({k for ways in lines.values() for k in ways})
    print(f"| blocks | by | {' | '.join(f'k = {k}' for k in ks)} | tokens at k = {ks[-1]} |")
    print(f"| --- | --- | {'---: | ' * (len(ks) + 1)}".rstrip())
    for (blocks, value), of_way in sorted(lines.items()):
        cells = [cell(of_way[k]) if k in of_way else "" for k in ks]
        last = of_way.get(ks[-1], [])
        tokens = f"{mean([line['num_sampled'] for line in last]):,.0f}" if last else ""
        print(f"| {blocks} | {value} | {' | '.join(cells)} | {tokens} |")


def cell(lines: list[dict[str, Any]]) -> str:
    """Score by the reward, and the judge's with its interval over prompts."""
    scores, golds = defaultdict(list), defaultdict(list)
    for line in lines:
        scores[line["key"]].append(line["score"])
        golds[line["key"]].append(line["gold"])
    gold = bootstrap_mean([mean(values) for values in golds.values()])
    score = mean([mean(values) for values in scores.values()])
    return f"{score:.2f}, {gold.mean:.2f} [{gold.low:.2f}, {gold.high:.2f}]"


if __name__ == "__main__":
    main()
