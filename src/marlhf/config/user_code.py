"""Functions and classes of the user's own, named as `module:name` in a recipe.

Naming one runs code: its module is imported. So modules of Python itself are refused, and what is
taken must have been written there: `subprocess:Popen` is neither a segmenter nor a reward.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from marlhf.errors import MarlhfError


class UserCodeError(MarlhfError, ValueError):
    """A `module:name` that cannot be used, with what to do about it."""


def check_name(name: str) -> tuple[str, str]:
    """The module and the name in `module:name`, without importing anything."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise UserCodeError(
            f"Cannot read {name!r}. Write module:function, as in my_rewards:brevity."
        )
    if module.endswith(".py") or "/" in module:
        plain = ".".join(Path(module).with_suffix("").parts)
        raise UserCodeError(f"{module!r} is a file. Write the module's name: {plain}:{attribute}.")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise UserCodeError(
            f"{name} is part of Python itself. Name a function of your own, which may call it."
        )
    return module, attribute


def import_named(name: str, *, to_call: bool = True) -> Any:
    """`module:name`, from the folder of the command or from what is installed.

    `to_call` is for functions: objects of a class must then be callable.
    """
    module, attribute = check_name(name)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UserCodeError(
                f"Cannot import {module}, which needs {error.name}: install that first."
            ) from error
        raise UserCodeError(
            f"There is no module {error.name!r} in this folder, and none is installed. Run the "
            f"command from the folder that holds {module.split('.')[0]}.py."
        ) from None
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise UserCodeError(f"Cannot import {module}: {type(error).__name__}: {error}") from error
    try:
        value: Any = functools.reduce(getattr, attribute.split("."), loaded)
    except AttributeError:
        near = difflib.get_close_matches(attribute, dir(loaded), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserCodeError(f"{loaded.__file__} has no {attribute!r}.{hint}") from None
    if to_call and isinstance(value, type) and "__call__" not in dir(value):
        raise UserCodeError(f"Objects of {name} cannot be called. Give the class a __call__.")
    if not callable(value):
        raise UserCodeError(f"{name} is {value!r:.80}, which is not callable. Name a function.")
    if not _is_own(value, loaded.__name__):
        raise UserCodeError(
            f"{name} was not written in {module}, which only imports it. Name a function of your "
            "own, which may call it."
        )
    return value


def is_installed(name: str) -> bool:
    """Whether the module of an imported `module:name` belongs to an installed package."""
    module = name.partition(":")[0]
    file = getattr(sys.modules[module], "__file__", None) or ""
    packages = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return bool(packages) or module.partition(".")[0] == "marlhf"


def declares(code: Collection[str], name: str) -> bool:
    """Whether a recipe's `code` lists the module of an imported `module:name`, the user's own."""
    module = name.partition(":")[0]
    listed = any(f"{module}.".startswith(f"{declared}.") for declared in code)
    return listed and not is_installed(name)


def _is_own(value: Any, module: str) -> bool:
    """Whether a function or class is of the module's package; an object, not one of Python's."""
    if isinstance(value, functools.partial):
        return _is_own(value.func, module)
    if inspect.isroutine(value) or isinstance(value, type):
        return str(value.__module__).partition(".")[0] == module.partition(".")[0]
    return type(value).__module__.partition(".")[0] not in sys.stdlib_module_names
