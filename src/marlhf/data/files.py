"""Records of files on disk and of data sets on the Hugging Face hub.

Every way in which a file can be broken is a clear error. No code from the hub is ever run.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import gzip
import itertools
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from marlhf.data.rows import DataError

Record = dict[str, Any]
Records = Iterator[tuple[Record, str]]
"""Each record with its position, "file:line"."""

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
COMPANIONS = (".md", ".txt", ".yaml", ".yml", "")
"""Endings of files beside the data that are ignored (README.md, LICENSE)."""
CONVERTED = "refs%2Fconvert%2Fparquet"
"""The branch on which the hub itself keeps parquet copies of older data sets."""


def read_records(path: str | Path, split: str | None = None) -> Records:
    """Every record of a file, or of all files in a folder, one at a time.

    Reads .jsonl, .json (a list, or one object per line), .csv and .tsv, each also
    with .gz, .parquet, and folders of these at any depth. `split` is for a
    folder written by `save_to_disk` that holds several.

    >>> import tempfile
    >>> from pathlib import Path
    >>> file = Path(tempfile.mkdtemp()) / "mine.jsonl"
    >>> _ = file.write_text('{"prompt": "Why?"}')
    >>> [record for record, position in read_records(str(file))]
    [{'prompt': 'Why?'}]
    """
    path = Path(path).expanduser()
    try:
        if not path.exists():
            raise DataError(_not_found(path))
        if not path.is_dir():
            yield from _read_file(path)
        elif (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            yield from _read_saved(path, split)
        else:
            for file in files_in(path):
                yield from _read_file(file)
    except PermissionError as error:
        raise DataError(
            f"{error.filename or path} may not be read: permission denied. "
            "Change its permissions, or copy it to a place that you may read."
        ) from error


def ending(path: Path) -> str | None:
    """The ending that decides how a file is read, without .gz; None if it is unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        return next((s for s in suffixes[-2:-1] if s in ENDINGS and s != ".parquet"), None)
    return next((s for s in suffixes[-1:] if s in ENDINGS), None)


def files_in(folder: Path) -> list[Path]:
    """The data files of a folder, sorted, so that every machine reads them in the same order."""
    files = [f for f in folder.rglob("*") if f.is_file() and not _is_hidden(f, folder)]
    data = sorted(f for f in files if ending(f))
    strange = sorted(str(f) for f in files if not ending(f) and f.suffix not in COMPANIONS)
    if strange:
        raise DataError(
            f"The folder {folder} holds files that cannot be read: {', '.join(strange[:5])}. "
            f"Give the path of one file, or convert them to one of {', '.join(ENDINGS)}."
        )
    if not data:
        raise DataError(
            f"The folder {folder} holds no data. Put in files that end in {', '.join(ENDINGS)}."
        )
    return data


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _not_found(path: Path) -> str:
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if folder != path.absolute().parent:
        return f"There is no {path}: the folder {folder} exists, but not the next one in the path."
    near = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=1)
    hint = f"Did you mean {folder / near[0]}?" if near else f"{folder} has nothing like it."
    return f"There is no {path}. {hint}"


def _read_file(path: Path) -> Records:
    readers = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".csv": _read_table,
        ".tsv": _read_table,
        ".parquet": _read_parquet,
    }
    kind = ending(path)
    if kind is None:
        raise DataError(
            f"{path} has an unknown ending. Data is read from {', '.join(ENDINGS)}, "
            "and, except for .parquet, from these with .gz."
        )
    records = readers[kind](path)
    first = next(records, None)
    if first is None:
        raise DataError(f"{path} is empty: it holds no records. Write it again, or remove it.")
    yield from itertools.chain([first], records)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file, decoded one by one so that a huge file streams."""
    offset = 0
    open_file = gzip.open if path.suffix.lower() == ".gz" else Path.open
    try:
        with open_file(path, "rb") as file:
            for raw in file:
                yield raw.decode("utf-8-sig" if offset == 0 else "utf-8")
                offset += len(raw)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {offset + error.start} is "
            f"0x{error.object[error.start]:02x}. Save it as UTF-8; if it is compressed, "
            "its name must end in .gz."
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged: it cannot be unpacked ({error}). Download or compress it again."
        ) from error


def _read_jsonl(path: Path) -> Records:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            value = _parse_json(
                line.rstrip(), path, number, "Each line must be one whole JSON object."
            )
            yield _object(value, f"{path}:{number}"), f"{path}:{number}"


def _read_json(path: Path) -> Records:
    """A list of objects; or one object per line, as in OpenAI's files of that name."""
    first = next((line for line in _lines(path) if line.strip()), "")
    if not first.lstrip().startswith("["):
        yield from _read_jsonl(path)
        return
    form = "The file must be a list of objects, or have one object per line."
    for number, value in enumerate(_parse_json("".join(_lines(path)), path, 1, form), start=1):
        yield _object(value, f"{path}:{number}"), f"{path}:{number}"


def _parse_json(text: str, path: Path, line: int, form: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{line + error.lineno - 1} is not JSON: {error.msg} at column {error.colno}. "
            f"{form}"
        ) from error
    except (ValueError, RecursionError) as error:
        reason = "its lists or objects are nested too deep"
        if isinstance(error, ValueError):
            reason = "it has a number with more digits than Python converts"
        raise DataError(
            f"{path}:{line} cannot be read: {reason}. Correct that record, or leave it out."
        ) from error


def _object(value: Any, position: str) -> Record:
    if isinstance(value, dict):
        return value
    kind = {list: "a list", str: "a text"}.get(type(value), f"`{json.dumps(value)}`")
    raise DataError(
        f"{position} is {kind}, not an object. "
        'Each record must have names for its values, as in {"prompt": "..."}.'
    )


def _read_table(path: Path) -> Records:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # posts are longer than the default limit
    delimiter = "\t" if ending(path) == ".tsv" else ","
    reader = csv.reader(_lines(path), delimiter=delimiter, strict=True)
    line = 0
    try:
        header = next(reader, [])
        line = reader.line_num
        if len(set(header)) < len(header):
            raise DataError(f"{path}:1 names a column twice: {header}. Rename one of the two.")
        for fields in reader:
            line, position = reader.line_num, f"{path}:{line + 1}"
            if not fields:
                continue
            if len(fields) != len(header):
                raise DataError(
                    f"{position} has {len(fields)} fields, but the header has {len(header)}. "
                    "Put quotes around text that holds the delimiter or a line break."
                )
            yield dict(zip(header, fields, strict=True)), position
    except csv.Error as error:
        raise DataError(
            f"{path}:{line + 1} cannot be read as a table: {error}. "
            "Quote its text with double quotes, and double those inside it."
        ) from error


def _read_parquet(path: Path) -> Records:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
            for number, record in enumerate(itertools.chain.from_iterable(batches), start=1):
                yield record, f"{path}:{number}"
    except PermissionError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is damaged, or not a parquet file ({error}). Download or write it again."
        ) from error


def _read_saved(path: Path, split: str | None) -> Records:
    """A folder written by `save_to_disk` of the datasets library."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path} was written by the datasets library and needs it to be read. "
            "Run `pip install 'marlhf[hub]'`, or save it with `to_json`."
        ) from error
    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        names = [str(name) for name in saved]
        split = split or (names[0] if len(names) == 1 else None)
        if split not in names:
            raise DataError(f"{path} has no split `{split}`. It has: {', '.join(names)}.")
        saved = saved[split]
    for number, record in enumerate(saved, start=1):
        yield dict(record), f"{path}:{number}"


def read_hub(name: str, split: str = "train", config: str | None = None) -> Records:
    """Every record of one split of a hub data set, with "name[split]:row" as its position.

    >>> for record, position in read_hub("trl-lib/tldr", "train"):  # doctest: +SKIP
    ...     print(record["prompt"])
    """
    try:
        import datasets
        import datasets.exceptions
    except ImportError as error:
        raise DataError(
            f"`{name}` is not a file or folder here, and to fetch it from the hub the datasets "
            "library is needed. Correct the path, or run `pip install 'marlhf[hub]'`."
        ) from error
    reachable = _reachable(name)
    try:
        with contextlib.nullcontext() if reachable else _offline():
            loaded = _load(name, split, config)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError, TimeoutError) as error:
        cause = _first_line(error) if reachable else "it does not answer, and the cache lacks it"
        raise DataError(
            f"`{name}` is not a file or folder here, and could not be fetched from the hub "
            f"({cause}). Correct the name; log in with `hf auth login` if the data "
            "set is private; or, without a network, download it first and give its folder."
        ) from error
    except FileNotFoundError as error:
        raise DataError(
            f"The hub's `{name}` has no data for config `{config or 'default'}`, split `{split}` "
            f"({_first_line(error)}). Look up both on https://huggingface.co/datasets/{name}."
        ) from error
    except ValueError as error:
        raise DataError(
            f"The hub's `{name}` cannot give split `{split}` of config `{config or 'default'}`: "
            f"{' '.join(str(error).split())} Set `split` and `config` to one of those it has."
        ) from error
    for number, record in enumerate(loaded, start=1):
        yield dict(cast(Mapping[str, Any], record)), f"{name}[{split}]:{number}"


def _reachable(name: str) -> bool:
    """Whether the hub answers, by one request. `datasets` itself would retry for half a minute."""
    import huggingface_hub.errors

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=10)
    except huggingface_hub.errors.HfHubHTTPError:
        return True  # it answered, if only that there is no such data set
    except Exception:  # no network, no answer in time, offline mode: the type varies by version
        return False
    return True


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Read the cache alone, for a while."""
    import datasets.config
    import huggingface_hub

    settings: list[Any] = [datasets.config, huggingface_hub.constants]
    before = [each.HF_HUB_OFFLINE for each in settings]
    try:
        for each in settings:
            each.HF_HUB_OFFLINE = True
        yield
    finally:
        for each, value in zip(settings, before):
            each.HF_HUB_OFFLINE = value


def _load(name: str, split: str, config: str | None) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
    # The data set is published as a program; take the hub's own conversion instead.
    folder = f"hf://datasets/{name}@{CONVERTED}/{config or 'default'}/{split}"
    return datasets.load_dataset("parquet", data_files={split: f"{folder}/*.parquet"}, split=split)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
