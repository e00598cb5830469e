"""RLOO and GRPO: the published formulas, groups that are groups, a loop that adds up."""

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import log_softmax

from marlhf.core import Constituents, NGram, Perplexity, RandomNGram, Segments, Surprise, Words
from marlhf.models.forward import Sequences
from marlhf.models.load import load_policy
from marlhf.models.tiny import tiny_tokenizer
from marlhf.rollout import Sampling
from marlhf.runs.write import RunFolder
from marlhf.runtime.distributed import World, start
from marlhf.runtime.stage import NO_OBJECTS, GivenObjects, Stopped
from marlhf.train import rloo
from marlhf.train.experience import Credit, Experience, MicroBatch, PolicyMetrics, RolloutScorer
from marlhf.train.rl_models import Models, load_models, load_prompts
from marlhf.train.rl_run import ScoreWatch
from small_runs import TOY, assert_close, read_lines

HERE = World(torch.device("cpu"))


@pytest.fixture
def rloo_config(parents, tmp_path):
    """An RLOO run of a few seconds; keywords change it."""

    def make(name: str = "rloo", **changes) -> rloo.RLOOConfig:
        settings = {
            "model": str(parents / "sft" / "model"),
            "reward_model": str(parents / "reward" / "model"),
            "output_dir": str(tmp_path / name),
            "data": TOY,
            "batch_size": 4,
            "num_samples": 3,
            "num_steps": 2,
            "learning_rate": 1e-3,
            "schedule": "constant",
            "warmup_steps": 0,
            "eval_every": 2,
            "eval_prompts": 4,
            "log_samples": 2,
            "save_every": 0,
            "sampling": Sampling(max_new_tokens=12),
        }
        return rloo.RLOOConfig(**{**settings, **changes})

    return make


def run(config: rloo.RLOOConfig) -> list[dict]:
    rloo.train(config)
    return read_lines(config.output_dir)


def experience(responses: list[list[int]], scores: list[float], seed: int = 0) -> Experience:
    """Responses to one prompt, with log-probs of a policy and a reference that disagree."""
    sequences = Sequences.from_lists([[5, 6]] * len(responses), responses, pad_id=0)
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref = -torch.rand(2, *sequences.mask.shape, generator=generator)
    logprobs, ref = (torch.where(sequences.mask, x, 0.0) for x in (logprobs, ref))
    scored = torch.tensor(scores)
    ended = torch.ones(len(responses), dtype=torch.bool)
    return Experience(sequences, scored, scored, ended, logprobs, ref, None)


def credit(found: Experience, config: rloo.RLOOConfig, kl_coef: float) -> Credit:
    models = SimpleNamespace(vocabulary=None)
    return rloo.assign_credit(found, models, config, kl_coef, torch.Generator().manual_seed(0))


def settings(**changes) -> rloo.RLOOConfig:
    return rloo.RLOOConfig(model="tiny", output_dir="x", **changes)


def test_leave_one_out_by_hand():
    found = experience([[7, 8], [9], [7, 7, 7]], [1.0, 2.0, 6.0])
    found = replace(
        found,
        logprobs=torch.tensor([[-1.0, -1.0, 0.0], [-2.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]),
        ref_logprobs=torch.tensor([[-2.0, -2.0, 0.0], [-1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]),
    )
    plan = credit(found, settings(num_samples=3), 0.5)
    # KL: 2, -1, 0; so rewards 1 - 1 = 0, 2 + 0.5 = 2.5, 6; others' means 4.25, 3, 1.25
    expected = torch.tensor([[-4.25, -4.25, 0.0], [-0.5, 0.0, 0.0], [4.75, 4.75, 4.75]])
    torch.testing.assert_close(plan.advantages, expected)
    torch.testing.assert_close(plan.returns[:, 0], torch.tensor([0.0, 2.5, 6.0]))


def test_group_baseline_by_hand():
    found = experience([[7, 8], [9, 9]], [1.0, 3.0])
    config = settings(num_samples=2, baseline="group", kl_in="loss")
    scaled = credit(found, config, 0.5).advantages
    # mean 2, deviation sqrt(2); the KL is not in the reward
    torch.testing.assert_close(
        scaled[:, 0], torch.tensor([-1.0, 1.0]) / (math.sqrt(2) + 1e-4), rtol=1e-6, atol=1e-6
    )
    plain = credit(found, replace(config, scale_group=False), 0.5).advantages
    torch.testing.assert_close(plain[:, 0], torch.tensor([-1.0, 1.0]))


def test_macro_actions_are_credited_with_what_is_still_to_come():
    found = experience([[7, 8, 9, 9], [7, 8, 9, 9]], [1.0, 0.0])
    kl = torch.tensor([[0.2, 0.2, 0.4, 0.4], [0.0, 0.0, 0.0, 0.0]])
    found = replace(found, logprobs=kl - 1, ref_logprobs=torch.full((2, 4), -1.0))
    plan = credit(found, settings(num_samples=2, segmenter=NGram(2)), 1.0)
    # first row: 1 - 1.2 = -0.2 from the start, 1 - 0.8 = 0.2 from the second on; second row: 0
    expected = torch.tensor([[-0.2, -0.2, 0.2, 0.2], [0.2, 0.2, 0.2, 0.2]])
    torch.testing.assert_close(plan.advantages, expected)


def equation(model, found: Experience, advantages, config, kl_coef: float) -> torch.Tensor:
    """The published losses, response by response, through the model's own logits."""
    losses = []
    for i, length in enumerate(found.sequences.lengths):
        ids = found.sequences.ids[i, : 2 + length]
        logits = model(input_ids=ids[None]).logits[0, 1 : 1 + length]
        logprobs = log_softmax(logits, dim=1).gather(1, ids[2:, None]).squeeze(1)
        if config.kl_in == "reward":  # RLOO: (R - b) grad log pi(y|x)
            losses.append(-advantages[i] * logprobs.sum())
            continue
        # GRPO: mean over the response of ratio * A - beta * (pi_ref / pi - log(pi_ref / pi) - 1)
        ratio = (logprobs - logprobs.detach()).exp()
        gap = found.ref_logprobs[i, :length] - logprobs
        losses.append(-(ratio * advantages[i] - kl_coef * (gap.exp() - gap - 1)).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("budget", [100000, 8])
@pytest.mark.parametrize("method", ["rloo", "grpo"])
def test_gradients_are_those_of_the_equations(method, budget):
    grpo = {"baseline": "group", "kl_in": "loss", "ratio": "macro_mean"}
    config = settings(num_samples=4, clip=0.2, **(grpo if method == "grpo" else {}))
    found = experience([[7, 8, 9], [9], [7, 7, 7, 1], [8, 8]], [1.0, 2.0, 6.0, -1.0])
    model = load_policy("tiny")
    plan = credit(found, config, 0.3)
    wanted = equation(model, found, plan.advantages[:, 0], config, 0.3)
    wanted.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    models = Models(model, *[None] * 6, HERE, Sampling(), pass_tokens=budget)
    losses = rloo.backward(found, plan, models, config, 0.3, [0, 1, 2, 3])
    if method == "grpo":
        torch.testing.assert_close(losses["rl/policy_loss"], wanted.detach())
    for p, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-5)


def test_metrics_are_ppos_without_the_critics(rloo_config):
    lines = run(rloo_config())
    train = next(x for x in lines if x["kind"] == "train")
    assert abs(train["rl/kl"]) < 1e-4
    assert train["rl/logprob_gap"] < 1e-5
    assert train["rl/approx_kl"] == train["rl/clip_fraction"] == 0
    assert train["rl/macro_length"] == train["rl/length"]  # one action per response
    assert train["rl/group_std"] > 0
    assert not any("value" in key or "critic" in key or "variance" in key for key in train)
    docs = Path(__file__).parents[2] / "docs"
    pages = "".join((docs / name).read_text() for name in ("baselines.md", "report.md"))
    assert [k for k in train if k.startswith("rl/") and f"`{k}`" not in pages] == []


def test_each_prompt_has_different_responses(rloo_config, monkeypatch):
    seen = []
    real = RolloutScorer.__call__

    def score(self, examples, *rest):
        found = real(self, examples, *rest)
        seen.append(([tuple(e.prompt) for e in examples], found.sequences.responses))
        return found

    monkeypatch.setattr(RolloutScorer, "__call__", score)
    run(rloo_config(num_steps=1, eval_prompts=0))
    [(prompts, responses)] = seen
    assert all(len(set(prompts[i : i + 3])) == 1 for i in range(0, 12, 3))
    assert len(set(prompts)) == 4
    for group in responses.view(4, 3, -1):
        assert len({tuple(row.tolist()) for row in group}) == 3


def test_micro_batches_change_nothing(rloo_config):
    options = {"segmenter": NGram(5), "num_mini_batches": 2}
    whole = run(rloo_config("whole", token_budget=100000, **options))
    split = run(rloo_config("parts", token_budget=60, **options))
    assert_close(whole, split, 2e-4)


def test_several_mini_batches_are_clipped(rloo_config):
    lines = run(rloo_config(num_mini_batches=4, learning_rate=3e-3))
    train = [x for x in lines if x["kind"] == "train"]
    assert all(x["rl/approx_kl"] > 0 for x in train)
    assert any(x["rl/clip_fraction"] > 0 for x in train)


def test_bounds_of_the_ratio_may_differ():
    found, new, old = off_policy()
    new = new.detach()
    segments = Segments(torch.zeros_like(found.mask).long(), found.mask)
    micro = MicroBatch(found.sequences, torch.arange(len(found.mask)), 1.0)
    change = (new - old).exp()[found.mask]
    for bounds in ((1e-6, 9.0), (0.9, 1e-6), (0.1, 0.3)):
        config = settings(clip=bounds, ratio="token")
        sums = PolicyMetrics(found, found.mask.sum(), config)
        sums.add(micro, segments, new, old, {})
        wanted = ((change < 1 - bounds[0]) | (change > 1 + bounds[1])).float().mean()
        torch.testing.assert_close(sums.sums["rl/clip_fraction"], wanted.to(new.dtype))
    assert settings(clip=0.3).clip_range == (0.3, 0.3)
    for wrong in (0, (0.2, -1), (0.1, 0.2, 0.3), "0.2"):
        with pytest.raises(ValueError, match="clip must be"):
            settings(clip=wrong)


@pytest.mark.parametrize(
    ("steps", "warned"),
    [
        ([{"rl/score_std": 0.0}] * 4, 1),  # PPO: one response per prompt
        ([{"rl/score_std": 0.0}, {"rl/score_std": 0.5}] * 2, 0),
        ([{"rl/score_std": 0.5, "rl/zero_std_groups": 1.0}] * 2, 1),
        ([{"rl/score_std": 0.5, "rl/zero_std_groups": 0.9}] * 4, 0),
    ],
)
def test_two_steps_without_variance_give_one_warning(steps, warned, capsys):
    watch = ScoreWatch()
    for step, numbers in enumerate(steps, start=1):
        watch(step, 8, numbers)
    assert capsys.readouterr().err.count("nothing to learn from") == warned


def test_groups_whose_scores_are_alike_are_counted_and_warned_about(rloo_config, capsys):
    scores = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert rloo.all_equal(scores).tolist() == [True, False]
    objects = GivenObjects(reward_funcs=[lambda completions, **_: [1.0] * len(completions)])
    config = rloo_config(reward_model="", reward_funcs=("flat",), num_steps=3)
    rloo.train(config, objects)
    train = [x for x in read_lines(config.output_dir) if x["kind"] == "train"]
    assert [x["rl/zero_std_groups"] for x in train] == [1, 1, 1]
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("steps 1 and 2: all responses to each prompt have the same score") == 1


def test_it_resumes_identically(rloo_config, monkeypatch):
    options = {
        "num_steps": 4,
        "segmenter": RandomNGram(lengths=(1, 2, 3)),
        "num_mini_batches": 2,
        "kl_target": 0.5,
        "normalize_scores": True,
    }
    whole, interrupted = rloo_config("whole", **options), rloo_config("parts", **options)
    rloo.train(whole)
    real = RunFolder.log

    def log(self, kind, at, metrics):
        real(self, kind, at, metrics)
        if kind == "train" and at == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "log", log)
        with pytest.raises(Stopped):
            rloo.train(interrupted)
    rloo.train(interrupted)
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        assert read_lines(whole.output_dir, name) == read_lines(interrupted.output_dir, name)
    files = [Path(c.output_dir) / "model" / "model.safetensors" for c in (whole, interrupted)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_python_objects_and_scores_that_are_all_alike(tmp_path):
    """Where no response is better than another nothing is learnt: the gradient is exactly zero."""
    from marlhf.data import Row

    def same(prompts, completions, **_):
        return [1.0] * len(completions)

    model = load_policy("tiny")
    before = [p.detach().clone() for p in model.parameters()]
    objects = GivenObjects(
        model=model,
        tokenizer=tiny_tokenizer(),
        reward_funcs=[same],
        train_rows=[Row(f"Tell me of fox {i}.") for i in range(4)],
    )
    for baseline in ("leave_one_out", "group"):
        config = rloo.RLOOConfig(
            output_dir=str(tmp_path / baseline),
            batch_size=2,
            num_steps=1,
            kl_coef=0.0,
            baseline=baseline,
            sampling=Sampling(max_new_tokens=6),
        )
        rloo.train(config, objects)
        assert read_lines(config.output_dir)[0]["rl/policy_grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_one_held_out_prompt_has_samples_too(rloo_config):
    config = rloo_config(eval_prompts=1, num_steps=1, segmenter=NGram(5))
    run(config)
    sample = read_lines(config.output_dir, "samples.jsonl")[-1]
    assert sample["starts"] == [i % 5 == 0 for i in range(sample["length"])]
    assert sample["advantages"][0] == 0  # itself is all there is to compare with


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 1}, "num_samples must be at least 2, for a response is compared"),
        ({"num_samples": 0}, "num_samples must be at least 2"),
        ({"num_mini_batches": 3}, "must divide"),
        ({"tree": (4, 1)}, r"at least 2 branches, .* got tree: \[4, 1\]. Leave out levels of 1"),
        ({"tree": ()}, "at least 2 branches"),
        ({"tree": (4, 4)}, "gives 16 responses to a prompt, but num_samples is 3. Leave"),
        ({"tree": (2,) * 13, "num_samples": 4}, "at most 12 tokens has no room for the 13 levels"),
        ({"tree": (2, 2), "num_samples": 4}, "one action per response has none. Set segmenter"),
    ],
)
def test_settings_that_make_no_sense(rloo_config, change, message):
    with pytest.raises(ValueError, match=message):
        rloo_config(**change)


def test_a_tree_of_one_level_is_rloo_bit_for_bit(rloo_config):
    for name, changes in {
        "rloo": {"segmenter": NGram(5)},
        "grpo": {"baseline": "group", "kl_in": "loss", "ratio": "macro_mean"},
        "random": {"segmenter": RandomNGram(lengths=(1, 2, 3)), "num_mini_batches": 2},
    }.items():
        changes |= {"num_samples": 4, "num_steps": 1, "eval_prompts": 0}
        plain = run(rloo_config(f"{name}-plain", **changes))
        tree = run(rloo_config(f"{name}-tree", tree=(4,), **changes))
        assert_close(plain, tree, 0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rule", [Surprise(0.004), Perplexity("token"), Words()], ids=str)
def test_the_original_continuation_is_a_fair_sample_beside_the_others(rloo_config, rule, seed):
    """Its first own token is drawn as theirs are, and not selected by the rule."""
    config = rloo_config(
        tree=(2, 2), num_samples=4, segmenter=rule, sampling=Sampling(max_new_tokens=12)
    )
    world = start(config.device)
    models = load_models(config, NO_OBJECTS, world, critic=False)
    examples, _ = load_prompts(config, models, NO_OBJECTS)
    sampler, shuffler = (torch.Generator().manual_seed(seed + i) for i in (0, 9))
    rl = SimpleNamespace(
        models=models,
        shuffler=shuffler,
        response_seeds=lambda n: torch.randint(2**62, (n,), generator=sampler).tolist(),
    )
    old, new = [], []
    for _ in range(6):
        rollout, tree = rloo.grow_tree(examples[:40], config, rl)
        for pair in range(0, len(rollout.responses), 2):  # the original is the first of two
            cut = int(tree.cuts[pair])
            if cut < len(rollout.responses[pair]):
                for leaf, seen in ((pair, old), (pair + 1, new)):
                    token = rollout.responses[leaf][cut]
                    begins_word = models.vocabulary.begins_word[token]
                    seen.append(begins_word if rule == Words() else rollout.logprobs[leaf, cut])
    old, new = torch.stack(old).float(), torch.stack(new).float()
    gaps = old - new
    assert len(gaps) > 100
    assert abs(float(gaps.mean())) < 4 * float(gaps.std()) / len(gaps) ** 0.5


def test_a_tree_needs_boundaries_that_are_known_when_it_branches(rloo_config):
    with pytest.raises(ValueError, match="looks at the whole response"):
        rloo_config(tree=(2, 2), num_samples=4, segmenter=Constituents())


TREES = {
    "ngram": {"segmenter": NGram(2), "tree": (2, 2, 2)},
    "lengths": {"segmenter": RandomNGram(lengths=(1, 2, 3)), "num_mini_batches": 2},
    "perplexity": {"segmenter": Perplexity(), "baseline": "group", "kl_in": "loss"},
    "words": {"segmenter": Words(), "ratio": "token"},
}


def tree_config(make, name: str, **changes) -> rloo.RLOOConfig:
    settings = {"num_samples": 4, "tree": (2, 3), "batch_size": 2, **TREES[name]}
    return make(changes.pop("folder", name), **{**settings, **changes})


@pytest.mark.parametrize("name", TREES)
def test_every_sampled_token_of_a_tree_is_trained_once(rloo_config, monkeypatch, name):
    config, seen = tree_config(rloo_config, name, num_steps=1), []
    real = rloo.update

    def update(found, credit, *rest):
        seen.append((found, credit))
        return real(found, credit, *rest)

    grown = []
    grow = rloo.grow_tree
    monkeypatch.setattr(rloo, "update", update)
    monkeypatch.setattr(rloo, "grow_tree", lambda *args: grown.append(grow(*args)) or grown[-1])
    [train] = [x for x in run(config) if x["kind"] == "train"]
    [(rollout, tree)], [(own, credit)] = grown, seen
    assert len(rollout.responses) == 2 * math.prod(config.tree)
    levels = tree.levels(max(map(len, rollout.responses)))
    num_tokens = 0  # of each node, at the first of its leaves
    for level in range(len(config.tree)):
        size = math.prod(config.tree[level + 1 :])
        for leaf in range(0, len(rollout.responses), size):
            num_tokens += int((levels[leaf, : len(rollout.responses[leaf])] == level).sum())
    assert sum(own.sequences.lengths) == num_tokens
    assert max(tree.begins) > 0  # something branched
    segments = credit.segments.validate()
    assert (segments.mask == own.sequences.mask).all()
    # Log-probs of sampling, which belong to the parent up to the branch, are those of training.
    if own.old_logprobs is None:
        assert train["rl/logprob_gap"] < 1e-5
    else:  # several updates, so the metric has the policy's movement in it
        torch.testing.assert_close(own.logprobs, own.old_logprobs, atol=1e-5, rtol=0)
    whole = {tuple(response) for response in rollout.responses}
    ids = own.sequences.ids.tolist()
    totals = own.sequences.total_lengths
    assert all(any(tuple(ids[i][t - len(w) : t]) == w for w in whole) for i, t in enumerate(totals))


def test_siblings_continue_the_same_beginning(rloo_config, monkeypatch):
    grown = []
    grow = rloo.grow_tree
    monkeypatch.setattr(rloo, "grow_tree", lambda *args: grown.append(grow(*args)) or grown[-1])
    run(tree_config(rloo_config, "ngram", num_steps=1))
    [(rollout, tree)] = grown
    for level in range(2):
        size = 2 ** (2 - level)  # leaves below a node
        for first in range(0, len(rollout.responses), size):
            group = rollout.responses[first : first + size]
            cut = int(tree.cuts[first, level])
            assert len({tuple(response[:cut]) for response in group}) == 1
            if cut < 12:
                assert cut % 2 == 0  # a macro boundary
                assert len({tuple(response) for response in group}) > 1
    assert len(tree.leaves) == len(set(tree.leaves)) == len(tree.begins)


def trl_trainer(logprobs: torch.Tensor, **attributes):
    """TRL's trainer reduced to what its loss reads, with log-probs given."""
    from unittest.mock import MagicMock

    trainer = MagicMock(
        epsilon_low=0.2,
        epsilon_high=0.2,
        aux_loss_enabled=False,
        accelerator=SimpleNamespace(
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, **_: x,
            num_processes=1,
        ),
        **attributes,
    )
    found = (logprobs, torch.zeros_like(logprobs), None)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: found
    return trainer


def off_policy() -> tuple[Experience, torch.Tensor, torch.Tensor]:
    """Responses, new log-probs with a gradient, and old ones that differ a little."""
    found = experience([[7, 8, 9], [9], [7, 7, 7, 1], [8, 8]], [1.0, 2.0, 6.0, -1.0])
    noise = 0.2 * torch.randn(found.logprobs.shape, generator=torch.Generator().manual_seed(1))
    new = torch.where(found.sequences.mask, found.logprobs + noise, 0.0).requires_grad_()
    return found, new, found.logprobs


def test_the_rloo_loss_is_trls():
    pytest.importorskip("trl")
    from trl import RLOOTrainer

    from marlhf.core import ppo_policy_loss

    found, new, old = off_policy()
    mask, ids = found.sequences.mask, found.sequences.responses
    plan = credit(found, settings(num_samples=4), 0.1)
    inputs = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": mask.int(),
        "old_logps": old.sum(dim=1),
        "advantages": plan.advantages[:, 0],
    }
    theirs = RLOOTrainer._compute_loss(trl_trainer(new), None, inputs)
    segments = Segments(plan.segments.ids, mask)
    mine = ppo_policy_loss(new, old, plan.advantages, mask, ratio="macro", segments=segments)
    torch.testing.assert_close(mine, theirs)
    grads = [torch.autograd.grad(x, new, retain_graph=True)[0] for x in (mine, theirs)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("ratio", "loss_type", "level", "updates"),
    [
        ("macro_mean", "grpo", "token", 1),  # GRPO, in a step with one update
        ("macro_mean", "grpo", "sequence", 2),  # GSPO
        ("token", "bnpo", "token", 2),  # GRPO with a mean over all tokens, as in DAPO
    ],
)
def test_the_grpo_losses_are_trls(ratio, loss_type, level, updates):
    pytest.importorskip("trl")
    from trl import GRPOTrainer

    from marlhf.core import kl_estimate, ppo_policy_loss

    found, new, old = off_policy()
    mask, ids = found.sequences.mask, found.sequences.responses
    old = new.detach() if updates == 1 else old
    config = settings(num_samples=4, baseline="group", kl_in="loss", ratio=ratio)
    plan = credit(found, config, 0.1)
    trainer = trl_trainer(
        new,
        beta=0.1,
        loss_type=loss_type,
        importance_sampling_level=level,
        _entropy_bonus_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        delta=None,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        current_gradient_accumulation_steps=1,
        tools=None,
    )
    inputs = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": mask.int(),
        "old_per_token_logps": old,
        "ref_per_token_logps": found.ref_logprobs,
        "advantages": plan.advantages[:, 0],
    }
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    segments = Segments(plan.segments.ids, mask)
    kl = rloo.sum_as_ratio(kl_estimate(new, found.ref_logprobs, "k3"), segments, config)
    count = mask.sum() if ratio == "token" else len(mask)
    mine = 0.1 * kl / count + ppo_policy_loss(
        new, old, plan.advantages, mask, ratio=ratio, segments=segments
    )
    torch.testing.assert_close(mine, theirs)
    grads = [torch.autograd.grad(x, new, retain_graph=True)[0] for x in (mine, theirs)]
    torch.testing.assert_close(*grads)
