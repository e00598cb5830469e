"""Which rows are for what: files, split by prompt, made once.

tldr  gold.jsonl  25% of the pairs: the judge, a reward model that trains no policy
      test.jsonl   8%: prompts that nothing is chosen by
      train.jsonl the rest. The recipe splits it further: held-out prompts, SFT, and 90% for the
                  reward models, whose posts are also the prompts of reinforcement learning: there
                  are too few pairs to give each posts of its own
hh    test 8%, train the rest
mbpp  test: the official test problems, 11 to 510. train: 511 to 974
sums  the prompts of the source `sums`, in solutions with 9% and with 35% wrong lines, to imitate
guess the games of the source `guess`, with 0, 10 or 40 letters before each number
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from marlhf.data import DataConfig, Row, load_data, read_hub, read_records, split_rows
from marlhf.data.guess import rows as guess_rows
from marlhf.data.load import hub_config, is_hub_name
from marlhf.data.rows import prompt_key
from marlhf.data.sums import rows as sums_rows

SHARES = {
    "tldr": {"gold": 0.25, "test": 0.08, "train": 0.67},
    "hh": {"test": 0.08, "train": 0.92},
}
MBPP_TEST = range(11, 511)
SLIPS = (0.09, 0.35)
"""Shares of wrong lines: who imitates them solves a tenth, or has 65% of the lines right."""
LETTERS = (0, 10, 40)
"""Letters that the player of `guess` writes before each number."""
SPLIT = "split.json"
HUB: dict[str, tuple[str, ...]] = {
    "tldr": ("openai/summarize_from_feedback",),
    "hh": ("Dahoas/full-hh-rlhf",),
    "mbpp": ("google-research-datasets/mbpp",),
    "sums": (),
    "guess": (),
}
"""Where the rows come from, unless files are given or none are needed."""


def prepare(task: str, files: Sequence[str], folder: Path, limit: int | None = None) -> None:
    """Write the files of a task, and how many rows and prompts each has."""
    done = folder / SPLIT
    if done.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if task == "sums":
        parts = {f"slips-{100 * slip:.0f}": _sums(slip) for slip in SLIPS}
    elif task == "guess":
        parts = {f"think-{letters}": _guess(letters) for letters in LETTERS}
    else:
        parts = _mbpp(files, limit) if task == "mbpp" else _pairs(task, files, limit)
    counts: dict[str, Any] = {"files": [Path(file).name for file in files]}
    for part, records in parts.items():
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record, _ in records]
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        counts[part] = {"rows": len(lines), "prompts": len({key for _, key in records})}
    done.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")


Records = list[tuple[dict[str, Any], str]]
"""Records, each with the key of its prompt."""


def _pairs(task: str, files: Sequence[str], limit: int | None) -> dict[str, Records]:
    rows: list[Row] = []
    for path in files:
        config = DataConfig(
            source=task,  # pyright: ignore[reportArgumentType]
            path=path,
            parts={},
            eval_size=0,
            limit=limit,
        )
        loaded = load_data(config, needs=("prompt", "chosen", "rejected"))
        print(f"{task}: {path}: {loaded.counts}", flush=True)
        rows += loaded.train
    write = _tldr_record if task == "tldr" else _hh_record
    parts = split_rows(_by_post(rows), SHARES[task])
    return {part: [(write(row), prompt_key(row)) for row in rows] for part, rows in parts.items()}


def _by_post(rows: Iterable[Row]) -> list[Row]:
    """Rows whose prompts differ where their posts do: one form of prompt for a post.

    A post that one file has with its subreddit and another without would otherwise be two
    prompts, and could fall into two parts.
    """
    first: dict[str, Row] = {}
    found: list[Row] = []
    for row in rows:
        key = " ".join(str(row.columns.get("post", row.prompt)).split())
        same = first.setdefault(key, row)
        found.append(Row(same.prompt, row.chosen, row.rejected, same.columns))
    return found


def _tldr_record(row: Row) -> dict[str, Any]:
    named = {k: row.columns[k] for k in ("subreddit", "post") if row.columns.get(k)}
    return named | {"chosen": str(row.chosen).strip(), "rejected": str(row.rejected).strip()}


def _hh_record(row: Row) -> dict[str, Any]:
    return {"prompt": row.prompt, "chosen": row.chosen, "rejected": row.rejected}


def _sums(slip: float) -> Records:
    rows = sums_rows(slip=slip)
    return [({"prompt": row.prompt, "chosen": row.chosen}, prompt_key(row)) for row in rows]


def thinking(letters: int) -> str:
    """So many letters in alphabetical order: each is a token of the tiny tokenizer."""
    return "".join(ascii_lowercase[i % len(ascii_lowercase)] for i in range(letters))


def _guess(letters: int) -> Records:
    """Demonstrations with letters before each number; the game ignores them."""
    before = {"user": "", "assistant": thinking(letters)}

    def said(messages: Any) -> list[dict[str, str]]:
        return [each | {"content": before[each["role"]] + each["content"]} for each in messages]

    records: Records = []
    for row in guess_rows():
        record = {"prompt": said(row.prompt), "chosen": said(row.chosen), **row.columns}
        records.append((record, prompt_key(row)))
    return records


def _mbpp(files: Sequence[str], limit: int | None) -> dict[str, Records]:
    parts: dict[str, Records] = {"test": [], "train": []}
    for path in files:
        if is_hub_name(path) and not Path(path).exists():
            splits = ("train", "validation", "test")
            sources = [read_hub(path, split, hub_config(path)) for split in splits]
        else:
            sources = [read_records(path)]
        for record, _ in (each for source in sources for each in source):
            number = int(record["task_id"])
            if number > MBPP_TEST[-1]:
                parts["train"].append((dict(record), str(number)))
            elif number in MBPP_TEST:
                parts["test"].append((dict(record), str(number)))
    return {part: records[:limit] for part, records in parts.items()}
