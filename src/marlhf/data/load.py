"""The rows of one stage, from the data settings of a recipe."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from marlhf.data import (
    apps,
    cnn_dailymail,
    gsm8k,
    hh,
    humaneval,
    local,
    mbpp,
    sums,
    tldr,
    toy,
    toy_code,
    webgpt,
)
from marlhf.data.counts import Counts
from marlhf.data.files import ENDINGS, Records, read_records
from marlhf.data.hub import read_hub
from marlhf.data.rows import (
    DataError,
    Parsed,
    Row,
    as_chat,
    prompt_fault,
    prompt_key,
    response_fault,
)
from marlhf.data.splits import STAGE_PARTS, check_fractions, held_out, split_rows
from marlhf.fields import check_settings, setting

PUBLISHED = {
    "tldr": tldr,
    "hh": hh,
    "webgpt": webgpt,
    "cnn_dailymail": cnn_dailymail,
    "apps": apps,
    "mbpp": mbpp,
    "humaneval": humaneval,
    "gsm8k": gsm8k,
}
"""Data sets in the form in which their authors published them."""
GENERATED = {"toy": toy, "toy-code": toy_code, "sums": sums}
"""Tasks that make their own rows, without a file or a network."""


def true_score(source: str) -> Callable[[str, str], float] | None:
    """How good a response to a prompt really is, for tasks that define it."""
    return getattr(GENERATED.get(source), "gold_score", None)


HUB_CONFIGS = {
    module.HUB_NAME: module.HUB_CONFIG for module in (tldr, cnn_dailymail, apps, mbpp, gsm8k)
}
"""Which configuration to read of data sets with several."""


Positioned = tuple[Row | None, str, str]
"""A record as its source read it (see `Parsed`), and the record's position."""


@dataclass(frozen=True)
class DataConfig:
    """Which rows to train on. The same for all stages, so that they share one split.

    >>> DataConfig(path="preferences.jsonl", eval_size=200).source
    'auto'
    """

    source: Literal[
        "auto",
        "local",
        "tldr",
        "hh",
        "webgpt",
        "cnn_dailymail",
        "apps",
        "mbpp",
        "humaneval",
        "gsm8k",
        "toy",
        "toy-code",
        "sums",
    ] = "auto"
    """What the rows look like. `auto` tells from the first record; `local` is your own file with
    prompt, chosen, rejected; `toy`, `toy-code` and `sums` need no file and no network."""

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
    rows, for those who have a file per stage."""

    eval_size: int | float = setting(0.05, least=0)
    """Rows held out for evaluation, by prompt: a number (200) or a share (0.05). The same rows
    for every stage, since they are set aside before the parts are cut. 0 for none."""

    eval_split: str | None = None
    """Evaluate on this split of the data set, such as `test`, instead of holding out rows."""

    eval_path: str | None = None
    """Evaluate on the rows of this file, folder or hub data set, instead of holding out rows."""

    seed: int = 0
    """Decides which prompts fall into which part. Keep it the same for all stages of a run."""

    max_prompt_tokens: int = 512
    """Longest prompt. The paper: 512, for code 600."""

    too_long: Literal["drop", "truncate"] = "drop"
    """What to do with longer prompts: leave the row out, or cut out the prompt's middle."""

    limit: int | None = None
    """Read only so many records, to try something out."""

    def __post_init__(self) -> None:
        check_settings(self, "data.")
        check_fractions(self.parts)
        if self.limit is not None and self.limit < 1:
            raise DataError(f"`limit: {self.limit}` reads nothing. Set it to 1 or more.")
        if self.max_prompt_tokens < 1:
            raise DataError(f"`max_prompt_tokens: {self.max_prompt_tokens}` fits no prompt.")
        if self.path is not None and self.source in GENERATED:
            raise DataError(
                f"`source: {self.source}` makes its own rows and reads no file, but `path: "
                f"{self.path}` is given. Set `source: auto` to read it."
            )
        if (self.has_eval_rows or self.chat) and self.source in GENERATED:
            raise DataError(
                f"`source: {self.source}` makes its own rows, as text and without splits. Leave "
                "out chat, eval_split and eval_path; `eval_size` says how many rows are held out."
            )

    @property
    def has_eval_rows(self) -> bool:
        """Whether the rows for evaluation are named, rather than held out from the others."""
        return self.eval_split is not None or self.eval_path is not None

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


_KEPT: dict[str, Loaded] = {}
"""What `load_data` was asked to keep, by what it was asked for and the state of its files."""


def load_data(
    config: DataConfig,
    part: str = "ppo",
    *,
    needs: Collection[str] = ("prompt",),
    keep: bool = False,
) -> Loaded:
    """The rows for one stage: `part` names its share, `needs` what each row must have.

    Rows are split before those that the stage cannot use are taken out, so
    that every stage sees the same parts whatever it needs. With `keep` the next who asks for them
    gets the same rows, unless their file has changed: a recipe is checked before it runs.

    >>> loaded = load_data(DataConfig(source="toy", limit=100, eval_size=10), "sft")
    >>> len(loaded.train), len(loaded.eval)
    (18, 10)
    """
    names = (config.path, config.eval_path)
    files = [Path(name).expanduser() for name in names if name is not None]
    key = f"{config} {part} {sorted(needs)} {[_state(file) for file in files]}"
    loaded = _KEPT.pop(key, None) or _load_data(config, part, needs)
    if keep and files and all(file.is_file() for file in files):
        _KEPT[key] = loaded
    return loaded


def _state(file: Path) -> tuple[int, ...]:
    """Changes with the file."""
    if not file.is_file():
        return ()
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _load_data(config: DataConfig, part: str, needs: Collection[str]) -> Loaded:
    config.check_named()
    _check_part(config, part)
    rows, unusable, counts = _sort_out(
        _read_rows(config, needs), needs, config.path or config.source
    )
    if config.has_eval_rows:
        evaluation, unfit = _eval_rows(config, needs)
        unusable |= unfit
        rest = _without_prompts(rows, evaluation)
        if not rest:
            raise DataError(
                f"Every prompt of {config.path or config.source} is also among the rows for "
                "evaluation, so none is left to train on. A file has no splits: where the test "
                "rows have a file of their own, name it with `eval_path`."
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
    return Loaded(train, [row for row in evaluation if id(row) not in unusable], counts)


def _eval_rows(config: DataConfig, needs: Collection[str]) -> tuple[list[Row], set[int]]:
    """All rows of the file or split that the recipe names for evaluation."""
    path, split = config.eval_path or config.path, config.eval_split or config.split
    named = replace(config, path=path, split=split, eval_path=None, eval_split=None)
    rows, unusable, _ = _sort_out(_read_rows(named, needs), needs, path or config.source)
    return rows, unusable


def _without_prompts(rows: list[Row], others: list[Row]) -> list[Row]:
    """Those rows whose prompts are not among the others: nothing is evaluated that was learnt."""
    taken = {prompt_key(row) for row in others}
    return [row for row in rows if prompt_key(row) not in taken]


def rows_from_records(
    records: Iterable[Mapping[str, Any]],
    *,
    needs: Collection[str] = ("prompt",),
    columns: Mapping[str, str] | None = None,
    name: str = "the data set",
) -> tuple[list[Row], Counts]:
    """Rows from records already in memory, such as a `datasets.Dataset` or a list of dicts.

    For trainers that get their data as an object: columns as in a local file,
    no split, and bad rows counted in the same way.

    >>> rows, counts = rows_from_records([{"prompt": "Why?"}, {"prompt": ""}])
    >>> rows[0].prompt, counts.kept
    ('Why?', 1)
    """
    rows, unusable, counts = _sort_out(
        _parse_local(records, needs, columns or {}, name), needs, name
    )
    return [row for row in rows if id(row) not in unusable], counts


def _sort_out(
    parsed: Iterator[Positioned], needs: Collection[str], name: str
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
        if fault := prompt_fault(row):
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
    records: Iterable[Mapping[str, Any]],
    needs: Collection[str],
    columns: Mapping[str, str],
    name: str,
) -> Iterator[Positioned]:
    for number, record in enumerate(records, start=1):
        position = f"{name}:{number}"
        if number == 1:
            local.check_columns(record, position, columns, needs)
        yield *local.to_row(record, columns), position


def _check_part(config: DataConfig, part: str) -> None:
    if config.parts and part not in config.parts:
        near = difflib.get_close_matches(part, list(config.parts), n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise DataError(
            f"There is no part `{part}` among {', '.join(config.parts)}.{hint} Give it a share in "
            "`parts`, or set `parts: {}` to let every stage use all rows."
        )


def _read_rows(config: DataConfig, needs: Collection[str]) -> Iterator[Positioned]:
    if config.source in GENERATED:
        generated = GENERATED[config.source]
        size = {} if config.limit is None else {"num_rows": config.limit}
        for number, row in enumerate(generated.rows(seed=config.seed, **size), start=1):
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


def _read_source(config: DataConfig) -> Records:
    module = PUBLISHED.get(config.source)
    if config.path is None:
        assert module is not None, "DataConfig asks for a path where there is no default"
        default = HUB_CONFIGS.get(module.HUB_NAME)
        return read_hub(module.HUB_NAME, config.split, config.config or default)
    if config.source in ("auto", "apps") and apps.is_folder(Path(config.path).expanduser()):
        return apps.read_folder(Path(config.path).expanduser(), config.split)
    if Path(config.path).expanduser().exists() or not is_hub_name(config.path):
        return read_records(config.path, config.split)
    return read_hub(config.path, config.split, config.config or HUB_CONFIGS.get(config.path))


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
        known = (name for name, module in PUBLISHED.items() if module.recognises(first))
        source = "local" if config.columns else next(known, "local")
    if source == "local":
        local.check_columns(first, position, config.columns, needs)
        return lambda record: local.to_row(record, config.columns)
    module = PUBLISHED[source]
    if not module.recognises(first):
        raise DataError(
            f"{position} is not in the form of `source: {source}`: it has "
            f"{', '.join(f'`{name}`' for name in first)}. Set `source: auto`, or `source: local` "
            "with `columns`, if the file is your own."
        )

    def parse(record: Mapping[str, Any]) -> Parsed:
        if module.recognises(record):
            return module.to_row(record)
        return None, f"not in the form of `source: {source}`"

    return parse
