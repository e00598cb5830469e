"""The hooks of SkyRL and slime, called as these engines call them; neither is installed here."""

import pickle
from argparse import Namespace

import pytest
import skyrl_excerpt
import torch

from marlhf.config.build import ConfigError
from marlhf.core import Turns, gae, macro_gae, segment, whiten
from marlhf.core.responses import Responses
from marlhf.engines import skyrl, slime
from marlhf.engines.batch import EngineError, move_to_policy_tokens
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
    tensors = {"response_mask": response_mask, "rewards": rewards, "loss_mask": loss_mask}
    tensors["values"] = torch.randn(loss_mask.shape)
    uids = [str(i) for i in range(len(loss_masks))]
    return skyrl_excerpt.TrainingInputBatch(tensors, uids=uids)


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
    rewards = move_to_policy_tokens(data["rewards"], mask)
    expected = macro_gae(rewards, data["values"], segments, lam=0.9, sigma="start")
    assert torch.equal(data["advantages"], expected[0])
    assert torch.equal(data["returns"], expected[1])


def test_skyrl_with_single_tokens_is_gae():
    data = skyrl_batch(LOSS_MASKS)
    estimate = skyrl.macro_gae(segmenter={"type": "ngram", "n": 1})
    Trainer(estimate, gamma=0.99, lambd=0.9).compute_advantages_and_returns(data)
    mask = data["loss_mask"].bool()
    rewards = move_to_policy_tokens(data["rewards"], mask)
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
    data = skyrl_batch(LOSS_MASKS)
    data["values"] = None
    with pytest.raises(EngineError, match="critic"):
        Trainer(skyrl.macro_gae(), 1.0, 1.0).compute_advantages_and_returns(data)
    with pytest.raises(EngineError, match="compares the responses to one prompt"):
        Trainer(skyrl.macro_estimator("macro_rloo"), 1.0, 1.0).compute_advantages_and_returns(data)
    with pytest.raises(EngineError, match="SkyRL shows an estimator none"):
        skyrl.macro_gae(turn_rewards="turn_scores")


# Two prompts; for each, episodes as steps: what the policy read since its last step (for the first
# step the prompt), what it wrote, and the reward of the step.
EPISODES = [
    ("a", [([1, 2], [11, 12, 13], 0.5), ([3], [14], 0.0), ([4], [15, 16], 1.0)]),
    ("a", [([1, 2], [11, 17], 0.0), ([3], [18, 19, 20], -1.0)]),
    ("a", [([1, 2], [21], 2.0)]),
    ("b", [([5], [22, 23], 1.0), ([6, 7], [24], 0.25)]),
    ("b", [([5], [25], 0.0), ([6, 7], [26, 27], 3.0)]),
]


def skyrl_rows(rows, uids, **metadata):
    """A batch of rows (prompt, response, loss mask, rewards of tokens, values)."""
    prompts, responses, loss_masks, rewards, values = zip(*rows)
    convert = skyrl_excerpt.convert_prompts_responses_to_batch_tensors
    response_mask, rewards, loss_mask = convert(responses, rewards, loss_masks)
    sequences, attention_mask = skyrl_excerpt.lay_out_sequences(prompts, responses)
    tensors = {"response_mask": response_mask, "rewards": rewards, "loss_mask": loss_mask}
    tensors |= {"sequences": sequences, "attention_mask": attention_mask}
    tensors["values"] = convert(responses, values, loss_masks)[1]
    return skyrl_excerpt.TrainingInputBatch(tensors, uids=list(uids), **metadata)


def step_wise_and_whole():
    """The same episodes twice: a row for each step, and one row with tool output in between."""
    torch.manual_seed(0)
    steps, whole, uids, last = [], [], [], []
    for uid, episode in EPISODES:
        context, row = [], ([], [], [], [])
        for read, wrote, reward in episode:
            values = torch.randn(len(wrote)).tolist()
            rewards = [0.0] * (len(wrote) - 1) + [reward]
            prompt = context + read
            steps.append((prompt, wrote, [1] * len(wrote), rewards, values))
            hole = read if context else []
            parts = (hole + wrote, [0] * len(hole) + [1] * len(wrote))
            parts += ([0.0] * len(hole) + rewards, [0.0] * len(hole) + values)
            for column, part in zip(row, parts):
                column += part
            context = prompt + wrote
        whole.append((episode[0][0], *row))
        uids += [uid] * len(episode)
        last += [False] * (len(episode) - 1) + [True]
    return (
        skyrl_rows(steps, uids, is_last_step=last),
        skyrl_rows(whole, [uid for uid, _ in EPISODES]),
    )


@pytest.mark.parametrize("rule", ["turns", {"type": "ngram", "n": 2}])
@pytest.mark.parametrize("estimator", ["macro_gae", "macro_rloo", "macro_grpo"])
def test_skyrl_credits_step_wise_rows_as_one_row_with_the_whole_episode(estimator, rule):
    macro = {"segmenter": rule, "whiten": "tokens"}
    estimate = skyrl.macro_estimator(estimator, **macro)
    both = step_wise_and_whole()
    for data in both:
        Trainer(estimate, gamma=0.9, lambd=0.8).compute_advantages_and_returns(data)
    for name in ("advantages", "returns"):
        by_step, by_episode = (data[name][data["loss_mask"].bool()] for data in both)
        assert by_step.unique().numel() > 5
        torch.testing.assert_close(by_step, by_episode)


def test_skyrl_step_wise_rloo_is_a_loop_over_steps():
    data, _ = step_wise_and_whole()
    estimate = skyrl.macro_estimator("macro_rloo", segmenter="turns")
    Trainer(estimate, gamma=0.9, lambd=1.0).compute_advantages_and_returns(data)
    to_go = []
    for _, episode in EPISODES:
        later, of_episode = 0.0, []
        for *_, reward in reversed(episode):
            later = reward + 0.9 * later
            of_episode.insert(0, later)
        to_go.append(of_episode)
    rows = iter(data["advantages"])
    masks = iter(data["loss_mask"].bool())
    for i, (uid, _) in enumerate(EPISODES):
        others = [to_go[j][0] for j, (of, _) in enumerate(EPISODES) if of == uid and j != i]
        for value in to_go[i]:
            expected = value - sum(others) / len(others)
            row, mask = next(rows), next(masks)
            assert row[mask].tolist() == pytest.approx([expected] * int(mask.sum()), abs=1e-6)
            assert (row[~mask] == 0).all()


def test_skyrl_padding_rows_change_nothing():
    """SkyRL fills a batch up with copies of row 0 that train nothing."""
    data, _ = step_wise_and_whole()
    padded = skyrl_excerpt.TrainingInputBatch(
        {name: torch.cat([x, x[:1]]) for name, x in data.items()},
        uids=[*data.metadata["uids"], "pad0"],
        is_last_step=[*data.metadata["is_last_step"], True],
    )
    padded["loss_mask"][-1] = 0
    for estimator in ("macro_gae", "macro_grpo", "macro_state"):
        estimate = skyrl.macro_estimator(estimator, segmenter="turns")
        for batch in (data, padded):
            Trainer(estimate, gamma=1.0, lambd=1.0).compute_advantages_and_returns(batch)
        torch.testing.assert_close(padded["advantages"][:-1], data["advantages"])
        assert (padded["advantages"][-1] == 0).all()


def test_skyrl_step_wise_states_are_prompts():
    """The first two episodes of `a` part at step 0; both of `b` are in one state at step 0."""
    data, _ = step_wise_and_whole()
    state, group = (
        skyrl.macro_estimator(name, segmenter="turns") for name in ("macro_state", "macro_grpo")
    )
    advantages = []
    for estimate in (state, group):
        Trainer(estimate, gamma=1.0, lambd=1.0).compute_advantages_and_returns(data)
        advantages.append(data["advantages"][:, -1])  # the last token of each step
    first = torch.tensor([0, 3, 5, 6, 8])
    later = torch.tensor([1, 2, 4, 7, 9])  # another history each
    torch.testing.assert_close(advantages[0][first], 2 * advantages[1][first])
    torch.testing.assert_close(advantages[0][later], advantages[1][later])


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


def grouped(n=2):
    """A rank's four responses: two prompts of two."""
    torch.manual_seed(3)
    data = rollout((5, 3, 4, 2))
    data |= {"rewards": [1.0, -2.0, 0.5, 3.0], "sample_indices": [6, 2, 3, 7]}
    data["kl"] = [torch.zeros(len(mask)) for mask in data["loss_masks"]]
    args = {
        "n_samples_per_prompt": n,
        "rewards_normalization": False,
        "advantage_estimator": "grpo",
    }
    return args, data


def test_slime_compares_the_responses_to_a_prompt():
    extra, data = grouped()
    bandit = {"type": "ngram", "n": float("inf")}
    for function, expected in (
        (slime.macro_rloo, [-2.0, -2.5, 2.5, 2.0]),
        (slime.macro_grpo, [-(0.5**0.5), -(0.5**0.5), 0.5**0.5, 0.5**0.5]),
    ):
        args = Namespace(**{**vars(arguments(segmenter=bandit)), **extra, "gamma": 1.0})
        data["loss_masks"] = [torch.ones(n) for n in (5, 3, 4, 2)]
        function(args, data)
        for row, value in zip(data["advantages"], expected, strict=True):
            torch.testing.assert_close(row, torch.full_like(row, value), atol=1e-5, rtol=1e-5)


def test_slime_says_why_groups_cannot_be_compared():
    extra, data = grouped()
    for changes, words in (
        ({"rewards_normalization": True}, "disable-rewards-normalization"),
        ({"n_samples_per_prompt": 4}, "A rank needs all 4 responses"),
    ):
        args = Namespace(**{**vars(arguments()), **extra, **changes})
        with pytest.raises(EngineError, match=words):
            slime.macro_rloo(args, data)
    args = Namespace(**vars(arguments(turn_rewards="x")), **extra)
    with pytest.raises(EngineError, match="slime shows an estimator none"):
        slime.macro_rloo(args, data)


def test_slime_says_what_is_wrong():
    data = rollout()
    with pytest.raises(EngineError, match="whole responses"):
        slime.macro_gae(Namespace(**{**vars(arguments()), "context_parallel_size": 2}), data)
    with pytest.raises(EngineError, match="critic"):
        slime.macro_gae(arguments(), {**data, "values": None})
    with pytest.raises(EngineError, match="Set value_level: token"):
        slime.macro_gae(arguments(value_level="macro"), data)
