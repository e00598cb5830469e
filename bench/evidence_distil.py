"""Distilled models beside PPO, at equal KL: what `marlhf evaluate` kept of each, as a table.

    marlhf evaluate SFT PPO models/* --like PPO --reward REWARD GOLD --prompts 400 --seed 0
    python bench/evidence_distil.py SFT PPO models/* --pairs distilled=ppo
    python bench/evidence_distil.py SFT PPO models/* --pack docs/results/distil.jsonl.xz
    python bench/evidence_distil.py docs/results/distil.jsonl.xz --pairs distilled=ppo

The first reward is the one that trains, the second the judge. A judge may like texts that were cut
off, so differences are also shown over the prompts that both models ended. Brackets: 95% intervals
over prompts, seeds averaged. An archive has numbers only, no texts.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marlhf.intervals import bootstrap_mean, mean
from marlhf.runs.evaluations import read_evaluations
from marlhf.runs.layout import EVALUATION

Line = dict[str, Any]
KEPT = ("key", "seed", "scores", "kl", "length", "ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run or model folders, or one archive")
    parser.add_argument("--pairs", nargs="*", default=[], metavar="A=B", help="compare A with B")
    parser.add_argument("--pack", type=Path, help="write an archive")
    args = parser.parse_args()
    models = read_archive(args.runs[0]) if args.runs[0].is_file() else read_folders(args.runs)
    if args.pack:
        write_archive(models, args.pack)
    print_models(models)
    if args.pairs:
        print()
        print_pairs(models, [pair.split("=") for pair in args.pairs])


def read_folders(folders: Sequence[Path]) -> dict[str, list[Line]]:
    models: dict[str, list[Line]] = {}
    for folder in folders:
        lines = [
            {"seed": line["sampling"]["seed"], **{k: line[k] for k in KEPT if k != "seed"}}
            for file in read_evaluations(folder / EVALUATION)
            for line in file.lines
        ]
        if lines:
            models[folder.name] = [_rounded(line) for line in lines]
    return models


def _rounded(line: Line) -> Line:
    scores = {name: round(value, 2) for name, value in line["scores"].items()}
    return line | {"scores": scores, "kl": round(line["kl"], 1)}


def write_archive(models: dict[str, list[Line]], file: Path) -> None:
    with lzma.open(file, "wt", preset=9, encoding="utf-8") as archive:
        for name, lines in models.items():
            archive.writelines(json.dumps({"model": name} | line) + "\n" for line in lines)


def read_archive(file: Path) -> dict[str, list[Line]]:
    models: dict[str, list[Line]] = {}
    with lzma.open(file, "rt", encoding="utf-8") as archive:
        for line in map(json.loads, archive):
            models.setdefault(line.pop("model"), []).append(line)
    return models


def print_models(models: dict[str, list[Line]]) -> None:
    reward, judge = next(iter(models.values()))[0]["scores"]
    head = [reward, judge, f"{judge}, ended", f"{judge}, cut off", "KL", "tokens", "ended"]
    print(f"| model | {' | '.join(head)} |")
    print(f"| --- | {' | '.join(['---:'] * len(head))} |")
    for name, lines in models.items():
        ended = [line for line in lines if line["ended"]]
        cut = [line for line in lines if not line["ended"]]
        cells = [
            f"{mean([line['scores'][reward] for line in lines]):.2f}",
            f"{mean([line['scores'][judge] for line in lines]):.2f}",
            f"{mean([line['scores'][judge] for line in ended]):.2f}" if ended else "",
            f"{mean([line['scores'][judge] for line in cut]):.2f}" if cut else "",
            f"{mean([line['kl'] for line in lines]):.1f}",
            f"{mean([line['length'] for line in lines]):.0f}",
            f"{len(ended) / len(lines):.0%}",
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def print_pairs(models: dict[str, list[Line]], pairs: Sequence[Sequence[str]]) -> None:
    reward, judge = next(iter(models.values()))[0]["scores"]
    head = [reward, judge, f"{judge}, both ended", "KL"]
    print(f"| | {' | '.join(head)} |")
    print(f"| --- | {' | '.join(['---:'] * len(head))} |")
    for one, other in pairs:
        cells = [
            _difference(models[one], models[other], lambda line: line["scores"][reward]),
            _difference(models[one], models[other], lambda line: line["scores"][judge]),
            _difference(models[one], models[other], lambda line: line["scores"][judge], ended=True),
            _difference(models[one], models[other], lambda line: line["kl"], decimals=1),
        ]
        print(f"| {one} over {other} | {' | '.join(cells)} |")


def _difference(
    ours: list[Line], theirs: list[Line], value: Any, *, ended: bool = False, decimals: int = 2
) -> str:
    others = {(line["key"], line["seed"]): line for line in theirs}
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for line in ours:
        other = others[line["key"], line["seed"]]
        if not ended or (line["ended"] and other["ended"]):
            by_prompt[line["key"]].append(value(line) - value(other))
    found = bootstrap_mean([mean(values) for values in by_prompt.values()])
    return found.text(lambda x: f"{x:+.{decimals}f}")


if __name__ == "__main__":
    main()
