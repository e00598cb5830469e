"""Sweeps, sizes and temperatures: found from the runs alone, and drawn in order."""

import csv
import json
import math
import re
import struct
from pathlib import Path
from urllib.parse import unquote

import pytest

from marlhf.report.findings import shows_not, verdict
from marlhf.report.groups import group_runs, unlike
from marlhf.report.sections.evaluations import temperatures
from marlhf.report.sections.sweeps import find_sweeps, scaling, size_text, sweeps, value_text
from marlhf.runs.read import chosen, find_runs, num_parameters, read_run


def _evals(score: float, kl: float = 2.0):
    return [
        {"kind": "eval", "step": step, "seconds": float(step), "eval/score": score * step / 10}
        | {"eval/kl": kl * step / 10, "eval/length": 30.0 + step}
        for step in (0, 10)
    ]


@pytest.fixture
def sweep(make_run, tmp_path):
    """`sweep({"n": 5, ...}, ...)`: policies whose config has these beside what all have."""

    def make(*settings, seeds=(0,)):
        for i, picked in enumerate(settings):
            for seed in seeds:
                config = {"segmenter": {"type": "ngram", "n": 1}, "seed": seed, **picked}
                name = f"sweep/{i},seed={seed}/ppo"
                config["output_dir"] = str(tmp_path / name)
                make_run(name, seed=seed, config=config, metrics=_evals(1.0 + i + seed / 10))
        return group_runs(find_runs([tmp_path / "sweep"]))

    return make


def _ngrams(*ns: float, **more):
    return [{"segmenter": {"type": "ngram", "n": n}, **more} for n in ns]


def _csv(html: str, title: str) -> list[list[str]]:
    figure = re.search(rf"<figure><figcaption><b>{re.escape(title)}</b>.*?</figure>", html, re.S)
    assert figure is not None
    (data,) = re.findall(r'href="data:text/csv;charset=utf-8,([^"]*)"', figure[0])
    return list(csv.reader(unquote(data).splitlines()))


def test_numbers_stand_in_order_and_infinity_last(sweep):
    (found,) = find_sweeps(sweep(*_ngrams(math.inf, 10, 1, 3)))
    assert found.key == "segmenter.n"
    assert found.places == ["1", "3", "10", "\u221e"]
    assert found.is_numeric
    assert [place for place, _ in found.lines[0][1]] == [0, 1, 2, 3]


def test_runs_of_a_sweep_are_named_by_what_they_differ_in(sweep):
    groups = sweep(*_ngrams(5, 1, math.inf), seeds=(0, 1, 2))
    assert [group.label for group in groups] == ["n=1", "n=5", "n=inf"]
    assert [group.num_seeds for group in groups] == [3, 3, 3]


def test_a_product_has_one_figure_a_setting_and_a_line_a_choice_of_the_rest(sweep):
    groups = sweep(*_ngrams(1, 5, kl_coef=0.01), *_ngrams(1, 5, kl_coef=0.05))
    found = {each.key: each for each in find_sweeps(groups)}
    assert found.keys() == {"segmenter.n", "kl_coef"}
    assert [name for name, _ in found["segmenter.n"].lines] == ["kl_coef=0.01", "kl_coef=0.05"]
    assert [name for name, _ in found["kl_coef"].lines] == ["n=1", "n=5"]


def test_what_goes_along_with_the_rule_is_not_in_a_line_s_name(sweep):
    both = [{"pooling": each} for each in ("sum", "mean")]
    rates = ((5, 4e-5), (math.inf, 2e-5))
    made = [_ngrams(n, learning_rate=rate, **each)[0] for n, rate in rates for each in both]
    (found,) = [each for each in find_sweeps(sweep(*made)) if each.key == "pooling"]
    assert [name for name, _ in found.lines] == ["n=5", "n=inf"]


def test_rules_are_words_and_their_lengths_have_a_figure_of_their_own(sweep):
    groups = sweep(*_ngrams(1, 5), {"segmenter": {"type": "perplexity", "kind": "mean"}})
    rule, n = find_sweeps(groups)
    assert rule.places == ["n-gram, n = 5", "perplexity, kind = mean", "single tokens (n = 1)"]
    assert not rule.is_numeric
    assert (n.key, n.places) == ("segmenter.n", ["1", "5"])


def test_sigma_and_lambda_are_sweeps(sweep):
    found = find_sweeps(sweep({"sigma": "equal"}, {"sigma": "unit"}, {"sigma": "position"}))
    assert [(each.key, each.places) for each in found] == [("sigma", ["equal", "position", "unit"])]
    assert value_text(0.95) == "0.95"


def test_two_settings_at_once_are_no_sweep(sweep):
    assert find_sweeps(sweep({"lam": 0.9, "kl_coef": 0.1}, {"lam": 1.0, "kl_coef": 0.2})) == []


def test_the_figure_carries_score_kl_and_length_of_each_value(sweep):
    html = sweeps(sweep(*_ngrams(1, math.inf), seeds=(0, 1)))
    header, *rows = _csv(html, "Score")
    assert header[:5] == ["line", "segmenter.n", "eval/score", "low", "high"]
    # means over seeds: 1.0 and 1.1; 2.0 and 2.1
    assert [row[1:6] for row in rows] == [
        ["1", "1.05", "1", "1.1", "2"],
        ["\u221e", "2.05", "2", "2.1", "2"],
    ]
    assert [row[2] for row in _csv(html, "KL (nats per response)")[1:]] == ["2", "2"]
    assert [row[2] for row in _csv(html, "Length (tokens)")[1:]] == ["40", "40"]


def test_one_policy_has_no_sweep(sweep):
    assert sweeps(sweep(*_ngrams(5))) == ""


def test_runs_are_found_in_the_folders_of_a_sweep_and_above_it(make_run, tmp_path):
    for n in (1, 5):
        for seed in (0, 1):
            make_run(f"runs/my-sweep/n={n},seed={seed}/ppo", metrics=_evals(1.0))
    make_run("runs/my-sweep/sft", stage="sft", metrics=[{"step": 1, "sft/loss": 1.0}])
    assert len(find_runs([tmp_path / "runs" / "my-sweep"])) == 5
    assert len(find_runs([tmp_path / "runs"])) == 5


def test_seeds_of_the_models_behind_do_not_tell_settings_apart(make_run, tmp_path):
    runs = []
    for seed in (0, 1):
        sft = tmp_path / f"seed={seed}" / "sft"
        make_run(f"seed={seed}/sft", stage="sft", config={"seed": seed, "model": "tiny"})
        config = {"model": str(sft / "model"), "seed": seed}
        config["output_dir"] = str(tmp_path / f"n=5,seed={seed}" / "ppo")
        runs.append(read_run(make_run(f"n=5,seed={seed}/ppo", seed=seed, config=config)))
    assert chosen(runs[0]) == {"model": "@sft", "sft.model": "tiny"}
    assert len(group_runs(runs)) == 1


def test_other_models_behind_do(make_run, tmp_path):
    """The same recipe in two folders, but of models of two sizes: no seeds of one setting."""
    runs = []
    for size in ("small", "large"):
        make_run(f"{size}/sft", stage="sft", config={"model": size})
        config = {"model": str(tmp_path / size / "sft" / "model")}
        config["output_dir"] = str(tmp_path / size / "ppo")
        runs.append(read_run(make_run(f"{size}/ppo", config=config)))
    assert [group.label for group in group_runs(runs)] == ["model=small", "model=large"]


def test_a_moved_tree_still_knows_what_it_stands_on(make_run):
    make_run("here/sft", stage="sft", config={"model": "tiny", "output_dir": "/gone/sft"})
    config = {"model": "/gone/sft/model", "output_dir": "/gone/ppo"}
    run = read_run(make_run("here/ppo", config=config))
    assert chosen(run)["sft.model"] == "tiny"


def _weights(folder: Path, *shapes: list[int]) -> None:
    header = {"__metadata__": {"format": "pt"}}
    header |= {f"w{i}": {"dtype": "F32", "shape": shape} for i, shape in enumerate(shapes)}
    data = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)


def test_parameters_are_counted_in_the_weights(make_run, tmp_path):
    run = read_run(make_run("ppo", config={"model": str(tmp_path / "start")}))
    assert num_parameters(run) is None
    _weights(tmp_path / "start", [10])
    assert num_parameters(run) == 10  # not finished: what it began with
    _weights(run.path / "model", [10, 20], [5])
    assert num_parameters(run) == 205
    (run.path / "model" / "model.safetensors").write_bytes(b"\xff" * 9)
    assert num_parameters(run) == 10


def test_parameters_of_a_saved_model_are_those_of_the_model(finished):
    from marlhf.models.load import load_policy

    count = sum(weight.numel() for weight in load_policy(str(finished / "ppo/model")).parameters())
    assert num_parameters(read_run(finished / "ppo")) == count


def test_scaling_has_a_line_a_rule_and_a_place_a_size(make_run, tmp_path):
    runs = []
    for name, width in (("small", 1000), ("large", 2500)):
        for n in (1, 5):
            config = {"model": name, "segmenter": {"type": "ngram", "n": n}}
            folder = make_run(f"{name}/{n}", config=config, metrics=_evals(width / 1000 + n))
            _weights(folder / "model", [width, 1000])
            runs.append(read_run(folder))
    html = scaling(group_runs(runs))
    rows = _csv(html, "Score")[1:]
    assert sorted(row[1:4] for row in rows) == [
        ["1000000", "2", ""],
        ["1000000", "6", ""],
        ["2500000", "3.5", ""],
        ["2500000", "7.5", ""],
    ]
    assert ">1.0M<" in html
    assert ">2.5M<" in html
    assert scaling(group_runs(runs[:2])) == ""
    assert size_text(27_200_000_000) == "27B"


def test_scores_of_other_rewards_or_data_are_said_not_to_compare(sweep):
    rewards = sweep({"reward_model": "hub/one"}, {"reward_model": "hub/two"})
    assert unlike(rewards) == ["reward_model"]
    assert "Not on one scale" in " ".join(shows_not(rewards, []))
    assert "not scored alike" in verdict(rewards, [])


def test_runs_of_other_tasks_are_said_not_to_compare(sweep):
    tasks = sweep({"data": {"source": "tldr"}}, {"data": {"source": "hh"}})
    assert unlike(tasks) == ["data.source"]
    assert "<code>data.source</code>" in " ".join(shows_not(tasks, []))


def test_a_reward_model_grown_from_another_sft_is_another_yardstick(make_run, tmp_path):
    runs = []
    for size in ("small", "large"):
        at = tmp_path / size
        make_run(f"{size}/sft", stage="sft", config={"model": size})
        grown = {"model": str(at / "sft/model"), "output_dir": str(at / "reward")}
        make_run(f"{size}/reward", stage="reward", config=grown)
        config = {"model": str(at / "sft/model"), "reward_model": str(at / "reward/model")}
        config["output_dir"] = str(at / "ppo")
        runs.append(read_run(make_run(f"{size}/ppo", config=config)))
    assert unlike(group_runs(runs)) == ["sft.model"]


def _line(key: str, score: float):
    line = {"setting": "x", "key": key, "prompt": "p", "response": "r", "scores": {"rm": score}}
    return line | {"kl": 1.0, "length": 5, "repetition": 0.0}


def test_temperatures_come_from_the_files_of_evaluate(make_run):
    folder = make_run("ppo", metrics=_evals(1.0))
    (folder / "evaluation").mkdir()
    for temperature, score in ((0.2, 2.0), (1.0, 1.0), (0.6, 1.5)):
        sampling = {"temperature": temperature, "max_new_tokens": 64, "seed": 0}
        lines = [_line(f"{i}", score + i) | {"sampling": sampling} for i in range(2)]
        file = folder / "evaluation" / f"t{temperature:g}-m64-s0.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = temperatures(group_runs([read_run(folder)]))
    rows = _csv(html, "Score by rm, 64 tokens")[1:]
    assert [row[1:3] for row in rows] == [["0.2", "2.5"], ["0.6", "2"], ["1", "1.5"]]
    assert "KL, 64 tokens" in html


def test_best_of_n_samples_stand_in_where_nothing_was_evaluated(make_run):
    folder = make_run("ppo", metrics=_evals(1.0))
    (folder / "best_of_n").mkdir()
    for temperature in (0.2, 1.0):
        line = {
            "setting": "x",
            "key": "k",
            "scores": [temperature, temperature + 2],
            "lengths": [3, 3],
            "sampling": {
                "temperature": temperature,
                "max_new_tokens": 64,
                "seed": 0,
                "rewards": "rm",
            },
        }
        (folder / "best_of_n" / f"t{temperature:g}-m64-s0-rm.jsonl").write_text(
            json.dumps(line) + "\n"
        )
    rows = _csv(temperatures(group_runs([read_run(folder)])), "Score, 64 tokens, rm")[1:]
    assert [row[1:3] for row in rows] == [["0.2", "1.2"], ["1", "2"]]


def test_one_temperature_is_no_sweep(make_run):
    folder = make_run("ppo", metrics=_evals(1.0))
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "t1-m64-s0.jsonl").write_text(json.dumps(_line("k", 1.0)) + "\n")
    assert temperatures(group_runs([read_run(folder)])) == ""
