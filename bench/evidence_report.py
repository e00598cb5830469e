"""The tables and figures of docs/results.md and docs/results/, from archives: no GPU.

    python bench/evidence_report.py docs/results/*.xz --docs docs

Archives are what bench/evidence_pack.py makes with --page. The pages name them without .tar.xz.
distil.jsonl.xz has the rounds of distillation, prompt by prompt.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from evidence.pack import unpack
from evidence.page import write_page
from evidence.results import read_results

ROUNDS = "distil"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archives", type=Path, nargs="+", metavar="archive")
    parser.add_argument("--docs", type=Path, required=True, help="the folder of results.md")
    args = parser.parse_args()
    files = {file.name.split(".")[0]: file for file in args.archives}
    pages = [args.docs / "results.md", *(args.docs / "results").glob("*.md")]
    text = "".join(page.read_text("utf-8") for page in pages)
    if missing := {*re.findall(r"<!-- evidence: \S+ of (\S+) -->", text)} - files.keys():
        parser.error(f"the pages need more archives: {', '.join(sorted(missing))}")
    rounds = files.pop(ROUNDS)
    with tempfile.TemporaryDirectory() as temporary:
        campaigns = {
            name: read_results(unpack(file, Path(temporary) / name)) for name, file in files.items()
        }
        write_page(campaigns, rounds, args.docs)


if __name__ == "__main__":
    main()
