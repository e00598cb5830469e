"""The tables and figures of docs/results.md, from packed archives of sweeps: no GPU.

    python bench/evidence_report.py docs/results/{identify,*}.tar.xz --docs docs

Archives are what bench/evidence_pack.py makes; folders of sweeps do as well. The page names them
without .tar.xz; tables that name none, and the figures, are of the first.
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
        campaigns = {
            given.name.removesuffix(".tar.xz"): read_results(
                given if given.is_dir() else unpack(given, Path(temporary) / given.name)
            )
            for given in args.archives
        }
        print(write_page(campaigns, args.docs))


if __name__ == "__main__":
    main()
