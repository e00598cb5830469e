"""Macro advantages as engines call for them: the same numbers as marlhf.core, or a sentence."""

import math
from dataclasses import replace

import pytest
import torch

from marlhf.config.build import ConfigError
from marlhf.core import (
    Constituents,
    Lines,
    NGram,
    Perplexity,
    RandomNGram,
    Responses,
    Sentences,
    Surprise,
    Turns,
    Words,
    adaptive_lam,
    boundary_gae,
    macro_gae,
    moments,
    segment,
    whiten,
)
from marlhf.engines.advantages import (
    MacroSettings,
    TokenText,
    macro_advantages,
    read_settings,
    segment_batch,
    segment_metrics,
)
from marlhf.engines.batch import EngineBatch, EngineError, EpisodeSteps, turn_states
from marlhf.models.tiny import tiny_tokenizer
from marlhf.spans import vocabulary
from marlhf.spans.apply import Parsing, SegmenterError

TEXTS = ("The fox ran. It saw a shy owl!", "One owl sang about the river.", "No.")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def batch(tokenizer):
    """Three responses of text; the first two have a hole, as if a tool had answered there."""
    torch.manual_seed(0)
    rows = [tokenizer.encode(text) for text in TEXTS]
    width = max(map(len, rows)) + 2
    tokens, mask = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    mask[:2, 4:6] = 0
    shape = (3, width)
    return EngineBatch(
        rewards=torch.randn(shape) * mask,
        mask=mask,
        values=torch.randn(shape),
        tokens=tokens,
        ref_logprobs=-4 * torch.rand(shape),
        logprobs=-4 * torch.rand(shape),
    )


RULES = {
    "ngram": ({"type": "ngram", "n": 3}, NGram(3)),
    "bandit": ({"type": "ngram", "n": math.inf}, NGram(math.inf)),
    "perplexity": ({"type": "perplexity", "max_length": 4}, Perplexity(max_length=4)),
    "surprise": ({"type": "surprise", "probability": 0.3}, Surprise(0.3)),
    "words": ("words", Words()),
    "sentences": ("sentences", Sentences()),
    "lines": ({"type": "lines", "max_length": 6}, Lines(max_length=6)),
    "turns": ("turns", Turns()),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("whitened", ["tokens", "macros", "none"])
def test_every_segmenter_gives_exactly_what_the_core_gives(batch, tokenizer, name, whitened):
    written, rule = RULES[name]
    settings = read_settings({"segmenter": written, "sigma": "start", "whiten": whitened}, "macro")
    assert settings.segmenter == rule
    advantages, returns = macro_advantages(
        batch, settings, gamma=0.99, lam=0.9, text=TokenText(rule, tokenizer)
    )
    mask = batch.mask.bool()
    responses = Responses(
        batch.tokens,
        mask,
        ref_logprobs=batch.ref_logprobs,
        vocabulary=vocabulary(tokenizer, len(tokenizer)),
        logprobs=batch.logprobs,
    )
    segments = segment(rule, responses)
    expected, targets = macro_gae(
        batch.rewards, batch.values, segments, gamma=0.99, lam=0.9, sigma="start"
    )
    if whitened != "none":
        by_action = moments(segments.first(expected), segments.macro_mask)
        expected = whiten(expected, mask, stats=by_action if whitened == "macros" else None)
    assert torch.equal(advantages, expected)
    assert torch.equal(returns, targets)


def test_settings_reach_the_core_by_the_names_of_recipes(batch):
    raw = {"segmenter": "ngram", "pooling": "mean", "rho": 0.9, "lam_value": 1.0, "whiten": "none"}
    raw |= {"sigma": "equal"}
    advantages, returns = macro_advantages(batch, read_settings(raw, "macro"), gamma=1.0, lam=0.5)
    segments = segment_batch(batch, MacroSettings())
    expected = macro_gae(
        batch.rewards, batch.values, segments, lam=0.5, rho=0.9, pooling="mean", lam_value=1.0
    )
    assert torch.equal(advantages, expected[0])
    assert torch.equal(returns, expected[1])


def test_credit_at_boundaries(batch):
    segments = segment_batch(batch, MacroSettings())
    settings = MacroSettings(credit="boundary", lam_value=1.0, whiten="none")
    advantages, returns = macro_advantages(batch, settings, gamma=1.0, lam=0.9)
    expected = boundary_gae(batch.rewards, batch.values, segments, lam=0.9, lam_value=1.0)
    assert torch.equal(advantages, expected[0])
    assert torch.equal(returns, expected[1])


def test_turns_with_sigma_start_are_turn_level_gae_written_as_a_loop(batch):
    settings = MacroSettings(segmenter=Turns(), sigma="start", whiten="none")
    advantages, returns = macro_advantages(batch, settings, gamma=0.97, lam=0.8)
    for row in range(3):
        turns, inside = [], False
        for t, counted in enumerate(batch.mask[row].tolist()):
            if counted and not inside:
                turns.append([])
            if counted:
                turns[-1].append(t)
            inside = bool(counted)
        next_value = next_advantage = 0.0
        for turn in reversed(turns):
            reward = sum(batch.rewards[row, t].item() for t in turn)
            value = batch.values[row, turn[0]].item()
            delta = reward + 0.97 * next_value - value
            next_advantage = delta + 0.97 * 0.8 * next_advantage
            next_value = value
            for t in turn:
                assert advantages[row, t].item() == pytest.approx(next_advantage, abs=1e-5)
                assert returns[row, t].item() == pytest.approx(next_advantage + value, abs=1e-5)


def test_constituents_are_parsed_from_the_tokens(batch, tokenizer):
    settings = read_settings({"segmenter": {"type": "constituents", "cutoff": 4}}, "macro")
    text = TokenText(settings.segmenter, tokenizer)
    segments = segment_batch(batch, settings, text)
    rule = Constituents(cutoff=4)
    spans = Parsing("english", tokenizer, workers=0).begin([tokenizer.encode(t) for t in TEXTS])()
    expected = segment(rule, Responses(batch.tokens, batch.mask.bool(), spans=spans))
    assert torch.equal(segments.ids, expected.ids)
    assert (
        segments.macro_mask.sum()
        > segment_batch(batch, MacroSettings(segmenter=Turns())).macro_mask.sum()
    )


def test_random_ngrams_depend_on_the_response_alone(batch):
    settings = MacroSettings(segmenter=RandomNGram(lengths=(1, 2, 3), repeats=4))
    whole = segment_batch(batch, settings).ids
    assert torch.equal(whole, segment_batch(batch, settings).ids)
    fields = {name: x[1:2] for name, x in vars(batch).items() if x is not None}
    assert torch.equal(segment_batch(EngineBatch(**fields), settings).ids[0], whole[1])
    other = EngineBatch(**{**fields, "tokens": batch.tokens[1:2] + 1})
    assert not torch.equal(segment_batch(other, settings).ids[0], whole[1])


def test_tokens_beyond_the_tokenizer_are_no_words(tokenizer):
    """Models embed more tokens than their tokenizers have, and untrained ones sample these."""
    tokens = torch.tensor([[len(tokenizer) + 40, 3]])
    batch = EngineBatch(torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2), tokens)
    settings = MacroSettings(segmenter=Words())
    segments = segment_batch(batch, settings, TokenText(Words(), tokenizer))
    assert segments.mask.all()


def test_metrics_count_macro_actions(batch):
    metrics = segment_metrics(segment_batch(batch, MacroSettings(segmenter=NGram(1))))
    tokens = batch.mask.sum().item()
    assert metrics["macro/actions"] == tokens
    assert metrics["macro/tokens_per_action"] == 1
    assert metrics["macro/actions_per_response"] == pytest.approx(tokens / 3)


@pytest.mark.parametrize(
    ("missing", "rule", "words"),
    [
        ("values", NGram(5), "critic"),
        ("ref_logprobs", Perplexity(), "reference"),
        ("logprobs", Surprise(), "policy that sampled"),
        ("tokens", Words(), "text of the tokens"),
    ],
)
def test_what_is_missing_is_named(batch, tokenizer, missing, rule, words):
    batch = EngineBatch(**{**vars(batch), missing: None})
    with pytest.raises(EngineError, match=words):
        macro_advantages(
            batch,
            MacroSettings(segmenter=rule),
            gamma=1.0,
            lam=0.95,
            text=TokenText(rule, tokenizer),
        )


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"segmentr": "ngram"}, "algorithm.macro.segmentr: .*Did you mean segmenter"),
        ({"segmenter": "ngrm"}, "algorithm.macro.segmenter.type: .*Did you mean ngram"),
        ({"segmenter": {"type": "ngram", "m": 3}}, "algorithm.macro.segmenter.m: "),
        ({"segmenter": {"type": "ngram", "n": 0}}, "whole number from 1"),
        ({"sigma": "begin"}, "algorithm.macro.sigma"),
        ({"rho": 2.0}, "rho must be .*at most 1"),
        ({"credit": "boundary", "value_level": "macro"}, "value_level must be token"),
    ],
)
def test_mistakes_in_settings_are_sentences(raw, words):
    with pytest.raises(ConfigError, match=words):
        read_settings(raw, "algorithm.macro")


def test_a_rule_of_the_users_own(batch, monkeypatch, tmp_path):
    (tmp_path / "my_engine_rule.py").write_text(
        "def pairs(responses):\n"
        "    starts = responses.mask.cumsum(1) % 2 == 1\n"
        "    return starts\n"
        "def broken(responses):\n"
        "    raise RuntimeError('no idea')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = read_settings({"segmenter": "my_engine_rule:pairs"}, "macro")
    assert segment_batch(batch, settings).lengths.max() == 2
    with pytest.raises(SegmenterError, match="no idea"):
        segment_batch(batch, read_settings({"segmenter": "my_engine_rule:broken"}, "macro"))


CRITIC_FREE = ("macro_rloo", "macro_grpo", "macro_state")


@pytest.fixture(scope="module")
def grouped():
    """Responses of one to three turns to two prompts, in mixed order."""
    torch.manual_seed(1)
    mask = torch.ones(6, 12)
    mask[0, 3:5] = mask[1, 2:4] = mask[2, 6:9] = mask[4, 3:5] = 0
    mask[4, 7:9] = 0
    mask[3, 8:], mask[5, 5:] = 0, 0
    tokens = torch.randint(5, 9, (6, 12))
    tokens[4, 3:5] = tokens[0, 3:5]  # what rows 0 and 4 read before their second turns
    tokens[2, 6:9] = tokens[4, 7:9].repeat(2)[:3]
    return EngineBatch(torch.randn(6, 12) * mask, mask, tokens=tokens, groups=list("pqpppq"))


def loop_over_macro_actions(batch, segments, groups, gamma, baseline):
    """`macro_rloo` and `macro_grpo` in float64, one macro action after another."""
    to_go, size = [], segments.mask.shape
    for row in range(size[0]):
        later, of_row = 0.0, {}
        for action in reversed(range(int(segments.macro_mask[row].sum()))):
            on = segments.mask[row] & (segments.ids[row] == action)
            later = batch.rewards[row, on].double().sum().item() + gamma * later
            of_row[action] = later
        to_go.append(of_row)
    advantages = torch.zeros(size, dtype=torch.float64)
    for row in range(size[0]):
        group = [to_go[i][0] for i in range(size[0]) if groups[i] == groups[row]]
        others = [to_go[i][0] for i in range(size[0]) if groups[i] == groups[row] and i != row]
        for action, value in to_go[row].items():
            on = segments.mask[row] & (segments.ids[row] == action)
            if not others:
                continue
            if baseline == "others":
                advantages[row, on] = value - sum(others) / len(others)
            else:
                spread = torch.tensor(group, dtype=torch.float64).std() + 1e-6
                advantages[row, on] = (value - sum(group) / len(group)) / spread
    return advantages


@pytest.mark.parametrize("rule", [NGram(math.inf), NGram(3), Turns()])
@pytest.mark.parametrize(("estimator", "baseline"), [("macro_rloo", "others"), ("macro_grpo", "")])
def test_critic_free_estimators_are_a_loop_over_groups(grouped, rule, estimator, baseline):
    groups = ["p", "q", "p", "alone", "p", "q"]
    batch = replace(grouped, groups=groups)
    settings = MacroSettings(segmenter=rule)
    options = {"gamma": 0.9, "lam": 1.0, "estimator": estimator}
    advantages, returns = macro_advantages(batch, settings, **options)
    segments = segment_batch(batch, settings)
    expected = loop_over_macro_actions(batch, segments, groups, 0.9, baseline)
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(returns, advantages)
    assert (advantages[3] == 0).all()


def test_the_deviation_of_groups_can_be_left_out(grouped):
    settings = MacroSettings(segmenter=NGram(math.inf))
    options = {"gamma": 1.0, "lam": 1.0, "estimator": "macro_grpo", "scale": False}
    batch = replace(grouped, groups=list("ppppqq"))
    advantages, _ = macro_advantages(batch, settings, **options)
    scores = batch.rewards.sum(dim=1)
    torch.testing.assert_close(advantages[:4, 0], scores[:4] - scores[:4].mean())


def test_macro_state_adds_a_loop_over_states(grouped):
    """States by name: turns of one prompt with equal names, in units of their deviation."""
    names = [["s", "x"], ["s", "y"], ["s", "x"], ["s"], ["s", "x", "w"], ["s"]]
    batch = replace(grouped, turn_states=names)
    settings = MacroSettings(segmenter=Turns())
    both, alone = (
        macro_advantages(batch, settings, gamma=0.9, lam=1.0, estimator=name)[0]
        for name in ("macro_state", "macro_grpo")
    )
    segments = segment_batch(batch, settings)
    turns = []
    for row, group in enumerate(batch.groups):
        later = 0.0
        for action in reversed(range(int(segments.macro_mask[row].sum()))):
            on = segments.mask[row] & (segments.ids[row] == action)
            later = batch.rewards[row, on].double().sum().item() + 0.9 * later
            turns.append((row, on, (group, names[row][action]), later))
    expected = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for row, on, state, value in turns:
        same = torch.tensor([v for *_, s, v in turns if s == state], dtype=torch.float64)
        if len(same) > 1:
            expected[row, on] = (value - same.mean()) / (same.std() + 1e-6)
    torch.testing.assert_close((both - alone).double(), expected, rtol=1e-4, atol=1e-5)
    assert len({state for *_, state, _ in turns}) < len(turns)


def test_states_without_names_are_what_was_read_last(grouped):
    batch = grouped
    states = turn_states(batch, [0, 1, 0, 0, 0, 1], batch.mask.bool())
    assert states[0, 0] == states[2, 0] == states[3, 0] == states[4, 0] != states[1, 0]
    assert states[0, 5] == states[4, 5] != states[0, 0]  # two tokens that both had read
    assert len({states[4, t].item() for t in (0, 5, 9)}) == 3
    other = replace(batch, prompts=[[1], [1], [2], [1], [1], [1]])  # a later step of its episode
    states = turn_states(other, [0, 1, 0, 0, 0, 1], batch.mask.bool())
    assert states[0, 0] == states[3, 0] != states[2, 0]


def test_a_masked_response_counts_in_the_baseline():
    mask = torch.ones(2, 3)
    mask[1] = 0
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 5.0]])
    batch = EngineBatch(rewards, mask, groups=[0, 0])
    settings = MacroSettings(segmenter=NGram(math.inf))
    advantages, _ = macro_advantages(batch, settings, gamma=1.0, lam=1.0, estimator="macro_rloo")
    assert advantages.tolist() == [[-4.0] * 3, [0.0] * 3]


def test_rewards_of_turns_are_placed_at_their_ends(grouped):
    given = [[1.0, 2.0], [0.5, 0.5], [1, 3], [2.0], [1.0, 0.0, -1.0], [4.0]]
    batch = replace(grouped, groups=list("pppqqq"), turn_rewards=given)
    settings = MacroSettings(segmenter=Turns())
    options = {"gamma": 1.0, "lam": 1.0, "estimator": "macro_rloo"}
    found, _ = macro_advantages(batch, settings, **options)
    placed = batch.rewards.clone()
    for row, numbers in enumerate(given):
        on = batch.mask[row].tolist()
        ends = [t for t in range(12) if on[t] and (t == 11 or not on[t + 1])]
        for t, x in zip(ends, numbers, strict=True):
            placed[row, t] += x
    expected, _ = macro_advantages(
        replace(batch, rewards=placed, turn_rewards=None), settings, **options
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wrong", [[1.0], [1.0, 2.0, 3.0], 1.0, None])
def test_rewards_of_turns_that_do_not_fit_are_a_sentence(grouped, wrong):
    given = [wrong, [0.0, 0.0], [0.0, 0.0], [0.0], [0.0, 0.0, 0.0], [0.0]]
    batch = replace(grouped, groups=list("pppqqq"), turn_rewards=given)
    with pytest.raises(EngineError, match="Row 0 has 2 turns, and its turn_rewards are"):
        macro_advantages(batch, MacroSettings(), gamma=1.0, lam=1.0, estimator="macro_rloo")


@pytest.mark.parametrize("estimator", CRITIC_FREE)
@pytest.mark.parametrize("groups", [None, list("abcdef")])
def test_estimators_without_groups_say_so(grouped, estimator, groups):
    with pytest.raises(EngineError, match="compares the responses to one prompt"):
        macro_advantages(
            replace(grouped, groups=groups),
            MacroSettings(segmenter=Turns()),
            gamma=1.0,
            lam=1.0,
            estimator=estimator,
        )


def test_adaptive_lambda_follows_the_number_of_macro_actions(batch):
    raw = {"segmenter": "turns", "lam": "adaptive", "lam_alpha": 0.8, "lam_value": 1.0}
    settings = read_settings({**raw, "whiten": "none"}, "macro")
    found = macro_advantages(batch, settings, gamma=1.0, lam=0.3)
    segments = segment_batch(batch, settings)
    lam = adaptive_lam(segments, 0.8)
    assert lam.unique().numel() > 1
    options = {"lam": lam, "lam_value": 1.0, "sigma": "start"}
    expected = macro_gae(batch.rewards, batch.values, segments, **options)
    assert all(map(torch.equal, found, expected))


def test_rows_of_an_episode_are_joined_in_the_order_of_their_steps(grouped):
    """Rows in any order, with gaps in their steps: as one row per episode, and back."""
    episodes = EpisodeSteps.of(list("xyxzyx"), [7, 0, 2, 5, 1, 4])
    values = torch.arange(72.0).view(6, 12)
    joined = episodes.join(values)
    assert joined.shape == (3, 3 * 13)
    assert joined[0].view(3, 13)[:, 0].tolist() == [24.0, 60.0, 0.0]  # rows 2, 5, 0
    assert torch.equal(episodes.split(joined), values)
    assert episodes.last_steps.tolist() == [2, 1, 2, 0, 1, 2]
    with pytest.raises(EngineError, match="Episode x has 2 rows for its step 2"):
        EpisodeSteps.of(["x", "x"], [2, 2])


@pytest.mark.parametrize("wrong", ["room", ["s"], None])
def test_states_without_a_name_for_each_turn_are_a_sentence(grouped, wrong):
    batch = replace(grouped, turn_states=[wrong, *[["s"] * 3] * 5])
    settings = MacroSettings(segmenter=Turns())
    with pytest.raises(EngineError, match="Row 0 has 2 turns, and its turn_states"):
        macro_advantages(batch, settings, gamma=1.0, lam=1.0, estimator="macro_state")
