"""The table of docs/turns.md: `marlhf sweep evidence/turns`, then `marlhf evaluate` at T = 1 and 0.

    python bench/turns_table.py docs/turns.tar.xz

A row per method, means over seeds. The last line says by how much two rows differ through chance:
Student's t with the runs' standard deviation pooled over methods.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from statistics import mean, variance

from evidence.pack import unpack

from marlhf.evaluate.results import text_table
from marlhf.intervals import t_quantile
from marlhf.runs.atomic import read_jsonl


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path)
    archive = parser.parse_args().archive
    with tempfile.TemporaryDirectory() as folder:
        sweep = unpack(archive, Path(folder))
        names = sorted({path.name for path in sweep.glob("seed=*/*") if path.is_dir()})
        found = {name: _runs(sorted(sweep.glob(f"seed=*/{name}"))) for name in names}
    columns = ["T=1", "low", "high", "KL", "length", "T=0", "low", "high", "explained", "s"]
    print(text_table(["method", *columns], [_row(name, runs) for name, runs in found.items()]))
    trained = [runs for name, runs in found.items() if name != "sft"]
    for temperature in (1, 0):
        scores = [[run[temperature] for run in runs] for runs in trained]
        deviation = math.sqrt(mean(map(variance, scores)))
        freedom, seeds = sum(len(x) - 1 for x in scores), len(scores[0])
        margin = t_quantile(freedom) * deviation * math.sqrt(2 / seeds)
        print(f"T={temperature}: two rows differ by less than {margin:.3f} through chance (95%)")


def _runs(folders: list[Path]) -> list[dict]:
    """Success, KL and length of each seed's run, by temperature."""
    runs: list[dict] = []
    for folder in folders:
        run: dict = {"s": json.loads((folder / "run.json").read_text())["seconds"]}
        for file in (folder / "evaluation").glob("*.jsonl"):
            [row] = read_jsonl(file).rows
            run[int(row["sampling"]["temperature"])] = mean(row["scores"]["environment"])
            if row["sampling"]["temperature"] == 1:
                run |= {"KL": mean(row["kl"]), "length": mean(row["length"])}
        last = [x.get("rl/explained_variance_3") for x in read_jsonl(folder / "metrics.jsonl").rows]
        known = [x for x in last if x is not None][-20:]
        run["explained"] = mean(known) if known else math.nan
        runs.append(run)
    return runs


def _row(name: str, runs: list[dict]) -> list[str]:
    cells = [name]
    for key in (1, "KL", "length", 0, "explained", "s"):
        values = [run[key] for run in runs]
        cells.append(f"{mean(values):.2f}" if key != "s" else f"{mean(values):.0f}")
        if key in (0, 1):
            cells += [f"{min(values):.2f}", f"{max(values):.2f}"]
    return cells


if __name__ == "__main__":
    main()
