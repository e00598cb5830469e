"""README as the package's description: relative links become absolute, once there is an address.

`address` in pyproject.toml is the repository's, such as https://github.com/owner/marlhf. Without
one, links stay relative.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")
IMAGES = (".svg", ".png")


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text("utf-8")
        if address := self.config["address"]:
            text = absolute(text, address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, address: str) -> str:
    """Links to files of the repository as links to its main branch; pictures as raw files."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found[1].endswith(IMAGES) else "blob"
        return f"]({address}/{kind}/main/{found[1]})"

    return LINK.sub(link, text)
