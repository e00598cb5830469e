"""Numbers as the page shows them."""

from __future__ import annotations

import math

DASH = "\u2013"
"""Shown where there is no number."""


def num(value: float | None, digits: int = 3) -> str:
    """A number with its significant digits kept and a real minus sign; a dash for none.

    What differs from zero by rounding only, such as a mean of normalised scores, is zero.
    """
    if value is None or not math.isfinite(value):
        return DASH
    value = 0.0 if abs(value) < 1e-4 else value
    size = abs(value)
    if size >= 1e6:
        shown = f"{value:.{digits - 1}e}"
    else:
        decimals = digits - 1 - (math.floor(math.log10(size)) if size >= 1 else 0)
        shown = f"{value:.{max(0, decimals)}f}"
    if float(shown) == 0:
        shown = shown.removeprefix("-")  # no minus before what rounds to nothing
    return shown.replace("-", "\u2212")


def signed(value: float, digits: int = 3) -> str:
    return ("+" if value > 0 else "") + num(value, digits)


def percent(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return DASH
    shown = f"{100 * value:.0f}%"
    # Not quite all is not all.
    return f"{100 * value:.1f}%" if shown in ("0%", "100%") and value not in (0, 1) else shown


def duration(seconds: float | None) -> str:
    """Seconds in the unit a person would use."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
