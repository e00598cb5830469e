"""Intervals over seeds and prompts, score at equal KL, steps to a score: by hand and by scipy."""

import math
import random

import pytest

from marlhf.report.groups import group_runs
from marlhf.report.resample import Moment, Resampled, mean_over, prompt_weights, quantiles
from marlhf.report.sections.frontier import (
    at_kl,
    common_kl,
    equal_kl,
    frontier,
    reaching,
    time_to_score,
)
from marlhf.runs.read import read_run

CURVE = [Moment(0, 0.0, 0.0, 0.0), Moment(10, 5.0, 1.0, 2.0), Moment(20, 9.0, 3.0, 4.0)]


@pytest.fixture
def settings(make_run):
    """`settings(rows)`: groups of one setting a row, a row being the score curves of its seeds.

    An evaluation is every ten steps and five seconds; its KL is a tenth of its step.
    """

    def make(*rows, prompts=1, noise=0.0):
        draw = random.Random(0)
        hard = [draw.gauss(0, 1) for _ in range(prompts)]
        runs = []
        for n, seeds in enumerate(rows, start=1):
            for seed, scores in enumerate(seeds):
                evaluations = [
                    {"step": 10 * i, "scores": [s + h + draw.gauss(0, noise) for h in hard]}
                    | {"kl": [float(i)] * prompts}
                    for i, s in enumerate(scores)
                ]
                metrics = [
                    {"kind": "eval", "step": 10 * i, "seconds": 5.0 * i, "eval/kl": float(i)}
                    | {"eval/score": s}
                    for i, s in enumerate(scores)
                ]
                config = {"segmenter": {"type": "ngram", "n": n}, "seed": seed}
                more = {"evaluations": evaluations} if prompts > 1 else {}
                folder = make_run(f"{n}-{seed}", seed=seed, config=config, metrics=metrics, **more)
                runs.append(read_run(folder))
        return group_runs(runs)

    return make


def test_the_middle_of_draws_by_hand():
    # 0 .. 200: positions 0.025 * 200 = 5 and 0.975 * 200 = 195
    assert quantiles([*map(float, range(201))]) == (5.0, 195.0)
    assert quantiles([1.0, math.inf, math.nan]) == (1.0, math.inf)
    assert all(map(math.isnan, quantiles([math.nan])))


def test_one_seed_has_the_normal_interval_over_prompts():
    assert mean_over([[1.0, 2.0, 3.0]]) == pytest.approx((2.0, 0.8684, 3.1316, 3), abs=1e-4)


def test_two_seeds_without_prompts_span_the_seeds():
    # Of two seeds a draw takes both (1.5), or one of them twice: a quarter each.
    assert mean_over([[1.0], [2.0]])[:3] == (1.5, 1.0, 2.0)


def test_seeds_that_agree_leave_the_prompts_as_scipy_draws_them():
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(3)
    row = [draw.gauss(1, 2) for _ in range(40)]  # as many as there are blocks: no averaging
    found = mean_over([row, row])
    theirs = stats.bootstrap(
        (row,), lambda x, axis: x.mean(axis=axis), method="percentile", random_state=0
    ).confidence_interval
    assert found.mean == pytest.approx(sum(row) / 40)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.12)


def test_many_prompts_in_blocks_have_the_spread_of_single_ones():
    # s / sqrt(n): 1 / sqrt(4000) = 0.0158, so the interval is 2 * 1.96 * 0.0158 = 0.062 wide
    draw = random.Random(4)
    row = [draw.gauss(0, 1) for _ in range(4000)]
    found = mean_over([row, row])
    assert found.high - found.low == pytest.approx(0.062, rel=0.25)


def test_a_draw_takes_as_many_prompts_and_is_the_same_for_all():
    weights = prompt_weights(40, 7)
    assert sum(weights) == pytest.approx(1)
    assert weights == prompt_weights(40, 7) != prompt_weights(40, 8)


def test_score_at_kl_by_hand():
    assert at_kl(CURVE, 3.0) == 2.0  # half way from 1 to 3
    assert at_kl(CURVE, 9.0) == 3.0  # a draw that ends short keeps its last score
    assert math.isnan(at_kl([], 1.0))


def test_the_common_kl_is_the_smallest_of_the_largest():
    assert common_kl([CURVE, [Moment(0, 0.0, 0.0, 3.456)]]) == 3.4
    assert common_kl([CURVE, []]) == 0.0


def test_reaching_reads_only_evaluations():
    assert reaching(CURVE, 1.5) == (20.0, 9.0)
    assert reaching(CURVE, 3.5) == (math.inf, math.inf)


def test_what_prompts_share_cancels_out_of_differences(settings):
    """Prompts differ by 1, settings by 0.5: alone they are unsure, together they are not."""
    groups = settings([[0.0, 1.0]], [[0.0, 1.5]], prompts=60)
    compared = Resampled(groups)
    alone, ahead = compared.intervals(lambda c: [c[0][-1].score, c[1][-1].score - c[0][-1].score])
    assert alone.high - alone.low > 0.3
    assert ahead[:3] == pytest.approx((0.5, 0.5, 0.5))
    assert compared.over() == "60 prompts (one seed a setting, so not over trainings)"


def test_seeds_are_drawn_too(settings):
    compared = Resampled(settings([[0.0, 1.0], [0.0, 2.0]], [[0.0, 3.0], [0.0, 3.0]], prompts=60))
    (ahead,) = compared.intervals(lambda c: [c[1][-1].score - c[0][-1].score])
    assert ahead[:3] == pytest.approx((1.5, 1.0, 2.0))
    assert "too narrow" in compared.over()


def test_means_of_one_seed_have_no_interval(settings):
    compared = Resampled(settings([[0.0, 1.0]], [[0.0, 2.0]]))
    (value,) = compared.intervals(lambda c: [c[1][-1].score])
    assert value.mean == 2.0
    assert math.isnan(value.low)
    assert compared.over() == ""


def test_the_page_gives_score_at_equal_kl_with_intervals(settings):
    groups = settings([[0.0, 1.0, 2.0]], [[0.0, 2.0, 4.0]], prompts=50, noise=0.5)
    html = equal_kl(Resampled(groups))
    # KL is 0, 1, 2 at the evaluations: at KL 2 the scores are 2 and 4, less noise.
    assert "Difference in score at KL 2" in html
    assert "Score at KL 2.00" in html
    assert "95% intervals over 50 prompts (one seed a setting" in html


def test_half_the_steps_is_twice_as_fast(settings):
    groups = settings([[0.0, 1.0, 2.0, 3.0, 4.0]], [[0.0, 2.0, 4.0, 6.0, 8.0]])
    html = time_to_score(Resampled(groups))
    assert '<td class="n">2.00</td>' in html  # 40 steps against 20
    assert '<td class="n">20<small>10 s</small></td>' in html


def test_never_is_said_and_not_drawn_as_a_number(settings):
    html = time_to_score(Resampled(settings([[0.0, 2.0]], [[0.0, 1.0]])))
    assert "Never reached by 2-0" in html
    assert "never" in html
    assert "inf" not in html


def test_settings_that_were_scored_otherwise_are_not_set_against_each_other(make_run):
    def run(n, reward):
        config = {"segmenter": {"type": "ngram", "n": n}, "reward_model": reward}
        metrics = [
            {"kind": "eval", "step": s, "seconds": s, "eval/score": s, "eval/kl": s} for s in (0, 9)
        ]
        return read_run(make_run(f"{n}", config=config, metrics=metrics))

    html = frontier(group_runs([run(1, "hub/one"), run(5, "hub/other")]))
    assert "Score against KL" in html
    assert "equal KL" not in html
    assert "equal KL" in frontier(group_runs([run(1, "hub/one"), run(5, "hub/one")]))
