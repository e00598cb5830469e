"""Masks with holes: what stands in a hole changes nothing, and no macro action spans one."""

import pytest
import reference
import torch
from cases import batches_with_holes, numbers, seeds
from hypothesis import given
from hypothesis import strategies as st

from marlhf.core import (
    Entropy,
    Learned,
    NGram,
    Perplexity,
    RandomNGram,
    Responses,
    Segments,
    Surprise,
    Turns,
    ValueChange,
    Vocabulary,
    boundary_gae,
    gae,
    macro_gae,
    rloo_advantages,
    segment,
    shape_rewards,
)

discounts = st.sampled_from([0.0, 0.5, 0.95, 1.0])
RULES = (
    NGram(2),
    RandomNGram(lengths=(1, 3), repeats=2),
    Perplexity("macro"),
    Perplexity("prefix"),
    Perplexity("token", max_length=2),
    Surprise(0.4),
    Entropy(0.5),
    ValueChange(threshold=0.5),
    Learned(0.5, entropy=1.0, value_fall=0.5, line=0.2),
    Turns(),
    Turns(max_length=2),
)


def runs(mask):
    """Lists of token positions of each unbroken run of a row."""
    found, before = [], False
    for t, real in enumerate(mask.tolist()):
        if real and not before:
            found.append([])
        if real:
            found[-1].append(t)
        before = real
    return found


@given(batches_with_holes(), seeds)
def test_no_rule_makes_an_action_that_spans_a_hole(given_segments, seed):
    mask = given_segments.mask
    logprobs = -numbers(given_segments, seed).abs().float()
    responses = Responses(
        mask.long(),
        mask,
        ref_logprobs=logprobs,
        logprobs=logprobs,
        entropy=-logprobs,
        values=logprobs,
        seeds=torch.arange(len(mask)),
        vocabulary=Vocabulary(*torch.eye(5, 2).bool()),
    )
    for rule in RULES:
        segments = segment(rule, responses).validate()
        for ids, row in zip(segments.ids, mask):
            by_run = [{int(ids[t]) for t in run} for run in runs(row)]
            assert sum(map(len, by_run)) == len(set().union(*by_run))


@given(batches_with_holes(), st.integers(1, 4))
def test_n_grams_and_caps_count_anew_after_a_hole(segments, n):
    for rule in (NGram(n), Turns(max_length=n)):
        cut = segment(rule, Responses(segments.mask.long(), segments.mask))
        for starts, row in zip(cut.starts.tolist(), segments.mask):
            assert all(starts[t] == (i % n == 0) for run in runs(row) for i, t in enumerate(run))


@given(batches_with_holes())
def test_turns_are_the_runs_of_the_mask(segments):
    turns = segment(Turns(), Responses(segments.mask.long(), segments.mask))
    assert turns.macro_mask.sum(dim=1).tolist() == [len(runs(row)) for row in segments.mask]


@given(batches_with_holes(), seeds, discounts, discounts)
def test_advantages_are_those_without_the_holes(segments, seed, gamma, lam):
    rewards, values = numbers(segments, seed), numbers(segments, seed + 1)
    options = {"gamma": gamma, "lam": lam}
    token = gae(rewards, values, segments.mask, **options)
    macro = macro_gae(rewards, values, segments, **options)
    boundary = boundary_gae(rewards, values, segments, **options)
    for i, mask in enumerate(segments.mask):
        row = [x[i].tolist() for x in (rewards, values, segments.ids, segments.mask)]
        given_macro = {**options, "rho": 1.0, "sigma": "equal", "pooling": "sum"}
        kept = [rewards[i][mask].tolist(), values[i][mask].tolist()]
        expected = (
            (boundary, reference.boundary_gae(*row, **options)),
            (macro, reference.macro_gae(*row, **given_macro)),
            (
                tuple(x[:, mask] for x in token),
                reference.gae(*kept, gamma, lam),
            ),
        )
        for ours, theirs in expected:
            for mine, wanted in zip(ours, theirs):
                wanted = torch.tensor(wanted, dtype=torch.float64)
                torch.testing.assert_close(mine[i], wanted)
        assert token[0][i][~mask].abs().sum() == 0


@given(batches_with_holes(), seeds)
def test_the_score_is_given_once_at_the_last_token(segments, seed):
    mask = segments.mask
    logprobs = numbers(segments, seed)
    scores = torch.arange(1.0, len(mask) + 1, dtype=torch.float64)
    rewards = shape_rewards(scores, logprobs, logprobs, mask, kl_coef=0.1)
    wanted = torch.where(mask.any(dim=1), scores, 0.0)
    torch.testing.assert_close(rewards.sum(dim=1), wanted)
    for row, reward in zip(mask, rewards):
        if row.any():
            assert reward[row.nonzero().max()] != 0


@given(batches_with_holes(), seeds)
def test_packing_tokens_and_unpacking_is_nothing(segments, seed):
    x = numbers(segments, seed)
    tokens = Segments.from_starts(segments.mask, segments.mask)
    packed = tokens.sum(x)
    for row, mask, before in zip(packed, segments.mask, x):
        assert row[: int(mask.sum())].tolist() == before[mask].tolist()
        assert not row[int(mask.sum()) :].any()
    torch.testing.assert_close(tokens.spread(packed), torch.where(segments.mask, x, 0.0))


def test_split_last_splits_the_last_token_of_the_row_alone():
    mask = torch.tensor([[True, True, False, True, True]])
    segments = Segments.from_starts(torch.zeros(1, 5).bool(), mask, split_last=True)
    assert segments.starts.tolist() == [[True, False, False, True, True]]


def test_rloo_credits_each_turn_with_what_is_still_to_come():
    mask = torch.tensor([[True, False, True], [True, True, True]])
    rewards = torch.tensor([[1.0, 9.0, 2.0], [0.0, 0.0, 4.0]])
    turns = segment(Turns(), Responses(mask.long(), mask))
    # the other's whole return: 4 and 3; to go: 3, then 2 | 4
    expected = torch.tensor([[-1.0, 0.0, -2.0], [1.0, 1.0, 1.0]])
    torch.testing.assert_close(rloo_advantages(rewards, 2, turns), expected)


def test_surprise_needs_the_policys_log_probs():
    mask = torch.ones(1, 3).bool()
    with pytest.raises(ValueError, match=r"Surprise needs Responses\.logprobs"):
        Surprise()(Responses(mask.long(), mask))
    with pytest.raises(ValueError, match="logprobs must have the shape of the mask"):
        Responses(mask.long(), mask, logprobs=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="probability must be above 0"):
        Surprise(0.0)
