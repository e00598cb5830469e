import pytest

from marlhf.data import DataError, Row, rows_from_records
from marlhf.data.local import check_columns, to_row

PAIR = {"prompt", "chosen", "rejected"}


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def test_text_is_taken_as_written():
    record = {"prompt": "Q:", "chosen": "  a ", "rejected": "b", "id": 7}
    assert to_row(record) == (Row("Q:", "  a ", "b", {"id": 7}), "")


def test_only_a_prompt():
    assert to_row({"prompt": "Q"}) == (Row("Q"), "")


def test_columns_are_renamed():
    record = {"question": "Q", "best": "a", "gold": "g"}
    row, _ = to_row(record, {"prompt": "question", "chosen": "best"})
    assert row == Row("Q", "a", None, {"gold": "g"})


def test_completion_is_another_name_for_chosen():
    assert to_row({"prompt": "Q", "completion": "a"})[0] == Row("Q", "a")


def test_chat_messages():
    record = {"prompt": [user("Q")], "chosen": [says("a")], "rejected": "b"}
    assert to_row(record)[0] == Row([user("Q")], [says("a")], [says("b")])


def test_responses_never_repeat_the_prompt():
    whole = {"prompt": [user("Q")], "chosen": [user("Q"), says("a")], "rejected": [says("b")]}
    assert to_row(whole)[0] == Row([user("Q")], [says("a")], [says("b")])


def test_a_text_prompt_beside_whole_dialogues():
    record = {"prompt": "Q", "chosen": [user("Q"), says("a")], "rejected": [user("Q"), says("b")]}
    assert to_row(record)[0] == Row([user("Q")], [says("a")], [says("b")])


def test_a_text_prompt_with_one_message_as_response():
    assert to_row({"prompt": "Q", "chosen": [says("a")]})[0] == Row("Q", "a")


def test_implicit_prompt():
    record = {
        "chosen": [user("1"), says("2"), user("3"), says("a")],
        "rejected": [user("1"), says("2"), user("3"), says("b")],
    }
    assert to_row(record)[0] == Row([user("1"), says("2"), user("3")], [says("a")], [says("b")])
    assert to_row({"chosen": [user("1"), says("a")]})[0] == Row([user("1")], [says("a")])


def test_messages_end_with_the_response():
    turns = [user("1"), says("2"), user("3"), says("4")]
    assert to_row({"messages": turns})[0] == Row(turns[:3], [says("4")])
    assert to_row({"messages": [user("1")]})[0] == Row([user("1")])


def test_message_keys_that_parquet_filled_with_none_are_left_out():
    assert to_row({"prompt": [user("Q") | {"tool_calls": None}]})[0] == Row([user("Q")])


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": None}, "`prompt` is missing"),
        ({"prompt": 3}, "`prompt` is neither text nor messages"),
        ({"prompt": []}, "`prompt` is neither text nor messages"),
        ({"prompt": [{"role": "user"}]}, "`prompt` is neither text nor messages"),
        ({"prompt": ["hi"]}, "`prompt` is neither text nor messages"),
        ({"prompt": "Q", "chosen": 3}, "`chosen` is neither text nor messages"),
        ({"prompt": [user("Q")], "chosen": [says("a"), says("b")]}, "`chosen` is not one assist"),
        ({"prompt": [user("Q")], "chosen": [user("a")]}, "`chosen` is not one assistant's turn"),
        ({"messages": "hi"}, "`messages` is not a list of messages"),
        ({"messages": [says("a")]}, "`messages` begins with the only assistant's turn"),
        ({"chosen": [user("1"), says("a")], "rejected": "b"}, "`rejected` is not messages"),
        (
            {"chosen": [user("1"), says("a")], "rejected": [user("2"), says("b")]},
            "share no first message",
        ),
        (
            {
                "chosen": [user("1"), says("a"), user("x"), says("y")],
                "rejected": [user("1"), says("b")],
            },
            "differ before their last message",
        ),
        (
            {"chosen": [user("1"), user("a")], "rejected": [user("1"), says("b")]},
            "does not end with an assistant's turn",
        ),
    ],
)
def test_rows_that_are_dropped_say_why(record, reason):
    row, remark = to_row(record)
    assert row is None
    assert reason in remark


def refused(record, columns=None, needs=PAIR) -> str:
    with pytest.raises(DataError) as caught:
        check_columns(record, "data.csv:1", columns or {}, needs)
    return str(caught.value)


def test_a_misspelt_column():
    message = refused({"Promt": "Q", "chosen": "a", "rejected": "b"})
    assert message.startswith(
        "data.csv has no column `prompt`. It has `Promt`, `chosen`, `rejected`. "
        "Did you mean `Promt`?"
    )
    assert "`columns: {prompt: its name}`" in message


def test_a_missing_column_only_matters_to_those_who_need_it():
    assert "no column `rejected`" in refused({"prompt": "Q", "chosen": "a"})
    check_columns({"prompt": "Q", "chosen": "a"}, "data.csv:1", {}, {"prompt", "chosen"})
    check_columns({"messages": [user("Q")]}, "data.csv:1", {}, {"prompt", "chosen"})
    check_columns({"chosen": [user("Q")], "rejected": []}, "data.csv:1", {}, PAIR)


def test_a_mapping_to_a_column_that_is_not_there():
    message = refused({"question": "Q"}, {"prompt": "qestion"}, {"prompt"})
    assert "data.csv has no column `qestion`, which `columns` names for `prompt`" in message
    assert "Did you mean `question`?" in message


def test_a_mapping_of_a_name_we_do_not_use():
    message = refused({"question": "Q"}, {"promt": "question"})
    assert "`columns` maps `promt`" in message
    assert "Did you mean `prompt`?" in message


def test_records_in_memory():
    records = [
        {"prompt": "1", "chosen": "a", "rejected": "b"},
        {"prompt": "2", "chosen": "a", "rejected": "a"},
        {"prompt": " ", "chosen": "a", "rejected": "b"},
    ]
    rows, counts = rows_from_records(records, needs=PAIR, name="train_dataset")
    assert rows == [Row("1", "a", "b")]
    assert counts.dropped.total() == 2
    assert counts.examples["the prompt is empty"] == ["train_dataset:3"]
    with pytest.raises(DataError, match="No row of train_dataset can be used"):
        rows_from_records(records[1:], needs=PAIR, name="train_dataset")
    with pytest.raises(DataError, match="train_dataset has no column `prompt`"):
        rows_from_records([{"text": "x"}], name="train_dataset")


def test_text_parts_of_a_message_are_read():
    parts = [{"type": "text", "text": "Why "}, {"type": "text", "text": "not?", "image": None}]
    row, _ = to_row({"prompt": [{"role": "user", "content": parts}], "chosen": [says("So.")]})
    assert row == Row([user("Why not?")], [says("So.")])
    _, fault = to_row({"prompt": [{"role": "user", "content": [{"type": "image"}]}]})
    assert "neither text nor messages" in fault


def test_unknown_roles_are_refused():
    records = [{"prompt": [{"role": "bot", "content": "hi"}]}, {"prompt": [user("hi")]}]
    rows, counts = rows_from_records(records)
    assert [row.prompt for row in rows] == [[user("hi")]]
    assert "the role `bot`, which is not one of system, developer, user" in str(counts)


def test_missing_columns_are_named_all_at_once():
    with pytest.raises(DataError) as caught:
        check_columns({"question": "a", "best": "b"}, "f.jsonl:1", {"prompt": "quest"}, PAIR)
    message = str(caught.value)
    assert "has no column `quest`, which `columns` names for `prompt`" in message
    assert "f.jsonl has no columns `chosen`, `rejected`. It has `question`, `best`." in message
    assert "`columns: {chosen: its name, rejected: its name}`" in message
