"""Two answers with a preference: HH-RLHF, WebGPT and TL;DR; and news to summarise as TL;DR's posts.

HH-RLHF is read as Anthropic published it (`chosen` and `rejected` are whole dialogues) and as
`Dahoas/full-hh-rlhf` on the hub (`prompt` apart). The prompt keeps the published turns, without the
blank lines before the first:

    Human: What is DVT?

    Assistant:

WebGPT is read as on the hub (`openai/webgpt_comparisons`: question, answer_0, answer_1, score_0,
score_1, quotes) and in the form of two whole texts with two scores (text, score), under `## Human:`
and `## Assistant:`. Scores lie in [-1, 1]; the higher wins. Ties say nothing about preference and
are dropped. The prompt has the form above; the hub's quotes, the text an answer cites, are kept in
`columns`.

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

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
JOINED = "several assistant's turns in a row, joined into one reply"
DIVERGED = "the two dialogues differ before the last turn, so no two replies can be compared"
TIE = "a tie: both answers have the same score"


def hh_row(record: Mapping[str, Any]) -> Parsed:
    """A row from either form."""
    names = [name for name in ("prompt", "chosen", "rejected") if name in record]
    if not all_text(record, *names):
        return None, "`prompt`, `chosen` or `rejected` is not text"
    rest = without(record, *names)
    if "prompt" not in record:
        return _from_dialogues(record["chosen"], record["rejected"], rest)
    return _pair(record["prompt"].strip(), record["chosen"], record["rejected"], rest), ""


def _from_dialogues(chosen: str, rejected: str, columns: dict[str, Any]) -> Parsed:
    """Split two dialogues where the assistant first answers differently.

    About two in a thousand dialogues differ before their last turn. Where the
    assistant only spoke twice in a row, those turns are joined into one reply;
    where the person spoke again, the preference was not between two replies.
    """
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    end = chosen.rfind(ASSISTANT, 0, shared)
    if end < 0:
        return None, "the two dialogues share no assistant's turn"
    end += len(ASSISTANT)
    replies = chosen[end:], rejected[end:]
    remark = JOINED if any(ASSISTANT in reply for reply in replies) else ""
    first, second = (
        "\n\n".join(turn.strip() for turn in reply.split(ASSISTANT)) for reply in replies
    )
    if HUMAN in first or HUMAN in second:
        return None, DIVERGED
    return _pair(chosen[:end].strip(), first, second, columns), remark


def _is_dialogue(record: Mapping[str, Any]) -> bool:
    opening = record.get("prompt", record.get("chosen"))
    starts = isinstance(opening, str) and opening.lstrip().startswith("Human:")
    return starts and ASSISTANT in opening


def webgpt_row(record: Mapping[str, Any]) -> Parsed:
    quotes: dict[str, Any] = {}
    if "text" in record:
        texts, scores = record["text"], record["score"]
        if len(texts) != 2 or len(scores) != 2:
            return None, "not two texts with two scores"
        parts = [text.partition("## Assistant:") for text in texts]
        question, other = (part[0].removeprefix("## Human:").strip() for part in parts)
        if question != other or not all(part[1] for part in parts):
            return None, "the two texts do not answer one question"
        answers, rest = [part[2] for part in parts], without(record, "text", "score")
    else:
        asked, scores = record["question"], [record["score_0"], record["score_1"]]
        question: Any = asked.get("full_text") if isinstance(asked, Mapping) else asked
        answers = [record["answer_0"], record["answer_1"]]
        quotes = {"quotes": [record.get("quotes_0"), record.get("quotes_1")]}
        used = [f"{name}_{i}" for name in ("answer", "quotes", "score") for i in (0, 1)]
        rest = without(record, *used)
    if not all(isinstance(text, str) for text in (question, *answers)):
        return None, "the question or an answer is not text"
    if not all(isinstance(score, int | float) for score in scores):
        return None, "a score is not a number"
    if scores[0] == scores[1]:
        return None, TIE
    won = 0 if scores[0] > scores[1] else 1
    columns = {**rest, "question": question}
    for name, values in {**quotes, "score": scores}.items():
        columns |= {f"chosen_{name}": values[won], f"rejected_{name}": values[1 - won]}
    return _pair(write_question(question), answers[won], answers[1 - won], columns), ""


def _is_two_texts(record: Mapping[str, Any]) -> bool:
    """Whether the form is of whole texts, or that of the hub."""
    if "answer_0" in record:
        return True
    texts, scores = record["text"], record["score"]
    return (
        isinstance(texts, list)
        and isinstance(scores, list)
        and all(isinstance(each, str) and each.startswith("## Human:") for each in texts)
    )


def _pair(prompt: str, chosen: str, rejected: str, columns: dict[str, Any]) -> Row:
    return Row(prompt, after_colon(chosen), after_colon(rejected), columns)


def write_question(question: str) -> str:
    """The prompt an answer follows; empty for an empty question, so that it is dropped."""
    return f"Human: {question.strip()}\n\nAssistant:" if question.strip() else ""


def tldr_row(record: Mapping[str, Any]) -> Parsed:
    if "info" in record:
        return _from_comparison(record)
    if not all_text(record, "post", "chosen", "rejected"):
        return None, "`post`, `chosen` or `rejected` is not text"
    prompt = write_post(record["post"], record.get("subreddit"))
    rest = without(record, "chosen", "rejected")
    return _pair(prompt, record["chosen"], record["rejected"], rest), ""


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
    columns = {**info, **without(record, "info", "summaries", "choice"), **policies}
    prompt = write_post(info["post"], info.get("subreddit"))
    return _pair(prompt, chosen["text"], rejected["text"], columns), ""


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
    return Row(write_post(columns["article"]), chosen=chosen, columns=rest), ""


def write_post(post: str, subreddit: str | None = None) -> str:
    """The prompt a summary follows; empty for an empty post, so that it is dropped."""
    if not post.strip():
        return ""
    heading = f"POST Subreddit: r/{subreddit}" if subreddit else "POST"
    return f"{heading}\n{post.strip()}\nTL;DR:"


HH = Source(
    "hh",
    to_row=hh_row,
    forms=("chosen rejected",),
    fits=_is_dialogue,
    hub_name="Dahoas/full-hh-rlhf",
)
WEBGPT = Source(
    "webgpt",
    to_row=webgpt_row,
    forms=("question answer_0 answer_1 score_0 score_1", "text score"),
    fits=_is_two_texts,
    hub_name="openai/webgpt_comparisons",
)
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
