"""Environments by name, or from a user's classes and functions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from marlhf.config.user_code import declares, import_named
from marlhf.environments.games import Guess, TextArena
from marlhf.environments.processes import OwnProcess
from marlhf.environments.programs import FixCode, Python
from marlhf.environments.protocol import ConversationError, Environment
from marlhf.environments.tools import Toolbox, ToolEnvironment, public_methods
from marlhf.errors import MarlhfError

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {
    "guess": Guess,
    "python": Python,
    "fix-code": FixCode,
}
TEXTARENA = "textarena:"


def find_environment(
    name: str, code: Collection[str] | None = None, **settings: Any
) -> Callable[[], Environment]:
    """What makes an environment, from a name of a recipe. Settings are its keyword arguments.

    A class of the user's own must be in one of the modules of `code`, a recipe's declaration of
    what it runs. None takes any, for names that the user has typed or trusts.

    >>> find_environment("gues")
    Traceback (most recent call last):
    marlhf.environments.protocol.ConversationError: There is no environment 'gues'. Did you mean
    guess? Or name your own as my_module:MyEnvironment.
    """
    if name in ENVIRONMENTS:
        make = partial(ENVIRONMENTS[name], **settings)
    elif name.startswith(TEXTARENA):
        make = partial(TextArena, name.removeprefix(TEXTARENA), **settings)
    elif ":" in name:
        make = partial(_import(name, code), **settings)
    else:
        near = difflib.get_close_matches(name, ENVIRONMENTS, n=2, cutoff=0.5)
        there = f"There is {', '.join(ENVIRONMENTS)}."
        hint = f"Did you mean {' or '.join(near)}?" if near else there
        raise ConversationError(
            f"There is no environment {name!r}. {hint} Or name your own as my_module:MyEnvironment."
        )
    try:
        return environment_from(factory=make)
    except MarlhfError:
        raise
    except Exception as error:  # whatever the user's class raises
        kind = "" if isinstance(error, TypeError) else f"{type(error).__name__}: "
        raise ConversationError(
            f"The environment {name} cannot be built: {kind}{error}."
        ) from error


def environment_from(
    tools: Sequence[Callable[..., Any]] | None = None,
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
) -> Callable[[], Environment]:
    """What a trainer's `tools=` and `environment_factory=` mean.

    Tools alone answer the rows' prompts. A factory makes TRL's environments, one or several by
    name, or objects with a `step` of their own, which are used as they are.
    """
    shared = list(tools or ())
    Toolbox(shared)  # says at once what cannot be described
    if factory is None:
        return partial(ToolEnvironment, tools=shared)
    named = factory if isinstance(factory, Mapping) else {"": factory}
    built = [make() for make in named.values()]
    steps = [_has_step(each, shared) for each in built]
    apart = any(getattr(each, "own_process", False) for each in built)
    if not any(steps):
        make = partial(ToolEnvironment, factory, shared)
        return partial(OwnProcess, make) if apart else make
    if shared or isinstance(factory, Mapping):
        raise ConversationError(
            "An environment with a `step` of its own is given alone: not among several, and with "
            "its tools in an attribute `tools`."
        )
    return partial(OwnProcess, factory) if apart else factory


def _has_step(instance: Any, shared: list[Callable[..., Any]]) -> bool:
    """Whether an object is an Environment as it is; refuses what is neither that nor TRL's."""
    what = type(instance).__name__
    if not callable(getattr(instance, "reset", None)):
        raise ConversationError(
            f"The environment {what} has no `reset`. Give it `reset(self, row, seed)` and "
            "`step(self, reply)`; or, with methods as tools, `reset(self, **row)`."
        )
    if callable(getattr(instance, "step", None)) and not _is_tool(instance):
        return True
    found = [*shared, *public_methods(instance)]
    if not found:
        raise ConversationError(
            f"The environment {what} has neither `step` nor public methods to call as tools. "
            "Give it one of them."
        )
    Toolbox(found)
    return False


def _is_tool(instance: Any) -> bool:
    """Whether `step` is one of the tools of TRL's: documented, where `reset` takes only names."""
    try:
        inspect.signature(instance.reset).bind(None, 0)
    except TypeError:
        return bool(inspect.getdoc(instance.step))
    return False


def _import(name: str, code: Collection[str] | None) -> Any:
    found = import_named(name, to_call=False)
    if code is not None and not declares(code, name):
        module = name.partition(":")[0]
        raise ConversationError(
            f"The recipe names the environment {name}, but does not declare the code it runs. Add "
            f"`code: [{module}]` to it. Classes of installed packages are not taken: write one of "
            "your own that uses them."
        )
    return found
