"""`marlhf credit`: opening a run at a step, measuring, continuing, and saying what is wrong."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from marlhf.cli import app
from marlhf.core import NGram, Segments, Words
from marlhf.credit import measure as measuring
from marlhf.credit.measure import (
    Measured,
    credit_of,
    critic_verdict,
    limits,
    measure,
    rank_correlation,
    table,
    verdict,
)
from marlhf.credit.state import CreditError, open_state, sample_batch
from marlhf.credit.true_credit import Truth, _critic_error, _share_lowest, locate
from marlhf.credit.ways import (
    AT_END,
    VALUES,
    Batch,
    Way,
    advantages_by_way,
    group_of,
    ways_of,
)
from marlhf.errors import SettingError
from marlhf.report.write import write_report
from marlhf.train import ppo
from marlhf.train.agreement import Agreement
from small_runs import read_lines, small_ppo

RULES = ("token lam=1", "token lam=0.5", "words lam=0.9")


@pytest.fixture(scope="module")
def run(tmp_path_factory, parents):
    """A finished PPO run of four steps, whose last checkpoint is of step 3."""
    folder = tmp_path_factory.mktemp("credit") / "run"
    config = small_ppo(parents, folder, num_steps=4, save_every=3)
    ppo.train(config)
    return Path(config.output_dir)


def test_weights_are_those_of_the_step(run):
    for step, folder in ((3, run / "checkpoints" / "step-000003"), (None, None)):
        state = open_state(run, step=step, device="cpu")
        assert state.step == (step or 4)
        weights = dict(state.models.policy.named_parameters())
        critic = dict(state.models.critic.named_parameters())
        files = [run / "model/model.safetensors", run / "critic/model.safetensors"]
        if folder:
            files = [folder / "policy.safetensors", folder / "critic.safetensors"]
        for file, loaded in zip(files, (weights, critic)):
            for name, tensor in load_file(file).items():
                torch.testing.assert_close(loaded[name].detach(), tensor)
        assert not any(p.requires_grad for p in [*weights.values(), *critic.values()])
    start = open_state(run, step=0, device="cpu")
    for name, tensor in start.models.reference.named_parameters():
        torch.testing.assert_close(dict(start.models.policy.named_parameters())[name], tensor)


def test_measuring_resumes_and_repeats(run, monkeypatch):
    state = open_state(run, device="cpu")
    whole = measure(state, RULES, batches=4, seed=1)
    assert [o.name for o in whole.options] == [
        "ngram n=5 lam=0.95",
        "token lam=1",
        "token lam=0.5",
        "words lam=0.9",
    ]
    # Batches that were written down are not sampled again, and give the same numbers.
    monkeypatch.setattr(measuring, "_batch", lambda *_: pytest.fail("sampled again"))
    again = measure(state, RULES, batches=4, seed=1)
    torch.testing.assert_close(whole.agreement.cosine, again.agreement.cosine, equal_nan=True)
    with pytest.raises(pytest.fail.Exception):
        measure(state, RULES, batches=4, seed=2)


def test_the_unbiased_rule_agrees_with_itself(run):
    """Token GAE with lambda 1 has no bias: its consistency is its cosine."""
    measured = measure(open_state(run, device="cpu"), RULES, batches=6, seed=3)
    cosine, own = measured.agreement.cosine[1], measured.agreement.consistency[1]
    if bool(cosine.isfinite()):
        torch.testing.assert_close(cosine, own)
    assert "token lam=1" in table(measured)
    assert measured.options[0].name in verdict(measured)


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        (0.1, 0.2, "is ahead of token lam=0.8: about 4 times the progress"),
        (0.2, 0.2, "Nothing is ahead of token lam=0.8 by more than 2 standard errors: keep it."),
        (-0.1, 0.2, "more steps with it may do harm. In the recipe: "),
        (-0.1, -0.1, "more steps may gain nothing. Raise --batches"),
        (math.nan, 0.2, "The batches are too few, or too noisy, to judge token lam=0.8."),
    ],
)
def test_a_gradient_that_points_away_is_told(ppo_config, own, other, words):
    options = ways_of(replace(ppo_config(), segmenter=NGram(1), lam=0.8), ("token lam=1",))[:2]
    cosine = torch.tensor([own, other])
    replicates, error = cosine[:, None].expand(2, 4), torch.full((2,), 0.01)
    known = torch.tensor(True)
    agreement = Agreement(cosine, error, cosine, replicates, torch.zeros(2, 1), known)
    measured = Measured(options, agreement, 4, 16, ppo_config(), [0.0, 0.1, 0.2], [0.5, 1.0])
    assert words in verdict(measured)
    samples = {row["name"]: row["samples"] for row in measured.rows()}
    if own > 0 and other > 0:
        assert samples["token lam=1"] == pytest.approx((own / other) ** 2)
    else:
        assert samples["token lam=1"] is None
    assert "nan" not in table(measured)


@pytest.mark.parametrize(
    ("explained", "words"),
    [
        ([0.0, 0.27, 0.52], "explains 0.00, 0.27, 0.52 of the returns in the first, second and"),
        ([0.0, -0.1, 0.04], "That is nothing: either pretrain it"),
    ],
)
def test_what_the_critic_explains_is_told(ppo_config, explained, words):
    nothing = torch.zeros(1)
    agreement = Agreement(nothing, nothing, nothing, torch.zeros(1, 4), torch.zeros(1, 1), nothing)
    measured = Measured([], agreement, 4, 16, ppo_config(), explained, [])
    assert words in critic_verdict(measured)
    assert ("nothing" in critic_verdict(measured)) == (max(explained) < 0.05)


def test_a_wrong_rule_is_told_before_anything_is_loaded(run, monkeypatch):
    monkeypatch.setattr("marlhf.credit.state.open_state", lambda *_, **__: pytest.fail("loaded"))
    out = CliRunner().invoke(app, ["credit", str(run), "--rule", "tokn lam=1"])
    assert "There is no rule 'tokn'" in str(out.exception)


def test_the_command_writes_what_the_report_shows(run):
    options = "--batches 3 --json --where --responses 2 --continuations 2 --device cpu"
    words = ["credit", str(run), "--rule", "token lam=1", "sae", *options.split()]
    out = CliRunner().invoke(app, words)
    assert out.exit_code == 0, out.output
    found = json.loads((run / "credit.json").read_text())
    assert found["step"] == 4
    assert {row["name"] for row in found["rows"]} == {
        "token lam=1",
        "ngram n=5 lam=0.95",
        "sae",
    }
    where = found["where"]
    assert [len(where["samples"]), where["continuations"]] == [2, 2]
    texts = ["".join(p["text"] for p in s["pieces"]) for s in where["samples"]]
    assert all(texts)
    found["where"]["samples"][0]["pieces"][0]["text"] = "<script>alert(1)</script>"
    found["rows"] = [row | {"cosine": 0.5, "error": 0.1} for row in found["rows"]]
    (run / "credit.json").write_text(json.dumps(found))
    page = write_report([run], run.parent / "report.html").read_text()
    assert "cosine with the true gradient" in page
    assert "<script>alert" not in page
    assert "true credit" in page
    assert "does not point along" not in page
    found["rows"] = [row | {"cosine": -0.2 if row["own"] else 0.5} for row in found["rows"]]
    (run / "credit.json").write_text(json.dumps(found))
    page = write_report([run], run.parent / "report.html").read_text()
    assert "whose gradient does not point along the true one" in page


def test_a_damaged_result_is_left_out_of_the_report(run):
    for damage in ("", "[]", '{"rows": [1, {"name": null}]}', '{"rows": {}}'):
        (run / "credit.json").write_text(damage)
        write_report([run], run.parent / "damaged.html")
    (run / "credit.json").unlink()


def test_credit_by_continuations_adds_up(run):
    """Over a response the true credits add up to its return less the value of the prompt."""
    state = open_state(run, device="cpu")
    found = locate(state, RULES, responses=3, continuations=2)
    for sample in found["samples"]:
        credit = sum(piece["true"] for piece in sample["pieces"])
        first = sample["pieces"][0]["value"]
        # No KL penalty is known here, so the sum differs from the score by no more than that.
        assert abs(credit - (sample["score"] - first)) < 5 * state.kl_coef
    assert {row["name"] for row in found["rules"]} >= set(RULES)


def test_the_first_wrong_line_by_hand():
    ids = torch.tensor([[0, 1, 2], [0, 0, 1]])
    segments = Segments(ids, torch.ones(2, 3).bool())
    credit = torch.tensor([[0.5, -1.0, 0.2], [0.3, 0.1, -9.0]])  # the last is no macro action
    assert _share_lowest(credit, segments, [(0, 1), (1, 0)]) == 0.5
    assert _share_lowest(credit, segments, [(0, 1), (1, 1)]) == 1.0


def test_the_critics_error_is_without_the_noise_of_continuations():
    ids = torch.arange(3).expand(200, 3)
    segments = Segments(ids, torch.ones(200, 3).bool())
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(200, 3, generator=generator)
    noise = 0.5 * torch.randn(200, 3, generator=generator)
    critic = true + torch.tensor([0.0, 0.3, 1.0])
    truth = Truth(segments, true + noise, torch.full_like(true, 0.5), critic, true)
    errors = [row["error"] for row in _critic_error(truth)]
    assert [round(error, 1) for error in errors] == pytest.approx([0.0, 0.3, 1.0], abs=0.21)


def damaged(run, tmp_path, **changes):
    folder = tmp_path / "changed"
    folder.mkdir()
    config = yaml.safe_load((run / "config.yaml").read_text()) | changes
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for name in ("run.json", "metrics.jsonl"):
        (folder / name).write_text((run / name).read_text())
    return folder


def test_what_cannot_be_measured_is_a_sentence(run, tmp_path, parents):
    with pytest.raises(CreditError, match="is not the folder of a run"):
        open_state(tmp_path)
    with pytest.raises(CreditError, match="no critic: credit is measured for PPO"):
        open_state(parents / "sft")
    with pytest.raises(CreditError, match="There is 0, 3, 4"):
        open_state(run, step=7)
    state = open_state(run, device="cpu")
    with pytest.raises(CreditError, match="at least 3"):
        measure(state, batches=2)
    with pytest.raises(ValueError, match="no rule 'ngrams'"):
        measure(state, ("ngrams n=3",))
    with pytest.raises(CreditError, match="2 continuations"):
        locate(state, RULES, continuations=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": "monte_carlo", "sigma": "start"}, "no critic to measure"),
        ({"segmenter": {"type": "my_rules:Mine"}}, "--trust-code"),
        ({"reward_funcs": ["subprocess:getoutput"]}, "--trust-code"),
        ({"model": "(given in Python)"}, "given in Python"),
    ],
)
def test_folders_that_are_refused(run, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        open_state(damaged(run, tmp_path, **changes))


def test_a_reward_that_is_not_deterministic_is_told(run, capfd):
    state = open_state(run, device="cpu")
    reward = state.models.reward
    calls = iter(range(100))

    class Noisy:
        latest = reward.latest

        def __call__(self, *args):
            return reward(*args) + next(calls)

    object.__setattr__(state.models, "reward", Noisy())
    measure(state, ("token lam=1",), batches=3, seed=9)
    assert "other scores the second time" in " ".join(capfd.readouterr().err.split())


def test_scores_are_normalised_as_the_run_does_it(parents, tmp_path):
    """By what its folder says, at any step; before the first step as the run will find it."""
    config = small_ppo(parents, tmp_path / "run", num_steps=1, save_every=0, normalize_scores=True)
    folder = Path(config.output_dir)
    ppo.train(config)
    mean, deviation = json.loads((folder / "run.json").read_text())["score_scale"]
    scores = torch.tensor([1.0, -2.0])
    for step in (0, 1):
        found = open_state(folder, step=step, device="cpu").score.normalise(scores)
        torch.testing.assert_close(found, (scores - mean) / deviation)

    state = json.loads((folder / "run.json").read_text())
    del state["score_scale"]
    (folder / "run.json").write_text(json.dumps(state))
    found = open_state(folder, step=0, device="cpu").score.normalise(scores)
    torch.testing.assert_close(found, (scores - mean) / deviation)
    with pytest.raises(CreditError, match="at step 0"):
        open_state(folder, step=1, device="cpu")


def test_nothing_in_the_run_changes(run):
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    measure(open_state(run, device="cpu"), ("token lam=1",), batches=3, seed=5)
    after = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    changed = {p.name for p in after if after[p] != before.get(p)}
    assert changed <= {"credit.jsonl"}
    assert read_lines(run)


def test_the_advice_is_a_line_for_a_recipe(ppo_config):
    way = Way("words lam=0.9", ppo_config(segmenter=Words()))
    settings = yaml.safe_load("{" + way.recipe + "}")
    assert settings == {"segmenter": {"type": "words"}, "lam": 0.9, "sigma": "start"}
    assert math.isclose(settings["lam"], 0.9)


def test_presets_are_ways_of_their_credit_alone(run):
    """VinePPO's values come from continuations, GRPO-like methods compare groups."""
    state = open_state(run, device="cpu")
    ways = ways_of(state.ppo, ("vineppo", "sae", "dr-grpo", "token lam=1"))
    by_name = {way.name: way for way in ways}
    assert [way.name for way in ways[1:-1]] == ["token lam=1", "vineppo", "sae", "dr-grpo"]
    assert by_name["vineppo"].values == "monte_carlo"
    assert (by_name["vineppo"].config.lam, by_name["vineppo"].config.continuations) == (0.0, 9)
    assert by_name["sae"].config.credit == "boundary"
    assert by_name["sae"].config.learning_rate == state.config.learning_rate
    assert by_name["dr-grpo"].config.num_samples == 8 == group_of(ways, 8)
    assert by_name["vineppo"].recipe == "preset: vineppo"
    with pytest.raises(CreditError, match="do not share a batch of 8"):
        group_of(ways_of(state.ppo, ("dr-grpo", "gspo", "dapo")), 8)
    for name, words in (("treerl", "samples trees"), ("gigpo", "has no environment")):
        with pytest.raises(CreditError, match=words):
            ways_of(state.ppo, (name,))


def test_presets_are_measured_on_groups_with_values_of_their_own(run):
    state = open_state(run, device="cpu")
    names = ("vineppo", "dr-grpo", "token lam=0.5")
    experience, examples = sample_batch(state, 0, 0, group=8)
    assert len({tuple(e.prompt) for e in examples}) == 1
    generator = torch.Generator().manual_seed(0)
    batch = Batch(state, examples, experience, credit_of(state, experience, generator), generator)
    ways = ways_of(state.ppo, names)
    advantages, reaches = advantages_by_way(batch, ways)
    by_name = dict(zip([way.name for way in ways], advantages * experience.mask.sum()))
    rewards = batch.credit.rewards.sum(dim=1)
    expected = (rewards - rewards.mean())[:, None] * experience.mask
    torch.testing.assert_close(by_name["dr-grpo"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(by_name[AT_END], by_name["ngram n=5 lam=0.95"])  # it is there
    assert reaches[1] == pytest.approx(2 * 8 / float(experience.mask.sum()))
    assert (reaches[0], reaches[3]) == (1.0, 1.0)
    measured = measure(state, names, batches=3)
    assert [o.name for o in measured.options] == ["ngram n=5 lam=0.95", names[2], *names[:2]]
    assert "vineppo" in table(measured)


def test_process_rewards_are_compared_with_the_same_at_the_end(run):
    state = open_state(run, device="cpu")
    experience, examples = sample_batch(state, 0, 0)
    earned = torch.zeros(experience.mask.shape)
    earned[:, 0] = 1.0  # of each score, a part at the first token
    generator = torch.Generator().manual_seed(0)
    placed = replace(experience, earned=earned)
    batch = Batch(state, examples, placed, credit_of(state, placed, generator), generator)
    ways = ways_of(state.ppo, ())
    advantages, _ = advantages_by_way(batch, ways)
    late = Batch(state, examples, experience, credit_of(state, experience, generator), generator)
    torch.testing.assert_close(advantages[-1], advantages_by_way(late, ways)[0][0])
    assert not torch.equal(advantages[0], advantages[-1])


def test_values_can_come_from_another_source(run, monkeypatch):
    """A source is a function with a name."""
    state = open_state(run, device="cpu")
    monkeypatch.setitem(VALUES, "zero", lambda batch, *_: torch.zeros_like(batch.credit.values))
    experience, examples = sample_batch(state, 0, 0)
    generator = torch.Generator().manual_seed(0)
    batch = Batch(state, examples, experience, credit_of(state, experience, generator), generator)
    config = replace(state.ppo, segmenter=NGram(1), lam=1.0, whiten="none")
    [advantages], _ = advantages_by_way(batch, [Way("zero", config, values="zero")])
    to_go = batch.credit.rewards.flip(1).cumsum(1).flip(1) * experience.mask
    torch.testing.assert_close(advantages * experience.mask.sum(), to_go, rtol=1e-4, atol=1e-5)


def test_known_answers_are_one_source_of_values(run, monkeypatch):
    state = open_state(run, device="cpu")
    experience, examples = sample_batch(state, 0, 0)
    generator = torch.Generator().manual_seed(0)
    credit = credit_of(state, experience, generator)
    *_, answer, _ = ways = ways_of(state.ppo, ("answer",))
    assert answer.recipe == "values: answer, sigma: start"
    with pytest.raises(SettingError, match="'answer'"):  # these rows have none
        advantages_by_way(Batch(state, examples, experience, credit, generator), ways)
    known = [
        replace(e, row=replace(e.row, columns={**e.row.columns, "answer": "12"})) for e in examples
    ]
    values = VALUES["answer"](
        Batch(state, known, experience, credit, generator), credit.segments, answer.config
    )
    assert ((values > 0) == credit.segments.starts).all()
    assert values.max() < 1


def test_what_the_measure_cannot_tell_is_said(ppo_config):
    names = ("token lam=0.5", "token lam=0.9", "token lam=1")
    ways = ways_of(replace(ppo_config(), segmenter=NGram(1), lam=0.8), names)[:-1]
    cosine = torch.tensor([0.2, -0.3, 0.25, 0.3])
    replicates = cosine[:, None] + torch.tensor([[0.1, -0.1, 0.1, -0.1]]) * torch.eye(4)
    error, known = torch.full((4,), 0.1), torch.tensor(True)
    agreement = Agreement(cosine, error, cosine, replicates, torch.zeros(4, 1), known)
    reaches = [0.4, 0.2, 0.5, 1.0]
    measured = Measured(ways, agreement, 4, 16, ppo_config(), [0.0] * 3, reaches)
    said = limits(measured)
    assert "The intervals of token lam=1 and token lam=0.8 overlap" in said
    assert "To avoid, since they point away from the true gradient: token lam=0.5." in said
    assert "rank correlation 1.00" in said


def test_rank_correlation_by_hand():
    x, y = torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan]), torch.tensor([1.0, 3.0, 2.0, 4.0, 9.0])
    assert rank_correlation(x, y) == 0.8  # 1 - 6 * 2 / (4 * 15)
    assert math.isnan(rank_correlation(x, torch.ones(5)))
