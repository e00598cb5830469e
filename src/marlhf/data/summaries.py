"""Texts to summarise: TL;DR's Reddit posts, and the news of CNN/DailyMail.

TL;DR has two summaries for each post, one preferred by a person. It is read in the form OpenAI
published (`openai/summarize_from_feedback`, comparisons: info, summaries, choice) and flat (post,
chosen, rejected, with or without subreddit and title). The prompt is that of the paper's samples:

    POST Subreddit: r/cats
    Hello everyone! One of my cats is ...
    TL;DR:

with a plain `POST` line where the subreddit is unknown. The title is not in the prompt, as it is
not in the paper's; it is kept in `columns`.

CNN/DailyMail has articles with their highlights, to evaluate summaries out of distribution. It is
read as on the hub (article, highlights), and from the part of OpenAI's comparisons that is about
news, which the paper evaluates on. The prompt has the same form, so that a policy trained on Reddit
posts knows what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlhf.data.rows import Parsed, Row, Source, after_colon, all_text, without


def tldr_row(record: Mapping[str, Any]) -> Parsed:
    if "info" in record:
        return _from_comparison(record)
    if not all_text(record, "post", "chosen", "rejected"):
        return None, "`post`, `chosen` or `rejected` is not text"
    row = Row(
        prompt=write_prompt(record["post"], record.get("subreddit")),
        chosen=after_colon(record["chosen"]),
        rejected=after_colon(record["rejected"]),
        columns=without(record, "chosen", "rejected"),
    )
    return row, ""


def _from_comparison(record: Mapping[str, Any]) -> Parsed:
    """OpenAI's own form: `choice` says which of the two summaries won."""
    info, summaries, choice = record["info"], record["summaries"], record["choice"]
    if not isinstance(info, Mapping) or not info.get("post"):
        return None, "a news article (CNN/DM), not a Reddit post"
    pair = isinstance(summaries, list) and len(summaries) == 2
    if not pair or choice not in (0, 1) or not all(_has_text(each) for each in summaries):
        return None, "not two summaries with a choice of 0 or 1"
    chosen, rejected = summaries[choice], summaries[1 - choice]
    policies = {"chosen_policy": chosen.get("policy"), "rejected_policy": rejected.get("policy")}
    row = Row(
        prompt=write_prompt(info["post"], info.get("subreddit")),
        chosen=after_colon(chosen["text"]),
        rejected=after_colon(rejected["text"]),
        columns={**info, **without(record, "info", "summaries", "choice"), **policies},
    )
    return row, ""


def _has_text(summary: Any) -> bool:
    return isinstance(summary, Mapping) and all_text(summary, "text")


def news_row(record: Mapping[str, Any]) -> Parsed:
    if "highlights" in record:
        columns, summary = record, record["highlights"]
    else:  # the form of OpenAI's comparisons
        columns, summary = record["info"] if isinstance(record["info"], Mapping) else {}, None
        if not columns.get("article"):
            return None, "a Reddit post, not a news article"
    if not all_text(columns, "article"):
        return None, "`article` is not text"
    chosen = after_colon(summary) if isinstance(summary, str) else None
    rest = without(columns, "article", "highlights")
    return Row(write_prompt(columns["article"]), chosen=chosen, columns=rest), ""


def write_prompt(post: str, subreddit: str | None = None) -> str:
    """The prompt a summary follows; empty for an empty post, so that it is dropped."""
    if not post.strip():
        return ""
    heading = f"POST Subreddit: r/{subreddit}" if subreddit else "POST"
    return f"{heading}\n{post.strip()}\nTL;DR:"


TLDR = Source(
    "tldr",
    to_row=tldr_row,
    forms=("info summaries choice", "post chosen rejected"),
    hub_name="openai/summarize_from_feedback",
    hub_config="comparisons",
)
CNN_DAILYMAIL = Source(
    "cnn_dailymail",
    to_row=news_row,
    forms=("article highlights", "info summaries"),
    hub_name="abisee/cnn_dailymail",
    hub_config="3.0.0",
)
