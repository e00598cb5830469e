"""An annotation session: from runs to a page, and from votes to verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from marlhf.judge.annotate.export import describe, export
from marlhf.judge.annotate.store import Store
from marlhf.judge.annotate.tasks import Item, find_guide, read_items
from marlhf.judge.criteria import slug
from marlhf.judge.pairs import JudgeError, home
from marlhf.runs.layout import JUDGED

PORT = 8123
LOCAL = ("127.0.0.1", "localhost", "::1")

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
    criteria and guidelines of your own; `question` and `criteria` ("Name: meaning") say it without
    a file. With `strength` people may say how much better; with `votes` each pair is shown until so
    many people have voted on it.
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
    task: str = "hh",
    question: str | None = None,
    criteria: Sequence[str] = (),
    strength: bool = False,
    votes: int | None = None,
    limit: int | None = None,
    seed: int | None = None,
    host: str = LOCAL[0],
    port: int = PORT,
    database: Path | str | None = None,
    output: Path | str | None = None,
    say: Say = lambda line: None,
) -> list[dict[str, Any]]:
    """Serve the page until Ctrl-C, then write the verdicts and return their summaries."""
    try:
        from marlhf.judge.annotate import server
    except ImportError as error:
        raise JudgeError(
            f"The page needs {error.name}. Install it with: pip install 'marlhf[annotate]'"
        ) from error
    store = open_votes(
        paths,
        task=task,
        question=question,
        criteria=criteria,
        strength=strength,
        votes=votes,
        limit=limit,
        seed=seed,
        database=database,
    )
    try:
        same = sum(item.same for item in store.items.values())
        ties = f"; {same} with equal texts are ties and not shown" if same else ""
        shared = f", votes on each: {store.votes_each}" if store.votes_each else ""
        say(f"Pairs to compare: {len(store.shown)}{shared}{ties}")
        say(f"Votes are stored in {store.path}")
        server.serve(store, host, port, None if host in LOCAL else store.token, say)
        return _finish(store, output, say)
    finally:
        store.close()


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
    store = Store(Path(database or _default(paths[0], read_items(paths), task)))
    try:
        return _finish(store, output, say)
    finally:
        store.close()


def _finish(store: Store, output: Path | str | None, say: Say) -> list[dict[str, Any]]:
    """Write the verdicts and say where they are."""
    summaries = export(store, output) if store.annotators() else []
    for line in describe(store):
        say(line)
    if summaries:
        folder = Path(summaries[0]["path"]).parent
        say(f"Verdicts are in {folder}, for `marlhf agreement` and `marlhf report`")
    return summaries


def _default(first: Path | str, comparisons: Sequence[Sequence[Item]], task: str) -> Path:
    names = dict.fromkeys(name for items in comparisons for name in items[0].runs)
    return home(Path(first)) / JUDGED / f"{slug('-'.join([*names, 'people', task]))}.sqlite"
