import math
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from marlhf.config.rl import Guards
from marlhf.core import Lines, NGram, Perplexity, RandomNGram, Responses, Sentences, Words, gae
from marlhf.models.forward import Sequences, token_values
from marlhf.models.tiny import tiny_tokenizer
from marlhf.rollout import Sampling
from marlhf.rollout.native import NativeEngine
from marlhf.runs.layout import RunError
from marlhf.runtime.distributed import start
from marlhf.runtime.stage import NO_OBJECTS
from marlhf.spans.apply import SegmenterError
from marlhf.train import critic_quality, experience, held_out, ppo, rl_models
from marlhf.train.rl_models import load_models, load_prompts
from marlhf.train.sampling import sample_responses
from small_runs import TOY, assert_close, read_lines, small_ppo


@pytest.fixture
def ppo_config(ppo_config):
    """Without checkpoints: nothing here resumes."""
    return partial(ppo_config, save_every=0)


def run(config: ppo.PPOConfig) -> list[dict]:
    ppo.train(config)
    return read_lines(config.output_dir)


def test_one_token_macros_are_ppo(ppo_config, monkeypatch):
    """The whole run, number for number, against one that never heard of macro actions."""
    macro = run(ppo_config("macro", segmenter=NGram(1)))

    def token_gae(rewards, values, segments, *, gamma, lam, **_):
        return gae(rewards, values, segments.mask, gamma=gamma, lam=lam)

    monkeypatch.setattr(ppo, "macro_gae", token_gae)
    token = run(ppo_config("token", segmenter=NGram(math.inf)))
    assert _same_but(macro, token, "rl/macro_length")


def _same_but(a: list[dict], b: list[dict], *keys: str) -> bool:
    def without(lines):
        return [{k: v for k, v in line.items() if k not in keys} for line in lines]

    return without(a) == without(b)


@pytest.fixture(scope="module")
def plain_at_one_token(parents, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("plain") / "run"
    return run(small_ppo(parents, folder, segmenter=NGram(1), num_steps=2, save_every=0))


@pytest.mark.parametrize(
    "change",
    [
        {"sigma": "unit"},
        {"sigma": "position"},
        {"sigma": "equal"},
        {"pooling": "mean"},
        {"whiten": "macros"},
        {"ratio": "macro", "value_level": "macro"},
        {"rho": 0.5},
    ],
    ids=str,
)
def test_every_macro_option_is_the_same_at_one_token(ppo_config, plain_at_one_token, change):
    other = run(ppo_config("other", segmenter=NGram(1), num_steps=2, **change))
    assert_close(plain_at_one_token, other, 1e-5)


def test_macro_options_matter_at_five_tokens(ppo_config):
    def last(name, **change):
        return run(ppo_config(name, segmenter=NGram(5), num_steps=2, **change))[-2]

    plain = last("plain")
    for i, change in enumerate(({"sigma": "equal"}, {"pooling": "mean"}, {"split_last": True})):
        changed = last(f"changed{i}", **change)
        assert changed["rl/advantage_norm"] != plain["rl/advantage_norm"], change


def test_micro_batches_change_nothing(ppo_config):
    whole = run(ppo_config("whole", token_budget=100000))
    parts = run(ppo_config("parts", token_budget=50))
    assert_close(whole, parts, 2e-4)


def test_several_epochs_and_mini_batches(ppo_config):
    lines = run(ppo_config(num_ppo_epochs=2, num_mini_batches=4, learning_rate=3e-3))
    train = [x for x in lines if x["kind"] == "train"]
    assert all(x["rl/approx_kl"] > 0 for x in train)  # the policy moved within a step
    assert any(x["rl/clip_fraction"] > 0 for x in train)


def test_one_update_needs_no_pass_of_the_old_policy(ppo_config, monkeypatch):
    calls = []
    real = rl_models.token_stats

    def counting(model, *args, **options):
        calls.append(torch.is_grad_enabled())
        return real(model, *args, **options)

    monkeypatch.setattr(rl_models, "token_stats", counting)
    run(ppo_config("one", num_steps=1, eval_prompts=1))
    once = calls.count(False)
    assert once > 0
    calls.clear()
    run(ppo_config("two", num_steps=1, eval_prompts=1, num_ppo_epochs=2))
    assert calls.count(False) == 2 * once
    assert {x["rl/approx_kl"] for x in read_lines(ppo_config("one").output_dir)[1:2]} == {0.0}


@pytest.mark.parametrize(
    "rule",
    [
        NGram(math.inf),
        RandomNGram(lengths=(1, 3)),
        Perplexity("macro", max_length=4),
        Perplexity("prefix"),
        Words(),
        Sentences(),
        Lines(),
    ],
    ids=str,
)
def test_every_rule_trains(ppo_config, rule):
    """Macro actions are those that the rule makes of the logged responses."""
    config = ppo_config(segmenter=rule, num_steps=1)
    first = run(config)[1]
    assert first["rl/policy_grad_norm"] > 0
    assert 1 <= first["rl/macro_length"] <= first["rl/length"]
    if isinstance(rule, NGram | Lines):  # the small model writes no line break
        assert first["rl/macro_length"] == first["rl/length"]
    else:
        assert first["rl/macro_length"] < first["rl/length"]


def test_a_rule_that_starts_late_stops_with_the_remedy(ppo_config):
    def late(responses: Responses) -> torch.Tensor:
        return torch.zeros_like(responses.mask)

    with pytest.raises(ValueError, match=r"Set `starts\[:, 0\] = True`"):
        run(ppo_config(segmenter=late))


def test_kl_starts_at_zero_and_log_probs_agree_with_training(ppo_config):
    first = run(ppo_config(num_steps=1))[1]
    assert abs(first["rl/kl"]) < 1e-4
    assert first["rl/logprob_gap"] < 1e-5


def test_temperature_is_that_of_the_log_probs(ppo_config):
    sampling = Sampling(max_new_tokens=12, temperature=0.6)
    first = run(ppo_config(num_steps=1, sampling=sampling))[1]
    assert abs(first["rl/kl"]) < 1e-4
    assert first["rl/logprob_gap"] < 1e-5


def test_normalised_scores_start_at_mean_zero(ppo_config):
    start = run(ppo_config(num_steps=1, normalize_scores=True))[0]
    assert abs(start["eval/score"]) < 1e-5


def test_missing_end_costs(ppo_config):
    plain = run(ppo_config("plain", num_steps=1))[1]
    fined = run(ppo_config("fined", num_steps=1, missing_eos_penalty=2.0))[1]
    cut_off = 1 - plain["rl/ended"]
    assert cut_off > 0
    torch.testing.assert_close(
        torch.tensor(plain["rl/score"] - fined["rl/score"]), torch.tensor(2.0 * cut_off)
    )


def test_adaptive_kl_moves_the_coefficient(ppo_config):
    lines = run(ppo_config(num_steps=3, kl_target=1.0, kl_horizon=10, eval_every=0))
    coefs = [x["rl/kl_coef"] for x in lines if x["kind"] == "train"]
    assert coefs[1] == pytest.approx(coefs[0] * (1 - 0.2 * 8 / 10))  # the KL was below target


def test_guards_stop_a_run_and_say_why(ppo_config):
    config = ppo_config(num_steps=6, eval_every=1, learning_rate=3e-2, guards=Guards(max_kl=1e-6))
    lines = run(config)
    assert lines[-1]["step"] < 6
    import json
    from pathlib import Path

    state = json.loads((Path(config.output_dir) / "run.json").read_text())
    assert "Stopped early: the KL to the reference is" in state["note"]
    assert state["status"] == "finished"


@pytest.mark.parametrize(("kl", "told"), [(0.7, 1), (0.1, 0)])
def test_a_policy_that_is_not_its_reference_at_the_start_is_told(monkeypatch, kl, told):
    said = []
    monkeypatch.setattr(held_out, "warn", said.append)
    held_out.warn_about_first_kl(kl)
    assert len(said) == told
    assert all("the KL to the reference is 0.7 nats" in line for line in said)


def test_an_evaluation_before_the_first_step_looks_for_it(ppo_config, parents, monkeypatch):
    said = []
    monkeypatch.setattr(held_out, "MAX_FIRST_KL", -1.0)  # even 0 is too much
    monkeypatch.setattr(held_out, "warn", said.append)
    run(ppo_config(num_steps=2, eval_every=1))
    assert len([line for line in said if "the KL to the reference is" in line]) == 1
    said.clear()
    run(ppo_config("other", num_steps=1, ref_model=str(parents / "sft" / "model")))
    assert not [line for line in said if "the KL to the reference is" in line]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"pooling": "mean", "segmenter": NGram(5)}, 1),
        ({"pooling": "mean", "segmenter": NGram(5), "split_last": True}, 0),
        ({"pooling": "mean", "segmenter": NGram(1)}, 0),
        ({"pooling": "sum", "segmenter": NGram(5)}, 0),
    ],
)
def test_a_score_that_a_mean_divides_is_told(ppo_config, monkeypatch, change, told):
    said = []
    monkeypatch.setattr(critic_quality, "warn", said.append)
    critic_quality.CriticWatch(ppo_config(**change))
    assert len(said) == told


@pytest.mark.parametrize(
    ("explained", "told"),
    [
        ([-3.0] * 25 + [0.2] * 60, 0),  # it may take its time to find the scale
        ([-0.5] * 90, 0),
        ([-3.0] * 90, 1),
        ([0.5] * 50 + [-30.0] * 40, 1),
        ([0.5, -30.0, 0.4, 0.5] * 25, 0),
    ],
)
def test_a_critic_that_misleads_for_long_is_told_once(ppo_config, monkeypatch, explained, told):
    said = []
    monkeypatch.setattr(critic_quality, "warn", said.append)
    watch = critic_quality.CriticWatch(ppo_config())
    for step, value in enumerate(explained, 1):
        watch.check_variance(step, value)
    assert len(said) == told
    assert all("the critic misleads" in line for line in said)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"segmenter": NGram(1), "lam": 0.5}, 1),  # two tokens of twelve
        ({"segmenter": NGram(1), "lam": 0.95}, 0),
        ({"segmenter": NGram(5), "lam": 0.5}, 0),
        ({"segmenter": NGram(1), "lam": 1.0}, 0),
    ],
)
def test_credit_that_ends_long_before_the_first_tokens_is_told(
    ppo_config, monkeypatch, change, told
):
    said = []
    monkeypatch.setattr(critic_quality, "warn", said.append)
    run(ppo_config(num_steps=2, eval_every=0, **change))
    assert len([line for line in said if line.startswith("credit reaches 2 tokens back")]) == told


def test_training_says_so(ppo_config, monkeypatch):
    said = []
    for name, value in {
        "FIRST_STEPS": 2,
        "LAST_STEPS": 2,
        "MIN_EXPLAINED_VARIANCE": 2.0,
        "warn": said.append,
    }.items():
        monkeypatch.setattr(critic_quality, name, value)  # even a perfect one is too bad
    run(ppo_config(num_steps=3, pooling="mean", segmenter=NGram(5)))
    assert [line for line in said if line.startswith("step 2: the critic misleads")]
    assert [line for line in said if line.startswith("pooling: mean divides the score")]


def test_guards_judge_by_hand():
    start = {"eval/kl": 0.0, "eval/repetition": 0.1, "eval/length": 40.0, "eval/ended": 0.8}
    guards = Guards(max_repetition=0.5, max_cut=0.7)
    assert guards.judge(start, start) == ([], "")
    warnings, stop = guards.judge({**start, "eval/length": 10.0, "eval/kl": 60.0}, start)
    assert len(warnings) == 2
    assert not stop
    _, stop = guards.judge({**start, "eval/repetition": 0.7}, start)
    assert "repetition has risen by 0.6" in stop
    [warning], stop = guards.judge({**start, "eval/ended": 0.4}, start)
    assert warning.startswith("the share of responses cut off has risen by 0.4")
    assert not stop
    assert "cut off has risen by 0.8" in guards.judge({**start, "eval/ended": 0.0}, start)[1]


def test_a_judge_that_falls_while_the_score_rises_is_told(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(held_out, "warn", said.append)
    before = [0.1 * i for i in range(20)]
    for noise, fall, warned in ((0.1, 0.5, True), (2.0, 0.5, False), (0.1, -0.5, False)):
        said.clear()
        now = [x - fall + noise * (-1) ** i for i, x in enumerate(before)]
        held_out.warn_about_fallen_gold(7, now, before)
        assert bool(said) == warned
    held_out.warn_about_fallen_gold(7, [0.0], [9.0])  # one prompt says nothing
    assert not said


def test_a_judge_that_prefers_responses_cut_off_is_told(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(held_out, "warn", said.append)
    scores = [0.1 * (i % 7) for i in range(40)]
    ended = [i % 4 > 0 for i in range(40)]  # ten of them do not
    for gap, warned in ((1.0, True), (0.0, False), (-1.0, False)):
        said.clear()
        gold = [x if end else x + gap for x, end in zip(scores, ended)]
        held_out.warn_about_judge_of_cut_responses(gold, ended)
        assert bool(said) == warned
    assert not said
    few = [i > 3 for i in range(40)]  # four say nothing
    held_out.warn_about_judge_of_cut_responses([9.0 - x for x in range(40)], few)
    assert not said


def test_the_judge_is_compared_with_the_start_of_the_run(ppo_config, monkeypatch):
    """The offline task's true score is the judge; the score rises at every other evaluation."""
    seen: list[tuple[int, list[float], list[float]]] = []
    lifts = iter([0.0, 9.0, -9.0, 9.0])

    score = experience.RolloutScorer.__call__

    def lifted(self, examples, rollout):
        scored = score(self, examples, rollout)
        if len(examples) == 8:  # a batch of training
            return scored
        return replace(scored, raw_scores=scored.raw_scores + next(lifts))

    monkeypatch.setattr(experience.RolloutScorer, "__call__", lifted)
    monkeypatch.setattr(held_out, "warn_about_fallen_gold", lambda *args: seen.append(args))
    config = ppo_config(num_steps=3, eval_every=1)
    run(config)
    lines = read_lines(config.output_dir, "eval.jsonl")
    assert seen == [(step, lines[step]["gold"], lines[0]["gold"]) for step in (1, 3)]


def test_samples_show_macro_actions(ppo_config):
    config = ppo_config(num_steps=1, segmenter=NGram(5))
    run(config)
    sample = read_lines(config.output_dir, "samples.jsonl")[-1]
    assert "".join(sample["pieces"]) == sample["response"]
    assert sample["starts"] == [i % 5 == 0 for i in range(sample["length"])]
    assert len(sample["advantages"]) == sample["length"]
    scores = read_lines(config.output_dir, "eval.jsonl")[-1]
    assert len(scores["scores"]) == len(scores["gold"]) == len(scores["ended"]) == 6
    [*_, metrics] = [x for x in read_lines(config.output_dir) if x["kind"] == "eval"]
    finished = [x for x, end in zip(scores["gold"], scores["ended"]) if end]
    if finished:
        assert metrics["eval/gold_ended"] == pytest.approx(sum(finished) / len(finished))
    assert metrics["eval/ended"] == pytest.approx(len(finished) / 6)


def test_a_gold_model_judges_and_teaches_nobody(ppo_config):
    plain, judged = ppo_config("plain", num_steps=2), ppo_config("judged", num_steps=2)
    judged = replace(judged, gold_model=judged.reward_model)
    run(plain)
    run(judged)
    ours, theirs = (read_lines(config.output_dir, "eval.jsonl") for config in (judged, plain))
    assert [line["scores"] for line in ours] == [line["scores"] for line in theirs]
    for line in ours:  # here the judge is the teacher
        assert line["gold"] == pytest.approx(line["scores"], abs=1e-5)


def test_the_official_preset_splits_off_the_last_token(ppo_config):
    """So the score, which is on it, is divided by no length."""
    config = ppo_config(pooling="mean", score_clip=2.5, split_last=True, num_steps=1)
    run(config)
    starts = [sample["starts"] for sample in read_lines(config.output_dir, "samples.jsonl")]
    assert all(row[-1] and row[:5] == [True, False, False, False, False] for row in starts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be positive"),
        ({"num_mini_batches": 3}, "must divide"),
        ({"kl_coef": -1.0}, "kl_coef must be at least 0"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite; got nan"),
        ({"seed": 10**20}, "seed must be below"),
        ({"gamma": 2.0}, "gamma must be at least 0 and at most 1"),
        ({"kl_target": -1.0}, "kl_target must be positive"),
        ({"rollout_tokens": 0}, "rollout_tokens must be positive"),
        ({"dual_clip": 0.5}, "dual_clip must be larger than 1"),
        ({"eval_prompts": -2}, "eval_prompts must be at least 0"),
        ({"missing_eos_penalty": float("inf")}, "missing_eos_penalty must be finite"),
    ],
)
def test_settings_that_make_no_sense(ppo_config, change, message):
    with pytest.raises(ValueError, match=message):
        ppo_config(**change)


def test_nothing_held_out(ppo_config, capfd):
    data = replace(TOY, eval_size=0)
    with pytest.raises(RunError, match="normalize_scores needs held-out prompts"):
        ppo.train(ppo_config(data=data, normalize_scores=True))
    ppo.train(ppo_config(data=data, num_steps=1))
    assert "nothing will be evaluated" in capfd.readouterr().err


def test_scores_of_one_prompt_are_centred_only(ppo_config):
    lines = run(ppo_config(num_steps=1, eval_prompts=1, normalize_scores=True))
    assert next(x for x in lines if x["kind"] == "eval")["eval/score"] == 0


def test_a_language_model_as_reward_model_is_refused(ppo_config, parents):
    model = str(parents / "sft" / "model")
    with pytest.raises(RunError, match="is a language model without a scalar head"):
        ppo.train(ppo_config(reward_model=model, num_steps=1))


def test_a_reference_with_another_tokenizer_is_refused(ppo_config, parents, tmp_path):
    shutil.copytree(parents / "sft" / "model", tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|user|>"
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(RunError, match=r"The reference .* does not have the tokenizer"):
        ppo.train(ppo_config(ref_model=str(tmp_path / "other")))


def test_more_steps_than_data_are_told(ppo_config, capfd):
    ppo.train(ppo_config(batch_size=100, num_steps=5))
    assert "the data gives 1 steps, not the 5" in capfd.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("shift", "words"), [(0.0, ""), (0.3, "warning"), (2.0, "Stopped")])
def test_sampling_that_disagrees_with_training_is_noticed(
    ppo_config, monkeypatch, capfd, epochs, shift, words
):
    """An engine whose log-probs are off, as of another model: warned of, then refused."""
    generate = NativeEngine.generate

    def wrong(*args):
        rollout = generate(*args)
        return replace(rollout, logprobs=rollout.logprobs - shift * (rollout.logprobs != 0))

    monkeypatch.setattr(NativeEngine, "generate", wrong)
    config = ppo_config(num_steps=2, num_ppo_epochs=epochs, learning_rate=1e-2)
    if words == "Stopped":
        with pytest.raises(RunError, match="while sampling and while training differ by 2 nats"):
            ppo.train(config)
        return
    ppo.train(config)
    errors = " ".join(capfd.readouterr().err.split())
    assert errors.count("while sampling and while training differ by 0.3") == (words == "warning")


def test_clipped_scores_keep_the_penalty_for_a_missing_end(ppo_config):
    """Two responses score 9 and one of them was cut off: clipped to 2 it must still be fined."""
    sequences = Sequences.from_lists([[5]] * 2, [[7, 8]] * 2, pad_id=0)
    scores, zeros = torch.tensor([9.0, 9.0]), torch.zeros(2, 2)
    ended, penalty = torch.tensor([True, False]), torch.tensor([0.0, 1.5])
    made = experience.Experience(
        sequences, scores, scores, ended, zeros, zeros, None, eos_penalty=penalty, score_clip=2.0
    )
    models = SimpleNamespace(vocabulary=None)
    rewards, _ = ppo.shape_and_segment(made, models, ppo_config(), 0.1, torch.Generator())
    torch.testing.assert_close(rewards, torch.tensor([[0.0, 2.0], [0.0, 0.5]]))
    torch.testing.assert_close(made.scores, torch.tensor([9.0, 7.5]))


@pytest.mark.parametrize("level", ["token", "macro"])
@pytest.mark.parametrize("budget", [100000, 60])
def test_the_pass_that_values_trains_the_critic_as_one_of_its_own_would(ppo_config, budget, level):
    """Gradients of one pass against values first, and the loss in a second pass."""
    config = ppo_config(token_budget=budget, value_level=level, segmenter=NGram(3), sigma="start")
    world = start(config.device)
    models = load_models(config, NO_OBJECTS, world, critic=True)
    examples, _ = load_prompts(config, models, NO_OBJECTS)
    shuffler = torch.Generator().manual_seed(0)
    prompts = [e.prompt for e in examples[:5]]
    rollout = sample_responses(prompts, models, [1, 2, 3, 4, 5])
    found = experience.RolloutScorer(models, config)(examples[:5], rollout)
    rewards, segments = ppo.shape_and_segment(found, models, config, 0.05, shuffler)
    values, losses = ppo.critic_values_and_backward(found, rewards, segments, models, config)
    once = [p.grad.clone() for p in models.critic.parameters()]
    models.critic.zero_grad()

    alone = found.critic_values(models)
    assert all(p.grad is None for p in models.critic.parameters())
    torch.testing.assert_close(alone, values)
    credit = ppo.assign_credit(rewards, alone, segments, config)
    again = token_values(models.critic, found.sequences)
    counts = experience.count_terms(credit.segments)
    loss = ppo.value_loss(again, credit.values, credit.returns, credit.segments, counts, config)
    loss.backward()
    torch.testing.assert_close(losses["rl/value_loss"], loss.detach())
    for mine, p in zip(once, models.critic.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=1e-6)


def test_a_segmenter_that_raises_is_named(ppo_config):
    def broken(responses):
        return responses.no_such_field

    with pytest.raises(SegmenterError, match=r"broken raised AttributeError: .*bool tensor"):
        ppo.train(ppo_config(segmenter=broken))


def test_boundary_credit_trains_and_matters(ppo_config):
    macro = run(ppo_config("macro", sigma="start"))
    boundary = run(ppo_config("boundary", credit="boundary"))
    assert macro != boundary
    again = run(ppo_config("one", credit="boundary", segmenter=NGram(1)))
    assert_close(again, run(ppo_config("token", segmenter=NGram(1))), 1e-4)


def test_the_critics_own_lambda_leaves_the_first_policy_update_alone(ppo_config):
    plain = run(ppo_config("plain"))
    own = run(ppo_config("own", lam_value=1.0))
    first, changed = (next(x for x in lines if x["kind"] == "train") for lines in (plain, own))
    assert first["rl/policy_loss"] == changed["rl/policy_loss"]
    assert first["rl/value_loss"] != changed["rl/value_loss"]


@pytest.mark.parametrize("epochs", [1, 2])
def test_only_the_critic_learns_while_it_warms_up(ppo_config, epochs):
    lines = run(ppo_config("warm", critic_warmup_steps=2, num_steps=3, num_ppo_epochs=epochs))
    steps = [x for x in lines if x["kind"] == "train"]
    assert [x["rl/learning_rate"] > 0 for x in steps] == [False, False, True]
    assert all(x["rl/kl"] == pytest.approx(0, abs=1e-4) for x in steps)  # before each update
    assert ["rl/policy_grad_norm" in x for x in steps] == [False, False, True]
    assert all(x["rl/critic_grad_norm"] > 0 for x in steps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"credit": "boundary", "pooling": "mean"}, "set pooling: sum"),
        ({"credit": "boundary", "ratio": "macro"}, "set ratio: token"),
        ({"values": "monte_carlo", "sigma": "equal"}, "set sigma: start"),
        ({"values": "monte_carlo", "sigma": "start", "gamma": 0.9}, "set gamma: 1.0"),
        ({"values": "monte_carlo", "sigma": "start", "lam_value": 1.0}, "leave lam_value out"),
        ({"values": "monte_carlo", "sigma": "start", "continuations": 0}, "continuations"),
    ],
)
def test_settings_of_credit_that_do_not_fit_together(ppo_config, change, message):
    with pytest.raises(ValueError, match=message):
        ppo_config("bad", **change)
