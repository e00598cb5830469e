"""Answers that are numbers."""

import pytest

from marlhf.reward.gsm8k import final_number, right_answer


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("She sold 48 + 24 = 72 clips.\n#### 72", "72"),
        ("#### 3\nNo, wait.\n#### $1,700.50 a year", "1700.50"),
        ("The answer is \\boxed{-5}.", "-5"),
        ("It costs 3 dollars, 4 cents.", "4"),
        ("He has 12 of them ####", "12"),
        ("#### two, not 3", "3"),
        ("None at all.", None),
        ("", None),
    ],
)
def test_final_numbers(response, number):
    assert final_number(response) == number


def test_numbers_are_compared_by_value():
    texts = ["#### 18.0", "#### 1,000", "#### 7", "#### 7", "no number", "#### 5"]
    answers = ["18", "1000", 7, "-7", "3", ""]
    assert right_answer(texts, answers) == [1, 1, 1, 0, 0, 0]


def test_answers_in_a_chat():
    assert right_answer([[{"role": "assistant", "content": "#### 4"}]], ["4"]) == [1.0]


@pytest.mark.parametrize("piece", ["99", "1,", "#", "-"])
def test_a_response_that_is_slow_to_read_is_wrong(piece):
    assert right_answer([piece * 100_000], ["9"]) == [0.0]
