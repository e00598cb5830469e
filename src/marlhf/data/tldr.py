"""TL;DR: Reddit posts with two summaries each, one preferred by a person.

Read in the form OpenAI published (`openai/summarize_from_feedback`,
comparisons: info, summaries, choice) and flat (post, chosen, rejected, with
or without subreddit and title). The prompt is that of the paper's samples:

    POST Subreddit: r/cats
    Hello everyone! One of my cats is ...
    TL;DR:

with a plain `POST` line where the subreddit is unknown. The title is not in
the prompt, as it is not in the paper's; it is kept in `columns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlhf.data.rows import Parsed, Row, after_colon

HUB_NAME, HUB_CONFIG = "openai/summarize_from_feedback", "comparisons"


def recognises(record: Mapping[str, Any]) -> bool:
    forms = ({"info", "summaries", "choice"}, {"post", "chosen", "rejected"})
    return any(form <= record.keys() for form in forms)


def to_row(record: Mapping[str, Any]) -> Parsed:
    return from_comparison(record) if "info" in record else from_pair(record)


def from_comparison(record: Mapping[str, Any]) -> Parsed:
    """OpenAI's own form: `choice` says which of the two summaries won."""
    info, summaries, choice = record["info"], record["summaries"], record["choice"]
    if not isinstance(info, Mapping) or not info.get("post"):
        return None, "a news article (CNN/DM), not a Reddit post"
    if not _is_pair(summaries) or choice not in (0, 1):
        return None, "not two summaries with a choice of 0 or 1"
    chosen, rejected = summaries[choice], summaries[1 - choice]
    rest = {k: v for k, v in record.items() if k not in ("info", "summaries", "choice")}
    policies = {"chosen_policy": chosen.get("policy"), "rejected_policy": rejected.get("policy")}
    row = Row(
        prompt=write_prompt(info["post"], info.get("subreddit")),
        chosen=after_colon(chosen["text"]),
        rejected=after_colon(rejected["text"]),
        columns={**info, **rest, **policies},
    )
    return row, ""


def _is_pair(summaries: Any) -> bool:
    return (
        isinstance(summaries, list)
        and len(summaries) == 2
        and all(
            isinstance(each, Mapping) and isinstance(each.get("text"), str) for each in summaries
        )
    )


def from_pair(record: Mapping[str, Any]) -> Parsed:
    """The flat form, one pair per line."""
    if any(not isinstance(record.get(name), str) for name in ("post", "chosen", "rejected")):
        return None, "`post`, `chosen` or `rejected` is not text"
    row = Row(
        prompt=write_prompt(record["post"], record.get("subreddit")),
        chosen=after_colon(record["chosen"]),
        rejected=after_colon(record["rejected"]),
        columns={k: v for k, v in record.items() if k not in ("chosen", "rejected")},
    )
    return row, ""


def write_prompt(post: str, subreddit: str | None = None) -> str:
    """The prompt a summary follows; empty for an empty post, so that it is dropped."""
    if not post.strip():
        return ""
    heading = f"POST Subreddit: r/{subreddit}" if subreddit else "POST"
    return f"{heading}\n{post.strip()}\nTL;DR:"
