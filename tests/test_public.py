"""What people import has a docstring with an example; the examples run as doctests."""

import ast
import importlib
import inspect
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest

import marlhf

PACKAGES = ("marlhf", "marlhf.core", "marlhf.data", "marlhf.reward", "marlhf.rollout")
PUBLIC = {
    f"{found.__module__}.{found.__qualname__}": found
    for package in map(importlib.import_module, PACKAGES)
    for found in (getattr(package, name) for name in package.__all__)
    if inspect.isfunction(found)
    or (inspect.isclass(found) and not isinstance(found, types.GenericAlias))  # as 3.10 has it
}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_it_has_a_docstring_with_an_example(name):
    assert ">>>" in (PUBLIC[name].__doc__ or "")


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_there(package):
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_what_is_imported_is_declared():
    source = Path(marlhf.__file__).parent
    project = tomllib.loads((source.parents[1] / "pyproject.toml").read_text())["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    declared = {_name(each) for each in project["dependencies"] + extras}
    # What torch and verl themselves are made of, and the one that is imported by another name.
    declared |= {"triton", "hydra", "omegaconf", "tensordict", "yaml"}
    imported = {name: file for file in source.rglob("*.py") for name in _imports(file)}
    ours = {*sys.stdlib_module_names, "marlhf"}
    missing = {n: f for n, f in imported.items() if n not in ours and _name(n) not in declared}
    assert not missing


def _name(requirement):
    return re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-")


def _imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
