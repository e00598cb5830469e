"""The hooks of SkyRL and slime, called as these engines call them; neither is needed here."""

from argparse import Namespace

import pytest
import torch

from marlhf.config.recipe_files import ConfigError
from marlhf.core import Turns, gae, macro_gae, segment, whiten
from marlhf.core.responses import Responses
from marlhf.engines import skyrl, slime
from marlhf.engines.settings import EngineError
from marlhf.models.tiny import tiny_tokenizer


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    mask = torch.ones(3, 8)
    mask[0, 3:5] = 0
    mask[1, 6:] = 0
    return {
        "token_level_rewards": torch.randn(3, 8) * mask,
        "values": torch.randn(3, 8) * mask,
        "response_mask": mask,
    }


def test_skyrl_with_single_tokens_is_gae(tensors):
    estimate = skyrl.macro_gae(segmenter={"type": "ngram", "n": 1})
    advantages, returns = estimate(
        **tensors, gamma=0.99, lambd=0.9, index=["a"] * 3, config=None, grpo_norm_by_std=True
    )
    mask = tensors["response_mask"].bool()
    rewards, values = tensors["token_level_rewards"], tensors["values"]
    expected, targets = gae(rewards, values, mask, gamma=0.99, lam=0.9)
    torch.testing.assert_close(advantages, whiten(expected, mask))
    torch.testing.assert_close(returns, targets)


def test_skyrl_with_turns(tensors):
    estimate = skyrl.macro_gae(segmenter="turns", sigma="start", whiten="none")
    advantages, returns = estimate(**tensors, gamma=1.0, lambd=0.9)
    mask = tensors["response_mask"].bool()
    segments = segment(Turns(), Responses(torch.zeros_like(mask).long(), mask))
    rewards, values = tensors["token_level_rewards"], tensors["values"]
    expected = macro_gae(rewards, values, segments, lam=0.9, sigma="start")
    assert torch.equal(advantages, expected[0])
    assert torch.equal(returns, expected[1])


@pytest.mark.parametrize("rule", ["words", "perplexity", "surprise", "constituents", "random"])
def test_skyrl_refuses_what_it_cannot_see(rule):
    with pytest.raises(EngineError, match="SkyRL shows an estimator neither"):
        skyrl.macro_gae(segmenter=rule)


def test_skyrl_says_what_is_wrong(tensors):
    with pytest.raises(ConfigError, match=r"macro_gae\.sigmas.*mean sigma"):
        skyrl.macro_gae(sigmas="start")
    with pytest.raises(EngineError, match="Set value_level: token"):
        skyrl.macro_gae(value_level="macro")
    with pytest.raises(EngineError, match="critic"):
        skyrl.macro_gae()(**{**tensors, "values": None}, gamma=1.0, lambd=1.0)


def arguments(**macro):
    return Namespace(
        macro=macro,
        kl_coef=0.1,
        gamma=0.99,
        lambd=0.9,
        context_parallel_size=1,
        hf_checkpoint="",
    )


def rollout(lengths=(5, 3)):
    torch.manual_seed(1)
    rows = {
        name: [torch.rand(n) for n in lengths]
        for name in ("kl", "values", "log_probs", "ref_log_probs")
    }
    masks = [torch.ones(n, dtype=torch.int64) for n in lengths]
    masks[0][2] = 0
    tokens = [torch.randint(5, 400, (4 + n,)) for n in lengths]  # four tokens of prompt
    return {**rows, "rewards": [1.0, -2.0], "loss_masks": masks, "tokens": tokens}


def test_slime_with_single_tokens_is_gae_of_each_row():
    data = rollout()
    slime.macro_gae(arguments(segmenter={"type": "ngram", "n": 1}, whiten="none"), data)
    for row in range(2):
        rewards = -0.1 * data["kl"][row]
        rewards[-1] += data["rewards"][row]
        mask = data["loss_masks"][row].bool()[None]
        expected, targets = gae(rewards[None], data["values"][row][None], mask, gamma=0.99, lam=0.9)
        torch.testing.assert_close(data["advantages"][row], expected[0])
        torch.testing.assert_close(data["returns"][row], targets[0])


def test_slime_reads_tokens_and_log_probs(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    for rule in ("words", "perplexity", "surprise", "random", "turns"):
        data = rollout()
        args = arguments(segmenter=rule, whiten="none")
        args.hf_checkpoint = str(tmp_path)
        slime.macro_gae(args, data)
        assert [len(row) for row in data["advantages"]] == [5, 3]
        assert data["advantages"][0][2] == 0  # the mask's hole


def test_slime_says_what_is_wrong():
    data = rollout()
    with pytest.raises(EngineError, match="whole responses"):
        slime.macro_gae(Namespace(**{**vars(arguments()), "context_parallel_size": 2}), data)
    with pytest.raises(EngineError, match="critic"):
        slime.macro_gae(arguments(), {**data, "values": None})
    with pytest.raises(EngineError, match="Set value_level: token"):
        slime.macro_gae(arguments(value_level="macro"), data)
