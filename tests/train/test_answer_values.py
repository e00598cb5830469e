from dataclasses import replace
from functools import partial

import pytest
import torch

from marlhf.config.rl import Guards
from marlhf.core import Lines, NGram, Segments, Turns, segment
from marlhf.data import DataConfig, Row
from marlhf.data.encode import decode
from marlhf.data.rows import as_chat, response_text
from marlhf.errors import SettingError
from marlhf.models.forward import pass_choice
from marlhf.rollout import Sampling
from marlhf.runtime.distributed import start as start_world
from marlhf.runtime.stage import Example, GivenObjects
from marlhf.train import ppo
from marlhf.train import state_values as room
from marlhf.train.experience import RolloutScorer
from marlhf.train.rl_models import load_models
from marlhf.train.sampling import sample_responses
from marlhf.train.state_values import (
    State,
    answer_branches,
    answer_logprobs,
    answer_values,
    check_answers,
    states_of,
    values_at_starts,
)
from small_runs import assert_close, everything, read_lines, stop_after, weights

ANSWER = {"values": "answer", "sigma": "start"}


def right(completions, answer, **_):
    return [float(a in response_text(text)) for text, a in zip(completions, answer)]


def rows(count=40):
    return [Row(f"What is {i} + 9?\n", columns={"answer": str(i + 9)}) for i in range(count)]


def given(change=lambda row: row):
    train, held_out = (list(map(change, rows(count))) for count in (40, 6))
    return GivenObjects(reward_funcs=[right], train_rows=train, eval_rows=held_out)


@pytest.fixture
def loaded(ppo_config):
    """A float64 policy, so that two ways to compute a number differ by nothing else."""

    def load(**changes):
        config = ppo_config(
            reward_model="",
            ref_model="tiny",
            critic_model=None,
            model="tiny",
            sampling=Sampling(max_new_tokens=14, temperature=0.7),
            segmenter=NGram(3),
            **ANSWER,
            **changes,
        )
        models = load_models(config, given(), start_world("cpu", "auto"), critic=False)
        models.policy.double()
        examples = [Example(row, models.tokenizer.encode(row.prompt), [], []) for row in rows(5)]
        rollout = sample_responses([e.prompt for e in examples], models, list(range(5)))
        experience = RolloutScorer(models, config)(examples, rollout)
        responses = experience.responses(models.vocabulary, torch.Generator().manual_seed(0))
        segments = segment(config.segmenter, responses)
        return config, models, examples, experience, segments

    return load


def values_by(config, models, examples, experience, segments):
    """[B, T]."""
    of_states = partial(answer_values, experience=experience, models=models, config=config)
    rewards = torch.zeros(segments.mask.shape)
    return values_at_starts(of_states, examples, experience, segments, rewards, config.num_samples)


def one_by_one(states, branches, models):
    """A pass for each state, over one row, without padding."""
    found = []
    for state, branch in zip(states, branches):
        text = [*state.prompt, *branch.tokens]
        logits = models.policy(input_ids=torch.tensor([text])).logits[0] / models.sampling.scale
        logprobs = logits.log_softmax(dim=1)
        places = range(len(state.prompt) + branch.first, len(text))
        found.append(sum(logprobs[i - 1, text[i]] for i in places))
    return torch.stack(found)


@torch.no_grad()
def test_values_are_those_of_one_pass_per_boundary(loaded):
    config, models, examples, experience, segments = loaded()
    states = states_of(examples, segments, experience)
    assert len(states) > 10
    branches = answer_branches(states, models.tokenizer, config)
    slow = one_by_one(states, branches, models)
    found = answer_logprobs(states, branches, experience, models)
    assert pass_choice(models.policy).branches_until > 0  # rows were read once
    torch.testing.assert_close(found.double(), slow, rtol=1e-6, atol=1e-6)

    values = values_by(config, models, examples, experience, segments)
    torch.testing.assert_close(values[segments.starts].double(), slow.exp(), rtol=1e-5, atol=1e-9)
    assert not values[~segments.starts].any()
    scored = torch.tensor([len(b.tokens) - b.first for b in branches])
    assert (scored > 1).any()
    by_token = replace(config, answer_value="token_prob")
    values = values_by(by_token, models, examples, experience, segments)
    expected = (slow / scored).exp()
    torch.testing.assert_close(values[segments.starts].double(), expected, rtol=1e-5, atol=1e-9)


@torch.no_grad()
def test_micro_batches_and_the_rest_of_a_batch_change_nothing(loaded):
    config, models, examples, experience, segments = loaded()
    whole = values_by(config, models, examples, experience, segments)
    small = values_by(config, replace(models, pass_tokens=40), examples, experience, segments)
    torch.testing.assert_close(whole, small, rtol=1e-6, atol=0)
    alone = replace(experience, sequences=experience.sequences.rows([2]))
    width = alone.mask.shape[1]
    own = Segments(segments.ids[2:3, :width], alone.mask)
    single = values_by(config, models, examples[2:3], alone, own)
    torch.testing.assert_close(whole[2:3, :width], single, rtol=1e-6, atol=0)


@torch.no_grad()
def test_rows_without_a_later_start_cost_nothing(loaded):
    config, models, examples, experience, segments = loaded()
    starts = segments.starts.clone()
    starts[1:, 1:] = False
    few = Segments.from_starts(starts, segments.mask)
    rewards = torch.arange(float(segments.mask.numel())).view(segments.mask.shape)
    of_states = partial(answer_values, experience=experience, models=models, config=config)
    values = values_at_starts(of_states, examples, experience, few, rewards, 5)
    everywhere = values_by(config, models, examples, experience, segments)
    torch.testing.assert_close(values[0, 1:], everywhere[0, 1:], rtol=1e-6, atol=0)
    assert not values[1:, 1:].any()


@torch.no_grad()
def test_a_model_that_cannot_branch_is_read_once_per_boundary(loaded, monkeypatch, capfd):
    """Its own passes ignore the mask, as those of some families do."""
    config, models, examples, experience, segments = loaded()
    expected = values_by(config, models, examples, experience, segments)
    pass_choice(models.policy).branches_until = 0
    forward = models.policy.forward

    def deaf(*args, attention_mask=None, **kwargs):
        return forward(*args, **kwargs)

    monkeypatch.setattr(models.policy, "forward", deaf)
    found = values_by(config, models, examples, experience, segments)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    assert "does not read several ends of a text" in capfd.readouterr().err
    monkeypatch.setattr(room, "branch_logprobs", None)  # asked once, and never again
    values_by(config, models, examples, experience, segments)


def test_the_answer_is_scored_and_what_comes_before_it_is_given(loaded, ppo_config):
    _, models, examples, _, _ = loaded()
    tokenizer = models.tokenizer
    config = ppo_config(**ANSWER, answer_template="\n\\boxed{{answer}}!")
    middle = State(0, 2, examples[3], tokenizer.encode("a fox"))
    line = State(0, 0, examples[3], [])  # the prompt ends with a line break
    first, second = answer_branches([middle, line], tokenizer, config)
    assert decode(tokenizer, first.tokens) == "\n\\boxed{12}!"
    assert decode(tokenizer, first.tokens[first.first :]) == "12}!"
    assert decode(tokenizer, second.tokens) == "\\boxed{12}!"
    assert decode(tokenizer, [*second.tokens[second.first :]]) == "12}!"
    assert (first.place, second.place) == (len(middle.prompt), len(line.prompt))
    bare = ppo_config(**ANSWER, answer_template="{answer}")
    [branch] = answer_branches([middle], tokenizer, bare)
    assert (decode(tokenizer, branch.tokens), branch.first) == ("12", 0)


def test_training_on_chats_resumes_identically(ppo_config, monkeypatch):
    options = {**ANSWER, "reward_model": "", "critic_model": None, "boundaries": 2}
    whole, cut = (ppo_config(name, segmenter=Lines(max_length=3), **options) for name in "ab")
    ppo.train(whole, given(as_chat))
    stop_after(2, monkeypatch, ppo)
    with pytest.raises(Exception, match="Stopped by SIGINT"):
        ppo.train(cut, given(as_chat))
    monkeypatch.undo()
    ppo.train(cut, given(as_chat))
    assert everything(whole.output_dir) == everything(cut.output_dir)
    assert weights(whole.output_dir) == weights(cut.output_dir)
    steps = [x for x in read_lines(whole.output_dir) if x["kind"] == "train"]
    assert all("rl/value_loss" not in x and x["rl/policy_grad_norm"] > 0 for x in steps)


def test_turns_are_valued_by_the_answer(ppo_config):
    config = ppo_config(
        "turns",
        **ANSWER,
        model="tiny",
        reward_model="",
        data=DataConfig(source="guess", limit=60, eval_size=4),
        environment="guess",
        answer_column="number",
        max_turns=3,
        episode_tokens=96,
        segmenter=Turns(),
        sampling=Sampling(max_new_tokens=4),
        guards=Guards(warn_kl=1e9),
        num_steps=1,
    )
    ppo.train(config)
    [step] = [x for x in read_lines(config.output_dir) if x["kind"] == "train"]
    assert step["rl/turns"] > 1
    assert step["rl/explained_variance"] != 0


@pytest.mark.distributed
@pytest.mark.xdist_group("forked")
def test_two_processes_give_the_values_of_one(ppo_config, start):
    options = {
        **ANSWER,
        "model": "tiny",
        "reward_model": "",
        "reward_funcs": ("marlhf.reward.sums:share_right",),
        "data": DataConfig(source="sums", eval_size=8),
        "segmenter": NGram(4),
        "num_steps": 1,
        "eval_prompts": 0,
        "answer_template": "={answer}",
        "device": "cpu",
    }
    one, two = ppo_config("one", **options), ppo_config("two", **options)
    process = start(two, ranks=True)
    ppo.train(one)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    a, b = ([x for x in read_lines(c.output_dir) if x["kind"] == "train"] for c in (one, two))
    assert_close(a, b, 1e-3)
    assert a[0]["rl/explained_variance"] != 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sigma": "equal"}, "set sigma: start"),
        ({"gamma": 0.9}, "set gamma: 1.0"),
        ({"normalize_scores": True}, "is a probability"),
        ({"critic_warmup_steps": 2}, "has no critic"),
        ({"answer_template": "\n####"}, "must have {answer} once"),
        ({"answer_value": "logit"}, "one of prob, token_prob"),
    ],
)
def test_settings_that_do_not_fit(ppo_config, changes, message):
    with pytest.raises(SettingError, match=message):
        ppo_config(**{**ANSWER, **changes})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "column 'answer', but row 2 has no such column"),
        ({"answer": " "}, "row 2 has ' ', no text or number"),
        ({"answer": ["3"]}, "no text or number"),
        ({"answer": True}, "no text or number"),
    ],
)
def test_rows_without_an_answer(ppo_config, columns, message):
    config = ppo_config(**ANSWER)
    check_answers([Row("1 + 1?", columns={"answer": 2})], config)
    with pytest.raises(SettingError, match=message):
        check_answers([rows()[0], Row("1 + 1?", columns=columns)], config)
