"""Presets: each is its paper's equation, loads, trains, and says what it contradicts."""

import math
import re
from dataclasses import replace

import pytest
import reference
import torch
import yaml

from marlhf.cli import main
from marlhf.config.candidates import presets
from marlhf.core import (
    Responses,
    Segments,
    at_last_token,
    group_advantages,
    segment,
    sft_loss,
    state_advantages,
)
from marlhf.models.forward import Sequences
from marlhf.runtime.stage import GivenObjects
from marlhf.train import ppo, rloo
from marlhf.train.experience import Credit, Experience, MicroBatch, count_terms
from marlhf.train.recipe import ConfigError, load_stage
from marlhf.train.stages import METHODS
from marlhf.train.tree_rollout import Tree
from small_runs import TOY, read_lines

SCORED = {"model": "tiny", "reward_model": "tiny", "output_dir": "runs/x"}


@pytest.fixture
def preset(tmp_path):
    """`preset(name)`: its config; keywords change settings."""

    def load(name: str, kind: str = "", **changes):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**SCORED, "preset": name, **changes}))
        return load_stage(path, kind or presets()[name].kind).config

    return load


@pytest.fixture
def batch():
    """Responses of 8 and 23 tokens in float64, with policy, critic and one reward at the end."""
    torch.manual_seed(5)
    mask = torch.arange(23) < torch.tensor([[8], [23]])
    numbers = torch.rand(4, 2, 23, dtype=torch.float64)
    rewards = at_last_token(torch.tensor([1.0, -0.5], dtype=torch.float64), mask)
    return mask, rewards, numbers[0], numbers[1].log(), numbers[2]


def rows(*tensors):
    return [[x[i].tolist() for x in tensors] for i in range(len(tensors[0]))]


def assert_rows(got, wanted):
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64))


def change_of_values(rewards, values, ids, mask):
    """VinePPO and SPO: A_k = V(s_{k+1}) - V(s_k), and the reward minus V for the last."""
    actions, result = reference.groups(ids, mask), [0.0] * len(mask)
    for k, action in enumerate(actions):
        after = values[actions[k + 1][0]] if k + 1 < len(actions) else sum(rewards)
        for t in action:
            result[t] = after - values[action[0]]
    return result


def test_vineppo_is_the_change_of_values_from_step_to_step(preset, batch):
    config, (mask, rewards, values, _, draw) = preset("vineppo"), batch
    segments = Segments.from_starts(draw < 0.3, mask)
    got = ppo.assign_credit(rewards, values, segments, config).advantages
    assert_rows(got, [change_of_values(*r) for r in rows(rewards, values, segments.ids, mask)])
    assert (config.continuations, config.values) == (9, "monte_carlo")
    assert type(config.segmenter).__name__ == "Lines"


def test_spo_chain_cuts_at_every_fifth_cutpoint(preset, batch):
    config, (mask, rewards, values, logprobs, _) = preset("spo-chain"), batch
    segments = segment(config.segmenter, Responses(mask.long(), mask, logprobs=logprobs))
    for starts, logs, real in rows(segments.starts, logprobs, mask):
        cutpoints = [t for t, lp in enumerate(logs) if real[t] and math.exp(lp) <= 0.9]
        assert [t for t, s in enumerate(starts) if s] == sorted({0, *cutpoints[4::5]})
    assert int(segments.macro_mask.sum()) > 4
    got = ppo.assign_credit(rewards, values, segments, config).advantages
    assert_rows(got, [change_of_values(*r) for r in rows(rewards, values, segments.ids, mask)])


def test_sae_bootstraps_at_tokens_of_low_probability(preset, batch):
    """Every TD error of the same segment counts whole, each later boundary by another lambda."""
    config, (mask, rewards, values, logprobs, _) = preset("sae"), batch
    segments = segment(config.segmenter, Responses(mask.long(), mask, logprobs=logprobs))
    got = ppo.assign_credit(rewards, values, segments, config).advantages
    wanted = []
    for r, v, lp, real in rows(rewards, values, logprobs, mask):
        length = sum(real)
        deltas = [r[t] + (v[t + 1] if t + 1 < length else 0.0) - v[t] for t in range(length)]
        row = [0.0] * len(real)
        for t in range(length):
            weight = 1.0
            for later in range(t, length):
                if later > t and math.exp(lp[later]) <= 0.2:
                    weight *= 0.95
                row[t] += weight * deltas[later]
        wanted.append(row)
    assert_rows(got, wanted)


def test_turn_ppo_is_gae_over_turns(preset, batch):
    config, (mask, rewards, values, _, draw) = preset("turn-ppo"), batch
    turns = mask & (draw > 0.2)  # tools speak in between
    segments = segment(config.segmenter, Responses(turns.long(), turns))
    rewards = torch.where(turns, rewards, 0.0)
    credit = ppo.assign_credit(rewards, values, segments, config)
    options = {"gamma": 0.99, "lam": 0.9, "rho": 1.0, "sigma": "start", "pooling": "sum"}
    inputs = rows(rewards, values, segments.ids, turns)
    assert int(segments.macro_mask.sum()) > 4
    assert_rows(credit.advantages, [reference.macro_gae(*r, **options)[0] for r in inputs])
    assert_rows(credit.returns, [reference.macro_gae(*r, **options)[1] for r in inputs])


@pytest.mark.parametrize("name", ["vc-ppo", "vapo", "sao"])
def test_decoupled_gae(preset, batch, name):
    """The policy's lambda is fixed or 1 - 1 / (0.05 L); the critic's target is the return."""
    config, (mask, rewards, values, _, draw) = preset(name), batch
    if name == "sao":  # which skips what tools said
        mask = mask & (draw > 0.2)
        rewards = torch.where(mask, rewards, 0.0)
    segments = segment(config.segmenter, Responses(mask.long(), mask))
    credit = ppo.assign_credit(rewards, values, segments, config)
    for i, real in enumerate(mask):
        length = int(real.sum())
        lam = 0.95 if name == "vc-ppo" else max(0.0, 1 - 1 / (0.05 * length))
        wanted, _ = reference.gae(rewards[i][real].tolist(), values[i][real].tolist(), 1.0, lam)
        # float32 holds a lambda of its own for each row
        torch.testing.assert_close(
            credit.advantages[i][real], torch.tensor(wanted).double(), rtol=1e-6, atol=1e-6
        )
        torch.testing.assert_close(credit.returns[i][real], rewards[i].sum().expand(length))


def test_vapo_adds_the_likelihood_of_correct_responses(preset, batch):
    config, (mask, _, values, logprobs, draw) = preset("vapo"), batch
    sequences = Sequences.from_lists([[1], [1]], [[2] * 8, [2] * 23], 0)
    scores = torch.tensor([1.0, 0.0])
    ended = torch.ones(2).bool()
    experience = Experience(sequences, scores, scores, ended, logprobs, logprobs, None)
    micro = MicroBatch(sequences, torch.tensor([0, 1]), 1.0)
    segments = segment(config.segmenter, Responses(mask.long(), mask))

    def imitation(batch: Experience, numbers: list[int]) -> torch.Tensor:
        good, count = ppo.positive_examples(batch, segments, numbers, config)
        return config.positive_lm_coef * sft_loss(new, micro.take(good), num_tokens=count)

    new, old = (values.log(), logprobs)
    loss = ppo.policy_loss(new, old, draw, segments, count_terms(segments), config)
    got = loss + imitation(experience, [0, 1])
    terms, correct = [], []
    for i, (n, o, a, real) in enumerate(rows(new, old, draw, mask)):
        for t in range(sum(real)):
            terms.append(reference.clipped(math.exp(n[t] - o[t]), a[t], (0.2, 0.28), None))
            if float(scores[i]) > 0:
                correct.append(-n[t])
    wanted = sum(terms) / len(terms) + 0.1 * sum(correct) / len(correct)
    assert float(got) == pytest.approx(wanted, rel=1e-9)
    # Of rows without a correct response, nothing.
    assert float(imitation(experience, [1])) != 0.0
    wrong = replace(experience, raw_scores=torch.tensor([-1.0, 0.0]))
    assert float(imitation(wrong, [0, 1])) == 0.0


@pytest.mark.parametrize("name", ["gspo", "dapo", "dr-grpo"])
def test_objectives_of_groups(preset, name):
    """The published objectives, with a policy that has moved away from the one that sampled."""
    config = preset(name, num_samples=3, sampling={"max_new_tokens": 9})
    torch.manual_seed(0)
    lengths, scores = [4, 9, 2], [1.0, 0.0, 0.5]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    old = torch.rand(3, 9, dtype=torch.float64).log()
    new = old + 0.6 * torch.rand_like(old) - 0.3
    segments = segment(config.segmenter, Responses(mask.long(), mask))
    rewards = at_last_token(torch.tensor(scores).double(), mask)
    advantages = group_advantages(rewards, 3, segments, scale=config.scale_group)
    counts = rloo.divisors(count_terms(segments), 3, config)
    got = float(ppo.policy_loss(new, old, advantages, segments, counts, config))

    mean = sum(scores) / 3
    deviation = math.sqrt(sum((s - mean) ** 2 for s in scores) / 2)
    total = 0.0
    for length, score, n, o in zip(lengths, scores, new.tolist(), old.tolist()):
        logs = [n[t] - o[t] for t in range(length)]
        if name == "gspo":
            a = (score - mean) / (deviation + 1e-4)
            clip = (3e-4, 4e-4)
            total += reference.clipped(math.exp(sum(logs) / length), a, clip, None) / 3
        elif name == "dapo":
            a = (score - mean) / (deviation + 1e-4)
            terms = [reference.clipped(math.exp(x), a, (0.2, 0.28), None) for x in logs]
            total += sum(terms) / sum(lengths)
        else:
            a = score - mean
            total += sum(reference.clipped(math.exp(x), a, 0.2, None) for x in logs) / (3 * 9)
    assert got == pytest.approx(total, rel=1e-9)
    assert config.baseline == "group"


@pytest.mark.parametrize("name", ["spo-tree", "treerl"])
def test_advantages_of_trees(preset, name):
    """Two levels of three and two branches; a reward at the end of each leaf."""
    config = preset(name, tree=[3, 2], num_samples=6)
    torch.manual_seed(1)
    scores = torch.rand(6, dtype=torch.float64)
    mask = torch.ones(6, 4).bool()
    tree = Tree((3, 2), torch.full((6, 1), 2), [], [])
    segments = Segments(tree.levels(4), mask)
    rewards = at_last_token(scores, mask)
    got = tree.advantages(Credit(rewards, segments, rewards, rewards, rewards), config)

    leaves = scores.tolist()
    middle = [sum(leaves[2 * i : 2 * i + 2]) / 2 for i in range(3)]
    root = sum(leaves) / 6
    for leaf in range(6):
        first, second = middle[leaf // 2], leaves[leaf]
        siblings = leaves[leaf // 2 * 2 : leaf // 2 * 2 + 2]
        if name == "spo-tree":
            wanted = [first - root, second - sum(siblings) / 2]
        else:  # |L|^(-1/2) (V - V(root) + V - V(parent)), summed over the leaves below
            wanted = [
                2 * ((first - root) + (first - root)) / math.sqrt(2),
                (second - root) + (second - first),
            ]
        assert got[leaf, 0].item() == pytest.approx(wanted[0], rel=1e-9)
        assert got[leaf, 3].item() == pytest.approx(wanted[1], rel=1e-9)


def test_gigpo_is_the_episode_and_the_state(preset, batch):
    """A^E + A^S, both in units of their group's deviation."""
    config, (mask, _, _, _, draw) = preset("gigpo", num_samples=2), batch
    turns = mask & (draw > 0.2)
    segments = segment(config.segmenter, Responses(turns.long(), turns))
    rewards = at_last_token(torch.tensor([1.0, 0.25], dtype=torch.float64), turns)
    states = segments.ids % 3  # each row comes back to three states
    same = {"baseline": config.baseline, "scale": config.scale_group, "gamma": config.gamma}
    got = group_advantages(rewards, 2, segments, scale=config.scale_group)
    got = got + state_advantages(rewards, states, segments, **same)
    returns, deviation = [1.0, 0.25], math.sqrt(2 * 0.375**2)
    ids = [[i for i in row[:n] if i >= 0] for row, n in zip(segments.ids.tolist(), (8, 23))]
    num_turns = [max(row) + 1 for row in ids]
    visits = {
        s: [r for r, n in zip(returns, num_turns) for t in range(n) if t % 3 == s] for s in range(3)
    }
    for i, row in enumerate(turns.tolist()):
        for t, real in enumerate(row):
            if not real:
                assert got[i, t] == 0
                continue
            there = visits[int(states[i, t])]
            mean = sum(there) / len(there)
            spread = math.sqrt(sum((x - mean) ** 2 for x in there) / max(len(there) - 1, 1))
            wanted = (returns[i] - 0.625) / (deviation + 1e-4)
            wanted += (returns[i] - mean) / (spread + 1e-4) if len(there) > 1 else 0.0
            assert got[i, t].item() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


SMALLER = {
    "spo-tree": {"tree": [2, 2, 2]},
    "treerl": {"tree": [2, 2]},
    "dapo": {"num_samples": 3},
    "dr-grpo": {"num_samples": 3},
    "vineppo": {"continuations": 2},
    "spo-chain": {"continuations": 2},
    "vapo": {"critic_pretraining": {"responses": 20, "epochs": 1}},
    "vc-ppo": {"critic_pretraining": {"responses": 20, "epochs": 1}},
    "gigpo": {
        "num_samples": 2,
        "reward_model": "",
        "environment": "guess",
        "max_turns": 3,
        "episode_tokens": 96,
        "data": {"source": "guess", "limit": 100, "eval_size": 4, "parts": {"ppo": 1.0}},
        "guards": {"warn_kl": 1e9},
    },
}


def brevity(completions, **_):
    return [-len(str(completion)) / 10 for completion in completions]


@pytest.mark.slow
@pytest.mark.xdist_group("forked")  # one process, so that one sampler starts
@pytest.mark.usefixtures("forked_samplers")
@pytest.mark.parametrize("name", presets())
def test_every_preset_trains(preset, name, parents, tmp_path):
    options = {
        "model": str(parents / "sft/model"),
        "reward_model": str(parents / "reward/model"),
        "output_dir": str(tmp_path / "run"),
        "data": {"source": "toy", "limit": TOY.limit, "eval_size": 4},
        "batch_size": 4,
        "num_steps": 2,
        "learning_rate": 1e-3,
        "schedule": "constant",
        "warmup_steps": 0,
        "eval_every": 0,
        "eval_prompts": 2,
        "save_every": 0,
        "sampling": {"max_new_tokens": 12},
    }
    config = preset(name, **(options | SMALLER.get(name, {})))
    objects = [GivenObjects(reward_funcs=[brevity])] if name == "gigpo" else []
    METHODS[presets()[name].kind].train(config, *objects)
    steps = [line for line in read_lines(config.output_dir) if line["kind"] == "train"]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(math.isfinite(line["rl/policy_loss"]) for line in steps)
    assert steps[-1]["rl/policy_grad_norm"] > 0


def test_the_users_settings_win(preset):
    config = preset("vapo", lam=0.9, segmenter="words")
    assert (config.lam, config.lam_value, config.positive_lm_coef) == (0.9, 1.0, 0.1)
    assert type(config.segmenter).__name__ == "Words"


def test_a_setting_that_a_preset_makes_nonsense_of_names_both(preset):
    with pytest.raises(ConfigError) as caught:
        preset("vineppo", critic_model="tiny")
    assert "critic_model: tiny does not fit" in str(caught.value)
    assert "preset: vineppo sets values: monte_carlo" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        preset("dapo", async_steps=1)
    assert "does not go with async_steps: 1" in str(caught.value)
    assert "preset: dapo sets dynamic_sampling: 2" in str(caught.value)
    with pytest.raises(ConfigError) as caught:  # a mistake of one's own is one mistake
        preset("vineppo", lam=3)
    assert "1 mistake" in str(caught.value)


def test_a_preset_of_another_stage_is_named(preset):
    with pytest.raises(ConfigError, match="dapo is a preset of rloo and grpo stages"):
        preset("dapo", kind="ppo")


def test_presets_of_rloo_are_those_of_grpo(preset):
    alike = [preset("dr-grpo", kind=kind) for kind in ("rloo", "grpo")]
    for name in presets()["dr-grpo"].settings:
        assert getattr(alike[0], name) == getattr(alike[1], name)


def test_methods_are_listed_and_shown(capsys, monkeypatch):
    def say(*words):
        monkeypatch.setattr("sys.argv", ["marlhf", "methods", *words])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        return end.value.code, shown.out + shown.err

    status, table = say()
    assert not status
    table, _, note = table.partition("\n\n")
    assert [line.split()[0] for line in table.splitlines()[1:]] == list(presets())
    assert "may differ from a paper's tables" in note
    assert re.search(r"^vapo +ppo +2504.05118 +yes ", table, re.M)
    status, entry = say("vineppo")
    assert not status
    assert "https://arxiv.org/abs/2410.01679" in entry
    assert "needs no critic" in entry
    assert "#   type: lines" in entry
    status, mistake = say("vinepo")
    assert status == 1
    assert "Did you mean vineppo" in mistake
