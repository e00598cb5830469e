"""The tables and figures of docs/results.md and docs/results/, from archives: no GPU.

    python bench/evidence_report.py docs/results/*.xz --docs docs

Archives are what bench/evidence_pack.py makes; folders of sweeps do as well. The pages name them
without .tar.xz. distil.jsonl.xz has the rounds of distillation, prompt by prompt.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from evidence.pack import unpack
from evidence.page import write_page
from evidence.results import read_results

ROUNDS = ".jsonl.xz"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archives", type=Path, nargs="+", metavar="archive")
    parser.add_argument("--docs", type=Path, required=True, help="the folder of results.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        campaigns = {
            given.name.removesuffix(".tar.xz"): read_results(
                given if given.is_dir() else unpack(given, Path(temporary) / given.name)
            )
            for given in args.archives
            if not given.name.endswith(ROUNDS)
        }
        rounds = next((file for file in args.archives if file.name.endswith(ROUNDS)), None)
        print(write_page(campaigns, args.docs, rounds))


if __name__ == "__main__":
    main()
