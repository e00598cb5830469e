"""Packages that only other models than ours need are left alone at the start of a run."""

import importlib.util
import subprocess
import sys

import pytest

from marlhf.cli.lean_imports import UNUSED

SCRIPT = """
import importlib, sys
from marlhf.cli.lean_imports import UNUSED, skip_unused_packages
if {skip}:
    skip_unused_packages()
from transformers.utils import import_utils
asked = [getattr(import_utils, name)() for name in UNUSED.values()]
found = [importlib.util.find_spec(name) is not None for name in UNUSED]
print(asked, found, [name for name in UNUSED if name in sys.modules])
"""


@pytest.mark.parametrize("skip", [False, True])
def test_transformers_does_not_find_what_is_still_there(tmp_path, skip):
    for name in UNUSED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + SCRIPT.format(skip=skip)
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # It wants torchvision only where Pillow can read images, which is not installed everywhere.
    usual = [importlib.util.find_spec("PIL") is not None, True, True]
    asked = [False] * 3 if skip else usual
    assert output.splitlines()[-1] == f"{asked} {[True] * 3} []"
