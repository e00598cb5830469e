"""An annotation session: from runs to a page, and from votes to verdicts.

Votes are exported as verdict files for agreement and the report, and as a CSV with the full log.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from marlhf.intervals import mean
from marlhf.judge.annotate.store import Store
from marlhf.judge.annotate.tasks import LOCAL, Item, RunPair, find_guide, read_items
from marlhf.judge.criteria import slug
from marlhf.judge.pairs import JudgeError, home
from marlhf.judge.verdicts import WINS, Judgement, write_verdicts
from marlhf.runs.atomic import write_jsonl, write_text
from marlhf.runs.layout import JUDGED

PORT = 8123
PAIRS_FOLDER = "pairs"
"""Apart from verdict files, which others read by their ending."""

COLUMNS = ("time", "annotator", "a", "b", "pair", "left", "choice", "verdict", "counts")
COLUMNS += ("strength", "flag", "note")

Say = Callable[[str], None]


def open_votes(
    paths: Sequence[Path | str],
    *,
    task: str = "hh",
    question: str | None = None,
    criteria: Sequence[str] = (),
    strength: bool = False,
    votes: int | None = None,
    limit: int | None = None,
    seed: int | None = None,
    database: Path | str | None = None,
) -> Store:
    """Open the votes on these runs, or create a new database.

    They are in `database`, else in `judged/` of the first run's folder. For every two runs the
    first `limit` prompts that both answered are shown. `task` may be a YAML file with a question,
    criteria and guidelines of your own; `question` and `criteria` ("Name: meaning") replace the
    file. With `strength` people may say how much better a response is; with `votes` each pair is
    shown until that many people have voted on it.
    """
    task, guide = find_guide(task, question, criteria, strength=strength)
    comparisons = read_items(paths)
    file = Path(database or _default(paths[0], comparisons, task))
    exists = file.is_file() and file.stat().st_size > 0
    store = Store(file) if exists else Store.create(file, task, seed, guide)
    try:
        if store.task != task:
            raise JudgeError(
                f"{file} has votes by the criteria of {store.task}. Give --task {store.task}, or "
                "another --database."
            )
        if store.guide != guide:
            raise JudgeError(
                f"{file} has votes on another question or by other criteria. Give those again, or "
                "another --database."
            )
        if seed is not None and store.seed != seed:
            raise JudgeError(
                f"{file} was created with another seed, which decides order and sides. Leave out "
                "--seed, or give another --database."
            )
        store.take(comparisons, limit)
        if votes is not None:
            store.distribute(votes)
    except BaseException:
        store.close()
        raise
    return store


def annotate(
    paths: Sequence[Path | str],
    *,
    host: str = LOCAL[0],
    port: int = PORT,
    output: Path | str | None = None,
    say: Say = lambda line: None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Serve the page until Ctrl-C, then write the verdicts and return their summaries.

    `options` are those of `open_votes`.
    """
    try:
        from marlhf.judge.annotate import server
    except ImportError as error:
        raise JudgeError(
            f"The page needs {error.name}. Install it with: pip install 'marlhf[annotate]'"
        ) from error
    with closing(open_votes(paths, **options)) as store:
        same = sum(item.same for item in store.items.values())
        ties = f"; {same} with equal texts are ties and not shown" if same else ""
        shared = f", votes on each: {store.votes_each}" if store.votes_each else ""
        say(f"Pairs to compare: {len(store.shown)}{shared}{ties}")
        say(f"Votes are stored in {store.path}")
        server.serve(store, host, port, None if host in LOCAL else store.token, say)
        return _finish(store, output, say)


def export_votes(
    paths: Sequence[Path | str],
    *,
    task: str = "hh",
    question: str | None = None,
    database: Path | str | None = None,
    output: Path | str | None = None,
    say: Say = lambda line: None,
) -> list[dict[str, Any]]:
    """Write the verdicts so far, without a page; works even if the runs have changed since."""
    task, _ = find_guide(task, question)
    file = Path(database or _default(paths[0], read_items(paths), task))
    with closing(Store(file)) as store:
        return _finish(store, output, say)


def _finish(store: Store, output: Path | str | None, say: Say) -> list[dict[str, Any]]:
    """Write the verdicts and say where they are."""
    summaries = export(store, output) if store.annotators() else []
    for line in describe(store):
        say(line)
    if summaries:
        folder = Path(summaries[0]["path"]).parent
        say(f"Verdicts are in {folder}, for `marlhf agreement` and `marlhf report`")
        say(f"Pairs are in {folder / PAIRS_FOLDER}, for `marlhf reward` with data.more")
    return summaries


def _default(first: Path | str, comparisons: Sequence[Sequence[Item]], task: str) -> Path:
    names = dict.fromkeys(name for items in comparisons for name in items[0].runs)
    return home(Path(first)) / JUDGED / f"{slug('-'.join([*names, 'people', task]))}.sqlite"


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
        export_pairs(store, folder)
    except OSError as error:
        raise JudgeError(
            f"Cannot write votes to {folder}: {error.strerror}. Give another -o; the votes are "
            f"safe in {store.path}."
        ) from error
    return summaries


def export_pairs(store: Store, folder: Path) -> Path:
    """Write what people preferred as data for `marlhf reward` and `marlhf dpo`: the file."""
    file, rows = folder / PAIRS_FOLDER / f"{store.path.stem}.jsonl", preferences(store)[0]
    if rows:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(file, rows)
    else:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # others are in it, or it was never there
            file.parent.rmdir()
    return file


def preferences(store: Store) -> tuple[list[dict[str, Any]], int]:
    """What most people preferred, as rows for `marlhf reward`, and how many pairs have votes.

    Pairs that are even, by votes or since both texts are equal, are no rows.
    """
    wins: dict[str, list[float]] = {}
    for name in store.annotators():
        for pair, event in store.standing(name).items():
            if event.verdict:
                wins.setdefault(pair, []).append(WINS[event.verdict])
    rows: list[dict[str, Any]] = []
    for pair, votes in wins.items():
        item, share = store.items[pair], mean(votes)
        if share == 0.5:
            continue
        texts = item.response_a, item.response_b
        chosen, rejected = texts if share > 0.5 else texts[::-1]
        agreement = max(share, 1 - share)
        row = {"prompt": item.prompt, "chosen": chosen, "rejected": rejected}
        rows.append(row | {"votes": len(votes), "agreement": agreement})
    return rows, len(wins)


def describe(store: Store) -> list[str]:
    """How often each annotator voted. Not for which run: annotators must stay blind."""
    lines: list[str] = []
    for name in store.annotators():
        state = store.state(name)
        skipped = f", {state.skipped} skipped" if state.skipped else ""
        lines.append(f"{name}: {state.done} of {state.total} pairs{skipped}")
    return lines or ["Nobody has voted yet."]


def _judgements(store: Store, annotator: str, runs: RunPair) -> list[Judgement]:
    """One judgement per pair with a vote.

    A pair of equal texts is a tie, but it is never shown. It counts once the annotator has passed
    its place in the order, so that ties have the same share whether votes are few or complete.
    """
    last = store.standing(annotator)
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


def _file_name(runs: RunPair, annotator: str, task: str) -> str:
    """Names that differ only in characters that file names cannot hold get a digest."""
    plain = annotator.isascii() and annotator.isalnum()
    mark = "" if plain else f"-{hashlib.sha256(annotator.encode()).hexdigest()[:8]}"
    return slug(f"{runs.a}-{runs.b}-person-{annotator}{mark}-{task}")


def _table(store: Store) -> str:
    """Every vote, skip and undo, with whether it counts."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    standing = {name: store.standing(name) for name in store.annotators()}
    for event in store.events():
        runs = store.items[event.pair].runs
        left = runs.a if event.left_run == "a" else runs.b
        counts = event.verdict and standing[event.annotator].get(event.pair) == event
        vote = [event.kind, event.verdict or "", "yes" if counts else "no"]
        remarks = [str(event.strength or ""), "yes" if event.flag else "", _cell(event.note or "")]
        writer.writerow([event.time, event.annotator, *runs, event.pair, left, *vote, *remarks])
    return out.getvalue()


def _cell(note: str) -> str:
    """A note that a spreadsheet does not run as a formula."""
    return f"'{note}" if note[:1] in ("=", "+", "-", "@", "\t", "\r") else note
