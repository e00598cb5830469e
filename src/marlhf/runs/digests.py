"""What a run was made from: short names for the contents of models and data files.

A stage is finished only for the inputs it had. Their digests stand in run.json from its start on,
so that a model trained again or a data file edited since is noticed. Settings have dotted names
here, as `flatten` gives them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

EDGE = 1 << 16
"""Bytes read at each end of a file of weights: training changes all of it."""
MAX_READ = 1 << 30
"""Data files up to so many bytes are read whole; of larger ones only both ends are."""


def digest_of(what: Any, length: int = 12) -> str:
    """A short name for plain data; anything else in it counts by its text."""
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:length]


def weights_digest(path: str) -> str:
    """A short name for a model's weights, the same wherever its folder lies."""
    digest = hashlib.sha256()
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        digest.update(_edges(file))
    if not files:
        digest.update(path.encode())
    return digest.hexdigest()[:12]


def input_digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """The digest of each model and data file that settings name and that is on this disk."""
    digests: dict[str, str] = {}
    for key, value in _paths(settings):
        path = Path(value).expanduser()
        try:
            if any(path.glob("*.safetensors")):
                digests[key] = weights_digest(str(path))
            elif path.suffix == ".gguf" and path.is_file():
                digests[key] = _file_digest(path, _version(path), most=0)
            elif key.startswith("data.") and path.exists():
                files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
                parts = [f"{f.name} {_file_digest(f, _version(f))}" for f in sorted(files)]
                digests[key] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
        except (OSError, ValueError):  # not a path, or one that may not be read: training says so
            continue
    return digests


def changed_inputs(settings: Mapping[str, Any], recorded: Mapping[str, str]) -> list[str]:
    """A phrase for each input that is no longer what it was: `model: /runs/sft/model is gone`."""
    if not recorded:
        return []
    now, paths = input_digests(settings), dict(_paths(settings))
    return [
        f"{key}: {paths.get(key, '')} {'has changed' if key in now else 'is gone'}"
        for key, digest in recorded.items()
        if now.get(key) != digest
    ]


def _paths(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings that may be paths: text, but for where the run itself is written."""
    for key, value in settings.items():
        values = {key: value}
        if isinstance(value, list):
            values = {f"{key}.{i}": each for i, each in enumerate(value)}
        for name, each in values.items():
            if isinstance(each, str) and 0 < len(each) < 1000 and name != "output_dir":
                yield name, each


def _version(file: Path) -> tuple[int, int]:
    return file.stat().st_size, file.stat().st_mtime_ns


@lru_cache(maxsize=4096)
def _file_digest(file: Path, version: tuple[int, int], most: int = MAX_READ) -> str:
    """`version` makes the cache forget a file that was written since."""
    size, _ = version
    if size > most:
        return hashlib.sha256(str(size).encode() + _edges(file)).hexdigest()
    with file.open("rb") as data:
        digest = hashlib.sha256()
        while block := data.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _edges(file: Path) -> bytes:
    with file.open("rb") as data:
        start = data.read(EDGE)
        data.seek(max(0, file.stat().st_size - EDGE))
        return start + data.read()
