"""CNN/DailyMail: news articles with their highlights, to evaluate summaries out of distribution.

Read as on the hub (article, highlights), and from the part of OpenAI's comparisons
(`openai/summarize_from_feedback`) that is about news, which the paper evaluates on. The prompt has
the form of TL;DR's, so that a policy trained on Reddit posts knows what to do:

    POST
    (CNN) A cat was found on ...
    TL;DR:
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlhf.data.rows import Parsed, Row, after_colon
from marlhf.data.tldr import write_prompt

HUB_NAME, HUB_CONFIG = "abisee/cnn_dailymail", "3.0.0"


def recognises(record: Mapping[str, Any]) -> bool:
    return {"article", "highlights"} <= record.keys() or {"info", "summaries"} <= record.keys()


def to_row(record: Mapping[str, Any]) -> Parsed:
    if "highlights" in record:
        article, summary, columns = record["article"], record["highlights"], record
    else:  # the form of OpenAI's comparisons
        columns = record["info"] if isinstance(record["info"], Mapping) else {}
        article, summary = columns.get("article"), None
        if not article:
            return None, "a Reddit post, not a news article"
    if not isinstance(article, str):
        return None, "`article` is not text"
    chosen = after_colon(summary) if isinstance(summary, str) else None
    rest = {key: value for key, value in columns.items() if key not in ("article", "highlights")}
    return Row(write_prompt(article), chosen=chosen, columns=rest), ""
