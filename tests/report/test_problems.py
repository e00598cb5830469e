"""pass@k on the page: from files that others may have written or damaged."""

import json

import pytest

from marlhf.report.write import write_report

HOSTILE = "<img src=x onerror=alert(1)>"
ROW = {"difficulty": "all", "problems": 8, "pass@1": [0.5, 0.25, 0.75], "results": {"passed": 0.5}}


@pytest.fixture
def page_of(make_run, tmp_path):
    """`page_of(summary)`: the report of one run with this pass_at_k.json."""

    def make(summary):
        run = make_run("ppo", metrics=[{"step": 1, "rl/score": 1.0}])
        (run / "pass_at_k.json").write_text(json.dumps(summary))
        return write_report([run], tmp_path / "report.html").read_text()

    return make


def test_rates_are_shown_in_percent_with_their_interval(page_of):
    page = page_of({"k": [1], "samples": 4, "rows": [ROW]})
    assert "50.00<small>[25.00, 75.00]</small>" in page
    assert "50% passed" in page


def test_a_file_without_k_is_read_from_its_rows(page_of):
    assert "50.00<small>[25.00, 75.00]</small>" in page_of({"samples": 4, "rows": [ROW]})


@pytest.mark.parametrize(
    "change",
    [
        {"samples": HOSTILE},
        {"rows": [ROW | {"problems": HOSTILE}]},
        {"rows": [ROW | {"difficulty": HOSTILE}]},
        {"rows": [ROW | {"results": {HOSTILE: 1.0}}]},
        {"rows": [ROW | {"pass@1": [HOSTILE, 0, 1]}]},
        {"rows": [ROW | {f"pass@{HOSTILE}": [0.5, 0, 1]}]},
    ],
)
def test_nothing_in_the_file_becomes_markup(page_of, change):
    assert "<img" not in page_of({"k": [1], "samples": 4, "rows": [ROW]} | change)


@pytest.mark.parametrize(
    "summary",
    [
        [],
        {"rows": "all"},
        {"rows": [3]},
        {"rows": [ROW]},
        {"samples": 4, "rows": [{"difficulty": "all"}]},
        {"samples": 4, "rows": [ROW | {"results": 3}]},
        {"samples": 4, "rows": [ROW | {"pass@1": [0.5]}]},
        {"samples": 4, "rows": [ROW | {"pass@1": None}]},
    ],
)
def test_a_damaged_file_is_left_out(page_of, summary):
    assert "Problems solved" not in page_of(summary)
