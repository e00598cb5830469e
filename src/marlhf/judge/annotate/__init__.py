"""A local web page on which people compare responses of two or more models.

>>> from marlhf.judge.annotate import annotate
>>> annotate(["runs/macro", "runs/ppo"], task="tldr")  # doctest: +SKIP
"""

from marlhf.judge.annotate.session import (
    annotate,
    describe,
    export,
    export_votes,
    open_votes,
    preferences,
)
from marlhf.judge.annotate.store import Store

__all__ = ["Store", "annotate", "describe", "export", "export_votes", "open_votes", "preferences"]
