"""Online DPO: DPO's loss on the pairs it samples, judges and rewards as labels, ties, resuming."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from marlhf.data import Row, encode_prompts, encode_responses, load_data
from marlhf.judge.compare import PairJudge
from marlhf.judge.pairs import JudgeError, Pair, Response
from marlhf.models.load import load_policy, load_scalar, load_tokenizer
from marlhf.models.sequences import Sequences
from marlhf.models.tiny import tiny_tokenizer
from marlhf.reward import RewardModel
from marlhf.rollout import Sampling
from marlhf.runtime.distributed import World
from marlhf.runtime.optim import Diverged
from marlhf.runtime.stage import Example, GivenObjects, Stopped
from marlhf.train import dpo, online_dpo
from marlhf.train.experience import Experience
from marlhf.train.rl_models import Models
from marlhf.train.supervised import Passes
from marlhf.trainers import OnlineDPOTrainer
from small_runs import TOY, everything, read_lines, stop_after, weights

HERE = World(torch.device("cpu"))
RESPONSES = [[7, 8, 9], [9], [7, 7, 7, 1], [8, 8], [5], [5, 6, 7, 8, 9, 1]]


@pytest.fixture
def online_config(parents, tmp_path):
    """An online DPO run of a few seconds; keywords change it."""

    def make(name: str = "online", **changes) -> online_dpo.OnlineDPOConfig:
        settings = {
            "model": str(parents / "sft" / "model"),
            "reward_model": str(parents / "reward" / "model"),
            "output_dir": str(tmp_path / name),
            "data": TOY,
            "batch_size": 4,
            "num_steps": 3,
            "learning_rate": 1e-3,
            "eval_every": 2,
            "eval_prompts": 4,
            "log_samples": 2,
            "save_every": 1,
            "sampling": Sampling(max_new_tokens=12),
        }
        return online_dpo.OnlineDPOConfig(**{**settings, **changes})

    return make


def training(config) -> list[dict]:
    return [x for x in read_lines(config.output_dir) if x["kind"] == "train"]


@pytest.mark.parametrize("budget", [100000, 16])
def test_loss_and_gradients_are_those_of_dpo_on_the_same_pairs(budget):
    """Three prompts with two responses each; DPO has the same pairs as rows of a file."""
    scores = torch.tensor([1.0, 2.0, 6.0, -1.0, 0.0, 0.5])
    model, other = load_policy("tiny", seed=1), load_policy("tiny", seed=2)
    sequences = Sequences.from_lists([[5, 6]] * 6, RESPONSES, pad_id=0)
    models = Models(model, *[None] * 6, HERE, Sampling(), pass_tokens=budget)
    with torch.no_grad():
        ref = models.logprobs(other, sequences)
    ended = torch.ones(6, dtype=torch.bool)
    found = Experience(sequences, scores, scores, ended, ref, ref, None)
    config = online_dpo.OnlineDPOConfig(model="tiny", beta=0.3)
    pairs = online_dpo.best_and_worst(found.scores, 2)
    assert pairs == [(1, 0), (2, 3), (5, 4)]

    rows = [Example(Row(""), [5, 6], RESPONSES[c], RESPONSES[r]) for c, r in pairs]
    passes = Passes(model, 0, budget, "auto", HERE)
    theirs = dpo.all_logprobs(replace(passes, model=other), rows)
    loss_of = partial(dpo.preference_loss, beta=0.3, label_smoothing=0.0)
    wanted, logprobs = dpo.backward(passes, rows, theirs, loss_of)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    metrics = online_dpo.backward(found, pairs, models, config, [0, 1, 2])
    torch.testing.assert_close(metrics["rl/policy_loss"], wanted)
    for p, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)
    margins = 0.3 * ((logprobs - theirs)[0] - (logprobs - theirs)[1])
    torch.testing.assert_close(metrics["dpo/margin"], margins.mean())
    assert float(metrics["dpo/accuracy"]) == pytest.approx((margins > 0).float().mean().item())


def test_ipo_by_hand():
    """Margins of 2 and -1 nats; with beta 0.5 the target is 1: (1 + 4) / 2."""
    logprobs, ref = torch.tensor([[-2.0, -6.0], [-7.0, -4.0]]), torch.zeros(2, 2)
    ref = torch.tensor([[-5.0, -5.0], [-8.0, -4.0]])
    found = online_dpo.preference_loss(logprobs, ref, 2, beta=0.5, loss_type="ipo")
    torch.testing.assert_close(found, torch.tensor(2.5))


def test_equal_scores_are_no_pair_and_nothing_is_learnt(online_config, parents):
    assert online_dpo.best_and_worst(torch.tensor([3.0, 3.0, 1.0, 1.0]), 2) == []
    objects = GivenObjects(reward_funcs=[lambda completions, **_: [1.0] * len(completions)])
    config = online_config(reward_model="", reward_funcs=("flat",))
    online_dpo.train(config, objects)
    assert [(x["dpo/pairs"], x["dpo/ties"]) for x in training(config)] == [(0, 4)] * 3
    assert weights(config.output_dir) == weights(str(parents / "sft"))


def test_a_score_that_is_no_number_stops_the_run():
    with pytest.raises(Diverged, match="scores"):
        online_dpo.best_and_worst(torch.tensor([3.0, float("nan")]), 2)


def test_metrics_of_a_run(online_config):
    config = online_config(num_samples=3, num_mini_batches=2)
    online_dpo.train(config)
    for line in training(config):
        assert line["dpo/pairs"] + line["dpo/ties"] == 4
        margin = line["dpo/chosen_reward"] - line["dpo/rejected_reward"]
        assert line["dpo/margin"] == pytest.approx(margin, abs=1e-5)
    first = training(config)[0]
    assert abs(first["rl/kl"]) < 1e-4  # the policy is its own reference
    assert first["rl/policy_grad_norm"] > 0
    assert first["rl/group_std"] > 0


def test_micro_batches_change_nothing(online_config):
    runs = []
    for budget in (100000, 60):
        config = online_config(f"b{budget}", token_budget=budget, loss_type="ipo")
        online_dpo.train(config)
        runs.append(torch.tensor([x["rl/policy_loss"] for x in training(config)]))
    torch.testing.assert_close(*runs, rtol=1e-3, atol=1e-3)


class Longer:
    """One of TRL's judges of pairs: the longer one is better. Remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def judge(self, prompts, completions):
        self.asked += completions
        longer = [len(b) - len(a) for a, b in completions]
        return [-1 if d == 0 else int(d > 0) for d in longer]


@pytest.mark.parametrize("judged", [False, True], ids=["reward", "judge"])
def test_it_resumes_identically(online_config, monkeypatch, judged):
    options = {"num_mini_batches": 2, "num_samples": 3, "save_every": 0, "num_steps": 4}
    objects = GivenObjects(judge=Longer()) if judged else GivenObjects()
    if judged:  # held-out scores compare with the start, which a checkpoint must keep
        options |= {"judge": "(given in Python) Longer", "reward_model": ""}
    whole, parts = online_config("whole", **options), online_config("parts", **options)
    online_dpo.train(whole, objects)
    with monkeypatch.context() as patched:
        stop_after(2, patched, online_dpo)
        with pytest.raises(Stopped):
            online_dpo.train(parts, objects)
    online_dpo.train(parts, objects)
    assert everything(whole.output_dir) == everything(parts.output_dir)
    assert weights(whole.output_dir) == weights(parts.output_dir)


def test_a_judge_scores_by_the_share_of_comparisons_won():
    verdicts = {("hi", "ho"): "a", ("hi", "hu"): "tie", ("ho", "hu"): None, ("hm", "he"): "b"}
    asked = []

    def compare(pairs):
        asked.append([(p.a.text, p.b.text) for p in pairs])
        return [verdicts[texts] for texts in asked[-1]]

    judge = online_dpo.JudgeScores(compare, HERE)
    judge.tokenizer = tiny_tokenizer()
    ids = {text: judge.tokenizer(text).input_ids for text in ("hi", "ho", "hu", "hm", "he")}
    rows, said = [Row("one")] * 3, [ids[x] for x in ("hi", "ho", "hu")]
    # hi wins one and ties one; ho loses one, its other has no verdict; hu ties one
    assert judge([[1]] * 3, said, rows).tolist() == [0.75, 0.0, 0.5]
    # A held-out prompt: first against itself, then against what was first
    judge.compare = lambda pairs: ["tie"] * len(pairs)
    assert judge([[1]], [ids["he"]], [Row("two")]).tolist() == [0.5]
    judge.compare = compare
    assert judge([[1]], [ids["hm"]], [Row("two")]).tolist() == [0.0]
    assert asked[-1] == [("hm", "he")]


def test_a_reward_model_as_a_judge_prefers_what_it_scores_higher(online_config, parents, tmp_path):
    path = str(parents / "reward" / "model")
    tokenizer = load_tokenizer("tiny")
    rows = load_data(TOY, "reward", needs=("prompt", "chosen", "rejected")).train[:8]
    texts = [text for row in rows for text in (row.chosen, row.rejected)]
    twice = [row for row in rows for _ in range(2)]
    prompts = encode_prompts(tokenizer, [row.prompt for row in twice])
    said = encode_responses(
        tokenizer, list(zip([r.prompt for r in twice], texts)), tokenizer.eos_token_id
    )
    scores = RewardModel(load_scalar(path), tokenizer, tokenizer)(prompts, said).view(-1, 2)
    judge = PairJudge(f"reward:{path}", task="hh", cache=tmp_path / "none")
    by_judge = online_dpo.JudgeScores(judge, HERE)
    by_judge.tokenizer = tokenizer
    found = by_judge(prompts, said, twice).view(-1, 2)
    torch.testing.assert_close(found[:, 0], (scores[:, 0] > scores[:, 1]).float())
    assert (found.sum(dim=1) == 1).all()

    config = online_config(judge=f"reward:{path}", reward_model="")
    online_dpo.train(config)
    assert training(config)[0]["rl/score"] == 0.5  # a pair has one winner
    start, *_, end = [x for x in read_lines(config.output_dir) if x["kind"] == "eval"]
    assert start["eval/score"] == 0.5  # against itself
    assert 0 <= end["eval/score"] <= 1


def test_a_judge_without_a_verdict_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    judge = PairJudge("openai:some", task="hh", cache=tmp_path / "replies.sqlite")
    monkeypatch.setattr(judge.judge, "answer", lambda questions, progress: [None] * len(questions))
    judge.judge.faults["the server said no"] += 1
    with pytest.raises(JudgeError, match="no verdict on any of 1 pairs: the server said no"):
        judge([Pair("Why?", Response("a"), Response("b"))])
    assert judge([Pair("Why?", Response("a"), Response("a"))]) == ["tie"]  # is not asked


def test_the_trainer_takes_trls_judges(tmp_path):
    judge = Longer()
    trainer = OnlineDPOTrainer(
        model="tiny",
        judge=judge,
        args=online_dpo.OnlineDPOConfig(
            output_dir=str(tmp_path / "run"),
            batch_size=2,
            num_steps=1,
            save_every=0,
            sampling=Sampling(max_new_tokens=6),
        ),
        train_dataset=[{"prompt": f"Tell me of fox {i}."} for i in range(8)],
    )
    trainer.train()
    assert len(judge.asked) >= 2
    assert trainer.args.judge == "(given in Python) Longer"
    with pytest.raises(TypeError, match="judge must be a name"):
        OnlineDPOTrainer(model="tiny", judge=3)
    with pytest.raises(ValueError, match="Nothing scores the responses"):
        OnlineDPOTrainer(model="tiny")


def test_a_judge_that_gives_something_else_than_verdicts_is_a_sentence():
    class Judge:
        def judge(self, prompts, completions):
            return self.given

    pairs, judge = [Pair("Why?", Response("a"), Response("b"))] * 2, Judge()
    for judge.given, verdicts in (([1, -1], ["b", "tie"]), ([torch.tensor(0), None], ["a", None])):
        assert online_dpo._ask_object(judge, pairs) == verdicts
    for judge.given in ([0], [0.3, 1], [0, 2]):
        with pytest.raises(JudgeError, match=r"Judge\.judge must return 0, 1 or -1 for each of 2"):
            online_dpo._ask_object(judge, pairs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 1}, "num_samples must be at least 2, for a pair is two responses"),
        ({"kl_coef": 0.1}, "kl_coef would have no effect: online DPO .* Leave it out"),
        ({"clip": 0.1, "gamma": 0.9}, "clip, gamma would have no effect"),
        ({"judge": "gpt-4o"}, "judge: gpt-4o is unknown. Write openai:MODEL"),
        ({"judge": "openai:x", "environment": "guess"}, "A judge compares single responses"),
        ({"beta": 0}, "beta must be"),
        ({"loss_type": "hinge"}, "loss_type must be one of sigmoid, ipo"),
    ],
)
def test_settings_that_make_no_sense(online_config, change, message):
    with pytest.raises(ValueError, match=message):
        online_config(**change)


def test_settings_have_names():
    with pytest.raises(TypeError, match="OnlineDPOConfig takes settings by name, such as output"):
        online_dpo.OnlineDPOConfig("runs/x", batch_size=2)
