"""Pages of the site that are made while it is built: every setting of every stage."""

from __future__ import annotations

from typing import Any

from marlhf.config import kind_class
from marlhf.settings import describe
from marlhf.train.stages import METHODS

HEAD = """# Settings

Every setting with its type, default and meaning, as `marlhf config KIND` prints it. In a recipe a
dotted name is nested: `sampling.top_k` is `sampling: {top_k: 0}`.
"""


def settings_page() -> str:
    """One table per stage."""
    parts = [HEAD]
    for kind, method in METHODS.items():
        parts += [
            f"\n## {kind}\n",
            method.help,
            "",
            "| setting | type | default | |",
            "|---|---|---|---|",
        ]
        for name, type_, default, words in describe(kind_class(kind)):
            cells = [f"`{name}`", _code(type_), _code(default), " ".join(words.split())]
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(parts) + "\n"


def _code(words: str) -> str:
    return f"`{words}`" if words else ""


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "settings.md", content=settings_page()))
    return files
