"""`marlhf best-of-n --blocks`: decisions by hand, both ends of the range, what is kept."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from marlhf.cli import main
from marlhf.core import Lines, NGram, Perplexity, Sentences, Words
from marlhf.evaluate import blocks as module
from marlhf.evaluate.best_of_n import best_of_n
from marlhf.evaluate.blocks import BlockDecider, BlockOptions, best_of_blocks, write_responses
from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions
from marlhf.evaluate.results import (
    BlockLines,
    frontier_table,
    kl_bound,
    read_frontiers,
    whole_points,
)
from marlhf.report.write import write_report
from marlhf.runs.evaluations import SamplingSettings
from small_runs import assert_alike

FEW = EvaluationOptions(prompts=3, device="cpu")  # responses of at most 8 tokens


@pytest.fixture
def with_critic(finished):
    """All runs, of which PPO's has a critic that is not its reward model."""
    shutil.copytree(finished / "other", finished / "ppo" / "critic")
    return finished


def change_config(run: Path, **changes) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text()) | changes
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def responses(found: BlockLines) -> list[str]:
    return [line["response"] for line in found.lines]


def options(rule, ks=(4,), **changes) -> BlockOptions:
    return BlockOptions(rule, str(rule), tuple(ks), **changes)


@pytest.mark.parametrize("value", ["reward", "critic", "monte_carlo"])
def test_one_candidate_is_plain_sampling(with_critic, value):
    [plain] = best_of_n(with_critic / "ppo", FEW, [1]).lines.values()
    [found] = best_of_blocks(with_critic / "ppo", FEW, options(NGram(3), [1], value=value))
    assert responses(found) == [line["best"]["response"] for line in plain]
    assert [line["num_sampled"] for line in found.lines] == [line["lengths"][0] for line in plain]
    assert [len(line["response_ids"]) for line in found.lines] == [x["lengths"][0] for x in plain]
    assert found.point().kl_bound == 0


@pytest.mark.parametrize("value", ["reward", "critic", "monte_carlo"])
@pytest.mark.parametrize("n", [8, math.inf])
def test_one_block_is_best_of_n(with_critic, value, n):
    [whole] = best_of_n(with_critic / "ppo", FEW, [4]).lines.values()
    [found] = best_of_blocks(with_critic / "ppo", FEW, options(NGram(n), [4], value=value))
    assert responses(found) == [line["best"]["response"] for line in whole]
    assert [x["score"] for x in found.lines] == pytest.approx([x["best"]["score"] for x in whole])
    assert [line["num_sampled"] for line in found.lines] == [sum(x["lengths"]) for x in whole]
    assert found.point().kl_bound == pytest.approx(kl_bound(4))


@pytest.mark.parametrize("value", ["reward", "monte_carlo"])
@pytest.mark.parametrize("rule", [NGram(3), Words(), Sentences(), Lines()])
def test_each_block_is_the_best_of_its_candidates(finished, monkeypatch, value, rule):
    decisions, real = [], BlockDecider._values

    def values(self, candidates):
        found = real(self, candidates)
        decisions.extend(
            (c.draft.prompt.row.prompt, list(c.draft.tokens), c.tokens, v)
            for c, v in zip(candidates, found)
        )
        return found

    monkeypatch.setattr(BlockDecider, "_values", values)
    [found] = best_of_blocks(finished / "ppo", FEW, options(rule, [3], value=value))
    for line in found.lines:
        tokens: list[int] = []
        for _ in range(line["num_blocks"]):
            here = [
                (v, t) for p, before, t, v in decisions if (p, before) == (line["prompt"], tokens)
            ]
            assert len(here) == 3
            best = max(v for v, _ in here)
            tokens = next(t for v, t in here if v == best)
        assert len(tokens) == line["length"]
    if isinstance(rule, NGram):
        assert all(len(t) - len(before) <= 3 for _, before, t, _ in decisions)
        assert all(x["num_blocks"] == math.ceil(x["length"] / 3) for x in found.lines)
    assert min(x["num_sampled"] for x in found.lines) > 8


def test_more_candidates_score_higher(finished):
    many = EvaluationOptions(prompts=12, device="cpu")
    low, high = best_of_blocks(finished / "ppo", many, options(NGram(2), [1, 8]))
    assert high.point().score.mean > low.point().score.mean
    assert high.point().tokens > 4 * low.point().tokens


@pytest.mark.parametrize("scale", [None, (2.0, 3.0)])
def test_the_critic_values_the_state_after_the_block(with_critic, monkeypatch, scale):
    """Where the run normalises scores, its critic's values are turned back into scores."""
    if scale:
        change_config(with_critic / "ppo", normalize_scores=True)
        with pytest.raises(EvaluationError, match="their scale is not recorded"):
            best_of_blocks(with_critic / "ppo", FEW, options(NGram(3), [2], value="critic"))
        state = json.loads((with_critic / "ppo/run.json").read_text()) | {"score_scale": scale}
        (with_critic / "ppo/run.json").write_text(json.dumps(state))
    mean, deviation = scale or (0.0, 1.0)
    seen = []
    real = BlockDecider._critic_values
    monkeypatch.setattr(
        BlockDecider,
        "_critic_values",
        lambda self, rows: seen.append((self, rows, real(self, rows))) or seen[-1][2],
    )
    best_of_blocks(with_critic / "ppo", FEW, options(NGram(3), [2], value="critic"))
    decider, rows, values = seen[0]
    for row, value in zip(rows, values):
        ids = torch.tensor([[*row.draft.prompt.prompt_ids, *row.tokens]])
        with torch.no_grad():
            hidden = decider.critic.model.model(ids).last_hidden_state[0, -1]
            exact = decider.critic.model.score(hidden)
        assert value == pytest.approx(float(exact) * deviation + mean, abs=1e-4)


def test_a_stopped_command_resumes_to_the_same_end(finished, monkeypatch):
    way = options(NGram(3), [2, 3], value="monte_carlo", continuations=2)
    whole = best_of_blocks(finished / "ppo", FEW, way)
    for file in (finished / "ppo/blocks").iterdir():
        text = file.read_text()
        file.write_text(text[: len(text) // 2])
    monkeypatch.setattr(module, "ROWS", 1)
    again = best_of_blocks(finished / "ppo", FEW, way)
    assert_alike([each.lines for each in again], [each.lines for each in whole])
    monkeypatch.setattr(BlockDecider, "respond", None)  # nothing is sampled again
    assert best_of_blocks(finished / "ppo", FEW, way) == again


def test_the_frontier_by_hand():
    lines = [
        {"score": 1.0, "length": 10, "num_blocks": 2, "num_sampled": 40},
        {"score": 3.0, "length": 20, "num_blocks": 4, "num_sampled": 80},
    ]
    found = BlockLines("ngram n=5", "reward", 4, SamplingSettings(1.0, 32, 0), lines)
    point = found.point()
    assert (point.score.mean, point.tokens, point.length) == (2.0, 60.0, 15.0)
    assert point.kl_bound == pytest.approx(3 * (math.log(4) - 3 / 4))
    table = frontier_table([point])
    assert table.splitlines()[0].split()[:2] == ["chosen", "score"]
    assert "ngram n=5, reward, k = 4" in table


def test_the_report_shows_both_frontiers(finished, tmp_path):
    grid = best_of_n(finished / "ppo", FEW, [1, 4])
    best_of_blocks(finished / "ppo", FEW, options(NGram(3), [2, 4]))
    [(_, ways)] = read_frontiers(finished / "ppo").items()
    assert [p.candidates for p in ways["NGram(n=3), reward"]] == [2, 4]
    assert ways["whole responses"][0].tokens == whole_points(grid, 1.0)[0].tokens
    page = write_report([finished / "ppo"], tmp_path / "report.html").read_text()
    assert "Score by KL bound, nats" in page
    assert "Score by tokens sampled" in page


def test_responses_are_written_as_data(tmp_path):
    def line(response, score, ended=True):
        return {"prompt": "Why?", "response": response, "score": score, "ended": ended}

    settings = SamplingSettings(1.0, 8, 0)
    few = BlockLines("ngram n=2", "reward", 2, settings, [line(" So.", 1.0)])
    many = BlockLines(
        "ngram n=2", "reward", 8, settings, [line(" Thus.", 2.0), line(" x", 2.0, False)]
    )
    file = tmp_path / "data.jsonl"
    assert write_responses([few, many], file) == (8, 1, 1)
    assert json.loads(file.read_text()) == {"prompt": "Why?", "chosen": " Thus.", "score": 2.0}
    with pytest.raises(EvaluationError, match="nothing to write"):
        write_responses([BlockLines("x", "reward", 2, settings, [line("", 0.0)])], file)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (lambda: options(NGram(3), [0]), "--k must be at least 1.*got .0"),
        (lambda: options(NGram(3), value="luck"), "--value must be one of critic, reward, monte"),
        (lambda: options(NGram(3), continuations=0), "--continuations must be at least 1"),
        (lambda: options(Perplexity()), "--blocks takes ngram, words, sentences or lines"),
        (lambda: options(NGram(9)), "Blocks of 9 tokens are longer than a response.* at most 8"),
    ],
)
def test_nonsense_is_a_sentence(finished, way, message):
    with pytest.raises(EvaluationError, match=message):
        best_of_blocks(finished / "ppo", FEW, way())


def test_a_run_without_critic_is_a_sentence(finished):
    with pytest.raises(EvaluationError, match="has no critic: only PPO trains one"):
        best_of_blocks(finished / "ppo", FEW, options(NGram(3), value="critic"))


def test_the_command(finished, tmp_path, monkeypatch, capsys):
    def command(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["marlhf", "best-of-n", str(finished / "ppo"), *words])
        with pytest.raises(SystemExit) as end:
            main()
        return f"{end.value.code} {''.join(capsys.readouterr())}"

    data = tmp_path / "data.jsonl"
    words = ["--blocks", "ngram n=3", "--k", "2", "4", "--n", "1", "4", "--prompts", "3"]
    shown = command(*words, "--max-new-tokens", "24", "--write", str(data), "--device", "cpu")
    assert "tokens sampled" in shown
    assert "ngram n=3, reward, k = 4" in shown
    assert "best of 4" in shown
    assert "belong to --blocks" in command("--k", "2")
    assert "'ngram n=3'" in command("--blocks", "ngram 3")
