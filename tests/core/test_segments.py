import math

import pytest
import torch
from cases import batches, numbers, seeds
from hypothesis import given
from hypothesis import strategies as st
from reference import groups, sigma_weights

from marlhf.core import Segments


def make(ids: list[list[int]], mask: list[list[int]] | None = None) -> Segments:
    tensor = torch.tensor(ids)
    return Segments(
        tensor, torch.ones_like(tensor).bool() if mask is None else torch.tensor(mask).bool()
    )


def test_sums_means_ends_by_hand():
    segments = make([[0, 0, 1, 1, 1]], [[1, 1, 1, 1, 0]])
    x = torch.tensor([[1.0, 2.0, 3.0, 5.0, 100.0]])
    assert segments.sum(x).tolist() == [[3, 8, 0, 0, 0]]
    assert segments.mean(x).tolist() == [[1.5, 4, 0, 0, 0]]
    assert segments.first(x).tolist() == [[1, 3, 0, 0, 0]]
    assert segments.last(x).tolist() == [[2, 5, 0, 0, 0]]
    assert segments.lengths.tolist() == [[2, 2, 0, 0, 0]]
    assert segments.macro_mask.tolist() == [[True, True, False, False, False]]
    assert segments.spread(segments.sum(x)).tolist() == [[3, 3, 8, 8, 0]]


def test_position_weights_rise_to_the_last_token():
    # 1/3, 1/2, 1 over their sum 11/6: 2/11, 3/11, 6/11
    weights = [make([[0, 0, 0]]).weighted(x[None], "position")[0, 0] for x in torch.eye(3)]
    torch.testing.assert_close(torch.stack(weights), torch.tensor([2.0, 3.0, 6.0]) / 11)


@given(batches(), seeds, st.sampled_from(["equal", "unit", "position", "start"]))
def test_weighted_is_the_plain_sum_over_each_action(segments, seed, sigma):
    x = numbers(segments, seed)
    got = segments.weighted(x, sigma)
    for row, ids, mask, out in zip(x, segments.ids.tolist(), segments.mask.tolist(), got):
        wanted = [0.0] * len(mask)
        for m, action in enumerate(groups(ids, mask)):
            weights = sigma_weights(len(action), sigma)
            wanted[m] = sum(w * row[t].item() for w, t in zip(weights, action))
        torch.testing.assert_close(out, torch.tensor(wanted, dtype=torch.float64))


@given(batches(), st.sampled_from(["equal", "unit", "position", "start"]))
def test_sigma_sums_to_one(segments, sigma):
    ones = torch.ones(segments.mask.shape, dtype=torch.float64)
    torch.testing.assert_close(segments.weighted(ones, sigma), segments.macro_mask.double())


@given(batches())
def test_every_token_is_in_exactly_one_action(segments):
    segments = Segments(segments.ids, segments.mask).validate()
    assert segments.lengths.sum(dim=1).tolist() == segments.mask.sum(dim=1).tolist()
    assert segments.starts.sum(dim=1).tolist() == segments.macro_mask.sum(dim=1).tolist()
    assert segments.ends.sum(dim=1).tolist() == segments.macro_mask.sum(dim=1).tolist()
    for ids, mask, offsets in zip(
        segments.ids.tolist(), segments.mask.tolist(), segments.offsets.tolist()
    ):
        for action in groups(ids, mask):
            assert [offsets[t] for t in action] == list(range(len(action)))


@given(batches(), seeds)
def test_gradients_of_sums_reach_their_tokens_only(segments, seed):
    x = numbers(segments, seed).requires_grad_()
    segments.sum(x).square().sum().backward()
    wanted = 2 * segments.spread(segments.sum(x.detach()))
    torch.testing.assert_close(x.grad, wanted)


def test_first_token_starts_an_action_whatever_the_rule_says():
    segments = Segments.from_starts(torch.zeros(1, 3).bool(), torch.tensor([[False, True, True]]))
    assert segments.ids.tolist() == [[0, 0, 0]]
    assert segments.lengths.tolist() == [[2, 0, 0]]


def test_last_token_can_be_an_action_of_its_own():
    mask = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * 4])
    segments = Segments.from_starts(torch.zeros(3, 4).bool(), mask, split_last=True)
    assert segments.lengths.tolist() == [[2, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
def test_empty_tensors_pass_through(shape):
    segments = Segments.from_starts(torch.ones(shape).bool(), torch.ones(shape).bool())
    assert segments.validate().sum(torch.ones(shape)).shape == shape
    assert segments.weighted(torch.ones(shape), "position").shape == shape


def test_validate_names_the_rows_that_start_late():
    starts = torch.tensor([[True, False], [False, True]])
    segments = Segments.from_starts(starts, torch.ones(2, 2).bool())
    with pytest.raises(
        ValueError, match=r"first token, but it does not in rows \[1\].*starts\[:, 0\]"
    ):
        segments.validate()


def test_a_macro_action_never_spans_a_hole():
    mask = torch.tensor([[True, True, True, True], [True, False, True, True]])
    only_first = torch.tensor([[True, False, False, False]]).expand(2, 4)
    segments = Segments.from_starts(only_first, mask).validate()  # no rule need know of holes
    assert segments.ids.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert segments.lengths.tolist() == [[4, 0, 0, 0], [1, 2, 0, 0]]
    with pytest.raises(ValueError, match=r"after each hole in the mask, but not in rows \[1\]"):
        Segments(torch.zeros(2, 4, dtype=torch.int64), mask).validate()


@pytest.mark.parametrize("ids", [[[1, 1, 2]], [[0, 2, 2]], [[0, 1, 0]]])
def test_validate_refuses_ids_that_do_not_count(ids):
    with pytest.raises(ValueError, match="count 0, 1, 2"):
        make(ids).validate()


@pytest.mark.parametrize(
    ("starts", "mask", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 3).bool(), "bool tensor"),
        (torch.ones(2, 4).bool(), torch.ones(2, 3).bool(), r"shape of the mask, \[2, 3\]"),
        (torch.ones(2, 3).bool(), torch.ones(2, 3), "mask must be bool"),
        (torch.ones(3).bool(), torch.ones(3).bool(), r"mask must be \[B, T\]"),
        ([[True]], torch.ones(1, 1).bool(), "bool tensor"),
    ],
)
def test_bad_input_gets_a_sentence(starts, mask, message):
    with pytest.raises(ValueError, match=message):
        Segments.from_starts(starts, mask)


def test_wrong_numbers_get_a_sentence():
    segments = make([[0, 1]])
    with pytest.raises(ValueError, match="x must have the shape"):
        segments.sum(torch.ones(1, 3))
    with pytest.raises(ValueError, match="floating point"):
        segments.sum(torch.ones(1, 2).long())
    with pytest.raises(ValueError, match="spread takes"):
        segments.spread(torch.ones(2))
    with pytest.raises(ValueError, match="sigma must be one of"):
        segments.weighted(torch.ones(1, 2), "flat")  # pyright: ignore
    with pytest.raises(ValueError, match="ids must be int64"):
        Segments(torch.zeros(1, 2), torch.ones(1, 2).bool())


def test_bfloat16_is_summed_in_float32():
    segments = make([[0] * 512])
    total = segments.sum(torch.full((1, 512), 1.0 + 2**-7).bfloat16())
    assert total.dtype == torch.float32
    assert math.isclose(total[0, 0].item(), 512 * (1 + 2**-7))


@pytest.mark.parametrize(
    ("starts", "says"),
    [
        (torch.ones(1, 3).bool().numpy(), r"got numpy\.ndarray\. Return torch\.as_tensor\(starts"),
        ([[True, False, False]], r"got builtins\.list"),
        (torch.ones(1, 3).int(), r"got torch\.int32\. Return starts\.bool\(\)"),
    ],
)
def test_starts_that_are_no_bool_tensor_say_what_they_are(starts, says):
    with pytest.raises(ValueError, match=says):
        Segments.from_starts(starts, torch.ones(1, 3).bool())
