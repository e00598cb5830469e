"""Advantages and returns, by token, by macro action and by group of samples.

Axes: B rows, T response tokens, M macro actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from marlhf.core.masked import check_choice, check_rows, check_tokens, keep, shift, wide
from marlhf.core.segments import Segments, Sigma

Pooling = Literal["sum", "mean"]
TreeBaseline = Literal["leave_one_out", "group", "global_local"]


def gae(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T], of the state before each token
    mask: Tensor,  # [B, T] bool
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over tokens: advantages and returns, both [B, T].

    A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t; nothing follows
    the last token. t + 1 is the next token that the mask counts, over any hole. Each row may have
    a `lam` of its own, [B].

    >>> mask = torch.ones(1, 2).bool()
    >>> gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.2, 0.6]]), mask, lam=0.5)
    (tensor([[0.6000, 0.4000]]), tensor([[0.8000, 1.0000]]))
    """
    tokens = Segments.from_starts(mask, mask)
    return macro_gae(rewards, values, tokens, gamma=gamma, lam=lam, sigma="start")


def macro_gae(
    rewards: Tensor,  # [B, T], of tokens
    values: Tensor,  # [B, T], of the state before each token
    segments: Segments,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    rho: float = 1.0,
    sigma: Sigma = "equal",
    pooling: Pooling = "sum",
    lam_value: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns with one decision per macro action.

    Both come back as [B, T], each token carrying its macro action's number, so any token-level
    PPO loss can use them unchanged. `rho` discounts rewards inside a macro action, `gamma` from
    one to the next; `sigma` weighs the values of its tokens (see `Segments.weighted`).

    `pooling="sum"` is the paper's equation. `"mean"` is the authors' code: it divides the KL
    penalty of a macro action by its length, so a score comes cheaper in KL and looks better.
    `lam_value` is the lambda of the returns that the critic learns from, where it differs. Both
    may be [B], one per row (see `adaptive_lam`).

    >>> pairs = Segments.from_starts(torch.tensor([[True, False, True, False]]),
    ...                              mask=torch.ones(1, 4).bool())
    >>> rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    >>> values = torch.tensor([[0.2, 0.4, 0.5, 0.7]])  # per macro action: 0.3, 0.6
    >>> macro_gae(rewards, values, pairs, lam=0.5)[0]
    tensor([[0.5000, 0.5000, 0.4000, 0.4000]])
    """
    check_tokens(segments.mask, rewards=rewards, values=values)
    lams = [lam] if lam_value is None else [lam, lam_value]
    _check_discounts(gamma=gamma, lam=lam, lam_value=lams[-1])
    by_macro = pool_rewards(rewards, segments, rho=rho, pooling=pooling)
    decays = [gamma * _of_row(each, by_macro) for each in lams]
    return _td_lambda(by_macro, segments.weighted(values, sigma), segments, gamma, decays)


def boundary_gae(
    rewards: Tensor,  # [B, T], of tokens
    values: Tensor,  # [B, T], of the state before each token
    segments: Segments,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    lam_value: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token advantages that bootstrap at the ends of macro actions only: both [B, T].

    A_t = delta_t + gamma c_t A_{t+1}, where c_t is `lam` at the last token of a macro action and 1
    within it. With gamma 1 and one update per batch its expected gradient is that of
    `macro_gae(sigma="start")`: TD errors of earlier tokens of the action, which a token could not
    change, are left out. That is less variance where values inside macro actions are right; with
    a critic whose errors there are independent it can be more, since each token's advantage then
    starts from its own error. Published as segmental advantage estimation.

    >>> pairs = Segments.from_starts(torch.tensor([[True, False, True, False]]),
    ...                              mask=torch.ones(1, 4).bool())
    >>> rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    >>> values = torch.tensor([[0.2, 0.4, 0.5, 0.7]])  # deltas: 0.2, 0.1, 0.2, 0.3
    >>> boundary_gae(rewards, values, pairs, lam=0.5)[0]
    tensor([[0.5500, 0.3500, 0.5000, 0.3000]])
    """
    check_tokens(segments.mask, rewards=rewards, values=values)
    lams = [lam] if lam_value is None else [lam, lam_value]
    _check_discounts(gamma=gamma, lam=lam, lam_value=lams[-1])
    tokens = Segments.from_starts(segments.mask, segments.mask)
    by_token, ends = tokens.sum(rewards), segments.ends
    inside = torch.full_like(by_token, gamma)
    decays = [torch.where(ends, inside * _of_row(each, inside), inside) for each in lams]
    return _td_lambda(by_token, tokens.sum(values), tokens, gamma, [*map(tokens.sum, decays)])


def adaptive_lam(segments: Segments, alpha: float = 0.05) -> Tensor:
    """VAPO's length-adaptive lambda, 1 - 1 / (alpha L), at least 0: [B].

    L is the number of macro actions of the response, which are its tokens where each is one
    action. The reach of credit is then the share `alpha` of any response (arXiv 2504.05118).

    >>> mask = torch.ones(1, 40).bool()
    >>> adaptive_lam(Segments.from_starts(mask, mask), alpha=0.25)
    tensor([0.9000])
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be positive; got {alpha}.")
    lengths = segments.macro_mask.sum(dim=1).clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(min=0)


def pool_rewards(
    rewards: Tensor,  # [B, T]
    segments: Segments,
    *,
    rho: float = 1.0,
    pooling: Pooling = "sum",
) -> Tensor:
    """The reward of each macro action: R = sum of rho^i r_i, or its mean: [B, M].

    >>> from marlhf.core import Segments
    >>> pairs = Segments(torch.tensor([[0, 0, 1, 1]]), torch.ones(1, 4).bool())
    >>> pool_rewards(torch.tensor([[1.0, 2.0, 0.0, 4.0]]), pairs)[:, :2]
    tensor([[3., 4.]])
    """
    check_choice("pooling", pooling, ("sum", "mean"))
    _check_discounts(rho=rho)
    if rho != 1.0:
        rewards = keep(rewards, segments.mask) * rho ** segments.offsets.to(rewards.dtype)
    return segments.sum(rewards) if pooling == "sum" else segments.mean(rewards)


def rloo_advantages(
    rewards: Tensor,  # [B], or [B, T] with segments
    num_samples: int,
    segments: Segments | None = None,
    *,
    gamma: float = 1.0,
) -> Tensor:
    """Each response against the mean of the others to the same prompt (leave-one-out).

    Rows come prompt by prompt, `num_samples` of each. With token rewards and segments, every
    macro action is credited with the reward still to come from it on, against the others' whole
    return: credit by macro action without a critic. With one action per response this is RLOO.

    With `gamma` below 1 the reward to go is discounted from each macro action on, but the factor
    gamma^m by which the gradient of the discounted return weighs the m-th action is left out, as
    is usual: later actions would hardly be trained.

    >>> rloo_advantages(torch.tensor([1.0, 2.0, 6.0]), num_samples=3)
    tensor([-3.0000, -1.5000,  4.5000])
    """
    returns = _group_returns(rewards, num_samples, segments, gamma)
    return _of_tokens(_above_others(*returns), segments)


def group_advantages(
    rewards: Tensor,  # [B], or [B, T] with segments
    num_samples: int,
    segments: Segments | None = None,
    *,
    gamma: float = 1.0,
    scale: bool = True,
    eps: float = 1e-4,
) -> Tensor:
    """Each response against the mean of its group, in units of the group's deviation (GRPO).

    `scale=False` leaves out the division, which favours prompts with little spread. Over macro
    actions as in `rloo_advantages`.

    >>> group_advantages(torch.tensor([1.0, 3.0]), num_samples=2, scale=False)
    tensor([-1.,  1.])
    """
    returns = _group_returns(rewards, num_samples, segments, gamma)
    return _of_tokens(_above_mean(*returns, eps if scale else None), segments)


def tree_advantages(
    rewards: Tensor,  # [B, T], one row per leaf, with its whole response
    tree: Sequence[int],  # children of each node, level by level
    levels: Tensor,  # [B, T] int64, the level of the tree that each token belongs to, from 0
    segments: Segments,
    *,
    gamma: float = 1.0,
    baseline: TreeBaseline = "leave_one_out",
    scale: bool = True,
    eps: float = 1e-4,
) -> Tensor:
    """Each segment of a tree of responses against its siblings: [B, T].

    A node is a segment of a response: what was sampled between two branches. Its value is its own
    reward plus the mean value of its children,

        G(v) = r(v) + 1/k sum_c G(c),

    and its advantage compares G(v) with its siblings, which continue the same tokens: with their
    mean (`leave_one_out`), or with the mean of all of them in units of their deviation (`group`,
    `scale`). So an early segment is judged by the average of all leaves below it, with less noise
    than from one response, and a late one only by what it decided. Macro actions within a segment
    are credited with the reward still to come, as in `rloo_advantages`; `gamma` as there.

    `global_local` is TreeRL's (arXiv 2506.11902): the return through v above that of the whole
    tree, plus G(v) above the mean of the siblings, which is their parent's value; both times the
    square root of n, the number of leaves below v. The paper divides by that root and trains the
    tokens of v n times, once per leaf: these are the sum for tokens that are trained once.

    Leaves come in depth-first order, prod(tree) per prompt. Leaves below a node agree in its
    tokens, rewards and macro actions, and no macro action lies in two levels. A response that
    ended before a branch fills all leaves below it: its later levels have no tokens.

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0], [0.0, 5.0]])
    >>> levels = torch.tensor([[0, 1]] * 4)
    >>> segments = Segments(levels, torch.ones(4, 2).bool())
    >>> tree_advantages(rewards, [2, 2], levels, segments)  # the two halves: 2 and 5
    tensor([[-3., -2.],
            [-3.,  2.],
            [ 3.,  0.],
            [ 3.,  0.]])
    """
    check_tokens(segments.mask, rewards=rewards)
    check_choice("baseline", baseline, get_args(TreeBaseline))
    _check_discounts(gamma=gamma)
    if baseline == "global_local" and gamma != 1.0:
        raise ValueError(f"'global_local' adds up whole returns: gamma must be 1, not {gamma}.")
    if not tree or min(tree) < 2 or len(rewards) % math.prod(tree):
        raise ValueError(
            "Each level of a tree needs at least 2 children, and the number of leaves must divide "
            f"the number of rows; got {list(tree)} for {len(rewards)} rows."
        )
    by_macro = segments.sum(rewards)
    macro_levels = segments.first(levels.to(rewards.dtype))  # [B, M]
    earned = by_macro.cumsum(dim=1) - by_macro  # before each macro action
    root = _mean_of_each(by_macro.sum(dim=1), math.prod(tree))[:, None]  # of each prompt
    advantages = torch.zeros_like(by_macro)
    values = by_macro.new_zeros(len(by_macro))  # [B], of the node one level below
    for level in reversed(range(len(tree))):
        num_leaves = math.prod(tree[level + 1 :])  # below a node of this level
        here = segments.macro_mask & (macro_levels == level)
        last, first = here & ~shift(here, -1), here & ~shift(here)
        following = gamma * _mean_of_each(values, num_leaves)[:, None]  # 0 below the last level
        rewards_here = torch.where(here, by_macro, 0.0) + torch.where(last, following, 0.0)
        to_go = _to_go(rewards_here, gamma)
        values = torch.where(first, to_go, 0.0).sum(dim=1)
        siblings = values.view(-1, tree[level], num_leaves)
        if baseline == "leave_one_out":
            centred = _above_others(to_go, siblings)
        elif baseline == "group":
            centred = _above_mean(to_go, siblings, eps if scale else None)
        else:
            above = _above_mean(to_go, siblings) + earned + to_go - root
            centred = above * math.sqrt(num_leaves)
        advantages = torch.where(here, centred, advantages)
    return segments.spread(advantages)


def state_advantages(
    rewards: Tensor,  # [B, T]
    states: Tensor,  # [B, T] int64 in [0, B * T), the state in which each token's action was chosen
    segments: Segments,
    *,
    gamma: float = 1.0,
    baseline: Literal["leave_one_out", "group"] = "leave_one_out",
    scale: bool = False,
    eps: float = 1e-4,
) -> Tensor:
    """Each macro action against those that were chosen in the same state: [B, T].

    The reward still to come is compared with its mean over the other macro actions in that state
    (`leave_one_out`), or with the mean of all of them (`group`), in units of their deviation if
    `scale`. An action alone in its state gets 0. States are numbers that the caller gives, equal
    for turns that face the same situation of the same prompt; the first token of an action says
    which state it is of. Added to advantages of whole episodes this is GiGPO (arXiv 2505.10978).

    >>> turns = Segments(torch.tensor([[0, 1]] * 3), torch.ones(3, 2).bool())
    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0]])
    >>> states = torch.tensor([[0, 1], [0, 1], [0, 2]])
    >>> state_advantages(rewards, states, turns)
    tensor([[-3., -2.],
            [ 0.,  2.],
            [ 3.,  0.]])
    """
    check_tokens(segments.mask, rewards=rewards)
    check_choice("baseline", baseline, ("leave_one_out", "group"))
    _check_discounts(gamma=gamma)
    to_go, exists = _to_go(segments.sum(rewards), gamma), segments.macro_mask
    # The state of each macro action, [B * M]; what does not exist counts nowhere.
    at_start = torch.where(segments.starts, states, 0)
    state = torch.zeros_like(segments.ids).scatter_add(1, segments.ids, at_start)
    state, there, x = state.flatten(), exists.flatten().to(to_go.dtype), to_go.flatten()

    def over_state(y: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, state, y * there)[state]

    count = over_state(torch.ones_like(x)).clamp(min=1)
    centred = x - over_state(x) / count
    if baseline == "leave_one_out":
        centred = centred * count / (count - 1).clamp(min=1)
    elif scale:
        variance = over_state(centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    centred = torch.where((count < 2) | (there == 0), 0.0, centred)
    return segments.spread(centred.view_as(to_go))


def _group_returns(
    rewards: Tensor, num_samples: int, segments: Segments | None, gamma: float
) -> tuple[Tensor, Tensor]:
    """Return still to come, [B, M], and the whole return by prompt, [B / k, k].

    Without segments a response is one action, and M is 1.
    """
    if segments is None:
        check_rows(rewards=rewards)
        to_go = wide(rewards)[:, None]
    else:
        check_tokens(segments.mask, rewards=rewards)
        to_go = _to_go(segments.sum(rewards), gamma)
    total = to_go[:, 0] if to_go.shape[1] else to_go.sum(dim=1)
    if num_samples < 2 or len(rewards) % num_samples:
        raise ValueError(
            f"num_samples must be at least 2 and divide the {len(rewards)} rows; got {num_samples}."
        )
    return to_go, total.reshape(-1, num_samples)


def _above_others(to_go: Tensor, siblings: Tensor) -> Tensor:
    """Returns [B, M] above the mean of the others: `siblings` are by row, compared along dim 1."""
    others = (siblings.sum(dim=1, keepdim=True) - siblings) / (siblings.shape[1] - 1)
    return to_go - others.reshape(-1, 1)


def _above_mean(to_go: Tensor, siblings: Tensor, eps: float | None = None) -> Tensor:
    """The same above the mean of all; with `eps` in units of their deviation."""
    mean = siblings.mean(dim=1, keepdim=True).expand_as(siblings)
    centred = to_go - mean.reshape(-1, 1)
    if eps is None:
        return centred
    deviation = siblings.std(dim=1, keepdim=True).expand_as(siblings)
    return centred / (deviation.reshape(-1, 1) + eps)


def _of_tokens(advantages: Tensor, segments: Segments | None) -> Tensor:
    """[B, M] -> [B, T]; of whole responses, [B, 1] -> [B]."""
    return advantages[:, 0] if segments is None else segments.spread(advantages)


def _mean_of_each(x: Tensor, count: int) -> Tensor:
    """Each row takes the mean of the `count` neighbours that it is one of: [B]."""
    return x.view(-1, count).mean(dim=1, keepdim=True).expand(-1, count).reshape(-1)


def _of_row(lam: float | Tensor, like: Tensor) -> float | Tensor:
    """A lambda for each row, [B], in the shape and dtype of `like`, [B, M]."""
    return lam[:, None].to(like.dtype).expand_as(like) if isinstance(lam, Tensor) else lam


def _td_lambda(
    rewards: Tensor, values: Tensor, segments: Segments, gamma: float, decays: list[Tensor | float]
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of macro actions: [B, M] -> [B, T].

    Advantages are sums of TD errors with the first of `decays`, returns take the last. Rewards and
    values are 0 where there is no macro action, so nothing need be masked before `spread`.
    """
    deltas = torch.add(rewards - values, pad(values, (0, 1))[:, 1:], alpha=gamma)
    sums = [_to_go(deltas, decay) for decay in decays]
    return segments.spread(sums[0]), segments.spread(sums[-1] + values)


def _to_go(x: Tensor, decay: float | Tensor) -> Tensor:
    """y_t = x_t + decay_t * y_{t+1} along the last axis, with one decay for all or [B, M].

    By doubling: after k rounds y_t holds 2^k terms, and the decay is the product over as many
    steps. log2(M) rounds over whole tensors instead of M steps, with rounding errors that grow
    with log M. Zeros on the right stand for what follows the end.
    """
    step = 1
    while step < x.shape[1] and (isinstance(decay, Tensor) or decay != 0.0):
        following = pad(x[:, step:], (0, step))
        if isinstance(decay, Tensor):
            x = x + decay * following
            decay = decay * pad(decay[:, step:], (0, step))
        else:
            x = torch.add(x, following, alpha=decay)
            decay = decay * decay
        step *= 2
    return x


def _check_discounts(**discounts: float | Tensor) -> None:
    for name, value in discounts.items():
        if isinstance(value, Tensor):
            check_rows(**{name: value})  # values live on the device, which nothing here waits for
        elif not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must lie between 0 and 1; got {value}.")
