import math

import pytest
import reference
import torch
from cases import batches, batches_with_holes, numbers, seeds
from hypothesis import given
from hypothesis import strategies as st

from marlhf.core import (
    NGram,
    Responses,
    Segments,
    adaptive_lam,
    at_last_token,
    boundary_gae,
    gae,
    group_advantages,
    kl_estimate,
    macro_gae,
    overlong_penalty,
    pool_rewards,
    rloo_advantages,
    segment,
    shape_rewards,
    state_advantages,
)

pytestmark = pytest.mark.slow  # all of it together
discounts = st.one_of(st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.floats(0, 1))
sigmas = st.sampled_from(["equal", "unit", "position", "start"])
poolings = st.sampled_from(["sum", "mean"])


def cut(n: float, mask: torch.Tensor) -> Segments:
    return segment(NGram(n), Responses(mask.long(), mask))


def test_macro_gae_by_hand():
    pairs = Segments(ids=torch.tensor([[0, 0, 1, 1]]), mask=torch.ones(1, 4).bool())
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    values = torch.tensor([[0.2, 0.4, 0.5, 0.7]])  # per macro: 0.3, 0.6
    advantages, returns = macro_gae(rewards, values, pairs, lam=0.5)
    # second: 1 - 0.6 = 0.4;  first: (0.6 - 0.3) + 0.5 * 0.4 = 0.5
    torch.testing.assert_close(advantages, torch.tensor([[0.5, 0.5, 0.4, 0.4]]))
    torch.testing.assert_close(returns, torch.tensor([[0.8, 0.8, 1.0, 1.0]]))


def test_boundary_gae_by_hand():
    pairs = Segments(ids=torch.tensor([[0, 0, 1, 1]]), mask=torch.ones(1, 4).bool())
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    values = torch.tensor([[0.2, 0.4, 0.5, 0.7]])  # deltas: 0.2, 0.1, 0.2, 0.3
    advantages, returns = boundary_gae(rewards, values, pairs, lam=0.5)
    # 0.3;  0.2 + 0.3 = 0.5;  0.1 + 0.5 * 0.5 = 0.35;  0.2 + 0.35 = 0.55
    torch.testing.assert_close(advantages, torch.tensor([[0.55, 0.35, 0.5, 0.3]]))
    torch.testing.assert_close(returns, advantages + values)
    _, whole = boundary_gae(rewards, values, pairs, lam=0.5, lam_value=1.0)
    torch.testing.assert_close(whole, torch.ones(1, 4))  # what really comes


@given(batches(max_tokens=40), seeds, discounts, discounts)
def test_boundary_gae_is_the_obvious_loop(segments, seed, gamma, lam):
    rewards, values = numbers(segments, seed), numbers(segments, seed + 1)
    got = boundary_gae(rewards, values, segments, gamma=gamma, lam=lam)
    for i in range(len(rewards)):
        row = (x[i].tolist() for x in (rewards, values, segments.ids, segments.mask))
        for mine, wanted in zip(got, reference.boundary_gae(*row, gamma=gamma, lam=lam)):
            torch.testing.assert_close(mine[i], torch.tensor(wanted, dtype=torch.float64))


@given(batches(max_tokens=40), seeds, discounts, discounts)
def test_boundaries_everywhere_are_plain_gae_and_nowhere_monte_carlo(segments, seed, gamma, lam):
    rewards, values = numbers(segments, seed), numbers(segments, seed + 1)
    mask, options = segments.mask, {"gamma": gamma, "lam": lam}
    plain = gae(rewards, values, mask, **options)
    torch.testing.assert_close(boundary_gae(rewards, values, cut(1, mask), **options), plain)
    whole = boundary_gae(rewards, values, cut(math.inf, mask), **options)
    torch.testing.assert_close(whole, gae(rewards, values, mask, gamma=gamma, lam=1.0))


@given(batches(), seeds, discounts, discounts, sigmas)
def test_the_critic_may_learn_from_another_lambda(segments, seed, lam, lam_value, sigma):
    rewards, values = numbers(segments, seed), numbers(segments, seed + 1)
    options = {"sigma": sigma}
    advantages, returns = macro_gae(
        rewards, values, segments, lam=lam, lam_value=lam_value, **options
    )
    assert torch.equal(advantages, macro_gae(rewards, values, segments, lam=lam, **options)[0])
    expected = macro_gae(rewards, values, segments, lam=lam_value, **options)[1]
    torch.testing.assert_close(returns, expected)
    with pytest.raises(ValueError, match="lam_value must lie between 0 and 1"):
        macro_gae(rewards, values, segments, lam_value=1.5)


@given(batches_with_holes(), seeds, discounts, st.floats(0.01, 2.0), sigmas)
def test_adaptive_lambda_is_each_rows_own(segments, seed, gamma, alpha, sigma):
    rewards, values = numbers(segments, seed), numbers(segments, seed + 1)
    lam = adaptive_lam(segments, alpha).double()
    mask = segments.mask
    macro = macro_gae(rewards, values, segments, gamma=gamma, lam=lam, sigma=sigma, lam_value=1.0)
    boundary = boundary_gae(rewards, values, segments, gamma=gamma, lam=lam, lam_value=1.0)
    token = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i in range(len(mask)):
        row = [x[i].tolist() for x in (rewards, values, segments.ids, mask)]
        actions = len(reference.groups(*row[2:]))
        own = reference.adaptive_lam(max(actions, 1), alpha)
        assert float(lam[i]) == pytest.approx(own, abs=1e-6)
        own, options = float(lam[i]), {"gamma": gamma, "rho": 1.0, "sigma": sigma, "pooling": "sum"}
        for at, policy, critic in (
            (macro, own, 1.0),
            (boundary, own, 1.0),
            (token, own, own),
        ):
            for mine, which, lam_here in ((at[0], 0, policy), (at[1], 1, critic)):
                if at is macro:
                    wanted = reference.macro_gae(*row, **options, lam=lam_here)[which]
                elif at is boundary:
                    wanted = reference.boundary_gae(*row, gamma=gamma, lam=lam_here)[which]
                else:
                    kept = [rewards[i][mask[i]].tolist(), values[i][mask[i]].tolist()]
                    wanted = reference.gae(*kept, gamma, lam_here)[which]
                    mine = mine[:, mask[i]]
                torch.testing.assert_close(mine[i], torch.tensor(wanted, dtype=torch.float64))


def test_lambdas_of_rows_must_be_one_per_row():
    segments = cut(1, torch.ones(2, 3).bool())
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"lam must have shape \[B\]"):
        macro_gae(zeros, zeros, segments, lam=torch.ones(2, 3))
    with pytest.raises(ValueError, match="alpha must be positive"):
        adaptive_lam(segments, alpha=0.0)


@given(st.integers(0, 60), st.integers(0, 40), st.integers(1, 20))
def test_overlong_penalty_is_the_papers(length, start, more):
    got = overlong_penalty(torch.tensor([length]).double(), start, start + more)
    assert float(got) == pytest.approx(-reference.overlong(length, start, start + more))


def test_overlong_penalty_refuses_an_empty_range():
    with pytest.raises(ValueError, match="start must be at least 0 and less than end"):
        overlong_penalty(torch.ones(1), 5, 5)


def test_discounts_inside_an_action_have_the_precision_of_the_rewards():
    whole = cut(math.inf, torch.ones(1, 3).bool())
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    assert pool_rewards(rewards, whole, rho=0.1)[0, 0].item() == pytest.approx(0.01, rel=1e-12)


@given(batches(), seeds, discounts, discounts, discounts, sigmas, poolings)
def test_macro_gae_is_the_obvious_loop(segments, seed, gamma, lam, rho, sigma, pooling):
    options = {"gamma": gamma, "lam": lam, "rho": rho, "sigma": sigma, "pooling": pooling}
    rewards, values = numbers(segments, seed), numbers(segments, seed + 1)
    got = macro_gae(rewards, values, segments, **options)
    for i in range(len(rewards)):
        row = (x[i].tolist() for x in (rewards, values, segments.ids, segments.mask))
        for mine, wanted in zip(got, reference.macro_gae(*row, **options)):
            torch.testing.assert_close(mine[i], torch.tensor(wanted, dtype=torch.float64))


@given(batches(max_tokens=70), seeds, discounts, discounts)
def test_gae_is_the_obvious_loop(segments, seed, gamma, lam):
    rewards, values = numbers(segments, seed), numbers(segments, seed + 1)
    advantages, returns = gae(rewards, values, segments.mask, gamma=gamma, lam=lam)
    for i, mask in enumerate(segments.mask):
        a, r = reference.gae(rewards[i][mask].tolist(), values[i][mask].tolist(), gamma, lam)
        torch.testing.assert_close(advantages[i][mask], torch.tensor(a, dtype=torch.float64))
        torch.testing.assert_close(returns[i][mask], torch.tensor(r, dtype=torch.float64))
        assert advantages[i][~mask].tolist() == [0.0] * int((~mask).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(batches(max_tokens=40), seeds, discounts, sigmas, poolings)
def test_one_token_macros_are_plain_gae(dtype, segments, seed, lam, sigma, pooling):
    rewards, values = (numbers(segments, seed + i).to(dtype) for i in range(2))
    plain = gae(rewards, values, segments.mask, lam=lam)
    single = cut(1, segments.mask)
    macro = macro_gae(rewards, values, single, lam=lam, sigma=sigma, pooling=pooling)
    if segments.mask[:, 0].all():  # the same columns, so the same bits
        assert torch.equal(plain[0], macro[0])
        assert torch.equal(plain[1], macro[1])
    torch.testing.assert_close(plain, macro)


@given(batches(), seeds, discounts, discounts)
def test_one_action_a_response_is_a_bandit(segments, seed, gamma, lam):
    rewards, values = numbers(segments, seed), numbers(segments, seed + 1)
    whole = cut(math.inf, segments.mask)
    advantages, returns = macro_gae(rewards, values, whole, gamma=gamma, lam=lam)
    for i, mask in enumerate(segments.mask):
        if mask.any():
            total, mean = rewards[i][mask].sum(), values[i][mask].mean()
            torch.testing.assert_close(returns[i][mask], total.expand(int(mask.sum())))
            torch.testing.assert_close(advantages[i][mask], (total - mean).expand(int(mask.sum())))


@given(batches(), seeds, sigmas, poolings)
def test_advantages_are_constant_within_an_action(segments, seed, sigma, pooling):
    rewards, values = numbers(segments, seed), numbers(segments, seed + 1)
    for x in macro_gae(rewards, values, segments, sigma=sigma, pooling=pooling):
        assert torch.equal(segments.spread(segments.first(x)), x)


@given(batches(), seeds, sigmas, st.integers(1, 5))
def test_padding_and_row_order_change_nothing(segments, seed, sigma, more):
    rewards, values = numbers(segments, seed), numbers(segments, seed + 1)
    wanted = macro_gae(rewards, values, segments, sigma=sigma)
    flip = [x.flip(0) for x in (rewards, values, segments.ids, segments.mask)]
    wide = [torch.nn.functional.pad(x, (0, more)) for x in flip]
    got = macro_gae(wide[0], wide[1], Segments(wide[2], wide[3]), sigma=sigma)
    for w, g in zip(wanted, got):
        torch.testing.assert_close(g[:, : w.shape[1]].flip(0), w)


@given(batches(max_rows=2, max_tokens=6), seeds, sigmas, poolings)
def test_gradients_of_macro_gae(segments, seed, sigma, pooling):
    rewards, values = (numbers(segments, seed + i).nan_to_num(0.3) for i in range(2))

    def run(r, v):
        a, q = macro_gae(r, v, segments, gamma=0.9, lam=0.8, rho=0.7, sigma=sigma, pooling=pooling)
        return a + 2 * q

    assert torch.autograd.gradcheck(run, (rewards.requires_grad_(), values.requires_grad_()))


def test_mean_pooling_is_a_weaker_kl():
    """With n = 5 the authors' mean divides both the score and the penalty by five."""
    mask = torch.ones(1, 10).bool()
    rewards = torch.full((1, 10), -0.1)
    fives = cut(5, mask)
    torch.testing.assert_close(pool_rewards(rewards, fives)[0, :2], torch.tensor([-0.5, -0.5]))
    mean = pool_rewards(rewards, fives, pooling="mean")
    torch.testing.assert_close(mean[0, :2], torch.tensor([-0.1, -0.1]))


def test_official_preset_by_hand():
    """Mean pooling, score clipped to 2.5, the last token an action of its own."""
    mask = torch.ones(1, 5).bool()
    logprobs, ref = torch.zeros(1, 5), torch.full((1, 5), -1.0)
    rewards = shape_rewards(torch.tensor([9.0]), logprobs, ref, mask, 0.1, score_clip=2.5)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, -0.1, -0.1, -0.1, 2.4]]))
    starts = NGram(3)(Responses(mask.long(), mask))
    segments = Segments.from_starts(starts, mask, split_last=True)
    assert segments.ids.tolist() == [[0, 0, 0, 1, 2]]
    values = torch.tensor([[0.0, 0.3, 0.6, 1.0, 2.0]])  # per macro: 0.3, 1.0, 2.0
    advantages, _ = macro_gae(rewards, values, segments, lam=0.5, pooling="mean")
    # third: 2.4 - 2 = 0.4; second: -0.1 + 2 - 1 + 0.5 * 0.4 = 1.1; first: -0.1 + 1 - 0.3 + 0.55
    torch.testing.assert_close(advantages, torch.tensor([[1.15, 1.15, 1.15, 1.1, 0.4]]))


def test_shape_rewards_by_hand():
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    logprobs = torch.where(mask, torch.tensor(-1.0), math.nan)
    ref = torch.where(mask, torch.tensor(-1.5), math.nan)
    rewards = shape_rewards(torch.tensor([1.0, -1.0, 7.0]), logprobs, ref, mask, 0.2)
    wanted = [[-0.1, 0.9, 0.0], [-0.1, -0.1, -1.1], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(rewards, torch.tensor(wanted))


def test_rewards_of_tokens_stay_where_they_are_earned():
    mask = torch.tensor([[True, True, False, True]])
    logprobs, ref = torch.where(mask, -1.0, math.nan), torch.where(mask, -1.5, math.nan)
    earned = torch.tensor([[2.0, 0.0, 9.0, -4.0]])  # nothing is earned in a hole
    rewards = shape_rewards(earned, logprobs, ref, mask, 0.2)
    torch.testing.assert_close(rewards, torch.tensor([[1.9, -0.1, 0.0, -4.1]]))
    clipped = shape_rewards(earned, logprobs, ref, mask, 0.0, score_clip=3.0)
    torch.testing.assert_close(clipped, torch.tensor([[2.0, 0.0, 0.0, -3.0]]))


@given(batches(), seeds)
def test_a_score_per_row_is_a_reward_at_the_last_token(segments, seed):
    mask = segments.mask
    logprobs, ref = numbers(segments, seed), numbers(segments, seed + 1)
    scores = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed)).double()
    by_token = at_last_token(scores, mask)
    whole = shape_rewards(scores, logprobs, ref, mask, 0.1, score_clip=1.0)
    assert torch.equal(whole, shape_rewards(by_token, logprobs, ref, mask, 0.1, score_clip=1.0))


@given(batches_with_holes(max_rows=6), seeds, st.floats(0.0, 1.0), st.integers(1, 4))
def test_state_advantages_are_the_obvious_loop(segments, seed, gamma, num_states):
    rewards = numbers(segments, seed)
    generator = torch.Generator().manual_seed(seed)
    most = min(num_states, segments.mask.numel())
    states = torch.randint(most, segments.mask.shape, generator=generator)
    for options in (
        {"baseline": "leave_one_out"},
        {"baseline": "group"},
        {"baseline": "group", "scale": True},
    ):
        got = state_advantages(rewards, states, segments, gamma=gamma, **options)
        wanted = reference.state_advantages(
            *(x.tolist() for x in (rewards, states, segments.ids, segments.mask)),
            gamma=gamma,
            **options,
        )
        torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64))


def test_one_state_for_all_is_rloo_over_the_reward_to_come():
    mask = torch.ones(3, 2).bool()
    rewards = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 6.0]])
    same = torch.zeros(3, 2, dtype=torch.int64)
    got = state_advantages(rewards, same, cut(math.inf, mask))
    torch.testing.assert_close(got, rloo_advantages(rewards, 3, cut(math.inf, mask)))


def test_kl_estimators_by_hand():
    p, q = torch.tensor([-1.0]), torch.tensor([-3.0])
    assert kl_estimate(p, q, "k1").item() == 2.0
    assert kl_estimate(p, q, "k2").item() == 2.0
    assert math.isclose(kl_estimate(p, q, "k3").item(), math.exp(-2) - 1 + 2, rel_tol=1e-6)


def test_k1_and_k3_are_unbiased():
    torch.manual_seed(0)
    p, q = torch.randn(8).log_softmax(0), torch.randn(8).log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * kl_estimate(p, q, kind)).sum(), exact)


def test_kl_coefficient_may_be_a_tensor():
    mask = torch.ones(1, 2).bool()
    args = torch.tensor([1.0]), torch.zeros(1, 2), torch.ones(1, 2), mask
    assert torch.equal(shape_rewards(*args, 0.5), shape_rewards(*args, torch.tensor(0.5)))


def test_rloo_by_hand():
    scores = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    # 1 - 4, 2 - 3.5, 6 - 1.5; 0 - 1.5, 0 - 1.5, 3 - 0
    wanted = torch.tensor([-3.0, -1.5, 4.5, -1.5, -1.5, 3.0])
    torch.testing.assert_close(rloo_advantages(scores, 3), wanted)


def test_grpo_by_hand():
    scores = torch.tensor([1.0, 3.0, 5.0, 5.0])
    got = group_advantages(scores, 2, eps=0.0)
    torch.testing.assert_close(got[:2], torch.tensor([-1.0, 1.0]) / math.sqrt(2))
    assert group_advantages(scores, 2).isfinite().all()
    torch.testing.assert_close(
        group_advantages(scores, 2, scale=False), torch.tensor([-1.0, 1.0, 0.0, 0.0])
    )


@given(seeds, st.integers(2, 4), st.integers(1, 3))
def test_group_advantages_over_whole_responses_are_the_plain_ones(seed, k, prompts):
    torch.manual_seed(seed)
    mask = torch.arange(6) < torch.randint(1, 7, (k * prompts, 1))
    rewards = torch.randn(k * prompts, 6, dtype=torch.float64)
    totals = torch.where(mask, rewards, 0).sum(dim=1)
    for function in (rloo_advantages, group_advantages):
        got = function(rewards, k, cut(math.inf, mask))
        torch.testing.assert_close(got, torch.where(mask, function(totals, k)[:, None], 0))


def test_macro_rloo_credits_what_is_still_to_come():
    mask = torch.ones(2, 4).bool()
    rewards = torch.tensor([[1.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 5.0]])
    got = rloo_advantages(rewards, 2, cut(2, mask))
    # returns to go 3, 2 against 5; and 5, 5 against 3
    wanted = torch.tensor([[-2.0, -2.0, -3.0, -3.0], [2.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("k", [1, 3])
def test_groups_must_fit(k):
    with pytest.raises(ValueError, match="num_samples must be at least 2 and divide"):
        rloo_advantages(torch.zeros(4), k)


def test_bad_input_gets_a_sentence():
    mask = torch.ones(1, 2).bool()
    x = torch.ones(1, 2)
    segments = cut(1, mask)
    with pytest.raises(ValueError, match="rewards must have the shape"):
        macro_gae(torch.ones(1, 3), x, segments)
    with pytest.raises(ValueError, match="gamma must lie between 0 and 1"):
        macro_gae(x, x, segments, gamma=1.5)
    with pytest.raises(ValueError, match="pooling must be one of sum, mean"):
        macro_gae(x, x, segments, pooling="max")  # pyright: ignore
    with pytest.raises(ValueError, match="values must be floating point"):
        gae(x, x.long(), mask)
    with pytest.raises(ValueError, match="one number per row"):
        shape_rewards(torch.ones(3), x, x, mask, 0.1)
    with pytest.raises(ValueError, match="kind must be one of"):
        kl_estimate(x, x, "k4")  # pyright: ignore
