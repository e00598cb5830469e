"""What a reader can do with the page, without a script: hover, switch runs off, sort, unfold."""

import re

import pytest

from marlhf.report.charts import Scale, columns
from marlhf.report.write import report_html, watch_report, write_report
from marlhf.runs.read import find_runs

AXES = Scale(0, 100, 0, 100), Scale(50, 0, 50, 0)
"""One pixel for one unit."""


def _values(html: str) -> list[list[str]]:
    boxes = re.findall(r'<g class="tip">(.*?)</g></g>', html, re.S)
    return [re.findall(r"<text[^>]*>([^<]*)", box) for box in boxes]


def _columns(*lines):
    return _values(columns(lines, AXES, x_label="step", form="{:g}".format))


def test_a_column_shows_every_line_at_its_step():
    shown = _columns(("a", "red", [(0, 1.0), (10, 2.0)]), ("b", "red", [(0, 3.0), (10, 4.0)]))
    assert shown == [["step 0", "a 1", "b 3"], ["step 10", "a 2", "b 4"]]


def test_a_line_without_a_number_nearby_is_left_out():
    shown = _columns(("a", "red", [(0, 1.0), (1, 1.5), (10, 2.0)]), ("b", "red", [(0, 3.0)]))
    assert shown[-1] == ["step 10", "a 2"]
    assert _columns(("a", "red", [(0, float("nan"))])) == []


def test_columns_cover_the_figure_without_overlap():
    html = columns([("a", "red", [(20, 1.0), (40, 1.0), (80, 1.0)])], AXES, x_label="x", form=str)
    found = re.findall(r'<rect class="hit" x="([\d.]+)" y="0" width="([\d.]+)"', html)
    sides = [(float(x), float(x) + float(width)) for x, width in found]
    assert sides == [(0, 30), (30, 60), (60, 100)]


def test_the_header_names_model_data_and_hardware(make_run):
    folder = make_run(
        "ppo",
        config={"model": "org/small", "data": {"source": "tldr"}},
        metrics=[{"kind": "train", "step": 1, "rl/score": 0.1}],
        hardware="NVIDIA H200",
    )
    header = report_html(find_runs([folder])).split("</header>")[0]
    for words in ("org/small", "tldr", "NVIDIA H200"):
        assert f"<b>{words}</b>" in header


def test_the_whole_config_is_on_the_page_as_text(make_run):
    folder = make_run(
        "ppo",
        config={"model": "m", "note": "</pre><script>x</script>"},
        metrics=[{"kind": "train", "step": 1, "rl/score": 0.1}],
    )
    html = report_html(find_runs([folder]))
    assert "Whole config of ppo" in html
    assert "note: &lt;/pre&gt;&lt;script&gt;x" in html


def test_watching_ends_with_the_runs_and_the_last_page_stays(make_run, tmp_path, monkeypatch):
    rows = [{"kind": "train", "step": 1, "rl/score": 0.1}]
    make_run("all/ppo", status="running", metrics=rows)
    naps = []

    def nap(seconds):
        naps.append(seconds)
        make_run("all/ppo", status="finished", metrics=rows)

    monkeypatch.setattr("time.sleep", nap)
    pages = [
        page.read_text("utf-8")
        for page in watch_report([tmp_path / "all"], tmp_path / "r.html", every=5)
    ]
    assert ['http-equiv="refresh" content="5"' in page for page in pages] == [True, True, False]
    assert naps == [5, 5]


def test_watching_waits_for_the_first_step(make_run, tmp_path, monkeypatch):
    folder = make_run("all/ppo", status="running", metrics=[])
    rows = [{"kind": "train", "step": 1, "rl/score": 0.1}]
    monkeypatch.setattr(
        "time.sleep", lambda _: make_run("all/ppo", status="finished", metrics=rows)
    )
    assert len(list(watch_report([folder], tmp_path / "r.html"))) == 2


@pytest.mark.browser
def test_hovering_sorting_and_switching_work_without_scripts(demo, browser, tmp_path):
    file = write_report([demo], tmp_path / "r.html")
    context = browser.new_context(
        java_script_enabled=False, viewport={"width": 1280, "height": 900}
    )
    page = context.new_page()
    page.goto(file.as_uri())
    tip = page.locator("#learning .hover .tip").nth(3)
    assert not tip.is_visible()
    page.locator("#learning .hover .hit").nth(3).hover()
    assert tip.is_visible()
    assert "ppo" in (tip.text_content() or "")

    lines = page.locator("#learning svg .r0 .line")
    assert lines.first.is_visible()
    page.get_by_label("ppo", exact=True).uncheck()
    assert not lines.first.is_visible()
    assert page.locator("#learning svg .r1 .line").first.is_visible()
    assert page.locator("#summary tbody tr").nth(1).is_hidden()
    page.get_by_label("ppo", exact=True).check()

    def gaps():
        """macro-ppo minus ppo of each prompt, from the top of the page to its end."""
        found = []
        for sample in page.locator("#samples .sample").all():
            scores = [
                float(re.search(r"score (\S+)", facts)[1].replace("\u2212", "-"))
                for facts in sample.locator(".facts").all_inner_texts()[1:]
            ]
            found.append((sample.bounding_box()["y"], scores[1] - scores[0]))
        return [gap for _, gap in sorted(found)]

    page.get_by_label("largest macro-ppo \u2212 ppo").check()
    assert gaps() == sorted(gaps(), reverse=True)
    page.get_by_label("smallest macro-ppo \u2212 ppo").check()
    assert gaps() == sorted(gaps())

    assert not page.locator("#training figure").first.is_visible()
    page.locator("nav a", has_text="Training").click()
    assert page.locator("#training figure").first.is_visible()
    context.close()


@pytest.mark.browser
def test_paper_shows_folded_sections_and_keeps_headings_with_their_text(demo, browser, tmp_path):
    file = write_report([demo], tmp_path / "r.html")
    page = browser.new_page()
    page.goto(file.as_uri())
    page.emulate_media(media="print")
    assert page.locator("#training figure").first.is_visible()
    assert not page.locator(".top").is_visible()
    assert page.locator("h2").first.evaluate("e => getComputedStyle(e).breakAfter") == "avoid"
    page.close()
