"""Programs are judged by their tests, and mended with what a programmer would see of them."""

import pytest

from conversations import play
from marlhf.data import Row
from marlhf.data.code import humaneval_row, mbpp_row, toy_rows
from marlhf.environments import find_environment
from marlhf.environments.programs import FixCode
from marlhf.models.tiny import tiny_tokenizer
from marlhf.reward.code import unit_tests

TINY = tiny_tokenizer()
MBPP, _ = mbpp_row(
    {
        "text": "Write a function to double a number.",
        "code": "def double(x):\n    return 2 * x",
        "test_list": ["assert double(1) == 2", "assert double(3) == 6"],
    }
)
HUMANEVAL, _ = humaneval_row(
    {
        "prompt": "def double(x):\n    ''' Twice x. '''\n",
        "canonical_solution": "    return 2 * x\n",
        "test": (
            "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(3) == 6\n"
        ),
        "entry_point": "double",
    }
)
CALLED = Row(
    "QUESTION:",
    columns={"tests": {"kind": "call", "name": "double", "inputs": [[3]], "outputs": [6]}},
)


def answers(row, *replies):
    environment = FixCode(seconds=2.0)
    environment.reset(row, 0)
    return [environment.step(reply) for reply in replies]


def test_a_program_is_mended_and_rewards_sum_to_the_last_score():
    replies = ["def double(x): return 2", "def double(x): return x + ", MBPP.chosen]
    first, second, third = answers(MBPP, *replies)
    assert first.messages[0]["content"].startswith(
        "1 of 2 tests pass. These fail:\nassert double(3) == 6\n"
    )
    assert "does not compile" in second.messages[0]["content"]
    assert "SyntaxError" in second.messages[0]["content"]
    assert (first.success, second.success, third.success) == (False, False, True)
    assert third.done
    scores = unit_tests(replies, [MBPP.columns["tests"]] * 3)
    gained = [step.reward for step in (first, second, third)]
    sums = [sum(gained[: n + 1]) for n in range(3)]
    assert sums == pytest.approx(scores)
    assert scores == [pytest.approx(0.35), -1.0, pytest.approx(1.0)]


@pytest.mark.parametrize("row", [MBPP, HUMANEVAL, CALLED], ids=["mbpp", "humaneval", "apps"])
def test_every_kind_of_tests_says_what_fails_and_no_more(row):
    wrong, crash, slow, right = answers(
        row,
        "def double(x): return 1",
        "def double(x): return 1 // 0",
        "def double(x):\n    while True: pass",
        "def double(x): return 2 * x",
    )
    assert "tests pass. These fail:" in wrong.messages[0]["content"]
    assert "ZeroDivisionError" in crash.messages[0]["content"]
    assert "too long" in slow.messages[0]["content"]
    assert right.done
    if row is not MBPP:  # whose prompt shows the answers
        texts = [step.messages[0]["content"] for step in (wrong, crash, slow)]
        assert not any("6" in text for text in texts)


def test_programs_that_read_are_shown_their_input():
    row = toy_rows(1)[0]
    [step] = answers(row, "print('?')")
    assert "the input\n2\n" in step.messages[0]["content"]
    assert row.columns["tests"]["outputs"][0] not in step.messages[0]["content"].split()


def test_a_batch_is_judged_with_hostile_programs_among_it():
    programs = ["", "```python", "\0", "x" * 10_000, "def double(x): return 2 * x", "(" * 500]
    programs += ["import os; os._exit(0)", "raise SystemExit", "print('x' * 10**8)", "é\ufffd"]

    def model(row, turn, ids):
        return programs[row] + TINY.eos_token

    make = find_environment("fix-code", seconds=2.0)
    records = play(make, model, TINY, [MBPP] * 10, max_turns=1, episode_tokens=30_000).records
    assert [record.success for record in records] == [n == 4 for n in range(10)]
    assert {record.reason for record in records} == {"done", "max_turns"}


def test_rows_without_tests_are_refused_with_a_sentence():
    [record] = play(find_environment("fix-code"), lambda *_: "x", TINY).records
    assert "needs the column `tests`" in record.reason
