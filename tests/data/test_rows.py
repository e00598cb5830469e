from marlhf.data.rows import Counts, Row, after_colon, prompt_fault, prompt_key, response_fault


def test_white_space_does_not_make_another_prompt():
    assert prompt_key(Row("  a\n\n b ")) == prompt_key(Row("a b"))
    assert prompt_key(Row("a b")) != prompt_key(Row("A b"))


def test_messages_and_text_have_different_keys():
    chat = Row([{"role": "user", "content": " hi  there"}])
    assert prompt_key(chat) == prompt_key(Row([{"role": "user", "content": "hi there"}]))
    assert prompt_key(chat) != prompt_key(Row([{"role": "system", "content": "hi there"}]))
    assert prompt_key(chat) != prompt_key(Row("hi there"))


def test_a_response_gets_one_space_in_front():
    assert after_colon("  yes \n") == " yes"
    assert after_colon(" \n") == ""


def test_prompt_faults():
    assert prompt_fault(Row("hi")) is None
    assert prompt_fault(Row(" \n")) == "the prompt is empty"
    assert prompt_fault(Row([])) == "the prompt is empty"
    assert "nothing to answer" in str(prompt_fault(Row([{"role": "assistant", "content": "x"}])))
    assert "lone surrogate" in str(prompt_fault(Row("half \ud83d")))


def test_response_faults_depend_on_what_the_stage_needs():
    same = Row("p", " yes", "yes ")
    assert response_fault(same, {"prompt"}) is None
    assert response_fault(same, {"prompt", "chosen"}) is None
    assert "`chosen` equals `rejected`" in str(response_fault(same, {"chosen", "rejected"}))
    assert response_fault(Row("p"), {"chosen"}) == "`chosen` is missing"
    assert response_fault(Row("p", "a", " "), {"chosen", "rejected"}) == "`rejected` is empty"
    assert "lone surrogate" in str(response_fault(Row("p", "\udc00"), {"chosen"}))


def test_counts_read_like_a_report():
    counts = Counts(read=10)
    for line in range(1, 6):
        counts.drop("the prompt is empty", f"a.jsonl:{line}")
    counts.note("two turns joined", "a.jsonl:9")
    assert counts.kept == 5
    assert str(counts) == (
        "read 10 rows, kept 5\n"
        "  dropped 5: the prompt is empty (a.jsonl:1, a.jsonl:2, a.jsonl:3, ...)\n"
        "  repaired 1: two turns joined (a.jsonl:9)"
    )
