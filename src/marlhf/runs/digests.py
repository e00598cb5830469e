"""Short names for the contents of files: two that are equal have the same content."""

from __future__ import annotations

import hashlib
from pathlib import Path

EDGE = 1 << 16
"""Bytes read at each end of a file of weights: training changes all of it."""


def weights_digest(path: str) -> str:
    """A short name for a model's weights, the same wherever its folder lies."""
    digest = hashlib.sha256()
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            digest.update(data.read(EDGE))
            data.seek(max(0, size - EDGE))
            digest.update(data.read())
    if not files:
        digest.update(path.encode())
    return digest.hexdigest()[:12]
