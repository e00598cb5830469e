import math

import pytest

from marlhf.intervals import (
    interval,
    mean_by_position,
    paired_difference,
    share_improved,
    thin,
)


def test_interval_by_hand():
    # mean 2; deviations -1, 0, 1 and a missing one: s^2 = 2 / 2 = 1; 1.96 / sqrt(3) = 1.1316
    found = interval([1.0, 2.0, 3.0, math.nan])
    assert found == pytest.approx((2.0, 0.8684, 3.1316, 3), abs=1e-4)


def test_one_value_has_no_interval_and_none_has_no_mean():
    assert interval([4.0])[0] == 4.0
    assert math.isnan(interval([4.0]).low)
    assert math.isnan(interval([]).mean)


def test_pairing_takes_out_how_hard_a_prompt_is():
    # Each prompt improved by exactly 1, though prompts differ by tens.
    assert paired_difference([0.0, 10.0, 50.0], [1.0, 11.0, 51.0]) == (1.0, 1.0, 1.0, 3)
    with pytest.raises(ValueError, match="2 and 1 prompts"):
        paired_difference([1.0, 2.0], [1.0])


def test_a_tie_is_half_an_improvement():
    # up, tie, down, missing: (1 + 0.5 + 0) / 3
    assert share_improved([0, 0, 0, 0], [1, 0, -1, math.nan]) == 0.5


def test_seeds_are_averaged_prompt_by_prompt():
    assert mean_by_position([[1.0, 2.0], [3.0, math.nan]]) == [2.0, 2.0]
    assert mean_by_position([[1.0], [1.0, 2.0]]) is None


@pytest.mark.parametrize("limit", [2, 3, 7])
def test_thinning_keeps_both_ends(limit):
    kept = thin(list(range(1000)), limit)
    assert (kept[0], kept[-1], len(kept)) == (0, 999, limit)
    assert thin([1, 2], limit) == [1, 2]
