"""`marlhf evaluate`: what is asked, what is kept, and what a second call does."""

import json
import math
import re
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import typer
import yaml
from safetensors.torch import load_file, save_file

from marlhf.cli import app
from marlhf.evaluate import score
from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions, find_policies, make_plan
from marlhf.evaluate.results import data_tables, read_scored, summarise, summary_table
from marlhf.evaluate.sampling import SamplingTask, find_rewards
from marlhf.evaluate.score import distinct, evaluate
from marlhf.models.base import ModelError
from marlhf.models.load import load_policy, load_tokenizer
from marlhf.report.write import write_report
from marlhf.runs.atomic import append_jsonl, read_keyed, write_jsonl
from marlhf.runs.evaluations import SamplingSettings
from marlhf.runs.layout import RunError

FEW = EvaluationOptions(prompts=5, device="cpu")


def test_runs_of_every_method_are_asked_the_same(finished):
    found = {each.name: each for each in evaluate([finished], FEW)}
    assert list(found) == ["sft", "dpo", "ppo", "rloo"]
    prompts = [[line["prompt"] for line in each.lines] for each in found.values()]
    assert all(each == prompts[0] and len(each) == 5 for each in prompts)
    for each in found.values():
        assert each.file == finished / each.name / "evaluation" / "t1-m8-s0.jsonl"
        assert set(each.summary.scores) == {"reward", "gold"}
        assert all(line["length"] <= 8 for line in each.lines)
    assert found["sft"].summary.measures["kl"].mean == 0.0  # it is the reference
    assert abs(found["ppo"].summary.measures["kl"].mean) > 1e-3


def test_kl_is_the_policys_logprob_less_the_references(finished):
    [found] = evaluate(
        [finished / "dpo"], EvaluationOptions(prompts=3, like=str(finished / "ppo"), device="cpu")
    )
    tokenizer = load_tokenizer(str(finished / "dpo/model"))
    models = [load_policy(str(finished / name / "model")) for name in ("dpo", "sft")]
    for line in found.lines:
        prompt, ids = tokenizer(line["prompt"])["input_ids"], line["response_ids"]
        whole = torch.tensor([prompt + ids])
        sums = []
        for model in models:
            logprobs = model(input_ids=whole).logits[0].log_softmax(dim=1)
            places = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
            sums.append(sum(float(logprobs[i, t].detach()) for i, t in zip(places, ids)))
        assert line["kl"] == pytest.approx(sums[0] - sums[1], abs=1e-3)


def test_a_reference_with_another_tokenizer_is_refused_before_sampling(
    finished, tmp_path, monkeypatch, trained
):
    shutil.copytree(finished / "sft/model", tmp_path / "other")
    shutil.copytree(finished / "ppo", tmp_path / "ppo")
    trained("byte-level").save_pretrained(tmp_path / "other")
    weights = load_file(tmp_path / "other/model.safetensors")
    save_file({k: v + 1 for k, v in weights.items()}, tmp_path / "other/model.safetensors")
    monkeypatch.setattr(SamplingTask, "sample", None)
    options = replace(FEW, reference=str(tmp_path / "other"))
    with pytest.raises(EvaluationError, match=r"tokenizer of the reference .*other is not that of"):
        evaluate([tmp_path / "ppo"], options)


def test_a_second_call_samples_nothing_and_more_prompts_only_add(finished, monkeypatch):
    [first] = evaluate([finished / "ppo"], FEW)
    asked = []
    write = SamplingTask.sample

    def count(self, prompts, seeds):
        asked.append(len(prompts))
        return write(self, prompts, seeds)

    monkeypatch.setattr(SamplingTask, "sample", count)
    [again] = evaluate([finished / "ppo"], FEW)
    assert (again.lines, asked) == (first.lines, [])
    [more] = evaluate([finished / "ppo"], EvaluationOptions(prompts=8, device="cpu"))
    assert (more.lines[:5], asked) == (first.lines, [3])


def test_a_stopped_evaluation_goes_on_to_the_same_end(finished, monkeypatch):
    whole = evaluate([finished / "ppo"], FEW)[0]
    lines = whole.file.read_text().splitlines(keepends=True)
    whole.file.write_text("".join(lines[:2]) + lines[2][:40])  # killed while writing
    monkeypatch.setattr(score, "CHUNK", 2)
    again = evaluate([finished / "ppo"], FEW)[0].lines
    for line, before in zip(again, whole.lines, strict=True):
        assert line.pop("kl") == pytest.approx(before.pop("kl"), abs=1e-5)  # a sum of log-probs
        assert line.pop("scores") == pytest.approx(before.pop("scores"), abs=1e-5)
        assert line == before


def test_another_reward_model_judges_the_responses_there_are(finished, monkeypatch):
    [first] = evaluate([finished / "ppo"], FEW)
    monkeypatch.setattr(SamplingTask, "sample", None)  # sampling again would fail
    [both] = evaluate(
        [finished / "ppo"], EvaluationOptions(5, rewards=(str(finished / "other"),), device="cpu")
    )
    assert set(both.summary.scores) == {"reward", "gold", "other"}
    assert [x["response"] for x in both.lines] == [x["response"] for x in first.lines]


def test_a_reward_model_trained_anew_scores_anew(finished, save_model):
    [before] = evaluate([finished / "ppo"], FEW)
    save_model(finished / "reward/model", scalar=True, seed=3)
    [after] = evaluate([finished / "ppo"], EvaluationOptions(prompts=2, device="cpu"))
    assert before.lines[0]["scores"]["reward"] != after.lines[0]["scores"]["reward"]
    [kept] = read_scored(finished / "ppo")
    assert ["reward" in line["scores"] for line in kept.lines] == [True, True, False, False, False]


def test_weights_that_changed_are_asked_anew(finished, save_model):
    [before] = evaluate([finished / "ppo"], FEW)
    save_model(finished / "ppo/model", noise=0.2)
    [after] = evaluate([finished / "ppo"], FEW)
    assert [x["response"] for x in before.lines] != [x["response"] for x in after.lines]
    assert len(read_keyed(after.file)) == 5


def test_reward_functions_score_too(finished, tmp_path, monkeypatch):
    code = (
        "def short(completions):\n    return [None if i else -1.0 for i in range(len(completions))]"
    )
    (tmp_path / "my_short.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    question = EvaluationOptions(prompts=3, rewards=("my_short:short",), device="cpu")
    [found] = evaluate([finished / "ppo"], question)
    assert [line["scores"]["my_short:short"] for line in found.lines] == [-1.0, None, None]
    assert found.summary.scores["my_short:short"].size == 1


def test_a_plain_model_folder_borrows_what_it_lacks(finished, tmp_path, save_model):
    folder = Path(save_model(tmp_path / "plain", noise=0.1))
    with pytest.raises(EvaluationError, match="names no reward model"):
        evaluate([folder], FEW)
    with pytest.raises(EvaluationError, match="not a run"):
        evaluate([folder], EvaluationOptions(5, rewards=(str(finished / "reward"),)))
    [found] = evaluate([folder], EvaluationOptions(5, like=str(finished / "ppo"), device="cpu"))
    assert found.file.parent == folder / "evaluation"
    assert found.summary.measures["kl"].mean != 0.0


def test_other_data_is_asked_whole(finished, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Tell {i}"}) + "\n" for i in range(3)))
    [found] = evaluate([finished / "ppo"], EvaluationOptions(path=str(file), device="cpu"))
    assert [line["prompt"] for line in found.lines] == ["Tell 0", "Tell 1", "Tell 2"]
    assert found.file.name == "t1-m8-s0-mine-train.jsonl"
    assert set(found.summary.scores) == {"reward"}  # gold is of the offline task alone


def test_what_an_answer_is_checked_against_is_kept(finished, tmp_path):
    quotes = {"title": ["Bees", "Wasps"], "extract": ["They dance.", "They do not."]}
    columns = [{"reference": "Four."}, {"chosen_quotes": quotes}, {}]
    file = tmp_path / "asked.jsonl"
    lines = [json.dumps({"prompt": f"Say {i}", **more}) for i, more in enumerate(columns)]
    file.write_text("\n".join(lines))
    [found] = evaluate([finished / "ppo"], EvaluationOptions(path=str(file), device="cpu"))
    kept = {line["prompt"]: line.get("reference") for line in found.lines}
    assert kept["Say 0"] == "Four."
    assert kept["Say 1"] == "Bees\nThey dance.\n\nWasps\nThey do not."
    assert kept["Say 2"] is None


def test_same_named_judges_are_told_apart(finished):
    shutil.copytree(finished / "other", finished / "more" / "reward")
    [ppo] = find_policies([finished / "ppo"])
    paths = (str(finished / "reward"), str(finished / "more" / "reward"))
    names = [j.name for j in find_rewards(make_plan(ppo, EvaluationOptions(rewards=paths), None))]
    assert names == ["runs/reward", "more/reward", "gold"]


def test_a_judge_called_gold_is_not_the_true_score(finished, save_model):
    folder = save_model(finished / "gold", scalar=True, seed=5)
    [found] = evaluate([finished / "ppo"], EvaluationOptions(2, rewards=(folder,), device="cpu"))
    assert list(found.summary.scores) == ["gold", "gold (true)"]


def test_a_language_model_scores_only_where_the_run_allows_it(finished, save_model):
    folder = save_model(finished / "language")
    options = EvaluationOptions(2, rewards=(folder,), device="cpu")
    with pytest.raises(EvaluationError, match=r"a language model without a scalar head.*--reward"):
        evaluate([finished / "ppo"], options)
    assert not (finished / "ppo/evaluation").exists()
    file = finished / "ppo/config.yaml"
    config = yaml.safe_load(file.read_text()) | {"reward_model": folder}
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(EvaluationError, match="a language model without a scalar head"):
        evaluate([finished / "ppo"], FEW)
    file.write_text(yaml.safe_dump(config | {"random_reward_head": True}))
    [found] = evaluate([finished / "ppo"], FEW)
    assert list(found.summary.scores) == ["language", "gold"]


def test_the_best_policy_of_a_run_can_be_asked(finished):
    shutil.copytree(finished / "rloo/model", finished / "ppo/best")
    [found] = evaluate([finished / "ppo/best"], FEW)
    assert (found.name, found.file.parents[1]) == ("ppo/best", finished / "ppo/best")
    assert [each.name for each in find_policies([finished / "ppo/model"])] == ["ppo"]


def test_runs_of_one_name_are_called_by_their_folders(finished, tmp_path):
    folders = [tmp_path / f"sweep/seed={seed}/ppo" for seed in (0, 1)]
    for folder in folders:
        shutil.copytree(finished / "ppo", folder)
    names = [policy.name for policy in find_policies([tmp_path / "sweep", finished / "sft"])]
    assert names == [*map(str, folders), "sft"]


def test_a_folder_that_cannot_be_written_to_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot write"):
        append_jsonl(tmp_path / "file" / "a.jsonl", [])


@pytest.mark.parametrize(
    ("change", "question", "message"),
    [
        (None, {"prompts": 0}, "at least 1; got 0"),
        ("gone", {}, "There is no folder"),
        ("no model", {}, "the run is not finished"),
        ("no held out", {}, "holds out no prompts"),
        (None, {"temperature": -1.0}, "temperature must be at least 0"),
        (None, {"max_new_tokens": 9999}, "Lower --max-new-tokens"),
        (None, {"rewards": ("/nowhere/reward/model",)}, "There is no folder /nowhere"),
        (None, {"reference": "/nowhere/model"}, "There is no folder /nowhere"),
    ],
)
def test_nonsense_is_a_sentence(finished, change, question, message):
    folder = finished / "ppo"
    if change == "no model":
        shutil.rmtree(folder / "model")
    if change == "gone":
        folder = finished / "poo"
    if change == "no held out":
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["data"]["eval_size"] = 0
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises((EvaluationError, ModelError), match=message):
        evaluate([folder], EvaluationOptions(**{"prompts": 2, "device": "cpu", **question}))


def test_a_reward_model_cannot_be_evaluated(finished):
    with pytest.raises(ModelError, match="cannot write"):
        evaluate(
            [finished / "reward"], EvaluationOptions(2, like=str(finished / "ppo"), device="cpu")
        )


def test_means_and_intervals_by_hand():
    lines = [{"scores": {"a": x}, "kl": None, "length": 4, "ended": x > 2} for x in (1.0, 2.0, 6.0)]
    found = summarise(lines)
    # mean 3, variance ((-2)^2 + (-1)^2 + 3^2) / 2 = 7
    half = 4.302653 * math.sqrt(7 / 3)  # Student's t of two degrees of freedom
    assert found.scores["a"] == pytest.approx((3.0, 3.0 - half, 3.0 + half, 3), rel=1e-6)
    assert found.measures["ended"].mean == pytest.approx(1 / 3)
    assert math.isnan(found.measures["kl"].mean)
    assert "3.000 [-3.572, 9.572]" in summary_table([("mine", found)])


def test_distinct_by_hand():
    assert distinct([1, 2, 1, 2], 1) == 0.5
    assert distinct([5], 2) == 0.0


def test_lines_survive_a_torn_end(tmp_path):
    file = tmp_path / "a.jsonl"
    append_jsonl(file, [{"setting": "s", "key": "1"}, {"setting": "s", "key": "2", "x": 1}])
    file.write_text(file.read_text() + '{"setting": "s", "ke')
    append_jsonl(file, [{"setting": "s", "key": "2", "x": 2}])
    assert list(read_keyed(file)) == ["1", "2"]
    assert read_keyed(file, "s")["2"]["x"] == 2
    assert read_keyed(file, "other") == {}


def test_the_report_shows_what_is_there(finished, tmp_path):
    write_report([finished], tmp_path / "before.html")
    assert "Scores of held-out responses" not in (tmp_path / "before.html").read_text()
    evaluate([finished], FEW)
    write_report([finished], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    part = page[page.index('id="held_out"') :].partition("</section>")[0]
    for name in ("sft", "dpo", "ppo", "rloo", "t1-m8-s0", "gold"):
        assert name in part
    assert part.count("<figure>") == 2  # a distribution a judge


def test_commands_of_the_page_parse():
    page = Path(__file__).parents[2] / "docs/evaluate.md"
    found = [x for x in page.read_text().splitlines() if re.match("marlhf (evaluate|best-of-n)", x)]
    assert len(found) >= 5
    group = typer.main.get_command(app)
    for line in found:
        name, *words = shlex.split(line, comments=True)[1:]
        group.commands[name].make_context(name, words)


def test_out_of_distribution_prompts_come_from_the_hub_or_any_file(finished, monkeypatch, tmp_path):
    asked = []

    def read_hub(name, split, config):
        asked.append((name, split, config))
        for i in range(3):
            yield {"article": f"News {i}. " + "word " * 20, "highlights": "N."}, f"{name}:{i}"

    monkeypatch.setattr("marlhf.data.load.read_hub", read_hub)
    news = EvaluationOptions(prompts=2, source="cnn_dailymail", device="cpu")
    found = evaluate([finished / "ppo"], news)[0]
    assert asked[0] == ("abisee/cnn_dailymail", "test", "3.0.0")
    assert [line["prompt"][:12] for line in found.lines] == ["POST\nNews 0.", "POST\nNews 1."]
    assert found.file.name == "t1-m8-s0-cnn_dailymail-test.jsonl"
    [policy] = find_policies([finished / "ppo"])
    assert make_plan(policy, news, policy).data.too_long == "truncate"  # articles are long
    file = tmp_path / "mine.csv"
    file.write_text("prompt\nTell me of a fox.\n", "utf-8")
    own = evaluate([finished / "ppo"], EvaluationOptions(path=str(file), device="cpu"))[0]
    assert [line["prompt"] for line in own.lines] == ["Tell me of a fox."]


def test_scores_by_data_are_the_papers_table(tmp_path):
    """Models in rows, data in columns, gains over the first model paired by prompt."""
    sampling = {"temperature": 0.8, "max_new_tokens": 64, "seed": 0}

    def write(model, data, scores, **other):
        settings = SamplingSettings(**{**sampling, **other}, data=data)
        lines = [
            {
                "setting": "",
                "key": f"{data}{i}",
                "scores": {"reward": score},
                "sampling": asdict(settings),
            }
            for i, score in enumerate(scores)
        ]
        write_jsonl(tmp_path / model / "evaluation" / settings.file_name, lines)

    write("ppo", "", [0.0, 2.0])
    write("macro-ppo", "", [1.0, 3.0])
    write("ppo", "news", [5.0])
    write("macro-ppo", "news", [4.5, 9.0])  # a prompt that ppo has not answered
    write("ppo", "news", [70.0], temperature=0.1)
    models = [(name, tmp_path / name) for name in ("ppo", "macro-ppo", "sft")]
    [table] = data_tables(models, SamplingSettings(**sampling))
    rows = [re.split(r"  +", line) for line in table.splitlines()]
    assert rows == [
        ["score by reward", "held out", "news"],
        ["ppo", "1.00 [-11.71, 13.71]", "5.00"],
        ["macro-ppo", "2.00 +1.00 [+1.00, +1.00]", "6.75 -0.50"],
        ["sft", "-", "-"],
    ]
    (tmp_path / "ppo/evaluation" / "t0.8-m64-s0-news.jsonl").unlink()
    (tmp_path / "macro-ppo/evaluation" / "t0.8-m64-s0-news.jsonl").unlink()
    assert data_tables(models, SamplingSettings(**sampling)) == []
