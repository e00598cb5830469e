"""The tables and figures of docs/results.md, from packed archives of sweeps: no GPU.

    python bench/evidence_report.py docs/results/identify.tar.xz --docs docs

Archives are what bench/evidence_pack.py makes; folders of sweeps do as well. Several
are read as one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from evidence.pack import unpack
from evidence.page import write_page
from evidence.results import read_results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archives", type=Path, nargs="+", metavar="archive")
    parser.add_argument("--docs", type=Path, required=True, help="the folder of results.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = [
            given if given.is_dir() else unpack(given, Path(temporary) / str(i))
            for i, given in enumerate(args.archives)
        ]
        print(write_page(read_results(folders), args.docs))


if __name__ == "__main__":
    main()
