"""Metrics in dashboards: TensorBoard, Weights & Biases, Trackio.

The run folder has all metrics already; these are copies. So a dashboard that cannot start is an
error before training, and one that fails later is a warning and never ends the run.

The reporting callbacks of transformers would not do: they rename metrics (`train/...`), start a new
run after a resume, leave TensorBoard with the steps of a killed run twice, and raise into the loop.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marlhf.errors import SettingError
from marlhf.runs.atomic import write_text
from marlhf.runs.layout import RunError
from marlhf.runtime.progress import warn

NEEDS = {
    "tensorboard": ("torch.utils.tensorboard", "SummaryWriter"),
    "wandb": ("wandb", "init"),
    "trackio": ("trackio", "init"),
}
"""What to import from where. The attribute tells the package from a folder of its logs, such as
`wandb/`, which Python would import as well."""
ID_FILE = "tracker_id"
"""The file in a run folder with the id that dashboards know the run by."""


def tracker_names(report_to: str | Sequence[str] | None) -> list[str]:
    """The trackers named by `report_to`; `all` are those installed, `none` is none.

    >>> tracker_names("none"), tracker_names(["tensorboard"])
    ([], ['tensorboard'])
    """
    given = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if given == ["all"]:
        return [name for name in NEEDS if _installed(name)]
    names = [name for name in dict.fromkeys(given) if name != "none"]
    for name in names:
        if name not in NEEDS:
            near = difflib.get_close_matches(name.lower(), NEEDS, n=1)
            known = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(NEEDS)}, all, none."
            raise SettingError(f"report_to: unknown name {name!r}. {known}")
    return names


def check_installed(report_to: str | Sequence[str] | None) -> list[str]:
    """The trackers that a setting asks for, once all of them can be imported."""
    names = tracker_names(report_to)
    missing = [name for name in names if not _installed(name)]
    if missing:
        raise RunError(
            f"report_to names {' and '.join(missing)}, which cannot be imported. Run "
            f"`pip install 'marlhf[{','.join(missing)}]'`, or leave it out."
        )
    return names


class Trackers:
    """The trackers of one run. `done` steps were taken, and reported, before a resume.

    Steps after `done` that were reported before are about to be taken again: TensorBoard drops
    them, Trackio keeps both, and wandb ignores a step that it has already.

    >>> import tempfile
    >>> trackers = Trackers("tensorboard", tempfile.mkdtemp(), name="ppo", config_raw={"seed": 0})
    >>> trackers.log(1, {"rl/score": 0.5})
    >>> trackers.finish("finished")
    """

    def __init__(
        self,
        report_to: str | Sequence[str] | None,
        run_path: Path | str,
        *,
        name: str,
        config_raw: Mapping[str, Any],
        done: int = 0,
    ) -> None:
        names = check_installed(report_to)
        self._trackers: dict[str, TensorBoard | Dashboard] = {}
        if not names:
            return
        path = Path(run_path)
        identity = _identity(path, name, done) if names != ["tensorboard"] else ""
        for kind in names:
            try:
                if kind == "tensorboard":
                    self._trackers[kind] = TensorBoard(path, config_raw, done)
                else:
                    self._trackers[kind] = Dashboard(kind, path, name, identity, config_raw)
            except Exception as error:
                self.finish("failed")
                remedy = "Fix that"
                if kind == "wandb":
                    remedy = "Log in with `wandb login`, set WANDB_MODE=offline,"
                raise RunError(
                    f"{kind} cannot start: {type(error).__name__}: {error}. {remedy} or leave it "
                    "out of report_to."
                ) from error

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics of a step or an evaluation; what is not a number is left out."""
        if not self._trackers:
            return
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float))}
        self._each("log", step, numbers)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows with the same columns, such as samples; a column without any value is left out."""
        columns = [
            key for key in (rows[0] if rows else ()) if any(r[key] is not None for r in rows)
        ]
        if columns:
            self._each(
                "table", step, name, columns, [[row[key] for key in columns] for row in rows]
            )

    def finish(self, status: str) -> None:
        """Close everything; `status` is that of the run: finished, stopped or failed."""
        self._each("finish", status)
        self._trackers = {}

    def _each(self, action: str, *given: Any) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, action)(*given)
            except Exception as error:
                del self._trackers[name]
                warn(
                    f"{name} failed ({type(error).__name__}: {error}) and gets no more metrics; "
                    "training continues, and metrics.jsonl has them all."
                )


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir RUN`."""

    def __init__(self, path: Path, config_raw: Mapping[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The evaluation at step 0 belongs to a fresh start alone.
        purge = done + 1 if done else 0
        self.writer = SummaryWriter(str(path / "tensorboard"), purge_step=purge, flush_secs=10)
        text = json.dumps(config_raw, indent=2, ensure_ascii=False)
        self.writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), done)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, columns: list[str], data: list[list[Any]]) -> None:
        lines = [columns, ["---"] * len(columns), *data]
        cells = [[str(x).replace("|", "\\|").replace("\n", "<br>") for x in line] for line in lines]
        self.writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    def finish(self, status: str) -> None:
        self.writer.close()


class Dashboard:
    """A run of wandb or Trackio, in the project WANDB_PROJECT or TRACKIO_PROJECT, or `marlhf`."""

    def __init__(
        self, kind: str, path: Path, name: str, identity: str, config_raw: Mapping[str, Any]
    ) -> None:
        self.is_wandb = kind == "wandb"
        own = {"name": identity}  # Trackio knows a run by its name alone
        if self.is_wandb:
            own = {"name": name, "id": identity, "dir": str(path)}
        self.module = importlib.import_module(kind)
        self.run = self.module.init(
            project=os.environ.get(f"{kind.upper()}_PROJECT", "marlhf"),
            resume="allow",
            config=dict(config_raw),
            **own,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def table(self, step: int, name: str, columns: list[str], data: list[list[Any]]) -> None:
        self.run.log({name: self.module.Table(columns=columns, data=data)}, step=step)

    def finish(self, status: str) -> None:
        if self.is_wandb:
            self.run.finish(exit_code=0 if status == "finished" else 1)
        else:
            self.run.finish()


def _identity(path: Path, name: str, done: int) -> str:
    """The id of a run: kept when it is resumed, new when it starts from the beginning."""
    file = path / ID_FILE
    if done and file.is_file():
        return file.read_text(encoding="utf-8").strip()
    plain = re.sub(r"[^\w-]+", "-", name, flags=re.ASCII).strip("-") or "run"
    identity = f"{plain[:48]}-{secrets.token_hex(4)}"
    write_text(file, f"{identity}\n")
    return identity


def _installed(name: str) -> bool:
    module, attribute = NEEDS[name]
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False
