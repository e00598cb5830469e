"""`marlhf best-of-n`: the estimate by hand, what is kept, and what is exported."""

import itertools
import json
import math
import random
import shlex
import sys

import pytest
import typer

from marlhf.cli import app, main
from marlhf.data import DataConfig, load_data
from marlhf.evaluate.best_of_n import best_of_n, export
from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions
from marlhf.evaluate.results import (
    Grid,
    expected_best,
    expected_of_best,
    grid_table,
    kl_bound,
    read_grids,
)
from marlhf.evaluate.sampling import SamplingTask
from marlhf.report.dots import heat_map
from marlhf.report.write import write_report
from marlhf.runs.atomic import append_jsonl
from small_runs import assert_alike

FEW = EvaluationOptions(prompts=3, device="cpu")


def test_the_estimate_by_hand():
    scores = [4.0, 1.0, 2.0, 3.0]
    assert expected_best(scores, 1) == 2.5  # the mean
    assert expected_best(scores, 4) == 4.0  # the maximum
    # pairs: 2 beats 1; 3 beats 1, 2; 4 beats 1, 2, 3: (2 + 3*2 + 4*3) / 6
    assert expected_best(scores, 2) == pytest.approx(20 / 6)
    # three: 3 once, 4 three times
    assert expected_best(scores, 3) == pytest.approx(15 / 4)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_the_estimate_is_the_mean_over_all_choices(n):
    draw = random.Random(n)
    scores = [float(draw.randrange(5)) for _ in range(7)]  # with ties
    choices = [max(each) for each in itertools.combinations(scores, n)]
    assert expected_best(scores, n) == pytest.approx(sum(choices) / len(choices))


def test_lengths_are_those_of_the_best():
    # best of 2 of scores 1, 2, 3 is the second once, the third twice
    assert expected_of_best([10, 20, 50], [1.0, 2.0, 3.0], 2) == pytest.approx(40.0)


def test_too_few_samples_are_a_sentence():
    with pytest.raises(ValueError, match="at least 3 samples"):
        expected_best([1.0, 2.0], 3)


def test_the_bound_on_kl():
    assert kl_bound(1) == 0.0
    assert kl_bound(4) == pytest.approx(math.log(4) - 0.75)


def test_a_grid_by_hand():
    lines = [{"scores": [1.0, 2.0], "lengths": [3, 5]}, {"scores": [5.0, 4.0], "lengths": [2, 8]}]
    found = Grid([1, 2], {0.5: lines})
    assert found.cell(0.5, 1).mean == 3.0  # (1.5 + 4.5) / 2
    assert found.cell(0.5, 2).mean == 3.5  # (2 + 5) / 2
    assert found.length(0.5, 2) == 3.5  # (5 + 2) / 2
    assert grid_table(found).splitlines()[0].split() == [
        "temperature",
        *["best", "of", "1", "best", "of", "2"],
    ]


def test_smaller_n_and_second_calls_sample_nothing(finished, monkeypatch):
    found = best_of_n(finished / "ppo", FEW, [2, 4], [0.5, 1.0])
    assert [len(line["scores"]) for line in found.lines[0.5]] == [4, 4, 4]
    assert found.cell(1.0, 4).mean >= found.cell(1.0, 2).mean
    for line in found.lines[1.0]:
        assert line["best"]["score"] == max(line["scores"])
    monkeypatch.setattr(SamplingTask, "sample", None)
    again = best_of_n(finished / "ppo", FEW, [1, 3], [0.5, 1.0])
    assert again.lines == found.lines
    assert list(read_grids(finished / "ppo")["8 tokens, reward"].lines) == [0.5, 1.0]


def test_a_larger_n_adds_to_the_samples_there_are(finished):
    small = best_of_n(finished / "ppo", FEW, [2], [1.0]).lines[1.0]
    large = best_of_n(finished / "ppo", FEW, [5], [1.0]).lines[1.0]
    assert [line["scores"][:2] for line in large] == [line["scores"] for line in small]
    assert [len(line["scores"]) for line in large] == [5, 5, 5]


def test_a_stopped_sampling_goes_on_to_the_same_end(finished, monkeypatch):
    whole = best_of_n(finished / "ppo", FEW, [3])
    [file] = (finished / "ppo/best_of_n").iterdir()
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    monkeypatch.setattr("marlhf.evaluate.best_of_n.ROWS", 1)
    assert_alike(best_of_n(finished / "ppo", FEW, [3]).lines, whole.lines)
    lines = [[json.loads(line) for line in x.splitlines()] for x in (file.read_text(), text)]
    assert_alike(*lines)


@pytest.mark.parametrize(("ns", "message"), [([0, 4], "each at least 1"), ([], "one n or more")])
def test_nonsense_is_a_sentence(finished, ns, message):
    with pytest.raises(EvaluationError, match=message):
        best_of_n(finished / "ppo", FEW, ns)


def test_several_runs_are_a_sentence(finished):
    with pytest.raises(EvaluationError, match="holds 4 runs"):
        best_of_n(finished, FEW, [2])


def line(prompt, *responses):
    scores = [score for score, *_ in responses]
    score, text, ended = max(responses)
    best = {"number": 0, "score": score, "response": text, "ended": ended}
    return {"prompt": prompt, "scores": scores, "lengths": [1] * len(scores), "best": best}


def test_the_export_is_data_for_sft(tmp_path):
    cool = [line("Why?", (1.0, " So.", True)), line("How?", (0.0, " Thus.", True))]
    warm = [line("Why?", (3.0, " Because.", True)), line("How?", (2.0, " Like thi", False))]
    file = tmp_path / "best.jsonl"
    assert export(Grid([1], {0.2: cool, 0.8: warm}), file) == (0.8, 1, 1)
    data = DataConfig(path=str(file), parts={}, eval_size=0)
    [row] = load_data(data, "sft", needs=("prompt", "chosen")).train
    assert (row.prompt, row.chosen) == ("Why?", " Because.")
    with pytest.raises(EvaluationError, match="nothing to write"):
        export(Grid([1], {0.8: warm[1:]}), file)


def test_training_prompts_are_others(finished):
    held_out = best_of_n(finished / "ppo", FEW, [1])
    trained = best_of_n(
        finished / "ppo", EvaluationOptions(prompts=3, train=True, device="cpu"), [1]
    )
    asked = [{x["prompt"] for x in each.lines[1.0]} for each in (held_out, trained)]
    assert not asked[0] & asked[1]
    rows = load_data(DataConfig(source="toy", limit=200, eval_size=12), "ppo").train
    assert asked[1] <= {row.prompt for row in rows}


def test_the_report_has_a_heat_map(finished, tmp_path):
    best_of_n(finished / "ppo", FEW, [4], [0.5, 1.0])
    write_report([finished], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    part = page[page.index('id="best_of_n"') :].partition("</section>")[0]
    assert part.count("<rect") == 2 * 3  # two temperatures, n of 1, 2 and 4


def test_damaged_lines_are_left_out_of_the_report(tmp_path):
    file = tmp_path / "best_of_n" / "t0.5-m8-s0-reward.jsonl"
    good = {"setting": "s", "key": "1", "scores": [1.0, 2.0], "lengths": [3, 4]}
    good["sampling"] = {"temperature": 0.5, "max_new_tokens": 8, "seed": 0, "rewards": "reward"}
    bad = [{"scores": "x"}, {"scores": [1.0]}, {"scores": [None, 1.0]}, {"lengths": [1]}]
    append_jsonl(file, [good | each | {"key": str(i)} for i, each in enumerate([*bad, {}])])
    assert [line["key"] for line in read_grids(tmp_path)["8 tokens, reward"].lines[0.5]] == ["4"]


def test_a_heat_map_darkens_with_the_value_and_leaves_gaps():
    chart = heat_map(["<a>"], ["1", "2", "3"], [[0.0, 1.0, math.nan]], x_label="n", y_label="t")
    assert chart.index("(--heat),0.06)") < chart.index("(--heat),0.60)")
    assert chart.count("<rect") == 2
    assert "<a>" not in chart


def test_options_take_several_values():
    group = typer.main.get_command(app)
    words = shlex.split("runs/a --n 4 8 16 --temperature 0.2 1.2 --prompts 10 --n 32")
    found = group.commands["best-of-n"].make_context("best-of-n", words).params
    assert [*found["n"]] == [4, 8, 16, 32]
    assert [*found["temperature"]] == [0.2, 1.2]
    words = ["runs/a", "runs/b", "--reward", "r1", "r2", "--seed", "3"]
    found = group.commands["evaluate"].make_context("evaluate", words).params
    assert [str(run) for run in found["runs"]] == ["runs/a", "runs/b"]
    assert [*found["reward"]] == ["r1", "r2"]


def test_the_commands_print_their_tables(finished, capsys, monkeypatch):
    def say(*words):
        monkeypatch.setattr(sys, "argv", ["marlhf", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        return capsys.readouterr().out

    out = say("evaluate", finished / "ppo", "--prompts", 2, "--device", "cpu")
    assert out.split()[:2] == ["reward", "gold"]
    assert out.splitlines()[1].startswith("ppo ")
    out = say("best-of-n", finished / "ppo", "--n", 1, 2, "--temperature", 0.3, 1, "--prompts", 2)
    assert [row.split()[0] for row in out.splitlines()] == ["temperature", "0.3", "1"]
    lines = (finished / "ppo/evaluation/t1-m8-s0.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0])["response"]
