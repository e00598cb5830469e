"""The data sets in the form their authors published them in."""

from marlhf.data import Row, gsm8k, preferences
from marlhf.data.sources import CNN_DAILYMAIL, GSM8K, HH, SOURCES, TLDR, WEBGPT

COMPARISON = {
    "info": {"id": "t3", "post": " I lost my cat.\n", "title": "Cat", "subreddit": "cats"},
    "summaries": [
        {"text": " Cat gone.", "policy": "ref", "note": "ok"},
        {"text": "I lost my cat", "policy": "sup", "note": None},
    ],
    "choice": 1,
    "worker": "w",
    "extra": {"confidence": 9},
}


def test_tldr_comparison():
    row, remark = TLDR.to_row(COMPARISON)
    assert remark == ""
    assert row == Row(
        prompt="POST Subreddit: r/cats\nI lost my cat.\nTL;DR:",
        chosen=" I lost my cat",
        rejected=" Cat gone.",
        columns=COMPARISON["info"]
        | {"worker": "w", "extra": {"confidence": 9}}
        | {"chosen_policy": "sup", "rejected_policy": "ref"},
    )


def test_tldr_news_and_broken_comparisons_are_skipped():
    news = COMPARISON | {"info": {"id": "x", "post": None, "article": "News."}}
    assert TLDR.to_row(news) == (None, "a news article (CNN/DM), not a Reddit post")
    for broken in ({"choice": 2}, {"choice": None}, {"summaries": [{"text": "one"}]}):
        assert TLDR.to_row(COMPARISON | broken)[1] == "not two summaries with a choice of 0 or 1"


def test_tldr_pairs_with_and_without_subreddit():
    pair = {"post": "Long.", "chosen": "Short.", "rejected": " No. "}
    row, _ = TLDR.to_row(pair)
    assert row == Row("POST\nLong.\nTL;DR:", " Short.", " No.", {"post": "Long."})
    row, _ = TLDR.to_row(pair | {"subreddit": "aww", "title": "T"})
    assert row is not None
    assert row.prompt == "POST Subreddit: r/aww\nLong.\nTL;DR:"
    assert row.columns["title"] == "T"
    assert TLDR.to_row(pair | {"post": 3})[1] == "`post`, `chosen` or `rejected` is not text"
    assert preferences.write_post(" ") == ""


def hh_row(chosen: str, rejected: str, start="\n\nHuman: hi\n\nAssistant:"):
    return HH.to_row({"chosen": start + chosen, "rejected": start + rejected})


def test_hh_prompt_is_what_both_dialogues_share():
    assert hh_row(" Hello.", "  Hello, you. ") == (
        Row("Human: hi\n\nAssistant:", " Hello.", " Hello, you."),
        "",
    )


def test_hh_last_shared_turn_counts():
    start = "\n\nHuman: hi\n\nAssistant: yes\n\nHuman: and?\n\nAssistant:"
    row, _ = hh_row(" A", " B", start)
    assert row == Row(start.strip(), " A", " B")


def test_hh_identical_dialogues_give_identical_replies():
    assert hh_row(" same", " same")[0] == Row("Human: hi\n\nAssistant:", " same", " same")


def test_hh_two_assistants_turns_are_one_reply():
    row, remark = hh_row(" Wait.\n\nAssistant: Here.", " No.")
    assert row == Row("Human: hi\n\nAssistant:", " Wait.\n\nHere.", " No.")
    assert remark == preferences.JOINED


def test_hh_dialogues_that_part_early_are_skipped():
    assert hh_row(" A\n\nHuman: more\n\nAssistant: C", " B") == (None, preferences.DIVERGED)
    assert hh_row(" A\n\nAssistant: Human: what?", " B") == (None, preferences.DIVERGED)
    nothing = HH.to_row({"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"})
    assert nothing == (None, "the two dialogues share no assistant's turn")


def test_hh_from_the_hub():
    record = {
        "prompt": "\n\nHuman: hi\n\nAssistant:",
        "response": " A",
        "chosen": " A",
        "rejected": "B",
    }
    assert HH.recognise(record)
    assert HH.to_row(record) == (
        Row("Human: hi\n\nAssistant:", " A", " B", {"response": " A"}),
        "",
    )
    assert HH.to_row(record | {"chosen": None})[0] is None


def answers(score_0: float, score_1: float):
    return {
        "question": {"dataset": "eli5", "id": "1", "full_text": " Why?\n"},
        "quotes_0": {"title": ["a"], "extract": ["quote a"]},
        "quotes_1": {"title": ["b"], "extract": ["quote b"]},
        "answer_0": "First [1].",
        "answer_1": " Second.",
        "tokens_0": {"prefix": [], "completion": []},
        "score_0": score_0,
        "score_1": score_1,
    }


def test_webgpt_from_the_hub():
    row, _ = WEBGPT.to_row(answers(-0.5, 0.5))
    assert row is not None
    assert (row.prompt, row.chosen, row.rejected) == (
        "Human: Why?\n\nAssistant:",
        " Second.",
        " First [1].",
    )
    assert row.columns["chosen_quotes"] == {"title": ["b"], "extract": ["quote b"]}
    assert row.columns["rejected_score"] == -0.5
    assert "tokens_0" in row.columns


def test_webgpt_ties_and_broken_records_are_skipped():
    assert WEBGPT.to_row(answers(0.0, 0.0)) == (None, preferences.TIE)
    assert WEBGPT.to_row(answers(0, 1) | {"answer_0": None})[1].endswith("is not text")
    assert WEBGPT.to_row(answers(0, 1) | {"score_0": None})[1] == "a score is not a number"


def test_webgpt_whole_texts():
    texts = ["## Human:\nWhy?\n\n\n\n## Assistant:\n A", "## Human:\nWhy?\n\n## Assistant:\nB"]
    record = {"text": texts, "score": [0.5, 1.5]}
    assert WEBGPT.recognise(record)
    row, _ = WEBGPT.to_row(record)
    assert row is not None
    assert (row.prompt, row.chosen, row.rejected) == ("Human: Why?\n\nAssistant:", " B", " A")
    other = {"text": [texts[0], "## Human:\nHow?\n\n## Assistant:\nB"], "score": [0, 1]}
    assert WEBGPT.to_row(other) == (None, "the two texts do not answer one question")
    assert WEBGPT.to_row({"text": texts[:1], "score": [1]})[0] is None


def test_each_form_is_recognised_by_its_own_source_alone():
    records = {
        "tldr": COMPARISON,
        "hh": {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a"},
        "webgpt": answers(0, 1),
        None: {"prompt": "Human: a", "chosen": "b", "rejected": "c"},
    }
    published = [each for each in SOURCES.values() if each.generate is None]
    for name, record in records.items():
        best = max(published, key=lambda each: each.recognise(record))
        assert (best.name if best.recognise(record) else None) == name


def test_news_has_the_prompt_of_a_post_and_its_highlights_as_the_summary():
    record = {"article": " (CNN) A cat. ", "highlights": "Cat found.", "id": "7"}
    assert CNN_DAILYMAIL.recognise(record)
    row, remark = CNN_DAILYMAIL.to_row(record)
    assert (row, remark) == (
        Row("POST\n(CNN) A cat.\nTL;DR:", " Cat found.", None, {"id": "7"}),
        "",
    )
    assert CNN_DAILYMAIL.to_row(record | {"article": 3})[1] == "`article` is not text"


def test_of_openais_comparisons_the_news_are_taken_and_the_posts_left():
    news = COMPARISON | {"info": {"id": "x", "post": None, "article": "News."}}
    row, _ = CNN_DAILYMAIL.to_row(news)
    assert row is not None
    assert row.prompt == "POST\nNews.\nTL;DR:"
    assert CNN_DAILYMAIL.to_row(COMPARISON)[1] == "a Reddit post, not a news article"


def test_gsm8k_solution_without_the_calculator():
    record = {
        "question": "Tom has 48 figs and sells half. How many are left? ",
        "answer": "He sells 48/2 = <<48/2=24>>24.\nSo 48-24 = <<48-24=24>>24 < 48.\n#### 1,024",
    }
    assert GSM8K.recognise(record)
    row, remark = GSM8K.to_row(record)
    assert remark == ""
    assert row == Row(
        "Tom has 48 figs and sells half. How many are left?\n"
        "Think step by step. End with the answer as a number after ####.\n",
        chosen="He sells 48/2 = 24.\nSo 48-24 = 24 < 48.\n#### 1,024",
        columns={"answer": "1,024"},
    )


def test_gsm8k_other_questions_are_not_taken_for_it():
    assert not GSM8K.recognise({"question": "Why?", "answer": "Because."})
    assert GSM8K.to_row({"question": 3, "answer": "#### 3"})[0] is None
    assert gsm8k.write_prompt(" ") == ""
