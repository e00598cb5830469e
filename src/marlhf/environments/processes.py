"""Environments in processes of their own, for those whose class says `own_process = True`.

A thread that hangs cannot be stopped; a process can. It also has its own memory and its own global
state, such as random numbers, and may crash. Each episode has one, forked from a clean process that
has imported the environment's module once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from marlhf.data.rows import Message, Row
from marlhf.environments.protocol import ConversationError, Environment, Step
from marlhf.environments.tools import Toolbox, ToolCall, call_optional, finish

CLOSING = 2.0
"""Seconds that a process has to end by itself."""


class OwnProcess:
    """An environment like the one that `make` builds, in a process that ends with the episode."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        context = get_context("forkserver")
        # Imported once, and not once per episode. Of no effect where the server runs already.
        context.set_forkserver_preload([__name__])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConversationError(
                f"An environment with own_process must be importable by its process: {error}. "
                "Define its class and its tools in a module, not in a function or a notebook."
            ) from error
        theirs.close()

    def reset(self, row: Row, seed: int) -> list[Message]:
        messages, self.schemas, settings = self._call("reset", row, seed)
        vars(self).update(settings)  # its own `timeout`, if it has one
        return messages

    def run(self, calls: Sequence[ToolCall]) -> tuple[list[Message], int]:
        """As `Toolbox.run`: tools run where the environment is."""
        return self._call("run", calls)

    def step(self, reply: str) -> Step:
        return self._call("step", reply)

    def get_reward(self) -> float | None:
        return self._call("get_reward")

    def close(self) -> None:
        try:
            if self._process.is_alive():
                self._call("close")
        finally:
            self._connection.close()
            self._process.join(CLOSING)
            self.kill()

    def kill(self) -> None:
        """End the process at once; a call that waits for it raises."""
        self._process.kill()
        self._process.join()

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            self._connection.send((name, arguments))
            fault, answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(CLOSING)
            code = self._process.exitcode
            raise ConversationError(f"its process ended with exit code {code}") from None
        if fault:
            raise ConversationError(fault)
        return answer


def _serve(connection: Connection, make: Callable[[], Environment]) -> None:
    """Answer calls until the connection is closed, which it also is when the run is killed."""
    environment: Any = None
    toolbox = Toolbox(())

    def call(name: str, *arguments: Any) -> Any:
        """What `OwnProcess` asks for by the names of its methods."""
        nonlocal environment, toolbox
        environment = make() if environment is None else environment
        if name == "run":
            return toolbox.run(*arguments)
        if name != "reset":
            return call_optional(environment, name, *arguments)
        messages = finish(environment.reset(*arguments))
        toolbox = Toolbox(getattr(environment, "tools", ()))
        own = {"timeout": environment.timeout} if hasattr(environment, "timeout") else {}
        return messages, toolbox.schemas, own

    with suppress(EOFError, OSError):
        while True:
            name, arguments = connection.recv()
            try:
                answer = "", call(name, *arguments)
            except (Exception, SystemExit) as error:  # whatever the user's environment raises
                kind = "" if isinstance(error, ConversationError) else f"{type(error).__name__}: "
                answer = f"{kind}{error}", None
            try:
                connection.send(answer)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                connection.send((f"what {name} returned cannot be sent: {error}", None))
