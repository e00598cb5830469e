"""The hooks of SkyRL and slime, called as these engines call them; neither is installed here."""

import pickle
from argparse import Namespace

import pytest
import skyrl_excerpt
import torch

from marlhf.config.recipe_files import ConfigError
from marlhf.core import Turns, gae, macro_gae, segment, whiten
from marlhf.core.responses import Responses
from marlhf.engines import skyrl, slime
from marlhf.engines.advantages import EngineError
from marlhf.models.tiny import tiny_tokenizer


class Trainer(skyrl.MacroTrainerMixin, skyrl_excerpt.RayPPOTrainer):
    """SkyRL's trainer as docs/verl.md has it."""


def skyrl_batch(loss_masks, rewards=None):
    """A batch as SkyRL's own preprocessing makes it of generated conversations."""
    torch.manual_seed(0)
    rewards = rewards or [torch.randn(len(mask)).tolist() for mask in loss_masks]
    responses = [[7] * len(mask) for mask in loss_masks]
    convert = skyrl_excerpt.convert_prompts_responses_to_batch_tensors
    response_mask, rewards, loss_mask = convert(responses, rewards, loss_masks)
    return {
        "response_mask": response_mask,
        "rewards": rewards,
        "loss_mask": loss_mask,
        "values": torch.randn(loss_mask.shape),
        "uids": [str(i) for i in range(len(loss_masks))],
    }


LOSS_MASKS = [[1, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0, 1, 0]]


def test_skyrl_turns_end_where_tools_answer():
    """The batch has holes in its loss mask only: 1110011 has two turns, not one of seven tokens."""
    data = skyrl_batch(LOSS_MASKS)
    assert data["response_mask"][0].all()
    estimate = skyrl.macro_gae(segmenter="turns", sigma="start", whiten="none")
    Trainer(estimate, gamma=1.0, lambd=0.9).compute_advantages_and_returns(data)
    first, second = data["advantages"][0, :3], data["advantages"][0, 5:]
    assert first.unique().numel() == second.unique().numel() == 1
    assert first[0] != second[0]
    assert (data["advantages"][0, 3:5] == 0).all()


def test_skyrl_is_macro_gae_over_the_loss_mask():
    data = skyrl_batch(LOSS_MASKS)
    estimate = skyrl.macro_gae(segmenter="turns", sigma="start", whiten="none")
    Trainer(estimate, gamma=1.0, lambd=0.9).compute_advantages_and_returns(data)
    mask = data["loss_mask"].bool()
    segments = segment(Turns(), Responses(torch.zeros_like(mask).long(), mask))
    rewards = skyrl.move_to_policy_tokens(data["rewards"], mask)
    expected = macro_gae(rewards, data["values"], segments, lam=0.9, sigma="start")
    assert torch.equal(data["advantages"], expected[0])
    assert torch.equal(data["returns"], expected[1])


def test_skyrl_with_single_tokens_is_gae():
    data = skyrl_batch(LOSS_MASKS)
    estimate = skyrl.macro_gae(segmenter={"type": "ngram", "n": 1})
    Trainer(estimate, gamma=0.99, lambd=0.9).compute_advantages_and_returns(data)
    mask = data["loss_mask"].bool()
    rewards = skyrl.move_to_policy_tokens(data["rewards"], mask)
    expected, targets = gae(rewards, data["values"], mask, gamma=0.99, lam=0.9)
    torch.testing.assert_close(data["advantages"], whiten(expected, mask))
    torch.testing.assert_close(data["returns"], targets)


def test_skyrl_ngrams_start_with_the_response_and_end_at_tool_output():
    """SkyRL pads on the left; n-grams are counted from the first token of each response."""
    data = skyrl_batch([[1] * 6, [1, 1, 1, 0, 1]])
    estimate = skyrl.macro_gae(segmenter={"type": "ngram", "n": 2}, whiten="none")
    Trainer(estimate, gamma=1.0, lambd=0.5).compute_advantages_and_returns(data)
    advantages = data["advantages"][1]
    assert advantages[0] == advantages[4] == 0  # padding, tool output
    assert advantages[1] == advantages[2]
    assert len({*advantages[[1, 3, 5]].tolist()}) == 3


def test_skyrl_keeps_the_reward_of_a_masked_last_token():
    """SkyRL puts a turn's reward on its last token, which may be an appended EOS."""
    data = skyrl_batch([[1, 1, 0]], rewards=[[0.0, 0.0, 2.0]])
    data["values"].zero_()
    estimate = skyrl.macro_gae(segmenter="turns", whiten="none")
    Trainer(estimate, gamma=1.0, lambd=1.0).compute_advantages_and_returns(data)
    assert data["returns"].tolist() == [[2.0, 2.0, 0.0]]


def test_skyrl_without_the_loss_mask_is_refused():
    data = skyrl_batch(LOSS_MASKS)
    for rule in ("turns", "ngram"):
        trainer = skyrl_excerpt.RayPPOTrainer(skyrl.macro_gae(segmenter=rule), 1.0, 0.9)
        with pytest.raises(EngineError, match="MacroTrainerMixin"):
            trainer.compute_advantages_and_returns(data)
    Trainer(skyrl.macro_gae(), 1.0, 0.9).compute_advantages_and_returns(data)
    with pytest.raises(EngineError, match="MacroTrainerMixin"):  # the mask is of one call
        trainer.compute_advantages_and_returns(data)
    data["loss_mask"] = data["loss_mask"][:1]
    with pytest.raises(EngineError, match="step_wise_trajectories"):
        Trainer(skyrl.macro_gae(), 1.0, 0.9).compute_advantages_and_returns(data)


def test_skyrl_estimators_survive_the_way_through_ray():
    estimate = skyrl.macro_gae(segmenter="turns", whiten="none")
    sent = pickle.loads(pickle.dumps(estimate))
    batches = [skyrl_batch(LOSS_MASKS) for _ in range(2)]
    for each, data in zip((estimate, sent), batches):
        Trainer(each, gamma=1.0, lambd=0.9).compute_advantages_and_returns(data)
    assert torch.equal(batches[0]["advantages"], batches[1]["advantages"])


def test_the_excerpt_is_what_skyrl_does():
    name = "skyrl.train.dataset.preprocess"
    preprocess = pytest.importorskip(name, reason="needs SkyRL")
    rewards = [torch.randn(len(mask)).tolist() for mask in LOSS_MASKS]
    responses = [[7] * len(mask) for mask in LOSS_MASKS]
    prompts = [[5, 6]] * len(LOSS_MASKS)
    convert = preprocess.convert_prompts_responses_to_batch_tensors
    theirs = convert(tiny_tokenizer(), prompts, responses, rewards, LOSS_MASKS)[2:5]
    excerpt = skyrl_excerpt.convert_prompts_responses_to_batch_tensors
    for ours, actual in zip(excerpt(responses, rewards, LOSS_MASKS), theirs, strict=True):
        assert torch.equal(ours, actual)


@pytest.mark.parametrize("rule", ["words", "perplexity", "surprise", "constituents", "random"])
def test_skyrl_refuses_what_it_cannot_see(rule):
    with pytest.raises(EngineError, match="SkyRL shows an estimator neither"):
        skyrl.macro_gae(segmenter=rule)


def test_skyrl_says_what_is_wrong():
    with pytest.raises(ConfigError, match=r"macro_gae\.sigmas.*mean sigma"):
        skyrl.macro_gae(sigmas="start")
    with pytest.raises(EngineError, match="Set value_level: token"):
        skyrl.macro_gae(value_level="macro")
    data = {**skyrl_batch(LOSS_MASKS), "values": None}
    with pytest.raises(EngineError, match="critic"):
        Trainer(skyrl.macro_gae(), 1.0, 1.0).compute_advantages_and_returns(data)


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
    masks[0][2:3] = 0
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


def test_slime_keeps_the_score_where_the_last_token_is_masked():
    """Such as tool output at the end of an episode."""
    data = rollout()
    for name in ("kl", "values"):
        data[name] = [torch.zeros(n) for n in (5, 3)]
    data["loss_masks"][1][1:] = 0
    slime.macro_gae(arguments(segmenter="turns", whiten="none"), data)
    decay = 0.99 * 0.9  # gamma and lambda, once: one turn before the one with the score
    torch.testing.assert_close(data["returns"][0], torch.tensor([decay, decay, 0, 1, 1]) * 1.0)
    torch.testing.assert_close(data["returns"][1], torch.tensor([-2.0, 0, 0]))


@pytest.mark.parametrize("lengths", [(5, 0), (0, 0)])
@pytest.mark.parametrize("rule", ["ngram", "words", "random", "turns"])
def test_slime_takes_empty_responses(lengths, rule, tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    full, data = rollout((5, 3)), rollout(lengths)
    for name in ("kl", "values", "log_probs", "ref_log_probs", "loss_masks", "tokens"):
        data[name][0] = full[name][0] if lengths[0] else data[name][0]
    args = arguments(segmenter=rule, whiten="none")
    args.hf_checkpoint = str(tmp_path)
    slime.macro_gae(args, data)
    slime.macro_gae(args, full)
    assert [len(row) for row in data["advantages"]] == list(lengths)
    assert [len(row) for row in data["returns"]] == list(lengths)
    if lengths[0]:  # the empty response changes nothing for the other
        assert torch.equal(data["advantages"][0], full["advantages"][0])


def test_slime_shows_no_prompt_as_the_response():
    """A response of length 0 has no tokens; its prompt is not one."""
    tokens = slime._responses({"tokens": [torch.arange(4)], "loss_masks": [torch.ones(0)]})
    assert tokens[0].tolist() == []


def test_slime_says_what_is_wrong():
    data = rollout()
    with pytest.raises(EngineError, match="whole responses"):
        slime.macro_gae(Namespace(**{**vars(arguments()), "context_parallel_size": 2}), data)
    with pytest.raises(EngineError, match="critic"):
        slime.macro_gae(arguments(), {**data, "values": None})
    with pytest.raises(EngineError, match="Set value_level: token"):
        slime.macro_gae(arguments(value_level="macro"), data)
