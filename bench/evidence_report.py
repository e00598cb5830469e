"""The results page and its figures, and the HTML reports, from an archive of runs: no GPU.

    python bench/evidence_report.py runs/evidence/evidence.tar.xz --docs docs --html runs/evidence

The archive is what bench/evidence_tldr.py leaves; the --out that it was made from does as well.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from evidence.pack import unpack
from evidence.page import write_page
from evidence.results import Results

from marlhf.evaluate.judge import judge
from marlhf.evaluate.report import write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path, help="evidence.tar.xz, or the folder unpacked")
    parser.add_argument("--docs", type=Path, required=True, help="where results.md goes")
    parser.add_argument("--html", type=Path, help="where the HTML reports go, one a task")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = args.archive if args.archive.is_dir() else unpack(args.archive, Path(folder))
        results = Results(out)
        print(write_page(results, args.docs))
        if args.html:
            for task in results.tasks:
                judge_by_scores(results, task)
                print(write_report([out / task], args.html / f"{task}.html"))


def judge_by_scores(results: Results, task: str) -> None:
    """Verdicts of the second reward model (on HH the first) beside each run, for the report."""
    name = {"tldr": "gold", "hh": "reward"}.get(task)
    if name is None:
        return
    for method in results.methods(task):
        for run in method.runs:
            files = [
                sorted((folder / "evaluation").glob("t1-*-test*.jsonl"))
                for folder in (run.path, results.folder / task / "sft")
            ]
            if all(files):
                judge(files[0][0], files[1][0], f"scores:{name}", task=task)


if __name__ == "__main__":
    main()
