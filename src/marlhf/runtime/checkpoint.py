"""Checkpoints: complete or absent, verified before they are loaded, the last few kept.

A checkpoint is a folder of safetensors files with the weights and the optimiser's moments of each
model that trains, `state.json` for the rest, and `manifest.json` with the size and CRC of every
file. It is written under another name and renamed when everything is on disk, so a killed run
leaves no half checkpoint under a valid name. With sharded weights, `sharded/` has one file per
rank, written by torch's distributed checkpointing, which reshards them for any number of ranks.
"""

from __future__ import annotations

import base64
import json
import shutil
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from marlhf.errors import MarlhfError
from marlhf.runs.atomic import explain_disk_errors, replace_folder
from marlhf.runs.layout import CHECKPOINT_STATE, RunError, is_checkpoint_name, leads_out
from marlhf.runtime.distributed import World

NOT_KEPT = ("step", "RMS")
"""Of an optimiser's state: numbers of steps are in `state.json`, and what Adafactor computes anew
at each step is nowhere."""
MANIFEST = "manifest.json"
DTYPES = {str(dtype): dtype for dtype in (torch.bool, torch.int32, torch.float32)}
"""Of tensors in `state.json`."""
STATE = {
    "step": int,
    "seconds": (int, float),
    "rng": dict,
    "optimizers": dict,
    "verdict": str,
    "callbacks": dict,
    "bases": dict,
}
"""What `state.json` has in every checkpoint; stages add to it."""


class Damaged(MarlhfError, ValueError):
    """A checkpoint whose files are not those that were written."""


def save_checkpoint(
    checkpoints: Path,
    step: int,
    *,
    world: World,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    state: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write everything that the next step depends on, then drop all but the last `keep`."""
    final = checkpoints / f"step-{step:06d}"
    temporary = checkpoints / f".step-{step:06d}"
    world.reshard(models.values())  # an evaluation may have left weights gathered
    full_state = state | {"step": step, "rng": _rng()}
    full_state["optimizers"] = {name: _progress(models[name], o) for name, o in optimizers.items()}
    with explain_disk_errors(checkpoints.parent, temporary):
        if world.main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        if world.sharded:
            world.wait()
            tensors = _flat(models, optimizers)
            writer = HuggingFaceStorageWriter(str(temporary / "sharded"), save_distributed=True)
            state_dict_saver.save(tensors, storage_writer=writer)
            world.wait()
        if world.main:
            if not world.sharded:
                for name, model in models.items():
                    save_file(_weights(model), temporary / f"{name}.safetensors")
                for name, optimizer in optimizers.items():
                    moments = _moments(models[name], optimizer)
                    save_file(moments, temporary / f"optimizer-{name}.safetensors")
            (temporary / CHECKPOINT_STATE).write_text(json.dumps(full_state), encoding="utf-8")
            files = sorted(p for p in temporary.rglob("*") if p.is_file())
            sizes = {str(p.relative_to(temporary)): [p.stat().st_size, _crc(p)] for p in files}
            (temporary / MANIFEST).write_text(json.dumps(sizes), encoding="utf-8")
            replace_folder(temporary, final)
    if world.main:
        for old in list_checkpoints(checkpoints)[:-keep]:
            if old.is_symlink():  # not ours: what it points to is left alone
                old.unlink()
            else:
                shutil.rmtree(old)
    world.wait()
    return final


def load_latest(
    checkpoints: Path,
    *,
    world: World,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    needs: Sequence[str] = (),
) -> tuple[dict[str, Any] | None, list[str]]:
    """Restore the newest complete checkpoint: its state, and a warning per damaged one.

    `needs` names what the stage adds to a state and reads again.
    """
    # One rank looks, for all must load the same one.
    folder, damaged = world.broadcast(_find_latest(checkpoints, needs) if world.main else None)
    if folder is None:
        return None, damaged
    folder = Path(folder)
    state = read_checkpoint_state(folder)
    world.reshard(models.values())
    with world.raise_on_all_ranks():
        for name, optimizer in optimizers.items():
            _allocate(models[name], optimizer, state["optimizers"][name])
    _restore(folder, _flat(models, optimizers), world)
    _set_rng(state["rng"])
    return state, damaged


def load_weights(folder: Path, models: Mapping[str, nn.Module], world: World) -> None:
    """The weights of a checkpoint alone, for models that are not trained on."""
    try:
        _verify(folder)
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} is damaged ({error}).") from None
    world.reshard(models.values())
    _restore(folder, _flat(models, {}), world, weights_only=True)


def read_checkpoint_state(folder: Path, needs: Sequence[str] = ()) -> dict[str, Any]:
    """What a checkpoint holds besides tensors, if it has everything that a resume reads."""
    if leads_out(folder / CHECKPOINT_STATE):
        raise Damaged(f"{CHECKPOINT_STATE} lies outside of the run folder")
    state = json.loads((folder / CHECKPOINT_STATE).read_bytes())
    state = state if isinstance(state, dict) else {}
    wrong = [key for key, kind in STATE.items() if not isinstance(state.get(key), kind)]
    wrong += [key for key in needs if key not in state]
    if wrong:
        raise Damaged(f"{CHECKPOINT_STATE} does not say {', '.join(wrong)}")
    return state


def _find_latest(checkpoints: Path, needs: Sequence[str]) -> tuple[str | None, list[str]]:
    """The newest complete checkpoint, and a warning for each newer one that is damaged."""
    for unfinished in checkpoints.glob(".step-*"):  # of a run that was killed while writing
        shutil.rmtree(unfinished, ignore_errors=True)
    damaged: dict[Path, Exception] = {}
    for folder in reversed(list_checkpoints(checkpoints)):
        try:
            _verify(folder)
            read_checkpoint_state(folder, needs)
        except (OSError, ValueError) as error:
            damaged[folder] = error
            continue
        return str(folder), _warnings(damaged, f"resuming from {folder.name} instead")
    return None, _warnings(damaged, "training starts from the beginning")


def _warnings(damaged: Mapping[Path, Exception], instead: str) -> list[str]:
    return [f"{folder} is damaged ({error}); {instead}." for folder, error in damaged.items()]


def list_checkpoints(folder: Path) -> list[Path]:
    """Oldest first. Folders with other names are ignored: unfinished, or not ours."""
    entries = folder.iterdir() if folder.is_dir() else ()
    folders = [p for p in entries if p.is_dir() and is_checkpoint_name(p.name)]
    return sorted(folders, key=lambda p: int(p.name.removeprefix("step-")))


def generator_state(generator: torch.Generator) -> list[int]:
    return generator.get_state().tolist()


def set_generator_state(generator: torch.Generator, state: list[int]) -> None:
    generator.set_state(torch.tensor(state, dtype=torch.uint8))


def encode(x: Tensor) -> dict[str, Any]:
    """A tensor for JSON, every bit of it."""
    data = base64.b64encode(x.contiguous().numpy().tobytes()).decode()
    return {"type": str(x.dtype), "shape": list(x.shape), "data": data}


def decode(encoded: Mapping[str, Any]) -> Tensor:
    dtype = DTYPES[encoded.get("type", "torch.float32")]  # earlier versions left out the usual one
    data = bytearray(base64.b64decode(encoded["data"]))
    x = torch.frombuffer(data, dtype=dtype) if data else torch.zeros(0, dtype=dtype)
    return x.view(encoded["shape"])


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter that trains. `named_parameters` lists tied ones once, by their first name."""
    return {n: p.detach().contiguous() for n, p in model.named_parameters() if p.requires_grad}


def _moments(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimiser's moments of each parameter that has had a gradient, as plain tensors."""
    moments: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        for kind, x in optimizer.state.get(p, {}).items():
            if kind in NOT_KEPT:
                continue
            # Those of 8 bits are several tensors in one: codes and their scales.
            parts = x.__tensor_flatten__()[0] if hasattr(x, "codes") else []
            for part in parts:
                moments[f"{kind}.{part}.{name}"] = getattr(x, part)
            if not parts:
                moments[f"{kind}.{name}"] = x.contiguous()
    return moments


def _flat(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> dict[str, Tensor]:
    """All weights and moments of all models in one dict, as distributed checkpointing wants it."""
    flat = {}
    for name, model in models.items():
        flat |= {f"{name}.{key}": x for key, x in _weights(model).items()}
    for name, optimizer in optimizers.items():
        for key, x in _moments(models[name], optimizer).items():
            flat[f"optimizer-{name}.{key}"] = x
    return flat


def _progress(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimiser's number of steps: almost always one for all parameters, so kept once."""
    steps = {
        name: float(optimizer.state[p]["step"])
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    usual = max(steps.values(), default=0.0)
    return {
        "step": usual,
        "others": {name: n for name, n in steps.items() if n != usual},
        "without": [
            name
            for name, p in model.named_parameters()
            if p.requires_grad and p not in optimizer.state
        ],
    }


def _allocate(model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]) -> None:
    """Allocate the optimiser's state, for the moments of a checkpoint to be copied into.

    It does so itself in a step, here one without gradients, before the weights are restored.
    """
    optimizer.state.clear()
    trained = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and name not in progress["without"]
    }
    for p in trained.values():
        p.grad = torch.zeros_like(p, memory_format=torch.preserve_format)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for name, p in trained.items():
        state, steps = optimizer.state[p], progress["others"].get(name, progress["step"])
        step = state["step"]
        state["step"] = torch.full_like(step, steps) if isinstance(step, Tensor) else int(steps)


def _restore(
    folder: Path, wanted: dict[str, Tensor], world: World, *, weights_only: bool = False
) -> None:
    """Copy what was saved into the tensors of models and optimisers."""
    roles = {key.partition(".")[0] for key in wanted}
    sharded = (folder / "sharded").is_dir()
    whole: dict[str, Tensor] = {}
    reader = HuggingFaceStorageReader(str(folder / "sharded"))
    with world.raise_on_all_ranks():
        if sharded:
            saved = reader.read_metadata().state_dict_metadata
            shapes = {key: getattr(x, "size", None) for key, x in saved.items()}
        else:
            for file in sorted(folder.glob("*.safetensors")):
                if file.stem in roles or not weights_only:
                    whole |= {f"{file.stem}.{key}": x for key, x in load_file(file).items()}
            shapes = {key: x.shape for key, x in whole.items()}
        if weights_only:
            shapes = {k: shape for k, shape in shapes.items() if k.partition(".")[0] in roles}
        if shapes != {key: x.shape for key, x in wanted.items()}:
            raise RunError(
                f"{folder} was saved from a model of another shape than the one this run starts "
                "from now. Put that model back, or choose another output_dir."
            )
    if sharded:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is one process, which is fine
            state_dict_loader.load(wanted, storage_reader=reader, no_dist=world.size == 1)
        return
    with torch.no_grad():
        for key, x in wanted.items():
            full = whole[key].to(x.device)
            if isinstance(x, DTensor):
                full = distribute_tensor(full, x.device_mesh, x.placements)
            x.copy_(full)


def _verify(folder: Path) -> None:
    """Refuse a checkpoint unless all its files are those that were written."""
    if folder.is_symlink():
        raise Damaged("it is a symbolic link")
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise Damaged(f"{path.relative_to(folder)} is a symbolic link")
    if not (folder / MANIFEST).is_file():
        raise Damaged(f"{MANIFEST} is missing")
    try:
        manifest = TypeAdapter(dict[str, tuple[int, int]]).validate_json(
            (folder / MANIFEST).read_bytes()
        )
    except ValidationError:
        raise Damaged(f"{MANIFEST} does not list sizes and checksums") from None
    tensors = {str(p.relative_to(folder)) for p in folder.rglob("*.safetensors")}
    if unlisted := {CHECKPOINT_STATE, *tensors} - manifest.keys():
        raise Damaged(f"{MANIFEST} does not list {min(unlisted)}")
    if not tensors:
        raise Damaged("it has no weights")
    for name, (size, crc) in manifest.items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{name} is missing")
        if path.resolve() != folder.resolve() / name:
            raise Damaged(f"{name} lies outside of it")
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
