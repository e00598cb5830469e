"""Apply a segmenter, which may be the user's own code, and name it where it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from marlhf.core import Responses, Segments
from marlhf.core.segmenters import Segmenter, segment
from marlhf.errors import MarlhfError


class SegmenterError(MarlhfError, ValueError):
    """A segmenter that raised, or returned something else than the starts of macro actions."""


def apply_segmenter(
    segmenter: Segmenter, responses: Responses, *, split_last: bool = False
) -> Segments:
    """The macro actions of some responses, checked."""
    with explain_segmenter_errors(segmenter):
        return segment(segmenter, responses, split_last=split_last).validate()


@contextlib.contextmanager
def explain_segmenter_errors(segmenter: Segmenter) -> Iterator[None]:
    """Errors inside the block as a sentence that names the segmenter."""
    try:
        yield
    except ValueError as error:
        raise SegmenterError(f"Segmenter {_name(segmenter)}: {error}") from error
    except Exception as error:  # the user's code may raise anything
        kind = type(error).__name__
        raise SegmenterError(
            f"Segmenter {_name(segmenter)} raised {kind}: {error}. It takes Responses and returns "
            "a bool tensor [B, T] that is True where a macro action starts."
        ) from error


def _name(segmenter: Segmenter) -> str:
    return getattr(segmenter, "__qualname__", None) or repr(segmenter)
