"""Checkpoints: whole or not there, checked before they are used, the last few kept.

A checkpoint is a folder with a safetensors file for each model, `optimizer-*.pt` files that load
with `weights_only=True`, `state.json` for the rest, and `manifest.json` with every file's size and
CRC, written last.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from marlhf.train.run import RunError, RunFolder, explained_writes, replace_folder


class Damaged(ValueError):
    """A checkpoint that is not what was written."""


def save_checkpoint(
    run: RunFolder,
    step: int,
    *,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    state: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write everything that the next step depends on, then drop all but the last `keep`."""
    final = run.checkpoints / f"step-{step:06d}"
    temporary = run.checkpoints / f".step-{step:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    with explained_writes(run.path, temporary):
        temporary.mkdir(parents=True)
        for name, model in models.items():
            save_file(_tensors(model), temporary / f"{name}.safetensors")
        for name, optimizer in optimizers.items():
            torch.save(optimizer.state_dict(), temporary / f"optimizer-{name}.pt")
        whole = state | {"step": step, "seconds": run.seconds, "rng": _rng()}
        (temporary / "state.json").write_text(json.dumps(whole), encoding="utf-8")
        files = {p.name: [p.stat().st_size, _crc(p)] for p in sorted(temporary.iterdir())}
        (temporary / "manifest.json").write_text(json.dumps(files), encoding="utf-8")
        replace_folder(temporary, final)
    for old in list_checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return final


def load_latest(
    run: RunFolder,
    *,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
) -> tuple[dict[str, Any] | None, list[str]]:
    """Restore the newest whole checkpoint. Returns its state, and a line for each damaged one."""
    complaints = []
    for half in run.checkpoints.glob(".step-*"):  # a kill while writing left them
        shutil.rmtree(half, ignore_errors=True)
    for folder in reversed(list_checkpoints(run)):
        try:
            _verify(folder)
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        except (Damaged, OSError, ValueError) as error:
            complaints.append(f"{folder} is damaged ({error}); trying the one before it.")
            continue
        for name, model in models.items():
            _restore(model, load_file(folder / f"{name}.safetensors"), folder)
        for name, optimizer in optimizers.items():
            saved = torch.load(
                folder / f"optimizer-{name}.pt", weights_only=True, map_location="cpu"
            )
            optimizer.load_state_dict(saved)
        _set_rng(state["rng"])
        return state, complaints
    return None, complaints


def list_checkpoints(run: RunFolder) -> list[Path]:
    """Oldest first. What has another name, half-written or not ours, is left alone."""
    found = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    ours = [p for p in found if p.is_dir() and re.fullmatch(r"step-\d{6,}", p.name)]
    return sorted(ours, key=lambda p: int(p.name.removeprefix("step-")))


def generator_state(generator: torch.Generator) -> list[int]:
    return generator.get_state().tolist()


def set_generator_state(generator: torch.Generator, state: list[int]) -> None:
    generator.set_state(torch.tensor(state, dtype=torch.uint8))


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter once: tied ones are found again under their first name."""
    return {name: p.detach().contiguous() for name, p in model.named_parameters()}


def _restore(model: nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if shapes != {name: x.shape for name, x in tensors.items()}:
        raise RunError(
            f"{folder} was saved from a model of another shape than the one this run starts from "
            "now. Put that model back, or choose another output_dir."
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])


def _verify(folder: Path) -> None:
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        raise Damaged("manifest.json is missing")
    for name, (size, crc) in json.loads(manifest.read_text(encoding="utf-8")).items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{name} is missing")
        if path.stat().st_size != size:
            raise Damaged(f"{name} has {path.stat().st_size} bytes instead of {size}")
        if _crc(path) != crc:
            raise Damaged(f"{name} has changed since it was written")


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _rng() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state().tolist(), "cuda": [s.tolist() for s in cuda]}


def _set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(state["cpu"], dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([torch.tensor(s, dtype=torch.uint8) for s in state["cuda"]])
