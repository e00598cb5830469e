"""Every error of the package is a MarlhfError with a parent from the standard library."""

import importlib
import importlib.util
import inspect
import pkgutil

import marlhf
from marlhf.errors import MarlhfError

NOT_IMPORTED = ("marlhf.__main__", "marlhf.engines.verl")
"""Modules that run the command, or import what the tests' environment does not have."""
ENDS_A_RUN = "Stopped"  # asked for by the user, so it has no other parent


def error_classes():
    for module in pkgutil.walk_packages(marlhf.__path__, "marlhf."):
        if module.name in NOT_IMPORTED:
            continue
        if "triton_" in module.name and importlib.util.find_spec("triton") is None:
            continue
        found = importlib.import_module(module.name)
        for name, cls in inspect.getmembers(found, inspect.isclass):
            if issubclass(cls, Exception) and cls.__module__ == module.name:
                yield name, cls


def test_every_error_has_the_base_and_a_parent_of_the_standard_library():
    errors = {name: cls for name, cls in error_classes() if not issubclass(cls, Warning)}
    assert {"ConfigError", "DataError", "RunError", "Stopped"} <= errors.keys()
    for name, cls in errors.items():
        assert issubclass(cls, MarlhfError), name
        standard = [c for c in cls.__mro__ if c.__module__ == "builtins" and c is not cls]
        if cls is not MarlhfError and name != ENDS_A_RUN:
            assert standard[0] is not Exception, name
