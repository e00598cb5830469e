"""A start that imports no more than it needs, and compiles it once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

UNUSED = {
    "torchvision": "is_torchvision_available",
    "sklearn": "is_sklearn_available",
    "scipy": "is_scipy_available",
}
"""Packages, and what transformers asks whether they are there."""


def skip_unused_packages() -> None:
    """Let transformers believe that some packages are not installed, from its import on.

    Where they are, it imports torchvision and SciPy for models of images, and scikit-learn for
    assisted generation. That is a second or two of each start; and a torchvision that was built for
    another torch, which is easily installed, would stop a model of text. Others can import them as
    before.
    """
    if "transformers" in sys.modules:  # and has asked already
        return
    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        from transformers.utils import import_utils

        for name in hidden:
            ask = getattr(import_utils, UNUSED[name], None)
            if ask is not None:
                ask()  # the answer is kept
    finally:
        for name in hidden:
            del sys.modules[name]


def keep_compiled_modules() -> None:
    """Keep compiled modules in a folder of our own where Python was told to keep none.

    Containers often tell it so (PYTHONDONTWRITEBYTECODE) and hold a torch that was never compiled:
    then each start compiles more than a thousand of its files, which takes seconds.
    """
    if not sys.dont_write_bytecode or sys.pycache_prefix:
        return
    torch = importlib.util.find_spec("torch")
    source = torch and torch.origin
    if not source or Path(importlib.util.cache_from_source(source)).exists():
        return
    folder = _own_folder("compiled")
    if folder is not None:
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def keep_what_transformers_reads() -> None:
    """Keep what transformers reads from many files each time it is imported.

    It looks for names in the files of all its models, more than a thousand, and for the packages of
    all that is installed: a second or more.
    """
    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, _ReaderFinder())


class _ReaderFinder:
    """Finds the module of transformers that reads the files, and has it read what was kept."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "transformers.utils.import_utils":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_replace(module: Any) -> None:
                with _packages_kept():
                    run(module)
                _replace_reader(module)

            loader.exec_module = run_and_replace
        return spec


@contextlib.contextmanager
def _packages_kept() -> Iterator[None]:
    """Meanwhile packages of what is installed are those of an earlier start with the same."""
    read = importlib.metadata.packages_distributions

    def read_once() -> Any:
        folder, installed = _own_folder("packages"), _installed()
        if folder is None or installed is None:
            return read()
        return _kept(folder, installed, read, _lists_of_names, dict)

    importlib.metadata.packages_distributions = read_once
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = read


def _installed() -> list[tuple[str, str, int]] | None:
    """Where each distribution lies and when that was changed; None where some are in archives."""
    found: list[tuple[str, str, int]] = []
    for place in sys.path:
        try:
            with os.scandir(place or ".") as entries:
                for entry in entries:
                    if entry.name.endswith((".dist-info", ".egg-info", ".egg-link")):
                        found.append((place, entry.name, entry.stat().st_mtime_ns))
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return sorted(found)


def _lists_of_names(kept: Any) -> dict[str, list[str]]:
    if not all(isinstance(names, list) for names in kept.values()):
        raise TypeError
    return kept


READER = "create_import_structure_from_path"
"""What transformers reads its files by. The result: names by module by the packages that these
need, a frozenset; and the same of each folder, by its name."""


def _replace_reader(module: Any) -> None:
    read, package = getattr(module, READER, None), Path(module.__file__).parents[1]
    # Where someone works on transformers, its files change from one import to the next.
    installed = {"site-packages", "dist-packages"} & set(package.parts)
    folder = _own_folder("transformers") if read and installed else None
    if read is None or folder is None:
        return

    models = package / "models"

    @functools.wraps(read)
    def read_once(path: Any) -> Any:
        if Path(path) not in (models, models / "__init__.py"):  # which stands for its folder
            return read(path)
        version = [str(package), _state(package / "__init__.py"), _state(models)]
        return _kept(folder, version, lambda: read(path), _from_json, _to_json)

    setattr(module, READER, read_once)


def _kept(
    folder: Path,
    version: Any,
    read: Callable[[], Any],
    from_json: Callable[[Any], Any],
    to_json: Callable[[Any], Any],
) -> Any:
    """What an earlier start has read, of this version; otherwise `read()`, which is then kept."""
    file = folder / f"{hashlib.sha256(repr(version).encode()).hexdigest()}.json"
    try:
        return from_json(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):  # not there, or something else
        found = read()
    from marlhf.runs.atomic import replacing  # once for each version

    # All of it or nothing, as several processes may start at once. There may be no room, or the
    # result be of another kind.
    with contextlib.suppress(OSError, TypeError, AttributeError), replacing(file) as part:
        part.write_text(json.dumps(to_json(found)))
    return found


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _to_json(found: dict[Any, Any]) -> list[Any]:
    folders = {key: _to_json(value) for key, value in found.items() if isinstance(key, str)}
    names = [
        (sorted(key), {module: sorted(each) for module, each in value.items()})
        for key, value in found.items()
        if not isinstance(key, str)
    ]
    return [names, folders]


def _from_json(kept: list[Any]) -> dict[Any, Any]:
    names, folders = kept
    found: dict[Any, Any] = {
        frozenset(key): {module: set(each) for module, each in value.items()}
        for key, value in names
    }
    return found | {name: _from_json(folder) for name, folder in folders.items()}


def _own_folder(name: str) -> Path | None:
    """Where only this user can write: what is kept there will be run."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "marlhf" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = folder.stat()
    except (OSError, RuntimeError):  # nowhere to write, or no home
        return None
    mine = not hasattr(os, "getuid") or stat.st_uid == os.getuid()
    return folder if mine and not stat.st_mode & 0o022 else None
