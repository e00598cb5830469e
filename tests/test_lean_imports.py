"""Packages that only other models than ours need are left alone at the start of a run."""

import importlib.util
import os
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


@pytest.fixture
def start(tmp_path):
    """What a start beside a torch without compiled files keeps, and where."""

    def run(**environment):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "__init__.py").touch()
        script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + (
            "from marlhf.cli.lean_imports import keep_compiled_modules\n"
            "keep_compiled_modules(); import torch"
        )
        settings = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        variables = {**os.environ, **settings, **environment}
        subprocess.run([sys.executable, "-c", script], env=variables, check=True)
        return [str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("*.pyc")]

    return run


def test_compiled_files_are_kept_in_a_folder_of_our_own(start, tmp_path):
    [folder] = start()
    assert folder.startswith("cache/marlhf/compiled/")
    assert (tmp_path / "cache/marlhf/compiled").stat().st_mode & 0o777 == 0o700
    assert start() == [folder]  # which is read, not written anew


def test_compiled_files_are_where_python_keeps_them_otherwise(start):
    assert start(PYTHONDONTWRITEBYTECODE="") == ["torch/__pycache__"]
    assert start() == ["torch/__pycache__"]  # nothing is missing now


def test_compiled_files_are_not_kept_where_others_write(start, tmp_path):
    folder = tmp_path / "cache/marlhf/compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert start() == []
    assert start(XDG_CACHE_HOME="/proc/nowhere") == []
