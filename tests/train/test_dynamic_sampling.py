"""Which responses an update learns from, and what it divides by and punishes."""

from dataclasses import replace

import pytest
import torch

from marlhf.data import DataConfig
from marlhf.errors import SettingError
from marlhf.models.forward import Sequences
from marlhf.rollout import Sampling
from marlhf.rollout.engine import Rollout
from marlhf.runtime.distributed import start
from marlhf.runtime.stage import GivenObjects, Stopped
from marlhf.train import rloo
from marlhf.train.experience import Credit, Experience, RolloutScorer
from marlhf.train.rl_models import load_models, load_prompts
from marlhf.train.rloo import equal_groups, replace_rows, rows_to_train
from small_runs import TOY, everything, read_lines, stop_after, weights

MANY = {"batch_size": 6, "num_samples": 2, "num_steps": 4, "dynamic_sampling": 2}


def ends_in_a(completions, **_):
    """Right about half of the time, so that about half of the pairs are equal."""
    return [float(len(text) % 2) for text in completions]


def never(completions, **_):
    return [0.0] * len(completions)


@pytest.fixture
def rloo_config(parents, tmp_path):
    def make(name: str = "rloo", **changes) -> rloo.RLOOConfig:
        settings = {
            "model": str(parents / "sft" / "model"),
            "output_dir": str(tmp_path / name),
            "data": TOY,
            "learning_rate": 1e-3,
            "schedule": "constant",
            "warmup_steps": 0,
            "eval_every": 0,
            "eval_prompts": 2,
            "log_samples": 2,
            "save_every": 0,
            "sampling": Sampling(max_new_tokens=8),
        }
        return rloo.RLOOConfig(**{**settings, **MANY, **changes})

    return make


def run(config, function=ends_in_a) -> list[dict]:
    rloo.train(config, GivenObjects(reward_funcs=[function]))
    return [line for line in read_lines(config.output_dir) if line["kind"] == "train"]


def experience(lengths: list[int], scores: list[float], fill: int = 0) -> Experience:
    responses = [[fill + i] * length for i, length in enumerate(lengths)]
    sequences = Sequences.from_lists([[5] * (fill + 1)] * len(lengths), responses, pad_id=0)
    logprobs = torch.where(sequences.mask, sequences.responses.float(), 0.0)
    scored = torch.tensor(scores)
    return Experience(
        sequences,
        scored,
        scored,
        torch.ones(len(lengths)).bool(),
        logprobs,
        -logprobs,
        None,
        spans=sequences.responses[:, :, None].expand(-1, -1, 2),
        eos_penalty=scored / 2,
    )


def test_rows_are_replaced_with_their_prompts_and_widths():
    old, new = experience([2, 1, 3], [1.0, 2.0, 3.0]), experience([5, 4], [8.0, 9.0], fill=7)
    both = replace_rows(old, new, [2, 0])
    assert both.scores.tolist() == [4.5, 1.0, 4.0]
    assert both.response_tokens() == [[8] * 4, [1], [7] * 5]
    assert both.sequences.prompt_lengths == (8, 1, 8)
    assert both.mask.sum(dim=1).tolist() == [4, 1, 5]
    prompts = [[5] * 8, [5], [5] * 8]
    wanted = Sequences.from_lists(prompts, both.response_tokens(), pad_id=0)
    for name in ("ids", "responses", "mask", "present", "before"):
        assert torch.equal(getattr(both.sequences, name), getattr(wanted, name)), name
    assert torch.equal(both.logprobs, torch.where(wanted.mask, wanted.responses.float(), 0.0))
    assert both.spans.shape == (3, 5, 2)
    assert both.old_logprobs is None
    narrow = replace_rows(new, experience([1, 2], [0.0, 0.0]), [1, 0])
    assert narrow.response_tokens() == [[1, 1], [0]]
    assert narrow.sequences.total_lengths == [3, 2]


def test_groups_of_equal_scores_are_replaced(rloo_config, monkeypatch):
    seen = []
    real = rloo.replace_rows

    def watched(old, new, rows):
        if isinstance(old, Experience):
            seen.append((equal_groups(old, rloo_config()), rows))
        return real(old, new, rows)

    monkeypatch.setattr(rloo, "replace_rows", watched)
    lines = run(rloo_config())
    assert seen
    assert all(rows == [2 * g + i for g in groups for i in range(2)] for groups, rows in seen)
    without = run(rloo_config("without", dynamic_sampling=0))
    assert "rl/replaced_prompts" not in without[0]
    assert sum(line["rl/replaced_prompts"] for line in lines) > 0
    equal = [sum(line["rl/zero_std_groups"] for line in many) for many in (lines, without)]
    assert equal[0] < equal[1]
    spread = [sum(line["rl/group_std"] for line in many) for many in (lines, without)]
    assert spread[0] > spread[1]


def test_sampling_again_is_bounded(rloo_config, monkeypatch):
    calls = []
    real = rloo.sample_examples
    monkeypatch.setattr(rloo, "sample_examples", lambda *a: calls.append(len(a[0])) or real(*a))
    lines = run(rloo_config(num_steps=1), never)
    assert calls == [12, 12]  # twice all of them, and then it goes on
    assert lines[0]["rl/zero_std_groups"] == 1.0
    assert lines[0]["rl/replaced_prompts"] == 2.0


def test_dynamic_sampling_resumes_identically(rloo_config, monkeypatch):
    whole, parts = rloo_config("whole"), rloo_config("parts")
    run(whole)
    with monkeypatch.context() as patched:
        stop_after(2, patched, rloo)
        with pytest.raises(Stopped):
            run(parts)
    run(parts)
    assert everything(whole.output_dir) == everything(parts.output_dir)
    assert weights(whole.output_dir) == weights(parts.output_dir)


def credit(found: Experience, sizes: list[float]) -> Credit:
    x = torch.tensor(sizes)[:, None] * found.mask
    return Credit(x, None, x, x, x)


def test_rows_to_train():
    found = experience([1, 2, 3, 1, 2, 3], [0.0, 1.0, 2.0, 2.0, 0.0, 3.0])
    sizes = credit(found, [-3.0, 1.0, 0.0, 0.0, 2.0, -4.0])

    def rows(**changes):
        config = rloo.RLOOConfig(model="tiny", output_dir="x", num_samples=2, **changes)
        return rows_to_train(found, sizes, config)

    assert rows() is None
    assert rows(update_share=0.5) == [0, 4, 5]
    assert rows(update_share=0.01) == [5]
    assert rows(dynamic_sampling=1) == [0, 1, 4, 5]  # the second pair is equal
    assert rows(dynamic_sampling=1, update_share=0.5) == [0, 5]
    equal = replace(found, raw_scores=torch.zeros(6))
    config = rloo.RLOOConfig(model="tiny", output_dir="x", num_samples=2, dynamic_sampling=1)
    assert rows_to_train(equal, sizes, config) == [0, 1, 2, 3, 4, 5]


def test_a_share_of_one_is_everything_and_a_smaller_one_is_not(rloo_config):
    options = {"dynamic_sampling": 0, "num_steps": 2, "num_mini_batches": 2}
    plain = run(rloo_config("plain", **options))
    assert plain == run(rloo_config("whole", update_share=1.0, **options))
    half = run(rloo_config("half", update_share=0.5, **options))
    assert half[0]["rl/policy_grad_norm"] != plain[0]["rl/policy_grad_norm"]
    assert half[0]["rl/score"] == plain[0]["rl/score"]


def test_a_constant_divisor_scales_the_loss(rloo_config):
    options = {"dynamic_sampling": 0, "num_steps": 1, "ratio": "token", "kl_in": "loss"}
    tokens = run(rloo_config("tokens", **options))[0]
    most = run(rloo_config("most", divide_by="max_tokens", **options))[0]
    scale = tokens["rl/length"] / 8
    assert most["rl/policy_grad_norm"] == pytest.approx(
        tokens["rl/policy_grad_norm"] * scale, rel=1e-4
    )
    assert most["rl/approx_kl"] == tokens["rl/approx_kl"]  # metrics stay means over tokens


def test_long_responses_are_punished_softly(rloo_config):
    config = rloo_config(overlong=(0.5, 1.0), overlong_penalty=2.0, reward_model="")
    objects = GivenObjects(reward_funcs=[never])
    models = load_models(config, objects, start("cpu", "auto"), critic=False)
    example = load_prompts(config, models, objects)[0][0]
    score = RolloutScorer(models, config)

    responses = [[5] * n for n in (3, 4, 6, 8)]
    sampled = Rollout(responses, torch.zeros(4, 8), torch.ones(4).bool())
    scores = score([example] * 4, sampled).scores
    torch.testing.assert_close(scores, torch.tensor([0.0, 0.0, -1.0, -2.0]))
    # Of a continuation the whole response counts.
    prefixed = score([example] * 4, sampled, [[6] * 2] * 4).scores
    torch.testing.assert_close(prefixed, torch.tensor([-0.5, -1.0, -2.0, -2.0]))
    assert torch.equal(score([example] * 4, sampled).raw_scores, torch.zeros(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dynamic_sampling": 1, "tree": (2, 2)}, r"does not go with tree: \[2, 2\]"),
        ({"dynamic_sampling": 1, "async_steps": 1}, "does not go with async_steps: 1"),
        ({"dynamic_sampling": -1}, "dynamic_sampling must be at least 0"),
        ({"update_share": 0.0}, "update_share must be positive"),
        ({"divide_by": "max_tokens"}, "ratio: macro is a mean over macro"),
        ({"baseline": "global_local"}, "compares the branches of a tree"),
        ({"overlong": (0.9, 0.5)}, "two rising shares of max_new_tokens"),
        ({"overlong": (0.5, 1.5)}, r"got \[0.5, 1.5\]"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(changes, message):
    with pytest.raises(SettingError, match=message):
        rloo.RLOOConfig(model="tiny", output_dir="x", **changes)


def test_conversations_are_replaced_with_their_episodes(rloo_config, monkeypatch):
    joined = []
    real = rloo.replace_rows

    def watched(old, new, rows):
        both = real(old, new, rows)
        if isinstance(old, Experience):
            joined.append((both, new, rows))
        return both

    monkeypatch.setattr(rloo, "replace_rows", watched)
    play = {"environment": "guess", "max_turns": 2, "episode_tokens": 64, "batch_size": 2}
    play |= {"data": DataConfig(source="guess", limit=60, eval_size=2, parts={"ppo": 1.0})}
    play |= {"sampling": Sampling(max_new_tokens=4), "num_steps": 1}
    run(rloo_config(**play), never)
    assert joined
    for both, new, rows in joined:
        for own, row in enumerate(rows):
            assert both.episodes[row] is new.episodes[own]
            width = new.mask.shape[1]
            assert torch.equal(both.mask[row, :width], new.mask[own])


def test_rewards_with_a_place_may_come_in_some_batches_only(rloo_config):
    calls = []

    def sometimes_by_line(completions, **_):
        calls.append(len(completions))
        scores = ends_in_a(completions)
        if len(calls) % 2:  # the same scores, at the ends of the first lines
            return [[(0, score)] for score in scores]
        return scores

    placed, plain = rloo_config("placed", num_steps=2), rloo_config("plain", num_steps=2)
    a, b = run(placed, sometimes_by_line), run(plain)
    assert len(calls) > 2
    assert [line["rl/score"] for line in a] == pytest.approx([line["rl/score"] for line in b])
