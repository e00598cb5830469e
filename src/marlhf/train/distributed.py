"""Several processes as one: who computes what, and how the parts become a whole again.

Every process has all rows and all numbers about them; only forward and backward passes are
divided. Each computes those of its share and a sum over processes completes the tensors, so that
credit, whitening, metrics and every decision are those of one process, on all of them alike.

Weights are replicated (`parallel: data`, gradients summed once an update) or sharded by FSDP2
(`parallel: fsdp`). Started by `torchrun`; without it there is one process and nothing happens.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from marlhf.configs.stage import Parallel
from marlhf.data.collate import Micro, SingleProcess, pad_right, token_budget_batches
from marlhf.models.base import Model, Precision, computes_in_bfloat16, pick_device
from marlhf.models.compile import compile_blocks
from marlhf.rollout.engine import Rollout
from marlhf.runs.write import RunError
from marlhf.train import progress

BUCKET = 1 << 25
"""Gradients that are summed over processes in one message."""
PATIENCE = timedelta(hours=2)
"""How long a process waits for the others: a reward function may take its time on one of them."""


@dataclass(frozen=True)
class World(SingleProcess):
    """This process among all."""

    device: torch.device
    rank: int = 0
    size: int = 1
    sharded: bool = False

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and talks."""
        return self.rank == 0

    def share(self, lengths: Sequence[int]) -> list[int]:
        """The rows of this process, dealt out by length so that all have as much to do."""
        return _share(lengths, self.rank, self.size)

    def batches(self, lengths: Sequence[int], budget: int) -> list[Micro]:
        """This process's share in batches.

        Where weights are sharded every pass is a meeting of all processes, so those with fewer
        batches repeat one that counts for nothing.
        """
        plans: list[list[Micro]] = []
        for rank in range(self.size):
            mine = _share(lengths, rank, self.size)
            cut = token_budget_batches([lengths[i] for i in mine], budget)
            plans.append([Micro([mine[i] for i in batch]) for batch in cut])
        if not self.sharded:
            return plans[self.rank]
        missing = max(map(len, plans)) - len(plans[self.rank])
        shortest = min(range(len(lengths)), key=lambda i: lengths[i])
        return plans[self.rank] + [Micro([shortest], 0.0)] * missing

    def sum(self, x: Tensor) -> Tensor:
        """The sum over processes, for all of them."""
        if self.size == 1:
            return x
        total = x.clone()
        dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Whether it is so on any process."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(int(flag), device=self.device)))

    def broadcast(self, value: Any) -> Any:
        """What the main process has, for all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=self.device)
        return box[0]

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """All go on or none: an error on one process, in work of its own, ends them all.

        Otherwise the others would wait for the one that failed. Nothing inside may itself wait
        for other processes.
        """
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, None if error is None else str(error) or repr(error))
        if error is not None:
            raise error
        for rank, message in enumerate(told):
            if message is not None:
                raise RunError(f"Process {rank} of {self.size} failed: {message}")

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            self.any(False)

    def place(
        self, model: Model, precision: Precision = "auto", *, compiled: bool = False
    ) -> Model:
        """The model on this process's device, sharded over all of them if so asked.

        Scalar models are called by their backbone and head, so these are what is wrapped.
        `compiled` holds on a GPU, for whole models that are not sharded.
        """
        if not self.sharded:
            placed: Model = model.to(self.device)
            if compiled and self.device.type == "cuda" and isinstance(placed, PreTrainedModel):
                compile_blocks(placed)
            return placed
        # Not moved first: block by block only each process's part of it gets there, and a model
        # that no one GPU holds still fits.
        mesh = init_device_mesh(self.device.type, (self.size,))
        bf16 = computes_in_bfloat16(self.device, precision)
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = mixed if bf16 else MixedPrecisionPolicy()
        blocks = set(model._no_split_modules or ())
        for module in list(model.modules()):
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        if isinstance(getattr(model, "score", None), nn.Module):
            fully_shard(model.base_model, mesh=mesh, mp_policy=policy)
            fully_shard(model.score, mesh=mesh)  # the head computes in float32
        else:
            fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    @contextlib.contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Whole weights on every process, for sampling, where each goes at its own pace."""
        parts = [m for m in model.modules() if isinstance(m, FSDPModule)] if self.sharded else []
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.set_reshard_after_forward(True, recurse=False)
                part.reshard()

    def reshard(self, models: Iterable[nn.Module]) -> None:
        """Have the shards be the models' parameters.

        After a pass without gradients FSDP leaves the outermost weights whole, and what
        `parameters()` gives is then not what the optimiser knows.
        """
        for module in (m for model in models for m in model.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()

    def sum_gradients(self, model: nn.Module) -> None:
        """Gradients of the whole batch, from those of each process's share."""
        if self.size == 1:
            return
        if self.sharded:  # FSDP has averaged them
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(self.size)
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        here = torch.tensor([p.grad is not None for p in parameters], device=self.device)
        somewhere = self.sum(here.int()).tolist()
        used = [p for p, count in zip(parameters, somewhere) if count]
        for p in used:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in _buckets(used):
            flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
            dist.all_reduce(flat)
            for p, grad in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = grad.view_as(p)

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Sharded weights as a plain state dict, on the main process; None where none are."""
        if not self.sharded:
            return None
        state: dict[str, Tensor] = {}
        found: dict[int, Tensor] = {}  # tied weights stay one, which is how they are saved
        for name, x in model.state_dict(keep_vars=True).items():
            if id(x) not in found:
                full = x.full_tensor() if isinstance(x, DTensor) else x
                found[id(x)] = full.detach().cpu() if self.main else torch.empty(0)
            state[name] = found[id(x)]
        return state if self.main else {}


def start(device: str = "auto", parallel: Parallel = "data") -> World:
    """This process's place, from what torchrun says in the environment."""
    size, local = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("LOCAL_RANK", "0")
    if platform.machine() == "aarch64":
        # On ARM CPUs oneDNN takes ten times as long over a small product, and gains little on
        # large ones: a PPO step of a tiny model takes half the time without it.
        torch.backends.mkldnn.enabled = False
    if size == 1:
        return World(pick_device(device), sharded=False)
    if device == "auto" and torch.cuda.is_available():
        device = "cuda"
    where = pick_device(f"cuda:{local}" if device == "cuda" else device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo", timeout=PATIENCE)
        atexit.register(dist.destroy_process_group)
    rank = dist.get_rank()
    progress.console.quiet = rank > 0
    return World(where, rank, size, sharded=parallel == "fsdp")


def gather_rollout(world: World, rollout: Rollout | None, mine: list[int], rows: int) -> Rollout:
    """Everybody's responses, in the order of the prompts; None from a process that had none."""
    if world.size == 1 and rollout is not None:
        return rollout
    lengths = torch.zeros(rows, dtype=torch.int64, device=world.device)
    ended = torch.zeros(rows, dtype=torch.int64, device=world.device)
    where = torch.tensor(mine, dtype=torch.int64, device=world.device)
    if rollout is not None:
        lengths[where] = torch.tensor([len(r) for r in rollout.responses], device=world.device)
        ended[where] = rollout.ended.long()
    lengths = world.sum(lengths)
    width = int(lengths.max())
    tokens = torch.zeros(rows, width, dtype=torch.int64, device=world.device)
    logprobs = torch.zeros(rows, width, device=world.device)
    if rollout is not None:
        own, _ = pad_right(rollout.responses, 0)
        tokens[where, : own.shape[1]] = own.to(world.device)
        logprobs[where, : rollout.logprobs.shape[1]] = rollout.logprobs
    tokens, logprobs, ended = world.sum(tokens), world.sum(logprobs), world.sum(ended)
    responses = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist())]
    return Rollout(responses, logprobs, ended.bool())


def _share(lengths: Sequence[int], rank: int, size: int) -> list[int]:
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    return sorted(order[rank::size])


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one type, together about `BUCKET` numbers."""
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        bucket: list[nn.Parameter] = []
        for p in (p for p in parameters if p.dtype == dtype):
            bucket.append(p)
            if sum(p.numel() for p in bucket) >= BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
