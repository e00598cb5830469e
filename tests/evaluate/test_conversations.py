"""`marlhf evaluate` and `best-of-n` where prompts are played in an environment."""

import json
import sys
from dataclasses import replace

import pytest
import torch
import yaml

from marlhf.core import NGram
from marlhf.data import DataConfig, load_data
from marlhf.environments import ConversationError
from marlhf.evaluate.best_of_n import best_of_n, export
from marlhf.evaluate.blocks import BlockOptions, best_of_blocks
from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions
from marlhf.evaluate.results import summary_table
from marlhf.evaluate.sampling import SamplingTask
from marlhf.evaluate.score import evaluate
from marlhf.models.load import load_policy
from marlhf.runs.atomic import read_jsonl

FEW = EvaluationOptions(prompts=4, device="cpu")
WORLD = '''
from pathlib import Path

from marlhf.environments import Step

Path(__file__).with_name("ran").touch()


class Lengths:
    """Rewards each turn by its characters; the episode begins with a number from its seed."""

    def reset(self, row, seed):
        return [{"role": "user", "content": f"Begin {seed % 1000}"}]

    def step(self, reply):
        said = [{"role": "user", "content": "go on"}]
        return Step(said, reward=float(len(reply)), success=len(reply) > 2)


def turns(completions):
    return [float(sum(m["role"] == "assistant" for m in c)) for c in completions]
'''


@pytest.fixture
def runs(finished, tmp_path, monkeypatch):
    """Runs on the guessing game's rows, and a module `lengths` with an environment."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "lengths.py").write_text(WORLD)
    monkeypatch.syspath_prepend(tmp_path / "code")
    sys.modules.pop("lengths", None)
    data = {"source": "guess", "limit": 200, "eval_size": 20}
    for name in ("sft", "dpo", "ppo"):
        change(finished / name, data=data)
    played = {"environment": "guess", "max_turns": 3, "episode_tokens": 100, "reward_model": ""}
    change(finished / "ppo", **played, sampling={"max_new_tokens": 4, "temperature": 1.0})
    return finished


def change(folder, **settings):
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config | settings))


def in_lengths(options=FEW, **changes):
    return replace(options, environment="lengths:Lengths", **changes)


def test_held_out_prompts_are_played_and_scored_by_the_environment(runs):
    sft, ppo = evaluate([runs / "sft", runs / "ppo"], in_lengths())
    for each in (sft, ppo):
        assert each.file.name == "t1-m4-s0-lengths_Lengths.jsonl"
        for line in each.lines:
            messages = line["episode"]["messages"]
            said = [m["content"] for m in messages if m["role"] == "assistant"]
            assert len(said) == line["turns"] == 3
            assert line["scores"] == {"environment": float(sum(map(len, said)))}
            assert line["prompt"] == messages[:1]
            assert line["response"].startswith(
                f"assistant: {said[0]}\n\nuser: go on\n\nassistant: "
            )
            assert line["length"] + line["world_tokens"] == len(line["response_ids"])
    assert [line["prompt"] for line in sft.lines] == [line["prompt"] for line in ppo.lines]
    table = summary_table([(each.name, each.summary) for each in (sft, ppo)])
    assert "success  turns  world tokens" in table
    assert "tool" not in table


def test_kl_is_over_the_policys_tokens_alone(runs):
    [found] = evaluate([runs / "ppo"], in_lengths())
    models = [load_policy(str(runs / name / "model")) for name in ("ppo", "sft")]
    for line in found.lines:
        first, ids = len(line["prompt_ids"]), line["response_ids"]
        own = [t for turn in line["episode"]["turns"] for t in range(turn["start"], turn["stop"])]
        whole, sums = torch.tensor([line["prompt_ids"] + ids]), []
        for model in models:
            logprobs = model(input_ids=whole).logits[0].log_softmax(dim=1).detach()
            sums.append(sum(float(logprobs[first + t - 1, ids[t]]) for t in own))
        assert abs(line["kl"]) > 1e-4
        assert line["kl"] == pytest.approx(sums[0] - sums[1], abs=1e-3)


def test_reward_functions_see_conversations_too(runs, monkeypatch):
    change(runs / "ppo", reward_funcs=["lengths:turns"])
    [found] = evaluate([runs / "ppo"], in_lengths(trust_code=True))
    for line in found.lines:
        assert line["scores"]["lengths:turns"] == 3.0
    before = [line["episode"] for line in found.lines]
    monkeypatch.setattr(SamplingTask, "respond", None)  # sampling again would fail
    change(runs / "ppo", reward_funcs=[])
    for line in found.lines:
        del line["scores"]["lengths:turns"], line["judges"]["lengths:turns"]
    found.file.write_text("".join(json.dumps(line) + "\n" for line in found.lines))
    change(runs / "ppo", reward_funcs=["lengths:turns"])
    [again] = evaluate([runs / "ppo"], in_lengths(trust_code=True))
    assert [line["episode"] for line in again.lines] == before
    assert [line["scores"]["lengths:turns"] for line in again.lines] == [3.0] * 4


def test_best_of_n_plays_each_prompt_from_the_same_start(runs, tmp_path):
    grid = best_of_n(runs / "ppo", in_lengths(), [1, 3])
    [lines] = grid.lines.values()
    [played] = evaluate([runs / "ppo"], in_lengths())
    for line, first in zip(lines, played.lines, strict=True):
        assert line["prompt"] == first["prompt"]
        assert line["scores"][0] == first["scores"]["environment"]
        assert line["lengths"][0] == first["length"]
        best = sum(turn["reward"] for turn in line["best"]["episode"]["turns"])
        assert best == max(line["scores"]) == line["best"]["score"]
    for line in lines:
        line["best"]["ended"] = True
    _, rows, left = export(grid, tmp_path / "best.jsonl")
    assert left == 0
    written = read_jsonl(tmp_path / "best.jsonl").rows
    assert len(written) == rows > len(lines)
    for row in written:
        assert row["chosen"][0]["role"] == "assistant"
        assert row["prompt"][-1]["role"] == "user"
    rows = load_data(DataConfig(path=str(tmp_path / "best.jsonl"), parts={}), "sft").train
    assert rows[0].prompt == written[0]["prompt"]


def test_a_runs_own_environment_is_played_unless_another_or_none_is_named(runs):
    change(runs / "ppo", reward_model="/gone/reward/model")
    [found] = evaluate([runs / "ppo"], FEW)
    assert set(found.summary.scores) == {"environment", "reward"}
    assert found.lines[0]["prompt"][0]["content"].startswith("Game ")
    [single] = evaluate([runs / "ppo"], replace(FEW, environment="none"))
    assert set(single.summary.scores) == {"reward"}
    assert "episode" not in single.lines[0]
    assert single.file != found.file


def test_an_environment_that_does_not_exist_is_a_sentence(runs):
    with pytest.raises(ConversationError, match=r"no environment 'gues'\. Did you mean guess\?"):
        evaluate([runs / "ppo"], replace(FEW, environment="gues"))


def test_an_environment_given_in_python_must_be_named(runs):
    change(runs / "ppo", environment="(given in Python) MyGame")
    with pytest.raises(EvaluationError, match=r"given in Python.*--environment MODULE:CLASS"):
        evaluate([runs / "ppo"], FEW)


def test_an_environment_that_a_run_names_is_not_imported_unless_trusted(runs, tmp_path):
    change(runs / "ppo", environment="lengths:Lengths", code=["lengths"])
    for runs_named in (["ppo"], ["sft", "ppo"]):
        with pytest.raises(EvaluationError, match=r"lengths:Lengths .*--trust-code"):
            evaluate([runs / name for name in runs_named], FEW)
    with pytest.raises(EvaluationError, match=r"lengths:Lengths .*--trust-code"):
        best_of_n(runs / "ppo", FEW, [1])
    assert not (tmp_path / "code" / "ran").exists()
    evaluate([runs / "ppo"], replace(FEW, trust_code=True))
    assert (tmp_path / "code" / "ran").exists()


def test_blocks_of_a_conversation_are_refused(runs):
    with pytest.raises(EvaluationError, match="--environment none"):
        best_of_blocks(runs / "ppo", FEW, BlockOptions(NGram(2), "ngram n=2"))


def test_a_conversation_longer_than_the_model_is_refused(runs):
    change(runs / "ppo", episode_tokens=5000)
    with pytest.raises(EvaluationError, match="up to 5000 tokens, but the model has 512"):
        evaluate([runs / "ppo"], FEW)


def test_an_edited_environment_is_played_anew(runs, tmp_path):
    [before] = evaluate([runs / "ppo"], in_lengths())
    file = tmp_path / "code" / "lengths.py"
    file.write_text(file.read_text().replace("go on", "and then?"))
    sys.modules.pop("lengths")
    [after] = evaluate([runs / "ppo"], in_lengths())
    assert after.file == before.file
    assert all("and then?" in line["response"] for line in after.lines)
