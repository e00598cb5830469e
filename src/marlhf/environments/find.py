"""Environments by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from marlhf.config.user_code import declares, import_named
from marlhf.environments.fix_code import FixCode
from marlhf.environments.guess import Guess
from marlhf.environments.protocol import ConversationError, Environment
from marlhf.environments.python import Python
from marlhf.environments.textarena import TextArena
from marlhf.environments.tools import environment_from

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
    except TypeError as error:
        raise ConversationError(f"The environment {name} cannot be built: {error}.") from error


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
