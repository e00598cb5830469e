"""The evidence: its data is split by post, its archive is small, and the page is made from it."""
# ruff: noqa: E402  (the scripts' folder has to be found first)

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from marlhf.data import DataConfig, load_data
from marlhf.data.guess import read_guess
from marlhf.data.sums import right_lines
from marlhf.models.tiny import tiny_tokenizer
from marlhf.runs.atomic import read_jsonl
from marlhf.runs.read import Evaluation, Run
from marlhf.train.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import evidence_data
import evidence_pack
import evidence_report
from evidence.data import SLIPS, prepare, thinking
from evidence.results import (
    COARSE_LABELS,
    FAST_LABELS,
    GAIN_METHODS,
    GAIN_STARTS,
    LABELS,
    OTHER_BETAS,
    PROCESS_LABELS,
    QWEN_LABELS,
    QWEN_TASKS,
    REACH_LABELS,
    SUMS_LABELS,
    UPDATES_LABELS,
    Results,
    method_of,
    objective,
    over_reward_models,
    over_runs,
    score,
)
from evidence.tables import MINUS, number, signed
from evidence.turn_length import LENGTHS

MAX_ARCHIVE = 400_000


def write_lines(file: Path, rows: list[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@pytest.fixture
def pairs(tmp_path) -> list[str]:
    """TL;DR pairs in two forms; every tenth post is in both files."""
    files = []
    for name, extra in (("a", {}), ("b", {"subreddit": "pets", "title": "Foxes"})):
        posts = [f"Post {'ab' if i % 10 == 0 else name} {i}: a fox saw a hat." for i in range(70)]
        rows = [{**extra, "post": p, "chosen": "a red hat", "rejected": "a hat"} for p in posts]
        files.append(str(write_lines(tmp_path / f"{name}.jsonl", rows)))
    return files


def test_no_post_is_in_two_parts(pairs, tmp_path, monkeypatch, capsys):
    words = ["evidence_data.py", "tldr", "--out", str(tmp_path / "data"), "--pairs", *pairs]
    monkeypatch.setattr(sys, "argv", words)
    evidence_data.main()
    folder = tmp_path / "data" / "tldr"
    posts = {
        part: {row["post"] for row in read_lines(folder / f"{part}.jsonl")}
        for part in ("gold", "test", "train")
    }
    assert sum(map(len, posts.values())) == len(set.union(*posts.values())) == 133
    assert len(posts["train"]) > len(posts["gold"]) > len(posts["test"]) > 0
    counts = json.loads((folder / "split.json").read_text("utf-8"))
    assert sum(counts[part]["rows"] for part in posts) == 140


def test_data_that_is_there_is_not_made_again(pairs, tmp_path):
    prepare("tldr", pairs, tmp_path / "tldr")
    (tmp_path / "tldr" / "train.jsonl").write_text("mine")
    prepare("tldr", pairs, tmp_path / "tldr")
    assert (tmp_path / "tldr" / "train.jsonl").read_text() == "mine"


def test_problems_of_mbpp_keep_their_official_parts(tmp_path):
    rows = [{"task_id": i, "text": "Add.", "code": "", "test_list": []} for i in (5, 11, 510, 511)]
    prepare("mbpp", [str(write_lines(tmp_path / "mbpp.jsonl", rows))], tmp_path / "mbpp")
    parts = {
        part: [row["task_id"] for row in read_lines(tmp_path / "mbpp" / f"{part}.jsonl")]
        for part in ("test", "train")
    }
    assert parts == {"test": [11, 510], "train": [511]}


def test_more_slips_are_in_the_same_prompts_and_parts(tmp_path):
    prepare("sums", [], tmp_path / "sums")
    split = {"parts": {"sft": 0.4, "ppo": 0.6}, "eval_size": 256}
    mine = load_data(DataConfig(source="sums", **split), "sft")
    for slip in SLIPS:
        path = str(tmp_path / "sums" / f"slips-{100 * slip:.0f}.jsonl")
        loaded = load_data(DataConfig(source="local", path=path, **split), "sft")
        for ours, theirs in ((loaded.train, mine.train), (loaded.eval, mine.eval)):
            assert {row.prompt for row in ours} == {row.prompt for row in theirs}
        right = [right_lines(str(row.prompt), str(row.chosen)) for row in loaded.train]
        assert 1 - np.mean(right) == pytest.approx(slip, abs=0.01)


@pytest.fixture
def sweep_folder(tmp_path) -> Path:
    """A sweep with one run that was evaluated twice."""
    folder = tmp_path / "sweep"
    rows = [
        {"step": 0, "scores": [0.123456, None], "kl": [0.04321, 0.1], "length": [3, 4]},
        {"step": 5, "scores": [1.23456, 1.0], "kl": [2.04321, 3.1], "length": [3, 4]},
    ]
    write_lines(folder / "ppo" / "eval.jsonl", rows)
    for name in ("ppo/run.json", "ppo/config.yaml", "ppo/model/config.json", "cache/a.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for name in ("ppo.log", "data/tldr/train.jsonl"):
        write_lines(folder / name, [{}])
    metrics = {"step": 1, "rl/explained_variance_1": 0.123456, "rl/clip_fraction": 0.1}
    metrics["eval/disagreement"] = 0.25
    write_lines(folder / "ppo" / "metrics.jsonl", [metrics])
    sampled = {"sampling": {"temperature": 0.0}, "prompt": "Why?", "response": "So.", "length": 2}
    scored = [sampled | {"scores": {"gold": x}, "kl": x} for x in (0.123456, None)]
    write_lines(folder / "ppo" / "evaluation" / "t0.jsonl", scored)
    return folder


def run_pack(monkeypatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["evidence_pack.py", *map(str, words)])
    evidence_pack.main()


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_the_archive_has_no_weights_and_no_rows(sweep_folder, tmp_path, monkeypatch):
    archive, inside = tmp_path / "evidence.tar.xz", tmp_path / "unpacked"
    run_pack(monkeypatch, sweep_folder, archive)
    run_pack(monkeypatch, "--unpack", archive, inside)
    names = ("eval.jsonl", "metrics.jsonl", "run.json", "config.yaml", "evaluation/t0.jsonl")
    assert files_in(inside) == {f"ppo/{name}" for name in names} | {"ppo.log"}
    assert (inside / "ppo/eval.jsonl").read_text() == (sweep_folder / "ppo/eval.jsonl").read_text()


def test_the_page_s_archive_has_rounded_evaluations(sweep_folder, tmp_path, monkeypatch):
    archive, inside = tmp_path / "evidence.tar.xz", tmp_path / "unpacked"
    run_pack(monkeypatch, sweep_folder, archive, "--page")
    run_pack(monkeypatch, "--unpack", archive, inside)
    kept = {"eval.jsonl", "metrics.jsonl", "run.json", "config.yaml", "evaluation/t0.jsonl"}
    assert files_in(inside) == {f"ppo/{name}" for name in kept}
    metrics = read_lines(inside / "ppo" / "metrics.jsonl")
    assert metrics == [{"step": 1, "rl/explained_variance_1": 0.1235, "eval/disagreement": 0.25}]
    [evaluated] = read_lines(inside / "ppo" / "evaluation" / "t0.jsonl")
    numbers = {"scores": {"gold": [0.12, None]}, "kl": [0.1, None], "length": [2, 2]}
    assert evaluated == {"sampling": {"temperature": 0.0}, **numbers}
    last = read_lines(inside / "ppo" / "eval.jsonl")
    assert last[0] == {"step": 0, "scores": [0.12, None], "kl": [0.0, 0.1], "length": [3, 4]}
    assert last[1] == {"step": 5, "scores": [1.23, 1.0], "kl": [2.0, 3.1], "length": [3, 4]}


def evaluated(name: str, teacher: str, scores: list[float], seed: int = 0) -> Run:
    evaluations = [
        Evaluation(0, [0.0] * len(scores), kl=[0.0] * len(scores)),
        Evaluation(10, scores, kl=[2.0] * len(scores)),
    ]
    return Run(Path(name), name, "ppo", seed=seed, evaluations=evaluations)


def test_differences_are_by_prompt_between_runs_of_one_seed():
    results = Results(
        {
            ("ppo", "a"): [evaluated("ppo", "a", [1.0, 5.0])],
            ("n5", "a"): [evaluated("n5", "a", [1.5, 5.5]), evaluated("x", "a", [9.0, 9.0], 1)],
        },
        {},
    )
    # Each prompt rises by 0.5, so that how hard prompts are leaves no interval; the second seed of
    # n5 has no partner, and no method has two seeds that others share: prompts alone.
    found = results.difference(score, "n5", "ppo", "a", 10, ["ppo"])
    assert found is not None
    assert found[:3] == (0.5, 0.5, 0.5)
    assert results.difference(score, "n5", "ppo", "b", 10) is None
    assert results.gain(score, "ppo", "a", 10).mean == 3.0
    assert results.mean(objective, "ppo", "a", 10) == pytest.approx(3.0 - 0.05 * 2.0)
    assert results.mean(score, "ppo", "a", None) == 1.5  # the mean of 0 and 3


def test_methods_share_their_spread_over_seeds():
    runs = {
        ("ppo", ""): [evaluated("p", "", [1.0, 1.0]), evaluated("p", "", [3.0, 3.0], 1)],
        ("n5", ""): [evaluated("n", "", [4.0, 4.0]), evaluated("n", "", [4.0, 4.0], 1)],
        ("n12", ""): [evaluated("o", "", [0.0, 0.0]), evaluated("o", "", [4.0, 4.0], 1)],
    }
    results = Results(runs, {})
    # Squares around the mean of each method: 2, 0 and 8, with one degree of freedom each.
    assert results.spread(score, "", 10, ["ppo", "n5"]) == (1.0, 2)
    assert results.spread(score, "", 10, ["ppo", "n5", "n12"]) == pytest.approx((10 / 3, 3))
    found = results.difference(score, "n5", "ppo", "", 10, ["ppo", "n5", "n12"])
    # Student's t with three degrees of freedom; two runs on each side; prompts do not vary.
    assert found is not None
    assert found.mean == 2.0
    assert found.high - found.mean == pytest.approx(3.182 * (10 / 3) ** 0.5, rel=1e-3)


def test_two_reward_models_have_no_interval():
    rows = [np.full(4, value) for value in (0.0, 1.0, 5.0)]
    two = over_reward_models([[row] for row in rows[:2]])
    assert two.mean == 0.5
    assert two.text() == "0.500"
    three = over_reward_models([[rows[0], rows[0]], [rows[1]], [rows[2]]])
    # The deviation of 0, 1 and 5 is sqrt(7); two degrees of freedom.
    assert three.high - three.mean == pytest.approx(4.303 * (7 / 3) ** 0.5, rel=1e-3)
    assert over_runs(rows[:2], 0.0, 0)[:3] == (0.5, 0.5, 0.5)


def test_numbers_have_a_sign_where_they_differ_from_zero():
    assert [signed(x) for x in (0.126, 0.001, -0.001)] == ["+0.13", "0.00", "0.00"]
    assert signed(-0.126) == f"{MINUS}0.13"
    assert number(-1.26, 1) == f"{MINUS}1.3"


def test_every_stage_of_the_recipe_has_a_place_in_the_tables():
    stages = [stage for stage in load_recipe("evidence/identify") if stage.kind in ("ppo", "rloo")]
    rules = [stage for stage in load_recipe("evidence/rules") if stage.kind == "ppo"]
    assert {method_of(stage.name) for stage in [*stages, *rules]} == set(LABELS)
    for stage in stages:
        assert Path(stage.config.gold_model).parent.name == "gold"
        assert stage.config.kl_coef == OTHER_BETAS.get(method_of(stage.name)[-4:], 0.05)


REACH = {"rloo", *REACH_LABELS, *(f"{method}-pre" for method in REACH_LABELS)}


GAIN = {
    f"{start}-{name}"
    for start in GAIN_STARTS
    for name in GAIN_METHODS
    if start == "share" or not name.endswith("-pre")
}


@pytest.mark.parametrize(
    ("recipe", "labels"),
    [
        ("evidence/sums", SUMS_LABELS),
        ("evidence/updates", UPDATES_LABELS | FAST_LABELS),
        ("evidence/coarse", COARSE_LABELS),
        ("evidence/prm", PROCESS_LABELS),
        ("evidence/critic-reach", REACH),
        ("evidence/gain", GAIN),
        ("evidence/turn-length", {f"{length}-turns-80" for length in LENGTHS}),
    ],
)
def test_every_stage_of_the_sums_has_a_place_in_its_table(recipe, labels):
    stages = [stage for stage in load_recipe(recipe) if stage.kind in ("ppo", "rloo")]
    assert {method_of(stage.name) for stage in stages} == set(labels)


def test_every_stage_of_the_larger_model_has_a_place_in_its_table():
    named = {f"{task}-{method}" for task in QWEN_TASKS for method in QWEN_LABELS}
    assert {method_of(stage.name) for stage in load_recipe("evidence/qwen")} == named


MARKED = re.compile(r"(<!-- evidence: .+? -->\n).*?(<!-- end of evidence -->)", re.S)


def test_the_pages_are_made_from_the_committed_archives(tmp_path, monkeypatch):
    docs, folder = tmp_path / "docs", ROOT / "docs" / "results"
    (docs / "results").mkdir(parents=True)
    names = ["results.md", *(f"results/{file.name}" for file in sorted(folder.glob("*.md")))]
    pages = {name: (ROOT / "docs" / name).read_text("utf-8") for name in names}
    for name, page in pages.items():
        (docs / name).write_text(MARKED.sub(r"\1\2", page), encoding="utf-8")
    given = [str(file) for file in sorted(folder.glob("*.xz"))]
    monkeypatch.setattr(sys, "argv", ["evidence_report.py", *given, "--docs", str(docs)])
    evidence_report.main()
    for name, page in pages.items():
        assert (docs / name).read_text("utf-8") == page, name
    figures = ("end-points", "frontier", "betas", "predicted")
    for name, least in (*((f"{figure}.svg", 16) for figure in figures), ("gain.svg", 15)):
        drawn, committed = ((f / name).read_text("utf-8") for f in (docs / "results", folder))
        marks = re.findall("<title>.*?</title>", drawn)  # the style may change, numbers may not
        assert len(marks) >= least
        assert marks == re.findall("<title>.*?</title>", committed)


def test_a_missing_archive_is_named(monkeypatch, capsys):
    archives = [f for f in (ROOT / "docs/results").glob("*.xz") if f.name != "rules.tar.xz"]
    words = ["evidence_report.py", *map(str, archives), "--docs", str(ROOT / "docs")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        evidence_report.main()
    assert "the pages need more archives: rules\n" in capsys.readouterr().err


def test_every_table_of_numbers_is_of_an_archive():
    """Where an experiment's page has a table, a script made it; what has no archive has none."""
    folder = ROOT / "docs" / "results"
    archives = {file.name.split(".")[0] for file in folder.glob("*.xz")}
    named: set[str] = set()
    for file in folder.glob("*.md"):
        page = file.read_text("utf-8")
        assert not re.search(r"^\|\s*:?---", MARKED.sub("", page), re.M), file.name
        named |= set(re.findall(r"<!-- evidence: [\w-]+ of ([\w-]+) -->", page))
    assert named == archives
    assert all(file.stat().st_size < MAX_ARCHIVE for file in folder.glob("*.xz"))


def test_thinking_makes_turns_longer_and_nothing_else(tmp_path):
    prepare("guess", [], tmp_path)
    short, long = (read_jsonl(tmp_path / f"think-{n}.jsonl").rows for n in (0, 40))
    tokenizer, thoughts = tiny_tokenizer(), thinking(40)
    assert thoughts[:27] == "abcdefghijklmnopqrstuvwxyza"
    for plain, thoughtful in zip(short[:64], long[:64], strict=True):
        assert plain["number"] == thoughtful["number"]
        said = (plain["prompt"] + plain["chosen"], thoughtful["prompt"] + thoughtful["chosen"])
        for before, after in zip(*said, strict=True):
            own = before["role"] == "assistant"
            assert after["content"] == (thoughts if own else "") + before["content"]
            if not own:
                continue
            sizes = [len(tokenizer(each["content"])["input_ids"]) for each in (before, after)]
            assert sizes[1] == sizes[0] + 40
            assert read_guess(after["content"]) == read_guess(before["content"])
