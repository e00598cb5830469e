"""What people import has a docstring with an example; the examples run as doctests."""

import importlib
import inspect
import types

import pytest

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
