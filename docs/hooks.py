"""Pages of the site that are made while it is built: every setting of every stage."""

from __future__ import annotations

from typing import Any

from marlhf.config.settings import describe
from marlhf.train.recipe import kind_class
from marlhf.train.stages import STAGES

HEAD = """# Settings

Every setting with its type, default and meaning, as `marlhf config KIND` prints it. In a recipe a
dotted name is nested: `sampling.top_k` is `sampling: {top_k: 0}`.
"""


def settings_page() -> str:
    """One table per stage."""
    parts = [HEAD]
    for kind, method in STAGES.items():
        parts += [
            f"\n## {kind}\n",
            method.help,
            "",
            "| setting | default and type | meaning |",
            "|---|---|---|",
        ]
        for name, type_, default, words in describe(kind_class(kind)):
            value = f"`{default}`<br>`{type_}`" if type_ else ""  # groups have neither
            # In backticks a bar is no end of a cell.
            parts.append(f"| `{name}` | {value} | {' '.join(words.split())} |")
    return "\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "settings.md", content=settings_page()))
    return files
