"""Records of files on disk. Every way in which a file can be broken is a clear error."""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from marlhf.data.rows import DataError

Record = dict[str, Any]
Records = Iterator[tuple[Record, str]]
"""Each record with its position, "file:line"."""

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
COMPANIONS = (".md", ".txt", ".yaml", ".yml", "")
"""Endings of files beside the data that are ignored (README.md, LICENSE)."""


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
    empty = True
    for item in readers[kind](path):
        empty = False
        yield item
    if empty:
        raise DataError(f"{path} is empty: it holds no records. Write it again, or remove it.")


def _open(path: Path) -> BinaryIO:
    packed = path.suffix.lower() == ".gz"
    return cast(BinaryIO, gzip.open(path, "rb")) if packed else path.open("rb")


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file, decoded one by one so that a huge file streams."""
    offset = 0
    try:
        with _open(path) as file:
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
        if not line.strip():
            continue
        position = f"{path}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{position} is not JSON: {error.msg} at column {error.colno}. "
                "Each line must be one whole JSON object."
            ) from error
        yield _object(value, position), position


def _read_json(path: Path) -> Records:
    """A list of objects; or one object per line, as in OpenAI's files of that name."""
    first = next((line for line in _lines(path) if line.strip()), "")
    if not first.lstrip().startswith("["):
        yield from _read_jsonl(path)
        return
    try:
        values = json.loads("".join(_lines(path)))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno} is not JSON: {error.msg} at column {error.colno}. "
            "The file must be a list of objects, or have one object per line."
        ) from error
    for number, value in enumerate(values, start=1):
        position = f"{path}:{number}"
        yield _object(value, position), position


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
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow to be read. Run `pip install pyarrow`.") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
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
