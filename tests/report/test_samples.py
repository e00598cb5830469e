"""Samples: shades of advantages that no run's colour can be taken for."""

import colorsys
import re

import pytest

from marlhf.report.groups import group_runs
from marlhf.report.page import STYLE
from marlhf.report.sections.samples import samples
from marlhf.runs.read import read_run


def _hues(pattern, base):
    """Hues in degrees of every colour that a pattern finds, light and dark."""
    colours = [[int(part, base) / 255 for part in found] for found in re.findall(pattern, STYLE)]
    return [360 * colorsys.rgb_to_hsv(*rgb)[0] for rgb in colours]


def test_shades_of_advantages_are_in_hues_that_name_no_run():
    runs = _hues(r"--c\d: #(\w\w)(\w\w)(\w\w)", 16)
    shades = _hues(r"--(?:pos|neg): (\d+), (\d+), (\d+)", 10)
    assert (len(runs), len(shades)) == (16, 4)
    for shade in shades:
        assert min(abs((shade - run + 180) % 360 - 180) for run in runs) > 15


@pytest.fixture
def page_of(make_run):
    """`page_of({n: advantages, ...})`: samples of runs with n tokens per macro action."""

    def make(runs):
        folders = []
        for n, advantages in runs.items():
            pieces = [f" w{i}" for i in range(n * len(advantages))]
            sample = {
                "step": 1,
                "prompt": "p",
                "pieces": pieces,
                "starts": [i % n == 0 for i in range(len(pieces))],
                "advantages": [advantages[i // n] for i in range(len(pieces))],
            }
            config = {"segmenter": {"type": "ngram", "n": n}}
            folders.append(make_run(f"n{n}", config=config, samples=[sample]))
        return samples(group_runs([read_run(folder) for folder in folders]))

    return make


def test_each_run_has_its_own_scale(page_of):
    html = page_of({1: [0.1, -0.05], 5: [10.0, -5.0]})
    assert "a large advantage of the run: 0.10 for n1, 10.0 for n5" in html
    for run in ("0.10", "10.0"):
        assert f'class="p4" title="advantage +{run}' in html.replace("p4 m", "p4")
    assert html.count('<i class="n2') == 3  # half as large, in the key and of each run


def test_one_macro_action_is_explained_in_words(page_of):
    html = page_of({1: [3.0, -4.0], 5: [0.5, -1.0]})
    example = re.sub("<[^>]+>", "", html[html.index("For example") :].partition("</p>")[0])
    # Several tokens explain more than one, however large its advantage.
    assert " w5 w6 w7 w8 w9 is one macro action of n5, 5 tokens, with advantage" in example
    assert "worse than the critic expected, so the update makes these tokens less likely" in example


def test_bars_mark_macro_actions_and_not_single_tokens(page_of):
    assert 'class="p4 m"' in page_of({5: [1.0, 1.0]})
    assert 'class="p4 m"' not in page_of({1: [1.0, 1.0]})


def test_responses_before_rl_are_not_shaded_by_an_untrained_critic(make_run):
    sample = {"prompt": "p", "pieces": ["a", "b"], "starts": [True] * 2, "advantages": [1.0, -1.0]}
    rows = [sample | {"step": step} for step in (0, 5)]
    html = samples(group_runs([read_run(make_run("ppo", samples=rows))]))
    before, after = html.split('class="answer"')[1:]
    assert "before RL" in before
    assert "advantage" not in before
    assert 'title="advantage +1.00"' in after
    assert "for before RL" not in html  # no scale in the key
