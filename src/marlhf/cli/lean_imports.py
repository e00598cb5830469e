"""Transformers without packages that only other models than ours need.

Where they are installed, transformers imports torchvision and SciPy for models of images, and
scikit-learn for assisted generation. That is a second or two of each start; and a torchvision that
was built for another torch, which is easily installed, would stop a model of text.
"""

from __future__ import annotations

import sys

UNUSED = {
    "torchvision": "is_torchvision_available",
    "sklearn": "is_sklearn_available",
    "scipy": "is_scipy_available",
}
"""Packages, and what transformers asks whether they are there."""


def skip_unused_packages() -> None:
    """Let transformers believe that they are not installed, from its import on.

    They can be imported as before, except by transformers.
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
