"""Sampling in a second process, with a copy of the policy, while this one trains.

The copy is in memory that both processes share: this one writes new weights into it while the other
waits for prompts, so nothing is sent but prompts and responses. Frozen weights, such as the base
under adapters, are not copied. The copy is on the policy's own device, so on one GPU both processes
take turns; a vLLM server samples on another.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import multiprocessing

from marlhf.config.stage import Sampling
from marlhf.data.collate import TokenRows
from marlhf.errors import MarlhfError
from marlhf.models.base import Model
from marlhf.rollout.engine import Rollout, SamplingRequest
from marlhf.rollout.native import NativeEngine

RESUME = "Run the same command again: it resumes from the last checkpoint."


class SamplerError(MarlhfError, RuntimeError):
    """The process that samples has failed, with what to do about it."""


class SamplerProcess:
    """The native engine in a process of its own, which starts with the first batch."""

    def __init__(
        self, policy: Model, end_tokens: Sequence[int], pad_id: int, **options: Any
    ) -> None:
        """`options` are the engine's: `token_budget` and `precision`."""
        self.policy = policy
        self.settings = {"end_tokens": list(end_tokens), "pad_id": pad_id, **options}
        self.copy: Model | None = None
        self.process: Any = None
        self.connection: Connection
        self._close: Callable[[], object] = lambda: None

    def begin(
        self, prompts: TokenRows, sampling: Sampling, seeds: Sequence[int]
    ) -> Callable[[], Rollout]:
        SamplingRequest.checked(prompts, sampling, seeds)
        if self.process is None:
            self._start()
        self._copy_weights()
        with self._explain_death():
            self.connection.send(([list(p) for p in prompts], sampling, list(seeds)))
        return self._receive

    def close(self) -> None:
        """End the process. It also ends when this object is forgotten or this program ends."""
        self._close()

    def _receive(self) -> Rollout:
        with self._explain_death():
            # Waiting for both notices a process that was killed before it could answer.
            wait([self.connection, self.process.sentinel])
            answer = self.connection.recv()
        if isinstance(answer, SamplerError):
            raise answer
        responses, logprobs, ended = answer
        device = self.policy.device
        return Rollout(
            responses, torch.from_numpy(logprobs).to(device), torch.from_numpy(ended).to(device)
        )

    @contextlib.contextmanager
    def _explain_death(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            self.process.join()
            raise SamplerError(
                "The process that samples ahead was killed or failed "
                f"(status {self.process.exitcode}), often for lack of memory. Its message, if it "
                f"left one, is above. {RESUME}"
            ) from None

    def _start(self) -> None:
        # Frozen weights stay shared with the policy.
        base = getattr(self.policy, "base", None)  # underneath adapters
        models = [self.policy] if base is None else [self.policy, base.module]
        weights = [weight for model in models for weight in model.parameters()]
        frozen = {id(weight): weight for weight in weights if not weight.requires_grad}
        model = copy.deepcopy(self.policy, frozen).requires_grad_(False)
        self.copy = model
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve,
            args=(theirs, model, self.settings, torch.get_num_threads()),
            name="marlhf sampler",
            daemon=True,
        )
        with _lean_start():
            self.process.start()
        theirs.close()  # so that its end is noticed here
        self._close = weakref.finalize(self, _end, self.process, self.connection)

    @torch.no_grad()
    def _copy_weights(self) -> None:
        assert self.copy is not None
        for ours, theirs in zip(self.policy.parameters(), self.copy.parameters(), strict=True):
            theirs.copy_(ours)
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)  # before the other process reads them


def serve(connection: Connection, model: Model, settings: dict[str, Any], num_threads: int) -> None:
    """Sample for each request, until the other side is gone."""
    # Ctrl-C and the end of a job are for the main program, which finishes its step first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(num_threads)
    engine = NativeEngine(model, **settings)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(_answer(engine, *connection.recv()))


def _answer(
    engine: NativeEngine, prompts: list[list[int]], sampling: Sampling, seeds: list[int]
) -> Any:
    try:
        rollout = engine.generate(prompts, sampling, seeds)
    except torch.OutOfMemoryError as error:
        return SamplerError(
            f"Out of memory while sampling ahead: {error} Lower rollout_tokens, or leave out "
            f"async_steps: the process that samples has a copy of the policy. {RESUME}"
        )
    except Exception as error:  # the main program raises it
        return SamplerError(f"Sampling ahead failed: {type(error).__name__}: {error} {RESUME}")
    # Arrays, not tensors: torch would hand over memory that has to outlive this process.
    return rollout.responses, rollout.logprobs.cpu().numpy(), rollout.ended.cpu().numpy()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _end(process: Any, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join()


@contextlib.contextmanager
def _lean_start() -> Iterator[None]:
    """How a process is spawned: without the user's script, which would run a second time, and
    with memory shared by name, since by descriptor torch keeps a file open for every weight."""
    main, before = sys.modules["__main__"], multiprocessing.get_sharing_strategy()
    sys.modules["__main__"] = types.ModuleType("__main__")
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        multiprocessing.set_sharing_strategy(before)
