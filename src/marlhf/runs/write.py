"""The folder of a run that is training: settings, state, metrics and the model."""

from __future__ import annotations

import functools
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marlhf._version import __version__
from marlhf.config.rl import RLConfig
from marlhf.config.settings import default_settings, flatten, to_raw
from marlhf.config.stage import StageConfig
from marlhf.fields import settings_with
from marlhf.runs import atomic, layout

LOGS = (layout.METRICS, layout.EVAL, layout.SAMPLES)
LOCKS: dict[Path, int] = {}
"""The folders that this process trains in, with the descriptor that holds each one's lock."""


class RunFolder:
    """The folder of one stage's run. The same command on an unfinished one resumes it."""

    def __init__(self, path: str | Path, stage: str, config: Any) -> None:
        self.path = Path(path)
        self.stage = stage
        self.config = to_raw(config)
        self.flat = flatten(self.config)
        self.settings = type(config) if isinstance(config, StageConfig) else RLConfig
        self.state: dict[str, Any] = {
            "name": self.path.name,
            "stage": stage,
            "status": "running",
            "marlhf": __version__,
            "commit": commit(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": 0.0,
            "seed": self.config.get("seed"),
            "summary": {},
        }
        self.problems: list[str] = []
        """What the user should know about files that were deleted or damaged."""
        self._clock = time.perf_counter()
        self._open()

    @property
    def checkpoints(self) -> Path:
        return self.path / layout.CHECKPOINTS

    @property
    def model(self) -> Path:
        return self.path / layout.MODEL

    @property
    def finished(self) -> bool:
        return self.state["status"] == "finished" and layout.has_model(self.path, self.state)

    @property
    def seconds(self) -> float:
        """Time spent training, before it was resumed included."""
        return self.state["seconds"] + time.perf_counter() - self._clock

    def _open(self) -> None:
        if self.path.is_file():
            raise layout.RunError(f"{self.path} is a file. Choose another output_dir.")
        if (self.path / layout.CONFIG).is_file():
            before, old = layout.read_state(self.path), layout.read_config(self.path)
            if self.has_progress or "marlhf" not in before:
                self._check_settings(old)
                self._check_links()
                self.state |= before
                longer = self._is_longer(old)
                if longer and self.state["status"] == "finished":
                    self.state["status"] = "stopped"
                if not self.finished:
                    self.lock()
                if longer:
                    self._record_longer(old)
                self._check_inputs()
                self._check_files()
                return
        elif self.path.is_dir() and any(
            not p.name.endswith(atomic.UNFINISHED) for p in self.path.iterdir()
        ):
            raise layout.RunError(
                f"{self.path} is not empty and holds no marlhf run. Choose another output_dir."
            )
        with atomic.explain_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
        self.state["inputs"] = layout.input_digests(self.flat)
        atomic.write_text(self.path / layout.CONFIG, layout.to_yaml(self.config))
        self.write_state()

    @property
    def has_progress(self) -> bool:
        """Whether training left anything: a run that failed on its input may start afresh."""
        if self.checkpoints.exists() or self.model.exists():
            return True
        metrics = self.path / layout.METRICS
        return metrics.is_file() and b'"kind": "train"' in metrics.read_bytes()

    def lock(self) -> None:
        """Keep other processes out."""
        self.release()  # held since an earlier training of this process
        try:
            descriptor = atomic.lock_folder(self.path)
        except atomic.FolderInUse:
            raise layout.RunError(
                f"Another process is training in {self.path}. Wait until it ends, stop it, or "
                "choose another output_dir."
            ) from None
        if descriptor is not None:
            LOCKS[self.path.resolve()] = descriptor
        for leftover in self.path.glob(f".*{atomic.UNFINISHED}"):  # of a process that was killed
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)

    def release(self) -> None:
        held = LOCKS.pop(self.path.resolve(), None)
        if held is not None:
            os.close(held)

    def _check_settings(self, before: dict[str, Any]) -> None:
        if not before:
            raise layout.RunError(
                f"{self.path / layout.CONFIG} is damaged, so the run there cannot be identified. "
                "Put the file back, delete the folder, or choose another output_dir."
            )
        old, new = flatten(before), self.flat
        # A setting that the folder does not know came with a later version, and had its default.
        known = default_settings(self.settings)
        old |= {key: known[key] for key in new.keys() - old.keys() if key in known}
        may_change = settings_with(self.settings, "may_change")
        changed = [
            f"{key}: {old.get(key, '(not there)')!r} there, {new.get(key, '(not there)')!r} now"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and key.split(".")[0] not in may_change
            if not (key == "num_steps" and self._is_longer(before) and self._checkpoint_folders())
        ]
        if changed:
            raise layout.RunError(
                f"{self.path} holds another run. Choose another output_dir, or delete that "
                "folder. It differs in\n  " + "\n  ".join(changed[:12])
            )

    def _is_longer(self, before: dict[str, Any]) -> bool:
        """Whether `num_steps` was raised since the run in this folder began."""
        old, new = before.get("num_steps"), self.config.get("num_steps")
        return isinstance(old, int) and (new is None or new > old)

    def _checkpoint_folders(self) -> list[Path]:
        return [p for p in self.checkpoints.glob("*") if layout.is_checkpoint_name(p.name)]

    def _record_longer(self, before: dict[str, Any]) -> None:
        """Keep the new `num_steps`, and say what it does to the learning rate."""
        new, schedule = self.config.get("num_steps"), self.config.get("schedule")
        atomic.write_text(self.path / layout.CONFIG, layout.to_yaml(before | {"num_steps": new}))
        self.write_state()
        self.problems.append(
            f"num_steps was {before['num_steps']} in {self.path} and is {new or 'not set'} now: "
            "training resumes from the last checkpoint, and from there on the learning rate "
            f"follows the {schedule} schedule of the longer run, not that of the old one"
        )

    def _check_links(self) -> None:
        """Refuse links out of the folder, but for those of a checkpoint.

        A checkpoint with links is damaged, and the one before it is used.
        """
        checkpoints = self._checkpoint_folders()
        for path in self.path.rglob("*"):
            if not any(path.is_relative_to(folder) for folder in checkpoints):
                layout.check_inside(path)

    def _check_inputs(self) -> None:
        """Refuse a run whose models or data are no longer those that it began with."""
        changed = layout.changed_inputs(self.flat, self.state.get("inputs") or {})
        if not changed:
            return
        if not self.model.exists() and not self.checkpoints.exists():
            self.state["inputs"] = layout.input_digests(self.flat)  # nothing was learnt from others
            return
        verdict = "is finished, but for" if self.finished else "began with"
        raise layout.RunError(
            f"{self.path} {verdict} other inputs than there are now. Put them back; or, to train "
            "on those there are, delete that folder or choose another output_dir. Since then\n  "
            + "\n  ".join(changed)
        )

    def _check_files(self) -> None:
        """Note files of this folder that somebody deleted or damaged."""
        if self.state["status"] == "finished" and not self.finished:
            self.problems.append(
                f"the model in {self.model} is not complete, so the end of the run is repeated"
            )
        lines = atomic.read_jsonl(self.path / layout.METRICS)
        if not lines.rows and (self.model.exists() or self.checkpoints.exists()):
            self.problems.append(
                f"{self.path / layout.METRICS} is missing or empty: what it recorded is not in "
                "reports"
            )
        elif lines.broken:
            numbers = ", ".join(map(str, list(lines.broken)[:5]))
            self.problems.append(
                f"{self.path / layout.METRICS} is damaged: what is not JSON is left out (lines "
                f"{numbers})"
            )

    def rewind(self, step: int, seconds: float) -> None:
        """Drop what was logged after a checkpoint: those steps are about to be taken again."""
        for name in LOGS:
            file = self.path / name
            if file.is_file():
                rows = atomic.read_jsonl(file).rows
                atomic.write_jsonl(file, [row for row in rows if _step_of(row) <= step])
        self._restart({"seconds": seconds})

    def clear(self) -> None:
        """Start from nothing: there is no checkpoint to resume from."""
        for name in LOGS:
            (self.path / name).unlink(missing_ok=True)
        self._restart({"seconds": 0.0, "summary": {}})

    def _restart(self, state: dict[str, Any]) -> None:
        self.state |= {**state, "status": "running"}
        self.state.pop("note", None)
        self._clock = time.perf_counter()
        self.write_state()

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        seconds = round(self.seconds, 3)
        self.append(layout.METRICS, {"kind": kind, "step": step, "seconds": seconds, **metrics})

    def append(self, name: str, row: dict[str, Any]) -> None:
        if not self.path.is_dir():
            raise layout.RunError(
                f"Cannot write to {self.path}: the folder is gone. Run the same command again to "
                "start afresh."
            )
        atomic.append_jsonl(self.path / name, [row])

    def finish(self, status: str, summary: dict[str, Any] | None = None, note: str = "") -> None:
        self.state |= {"status": status, "seconds": self.seconds}
        self.state.setdefault("hardware", hardware())
        self._clock = time.perf_counter()
        if summary is not None:
            self.state["summary"] = atomic.finite(summary)
        if status == "finished":
            weights = self.model.glob("*.safetensors")
            self.state["model_files"] = {file.name: file.stat().st_size for file in weights}
        if note:
            self.state["note"] = note
        try:
            self.write_state()
        finally:
            self.release()

    def write_state(self) -> None:
        atomic.write_json(self.path / layout.STATE, self.state)

    def save_model(self, save: Callable[[Path], None], name: str = layout.MODEL) -> None:
        """Keep a model complete or not at all; `save` writes its files into a folder."""
        with (
            atomic.explain_disk_errors(self.path),
            atomic.replacing_folder(self.path / name) as temporary,
        ):
            save(temporary)


class ReadOnlyRunFolder(RunFolder):
    """A run's folder as processes other than the main one use it: they write nothing."""

    def _open(self) -> None:
        self.state |= layout.read_state(self.path)

    def lock(self) -> None: ...

    def write_state(self) -> None: ...

    def append(self, name: str, row: dict[str, Any]) -> None: ...

    def rewind(self, step: int, seconds: float) -> None:
        self.state |= {"seconds": seconds, "status": "running"}

    def clear(self) -> None:
        self.state |= {"seconds": 0.0, "status": "running"}

    def save_model(self, save: Callable[[Path], None], name: str = layout.MODEL) -> None: ...


def _step_of(row: dict[str, Any]) -> float:
    """A line without a step belongs to none, and is dropped."""
    step = row.get("step")
    return step if isinstance(step, int) else math.inf


def is_finished(folder: Path) -> bool:
    """Whether the run in a folder is over, for the inputs there are now, and its model complete."""
    state = layout.read_state(folder)
    if state.get("status") != "finished" or not layout.has_model(folder, state):
        return False
    return not layout.changed_inputs(flatten(layout.read_config(folder)), state.get("inputs") or {})


@functools.cache
def commit() -> str | None:
    """The commit of the git checkout that the package lies in, `-dirty` if files differ from it;
    None where it is installed."""
    package = Path(__file__).resolve().parents[1]
    if not (package.parents[1] / ".git").exists():  # a checkout has src/marlhf
        return None
    git = ["git", "-C", str(package.parents[1])]
    ask = [*git, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        out = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip()


def hardware() -> str:
    """What this process trains on, for people to read: its GPUs, or how many CPU cores."""
    import torch  # not needed to read a run

    if torch.cuda.is_initialized():
        ranks, name = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.get_device_name()
        return f"{ranks} x {name}" if ranks > 1 else name
    return f"{os.cpu_count()} CPU cores"
