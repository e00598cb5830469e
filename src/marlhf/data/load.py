"""The rows of one stage, from the data settings of a recipe; and splits by prompt.

Splits are the same on every machine. A hash of its text and the seed decides in which part a prompt
is, never its position in the file, so the parts of two stages stay disjoint even when one reads the
rows in another order.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from marlhf.data import local
from marlhf.data.code import is_apps_folder, read_apps_folder
from marlhf.data.files import ENDINGS, Records, read_hub, read_records
from marlhf.data.rows import (
    Counts,
    DataError,
    Parsed,
    Row,
    Source,
    as_chat,
    prompt_fault,
    prompt_key,
    response_fault,
)
from marlhf.data.sources import PUBLISHED, SOURCES
from marlhf.fields import check_settings, setting

STAGE_PARTS = {"sft": 0.2, "reward": 0.4, "ppo": 0.4}
"""The paper's shares of the rows for each stage."""


def split_rows(
    rows: Sequence[Row], fractions: Mapping[str, float] = STAGE_PARTS, seed: int = 0
) -> dict[str, list[Row]]:
    """Rows by part, each part near its fraction of all rows, no prompt in two of them.

    Prompts are put in a random order; each goes to the part within whose
    share its middle row falls, so a part misses its size by at most one
    prompt's rows. Where the fractions sum to less than 1, the rest is in no part.

    >>> parts = split_rows([Row(f"Question {n}") for n in range(10)], {"sft": 0.2, "ppo": 0.8})
    >>> {name: len(rows) for name, rows in parts.items()}
    {'sft': 2, 'ppo': 8}
    """
    check_fractions(fractions)
    keys = [prompt_key(row) for row in rows]
    bounds = _running_sums(fractions, total=len(rows))
    part_of: dict[str, str] = {}
    done = 0
    for key, size in _shuffled(keys, f"parts {seed}"):
        middle = done + size / 2
        done += size
        part = next((name for name, bound in bounds.items() if middle <= bound), None)
        if part is not None:
            part_of[key] = part
    parts: dict[str, list[Row]] = {name: [] for name in fractions}
    for row, key in zip(rows, keys, strict=True):
        if key in part_of:
            parts[part_of[key]].append(row)
    return parts


def held_out(rows: Sequence[Row], size: int | float, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """(train, eval): whole prompts held out, about `size` rows or that fraction of them.

    Anything above 0 holds out at least one prompt, so that a small data
    set is evaluated too.

    >>> train, evaluation = held_out([Row(f"Question {n}") for n in range(10)], 2)
    >>> len(train), len(evaluation)
    (8, 2)
    """
    if isinstance(size, float) and not 0 <= size < 1:
        raise DataError(f"An evaluation share of {size} is not in [0, 1). For rows, give an int.")
    if size < 0 or (isinstance(size, int) and size >= len(rows) > 0):
        raise DataError(
            f"{size} rows cannot be held out for evaluation of {len(rows)}: "
            "none would be left to train on. Lower `eval_size`."
        )
    target = size * len(rows) if isinstance(size, float) else size
    keys = [prompt_key(row) for row in rows]
    held: set[str] = set()
    done = 0
    for key, number in _shuffled(keys, f"held out {seed}")[:-1]:  # leave one to train on
        if done + number / 2 > target and (held or target == 0):
            break
        held.add(key)
        done += number
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held]
    evaluation = [row for row, key in zip(rows, keys, strict=True) if key in held]
    return train, evaluation


def check_fractions(fractions: Mapping[str, float]) -> None:
    """Refuse shares outside (0, 1] or above 1 in sum."""
    wrong = {name: share for name, share in fractions.items() if not 0 < share <= 1}
    if wrong:
        raise DataError(f"Each part must be a share in (0, 1], but these are not: {wrong}.")
    total = math.fsum(fractions.values())
    if total > 1 + 1e-9:
        raise DataError(f"The parts {dict(fractions)} add up to {total:g}; make it 1 or less.")


def _running_sums(fractions: Mapping[str, float], total: int) -> dict[str, float]:
    """Where each part ends, in rows. The 1e-6 is for 0.2 + 0.4 + 0.4 < 1 in floats.

    Parts are ordered by name, so that recipes that list them in another order make the same parts.
    """
    names = sorted(fractions)
    shares = [fractions[name] for name in names]
    return {name: math.fsum(shares[: i + 1]) * total + 1e-6 for i, name in enumerate(names)}


def _shuffled(keys: Sequence[str], salt: str) -> list[tuple[str, int]]:
    """Each prompt with its number of rows, in an order that depends on the salt alone."""

    def place(key: str) -> bytes:
        # surrogatepass: JSON may hold half a surrogate pair, and it must not stop a run
        return hashlib.sha256(f"{salt}\0{key}".encode("utf-8", "surrogatepass")).digest()

    return sorted(Counter(keys).items(), key=lambda item: place(item[0]))


if TYPE_CHECKING:
    SourceName = str
else:
    SourceName = Literal[("auto", "local", *SOURCES)]


Positioned = tuple[Row | None, str, str]
"""A record as its source read it (see `Parsed`), and the record's position."""


@dataclass(frozen=True)
class DataConfig:
    """Which rows to train on. The same for all stages, so that they share one split.

    >>> DataConfig(path="preferences.jsonl", eval_size=200).source
    'auto'
    """

    source: SourceName = "auto"
    """What the rows look like. `auto` tells from the first record; `local` is your own file with
    prompt, chosen, rejected; `toy`, `toy-code`, `sums`, `sums-steps`, `guess` need no file."""

    path: str | None = None
    """A file, a folder or a name on the hub. May be left out for published data sets (then the
    hub's) and toy. A file or folder of that name wins over the hub."""

    split: str = "train"
    """Which split of a hub data set to read."""

    config: str | None = None
    """Which configuration of a hub data set to read, for those that have several."""

    chat: bool = False
    """Ask text prompts as a user in a chat, through the tokenizer's chat template: for
    instruction-tuned models and data that is not messages."""

    columns: dict[str, str] = field(default_factory=dict)
    """Our names to those in your file, as in `{prompt: question, chosen: best_answer}`."""

    parts: dict[str, float] = field(default_factory=lambda: dict(STAGE_PARTS))
    """Each stage's share of the rows; no prompt is in two. Empty (`{}`) gives every stage all
    rows: use it with a file per stage."""

    eval_size: int | float = setting(0.05, least=0)
    """Rows held out for evaluation, by prompt: a number (200) or a share (0.05). The same rows
    for every stage, since they are set aside before the parts are cut. 0 for none."""

    eval_split: str | None = None
    """Evaluate on this split of the data set, such as `test`, instead of holding out rows."""

    eval_path: str | None = None
    """Evaluate on the rows of this file, folder or hub data set, instead of holding out rows."""

    more: tuple[str, ...] = ()
    """Files of further rows to train on, such as people's votes, or `@label` in a recipe with
    rounds. They are in no part; those with a held-out prompt are left out."""

    seed: int = 0
    """Decides which prompts fall into which part. Keep it the same for all stages of a run."""

    max_prompt_tokens: int = setting(512, above=0)
    """Longest prompt. The paper: 512, for code 600."""

    too_long: Literal["drop", "truncate"] = "drop"
    """What to do with longer prompts: leave the row out, or cut out the prompt's middle."""

    limit: int | None = setting(None, above=0)
    """Read only so many records, to try something out."""

    def __post_init__(self) -> None:
        check_settings(self, "data.")
        check_fractions(self.parts)
        generated = self.source in SOURCES and SOURCES[self.source].generate is not None
        if self.path is not None and generated:
            raise DataError(
                f"`source: {self.source}` makes its own rows and reads no file, but `path: "
                f"{self.path}` is given. Set `source: auto` to read it."
            )
        if (self.has_eval_rows or self.chat) and generated:
            raise DataError(
                f"`source: {self.source}` makes its own rows, as text and without splits. Leave "
                "out chat, eval_split and eval_path; `eval_size` says how many rows are held out."
            )

    @property
    def has_eval_rows(self) -> bool:
        """Whether the rows for evaluation are named, rather than held out from the others."""
        return self.eval_split is not None or self.eval_path is not None

    def explain_shares(self) -> str:
        """Where a stage's few rows come from, for messages; empty if it has all that there are."""
        if not self.parts or (self.path is None and self.source in ("auto", "local")):
            return ""
        shares = ", ".join(f"{part} {share:.0%}" for part, share in self.parts.items())
        return (
            f" Each stage has only its share of the rows by data.parts ({shares}): set "
            "`data.parts: {}` to give every stage all rows."
        )

    def check_named(self) -> None:
        """Refuse settings that name no rows, as beside rows that a trainer was given."""
        if self.path is None and self.source in ("auto", "local"):
            raise DataError(
                "No data is named. Set `path` to a file, a folder or a name on the hub; "
                "or set `source: toy` to try without any."
            )


@dataclass(frozen=True)
class Loaded:
    """The rows of one stage, and what was read to get them.

    >>> loaded = load_data(DataConfig(source="toy", limit=100), "ppo")
    >>> isinstance(loaded.train[0], Row)
    True
    """

    train: list[Row]
    eval: list[Row]
    counts: Counts
    """Over the whole of what was read, not this stage's part alone."""


def load_data(
    config: DataConfig, part: str = "ppo", *, needs: Collection[str] = ("prompt",)
) -> Loaded:
    """The rows for one stage: `part` names its share, `needs` what each row must have.

    Rows are split before those that the stage cannot use are taken out, so
    that every stage sees the same parts whatever it needs.

    >>> loaded = load_data(DataConfig(source="toy", limit=100, eval_size=10), "sft")
    >>> len(loaded.train), len(loaded.eval)
    (18, 10)
    """
    config.check_named()
    _check_part(config, part)
    name = config.path or config.source
    rows, unusable, counts = _sort_out(_read_rows(config, needs), needs, name)
    if config.has_eval_rows:
        path, split = config.eval_path or config.path, config.eval_split or config.split
        named = replace(config, path=path, split=split, eval_path=None, eval_split=None)
        evaluation, unfit, _ = _sort_out(_read_rows(named, needs), needs, path or config.source)
        unusable |= unfit
        evaluated = {prompt_key(row) for row in evaluation}
        rest = [row for row in rows if prompt_key(row) not in evaluated]
        if not rest:
            raise DataError(
                f"Every prompt of {name} is also among the rows for evaluation, so none is left to "
                "train on. A file has no splits: where the test rows have a file of their own, "
                "name it with `eval_path`."
            )
    else:
        rest, evaluation = held_out(rows, config.eval_size, config.seed)
    mine = split_rows(rest, config.parts, config.seed)[part] if config.parts else rest
    train = [row for row in mine if id(row) not in unusable]
    if not train:
        raise DataError(
            f"The part `{part}` is empty: {len(rows)} rows are too few for eval_size "
            f"{config.eval_size} and parts {config.parts}. Give more rows, or set `parts: {{}}` "
            "to let every stage use them all."
        )
    aside = {prompt_key(row) for row in evaluation} if config.more else set()
    for path in config.more:
        more, _ = rows_from_records((r for r, _ in read_records(path)), needs=needs, name=path)
        more = [as_chat(row) if config.chat else row for row in more]
        train += [row for row in more if prompt_key(row) not in aside]
    return Loaded(train, [row for row in evaluation if id(row) not in unusable], counts)


def rows_from_records(
    records: Iterable[Mapping[str, Any]],
    *,
    needs: Collection[str] = ("prompt",),
    name: str = "the data set",
    opened: bool = False,
) -> tuple[list[Row], Counts]:
    """Rows from records already in memory, such as a `datasets.Dataset` or a list of dicts.

    For trainers that get their data as an object: columns as in a local file,
    no split, and bad rows counted in the same way. Where an environment opens conversations
    (`opened`), prompts may be empty.

    >>> rows, counts = rows_from_records([{"prompt": "Why?"}, {"prompt": ""}])
    >>> rows[0].prompt, counts.kept
    ('Why?', 1)
    """
    parsed = _parse_local(records, needs, name)
    rows, unusable, counts = _sort_out(parsed, needs, name, opened=opened)
    return [row for row in rows if id(row) not in unusable], counts


def _sort_out(
    parsed: Iterator[Positioned], needs: Collection[str], name: str, *, opened: bool = False
) -> tuple[list[Row], set[int], Counts]:
    """Rows with a good prompt, the id() of those of them this stage cannot use, and counts."""
    counts = Counts()
    rows: list[Row] = []
    unusable: set[int] = set()
    for row, remark, position in parsed:
        counts.read += 1
        if row is None:
            counts.drop(remark, position)
            continue
        if fault := prompt_fault(row, opened=opened):
            counts.drop(fault, position)
            continue
        if remark:
            counts.note(remark, position)
        row = replace(row, position=position)
        rows.append(row)
        if fault := response_fault(row, needs):
            counts.drop(fault, position)
            unusable.add(id(row))
    if not counts.kept:
        raise DataError(f"No row of {name} can be used: {counts}")
    return rows, unusable, counts


def _parse_local(
    records: Iterable[Mapping[str, Any]], needs: Collection[str], name: str
) -> Iterator[Positioned]:
    for number, record in enumerate(records, start=1):
        position = f"{name}:{number}"
        if number == 1:
            local.check_columns(record, position, {}, needs)
        yield *local.to_row(record), position


def _check_part(config: DataConfig, part: str) -> None:
    if config.parts and part not in config.parts:
        near = difflib.get_close_matches(part, list(config.parts), n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise DataError(
            f"There is no part `{part}` among {', '.join(config.parts)}.{hint} Give it a share in "
            "`parts`, or set `parts: {}` to let every stage use all rows."
        )


def _read_rows(config: DataConfig, needs: Collection[str]) -> Iterator[Positioned]:
    source = SOURCES.get(config.source)
    if source is not None and source.generate is not None:
        for number, row in enumerate(_generate(source, config.seed, config.limit), start=1):
            yield row, "", f"{config.source}:{number}"
        return
    records = itertools.islice(_read_source(config), config.limit)
    first = next(records, None)
    if first is None:
        raise DataError(f"The split `{config.split}` of {config.path} is empty. Name another.")
    parse = _choose_parser(config, needs, *first)
    for record, position in itertools.chain([first], records):
        row, remark = parse(record)
        yield as_chat(row) if row and config.chat else row, remark, position


@functools.lru_cache(maxsize=2)  # all stages of a recipe ask for the same rows
def _generate(source: Source, seed: int, limit: int | None) -> tuple[Row, ...]:
    assert source.generate is not None
    return tuple(source.generate(seed=seed, **({} if limit is None else {"num_rows": limit})))


def _read_source(config: DataConfig) -> Records:
    path = Path(config.path or "").expanduser()
    if config.path is None:
        name = PUBLISHED[config.source].hub_name
    elif config.source in ("auto", "apps") and is_apps_folder(path):
        return read_apps_folder(path, config.split)
    elif path.exists() or not is_hub_name(config.path):
        return read_records(path, config.split)
    else:
        name = config.path
    return read_hub(name, config.split, config.config or hub_config(name))


def hub_config(name: str) -> str | None:
    """Which configuration of a hub data set holds the rows, where we know it."""
    return next((each.hub_config for each in PUBLISHED.values() if each.hub_name == name), None)


def is_hub_name(path: str) -> bool:
    """Whether a path could be `name` or `owner/name` on the hub rather than a missing file."""
    endings = (*ENDINGS, ".gz")
    return bool(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path)) and not path.endswith(endings)


def _choose_parser(
    config: DataConfig, needs: Collection[str], first: Mapping[str, Any], position: str
) -> Callable[[Mapping[str, Any]], Parsed]:
    """The function that makes rows of records, from the first of them."""
    source = config.source
    if source == "auto":
        best = max(PUBLISHED.values(), key=lambda each: each.recognise(first))
        known = best.recognise(first) and not config.columns
        source = best.name if known else "local"
    if source == "local":
        local.check_columns(first, position, config.columns, needs)
        return lambda record: local.to_row(record, config.columns)
    published = PUBLISHED[source]
    if not published.recognise(first):
        raise DataError(
            f"{position} is not in the form of `source: {source}`: it has "
            f"{', '.join(f'`{name}`' for name in first)}. Set `source: auto`, or `source: local` "
            "with `columns`, if the file is your own."
        )

    def parse(record: Mapping[str, Any]) -> Parsed:
        if published.recognise(record):
            return published.to_row(record)
        return None, f"not in the form of `source: {source}`"

    return parse
