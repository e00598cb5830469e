"""People compare responses of two or more models on a local web page.

>>> from marlhf.evaluate.annotate import annotate
>>> annotate(["runs/macro", "runs/ppo"], task="tldr")  # doctest: +SKIP
"""

from marlhf.evaluate.annotate.export import describe, export
from marlhf.evaluate.annotate.session import annotate, export_votes, open_votes
from marlhf.evaluate.annotate.store import Store

__all__ = ["Store", "annotate", "describe", "export", "export_votes", "open_votes"]
