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
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, cast

import torch
from torch import Tensor

PROTOCOL = "1"
"""Version of what is sent. Trainer and workers must have the same."""
EXTENSION = "marlhf.rollout.weight_transfer.WeightReceiver"
"""What `--worker-extension-cls` of the server has to be."""
WELCOME = b"+"
LENGTH = struct.Struct(">I")
MAX_UNKNOWN = 256
"""Open connections that have not shown the token yet; beyond that the oldest is closed."""
CONNECT_SECONDS = 30.0
IDLE_SECONDS = 600.0
"""How long a worker waits for the next bytes."""


class WeightSender:
    """Listens on one address of this machine, for one update of a known number of workers."""

    def __init__(self, host: str, num_workers: int, timeout: float) -> None:
        self.num_workers, self.timeout = num_workers, timeout
        self.token = secrets.token_hex(32)
        self.listener = socket.create_server((host, 0), backlog=num_workers + 8)
        self.listener.setblocking(False)
        self.address: dict[str, Any] = {"host": host, "port": self.listener.getsockname()[1]}

    def send(self, weights: Iterable[tuple[str, Tensor]], gave_up: Callable[[], bool]) -> int:
        """Send all weights to every worker; how many bytes each got. Nobody can connect then.

        `gave_up`: whether the server has answered already, so that no worker will come any more.
        """
        with ExitStack() as stack:
            with self.listener:
                workers = self._accept(stack, gave_up)
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

    def _accept(self, stack: ExitStack, gave_up: Callable[[], bool]) -> list[socket.socket]:
        """One connection per worker, which has shown the token; all others are closed.

        All connections are read at once, until one deadline: a stranger who connects and sends
        nothing, or a byte now and then, keeps no worker waiting.
        """
        deadline = time.monotonic() + self.timeout
        workers: list[socket.socket] = []
        shown: dict[socket.socket, bytes] = {}  # what those that are not known yet have sent
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(self.listener, selectors.EVENT_READ)
        while len(workers) < self.num_workers:
            if time.monotonic() >= deadline or gave_up():
                others = f"; {len(shown)} connections showed no token" if shown else ""
                raise ConnectionError(
                    f"{len(workers)} of its {self.num_workers} workers connected within "
                    f"{self.timeout:g} seconds{others}"
                )
            for key, _ in selector.select(0.1):
                connection = cast(socket.socket, key.fileobj)
                if connection is self.listener:
                    with suppress(OSError):  # it is gone again
                        connection = stack.enter_context(self.listener.accept()[0])
                        connection.setblocking(False)
                        shown[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
                    if len(shown) > MAX_UNKNOWN:
                        oldest = next(iter(shown))
                        del shown[oldest]
                        selector.unregister(oldest)
                        oldest.close()
                    continue
                data = b""
                with suppress(OSError):  # a stranger, or a worker that died
                    data = connection.recv(len(self.token) - len(shown[connection]))
                shown[connection] += data
                if data and len(shown[connection]) < len(self.token):
                    continue
                selector.unregister(connection)
                if hmac.compare_digest(shown.pop(connection), self.token.encode()):
                    connection.settimeout(self.timeout)
                    connection.sendall(WELCOME)
                    workers.append(connection)
                else:
                    connection.close()
        for connection in shown:
            connection.close()
        return workers


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
        trainer.sendall(token.encode())
        trainer.settimeout(IDLE_SECONDS)
        _read(trainer, len(WELCOME))
    except OSError as error:
        trainer.close()
        late = isinstance(error, TimeoutError)
        what = "did not answer a worker in time" if late else "refused a worker's token"
        raise ConnectionError(f"The trainer at {host}:{port} {what}.") from None
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
