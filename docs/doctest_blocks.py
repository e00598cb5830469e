"""Examples in docstrings as code blocks on the site: Markdown would read `>>>` as a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?m)(?:^|\A)>>> (?:.+\n?)+")


class DoctestBlocks(griffe.Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring and not obj.is_alias:
            fenced = EXAMPLE.sub(r"```pycon\n\g<0>\n```\n", obj.docstring.value)
            obj.docstring.value = fenced
