"""Small results of a sweep as one archive: settings, metrics, evaluations, samples; no weights.

    python bench/evidence_pack.py runs/evidence/identify-sweep evidence.tar.xz
    python bench/evidence_pack.py runs/evidence/identify-sweep docs/results/identify.tar.xz --page
    python bench/evidence_pack.py --unpack evidence.tar.xz runs/evidence/first-half-hour

It may be made while the sweep is running. Reports work on what is unpacked; a sweep that resumes in
that folder on another machine would train everything anew, for models are not in the archive.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from evidence.pack import pack, unpack


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="the folder of a sweep, or an archive")
    parser.add_argument("target", type=Path)
    parser.add_argument(
        "--page", action="store_true", help="only what bench/evidence_report.py reads"
    )
    parser.add_argument("--unpack", action="store_true")
    args = parser.parse_args()
    if args.unpack:
        temporary = args.target.with_name(f".{args.target.name}")
        unpack(args.source, temporary).rename(args.target)
        shutil.rmtree(temporary)
    else:
        args.target.parent.mkdir(parents=True, exist_ok=True)
        pack(args.source, args.target, for_page=args.page)
    print(args.target)


if __name__ == "__main__":
    main()
