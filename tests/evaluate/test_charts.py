import math
import re
from xml.etree import ElementTree

import pytest

from marlhf.evaluate.charts import (
    Series,
    distribution,
    histogram,
    line_chart,
    nice_ticks,
    scatter,
    span,
    stacked_bars,
    tick_text,
)


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


def test_labels_are_escaped_in_every_chart():
    bad = "<script>alert(1)</script>"
    charts = [
        line_chart([Series(bad, [(0, 1)], "red")], x_label=bad, y_label=bad),
        distribution([(bad, [1.0, 2.0], "red")], x_label=bad),
        scatter(Series(bad, [(0, 1)], "red"), x_label=bad, y_label=bad),
        stacked_bars([(bad, [(bad, 1.0, "red")])], x_label=bad),
    ]
    for chart in charts:
        ElementTree.fromstring(chart)
        assert "<script" not in chart
