"""A run is a folder: what was asked, what happened, what came out.

config.yaml     the resolved config
run.json        which stage, which state, the summary
metrics.jsonl   a line a step, a line an evaluation
eval.jsonl      every held-out prompt's numbers, an evaluation a line
samples.jsonl   held-out prompts with their responses
checkpoints/    to go on from after a crash
model/          the result, as `save_pretrained` writes it
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from marlhf import __version__
from marlhf.config import to_raw
from marlhf.models.load import quiet_transformers

LINES = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")
FREE_TO_CHANGE = ("output_dir", "save_every", "keep_checkpoints", "log_samples")
"""Settings that may differ when a run goes on: they change what is kept, not what is learnt."""


class RunError(RuntimeError):
    """A run that cannot start or go on, with what to do about it."""


class Stopped(Exception):
    """The user asked for an end (Ctrl-C, SIGTERM) and the run has been saved."""


class RunFolder:
    """The folder of one stage's run. The same command on an unfinished one goes on with it."""

    def __init__(self, path: str | Path, stage: str, config: Any) -> None:
        self.path = Path(path)
        self.stage = stage
        self.config = to_raw(config)
        self.state: dict[str, Any] = {
            "name": self.path.name,
            "stage": stage,
            "status": "running",
            "marlhf": __version__,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": 0.0,
            "seed": self.config.get("seed"),
            "summary": {},
        }
        self._clock = time.perf_counter()
        self._open()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def finished(self) -> bool:
        return self.state["status"] == "finished" and self.model.is_dir()

    @property
    def seconds(self) -> float:
        """Time spent training, earlier sittings included."""
        return self.state["seconds"] + time.perf_counter() - self._clock

    def _open(self) -> None:
        written = self.path / "config.yaml"
        if self.path.is_file():
            raise RunError(f"{self.path} is a file. Choose another output_dir.")
        if written.is_file():
            self._compare(yaml.safe_load(written.read_text(encoding="utf-8")) or {})
            with contextlib.suppress(OSError, json.JSONDecodeError):
                self.state |= json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            return
        if self.path.is_dir() and any(self.path.iterdir()):
            raise RunError(
                f"{self.path} is not empty and holds no marlhf run. Choose another output_dir."
            )
        with explained_writes(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(written, yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True))
        self.write_state()

    def _compare(self, before: dict[str, Any]) -> None:
        old, new = _flat(before), _flat(self.config)
        changed = [
            f"{key}: {old.get(key, '(not there)')!r} there, {new.get(key, '(not there)')!r} now"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and key.split(".")[0] not in FREE_TO_CHANGE
        ]
        if changed:
            raise RunError(
                f"{self.path} holds another run. Choose another output_dir, or delete that "
                "folder. It differs in\n  " + "\n  ".join(changed[:12])
            )

    def rewind(self, step: int, seconds: float) -> None:
        """Forget what was logged after a checkpoint: those steps are about to be taken again."""
        for name in LINES:
            path = self.path / name
            if path.is_file():
                kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step]
                write_whole(path, "".join(f"{line}\n" for line in kept))
        self.state |= {"seconds": seconds, "status": "running"}
        self._clock = time.perf_counter()
        self.write_state()

    def clear(self) -> None:
        """Start from nothing: an earlier sitting left no checkpoint to go on from."""
        for name in LINES:
            (self.path / name).unlink(missing_ok=True)
        self.state |= {"seconds": 0.0, "status": "running", "summary": {}}
        self._clock = time.perf_counter()
        self.write_state()

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        seconds = round(self.seconds, 3)
        self.append("metrics.jsonl", {"kind": kind, "step": step, "seconds": seconds, **metrics})

    def append(self, name: str, record: dict[str, Any]) -> None:
        with explained_writes(self.path), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(record), ensure_ascii=False) + "\n")

    def finish(self, status: str, summary: dict[str, Any] | None = None, note: str = "") -> None:
        self.state |= {"status": status, "seconds": self.seconds}
        self._clock = time.perf_counter()
        if summary is not None:
            self.state["summary"] = _finite(summary)
        if note:
            self.state["note"] = note
        self.write_state()

    def write_state(self) -> None:
        with explained_writes(self.path):
            write_whole(self.path / "run.json", json.dumps(self.state, indent=2) + "\n")

    def save_model(self, model: Any, tokenizer: Any, name: str = "model") -> None:
        """Whole or not at all, as for checkpoints."""
        temporary = self.path / f".{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        with explained_writes(self.path, temporary), quiet_transformers():
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            replace_folder(temporary, self.path / name)


@contextlib.contextmanager
def explained_writes(where: Path, temporary: Path | None = None) -> Iterator[None]:
    """A full or read-only disk as a sentence, with half-written folders cleared away."""
    try:
        yield
    except Exception as error:
        code = getattr(error, "errno", None)
        full = code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if full:
            raise RunError(
                f"The disk of {where} is full. What was saved before is whole: free some space "
                "and run the same command again to go on."
            ) from error
        if code in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise RunError(
                f"Cannot write to {where}: {error}. Choose another output_dir."
            ) from None
        raise


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that a crash leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def replace_folder(temporary: Path, final: Path) -> None:
    """Put a complete folder in its place, everything on disk before its name is."""
    for file in temporary.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.replace(old)
    temporary.replace(final)
    shutil.rmtree(old, ignore_errors=True)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Interrupts:
    """Ctrl-C and SIGTERM as a question asked between steps; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.asked = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread: leave signals alone
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name


def _whole_lines(path: Path) -> list[str]:
    """Lines that are complete JSON: a killed run may leave half of one at the end."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            json.loads(line)
            lines.append(line)
    return lines


def _flat(raw: Any, where: str = "") -> dict[str, Any]:
    if not isinstance(raw, dict):
        return {where: raw}
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        flat |= _flat(value, f"{where}.{key}" if where else key)
    return flat


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity; they become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
