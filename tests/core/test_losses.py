import math

import pytest
import reference
import torch
from cases import batches, numbers, seeds
from hypothesis import given
from hypothesis import strategies as st

from marlhf.core import (
    Segments,
    dpo_loss,
    importance_weights,
    masked_mean,
    moments,
    ppo_policy_loss,
    ppo_value_loss,
    reward_loss,
    sft_loss,
    whiten,
)

ratios = st.sampled_from(["token", "macro", "macro_mean"])
sigmas = st.sampled_from(["equal", "unit", "position", "start"])
bounds = st.floats(0.05, 0.4)


def policy_inputs(segments: Segments, seed: int):
    old = numbers(segments, seed)
    new = old + numbers(segments, seed + 1, scale=0.3)
    return new, old, segments.spread(segments.first(numbers(segments, seed + 2)))


@given(
    batches(), seeds, ratios, st.sampled_from([None, 1.5, 3.0]), bounds | st.tuples(bounds, bounds)
)
def test_policy_loss_is_the_obvious_loop(segments, seed, ratio, dual_clip, clip):
    inputs = policy_inputs(segments, seed)
    options = {"clip": clip, "dual_clip": dual_clip, "ratio": ratio}
    got = ppo_policy_loss(*inputs, segments.mask, segments=segments, **options)
    rows = [x.tolist() for x in (*inputs, segments.ids, segments.mask)]
    wanted = reference.policy_loss(*rows, **options)
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64))


@given(batches(), seeds, ratios, st.floats(0.5, 4))
def test_importance_weights_are_the_obvious_loop(segments, seed, ratio, cap):
    new, sampled, _ = policy_inputs(segments, seed)
    options = {"cap": cap, "ratio": ratio}
    got = importance_weights(new, sampled, segments.mask, segments=segments, **options)
    rows = [x.tolist() for x in (new, sampled, segments.ids, segments.mask)]
    wanted = reference.importance_weights(*rows, **options)
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64).reshape(got.shape))


def test_weighted_samples_have_the_gradient_of_the_policy_itself():
    """Every token of a vocabulary, as often as another policy draws it: an exact expectation."""
    logits = torch.randn(1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_(True)
    logprobs, sampled = logits.log_softmax(dim=1), torch.full((1, 5), 0.2).double().log()
    advantages, mask = torch.arange(5.0)[None].double(), torch.ones(1, 5).bool()
    weights = importance_weights(logprobs, sampled, mask, cap=100.0)
    assert not weights.requires_grad
    loss = ppo_policy_loss(logprobs, logprobs.detach(), weights * advantages, mask)
    [stale] = torch.autograd.grad(loss, logits, retain_graph=True)
    [fresh] = torch.autograd.grad(-(logprobs.exp() * advantages).sum(), logits)
    torch.testing.assert_close(stale, fresh)


def test_a_weight_beyond_all_numbers_is_the_cap():
    logprobs, sampled = torch.zeros(1, 2), torch.full((1, 2), -500.0)
    weights = importance_weights(logprobs, sampled, torch.ones(1, 2).bool(), cap=2.0)
    assert weights.tolist() == [[2.0, 2.0]]
    with pytest.raises(ValueError, match="cap must be positive"):
        importance_weights(logprobs, sampled, torch.ones(1, 2).bool(), cap=0.0)


@given(batches(), seeds, st.sampled_from(["token", "macro"]), sigmas, st.sampled_from([None, 0.2]))
def test_value_loss_is_the_obvious_loop(segments, seed, level, sigma, clip):
    old = numbers(segments, seed)
    new = old + numbers(segments, seed + 1, scale=0.3)
    returns = segments.spread(segments.first(numbers(segments, seed + 2)))
    options = {"clip": clip, "level": level, "sigma": sigma}
    got = ppo_value_loss(new, old, returns, segments.mask, segments=segments, **options)
    rows = [x.tolist() for x in (new, old, returns, segments.ids, segments.mask)]
    wanted = reference.value_loss(*rows, **options)
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64))


@given(batches(max_rows=3, max_tokens=6), seeds, ratios, sigmas)
def test_gradients_match_finite_differences(segments, seed, ratio, sigma):
    new, old, advantages = (x.nan_to_num(0.1) for x in policy_inputs(segments, seed))

    def policy(x):
        return ppo_policy_loss(
            x, old, advantages, segments.mask, clip=0.2, ratio=ratio, segments=segments
        )

    def value(x):
        return ppo_value_loss(
            x, old, advantages, segments.mask, level="macro", sigma=sigma, segments=segments
        )

    for loss in (policy, value):
        assert torch.autograd.gradcheck(loss, (new.clone().requires_grad_(),))


@given(batches(), seeds)
def test_a_macro_ratio_is_the_product_of_its_token_ratios(segments, seed):
    new, old, advantages = policy_inputs(segments, seed)
    product = torch.ones_like(segments.sum(new))
    for i, (ids, mask) in enumerate(zip(segments.ids.tolist(), segments.mask.tolist())):
        for m, action in enumerate(reference.groups(ids, mask)):
            product[i, m] = math.prod((new - old)[i, t].exp().item() for t in action)
    got = ppo_policy_loss(
        new, old, advantages, segments.mask, clip=1e9, ratio="macro", segments=segments
    )
    wanted = masked_mean(-segments.first(advantages) * product, segments.macro_mask)
    torch.testing.assert_close(got, wanted)


@given(batches(), seeds, ratios)
def test_single_tokens_make_every_ratio_the_token_ratio(segments, seed, ratio):
    single = Segments.from_starts(segments.mask, segments.mask)
    new, old, advantages = policy_inputs(single, seed)
    token = ppo_policy_loss(new, old, advantages, single.mask)
    macro = ppo_policy_loss(new, old, advantages, single.mask, ratio=ratio, segments=single)
    torch.testing.assert_close(token, macro, rtol=0, atol=1e-14)


@given(batches(max_rows=5), seeds, st.integers(1, 4), ratios)
def test_micro_batches_add_up(segments, seed, size, ratio):
    new, old, advantages = policy_inputs(segments, seed)
    count = (segments.mask if ratio == "token" else segments.macro_mask).sum().clamp(min=1)

    def loss(rows: slice) -> torch.Tensor:
        part = Segments(segments.ids[rows], segments.mask[rows])
        return ppo_policy_loss(
            new[rows],
            old[rows],
            advantages[rows],
            part.mask,
            ratio=ratio,
            segments=part,
            num_tokens=count,
        )

    parts = [loss(slice(i, i + size)) for i in range(0, len(new), size)]
    torch.testing.assert_close(torch.stack(parts).sum(), loss(slice(None)))


def test_nan_at_padding_reaches_neither_loss_nor_gradient():
    mask = torch.tensor([[True, False]])
    bad = torch.tensor([[0.5, math.nan]])
    x = bad.clone().requires_grad_()
    loss = ppo_policy_loss(x, bad, bad, mask) + ppo_value_loss(x, bad, bad, mask)
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()
    assert x.grad[0, 1] == 0


def test_dual_clip_bounds_a_runaway_ratio():
    mask = torch.ones(1, 1).bool()
    new, old, advantage = torch.zeros(1, 1), torch.full((1, 1), -5.0), torch.full((1, 1), -2.0)
    assert ppo_policy_loss(new, old, advantage, mask) > 290  # 2 e^5
    assert ppo_policy_loss(new, old, advantage, mask, dual_clip=3.0) == 6.0


def test_dpo_by_hand():
    chosen, rejected = torch.tensor([-10.0]), torch.tensor([-12.0])
    ref_chosen, ref_rejected = torch.tensor([-11.0]), torch.tensor([-11.5])
    # (1 - -0.5) * 0.1 = 0.15
    loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.1)
    assert math.isclose(loss.item(), math.log(1 + math.exp(-0.15)), rel_tol=1e-6)
    smooth = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.1, label_smoothing=0.25)
    wanted = 0.75 * math.log(1 + math.exp(-0.15)) + 0.25 * math.log(1 + math.exp(0.15))
    assert math.isclose(smooth.item(), wanted, rel_tol=1e-6)


def test_reward_loss_by_hand():
    chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.5])
    wanted = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(0.5))) / 2
    assert math.isclose(reward_loss(chosen, rejected).item(), wanted, rel_tol=1e-6)
    margin = reward_loss(chosen[:1], rejected[:1], margin=torch.tensor([1.0]))
    assert math.isclose(margin.item(), math.log(2), rel_tol=1e-6)
    centred = reward_loss(chosen, rejected, center_coef=0.1) - reward_loss(chosen, rejected)
    assert math.isclose(centred.item(), 0.1 * (1 + 0.25) / 2, rel_tol=1e-5)
    halves = [reward_loss(chosen[i : i + 1], rejected[i : i + 1], num_pairs=2) for i in range(2)]
    assert math.isclose(sum(halves).item(), wanted, rel_tol=1e-6)


def test_sft_loss_by_hand():
    mask = torch.tensor([[True, True, False]])
    assert sft_loss(torch.tensor([[-1.0, -3.0, -9.0]]), mask) == 2.0


def test_whiten_by_hand():
    x = torch.tensor([[1.0, 3.0, math.nan]])
    mask = torch.tensor([[True, True, False]])
    white = whiten(x, mask)  # mean 2, unbiased variance 2
    torch.testing.assert_close(white, torch.tensor([[-1.0, 1.0, 0.0]]) / math.sqrt(2))
    kept = whiten(x, mask, shift_mean=False)
    torch.testing.assert_close(kept, torch.tensor([[1.0, 3.0, 0.0]]) / math.sqrt(2))


@given(batches(max_rows=5), seeds, st.integers(1, 4))
def test_whitening_by_parts_is_whitening_the_whole(segments, seed, size):
    x = numbers(segments, seed) + 1e3
    parts = range(0, len(x), size)
    stats = sum(moments(x[i : i + size], segments.mask[i : i + size]) for i in parts)
    white = [whiten(x[i : i + size], segments.mask[i : i + size], stats=stats) for i in parts]
    torch.testing.assert_close(torch.cat(white), whiten(x, segments.mask), atol=1e-6, rtol=1e-6)


def test_whitening_by_macro_action_gives_each_one_vote():
    segments = Segments(torch.tensor([[0, 0, 0, 1]]), torch.ones(1, 4).bool())
    x = torch.tensor([[1.0, 1.0, 1.0, 3.0]])
    stats = moments(segments.first(x), segments.macro_mask)
    white = whiten(x, segments.mask, stats=stats)
    torch.testing.assert_close(white, torch.tensor([[-1.0, -1.0, -1.0, 1.0]]) / math.sqrt(2))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_gives_zero(shape):
    x, mask = torch.zeros(shape), torch.zeros(shape).bool()
    segments = Segments.from_starts(mask, mask)
    for ratio in ("token", "macro"):
        assert ppo_policy_loss(x, x, x, mask, ratio=ratio, segments=segments) == 0
    assert ppo_value_loss(x, x, x, mask, level="macro", segments=segments) == 0
    assert whiten(x, mask).shape == shape


def test_bad_input_gets_a_sentence():
    x, mask = torch.ones(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match="pass `segments=`"):
        ppo_policy_loss(x, x, x, mask, ratio="macro")
    with pytest.raises(ValueError, match="pass `segments=`"):
        ppo_value_loss(x, x, x, mask, level="macro")
    with pytest.raises(ValueError, match="dual_clip must be larger than 1"):
        ppo_policy_loss(x, x, x, mask, dual_clip=0.5)
    with pytest.raises(ValueError, match="advantages must have the shape"):
        ppo_policy_loss(x, x, torch.ones(1, 3), mask)
    with pytest.raises(ValueError, match=r"rejected must have shape \[1\]"):
        reward_loss(torch.ones(1), torch.ones(2))
    with pytest.raises(ValueError, match=r"Use `mask\.bool"):
        masked_mean(x, x)
