"""Weights from the trainer to the workers of a vLLM server, over TCP: no files, no pickle.

The trainer listens, each worker connects and shows a one-time token. Then every tensor follows: the
length of its header, the header (JSON with name, dtype and shape), its bytes. A length of 0 ends
it. One tensor at a time is in memory on either side, beside what vLLM itself keeps.

vLLM's workers import this module, so it needs torch and nothing else.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

PROTOCOL = "1"
"""Version of what is sent. Trainer and workers must have the same."""
EXTENSION = "marlhf.rollout.weight_transfer.WeightReceiver"
"""What `--worker-extension-cls` of the server has to be."""
WELCOME = b"+"
LENGTH = struct.Struct(">I")
HANDSHAKE_SECONDS = 10.0
CONNECT_SECONDS = 30.0
IDLE_SECONDS = 600.0
"""How long a worker waits for the next bytes."""


class WeightSender:
    """Listens on one address of this machine, for one update of a known number of workers."""

    def __init__(self, host: str, num_workers: int, timeout: float) -> None:
        self.num_workers, self.timeout = num_workers, timeout
        self.token = secrets.token_hex(32)
        self.listener = socket.create_server((host, 0), backlog=num_workers + 8)
        self.listener.settimeout(0.1)
        self.address: dict[str, Any] = {"host": host, "port": self.listener.getsockname()[1]}

    def send(self, weights: Iterable[tuple[str, Tensor]], gave_up: Callable[[], bool]) -> int:
        """Send all weights to every worker; how many bytes each got. Nobody can connect then.

        `gave_up`: whether the server has answered already, so that no worker will come any more.
        """
        with ExitStack() as stack:
            with self.listener:
                workers = [
                    stack.enter_context(self._accept(gave_up)) for _ in range(self.num_workers)
                ]
            num_bytes = 0
            for name, tensor in weights:
                header = {
                    "name": name,
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                }
                text = json.dumps(header).encode()
                flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
                for worker in workers:
                    worker.sendall(LENGTH.pack(len(text)) + text)
                    worker.sendall(_memory(flat))
                num_bytes += flat.numel()
            for worker in workers:
                worker.sendall(LENGTH.pack(0))
        return num_bytes

    def _accept(self, gave_up: Callable[[], bool]) -> socket.socket:
        """The next connection that shows the token; all others are closed."""
        until = time.monotonic() + self.timeout
        while time.monotonic() < until and not gave_up():
            try:
                worker, _ = self.listener.accept()
            except TimeoutError:
                continue
            try:
                worker.settimeout(HANDSHAKE_SECONDS)
                shown = _read(worker, len(self.token))
                if hmac.compare_digest(shown, self.token.encode()):
                    worker.settimeout(self.timeout)
                    worker.sendall(WELCOME)
                    return worker
            except OSError:
                pass  # somebody else, or a worker that is gone: its call says why
            worker.close()
        raise ConnectionError("not all of its workers connected")


class WeightReceiver:
    """What a vLLM worker needs to take weights from the trainer; vLLM adds it to its own class.

    Nothing is raised: with several workers vLLM answers with the first error and takes the other
    workers' errors for their answers to later calls.
    """

    reload_weights: Callable[..., None]  # the worker's own

    def marlhf_protocol(self) -> str:
        return PROTOCOL

    def marlhf_receive_weights(self, host: str, port: int, token: str) -> str | None:
        """Connect to the trainer and load what it sends. Returns what went wrong, if anything."""
        try:
            with connect(host, port, token) as trainer:
                errors: list[ConnectionError] = []
                self.reload_weights(weights_iterator=receive(trainer, errors))
                if errors:
                    raise errors[0]
        except Exception as error:  # vLLM's loaders raise what they like
            return f"{type(error).__name__}: {error}"
        return None


def connect(host: str, port: int, token: str) -> socket.socket:
    """A connection to the trainer, which has accepted the token."""
    try:
        trainer = socket.create_connection((host, port), CONNECT_SECONDS)
    except OSError as error:
        raise ConnectionError(
            f"A worker cannot reach the trainer at {host}:{port} ({error})."
        ) from None
    try:
        trainer.settimeout(HANDSHAKE_SECONDS + CONNECT_SECONDS)
        trainer.sendall(token.encode())
        _read(trainer, len(WELCOME))
    except OSError:
        trainer.close()
        raise ConnectionError(f"The trainer at {host}:{port} refused a worker's token.") from None
    trainer.settimeout(IDLE_SECONDS)
    return trainer


def receive(trainer: socket.socket, errors: list[ConnectionError]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, on the CPU, as they come.

    A lost connection ends them and is added to `errors`. If it were raised, vLLM would stop with
    layers half built, and could take no weights again.
    """
    name = "the token"
    try:
        while True:
            [length] = LENGTH.unpack(_read(trainer, LENGTH.size))
            if not length:
                return
            header = json.loads(_read(trainer, length))
            dtype = getattr(torch, header["dtype"])
            # In memory of its own: vLLM may keep a tensor until its layer is whole.
            num_bytes = math.prod(header["shape"]) * dtype.itemsize
            flat = torch.empty(num_bytes, dtype=torch.uint8)
            _fill(_memory(flat), trainer)
            name = header["name"]
            yield name, flat.view(dtype).view(header["shape"])
    except OSError as error:
        lost = f"A worker lost its connection to the trainer after {name} ({error})."
        errors.append(ConnectionError(lost))


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(memoryview(data), connection)
    return bytes(data)


def _fill(view: memoryview, connection: socket.socket) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("closed by the other side")
        view = view[count:]


def _memory(flat: Tensor) -> memoryview:
    """The bytes of a tensor of bytes, not copied."""
    array: Any = flat.numpy()
    return memoryview(array)
