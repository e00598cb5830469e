"""Data of the evidence: which rows are for what, split by prompt.

    python bench/evidence_data.py tldr --out runs/evidence/data
    python bench/evidence_data.py tldr --out runs/evidence/data --pairs pairs.jsonl more.jsonl
    python bench/evidence_data.py sums --out runs/evidence/data
    python bench/evidence_data.py guess --out runs/evidence/data

Data comes from the hub, or from files; that of sums and guess is made. bench/evidence/data.py says
what each part is for; recipes in recipes/evidence read the parts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evidence.data import HUB, prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=list(HUB))
    parser.add_argument("--out", type=Path, required=True, help="the parts go to OUT/TASK")
    parser.add_argument("--pairs", nargs="+", help="files, in any form that marlhf reads")
    parser.add_argument("--limit", type=int, help="records to read of each file")
    args = parser.parse_args()
    folder = args.out / args.task
    prepare(args.task, args.pairs or HUB[args.task], folder, args.limit)
    print((folder / "split.json").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
