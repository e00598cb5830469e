"""Advantages over trees of responses: against a loop over nodes, and against plain groups."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf.core import (
    NGram,
    Responses,
    Segments,
    at_last_token,
    group_advantages,
    rloo_advantages,
    segment,
)
from marlhf.core import tree_advantages as advantages_of

seeds = st.integers(0, 2**31)


def random_tree(seed: int, tree: tuple[int, ...], n: int):
    """Leaves with rewards, levels and macro actions; some responses end before a branch."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows = [([], [], [])]  # rewards, levels, starts of each leaf of one prompt
    for level, children in enumerate(tree):
        grown = []
        for rewards, levels, starts in rows:
            ended = level > 0 and (not levels or levels[-1] < level - 1 or draw(0, 4) == 0)
            for _ in range(children):
                length = 0 if ended else draw(1, 5)
                new = torch.randn(length, generator=generator, dtype=torch.float64).tolist()
                starts_here = [i % n == 0 for i in range(length)]
                grown.append((rewards + new, levels + [level] * length, starts + starts_here))
        rows = grown
    width = max(len(row[0]) for row in rows)
    mask = torch.tensor([[i < len(row[0]) for i in range(width)] for row in rows])

    def padded(which: int, dtype: torch.dtype):
        lists = [list(row[which]) + [0] * (width - len(row[which])) for row in rows]
        return torch.tensor(lists, dtype=dtype)

    segments = Segments.from_starts(padded(2, torch.bool), mask).validate()
    return padded(0, torch.float64), padded(1, torch.int64), segments


def by_loop(rewards, tree, levels, segments, gamma, baseline, scale):
    """Node by node, macro action by macro action, in Python."""
    ids, mask = segments.ids.tolist(), segments.mask.tolist()
    result = torch.zeros_like(rewards)

    def macros(leaf: int, level: int) -> list[tuple[list[int], float]]:
        tokens = [t for t in range(len(mask[0])) if mask[leaf][t] and levels[leaf, t] == level]
        found: dict[int, list[int]] = {}
        for t in tokens:
            found.setdefault(ids[leaf][t], []).append(t)
        return [(at, sum(float(rewards[leaf, t]) for t in at)) for at in found.values()]

    def visit(first: int, level: int) -> float:
        """The mean value of the children whose leaves begin at `first`; credits them on the way."""
        if level == len(tree):
            return 0.0
        size = math.prod(tree[level + 1 :])
        values, to_go = [], []
        for child in range(tree[level]):
            leaf = first + child * size
            total, backwards = visit(leaf, level + 1), []
            for _, reward in reversed(macros(leaf, level)):
                total = reward + gamma * total
                backwards.append(total)
            values.append(total if backwards else 0.0)
            to_go.append(backwards[::-1])
        for child in range(tree[level]):
            others = [v for i, v in enumerate(values) if i != child]
            base, unit = sum(others) / len(others), 1.0
            if baseline == "group":
                base = sum(values) / len(values)
                if scale:
                    unit = float(torch.tensor(values, dtype=torch.float64).std()) + 1e-4
            for leaf in range(first + child * size, first + (child + 1) * size):
                for (at, _), value in zip(macros(leaf, level), to_go[child]):
                    result[leaf, at] = (value - base) / unit
        return sum(values) / len(values)

    for first in range(0, len(rewards), math.prod(tree)):
        visit(first, 0)
    return result


@pytest.mark.parametrize("tree", [(3,), (2, 3), (3, 2, 2)])
@pytest.mark.parametrize(
    ("baseline", "scale"), [("leave_one_out", True), ("group", True), ("group", False)]
)
@settings(max_examples=20, deadline=None)
@given(seed=seeds, n=st.integers(1, 3), gamma=st.sampled_from([1.0, 0.9]))
def test_a_tree_is_its_loop_over_nodes(tree, baseline, scale, seed, n, gamma):
    rewards, levels, segments = random_tree(seed, tree, n)
    options = {"gamma": gamma, "baseline": baseline, "scale": scale}
    got = advantages_of(rewards, tree, levels, segments, **options)
    torch.testing.assert_close(got, by_loop(rewards, tree, levels, segments, **options))


def treerl_by_loop(correct: list[float], tree) -> list[list[float]]:
    """TreeRL's reward of each leaf's segment by level, |L|^(-1/2) (G_A + L_A); one prompt."""
    rewards: list[list[float]] = [[] for _ in correct]
    root = sum(correct) / len(correct)

    def visit(leaves: list[int], level: int, parent: float) -> None:
        size = len(leaves) // tree[level]
        for child in range(tree[level]):
            below = leaves[child * size : (child + 1) * size]
            value = sum(correct[leaf] for leaf in below) / len(below)
            for leaf in below:
                rewards[leaf].append((value - root + value - parent) / math.sqrt(len(below)))
            if level + 1 < len(tree):
                visit(below, level + 1, value)

    visit(list(range(len(correct))), 0, root)
    return rewards


@given(seeds, st.sampled_from([(3,), (2, 3), (3, 2, 2)]))
def test_global_and_local_advantages_are_those_of_treerl(seed, tree):
    _, levels, segments = random_tree(seed, tree, 9)
    generator, mask = torch.Generator().manual_seed(seed), segments.mask
    # No response ends early: every leaf has all levels, and is right or wrong.
    if int(levels.amax(dim=1).min()) < len(tree) - 1:
        return
    correct = torch.randint(0, 2, (len(mask),), generator=generator).double()
    rewards = at_last_token(correct, mask)
    got = advantages_of(rewards, tree, levels, segments, baseline="global_local")
    wanted = treerl_by_loop(correct.tolist(), tree)
    for leaf, row in enumerate(wanted):
        for t in range(int(mask[leaf].sum())):
            leaves = math.prod(tree[levels[leaf, t] + 1 :])
            assert float(got[leaf, t]) == pytest.approx(leaves * row[levels[leaf, t]], abs=1e-12)


def test_global_advantages_count_what_was_earned_before():
    rewards = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 0.0], [0.0, 1.0]])
    levels = torch.tensor([[0, 1]] * 4)
    segments = Segments(levels, torch.ones(4, 2).bool())
    got = advantages_of(rewards, (2, 2), levels, segments, baseline="global_local")
    # returns 1, 3, 0, 1; root 1.25; beginnings 2 and 0.5; local +-0.75, then +-1 and +-0.5
    root = math.sqrt(2)
    wanted = [
        [root * 1.5, -0.25 - 1],
        [root * 1.5, 1.75 + 1],
        [root * -1.5, -1.25 - 0.5],
        [root * -1.5, -0.25 + 0.5],
    ]
    torch.testing.assert_close(got, torch.tensor(wanted))
    with pytest.raises(ValueError, match=r"gamma must be 1, not 0\.9"):
        advantages_of(rewards, (2, 2), levels, segments, baseline="global_local", gamma=0.9)


@given(seeds, st.integers(2, 4), st.sampled_from([1, 2, math.inf]), st.sampled_from([1.0, 0.9]))
def test_one_level_is_rloo_and_grpo_bit_for_bit(seed, k, n, gamma):
    torch.manual_seed(seed)
    mask = torch.arange(6) < torch.randint(1, 7, (2 * k, 1))
    segments = segment(NGram(n), Responses(torch.zeros(mask.shape, dtype=torch.int64), mask))
    rewards, levels = torch.randn(2 * k, 6), torch.zeros(2 * k, 6, dtype=torch.int64)
    rloo = rloo_advantages(rewards, k, segments, gamma=gamma)
    assert torch.equal(advantages_of(rewards, [k], levels, segments, gamma=gamma), rloo)
    for scale in (True, False):
        group = group_advantages(rewards, k, segments, gamma=gamma, scale=scale)
        options = {"gamma": gamma, "baseline": "group", "scale": scale}
        assert torch.equal(advantages_of(rewards, [k], levels, segments, **options), group)


@given(seeds)
def test_the_advantages_of_siblings_add_up_to_nothing(seed):
    rewards, levels, segments = random_tree(seed, (3, 2), 9)  # one macro action per segment
    got = advantages_of(rewards, (3, 2), levels, segments)
    torch.testing.assert_close(got[::2, 0].sum(), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("tree", [[], [1], [4, 1], [3], [2, 4]])
def test_trees_that_do_not_fit_are_refused(tree):
    rewards, levels = torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int64)
    segments = Segments(levels, torch.ones(4, 2).bool())
    with pytest.raises(
        ValueError, match="at least 2 children, and the number of leaves must divide"
    ):
        advantages_of(rewards, tree, levels, segments)
