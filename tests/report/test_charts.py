import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from marlhf.intervals import Interval
from marlhf.report.charts import (
    Series,
    distribution,
    histogram,
    legend_of,
    line_chart,
    nice_ticks,
    scatter,
    shorten,
    span,
    tick_text,
)
from marlhf.report.dots import Dot, Trail, dot_rows, stacked_bars, sweep_chart


def _draw(*points: tuple[float, float]) -> str:
    return line_chart([Series("a", points, "red")], x_label="x", y_label="y")


def test_ticks_are_round():
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(-0.7, 1.6) == [-0.5, 0, 0.5, 1.0, 1.5]
    assert nice_ticks(0, 200) == [0, 50, 100, 150, 200]


def test_tick_numbers_have_just_enough_decimals():
    assert [tick_text(v, 0.05) for v in (0.0, 0.05)] == ["0.00", "0.05"]
    assert tick_text(-2, 1) == "\u22122"
    assert tick_text(20000, 5000) == "20k"
    small = [tick_text(value, 5e-6) for value in (0, 1.5e-5, -3e-5)]
    assert small == ["0", "1.5e\u22125", "\u22123e\u22125"]


def test_a_constant_has_room_around_it():
    assert span([5.0, 5.0]) == (4.5, 5.5)
    assert span([0.0]) == (-0.5, 0.5)
    assert span([math.nan]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(0, 1)],
        [(0, 3), (1, 3)],
        [(0, math.nan), (1, math.inf)],
        [(0, 1e29), (1, -1e29)],
        [(0, 1e-12), (1, 2e-12)],
        [(5, 1e9), (5, 1e9 + 1)],
    ],
)
def test_every_line_chart_is_valid_xml_with_finite_numbers(points):
    drawn = _draw(*points)
    ElementTree.fromstring(drawn)
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', drawn)


def test_a_missing_number_breaks_the_line():
    (path,) = re.findall(r'class="line"[^>]* d="([^"]*)"', _draw((0, 1), (1, math.nan), (2, 2)))
    assert path.count("M") == 2
    assert "L" not in path


def test_the_line_goes_where_its_numbers_say():
    (path,) = re.findall(r'class="line"[^>]* d="([^"]*)"', _draw((0, 0), (1, 10), (2, 20)))
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", path)[1:]]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1


def test_histogram_shares_add_up_and_share_their_bins():
    edges, (a, b) = histogram([[0.0, 0.0, 1.0, math.nan], [1.0]])
    assert (edges[0], edges[-1]) == (0.0, 1.0)
    assert (a[0], a[-1]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (sum(a), sum(b), b[-1]) == (pytest.approx(1), 1.0, 1.0)


@pytest.mark.parametrize("is_share", [False, True])  # shares end at the top edge
def test_lines_are_named_at_their_ends_without_meeting(is_share):
    lines = [Series(f"run {i}", [(0, 0), (1, 1 + i / 1000)], "red") for i in range(7)]
    drawn = line_chart(lines, x_label="x", y_label="y", is_share=is_share)
    places = sorted(float(y) for y in re.findall(r'class="end" x="[^"]+" y="([^"]+)"', drawn))
    assert len(places) == 7
    assert min(b - a for a, b in pairwise(places)) >= 12.9
    assert legend_of(lines) == ""


def test_too_many_lines_have_a_key_instead():
    lines = [Series(f"run {i}", [(0, 0), (1, i)], "red") for i in range(8)]
    assert 'class="end"' not in line_chart(lines, x_label="x", y_label="y")
    assert legend_of(lines).count("<span>") == 8


def test_a_long_name_keeps_both_its_ends():
    assert shorten("segmenter=perplexity,seed=3", 11) == "segme\u2026eed=3"
    assert shorten("short", 11) == "short"


def test_a_dot_stands_where_its_number_says():
    dots = [Dot(f"{x}", Interval(x, x - 1, x + 1, 9), "red") for x in (0.0, 1.0, 2.0)]
    drawn = dot_rows(dots, x_label="x")
    a, b, c = (float(x) for x in re.findall(r'cx="([^"]+)" cy="[^"]+" r="4.6"', drawn))
    assert b - a == pytest.approx(c - b, abs=0.2)
    (left, right), *_ = re.findall(r'whisker" d="M(\S+) \d+H([\d.]+)"', drawn)
    assert float(left) == pytest.approx(2 * a - b, abs=0.2)
    assert float(right) == pytest.approx(b, abs=0.2)


def test_what_may_never_end_has_an_arrow_and_shares_stay_shares():
    never = dot_rows([Dot("a", Interval(5.0, 4.0, math.inf, 2), "red")], x_label="x")
    assert never.count("whisker") == 2
    assert "inf" not in never
    share = Dot("a", Interval(0.01, -0.02, 0.04, 9), "red").within(0.0, 1.0)
    assert share.value[:3] == (0.01, 0.0, 0.04)


def test_a_sweep_has_evenly_spaced_places_whatever_the_values():
    trail = Trail("", "grey", [(i, Dot("", Interval(i, i, i, 1), "red")) for i in range(3)])
    drawn = sweep_chart([trail], ["1", "10", "\u221e"], x_label="n", y_label="y")
    xs = [float(x) for x in re.findall(r'cx="([^"]+)" cy="[^"]+" r="4.2"', drawn)]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ">\u221e<" in drawn


def test_labels_are_escaped_in_every_chart():
    bad = "<script>alert(1)</script>"
    dot = Dot(bad, Interval(1.0, 0.0, 2.0, 3), "red", [0.5, 1.5])
    charts = [
        dot_rows([dot], x_label=bad),
        sweep_chart([Trail(bad, "red", [(0, dot)])] * 2, [bad], x_label=bad, y_label=bad),
        line_chart([Series(bad, [(0, 1)], "red")], x_label=bad, y_label=bad),
        distribution([(bad, [1.0, 2.0], "red")], x_label=bad),
        scatter([(0, 1)], "red", x_label=bad, y_label=bad),
        stacked_bars([(bad, [(bad, 1.0, "red")])], x_label=bad),
    ]
    for chart in charts:
        ElementTree.fromstring(chart)
        assert "<script" not in chart


def test_a_key_tells_dashed_lines_from_whole_ones_of_the_same_colour():
    lines = [Series(f"run {i}", [(0, 0)], "red", dash="5 3" * (i > 7)) for i in range(9)]
    assert legend_of(lines).count('class="dot"') == 8
    assert '<i class="dashed" style="--key:red"></i>run 8' in legend_of(lines)
