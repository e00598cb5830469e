import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from marlhf.report.numbers import duration, num, percent
from marlhf.report.page import SCRIPT
from marlhf.report.sections.samples import Macro, macro_actions
from marlhf.report.tables import csv_link
from marlhf.report.write import write_report

VOID = {"meta", "br", "hr", "img", "input", "link"}
SECTIONS = [
    "summary",
    "learning",
    "frontier",
    "sweeps",
    "distributions",
    "samples",
    "training",
    "timing",
    "stages",
    "settings",
]
HOSTILE = "</p></style><script>alert('x')</script><img src=https://evil.example/x onerror=alert(1)>"


class Page(HTMLParser):
    """Checks that tags are balanced and keeps what a browser would load or run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("href", "src", "srcset", "action", "data", "poster"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another tag at {self.getpos()}"


def check(html: str) -> Page:
    """What must hold for every report; of scripts it has its own alone."""
    page = Page(without_script(html))
    assert all(link.startswith(("#", "data:text/csv")) for link in page.links)
    assert page.tags.isdisjoint({"script", "img", "iframe", "link", "object", "base", "form"})
    assert not [name for name in page.attributes if name.startswith("on")]
    assert "@import" not in html
    assert "url(" not in html
    assert not re.search(r">\s*(nan|inf)\b", html)
    assert len(page.ids) == len(set(page.ids))
    return page


def without_script(html: str) -> str:
    own = f"<script>{SCRIPT}</script>"
    assert html.count(own) == 1
    return html.replace(own, "")


@pytest.fixture
def report(tmp_path):
    return lambda *paths: write_report(paths, tmp_path / "out" / "r.html").read_text("utf-8")


def test_the_demo_has_every_section_once(report, demo):
    html = report(demo)
    assert check(html).ids == SECTIONS
    assert len(html) < 1_000_000


def test_every_figure_carries_its_data(report, demo):
    html = report(demo)
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    assert len(figures) > 25
    for figure in figures:
        (data,) = re.findall(r'href="data:text/csv;charset=utf-8,([^"]*)"', figure)
        lines = unquote(data).strip().split("\n")
        assert len(lines) > 1
        assert len({line.count(",") for line in lines}) == 1


def test_a_run_has_one_colour_in_all_figures(report, demo):
    html = report(demo)
    keys = re.findall(r'<i style="background:([^"]+)"></i>([^<]+)', html)
    ends = r'class="key" stroke="([^"]+)"[^>]*/><text class="end"[^>]*>([^<]+)<'
    assert len(re.findall(ends, html)) > 20
    keys += re.findall(ends, html)
    colours = {label: {c for c, other in keys if other == label} for _, label in keys}
    assert {label: len(found) for label, found in colours.items() if len(found) != 1} == {}


def test_score_never_stands_without_kl_and_length(report, demo):
    learning = re.search(r'<section id="learning">.*?</section>', report(demo), re.DOTALL)
    assert learning is not None
    for title in ("Score", "KL (nats per response)", "Length (tokens)"):
        assert learning[0].count(f"<b>{title}</b>") == 2  # over steps and over seconds
    for title in ("Gold score", "Repetition", "Win rate against SFT"):
        assert learning[0].count(f"<b>{title}</b>") == 1


def test_hostile_text_is_only_text(report, make_run):
    sample = {
        "step": 1,
        "index": 0,
        "prompt": HOSTILE,
        "response": HOSTILE,
        "pieces": [HOSTILE, "\ud800\x00", "\u202e"],
        "starts": [True, True, False],
        "advantages": [1.0, float("nan"), "x"],
    }
    config = {"segmenter": {"type": HOSTILE, HOSTILE: HOSTILE}, "output_dir": HOSTILE}
    rows = [{"kind": "eval", "step": s, "eval/score": 1.0, "eval/kl": 1.0} for s in (0, 1)]
    paths = [
        make_run(
            f"run{i}",
            name=f"{HOSTILE}{i}",
            status=HOSTILE,
            note=HOSTILE,
            marlhf=HOSTILE,
            started=HOSTILE,
            config={**config, "x": f"{HOSTILE}{i}"},
            metrics=rows,
            evaluations=[{"step": 1, "scores": [1.0, 2.0]}],
            samples=[sample],
        )
        for i in range(2)
    ]
    html = report(*paths)
    check(html)
    assert "<script" not in without_script(html)
    assert "&lt;script&gt;" in html


@pytest.mark.parametrize("step", [0, 1])
def test_one_step_is_enough(report, make_run, step):
    row = {"step": step, "seconds": 1.0}
    metrics = [
        {"kind": "train", **row, "rl/score": 0.1, "rl/kl": 0.0, "time/rollout": 0.0},
        {"kind": "eval", **row, "eval/score": 0.1, "eval/kl": 0.0},
    ]
    check(report(make_run("ppo", metrics=metrics, evaluations=[{"step": step, "scores": [0.1]}])))


def test_missing_pieces_are_left_out(report, make_run):
    rows = [{"kind": "train", "step": s, "seconds": s, "rl/score": 0.1 * s} for s in range(5)]
    html = report(make_run("ppo", metrics=rows))
    assert check(html).ids == ["summary", "learning"]
    assert "training batch" in html
    assert "Gold" not in html


def test_sft_alone_is_a_report(report, make_run):
    rows = [{"kind": "train", "step": s, "seconds": s, "sft/loss": 3 - s} for s in range(3)]
    rows.append({"kind": "eval", "step": 2, "seconds": 2, "eval/loss": 1.5})
    html = report(make_run("sft", stage="sft", metrics=rows))
    assert check(html).ids == ["summary", "stages"]
    assert "held-out loss <b>1.50</b>" in html


def test_a_diverged_run_is_a_report(report, make_run):
    nan, inf = float("nan"), float("inf")
    rows = [
        {"kind": kind, "step": s, "seconds": s, f"{key}/score": v, f"{key}/kl": v}
        for kind, key in (("train", "rl"), ("eval", "eval"))
        for s, v in enumerate([0.1, nan, inf, -inf, 1e308])
    ]
    evaluations = [{"step": s, "scores": [nan, 1.0, inf], "kl": [nan] * 3} for s in (0, 4)]
    check(report(make_run("ppo", metrics=rows, evaluations=evaluations)))


def test_an_empty_run_beside_others_is_mentioned(report, make_run, demo):
    html = report(demo, make_run("started", status="running", metrics=[]))
    assert "<b>started</b> (seed 0) has recorded nothing yet" in html


def test_long_runs_of_many_settings_stay_below_five_megabytes(report, make_run):
    pieces = [f" token{i}" for i in range(512)]
    sample = {"step": 5000, "prompt": "p" * 50_000, "pieces": pieces, "starts": [True] * 512}
    keys = ("score", "kl", "length", "reward", "policy_loss", "value_loss", "entropy", "q_norm")
    paths = []
    for i in range(20):
        rows = [
            {
                "kind": "train",
                "step": s,
                "seconds": s * 1.37,
                **{f"rl/{k}": s * 0.377 for k in keys},
            }
            for s in range(1500)
        ]
        rows += [
            {"kind": "eval", "step": s, "seconds": s * 1.37, **{f"eval/{k}": s / 7 for k in keys}}
            for s in range(0, 1500, 5)
        ]
        paths.append(
            make_run(
                f"r{i}",
                config={"segmenter": {"type": "ngram", "n": i + 1}},
                metrics=rows,
                evaluations=[{"step": s, "scores": [j / 7 for j in range(2000)]} for s in (0, 9)],
                samples=[{**sample, "index": j, "advantages": [0.1] * 512} for j in range(16)],
            )
        )
    html = report(*paths)
    check(html)
    assert len(html.encode()) < 5_000_000
    assert html.count('class="sample"') <= 12


def test_macro_actions_join_their_pieces():
    sample = {
        "pieces": ["The", " fox", " ran"],
        "starts": [False, False, True],
        "advantages": [0.5, 0.5, -1.0],
    }
    assert macro_actions(sample) == [Macro("The fox", 2, 0.5), Macro(" ran", 1, -1.0)]


def test_samples_of_one_prompt_stand_side_by_side(report, demo):
    html = report(demo)
    first = html.split('class="sample"')[1]
    names = re.findall(r'class="chip"><i [^>]*></i>([^<]+)', first)
    assert names == ["before RL", "ppo", "macro-ppo"]
    assert 'title="advantage ' in first


def test_macro_actions_are_told_apart_by_more_than_colour(report, demo):
    samples = report(demo).split('id="samples"')[1]
    assert "dotted underline" in samples  # in the key
    assert re.search(r'<i class="n\d m" title="advantage \u2212[\d.]+, 5 tokens">', samples)
    assert re.search(r'<i class="p\d m" title="advantage \+[\d.]+, 5 tokens">', samples)


def test_best_of_eight_stands_beside_what_training_did(report, make_run):
    rows = [{"kind": "train", "step": 1, "seconds": 1, "sft/loss": 1.0}]
    folder = make_run("sft", stage="sft", metrics=rows)
    (folder / "best_of_n").mkdir()
    # of 8 samples 0 .. 7 the mean is 3.5 and the best of 8 is 7
    line = {"setting": "s", "key": "k", "scores": [*range(8)], "lengths": [1] * 8}
    line["sampling"] = {"temperature": 1.0, "max_new_tokens": 8, "seed": 0, "rewards": "rm"}
    (folder / "best_of_n" / "t1-m8-s0-rm.jsonl").write_text(json.dumps(line) + "\n")
    html = report(folder)
    check(html)
    assert "sft \u2192 its best of 8" in html
    assert "k,3.5,7" in unquote(html)


def test_warnings_come_first_and_long_lists_wait_behind_a_click(report, make_run):
    paths = []
    for i in range(8):
        rows = [
            {"kind": "eval", "step": s, "seconds": s, "eval/score": s, "eval/length": 9 + 9 * s * i}
            for s in (0, 1)
        ]
        lengths = [
            {"step": s, "scores": [s, s + 0.1], "length": [8 + 9 * s * i, 10 + 9 * s * i]}
            for s in (0, 1)
        ]
        config = {"sigma": f"{i}"}
        paths.append(make_run(f"r{i}", config=config, metrics=rows, evaluations=lengths))
    html = report(*paths)
    check(html)
    first = html.split("What this shows</h3><ul><li>")[1]
    assert first.startswith('<span class="warn">Look twice')
    assert "<details><summary>" in html


def test_unfinished_runs_of_one_setting_are_drawn_as_far_as_they_came(report, make_run):
    def rows(last):
        return [
            {"kind": "eval", "step": s, "seconds": s, "eval/score": s, "eval/kl": s}
            for s in range(last)
        ]

    config = {"segmenter": {"type": "ngram", "n": 1}}
    paths = [
        make_run("a", seed=0, config=config | {"seed": 0}, metrics=rows(5)),
        make_run("b", seed=1, config=config | {"seed": 1}, metrics=rows(2), status="running"),
        make_run("c", seed=0, config={"segmenter": {"type": "ngram", "n": 5}}, metrics=rows(1)),
    ]
    html = report(*paths)
    check(html)
    assert "is still running at step 1" in html


def test_noisy_training_curves_are_smoothed_and_say_so(report, make_run):
    rows = [
        {"kind": "train", "step": s, "seconds": s, "rl/entropy": float(s % 2)} for s in range(1, 91)
    ]
    html = report(make_run("ppo", metrics=rows))
    # 90 steps: means over 3, of 0 and 1 in turn a third or two thirds
    assert "Running means over 3 steps" in html
    line = next(x for x in unquote(html).split("\n") if x.startswith("ppo,45,"))
    assert line == "ppo,45,45,1,1,1,0.333333"


def test_what_most_people_said_is_a_row_of_its_own(make_run):
    from marlhf.judge.verdicts import Judgement, write_verdicts
    from marlhf.report.sections.judged import judged
    from marlhf.runs.read import read_run

    folder = make_run("new", metrics=[{"step": 1, "rl/score": 1.0}])
    votes = {"ann": "aab", "ben": "abt", "cat": "abt"}  # pairs: a, b, tie
    for name, verdicts in votes.items():
        judgements = [
            Judgement(f"p{i}", "x", "y", {"a": "a", "b": "b", "t": "tie"}[v])
            for i, v in enumerate(verdicts)
        ]
        about = {"judge": f"person:{name}", "task": "hh", "a": "new", "b": "old"}
        write_verdicts(folder / "judged" / f"{name}.jsonl", judgements, about)
    html = judged([read_run(folder)])
    assert "by most of 3 people" in html
    row = next(x for x in unquote(html).split("\n") if "most of 3 people" in x and "new,old" in x)
    win, tie, loss = (float(row.split(",")[i]) for i in (5, 8, 11))
    assert (win, tie, loss) == pytest.approx((1 / 3, 1 / 3, 1 / 3), abs=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"dimensions": {"depth": 3}},
        {"dimensions": {"depth": {"a": {}, "b": {}}}},
        {"win": {"share": float("nan"), "low": 0.0, "high": 1.0}},
        {"win": {"share": 10**400, "low": 0.0, "high": 1.0}},
        {"pairs": "many"},
        {"tie": []},
    ],
)
def test_damaged_verdicts_are_left_out(report, make_run, change):
    folder = make_run("new", metrics=[{"step": 1, "rl/score": 1.0}])
    parts = {name: {"share": 0.5, "low": 0.4, "high": 0.6} for name in ("win", "tie", "loss")}
    about = {"judge": "person:ann", "task": "hh", "a": "new", "b": "old", "pairs": 4}
    (folder / "judged").mkdir()
    for name, more in (("ann", {}), ("ben", change)):
        whole = about | {"judge": f"person:{name}", "dimensions": {}} | parts | more
        (folder / "judged" / f"{name}.json").write_text(json.dumps(whole))
        lines = [about | {"prompt": "p", "response_a": "x", "response_b": "y", "verdict": ["a"]}]
        (folder / "judged" / f"{name}.jsonl").write_text(json.dumps(lines[0]) + "\n")
    html = report(folder)
    check(html)
    assert "by person:ann" in html
    assert "by person:ben" not in html


def test_kappa_is_undefined_where_a_judge_never_varies(make_run):
    """Whatever the other says, agreement with such a judge is what chance gives: kappa 0."""
    from marlhf.judge.verdicts import Judgement, write_verdicts
    from marlhf.report.sections.judged import judged
    from marlhf.runs.read import read_run

    folder = make_run("new", metrics=[{"step": 1, "rl/score": 1.0}])
    for name, verdicts in {"ann": "aaaa", "ben": "abab", "cat": "abba"}.items():
        judgements = [Judgement(f"p{i}", "x", "y", v) for i, v in enumerate(verdicts)]
        about = {"judge": f"person:{name}", "task": "hh", "a": "new", "b": "old"}
        write_verdicts(folder / "judged" / f"{name}.jsonl", judgements, about)
    html = judged([read_run(folder)])
    assert html.count("undefined: one never varies</td>") == 2
    data = next(x for x in re.findall(r'href="([^"]*)"', html) if "kappa" in unquote(x))
    header, *rows = [line.split(",") for line in unquote(data).strip().split("\n")]
    assert {len(row) for row in rows} == {len(header) - 1}  # the header has text/csv;...,judge
    assert [row[6].startswith("undefined") for row in rows] == [True, True, False]


def test_csv_cells_are_no_formulas():
    link = csv_link("a", ["run"], [["=1+1"], [-1.5], [float("nan")], ['say "hi", you']])
    lines = unquote(link.split("utf-8,")[1].split('"')[0]).split("\n")
    assert lines[:4] == ["run", "'=1+1", "-1.5", '""']


def test_numbers_read_well():
    assert [num(v) for v in (1.414, -0.64, 38.26, 1234.5)] == ["1.41", "\u22120.64", "38.3", "1234"]
    assert [num(v) for v in (-0.004, -0.006)] == ["0.00", "\u22120.01"]
    assert [percent(v) for v in (0.5, 0.996, 1.0, 0.0)] == ["50%", "99.6%", "100%", "0%"]
    assert [duration(v) for v in (3.21, 42, 125, 7300)] == ["3.2 s", "42 s", "2.1 min", "2.0 h"]


def test_a_folder_as_output_gets_report_html(demo):
    assert write_report([demo], demo) == demo / "report.html"


def test_the_report_needs_no_torch(demo, tmp_path):
    code = (
        "import sys; from marlhf.report.write import write_report; "
        f"write_report([{json.dumps(str(demo))}], {json.dumps(str(tmp_path / 'r.html'))}); "
        "print(sorted({'torch', 'transformers', 'marlhf.train'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_baselines_stand_beside_ppo(make_run, tmp_path):
    def line(step: int, **numbers: float) -> dict:
        return {"kind": "train", "step": step, "seconds": float(step), **numbers}

    scores = {"ppo": 0.25, "rloo": 0.75}
    for stage, score in scores.items():
        metrics = [line(i, **{"rl/score": score, "rl/kl": 1.0}) for i in (1, 2)]
        make_run(stage, stage=stage, metrics=metrics, config={"segmenter": {"type": "ngram"}})
    make_run("dpo", stage="dpo", metrics=[line(1, **{"dpo/loss": 0.5})], config={"beta": 0.1})
    folders = [tmp_path / name for name in ("ppo", "rloo", "dpo")]
    page = write_report(folders, tmp_path / "report.html").read_text()
    assert "rloo: n-gram, n = 5" in page
    assert "direct preference optimisation" in page
    learning = unquote(page[page.index('id="learning"') :])
    assert "ppo,1,1,0.25" in learning
    assert "rloo,1,1,0.75" in learning
