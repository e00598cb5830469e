"""Macro advantages as engines call for them: the same numbers as marlhf.core, or a sentence."""

import math

import pytest
import torch

from marlhf.config.recipe_files import ConfigError
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
    boundary_gae,
    macro_gae,
    moments,
    segment,
    whiten,
)
from marlhf.engines.advantages import (
    EngineBatch,
    EngineError,
    MacroSettings,
    TokenText,
    macro_advantages,
    read_settings,
    segment_batch,
    segment_metrics,
)
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
        rewards=torch.randn(shape),
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
    fields = {name: x[1:2] for name, x in vars(batch).items()}
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
