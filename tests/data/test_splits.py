import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlhf.data import DataError, Row, held_out, prompt_key, split_rows

PARTS = {"sft": 0.2, "reward": 0.4, "ppo": 0.4}

# many rows per prompt, as in real comparisons
prompts = st.lists(st.integers(0, 30).map(str), max_size=120)


def rows_of(names):
    return [Row(name, columns={"i": i}) for i, name in enumerate(names)]


def keys(rows):
    return {prompt_key(row) for row in rows}


@given(prompts, st.integers(0, 5))
def test_every_row_is_in_one_part_and_no_prompt_in_two(names, seed):
    parts = split_rows(rows_of(names), PARTS, seed)
    assert list(parts) == ["sft", "reward", "ppo"]
    together = [row.columns["i"] for part in parts.values() for row in part]
    assert sorted(together) == list(range(len(names)))
    assert sum(len(keys(part)) for part in parts.values()) == len(set(names))


@given(prompts, st.integers(0, 5))
def test_parts_are_as_large_as_whole_prompts_allow(names, seed):
    parts = split_rows(rows_of(names), PARTS, seed)
    largest = max(Counter(names).values(), default=0)
    for name, part in parts.items():
        assert abs(len(part) - PARTS[name] * len(names)) <= largest + 1e-6


@given(prompts, st.randoms(use_true_random=False))
def test_the_order_of_rows_decides_nothing(names, random):
    rows = rows_of(names)
    shuffled = random.sample(rows, len(rows))
    before, after = split_rows(rows, PARTS, 0), split_rows(shuffled, PARTS, 0)
    assert {name: keys(part) for name, part in before.items()} == {
        name: keys(part) for name, part in after.items()
    }
    assert keys(held_out(rows, 0.3)[1]) == keys(held_out(shuffled, 0.3)[1])


@given(prompts, st.floats(0, 0.99), st.integers(0, 5))
def test_held_out_prompts_are_not_trained_on(names, share, seed):
    train, evaluation = held_out(rows_of(names), share, seed)
    assert not keys(train) & keys(evaluation)
    assert len(train) + len(evaluation) == len(names)
    assert bool(train) == bool(names)
    if share > 0 and len(set(names)) > 1:
        assert evaluation


def test_rows_keep_their_order():
    parts = split_rows(rows_of(str(i) for i in range(50)), PARTS, 3)
    for part in parts.values():
        order = [row.columns["i"] for row in part]
        assert order == sorted(order)
    assert [len(part) for part in parts.values()] == [10, 20, 20]


def test_seeds_give_different_parts():
    rows = rows_of(str(i) for i in range(50))
    assert keys(split_rows(rows, PARTS, 0)["sft"]) != keys(split_rows(rows, PARTS, 1)["sft"])


def test_holding_out_and_parting_are_independent():
    """Were both to sort by one hash, what is held out would always border on one part."""
    rows = rows_of(str(i) for i in range(400))
    aside, sft = keys(held_out(rows, 0.2)[1]), keys(split_rows(rows, PARTS)["sft"])
    assert 4 < len(aside & sft) < 40  # 80 of 400 twice over: 16 by chance


def test_fractions_below_one_leave_rows_over():
    parts = split_rows(rows_of(str(i) for i in range(100)), {"a": 0.1, "b": 0.2})
    assert [len(part) for part in parts.values()] == [10, 20]


def test_white_space_does_not_break_a_prompt_apart():
    rows = [Row("a  b"), Row(" a b\n"), Row("c")]
    for seed in range(10):
        parts = split_rows(rows, {"x": 0.5, "y": 0.5}, seed)
        assert sum(len(keys(part)) for part in parts.values()) == 2


def test_the_split_is_the_same_in_another_process_and_for_ever():
    program = (
        "from marlhf.data import Row, split_rows;"
        "parts = split_rows([Row(f'p{i}') for i in range(10)], seed=7);"
        "print([row.prompt for row in parts['reward']])"
    )
    expected = (
        "['p0', 'p1', 'p2', 'p4']"  # written down once; a change would mix up everyone's parts
    )
    for hash_seed in ("0", "1"):
        result = subprocess.run(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == expected


def test_a_number_of_rows_can_be_held_out():
    train, evaluation = held_out(rows_of(str(i) for i in range(20)), 5)
    assert (len(train), len(evaluation)) == (15, 5)
    assert held_out(rows_of("ab"), 0) == (rows_of("ab"), [])


def test_half_a_surrogate_pair_does_not_stop_a_split():
    assert split_rows([Row("\ud83d")], {"a": 1.0})["a"] == [Row("\ud83d")]


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({"a": 0.7, "b": 0.7}, "add up to 1.4; make it 1 or less"),
        ({"a": 0.0}, r"must be a share in \(0, 1\]"),
        ({"a": -0.5, "b": 0.5}, r"these are not: {'a': -0.5}"),
    ],
)
def test_fractions_that_cannot_be(fractions, message):
    with pytest.raises(DataError, match=message):
        split_rows([], fractions)


def test_sizes_that_cannot_be_held_out():
    for size, message in ((1.0, "not in"), (-0.1, "not in"), (-1, "cannot"), (3, "cannot")):
        with pytest.raises(DataError, match=message):
            held_out(rows_of("abc"), size)


def test_the_order_in_which_parts_are_written_changes_nothing():
    rows = [Row(f"p{i}") for i in range(50)]
    one = split_rows(rows, {"sft": 0.2, "reward": 0.4, "ppo": 0.4})
    other = split_rows(rows, {"ppo": 0.4, "sft": 0.2, "reward": 0.4})
    assert one == other
