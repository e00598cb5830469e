"""The interpreter: state within an episode, limits, and nothing outside the sandbox."""

import json

import pytest

from conversations import chatml_tokenizer, play
from marlhf.data import Row
from marlhf.environments import ChatTokens, ConversationError, Conversations, find_environment
from marlhf.environments.programs import Python, shorten

TOKENIZER = chatml_tokenizer()
QUESTION = Row("What is 6 * 7?", columns={"answer": "42"})


@pytest.fixture
def session():
    environment = Python(seconds=2.0, output_chars=400)
    environment.reset(QUESTION, 0)
    return environment.python


def test_state_is_kept_and_only_new_output_is_shown(session):
    assert session("x = 6\nprint('first')") == "first"
    assert session("def f(n):\n    return n * x\nf(7)") == "42"
    assert session("x += 1") == "(no output)"
    assert session("print(x)\nx, f(1)") == "7\n(7, 7)"
    fresh = Python()
    fresh.reset(QUESTION, 0)
    assert "NameError" in fresh.python("x")


def test_errors_are_shown_and_what_ran_before_them_is_kept(session):
    shown = session("y = 1\nz = 1 // 0")
    assert 'File "cell", line 2' in shown
    assert "ZeroDivisionError" in shown
    assert "run_all" not in shown
    assert session("y") == "1"
    assert "SyntaxError" in session("print(")
    assert "SystemExit" in session("import sys; sys.exit(3)")
    assert session("y") == "1"


def test_the_same_cells_give_the_same_state(session):
    drawn = session("import random\na = [random.random() for _ in range(3)]\na")
    assert session("a") == drawn
    other = Python()
    other.reset(QUESTION, 1)
    assert other.python("import random\n[random.random() for _ in range(3)]")[:9] == drawn[:9]
    assert session("list({'a', 'b', 'c', 'd'})") == session("list({'a', 'b', 'c', 'd'})")


def test_what_exceeds_a_limit_is_cut_or_forgotten(session):
    assert session("kept = 1") == "(no output)"
    assert "time limit of 2 seconds" in session("gone = 1\nwhile True: pass")
    assert "NameError" in session("gone")
    assert len(session("print('x' * 5000)")) < 420
    assert "limit" in session("while True: print('x' * 1000)")
    assert "MemoryError" in session("'x' * 10**10")
    assert session("kept") == "1"
    assert shorten("abc", 6) == "abc"


def test_cells_cannot_leave_the_sandbox(session, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("treasure")
    for cell in (
        f"open({str(secret)!r}).read()",
        "import socket; socket.socket()",
        "import os; os.fork()",
    ):
        assert "Error" in session(cell)
        assert "treasure" not in session(cell)


@pytest.mark.parametrize("name", ["python", "fix-code"])
def test_a_machine_without_a_sandbox_is_refused_before_the_first_step(name, monkeypatch):
    monkeypatch.setattr("marlhf.reward.sandbox.pool.sys.platform", "plan9")
    row = Row("6 * 7?", columns={"tests": {"kind": "stdin", "inputs": ["1"], "outputs": ["1"]}})
    make = find_environment(name, memory_mb=99)  # whose sandboxes do not run yet
    with pytest.raises(ConversationError, match="needs Linux, and this is plan9"):
        Conversations(make, ChatTokens(TOKENIZER), max_turns=2, episode_tokens=4000).check(row)


def test_the_reward_is_for_the_right_number_at_the_end():
    call = json.dumps({"name": "python", "arguments": {"code": "print(6 * 7)"}})

    def model(row, turn, ids):
        if turn == 0:
            return f"<tool_call>\n{call}\n</tool_call>{TOKENIZER.eos_token}"
        return f"#### {['42', '41'][row % 2]}{TOKENIZER.eos_token}"

    rows = [QUESTION, QUESTION, Row("What is 6 * 7?")]
    records = play(find_environment("python"), model, TOKENIZER, rows).records
    assert [record.turns[-1].reward for record in records] == [1.0, 0.0, 0.0]
    assert [record.success for record in records] == [True, False, None]
    assert [record.messages[2]["content"] for record in records] == ["42"] * 3
    [cut] = play(find_environment("python"), model, TOKENIZER, rows[:1], max_turns=1).records
    assert (cut.reason, cut.success, cut.tool_calls) == ("max_turns", False, 1)


def test_an_instruction_follows_the_question():
    [message] = Python(instruction="Use the tool.").reset(Row("2 + 2?"), seed=0)
    assert message == {"role": "user", "content": "2 + 2?\nUse the tool."}
