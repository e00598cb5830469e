"""Statistics by hand, by slow loops and by scipy."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from marlhf.intervals import (
    NO_INTERVAL,
    Curve,
    CurveBootstrap,
    Interval,
    SeedCurve,
    bootstrap,
    bootstrap_mean,
    difference_over_seeds,
    draw_weights,
    few_seeds,
    first_reaching,
    interval,
    mean_by_position,
    mean_over_groups,
    mean_over_seeds,
    quantiles,
    score_at_kl,
    t_quantile,
    thin,
    wilson,
    win_rate,
)


def test_interval_by_hand():
    # mean 2; deviations -1, 0, 1 and a missing one: s^2 = 2 / 2 = 1. Student's t of two degrees
    # of freedom is 4.3027 at 97.5%: 4.3027 / sqrt(3) = 2.4841
    found = interval([1.0, 2.0, 3.0, math.nan])
    assert found == pytest.approx((2.0, -0.4841, 4.4841, 3), abs=1e-4)


def test_t_quantiles_of_the_tables():
    known = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 30: 2.0423, 120: 1.9799}
    assert {df: round(t_quantile(df), 4) for df in known} == known
    assert t_quantile(10**9) == pytest.approx(1.959963984540054)


def test_t_quantiles_are_scipy_s():
    stats = pytest.importorskip("scipy.stats")
    for df in [*range(1, 60), 99, 100, 101, 500, 999, 1000, 1001, 1002, 5000, 10**6]:
        assert t_quantile(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-6)


def test_small_samples_are_covered_as_often_as_promised():
    """With 1.96 in place of Student's t only 85% of intervals of four numbers hold the mean."""
    draw = np.random.default_rng(0)
    found = [interval(row) for row in draw.normal(size=(4000, 4))]
    assert np.mean([each.low <= 0 <= each.high for each in found]) == pytest.approx(0.95, abs=0.015)


def test_one_value_has_no_interval_and_none_has_no_mean():
    assert interval([4.0])[0] == 4.0
    assert math.isnan(interval([4.0]).low)
    assert math.isnan(interval([]).mean)


def test_a_tie_is_half_an_improvement():
    # up, tie, down, missing: (1 + 0.5 + 0) / 3
    assert win_rate([0, 0, 0, 0], [1, 0, -1, math.nan]) == 0.5


def test_seeds_are_averaged_prompt_by_prompt():
    assert mean_by_position([[1.0, 2.0], [3.0, math.nan]]) == [2.0, 2.0]
    assert mean_by_position([[1.0], [1.0, 2.0]]) is None


@pytest.mark.parametrize("limit", [2, 3, 7])
def test_thinning_keeps_both_ends(limit):
    kept = thin(list(range(1000)), limit)
    assert (kept[0], kept[-1], len(kept)) == (0, 999, limit)
    assert thin([1, 2], limit) == [1, 2]


def test_an_interval_in_words():
    assert Interval(1.4126, 1.3, 1.525, 9).text() == "1.413 [1.300, 1.525]"
    assert Interval(0.5, 0.25, 1.0, 9).text("{:.0%}".format) == "50% [25%, 100%]"
    assert interval([4.0]).text() == "4.000"
    assert NO_INTERVAL.text() == "-"


def test_wilson_by_hand():
    # 8 of 10: z^2 = 3.8415; (0.8 + 0.19207 +- 1.96 sqrt(0.016 + 0.0096)) / 1.38415
    assert wilson(8, 10)[:3] == pytest.approx((0.8, 0.490162, 0.943318), abs=1e-6)
    assert wilson(0, 10).low == 0.0
    assert wilson(0, 10).high == pytest.approx(0.277533, abs=1e-6)
    assert wilson(10, 10).high == 1.0
    assert wilson(0, 0) is NO_INTERVAL


def test_the_middle_of_draws_by_hand():
    # 0 .. 200: positions 0.025 * 200 = 5 and 0.975 * 200 = 195
    assert quantiles([*map(float, range(201))]) == [5.0, 195.0]
    assert quantiles([1.0, math.inf, math.nan]) == [1.0, math.inf]
    assert all(map(math.isnan, quantiles([math.nan])))


def test_nothing_has_no_bootstrap():
    assert bootstrap_mean([]) == NO_INTERVAL


def test_drawing_counts_is_drawing_things():
    """The spread of the largest share, by counts and by a plain loop over the things."""
    counts = [6, 3, 1]
    things = [kind for kind, count in enumerate(counts) for _ in range(count)]
    draw = random.Random(0)
    drawn = [draw.choices(things, k=10) for _ in range(4000)]
    slow = sorted(max(map(each.count, range(3))) / 10 for each in drawn)
    fast = bootstrap(counts, lambda drawn: drawn.max(axis=1) / 10)
    assert fast[:3] == (0.6, slow[100], slow[3900])


def test_one_seed_has_the_interval_over_its_prompts():
    assert mean_over_seeds([[1.0, 2.0, 3.0]]) == interval([1.0, 2.0, 3.0])


def test_two_seeds_without_prompts_span_the_seeds():
    # Of two seeds a draw takes both (1.5), or one of them twice: a quarter each.
    assert mean_over_seeds([[1.0], [2.0]])[:3] == (1.5, 1.0, 2.0)


def test_seeds_that_agree_leave_the_prompts_as_scipy_draws_them():
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(3)
    row = [draw.gauss(1, 2) for _ in range(40)]
    found = mean_over_seeds([row, row])
    theirs = stats.bootstrap(
        (row,), lambda x, axis: x.mean(axis=axis), method="percentile", random_state=0
    ).confidence_interval
    assert found.mean == pytest.approx(sum(row) / 40)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.12)


def test_many_prompts_have_the_spread_of_a_mean():
    # s / sqrt(n): 1 / sqrt(4000) = 0.0158, so the interval is 2 * 1.96 * 0.0158 = 0.062 wide
    draw = random.Random(4)
    row = [draw.gauss(0, 1) for _ in range(4000)]
    found = mean_over_seeds([row, row])
    assert found.high - found.low == pytest.approx(0.062, rel=0.1)


def test_seeds_and_prompts_are_drawn_as_a_slow_loop_draws_them():
    draw = random.Random(5)
    rows = [[draw.gauss(seed, 1) for _ in range(25)] for seed in range(4)]
    rows[2][7] = math.nan  # left out
    slow = []
    for _ in range(4000):
        prompts = draw.choices(range(25), k=25)
        means = []
        for row in draw.choices(rows, k=4):
            known = [row[i] for i in prompts if math.isfinite(row[i])]
            means.append(sum(known) / len(known))
        slow.append(sum(means) / 4)
    found = mean_over_seeds(rows)
    assert (found.low, found.high) == pytest.approx(quantiles(slow), abs=0.12)


def test_groups_seeds_and_prompts_are_drawn_as_a_slow_loop_draws_them():
    draw = random.Random(6)
    groups = [
        [[draw.gauss(group + seed / 4, 1) for _ in range(25)] for seed in range(2)]
        for group in range(3)
    ]
    slow = []
    for _ in range(4000):
        prompts = draw.choices(range(25), k=25)
        means = []
        for seeds in draw.choices(groups, k=3):
            rows = draw.choices(seeds, k=2)
            means.append(sum(row[i] for row in rows for i in prompts) / 50)
        slow.append(sum(means) / 3)
    found = mean_over_groups(groups)
    assert (found.low, found.high) == pytest.approx(quantiles(slow), abs=0.12)
    assert mean_over_groups(groups[:1]) == mean_over_seeds(groups[0])


def test_a_draw_takes_as_many_prompts_and_is_the_same_for_all():
    weights = draw_weights(40, 100)
    assert weights.sum(axis=1) == pytest.approx(1)
    assert (weights * 40 == (weights * 40).round()).all()
    assert (weights == draw_weights(40, 100)).all()
    assert (weights[0] != weights[1]).any()
    assert (weights != draw_weights(40, 100, stream=1)).any()


def test_score_at_kl_by_hand():
    scores, kls = np.array([0.0, 1.0, 3.0]), np.array([0.0, 2.0, 4.0])
    assert score_at_kl(scores, kls, 3.0) == 2.0  # half way from 1 to 3
    assert math.isnan(score_at_kl(scores, kls, 9.0))
    assert math.isnan(score_at_kl(scores[:1], kls[:1], 0.0))


def test_score_at_kl_is_that_of_a_loop_over_pairs():
    draw = np.random.default_rng(0)
    scores, kls = draw.normal(size=(50, 8)), draw.normal(size=(50, 8)).cumsum(axis=1)

    def slow(scores, kls, level):
        for (kl_0, score_0), (kl_1, score_1) in pairwise(zip(kls, scores)):
            if kl_0 <= level <= kl_1:
                return score_0 + (level - kl_0) / (kl_1 - kl_0) * (score_1 - score_0)
        return math.nan

    expected = [slow(*row, 0.5) for row in zip(scores, kls)]
    np.testing.assert_allclose(score_at_kl(scores, kls, 0.5), expected)


def test_reaching_reads_only_evaluations():
    curve = Curve(*(np.array([x]) for x in ([0.0, 10, 20], [0.0, 5, 9], [0.0, 1, 3], [0.0, 2, 4])))
    assert first_reaching(curve, 1.5) == (20.0, 9.0)
    assert first_reaching(curve, 3.5) == (math.inf, math.inf)


def _seed(steps, scores):
    steps = np.array(steps, dtype=np.float64)
    return SeedCurve(steps, steps, np.array(scores, dtype=np.float64), np.array(scores) * 2.0)


def test_a_seed_that_stopped_early_keeps_its_last_evaluation():
    long, short = _seed([0, 1, 2], [[0.0], [1.0], [2.0]]), _seed([0, 1], [[0.0], [3.0]])
    found = CurveBootstrap([[long, short]])
    assert found.measured[0].scores.tolist() == [[0.0, 2.0, 2.0]]  # the last of `long` alone
    ends = {(*row,) for row in found.resampled[0].scores.tolist()}
    # Both, twice `long`, or twice `short`, whose last evaluation is then repeated.
    assert ends == {(0.0, 2.0, 2.0), (0.0, 1.0, 2.0), (0.0, 3.0, 3.0)}
    steps = found.resampled[0].steps[found.resampled[0].scores[:, 1] == 3.0]
    assert steps[0].tolist() == [0.0, 1.0, 1.0]


def test_curves_are_resampled_as_a_slow_loop_does_it():
    draw = random.Random(6)
    settings = [
        [_seed([0, 9], [[0.0] * 20, [draw.gauss(s + n, 1) for _ in range(20)]]) for s in range(3)]
        for n in range(2)
    ]
    slow = []
    for _ in range(4000):
        prompts = draw.choices(range(20), k=20)
        ends = []
        for seeds in settings:
            means = [seed.scores[1, prompts].mean() for seed in draw.choices(seeds, k=3)]
            ends.append(sum(means) / 3)
        slow.append(ends[1] - ends[0])
    ahead = CurveBootstrap(settings).intervals(lambda c: [c[1].scores[:, 1] - c[0].scores[:, 1]])[0]
    assert (ahead.low, ahead.high) == pytest.approx(quantiles(slow), abs=0.15)


@pytest.mark.parametrize("num_seeds", [2, 3, 5])
def test_differences_between_settings_are_covered_as_often_as_promised(num_seeds):
    """Drawing two seeds with replacement covered the true difference in 76% of cases, three 84%."""
    draw = np.random.default_rng(0)
    hard = draw.normal(0, 1, 40)  # the same prompts for all
    covered, trials = 0, 1000
    for _ in range(trials):
        sides = [
            [draw.normal(0, 0.3) + hard + draw.normal(0, 0.2, 40) for _ in range(num_seeds)]
            for _ in range(2)
        ]
        found = difference_over_seeds(*sides)
        covered += found.low <= 0 <= found.high
    assert covered / trials > 0.93  # 95%, with a standard error of 0.7%


def test_a_difference_between_seeds_by_hand():
    # Means 1, 3 and 4, 8: pooled variance (2 + 8) / 2 = 5, t of 2 degrees of freedom 4.303,
    # so 4 +- 4.303 * sqrt(5 * (1 / 2 + 1 / 2)) = 4 +- 9.621
    found = difference_over_seeds([[1.0], [3.0]], [[4.0], [8.0]])
    assert found[:3] == pytest.approx((4.0, -5.621, 13.621), abs=1e-3)
    single = difference_over_seeds([[1.0, 2.0, 4.0]], [[2.0, 4.0, 5.0]])
    assert single == interval([1.0, 2.0, 1.0])
    assert few_seeds(1).startswith("One seed")
