"""Seconds of steps and responses per second, by hand."""

import csv
import io
import re
from urllib.parse import unquote

import pytest

from marlhf.report.groups import group_runs
from marlhf.report.sections.curves import timing
from marlhf.runs.read import read_run


@pytest.fixture
def page_of(make_run):
    """`page_of(seconds)`: the section of a run with 12 responses in each of these steps."""

    def make(seconds, *, recorded=True):
        metrics = [
            {
                "kind": "train",
                "step": i,
                "time/step": s,
                "time/rollout": s / 2,
                "time/update": s / 4,
            }
            | ({"time/samples_per_second": 12 / s} if recorded else {})
            for i, s in enumerate(seconds, start=1)
        ]
        return timing(
            group_runs([read_run(make_run("ppo", config={"batch_size": 12}, metrics=metrics))])
        )

    return make


def _csv(html, title):
    data = re.search(rf"<b>{title}</b><a [^>]*href=\"data:text/csv;charset=utf-8,([^\"]*)\"", html)
    assert data
    return list(csv.reader(io.StringIO(unquote(data[1]))))[1:]


@pytest.mark.parametrize("recorded", [True, False])
def test_the_rate_is_that_of_the_median_step(page_of, recorded):
    # 12 responses in 2 seconds; one slow step, such as one that compiles, does not change it.
    rows = _csv(page_of([1.0, 2.0, 9.0], recorded=recorded), "Responses per second")
    assert rows == [["ppo", "6", "2", "9", "3"]]
    rows = _csv(page_of([1.0, 2.0, 900.0], recorded=recorded), "Responses per second")
    assert rows == [["ppo", "6", "2", "900", "3"]]


def test_phases_are_those_of_the_median_step(page_of):
    rows = _csv(page_of([1.0, 2.0, 9.0]), "Seconds per step")
    assert rows == [["ppo", "rollout", "1"], ["ppo", "update", "0.5"], ["ppo", "rest", "0.5"]]


def test_steps_that_scatter_are_named(page_of):
    assert "scatter" not in page_of([1.0] * 20 + [1.5])
    html = page_of([1.0] * 18 + [5.0] * 3)
    assert '<span class="warn">Steps of ppo scatter:</span> the median takes 1.0 s' in html
    assert "one in twenty 5.0 s or more" in html
