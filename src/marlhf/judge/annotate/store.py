"""Votes in SQLite: an append-only log; each event is on disk before the request is answered.

An undo is an event too, so nothing is ever deleted. The pairs are stored with the votes, so that
votes can be exported even if the runs are gone.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from marlhf.errors import MarlhfError
from marlhf.judge.annotate.tasks import Guide, Item, RunPair, a_is_left, own_order
from marlhf.judge.pairs import JudgeError
from marlhf.judge.verdicts import Verdict
from marlhf.runs.layout import check_inside

Choice = Literal["left", "tie", "right"]
CHOICES: tuple[Choice, ...] = ("left", "tie", "right")
VERSION = 1
LONGEST_NAME = 40
NAME_SIGNS = " .'@()+-_"
SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE pairs (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, a TEXT NOT NULL, b TEXT NOT NULL,
    prompt TEXT NOT NULL, reference TEXT NOT NULL,
    response_a TEXT NOT NULL, response_b TEXT NOT NULL
);
CREATE TABLE events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, action TEXT NOT NULL UNIQUE, time TEXT NOT NULL,
    annotator TEXT NOT NULL, pair TEXT NOT NULL REFERENCES pairs (id),
    kind TEXT NOT NULL CHECK (kind IN ('left', 'tie', 'right', 'skip', 'undo')),
    left_run TEXT NOT NULL CHECK (left_run IN ('a', 'b')),
    undoes INTEGER REFERENCES events (number)
);
CREATE TABLE remarks (
    event INTEGER PRIMARY KEY REFERENCES events (number),
    strength INTEGER, flag INTEGER NOT NULL, note TEXT NOT NULL
);
CREATE INDEX of_annotator ON events (annotator, number);
"""
LONGEST_NOTE = 500


class VoteError(MarlhfError, ValueError):
    """An invalid request; nothing is stored."""


class NoPair(VoteError):
    """A vote on a pair that is not shown here."""


class Remarks(NamedTuple):
    """What an annotator may add to a vote."""

    strength: int | None = None  # 1, 2, 3: slightly, clearly, much better
    flag: bool = False
    note: str = ""


class Event(NamedTuple):
    """A row of the log, with the remarks on it."""

    number: int
    time: str
    annotator: str
    pair: str
    kind: str
    left_run: str
    undoes: int | None
    strength: int | None = None
    flag: int | None = None
    note: str | None = None

    @property
    def verdict(self) -> Verdict | None:
        """The vote in terms of runs instead of sides."""
        if self.kind not in CHOICES:
            return None
        if self.kind == "tie":
            return "tie"
        return "a" if (self.kind == "left") == (self.left_run == "a") else "b"


@dataclass(frozen=True)
class AnnotatorProgress:
    """An annotator's progress; `left`, `tie` and `right` count votes by side, not by run."""

    annotator: str
    done: int
    total: int
    skipped: int
    left: int
    tie: int
    right: int
    can_undo: bool
    pair: str | None
    """The next pair, None at the end."""


class Store:
    """The votes on some pairs. Thread-safe, and safe to kill at any time."""

    def __init__(self, path: Path) -> None:
        """Open an existing database."""
        if not path.is_file():
            raise JudgeError(
                f"There are no votes in {path}. Vote first, or give another --database."
            )
        check_inside(path)
        self.path = path
        self._lock = threading.RLock()
        with _explained(path):
            self._db = sqlite3.connect(
                path, timeout=60, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA synchronous = FULL")  # a commit waits for the disk
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version != VERSION:
                raise sqlite3.DatabaseError("it is not a database of votes of this version")
            about = dict(self._db.execute("SELECT name, value FROM about"))
        self.task: str = about["task"]
        self.guide = Guide(**json.loads(about["guide"]))
        self.seed = int(about["seed"])
        self.token: str = about["token"]
        """Part of the address if the page is not only for this machine."""
        self.votes_each = int(about.get("votes_each", 0))
        """How many people vote on each pair; 0 for everyone."""
        self.items: dict[str, Item] = {}
        self._places: dict[str, int] = {}
        self.refresh()
        self.shown: list[str] = []
        """The ids of the pairs that are shown. Everyone has the same order, so that people who stop
        early have judged the same pairs."""
        self._show(self.items)

    @classmethod
    def create(cls, path: Path, task: str, seed: int | None, guide: Guide) -> Store:
        """Create a new database; without a seed one is drawn."""
        seed = secrets.randbits(63) if seed is None else seed
        about = {"task": task, "seed": str(seed), "token": secrets.token_urlsafe(18)}
        about["guide"] = json.dumps(asdict(guide))
        check_inside(path)
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # it contains the token
            db = sqlite3.connect(path, timeout=60, isolation_level=None)
            db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {VERSION};")
            db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            db.execute("COMMIT")
            db.close()
        return cls(path)

    def take(self, comparisons: Sequence[Sequence[Item]], limit: int | None = None) -> None:
        """Show these pairs, the first `limit` of every two runs; new pairs are added.

        If a stored pair is missing, the votes are on other responses: an error.
        """
        named = [{item.name(self.seed): item for item in items} for items in comparisons]
        current = {name for items in named for name in items}
        if gone := [name for name in self.items if name not in current]:
            raise JudgeError(
                f"{self.path} has votes on other responses: {len(gone)} of its {len(self.items)} "
                "pairs are not in these runs. Give another --database for these; --export still "
                "writes the stored votes."
            )
        asked = {name: items[name] for items in named for name in list(items)[:limit]}
        with self._change() as db:
            db.executemany(
                "INSERT OR IGNORE INTO pairs (id, a, b, prompt, reference, response_a, response_b) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (name, *i.runs, json.dumps(i.prompt), i.reference, i.response_a, i.response_b)
                    for name, i in asked.items()
                ],
            )
        self.refresh()
        self._show(asked)

    def _show(self, items: Mapping[str, Item]) -> None:
        self.shown = sorted(name for name, item in items.items() if not item.same)

    def refresh(self) -> None:
        """Read the pairs in the order of insertion; another process may have added some."""
        rows = self._db.execute(
            "SELECT id, a, b, prompt, reference, response_a, response_b FROM pairs ORDER BY number"
        )
        self.items = {
            name: Item(RunPair(a, b), json.loads(prompt), *texts)
            for name, a, b, prompt, *texts in rows
        }
        counts: dict[RunPair, int] = {}
        for name, item in self.items.items():
            if not item.same:
                self._places[name] = counts[item.runs] = counts.get(item.runs, -1) + 1

    def distribute(self, votes_each: int) -> None:
        """Share the pairs: each is shown until that many people have voted on it."""
        with self._change() as db:
            db.execute("INSERT OR REPLACE INTO about VALUES ('votes_each', ?)", (str(votes_each),))
        self.votes_each = votes_each

    def vote(
        self,
        annotator: str,
        pair: str,
        choice: str,
        action: str | None = None,
        remarks: Remarks | None = None,
    ) -> AnnotatorProgress:
        """Store a vote (`left`, `tie`, `right`) or a `skip`; a later vote replaces an earlier one.

        `action` is the id of the request: sent twice, it counts once.
        """
        if choice not in (*CHOICES, "skip"):
            raise VoteError(f"There is no vote {choice!r}. Choose left, tie, right or skip.")
        if pair not in self._places or pair not in self.shown:
            raise NoPair("This pair is not among those compared here. Reload the page.")
        with self._change() as db:
            name = self._name(annotator)
            if not self._known(action):
                left_run = self._left_run(name, pair)
                number = self._add(action, name, pair, choice, left_run, undoes=None)
                if remarks and any(remarks):
                    strength = remarks.strength if choice in ("left", "right") else None
                    values = (number, strength, remarks.flag, remarks.note[:LONGEST_NOTE])
                    db.execute("INSERT INTO remarks VALUES (?, ?, ?, ?)", values)
            return self.state(name)

    def undo(self, annotator: str, action: str | None = None) -> AnnotatorProgress:
        """Undo this annotator's last vote or skip; that pair is shown again next."""
        with self._change():
            name = self._name(annotator)
            standing = [e for e in self.standing(name).values() if e.pair in self.shown]
            last = max(standing, key=lambda event: event.number, default=None)
            if not self._known(action):
                if last is None:
                    raise VoteError("There is nothing to undo.")
                self._add(action, name, last.pair, "undo", last.left_run, undoes=last.number)
            return self.state(name)

    def _add(self, action: str | None, *event: str, undoes: int | None) -> int | None:
        """Append an event (annotator, pair, kind, left_run), and return its number."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return self._db.execute(
            "INSERT INTO events (action, time, annotator, pair, kind, left_run, undoes) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (action or secrets.token_hex(16), now, *event, undoes),
        ).lastrowid

    def sides(self, annotator: str, pair: str) -> tuple[str, str]:
        """Both responses, the one on the left first."""
        item = self.items[pair]
        if self._left_run(annotator, pair) == "a":
            return item.response_a, item.response_b
        return item.response_b, item.response_a

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def place(self, annotator: str, pair: str) -> str:
        """What an annotator's pairs are sorted by.

        All see one order, so that people who stop early have judged the same pairs. Where the
        pairs are shared out, each begins elsewhere, so that two at once rarely meet.
        """
        return own_order(self.seed, annotator, pair) if self.votes_each else pair

    def _shown_to(self, name: str) -> list[str]:
        """The pairs of an annotator in order, without those that enough others have voted on."""
        if not self.votes_each:
            return self.shown
        others = [self.standing(other) for other in self.annotators() if other != name]
        votes = Counter(e.pair for standing in others for e in standing.values() if e.verdict)
        own = self.standing(name)
        wanted = [pair for pair in self.shown if votes[pair] < self.votes_each or pair in own]
        return sorted(wanted, key=lambda pair: self.place(name, pair))

    def state(self, annotator: str) -> AnnotatorProgress:
        with self._lock:
            name = self._name(annotator)
            shown = self._shown_to(name)
            last = {pair: e for pair, e in self.standing(name).items() if pair in shown}
            skipped = sorted((e for e in last.values() if e.kind == "skip"), key=lambda e: e.number)
            votes = {choice: sum(e.kind == choice for e in last.values()) for choice in CHOICES}
            waiting = [p for p in shown if p not in last] + [e.pair for e in skipped]
            events = self.events("WHERE annotator = ? ORDER BY number DESC LIMIT 1", name)
        if events and events[0].kind == "undo" and events[0].pair in waiting:
            waiting.insert(0, events[0].pair)
        return AnnotatorProgress(
            annotator=name,
            done=sum(votes.values()),
            total=len(shown),
            skipped=len(skipped),
            can_undo=bool(last),
            pair=waiting[0] if waiting else None,
            **votes,
        )

    def standing(self, name: str) -> dict[str, Event]:
        """By pair, the last event of this annotator that was not undone."""
        events = self.events(
            "WHERE annotator = ? AND kind != 'undo' AND number NOT IN (SELECT undoes FROM events "
            "WHERE undoes IS NOT NULL) ORDER BY number",
            name,
        )
        return {event.pair: event for event in events}

    def events(self, where: str = "ORDER BY number", *values: str) -> list[Event]:
        """The full log, or a part of it."""
        columns = ", ".join(Event._fields)
        table = "events LEFT JOIN remarks ON remarks.event = events.number"
        with self._lock:
            rows = self._db.execute(f"SELECT {columns} FROM {table} {where}", values).fetchall()
        return [Event(*row) for row in rows]

    def annotators(self) -> list[str]:
        with self._lock:
            rows = self._db.execute(
                "SELECT annotator FROM events GROUP BY annotator ORDER BY min(number)"
            ).fetchall()
        return [name for (name,) in rows]

    def _name(self, annotator: str) -> str:
        """The name as it was first written: Ann and ann are one person."""
        name = clean_name(annotator)
        known = {each.casefold(): each for each in self.annotators()}
        return known.get(name.casefold(), name)

    def _known(self, action: str | None) -> bool:
        events = self._db.execute("SELECT 1 FROM events WHERE action = ?", (action,))
        return action is not None and events.fetchone() is not None

    def _left_run(self, annotator: str, pair: str) -> str:
        place = self._places[pair]
        return "a" if a_is_left(self.seed, annotator, self.items[pair].runs, place) else "b"

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: on disk when it ends, or rolled back."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have ended it already
                    self._db.execute("ROLLBACK")
                raise


def clean_name(name: str) -> str:
    """A name with normalised spaces; names that do not fit a file or table are refused."""
    clean = " ".join(unicodedata.normalize("NFC", name).split())
    if not clean:
        raise VoteError("There is no name. Enter your name.")
    if len(clean) > LONGEST_NAME:
        raise VoteError(f"The name is longer than {LONGEST_NAME} characters. Choose a shorter one.")
    letters = [unicodedata.category(c)[0] in "LMN" for c in clean]
    if (
        unicodedata.category(clean[0])[0] == "M"
        or not letters[0]
        or not all(letter or c in NAME_SIGNS for letter, c in zip(letters, clean))
    ):
        raise VoteError(
            f"A name may contain letters, digits, spaces and {NAME_SIGNS.strip()}, and begins with "
            "a letter or a digit."
        )
    return clean


@contextmanager
def _explained(path: Path) -> Iterator[Any]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise JudgeError(
            f"Cannot store votes in {path}: {error}. Give another --database."
        ) from error
