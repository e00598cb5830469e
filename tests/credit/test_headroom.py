"""`marlhf credit --headroom`: on small runs, resumed, replayed, refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from marlhf.cli import app
from marlhf.core import Lines, Segments, Turns
from marlhf.credit import headroom as measuring
from marlhf.credit.headroom import evenly, measure_headroom, verdict
from marlhf.credit.headroom_estimates import REACHES
from marlhf.credit.state import CreditError, open_state, sample_batch
from marlhf.data import DataConfig
from marlhf.report.write import write_report
from marlhf.rollout import Sampling
from marlhf.runs.atomic import finite
from marlhf.train import ppo, rloo
from marlhf.train.rloo_config import RLOOConfig
from small_runs import TOY, small_ppo

GAME = {
    "data": DataConfig(source="guess", limit=300, eval_size=24),
    "reward_model": "",
    "environment": "guess",
    "max_turns": 3,
    "episode_tokens": 80,
    "sampling": Sampling(max_new_tokens=4),
    "segmenter": Turns(),
}
SMALL = {"responses": 12, "continuations": 2, "boundaries": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory, parents):
    config = small_ppo(parents, tmp_path_factory.mktemp("headroom") / "run", num_steps=1)
    ppo.train(config)
    return Path(config.output_dir)


@pytest.fixture(scope="module")
def rloo_run(tmp_path_factory, parents):
    folder = tmp_path_factory.mktemp("headroom") / "rloo"
    config = RLOOConfig(
        model=str(parents / "sft" / "model"),
        reward_model=str(parents / "reward" / "model"),
        output_dir=str(folder),
        data=TOY,
        batch_size=4,
        num_samples=3,
        num_steps=1,
        eval_every=0,
        save_every=0,
        sampling=Sampling(max_new_tokens=12),
    )
    rloo.train(config)
    return folder


def test_the_command_writes_what_the_report_shows(run):
    words = "--headroom --responses 12 --continuations 2 --boundaries 3 --device cpu"
    out = CliRunner().invoke(app, ["credit", str(run), *words.split()])
    assert out.exit_code == 0, out.output
    result = json.loads((run / "headroom.json").read_text())
    assert [result[key] for key in ("step", "responses", "group", "batch")] == [1, 12, 4, 8]
    assert [row["reach"] for row in result["rows"]] == list(REACHES)
    assert result["rule"] == "ngram n=5"
    assert result["own"]["name"] == "ngram n=5 lam=0.95"
    assert result["verdict"] in out.output
    assert "exact values, lam=0.8" in out.output
    result["verdict"] = "<script>alert(1)</script>"
    (run / "headroom.json").write_text(json.dumps(result))
    page = write_report([run], run.parent / "report.html").read_text()
    assert "RLOO needs, times" in page
    assert "<script>alert" not in page
    for damage in ("", "[]", '{"rows": [1, {"reach": null}]}', '{"rows": 3}'):
        (run / "headroom.json").write_text(damage)
        write_report([run], run.parent / "damaged.html")
    (run / "headroom.json").unlink()


def test_a_killed_measurement_resumes_with_identical_numbers(run, monkeypatch):
    monkeypatch.setattr(measuring, "ROWS", 4)  # one group in each part
    state = open_state(run, device="cpu", without_critic=True)
    file = run / "headroom.jsonl"
    file.unlink(missing_ok=True)
    whole = measure_headroom(state, **SMALL, seed=1)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + lines[1][: len(lines[1]) // 2])  # as kill -9 leaves it
    real, measured = measuring._measure, []
    monkeypatch.setattr(measuring, "_measure", lambda *a: measured.append(a[2]) or real(*a))
    again = measure_headroom(state, **SMALL, seed=1)
    assert measured == [range(1, 2), range(2, 3)]
    assert finite(again) == finite(whole)
    measure_headroom(state, **SMALL, seed=1)
    assert len(measured) == 2
    measure_headroom(state, **SMALL | {"responses": 16}, seed=1)  # adds to what is there
    assert measured[2:] == [range(3, 4)]


def test_a_run_of_rloo_has_its_own_group_and_no_critic(rloo_run):
    state = open_state(rloo_run, device="cpu", without_critic=True)
    assert state.models.critic is None
    result = measure_headroom(state, **SMALL)
    assert (result["group"], result["batch"]) == (3, 12)
    assert "own" not in result  # it is RLOO itself
    assert "critic" not in result
    assert result["rule"] == "ngram n=4"  # 12 tokens, 3 boundaries
    # GRPO differs from it, and is measured beside it.
    grpo = replace(state, config=replace(state.config, baseline="group"))
    assert measure_headroom(grpo, **SMALL, seed=2)["own"]["name"] == "ngram n=inf"


def test_without_a_critic_only_exact_values_are_compared(run):
    state = open_state(run, device="cpu", without_critic=True)
    sampled = replace(state, config=replace(state.config, values="monte_carlo"))
    result = measure_headroom(sampled, **SMALL, seed=3)
    assert "own" not in result
    assert "critic" not in result
    assert len(result["rows"]) == len(REACHES)


def test_gradients_of_rows_add_up_to_the_gradient_of_the_batch(run):
    state = open_state(run, device="cpu", without_critic=True)
    experience, _ = sample_batch(state, 0, 0)
    ways = torch.randn(2, *experience.mask.shape) * experience.mask
    whole = measuring.gradients_by_row(state, experience, ways)
    for row in range(3):
        only = torch.zeros_like(ways)
        only[:, row] = ways[:, row]
        alone = measuring.gradients_by_row(state, experience, only)
        torch.testing.assert_close(alone.sum(dim=1), whole[:, row], rtol=1e-4, atol=1e-4)


def test_macro_actions_are_joined_evenly():
    mask = torch.ones(2, 8).bool()
    mask[1, 5:] = False
    tokens = Segments.from_starts(mask, mask)
    assert evenly(tokens, 4).ids.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 2, 3, 3, 3, 3]]
    assert torch.equal(evenly(tokens, 9).ids[0], tokens.ids[0])


def test_what_cannot_be_measured_is_a_sentence(run, rloo_run, parents):
    with pytest.raises(CreditError, match="headroom is measured for PPO, RLOO and GRPO"):
        open_state(parents / "sft", without_critic=True)
    with pytest.raises(CreditError, match="or add --headroom, which needs none"):
        open_state(rloo_run)
    with pytest.raises(CreditError, match="has nothing saved of step 7"):
        open_state(run, step=7, without_critic=True)
    state = open_state(run, device="cpu", without_critic=True)
    with pytest.raises(CreditError, match=r"at least 2 continuations.*--continuations 1"):
        measure_headroom(state, **SMALL | {"continuations": 1})
    with pytest.raises(CreditError, match="set --responses to 12 or more; got 8"):
        measure_headroom(state, **SMALL | {"responses": 8})
    with pytest.raises(CreditError, match="--boundaries must be at least 1; got 0"):
        measure_headroom(state, **SMALL | {"boundaries": 0})


def row(reach: float, headroom: float, low: float, high: float) -> dict:
    return {"reach": reach, "headroom": headroom, "low": low, "high": high, "sampled": headroom / 2}


@pytest.mark.parametrize(
    ("best", "share", "words"),
    [
        ((1.0, 0.9, 1.1), 0.0, "Credit cannot help here: use RLOO."),
        ((1.1, 0.5, 3.0), 0.0, "It cannot be told whether credit can help here: RLOO needs 1.1"),
        ((2.0, 0.9, math.inf), 0.0, "cannot be told whether credit can help"),
        (
            (3.0, 2.0, 5.0),
            0.9,
            "with exact values would, with segmenter: {type: lines}, lam: 0.5, sigma: start.",
        ),
        ((3.0, 2.0, 5.0), 0.9, "continuations: 4 it needs 1.5 times"),
        ((3.0, 2.0, 5.0), 0.9, "Its critic has 90% of that gain, at lam: 1."),
        ((3.0, 2.0, math.inf), -0.2, "Its critic has 0% of that gain. Make it better"),
        ((3.0, 2.0, 5.0), math.nan, "its critic has cannot be told"),
        ((math.nan, math.nan, math.nan), 0.0, "Nothing can be told"),
    ],
)
def test_the_sentence(ppo_config, best, share, words):
    result = {"rows": [row(0.5, *best)], "best": 0.5, "critic": {"reach": 1.0, "share": share}}
    said = verdict(result, ppo_config(), Lines(), 4)
    assert words in said
    if words.endswith("at lam: 1."):
        assert "Make it better" not in said


def test_with_an_environment_episodes_are_replayed(parents, tmp_path, monkeypatch):
    config = small_ppo(parents, tmp_path / "game", **GAME, num_steps=1)
    ppo.train(config)
    state = open_state(Path(config.output_dir), device="cpu", without_critic=True)
    real, returns = measuring.returns_from, []
    monkeypatch.setattr(
        measuring, "returns_from", lambda *a: returns.append(real(*a)) or returns[0]
    )
    result = measure_headroom(state, responses=12, continuations=2)
    assert len(returns[0]) > 12  # some have a second turn
    assert result["rule"] == "turns"
    assert "own" in result
