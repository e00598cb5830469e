import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marlhf.data import pad_left, pad_right, token_budget_batches

lists = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=6)


def test_left_and_right_by_hand():
    ids, mask = pad_left([[1, 2, 3], [4]], pad_id=0)
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    ids, mask = pad_right([[1, 2, 3], [4]], pad_id=0)
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    assert (ids.dtype, mask.dtype) == (torch.long, torch.bool)


@given(lists, st.integers(0, 5), st.sampled_from([pad_left, pad_right]))
def test_the_mask_finds_the_rows_again_even_where_pad_is_a_real_token(rows, pad_id, pad):
    ids, mask = pad(rows, pad_id)
    assert [line[m].tolist() for line, m in zip(ids, mask, strict=True)] == rows
    assert (ids[~mask] == pad_id).all()


def test_no_rows():
    assert pad_left([], 0)[0].shape == (0, 0)


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 100))
def test_batches_hold_every_row_once_within_the_budget(lengths, budget):
    batches = token_budget_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
    longest = [max(lengths[i] for i in batch) for batch in batches]
    assert longest == sorted(longest)
    assert batches == token_budget_batches(lengths, budget)


def test_batches_by_hand():
    # sorted: 2 (1), 2 (3), 3 (0), 9 (2); 3 x 3 = 9 fits 10, 4 x 9 does not
    assert token_budget_batches([3, 2, 9, 2], 10) == [[1, 3, 0], [2]]
    assert token_budget_batches([20], 10) == [[0]]
    assert token_budget_batches([], 10) == []


def test_a_budget_of_nothing():
    with pytest.raises(ValueError, match="holds no row"):
        token_budget_batches([1], 0)
