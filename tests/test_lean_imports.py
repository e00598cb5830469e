"""Packages that only other models than ours need are left alone at the start of a run."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.utils import import_utils

from marlhf.cli.lean_imports import UNUSED, _from_json, _packages_kept, _to_json

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


READ = """
from pathlib import Path
def create_import_structure_from_path(path):
    print("read", Path(path).name)
    return {frozenset(["torch"]): {"modeling": {"B", "A"}}, "llama": {frozenset(): {"x": {"C"}}}}
"""
BEGIN = """
import sys
from pathlib import Path
from marlhf.cli.lean_imports import READER, keep_what_transformers_reads
sys.path.insert(0, sys.argv[1])
keep_what_transformers_reads()
from transformers.utils import import_utils
read = getattr(import_utils, READER)
models = Path(import_utils.__file__).parents[1] / "models"
llama = {frozenset(): {"x": {"C"}}}
found = [read(models), read(str(models / "__init__.py"))]
print(*(each == {frozenset(["torch"]): {"modeling": {"A", "B"}}, "llama": llama} for each in found))
"""


@pytest.fixture
def names(tmp_path):
    """What a start with a small package of that name prints; and the folder of what is kept."""

    def start(folder="site-packages"):
        package = tmp_path / folder / "transformers"
        (package / "utils").mkdir(parents=True, exist_ok=True)
        (package / "models").mkdir(exist_ok=True)
        for file in (package / "__init__.py", package / "utils" / "__init__.py"):
            if not file.exists():
                file.touch()
        (package / "utils" / "import_utils.py").write_text(READ)
        command = [sys.executable, "-c", BEGIN, str(package.parent)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return run.stdout.split("\n")[:-1]

    return start, tmp_path / "marlhf" / "transformers"


def test_names_of_models_are_read_once(names):
    start, folder = names
    assert start() == ["read models", "True True"]
    assert start() == ["True True"]
    [file] = folder.iterdir()
    whole = file.read_text()
    for broken in (whole[:-9], '{"a": 1}', "[[], 1]", "[[1], {}]"):
        file.write_text(broken)
        assert start() == ["read models", "True True"]
        assert file.read_text() == whole
    (folder.parents[1] / "site-packages/transformers/__init__.py").write_text("new = 1")
    assert start()[0] == "read models"  # another version


def test_names_of_models_are_read_where_they_may_change_or_cannot_be_kept(names):
    start, folder = names
    both = ["read models", "read __init__.py", "True True"]
    assert start("src") == both
    assert not folder.exists()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert start() == start() == both
    assert not any(folder.iterdir())


def test_names_of_models_are_kept_as_they_are():
    models = Path(transformers.__file__).parent / "models"
    read = import_utils.create_import_structure_from_path
    read = getattr(read, "__wrapped__", read)  # not what tests kept at their start
    found = read(models)
    assert len(found) > 100
    assert read(str(models / "__init__.py")) == found
    assert _from_json(json.loads(json.dumps(_to_json(found)))) == found


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """What a start takes for installed, and whether it has read the packages' files for it."""
    site = tmp_path / "site"
    (site / "fox-1.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere"), str(site), ""])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    reads = []

    def read():
        reads.append(1)
        names = {entry.name.split("-")[0] for entry in site.iterdir()}
        return {name: [name.upper()] for name in sorted(names)}

    monkeypatch.setattr(importlib.metadata, "packages_distributions", read)

    def start():
        reads.clear()
        with _packages_kept():
            found = importlib.metadata.packages_distributions()
        assert importlib.metadata.packages_distributions is read
        return found, bool(reads)

    return start, site, tmp_path / "cache/marlhf/packages"


def test_packages_of_what_is_installed_are_read_once(packages, tmp_path):
    start, site, folder = packages
    fox = {"fox": ["FOX"]}
    assert start() == (fox, True)
    (tmp_path / "something.txt").touch()  # beside the program, and no package
    assert start() == (fox, False)
    [file] = folder.iterdir()
    for broken in ("", "[]", '{"fox": 1}', "null"):
        file.write_text(broken)
        assert start() == (fox, True)
        assert start() == (fox, False)
    (site / "owl-2.dist-info").mkdir()
    both = {"fox": ["FOX"], "owl": ["OWL"]}
    assert start() == (both, True)
    assert start() == (both, False)
    (site / "owl-2.dist-info").rmdir()
    assert start() == (fox, False)  # as before
    os.utime(site / "fox-1.dist-info", (1, 1))
    assert start() == (fox, True)  # installed anew


def test_packages_are_read_where_they_cannot_be_kept(packages, monkeypatch):
    start, site, folder = packages
    archive = site / "packages.zip"
    archive.touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(archive)])  # which may hold any
    assert start()[1]
    assert start()[1]
    assert not any(folder.glob("*"))
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    assert start()[1]
    assert start()[1]
    assert not any(folder.iterdir())
