"""pass@k: the estimator by hand, and a measurement that can be stopped and gone on with."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import yaml

from marlhf.config.settings import to_raw
from marlhf.data import DataConfig, DataError
from marlhf.evaluate import pass_at_k as module
from marlhf.evaluate.eval_plan import EvaluationError
from marlhf.evaluate.pass_at_k import PassAtKOptions, measure
from marlhf.evaluate.results import pass_at_k, summarise_passes
from marlhf.intervals import bootstrap_mean
from marlhf.models.tiny import tiny_model, tiny_tokenizer
from marlhf.report.write import write_report
from marlhf.reward.code import UnitTests, Verdict
from marlhf.runs.layout import PASS_AT_K_LINES

OPTIONS = PassAtKOptions(k=(1, 2), samples=4, device="cpu")


class Judge(UnitTests):
    """Right where a response has an even length; no sandbox."""

    def __init__(self):
        super().__init__()
        self.judged = []

    @property
    def layers(self):
        return {"seccomp": True}

    def judge(self, responses, tests):
        self.judged += responses
        return [Verdict("passed" if len(r) % 2 == 0 else "failed", 1, 1) for r in responses]


@pytest.fixture
def run(tmp_path):
    """A finished run of the tiny model on the offline coding task."""
    folder = tmp_path / "ppo"
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    data = DataConfig(source="toy-code", limit=300, eval_size=0.3, parts={"sft": 0.2, "ppo": 0.8})
    config = {"data": to_raw(data), "sampling": {"max_new_tokens": 4}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    about = {"stage": "ppo", "status": "finished", "started": "2025-01-01", "seed": 0}
    (folder / "run.json").write_text(json.dumps(about | {"summary": {"eval/score": 0.5}}))
    return folder


def test_the_estimator_by_hand():
    assert pass_at_k(5, 0, 1) == 0
    assert pass_at_k(5, 5, 5) == 1
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    # of the six pairs of four samples, one has neither of the two right ones
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples"):
        pass_at_k(4, 1, 5)


def test_the_estimator_has_no_bias():
    """Over every way that n samples can fall out, its mean is the true chance of k."""
    p, n, k = 0.3, 6, 3
    chances = [p**c * (1 - p) ** (n - c) * _choose(n, c) for c in range(n + 1)]
    mean = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert mean == pytest.approx(1 - (1 - p) ** k)


def _choose(n, c):
    return math.comb(n, c)


def test_the_interval_narrows_with_problems():
    few, many = bootstrap_mean([0.0, 1.0] * 5), bootstrap_mean([0.0, 1.0] * 500)
    assert few.mean == many.mean == 0.5
    assert few.low < many.low < 0.5 < many.high < few.high
    assert many.high - many.low == pytest.approx(2 * 1.96 * 0.5 / 1000**0.5, rel=0.1)
    assert bootstrap_mean([0.25] * 9)[:3] == (0.25, 0.25, 0.25)


def test_difficulties_stand_apart_and_together():
    problems = [
        {"difficulty": "interview", "results": ["passed", "failed"]},
        {"difficulty": "introductory", "results": ["passed", "passed"]},
    ]
    rows = summarise_passes(problems, [1, 2])
    assert [row["difficulty"] for row in rows] == ["introductory", "interview", "all"]
    assert [row["pass@1"][0] for row in rows] == [1.0, 0.5, 0.75]
    assert rows[-1]["results"] == {"failed": 0.25, "passed": 0.75}
    assert [row["difficulty"] for row in summarise_passes(problems[:1], [1])] == ["all"]


def test_a_stopped_measurement_goes_on_to_the_same_result(run, monkeypatch):
    whole = measure(run, OPTIONS, Judge())
    assert whole["rows"][-1]["problems"] > 20
    assert 0 < whole["rows"][-1]["pass@1"][0] < 1
    lines = (run / PASS_AT_K_LINES).read_text().splitlines()
    (run / PASS_AT_K_LINES).write_text("\n".join(lines[:7]) + "\n" + lines[7][:20])  # torn
    judge = Judge()
    monkeypatch.setattr(module, "CHUNK", 5)
    assert measure(run, OPTIONS, judge) == whole
    assert len(judge.judged) == 4 * (len(lines) - 7)
    again = Judge()
    assert measure(run, OPTIONS, again) == whole
    assert again.judged == []


def test_more_samples_are_added_to_those_there_are(run):
    measure(run, OPTIONS, Judge())
    judge = Judge()
    more = measure(run, replace(OPTIONS, samples=6), judge)
    assert len(judge.judged) == 2 * more["rows"][-1]["problems"]
    fresh = run.parent / "fresh"
    shutil.copytree(run, fresh)
    (fresh / PASS_AT_K_LINES).unlink()
    assert measure(fresh, replace(OPTIONS, samples=6), Judge())["rows"] == more["rows"]


def test_another_temperature_is_another_measurement(run):
    measure(run, replace(OPTIONS, prompts=3), Judge())
    judge = Judge()
    measure(run, replace(OPTIONS, prompts=3, temperature=0.5), judge)
    assert len(judge.judged) == 12


def test_a_problem_without_a_verdict_is_left_out_and_tried_again(run):
    class Failing(Judge):
        def judge(self, responses, tests):
            found = super().judge(responses, tests)
            return [Verdict("sandbox_error"), *found[1:]]

    few = replace(OPTIONS, prompts=5)
    found = measure(run, few, Failing())
    assert (found["without_verdict"], found["rows"][-1]["problems"]) == (1, 4)
    judge = Judge()
    assert measure(run, few, judge)["without_verdict"] == 0
    assert len(judge.judged) == 4


def test_other_data_is_asked_whole(run, tmp_path):
    tests = {"kind": "stdin", "inputs": [""], "outputs": ["1"]}
    rows = [{"prompt": f"Print {n}.\n", "tests": tests} for n in range(3)]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    question = PassAtKOptions(k=(1,), samples=1, source="local", path=str(file), device="cpu")
    assert measure(run, question, Judge())["rows"][-1]["problems"] == 3


def test_what_cannot_be_measured_is_explained(run, tmp_path):
    with pytest.raises(ValueError, match="pass@20 needs at least 20 samples"):
        PassAtKOptions(k=(20,))
    file = tmp_path / "plain.jsonl"
    file.write_text('{"prompt": "Why?"}')
    with pytest.raises(DataError, match="no held-out problems with tests"):
        measure(run, PassAtKOptions(path=str(file), device="cpu"), Judge())
    shutil.rmtree(run / "model")
    with pytest.raises(EvaluationError, match="has no model yet"):
        measure(run, OPTIONS, Judge())


def test_the_report_shows_it(run, tmp_path):
    page = write_report([run], tmp_path / "before.html").read_text()
    assert "Problems solved" not in page
    found = measure(run, replace(OPTIONS, prompts=4), Judge())
    page = write_report([run], tmp_path / "after.html").read_text()
    assert "Problems solved" in page
    assert f"{100 * found['rows'][-1]['pass@2'][0]:.2f}" in page


def test_the_command_takes_several_k(run, monkeypatch, capsys):
    from marlhf.cli import main

    monkeypatch.setattr("marlhf.reward.code.UnitTests", lambda **settings: Judge())
    words = f"marlhf pass-at-k {run} --k 1 2 --samples 3 --prompts 4 --device cpu"
    monkeypatch.setattr("sys.argv", words.split())
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "pass@1" in (shown := capsys.readouterr().out)
    assert "pass@2" in shown
