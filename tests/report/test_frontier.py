"""Comparisons along learning curves: score at equal KL, steps to a score."""

import math
import random

import numpy as np
import pytest

from marlhf.intervals import Curve
from marlhf.report.groups import group_runs
from marlhf.report.measures import CurveComparison, at_kl, common_kl
from marlhf.report.sections.frontier import (
    equal_kl,
    first_evaluation_at,
    frontier,
    time_to_score,
)
from marlhf.runs.read import read_run


def curve(*columns):
    """A measured curve from steps, seconds, scores and KLs."""
    return Curve(*(np.array([column], dtype=np.float64) for column in columns))


CURVE = curve([0, 10, 20], [0.0, 5.0, 9.0], [0.0, 1.0, 3.0], [0.0, 2.0, 4.0])


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


def test_a_resample_that_ends_short_of_a_kl_keeps_its_last_score():
    assert at_kl(CURVE, 3.0).tolist() == [2.0]  # half way from 1 to 3
    assert at_kl(CURVE, 9.0).tolist() == [3.0]
    assert math.isnan(at_kl(curve([], [], [], []), 1.0)[0])


def test_the_common_kl_is_the_smallest_of_the_largest():
    assert common_kl([CURVE, curve([0], [0.0], [0.0], [3.456])]) == 3.4
    assert common_kl([CURVE, curve([], [], [], [])]) == 0.0


def _end(curve):
    return curve.scores[:, -1]


def test_what_prompts_share_cancels_out_of_differences(settings):
    """Prompts differ by 1, settings by 0.5: alone they are unsure, together they are not."""
    groups = settings([[0.0, 1.0]], [[0.0, 1.5]], prompts=60)
    compared = CurveComparison(groups)
    alone, ahead = compared.intervals(lambda c: [_end(c[0]), _end(c[1]) - _end(c[0])])
    assert alone.high - alone.low > 0.3
    assert ahead[:3] == pytest.approx((0.5, 0.5, 0.5))
    assert compared.over() == "60 prompts (one seed per setting, so not over trainings)"


def test_seeds_are_drawn_too(settings):
    compared = CurveComparison(
        settings([[0.0, 1.0], [0.0, 2.0]], [[0.0, 3.0], [0.0, 3.0]], prompts=60)
    )
    (ahead,) = compared.intervals(lambda c: [_end(c[1]) - _end(c[0])])
    assert ahead[:3] == pytest.approx((1.5, 1.0, 2.0))
    assert "too narrow" in compared.over()


def test_means_of_one_seed_have_no_interval(settings):
    compared = CurveComparison(settings([[0.0, 1.0]], [[0.0, 2.0]]))
    (value,) = compared.intervals(lambda c: [_end(c[1])])
    assert value.mean == 2.0
    assert math.isnan(value.low)
    assert compared.over() == ""


def test_the_page_gives_score_at_equal_kl_with_intervals(settings):
    groups = settings([[0.0, 1.0, 2.0]], [[0.0, 2.0, 4.0]], prompts=50, noise=0.5)
    html = equal_kl(CurveComparison(groups))
    # KL is 0, 1, 2 at the evaluations: at KL 2 the scores are 2 and 4, less noise.
    assert "Difference in score at KL 2" in html
    assert "Score at KL 2.00" in html
    assert "95% intervals over 50 prompts (one seed per setting" in html


def test_a_seed_reaches_a_score_at_an_evaluation(make_run):
    metrics = [
        {"kind": "eval", "step": step, "seconds": step / 2, "eval/score": score}
        | {"eval/kl": kl, "eval/gold": gold}
        for step, score, kl, gold in ((0, 0.0, 0.0, 0.0), (10, 0.4, 2.0, 0.5), (20, 0.9, 3.0, 0.7))
    ]
    run = read_run(make_run("a", metrics=metrics))
    reached = first_evaluation_at(run, 0.5)
    assert reached is not None
    assert (reached["step"], reached["seconds"], reached["eval/kl"]) == (20, 10.0, 3.0)
    assert first_evaluation_at(run, 1.0) is None


def test_half_the_steps_is_twice_as_fast(settings):
    groups = settings([[0.0, 1.0, 2.0, 3.0, 4.0]], [[0.0, 2.0, 4.0, 6.0, 8.0]])
    html = time_to_score(CurveComparison(groups))
    assert '<td class="n">2.00</td>' in html  # 40 steps against 20
    assert '<td class="n">20<small>10 s</small></td>' in html


@pytest.mark.parametrize("scores", [[0.0, -1.0], [0.0, 0.0], [0.0, 0.01]])
def test_a_baseline_that_did_not_improve_gives_no_times(settings, scores):
    groups = settings([scores], [[0.0, 2.0]], prompts=20, noise=0.5)
    html = time_to_score(CurveComparison(groups))
    assert "No times, as 1-0 did not clearly improve" in html
    assert "<table" not in html


def test_never_is_said_and_not_drawn_as_a_number(settings):
    html = time_to_score(CurveComparison(settings([[0.0, 2.0]], [[0.0, 1.0]])))
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
