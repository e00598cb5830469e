"""`sweep.json`: what a sweep consists of and how far it has come.

It is a record for readers: whether a run is finished is read from the run's own folder.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from marlhf.config.settings import default_settings
from marlhf.runs.atomic import FolderInUse, explain_disk_errors, lock_folder, write_json
from marlhf.runs.layout import RunError, read_object
from marlhf.runs.write import is_finished
from marlhf.sweep.plan import MAY_CHANGE, Plan, Training
from marlhf.train.stages import METHODS

NAME = "sweep.json"
PATIENCE = 60.0
"""Seconds to wait for processes of a sweep that was killed: they save before they end."""


class SweepState:
    """The file, kept up to date. Points of earlier calls stay in it."""

    def __init__(self, plan: Plan) -> None:
        self.root, self.plan = plan.root, plan
        before = _read(plan.root)
        _compare(before, plan)
        self.points = {p["name"]: p for p in before.get("points", [])}
        self.runs: dict[str, dict[str, Any]] = dict(before.get("runs", {}))
        for point in plan.points:
            # A call for some stages only must not forget the others.
            known = self.points.get(point.name, {}).get("runs", [])
            folders = list(dict.fromkeys([*known, *map(self.short, point.runs)]))
            entry = {"name": point.name, "settings": point.settings, "runs": folders}
            self.points[point.name] = entry
        for name, entry in self.runs.items():
            if entry["state"] == "running":  # when the sweep was killed
                entry["state"] = "finished" if is_finished(plan.root / name) else "stopped"
        for run in plan.runs:
            old = self.runs.get(self.short(run.folder), {})
            state = "finished" if is_finished(run.folder) else "waiting"
            self.runs[self.short(run.folder)] = old | {"stage": run.stage, "state": state}
        self.axes = dict(before.get("axes", {}))
        for axis in plan.axes:
            known = self.axes.get(axis.key, [])
            self.axes[axis.key] = known + [v for v in _plain(axis.parsed) if v not in known]

    def short(self, folder: Path) -> str:
        return str(folder.relative_to(self.root))

    def of(self, folder: Path) -> str:
        """`finished`, `failed`, `stopped`, `running` or `waiting`."""
        return self.runs[self.short(folder)]["state"]

    def mark(
        self, training: Training, state: str, note: str = "", seconds: float | None = None
    ) -> None:
        """Write down where a training stands, and the seconds its process has run until now."""
        entry = self.runs[self.short(training.folder)]
        entry["state"] = state
        entry.pop("note", None)
        if note:
            entry["note"] = note
        if seconds is not None:
            entry["seconds"] = round(entry.get("seconds", 0.0) + seconds, 1)
        self.write()

    def note(self, training: Training) -> str:
        return self.runs[self.short(training.folder)].get("note", "")

    def write(self) -> None:
        points = [point | {"state": self._state_of(point)} for point in self.points.values()]
        whole = {
            "recipe": self.plan.recipe,
            "axes": self.axes,
            "points": points,
            "runs": self.runs,
            "settings": self.plan.settings,
        }
        write_json(self.root / NAME, _plain(whole))

    def _state_of(self, point: dict[str, Any]) -> str:
        states = [self.runs[name]["state"] for name in point["runs"]]
        for one in ("failed", "running", "stopped"):
            if one in states:
                return one
        return "finished" if set(states) == {"finished"} else "waiting"


@contextlib.contextmanager
def locked(root: Path, say: Callable[[str], None]) -> Iterator[int | None]:
    """Keep other sweeps out of the folder. Processes that are given the lock hold it, too."""
    with explain_disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
    deadline, announced = time.monotonic() + PATIENCE, False
    while True:
        try:
            descriptor = lock_folder(root)
            break
        except FolderInUse:
            if time.monotonic() > deadline:
                raise RunError(
                    f"Another process is sweeping in {root}. Wait until it ends, stop it, or "
                    "choose another output_dir."
                ) from None
        if not announced:
            say(f"waiting for other processes in {root} to end")
        announced = True
        time.sleep(0.2)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _read(root: Path) -> dict[str, Any]:
    file = root / NAME
    if not file.is_file():
        if root.is_file():
            raise RunError(f"{root} is a file. Choose another output_dir.")
        if root.is_dir() and any(not p.name.startswith(".") for p in root.iterdir()):
            raise RunError(
                f"{root} is not empty and holds no sweep. Choose another output_dir for it."
            )
        return {}
    state = read_object(file)
    if not _is_complete(state):
        raise RunError(
            f"{file} is damaged, so the sweep there cannot be identified. Put the file back, "
            "delete the folder, or choose another output_dir."
        )
    return state


def _is_complete(state: dict[str, Any]) -> bool:
    try:
        listed = [name for point in state["points"] for name in point["runs"]]
        known = all(name in state["runs"] for name in listed)
        return known and all(isinstance(state[key], dict) for key in ("axes", "settings"))
    except (KeyError, TypeError):
        return False


def _compare(before: dict[str, Any], plan: Plan) -> None:
    """Refuse to mix two sweeps: but for the axes, old and new, all settings must be the same."""
    axes = {*before.get("axes", {}), *(axis.key for axis in plan.axes)}
    changed: list[str] = []
    for stage, old in before.get("settings", {}).items():
        if stage not in plan.settings:
            changed.append(f"{stage}: a stage there, none now")
            continue
        new = _plain(plan.settings[stage])
        for key in sorted({*old, *new}):
            was, now = old.get(key, "(not there)"), new.get(key, "(not there)")
            if key not in old:  # it came with a later version, and had its default
                was = now if now in _defaults(key) else was
            free = key.split(".")[0] in MAY_CHANGE or any(_decides(a, key, plan) for a in axes)
            if was != now and not free:
                changed.append(f"{stage}.{key}: {was!r} there, {now!r} now")
    if changed:
        raise RunError(
            f"{plan.root} holds a sweep with other settings. Put them back, choose another "
            "output_dir, or give all their values as an axis. It differs in\n  "
            + "\n  ".join(changed[:12])
        )


def _defaults(key: str) -> list[Any]:
    every = [default_settings(method.config) for method in METHODS.values()]
    return [_plain(settings[key]) for settings in every if key in settings]


def _decides(axis: str, setting: str, plan: Plan) -> bool:
    """Whether an axis decides a setting of a stage. A kind or a preset decides any."""
    first, _, rest = axis.partition(".")
    key = (rest if first in plan.settings and rest else axis).removesuffix(".type")
    return key in ("kind", "preset") or f"{setting}.".startswith(f"{key}.")


def _plain(value: Any) -> Any:
    """What JSON can hold: infinity becomes `.inf`, as in YAML."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return yaml.safe_dump(value).split()[0]
    return value if isinstance(value, (str, int, float, type(None))) else str(value)
