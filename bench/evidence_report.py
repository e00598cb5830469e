"""The results page and its figures, and the HTML reports, from an archive of runs: no GPU.

    python bench/evidence_report.py runs/evidence/evidence.tar.xz --docs docs --html runs/evidence

The archive is what bench/evidence_tldr.py leaves; the --out that it was made from does as well.
Tasks that were run apart are put together: give an archive for each.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from evidence.pack import join, unpack
from evidence.page import write_page
from evidence.results import Results

from marlhf.judge.compare import judge
from marlhf.report.write import write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words = "evidence.tar.xz, or the folder unpacked; a task is taken from the first that has it"
    parser.add_argument("archives", type=Path, nargs="+", metavar="archive", help=words)
    parser.add_argument("--docs", type=Path, required=True, help="where results.md goes")
    parser.add_argument("--html", type=Path, help="where the HTML reports go, one a task")
    parser.add_argument("--note", default="", help="a sentence about the machine or the model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outs = [
            given if given.is_dir() else unpack(given, Path(folder) / str(i))
            for i, given in enumerate(args.archives)
        ]
        out = outs[0] if len(outs) == 1 else join(outs, Path(folder) / "all")
        results = Results(out)
        print(write_page(results, args.docs, args.note))
        if args.html:
            for task in results.tasks:
                judge_by_scores(results, task)
                print(write_report(shown(out / task), args.html / f"{task}.html"))


def shown(folder: Path) -> list[Path]:
    """All runs but the tries, which are in the page's own table."""
    runs = sorted(file.parent for file in folder.glob("*/run.json"))
    return [path for path in runs if not path.name.startswith("try-")]


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
