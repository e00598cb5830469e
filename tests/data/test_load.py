import json
import typing

import pytest

from marlhf.data import DataConfig, DataError, Row, load, load_data, prompt_key
from marlhf.data.load import is_hub_name
from marlhf.data.rows import Source
from marlhf.data.sources import SOURCES

PAIR = {"prompt", "chosen", "rejected"}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def pairs(tmp_path):
    """40 rows of 20 prompts; every fifth row is no preference."""
    records = [
        {"prompt": f"p{i // 2}", "chosen": "a", "rejected": "a" if i % 5 == 0 else f"b{i}"}
        for i in range(40)
    ]
    return write(tmp_path / "pairs.jsonl", records)


def keys(rows):
    return {prompt_key(row) for row in rows}


def test_stages_share_the_evaluation_and_nothing_else(pairs):
    config = DataConfig(path=pairs, eval_size=0.2)
    stages = {
        "sft": load_data(config, "sft", needs={"prompt", "chosen"}),
        "reward": load_data(config, "reward", needs=PAIR),
        "ppo": load_data(config, "ppo", needs={"prompt"}),
    }
    seen = [keys(stage.train) for stage in stages.values()]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 16
    for stage in stages.values():
        assert keys(stage.eval) == keys(stages["ppo"].eval)
        assert not keys(stage.train) & keys(stage.eval)
    assert stages["reward"].counts.dropped.total() == 8
    assert all(row.chosen != row.rejected for row in stages["reward"].train)
    assert stages["ppo"].counts.kept == 40


def test_loading_twice_gives_the_same_rows_in_the_same_order(pairs):
    config = DataConfig(path=pairs)
    assert load_data(config, "ppo") == load_data(config, "ppo")


def test_without_parts_every_stage_has_all_rows(pairs):
    loaded = load_data(DataConfig(path=pairs, parts={}, eval_size=0), "sft")
    assert len(loaded.train) == 40
    assert loaded.eval == []


def test_a_limit_reads_only_the_first(pairs):
    loaded = load_data(DataConfig(path=pairs, parts={}, eval_size=0, limit=3), "ppo")
    assert [row.prompt for row in loaded.train] == ["p0", "p0", "p1"]
    assert loaded.counts.read == 3


def test_auto_recognises_published_forms(tmp_path):
    records = {
        "POST\nx\nTL;DR:": {"post": "x", "chosen": "a", "rejected": "b"},
        "Human: x\n\nAssistant:": {
            "chosen": "\n\nHuman: x\n\nAssistant: a",
            "rejected": "\n\nHuman: x\n\nAssistant: b",
        },
        "x": {"prompt": "x", "chosen": "a", "rejected": "b"},
    }
    for prompt, record in records.items():
        path = write(tmp_path / "a.jsonl", [record])
        loaded = load_data(DataConfig(path=path, parts={}), needs=PAIR)
        assert [row.prompt for row in loaded.train] == [prompt]


def test_columns_make_a_file_the_users_own(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"post": "x", "chosen": "a", "rejected": "b"}])
    loaded = load_data(DataConfig(path=path, parts={}, columns={"prompt": "post"}), needs=PAIR)
    assert loaded.train == [Row("x", "a", "b")]


def test_a_published_source_refuses_another_form(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "x"}])
    with pytest.raises(DataError, match=r"a.jsonl:1 is not in the form of `source: tldr`: it has"):
        load_data(DataConfig(source="tldr", path=path))


def test_records_of_another_form_are_counted(tmp_path):
    pair = {"post": "x", "chosen": "a", "rejected": "b"}
    path = write(tmp_path / "a.jsonl", [pair, {"prompt": "x"}])
    loaded = load_data(DataConfig(path=path, parts={}))
    assert dict(loaded.counts.dropped) == {"not in the form of `source: tldr`": 1}


def test_rows_for_evaluation_from_a_file_of_their_own(pairs, tmp_path):
    test = write(tmp_path / "test.jsonl", [{"prompt": p} for p in ("p3", "new", " p4  ")])
    loaded = load_data(DataConfig(path=pairs, parts={}, eval_path=test))
    assert [row.prompt for row in loaded.eval] == ["p3", "new", " p4  "]
    assert keys(loaded.train) == {f"p{i}" for i in range(20)} - {"p3", "p4"}
    stages = [load_data(DataConfig(path=pairs, eval_path=test), part) for part in ("sft", "ppo")]
    assert stages[0].eval == stages[1].eval == loaded.eval
    assert not keys(stages[0].train) & keys(stages[1].train)


def test_rows_for_evaluation_that_a_stage_cannot_use_are_left_out(pairs, tmp_path):
    records = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "e"}]
    test = write(tmp_path / "test.jsonl", records)
    loaded = load_data(DataConfig(path=pairs, parts={}, eval_path=test), needs=PAIR)
    assert keys(loaded.eval) == {"a"}


def test_rows_for_evaluation_from_another_split(monkeypatch):
    problem = "What is {}?"

    def read(name, split, config):
        assert (name, config) == ("openai/gsm8k", "main")
        for i in {"train": range(8), "test": range(7, 10)}[split]:
            yield {"question": problem.format(i), "answer": f"It is.\n#### {i}"}, f"{split}:{i}"

    monkeypatch.setattr(load, "read_hub", read)
    loaded = load_data(DataConfig(source="gsm8k", parts={}, eval_split="test"))
    assert [row.columns["answer"] for row in loaded.eval] == ["7", "8", "9"]
    assert [row.columns["answer"] for row in loaded.train] == [str(i) for i in range(7)]


def test_a_file_is_not_its_own_test_split(pairs):
    with pytest.raises(DataError, match="name it with `eval_path`"):
        load_data(DataConfig(path=pairs, parts={}, eval_split="test"))


@pytest.mark.parametrize("change", [{"chat": True}, {"eval_split": "test"}, {"eval_path": "x"}])
def test_tasks_that_make_their_rows_refuse_what_they_would_ignore(change):
    with pytest.raises(DataError, match="makes its own rows, as text and without splits"):
        DataConfig(source="sums", **change)


def test_text_prompts_in_a_chat(tmp_path):
    messages = [{"role": "system", "content": "Sing."}, {"role": "user", "content": "Bird?"}]
    records = [
        {"prompt": "Name a bird.\n", "chosen": " A robin. ", "rejected": " No."},
        {"prompt": messages, "chosen": "A wren.", "rejected": "No."},
        {"prompt": "  ", "chosen": "A wren.", "rejected": "No."},
    ]
    path = write(tmp_path / "birds.jsonl", records)
    loaded = load_data(DataConfig(path=path, parts={}, eval_size=0, chat=True), needs=PAIR)
    user = [{"role": "user", "content": "Name a bird."}]
    robin, wren, no = (
        [{"role": "assistant", "content": t}] for t in ("A robin.", "A wren.", "No.")
    )
    assert loaded.train == [Row(user, robin, no), Row(messages, wren, no)]
    assert "the prompt is empty" in str(loaded.counts)


def test_a_source_is_a_file_and_a_line(tmp_path, monkeypatch):
    """What a new file brings is a `Source`; the table in data/sources.py is all that knows it."""

    def to_row(record):
        return Row(record["riddle"], chosen=record["solution"]), ""

    riddles = Source("riddles", to_row=to_row, forms=("riddle solution",), hub_name="a/b")
    monkeypatch.setitem(load.PUBLISHED, "riddles", riddles)
    path = write(tmp_path / "a.jsonl", [{"riddle": "What has keys?", "solution": "A piano."}])
    loaded = load_data(DataConfig(path=path, parts={}, eval_size=0))
    assert loaded.train == [Row("What has keys?", "A piano.")]
    names = typing.get_type_hints(DataConfig)["source"]
    assert typing.get_args(names) == ("auto", "local", *SOURCES)


def test_a_file_wins_over_the_hub(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write(tmp_path / "owner" / "name" / "a.jsonl", [{"prompt": "x"}])
    monkeypatch.chdir(tmp_path)
    assert load_data(DataConfig(path="owner/name", parts={})).train == [Row("x")]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"source": "tldr"}, ("openai/summarize_from_feedback", "train", "comparisons")),
        ({"source": "hh", "split": "test"}, ("Dahoas/full-hh-rlhf", "test", None)),
        ({"source": "webgpt"}, ("openai/webgpt_comparisons", "train", None)),
        ({"path": "owner/name", "config": "c"}, ("owner/name", "train", "c")),
        (
            {"path": "openai/summarize_from_feedback"},
            ("openai/summarize_from_feedback", "train", "comparisons"),
        ),
    ],
)
def test_hub_names(monkeypatch, options, asked):
    calls = []
    monkeypatch.setattr(load, "read_hub", lambda *args: calls.append(args) or iter(()))
    with pytest.raises(DataError, match="is empty"):
        load_data(DataConfig(**options))
    assert calls == [asked]


@pytest.mark.parametrize(
    ("path", "hub"),
    [
        ("imdb", True),
        ("owner/na-me.v1", True),
        ("a/b/c", False),
        ("./x", False),
        ("/x/y", False),
        ("~/x", False),
        ("data/train.jsonl", False),
        ("x.csv.gz", False),
    ],
)
def test_what_can_be_a_hub_name(path, hub):
    assert is_hub_name(path) == hub


def test_a_missing_file_is_not_looked_up_on_the_hub(pairs):
    with pytest.raises(DataError, match=r"Did you mean .*pairs.jsonl"):
        load_data(DataConfig(path=pairs.replace("pairs", "pears")))


def test_a_file_that_would_not_be_read_is_refused():
    with pytest.raises(DataError, match=r"reads no file, but `path: mine.jsonl` is given"):
        DataConfig(source="toy", path="mine.jsonl")


def test_toy_rows_need_no_file():
    loaded = load_data(DataConfig(source="toy", limit=50), "ppo", needs={"prompt"})
    assert loaded.counts.read == 50
    assert loaded.train


def test_too_few_rows_say_which_share_a_stage_has(pairs):
    told = DataConfig(path=pairs).explain_shares()
    assert "sft 20%, reward 40%, ppo 40%" in told
    assert "set `data.parts: {}` to give every stage all rows" in told
    assert DataConfig(path=pairs, parts={}).explain_shares() == ""
    assert DataConfig().explain_shares() == ""  # rows that a trainer was given


def test_nothing_left_shows_why(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": ""}, {"prompt": 3}])
    with pytest.raises(DataError, match=r"No row of .*a.jsonl can be used: read 2 rows, kept 0"):
        load_data(DataConfig(path=path))


def test_too_few_rows_for_the_parts(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "only"}])
    with pytest.raises(DataError, match=r"The part `sft` is empty.*set `parts: {}`"):
        load_data(DataConfig(path=path), "sft")


def test_an_unknown_part(pairs):
    with pytest.raises(DataError, match=r"no part `pppo` among .* Did you mean `ppo`\?"):
        load_data(DataConfig(path=pairs), "pppo")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "No data is named"),
        ({"path": "x", "limit": 0}, "data.limit must be positive; got 0"),
        ({"path": "x", "max_prompt_tokens": 0}, "data.max_prompt_tokens must be positive; got 0"),
        ({"path": "x", "parts": {"a": 2.0}}, "must be a share"),
    ],
)
def test_settings_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        load_data(DataConfig(**options))


def test_rows_know_their_place_in_the_file(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": ""}\n{"prompt": "b"}\n')
    loaded = load_data(DataConfig(path=str(file), parts={}, eval_size=0))
    assert [row.position for row in loaded.train] == [f"{file}:1", f"{file}:4"]
    assert loaded.train == [Row("a"), Row("b")]
