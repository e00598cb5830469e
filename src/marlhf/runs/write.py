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

from marlhf._version import __version__
from marlhf.configs.rl import RLConfig
from marlhf.configs.stage import StageConfig
from marlhf.errors import MarlhfError
from marlhf.fields import settings_with
from marlhf.models.base import quiet_transformers
from marlhf.settings import flatten, to_raw

LINES = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")
FULL = ("No space left", "unexpected pos", "PytorchStreamWriter failed")
"""What safetensors and torch say where Python would give an error number."""
NEW = ".new"
"""How the name of a file ends until it is whole."""
LOCKS: dict[Path, int] = {}
"""The folders that this process trains in, with the descriptor that holds each one's lock."""


class RunError(MarlhfError, RuntimeError):
    """A run that cannot start or go on, with what to do about it."""


class Stopped(MarlhfError):
    """The user asked for an end (Ctrl-C, SIGTERM) and the run has been saved."""

    exit_status = 130


class RunFolder:
    """The folder of one stage's run. The same command on an unfinished one goes on with it."""

    def __init__(self, path: str | Path, stage: str, config: Any) -> None:
        self.path = Path(path)
        self.stage = stage
        self.config = to_raw(config)
        self.settings = type(config) if isinstance(config, StageConfig) else RLConfig
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
            before = _read_state(self.path / "run.json")
            if self.learnt or "marlhf" not in before:
                self._compare(_read_config(written))
                self.state |= before
                if not self.finished:
                    self.lock()
                return
        elif self.path.is_dir() and any(not p.name.endswith(NEW) for p in self.path.iterdir()):
            raise RunError(
                f"{self.path} is not empty and holds no marlhf run. Choose another output_dir."
            )
        with explained_writes(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            write_whole(written, yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True))
        self.write_state()

    @property
    def learnt(self) -> bool:
        """Whether there is anything to lose: a run that failed on its input may start anew."""
        if self.checkpoints.exists() or self.model.exists():
            return True
        metrics = self.path / "metrics.jsonl"
        return metrics.is_file() and b'"kind": "train"' in metrics.read_bytes()

    def lock(self) -> None:
        """Keep other processes out. The system drops the lock with the process, however it ends."""
        try:
            import fcntl
        except ImportError:  # Windows, where runs go unlocked
            return
        folder = self.path.resolve()
        held = LOCKS.pop(folder, None)
        if held is not None:  # by an earlier sitting in this process
            os.close(held)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise RunError(
                f"Another process is training in {self.path}. Wait until it ends, stop it, or "
                "choose another output_dir."
            ) from None
        except OSError:  # a file system without locks
            os.close(descriptor)
        else:
            LOCKS[folder] = descriptor

    def release(self) -> None:
        held = LOCKS.pop(self.path.resolve(), None)
        if held is not None:
            os.close(held)

    def _compare(self, before: dict[str, Any]) -> None:
        old, new = flatten(before), flatten(self.config)
        may_change = settings_with(self.settings, "may_change")
        changed = [
            f"{key}: {old.get(key, '(not there)')!r} there, {new.get(key, '(not there)')!r} now"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and key.split(".")[0] not in may_change
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
                kept = [line for line, at in _whole_lines(path) if at <= step]
                write_whole(path, "".join(f"{line}\n" for line in kept))
        self.state |= {"seconds": seconds, "status": "running"}
        self.state.pop("note", None)
        self._clock = time.perf_counter()
        self.write_state()

    def clear(self) -> None:
        """Start from nothing: an earlier sitting left no checkpoint to go on from."""
        for name in LINES:
            (self.path / name).unlink(missing_ok=True)
        self.state |= {"seconds": 0.0, "status": "running", "summary": {}}
        self.state.pop("note", None)
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
        try:
            self.write_state()
        finally:
            self.release()

    def write_state(self) -> None:
        with explained_writes(self.path):
            write_whole(self.path / "run.json", json.dumps(self.state, indent=2) + "\n")

    def save_model(
        self, model: Any, tokenizer: Any, name: str = "model", state: dict[str, Any] | None = None
    ) -> None:
        """Whole or not at all, as for checkpoints. `state`: weights, where the model has parts."""
        temporary = self.path / f".{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        options = {} if state is None else {"state_dict": state}
        with explained_writes(self.path, temporary), quiet_transformers():
            model.save_pretrained(temporary, **options)
            tokenizer.save_pretrained(temporary)
            replace_folder(temporary, self.path / name)


class Onlooker(RunFolder):
    """A run's folder as processes other than the main one see it: they write nothing."""

    def _open(self) -> None:
        self.state |= _read_state(self.path / "run.json")

    def lock(self) -> None: ...

    def write_state(self) -> None: ...

    def append(self, name: str, record: dict[str, Any]) -> None: ...

    def rewind(self, step: int, seconds: float) -> None:
        self.state |= {"seconds": seconds, "status": "running"}

    def clear(self) -> None:
        self.state |= {"seconds": 0.0, "status": "running"}

    def save_model(self, *_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def explained_writes(where: Path, temporary: Path | None = None) -> Iterator[None]:
    """A full or read-only disk as a sentence, with half-written folders cleared away."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        code = getattr(error, "errno", None)
        full = code in (errno.ENOSPC, errno.EDQUOT) or any(sign in str(error) for sign in FULL)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if full:
            raise RunError(
                f"The disk of {where} is full. What was saved before is whole: free some space "
                "and run the same command again to go on."
            ) from error
        if isinstance(error, OSError):
            raise RunError(
                f"Cannot write to {where}: {error}. Make it a folder that can be written to, or "
                "choose another output_dir."
            ) from error
        raise


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that a crash leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}{NEW}")
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

    def check(self, where: str) -> None:
        """End here, where it is safe to, if that was asked for."""
        if self.asked:
            raise Stopped(f"Stopped by {self.asked}, {where}. The same command goes on.")

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        config = None
    if not isinstance(config, dict):
        raise RunError(
            f"{path} is damaged, so it cannot be told whether the run there is this one. Put the "
            "file back, delete the folder, or choose another output_dir."
        )
    return config


def _read_state(path: Path) -> dict[str, Any]:
    """What run.json says; nothing where it is missing or damaged, for checkpoints know the rest."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _whole_lines(path: Path) -> list[tuple[str, int]]:
    """Lines that are complete JSON, with their step: a killed run may leave half of one."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
            lines.append((line, int(json.loads(line)["step"])))
    return lines


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity; they become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
