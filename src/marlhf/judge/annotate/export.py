"""Exports votes: verdict files for agreement and the report, and the full log as CSV."""

from __future__ import annotations

import csv
import hashlib
import io
from pathlib import Path
from typing import Any

from marlhf.judge.annotate.store import Event, Store
from marlhf.judge.annotate.tasks import Comparison
from marlhf.judge.criteria import slug
from marlhf.judge.pairs import JudgeError
from marlhf.judge.verdicts import Judgement, write_verdicts
from marlhf.runs.atomic import write_text

COLUMNS = ("time", "annotator", "a", "b", "pair", "left", "choice", "verdict", "counts")
COLUMNS += ("strength", "flag", "note")


def export(store: Store, folder: Path | str | None = None) -> list[dict[str, Any]]:
    """Write a verdict file per annotator and pair of runs, and every event as CSV.

    The files go to `folder`, else beside the database. Returns the summaries, as `judge` does.
    """
    store.refresh()
    folder = Path(folder or store.path.parent)
    summaries: list[dict[str, Any]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in store.annotators():
            for runs in dict.fromkeys(item.runs for item in store.items.values()):
                file = folder / f"{_file_name(runs, name, store.task)}.jsonl"
                if judgements := _judgements(store, name, runs):
                    about = {"judge": f"person:{name}", "task": store.task, "order": "random"}
                    about |= {"a": runs.a, "b": runs.b}
                    total = sum(item.runs == runs for item in store.items.values())
                    summary = write_verdicts(file, judgements, about)
                    more = {"path": str(file), "without_verdict": total - len(judgements)}
                    summaries.append(summary | more)
                else:  # every vote was undone: an earlier export is out of date
                    file.unlink(missing_ok=True)
                    file.with_suffix(".json").unlink(missing_ok=True)
        write_text(folder / f"{store.path.stem}.csv", _table(store))
    except OSError as error:
        raise JudgeError(
            f"Cannot write votes to {folder}: {error.strerror}. Give another -o; the votes are "
            f"safe in {store.path}."
        ) from error
    return summaries


def describe(store: Store) -> list[str]:
    """How often each annotator voted. Not for which run: annotators must stay blind."""
    lines: list[str] = []
    for name in store.annotators():
        state = store.state(name)
        skipped = f", {state.skipped} skipped" if state.skipped else ""
        lines.append(f"{name}: {state.done} of {state.total} pairs{skipped}")
    return lines or ["Nobody has voted yet."]


def _judgements(store: Store, annotator: str, runs: Comparison) -> list[Judgement]:
    """One judgement per pair with a vote.

    A pair of equal texts is a tie, but it is never shown. It counts once the annotator has passed
    its place in the order, so that ties have the same share whether votes are few or complete.
    """
    last = {event.pair: event for event in store.standing(annotator)}
    votes = {pair: event for pair, event in last.items() if event.verdict}
    if not votes:
        return []
    is_done = all(pair in last for pair in store.shown)
    # Places are hexadecimal: "g" is after all of them.
    reached = "g" if is_done else max(store.place(annotator, pair) for pair in last)
    judgements: list[Judgement] = []
    for name, item in store.items.items():
        if item.runs != runs:
            continue
        texts = item.prompt, item.response_a, item.response_b
        if item.same and store.place(annotator, name) < reached:
            judgements.append(Judgement(*texts, "tie"))
        elif name in votes and (verdict := votes[name].verdict):
            judgements.append(Judgement(*texts, verdict, (verdict,)))
    return judgements if any(store.items[pair].runs == runs for pair in votes) else []


def _file_name(runs: Comparison, annotator: str, task: str) -> str:
    """Names that differ only in characters that file names cannot hold get a digest."""
    plain = annotator.isascii() and annotator.isalnum()
    mark = "" if plain else f"-{hashlib.sha256(annotator.encode()).hexdigest()[:8]}"
    return slug(f"{runs.a}-{runs.b}-person-{annotator}{mark}-{task}")


def _table(store: Store) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    standing = {
        event.pair + name: event.number
        for name in store.annotators()
        for event in store.standing(name)
    }
    for event in store.events():
        counts = bool(event.verdict) and standing.get(event.pair + event.annotator) == event.number
        writer.writerow(_row(event, store.items[event.pair].runs, counts))
    return out.getvalue()


def _row(event: Event, runs: Comparison, counts: bool) -> list[str]:
    left = runs.a if event.left_run == "a" else runs.b
    vote = [event.kind, event.verdict or "", "yes" if counts else "no"]
    remarks = [str(event.strength or ""), "yes" if event.flag else "", _cell(event.note or "")]
    return [event.time, event.annotator, *runs, event.pair, left, *vote, *remarks]


def _cell(note: str) -> str:
    """A note that a spreadsheet does not run as a formula."""
    return f"'{note}" if note[:1] in ("=", "+", "-", "@", "\t", "\r") else note
