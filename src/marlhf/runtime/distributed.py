"""Several processes that train as one: which rank computes what, and how results are combined.

Every rank holds all rows and all numbers about them; only forward and backward passes are divided.
A rank computes its share of the rows, and a sum over ranks completes the tensors. Credit,
whitening, metrics and every decision are then computed on all ranks alike, from the same numbers,
so nothing else in marlhf needs to know about ranks.

Weights are replicated (`parallel: data`, gradients summed once per update) or sharded by FSDP2
(`parallel: fsdp`). Processes are started by `torchrun`; without it there is one rank, and every
method here returns at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from marlhf.config.stage import Parallel
from marlhf.data.collate import Micro, SingleProcess, token_budget_batches
from marlhf.models.adapters import AdaptedModel, AdaptedScalarModel
from marlhf.models.base import Model, Precision, computes_in_bfloat16, pick_device
from marlhf.models.forward import choose_passes
from marlhf.models.heads import members_of
from marlhf.rollout.engine import Rollout
from marlhf.runs.layout import RunError
from marlhf.runtime import progress

_PIDS: list[tuple[str, int]] = []
"""Host and process id of each rank, to say which one was killed."""
_CONNECTION_LOST = re.compile("Connection (closed|reset) by peer|Connection refused|Broken pipe")
"""How gloo says that another rank is gone."""
TIMEOUT = timedelta(hours=2)
"""How long a rank waits for the others: a reward function may take long on one of them."""


@dataclass
class PassLimit:
    """What is known about how many tokens a pass may have, besides the token budget."""

    tokens: int | None = None
    """The most, once memory has run out."""
    auto_tokens: int | None = None
    """What there is room for, with `token_budget: auto`; measured in the first steps."""
    watching: bool = False
    """Whether `bytes_per_token` is being measured."""
    bytes_per_token: float = 0.0
    passes: int = 0
    most_rows: int = 0
    most_tokens: int = 0
    """Of the micro-batches that were cut last: how many, and the largest."""

    halved: int = 0
    """How often `tokens` was halved and not doubled again."""
    before: int | None = None
    """`tokens` before the first time."""
    patience: int = 32
    """Computations without a fault before larger passes are tried; twice as many after each try
    that failed, so that a GPU too small for them is seldom asked again."""
    calm: int = 0
    tried: bool = False

    def lower(self) -> bool:
        """Halve the largest pass; False where each has a single row already."""
        if self.most_rows < 2:
            return False
        if self.tried:
            self.patience *= 2
        if not self.halved:
            self.before = self.tokens
        self.tokens = self.most_tokens // 2
        self.halved, self.calm, self.tried = self.halved + 1, 0, False
        return True

    def rise(self) -> None:
        """Double the passes after a while: another program may have had the memory."""
        self.calm += 1
        if self.halved and self.calm >= self.patience:
            self.halved, self.calm, self.tried = self.halved - 1, 0, True
            self.tokens = 2 * (self.tokens or 0) if self.halved else self.before


@dataclass(frozen=True)
class World(SingleProcess):
    """This rank, its device, and what it does together with the others."""

    device: torch.device
    rank: int = 0
    size: int = 1
    sharded: bool = False
    pass_limit: PassLimit = field(default_factory=PassLimit)

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def share(self, lengths: Sequence[int]) -> list[int]:
        """The rows of this rank, dealt out by length so that ranks take equally long."""
        return _share(lengths, self.rank, self.size)

    def batches(self, lengths: Sequence[int], budget: int) -> list[Micro]:
        """This rank's share in micro-batches of at most `budget` tokens.

        With sharded weights every forward pass gathers weights from all ranks, so all must run
        the same number of passes. A rank with fewer micro-batches repeats the shortest row, with
        weight 0.
        """
        by_rank: list[list[Micro]] = []
        budget = max(budget, self.pass_limit.auto_tokens or budget)
        budget = min(budget, self.pass_limit.tokens or budget)
        for rank in range(self.size):
            share = _share(lengths, rank, self.size)
            theirs = [lengths[i] for i in share]
            batches = token_budget_batches(theirs, budget)
            by_rank.append([Micro([share[i] for i in batch]) for batch in batches])
        own = [micro.rows for micro in by_rank[self.rank]]
        sizes = [len(rows) * max(lengths[i] for i in rows) for rows in own]
        self.pass_limit.passes = len(own)
        self.pass_limit.most_rows = max(map(len, own), default=0)
        self.pass_limit.most_tokens = max(sizes, default=0)
        if not self.sharded:
            return by_rank[self.rank]
        missing = max(map(len, by_rank)) - len(by_rank[self.rank])
        shortest = min(range(len(lengths)), key=lambda i: lengths[i])
        return by_rank[self.rank] + [Micro([shortest], 0.0)] * missing

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, on all of them."""
        if self.size == 1:
            return x
        total = x.clone()
        dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(int(flag), device=self.device)))

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, device=self.device)
        return values[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Each rank's value, on all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """An error on one rank raises on all ranks.

        Otherwise the others would wait in their next collective call for the rank that failed.
        For the same reason, nothing inside the block may be a collective call.
        """
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        messages = self.gather_objects(None if error is None else str(error) or repr(error))
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise RunError(f"Process {rank} of {self.size} failed: {message}")

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            self.any(False)

    def place(
        self,
        model: Model,
        precision: Precision = "auto",
        *,
        compiled: bool = False,
        unpadded: bool = True,
    ) -> Model:
        """The model on this rank's device, sharded with `parallel: fsdp`.

        Whole models that are not sharded take their fastest pass, on a GPU where `compiled`, on a
        CPU where `unpadded`.
        """
        if not self.sharded:
            placed: Model = model.to(self.device)
            fast = compiled if self.device.type == "cuda" else unpadded
            if fast and isinstance(placed, PreTrainedModel | AdaptedModel):
                choose_passes(placed)
            return placed
        # The model stays on the CPU here: `fully_shard` moves one block at a time, and only this
        # rank's shard of it, so that a model larger than one GPU fits.
        if isinstance(model, AdaptedModel):
            self._shard(model.base.module, precision)
            for member in members_of(model):
                if isinstance(member, AdaptedScalarModel):
                    self._shard_head(member.score)
        else:
            self._shard(model, precision)
        return model

    def _shard(self, model: Model, precision: Precision) -> None:
        """Shard a model by FSDP2; the adapters in its layers with it."""
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            return  # the base of an adapter, which another role shares
        mesh = init_device_mesh(self.device.type, (self.size,))
        bf16 = computes_in_bfloat16(self.device, precision)
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = mixed if bf16 else MixedPrecisionPolicy()
        # Decoder layers first, then the model around them: FSDP2 gathers the weights of one
        # wrapped module at a time, so peak memory is one layer and not the whole model.
        blocks = set(model._no_split_modules or ())
        for module in list(model.modules()):
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        # Scalar models are not called as a whole but by backbone and head, so these are wrapped:
        # FSDP gathers weights in hooks of the module that is called.
        if isinstance(getattr(model, "score", None), nn.Module):
            fully_shard(model.base_model, mesh=mesh, mp_policy=policy)
            self._shard_head(model.score)
        else:
            fully_shard(model, mesh=mesh, mp_policy=policy)

    def _shard_head(self, head: nn.Module) -> None:
        if not isinstance(head, FSDPModule):
            fully_shard(head, mesh=init_device_mesh(self.device.type, (self.size,)))  # in float32

    @contextlib.contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Whole weights on every rank while sampling.

        Ranks sample responses of different lengths, so they take different numbers of forward
        passes and could not gather weights together in each.
        """
        modules: list[FSDPModule] = []
        if self.sharded:
            modules = list(_sharded_modules(model))
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()

    def reshard(self, models: Iterable[nn.Module]) -> None:
        """Make `parameters()` return the shards again, which are what the optimiser knows.

        After a pass without gradients FSDP leaves the outermost weights gathered.
        """
        for module in (m for model in models for m in _sharded_modules(model)):
            module.reshard()

    def sum_gradients(self, model: nn.Module) -> None:
        """Gradients of the whole batch, from those of each rank's share.

        Losses divide by the number of tokens of the whole batch, so gradients are summed.
        """
        if self.size == 1:
            return
        if self.sharded:  # FSDP has reduced them already, to their mean
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(self.size)
            return
        # A rank without rows has no gradients, and a parameter may be unused: all ranks must
        # still reduce the same list of tensors.
        parameters = [p for p in model.parameters() if p.requires_grad]
        has_grad = torch.tensor([p.grad is not None for p in parameters], device=self.device)
        num_ranks = self.sum(has_grad.int()).tolist()
        used = [p for p, count in zip(parameters, num_ranks) if count]
        for p in used:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Sharded weights as a plain state dict, on rank 0; None where weights are not sharded."""
        if not self.sharded:
            return None
        state: dict[str, Tensor] = {}
        if isinstance(model, AdaptedModel):
            for name, full in model.full_tensors():
                state[name] = full.detach().cpu() if self.main else torch.empty(0)
            return state if self.main else {}
        # Tied weights are gathered once and stay one tensor, as `save_pretrained` expects.
        gathered: dict[int, Tensor] = {}
        for name, x in model.state_dict(keep_vars=True).items():
            if id(x) not in gathered:
                full = x.full_tensor() if isinstance(x, DTensor) else x
                gathered[id(x)] = full.detach().cpu() if self.main else torch.empty(0)
            state[name] = gathered[id(x)]
        return state if self.main else {}


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules that FSDP has wrapped, those of an adapter's base as well."""
    modules = [*model.modules()]
    if isinstance(model, AdaptedModel):
        modules += model.base.module.modules()
    yield from (module for module in modules if isinstance(module, FSDPModule))


def start(device: str = "auto", parallel: Parallel = "data") -> World:
    """This rank, from the environment variables that torchrun sets."""
    size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if platform.machine() == "aarch64":
        # On ARM CPUs oneDNN takes ten times as long over a small product, and gains little on
        # large ones: a PPO step of a tiny model takes half the time without it.
        torch.backends.mkldnn.enabled = False
    if size == 1:
        return World(pick_device(device), sharded=False)
    if device == "auto" and torch.cuda.is_available():
        device = "cuda"
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", size)), torch.cuda.device_count()
    where = pick_device(f"cuda:{local % max(1, gpus)}" if device == "cuda" else device)
    # NCCL refuses two ranks on one GPU. Gloo takes them, through the memory of the host.
    by_nccl = where.type == "cuda" and here <= gpus
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if by_nccl else "gloo", timeout=TIMEOUT)
        atexit.register(dist.destroy_process_group)
        _PIDS.extend([("", 0)] * size)
        dist.all_gather_object(_PIDS, (platform.node(), os.getpid()))
    rank = dist.get_rank()
    progress.console.quiet = rank > 0
    if where.type == "cuda" and not by_nccl:
        progress.warn(
            f"{here} processes share {gpus} GPU{'s' * (gpus > 1)} here. That tries a set-up out, "
            "but is slow: start one process per GPU for real runs."
        )
    return World(where, rank, size, sharded=parallel == "fsdp")


def describe_lost_rank(error: Exception) -> str:
    """Which process was killed, where that made a collective call fail here; else nothing."""
    if not isinstance(error, dist.DistError) and not _CONNECTION_LOST.search(str(error)):
        return ""
    if len(_PIDS) < 2:
        return ""
    # torchrun sends SIGTERM to the others about now. This one is ending, and has yet to say why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    here = {rank: pid for rank, (host, pid) in enumerate(_PIDS) if host == platform.node()}
    dead: list[int] = []
    deadline = time.monotonic() + 2  # its connections close a moment before it is gone
    while not dead and time.monotonic() < deadline:
        dead = [rank for rank, pid in here.items() if _dead(pid)]
        time.sleep(0.05)
    which = f"Process {dead[0]}" if dead else "Another process"
    return (
        f"{which} of {len(_PIDS)} was killed, often for lack of memory. Run the same command "
        "again: it resumes from the last checkpoint."
    )


def _dead(pid: int) -> bool:
    """Gone, or a zombie that its parent has not noticed yet."""
    try:
        os.kill(pid, 0)
        return ") Z" in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except ProcessLookupError:
        return True
    except OSError:  # no /proc, or another user's
        return False


def gather_rollout(world: World, rollout: Rollout | None, share: list[int], rows: int) -> Rollout:
    """The responses of all ranks, in the order of the prompts; `rollout` is None without rows."""
    if world.size == 1 and rollout is not None:
        return rollout
    if rollout is not None:
        sampled = None if rollout.sampled is None else rollout.sampled.cpu()
        rollout = Rollout(rollout.responses, rollout.logprobs.cpu(), rollout.ended.cpu(), sampled)
    parts = [part for part in world.gather_objects((share, rollout)) if part[1] is not None]
    width = max(theirs.logprobs.shape[1] for _, theirs in parts)
    responses: list[list[int]] = [[]] * rows
    logprobs, ended = torch.zeros(rows, width), torch.zeros(rows, dtype=torch.bool)
    sampled = torch.zeros(rows, width, dtype=torch.bool)
    for where, theirs in parts:
        for row, response in zip(where, theirs.responses):
            responses[row] = response
        part = slice(theirs.logprobs.shape[1])
        logprobs[where, part], ended[where] = theirs.logprobs, theirs.ended
        if theirs.sampled is not None:
            sampled[where, part] = theirs.sampled
    converse = any(theirs.sampled is not None for _, theirs in parts)
    logprobs, ended, sampled = (x.to(world.device) for x in (logprobs, ended, sampled))
    return Rollout(responses, logprobs, ended, sampled if converse else None)


def _share(lengths: Sequence[int], rank: int, size: int) -> list[int]:
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    return sorted(order[rank::size])
