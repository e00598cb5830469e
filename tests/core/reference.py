"""The core again, as slow and obvious loops over Python numbers, to test the tensors against."""

from __future__ import annotations

import math


def groups(ids: list[int], mask: list[bool]) -> list[list[int]]:
    """Token positions of each macro action of one row."""
    found: dict[int, list[int]] = {}
    for t, (i, real) in enumerate(zip(ids, mask)):
        if real:
            found.setdefault(i, []).append(t)
    return [found[i] for i in sorted(found)]


def gae(rewards: list[float], values: list[float], gamma: float, lam: float):
    advantages = [0.0] * len(rewards)
    following, carried = 0.0, 0.0
    for t in reversed(range(len(rewards))):
        carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
        advantages[t], following = carried, values[t]
    return advantages, [a + v for a, v in zip(advantages, values)]


def sigma_weights(size: int, sigma: str) -> list[float]:
    if sigma == "equal":
        return [1 / size] * size
    if sigma == "unit":
        return [0.0] * (size - 1) + [1.0]
    if sigma == "start":
        return [1.0] + [0.0] * (size - 1)
    harmonic = sum(1 / (size - i) for i in range(size))
    return [1 / (size - i) / harmonic for i in range(size)]


def macro_gae(rewards, values, ids, mask, *, gamma, lam, rho, sigma, pooling):
    """One row; zeros at padding."""
    actions = groups(ids, mask)
    pooled, weighted = [], []
    for action in actions:
        total = sum(rho**i * rewards[t] for i, t in enumerate(action))
        pooled.append(total / len(action) if pooling == "mean" else total)
        weights = sigma_weights(len(action), sigma)
        weighted.append(sum(w * values[t] for w, t in zip(weights, action)))
    by_action, returns_by_action = gae(pooled, weighted, gamma, lam)
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for action, a, r in zip(actions, by_action, returns_by_action):
        for t in action:
            advantages[t], returns[t] = a, r
    return advantages, returns


def boundary_gae(rewards, values, ids, mask, *, gamma, lam):
    """One row; zeros at padding. Tokens that the mask leaves out are not there."""
    actions = groups(ids, mask)
    tokens = [t for action in actions for t in action]
    last = {action[-1] for action in actions}
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    following, carried = 0.0, 0.0
    for t in reversed(tokens):
        decay = gamma * (lam if t in last else 1.0)
        carried = rewards[t] + gamma * following - values[t] + decay * carried
        advantages[t], returns[t], following = carried, carried + values[t], values[t]
    return advantages, returns


def clipped(ratio: float, advantage: float, clip, dual_clip: float | None) -> float:
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    near = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * near)
    if dual_clip is not None and advantage < 0:
        loss = min(loss, -advantage * dual_clip)
    return loss


def policy_loss(logprobs, old, advantages, ids, mask, *, clip, dual_clip, ratio):
    """A batch: lists of rows."""
    terms = []
    for lp, o, adv, i, m in zip(logprobs, old, advantages, ids, mask):
        for action in groups(i, m):
            logs = [lp[t] - o[t] for t in action]
            if ratio == "token":
                terms += [
                    clipped(math.exp(x), adv[t], clip, dual_clip) for x, t in zip(logs, action)
                ]
            else:
                log = sum(logs) / (len(logs) if ratio == "macro_mean" else 1)
                terms.append(clipped(math.exp(log), adv[action[0]], clip, dual_clip))
    return sum(terms) / max(len(terms), 1)


def importance_weights(logprobs, sampled, ids, mask, *, cap, ratio):
    """Lists of rows: one weight per token, 0 where the mask is."""
    rows = []
    for lp, s, i, m in zip(logprobs, sampled, ids, mask):
        row = [0.0] * len(lp)
        for action in groups(i, m):
            logs = [lp[t] - s[t] for t in action]
            joint = sum(logs) / (len(logs) if ratio == "macro_mean" else 1)
            for t, log in zip(action, logs):
                row[t] = min(math.exp(log if ratio == "token" else joint), cap)
        rows.append(row)
    return rows


def value_loss(values, old, returns, ids, mask, *, clip, level, sigma):
    terms = []

    def term(v: float, o: float, r: float) -> float:
        error = (v - r) ** 2
        if clip is not None:
            error = max(error, (min(max(v, o - clip), o + clip) - r) ** 2)
        return error / 2

    for v, o, r, i, m in zip(values, old, returns, ids, mask):
        for action in groups(i, m):
            if level == "token":
                terms += [term(v[t], o[t], r[t]) for t in action]
            else:
                weights = sigma_weights(len(action), sigma)
                new = sum(w * v[t] for w, t in zip(weights, action))
                before = sum(w * o[t] for w, t in zip(weights, action))
                terms.append(term(new, before, r[action[0]]))
    return sum(terms) / max(len(terms), 1)


def perplexity_starts(nll: list[float], kind: str, max_length: int | None) -> list[bool]:
    starts, begin = [], 0
    for t in range(len(nll)):
        mean = sum(nll[begin:t]) / (t - begin) if t > begin else math.inf
        if kind == "macro":
            rises = nll[t] > mean
        elif kind == "prefix":
            rises = t > 0 and sum(nll[: t + 1]) / (t + 1) > sum(nll[:t]) / t
        else:
            rises = t > 0 and nll[t] > nll[t - 1]
        full = max_length is not None and t - begin == max_length
        starts.append(t == 0 or rises or full)
        if starts[-1]:
            begin = t
    return starts


def constituent_starts(tree, cutoff: int, inclusive: bool) -> list[bool]:
    """A tree is an int (a token) or a list of trees. The paper's depth-first walk."""

    def leaves(node) -> list[int]:
        return [node] if isinstance(node, int) else [t for child in node for t in leaves(child)]

    actions: list[list[int]] = []

    def walk(node) -> None:
        tokens = leaves(node)
        small = len(tokens) <= cutoff if inclusive else len(tokens) < cutoff
        if len(tokens) == 1:
            if actions:
                actions[-1].extend(tokens)
            else:
                actions.append(tokens)
        elif small:
            actions.append(tokens)
        else:
            for child in node:
                walk(child)

    walk(tree)
    begins = {action[0] for action in actions}
    return [t in begins for t in range(len(leaves(tree)))]


def tree_spans(tree) -> list[tuple[int, int]]:
    """Every node of the tree, single tokens included, as (from, to)."""

    def walk(node):
        if isinstance(node, int):
            return node, node + 1, [(node, node + 1)]
        inside = [walk(child) for child in node]
        begin, end = inside[0][0], inside[-1][1]
        return begin, end, [(begin, end), *(s for _, _, spans in inside for s in spans)]

    return walk(tree)[2]


def state_advantages(rewards, states, ids, mask, *, gamma, baseline, scale=False, eps=1e-4):
    """All rows; zeros where the mask is False."""
    turns = []  # (state, return still to come, tokens)
    for row, (r, i, m) in enumerate(zip(rewards, ids, mask)):
        actions = groups(i, m)
        for first, action in enumerate(actions):
            to_come = sum(
                gamma**k * sum(r[t] for t in later) for k, later in enumerate(actions[first:])
            )
            turns.append((states[row][action[0]], to_come, [(row, t) for t in action]))
    advantages = [[0.0] * len(row) for row in mask]
    for number, (state, value, tokens) in enumerate(turns):
        others = [v for k, (s, v, _) in enumerate(turns) if s == state and k != number]
        if not others:
            continue
        everyone = [value, *others]
        mean = sum(everyone) / len(everyone)
        if baseline == "leave_one_out":
            result = value - sum(others) / len(others)
        else:
            deviation = math.sqrt(sum((v - mean) ** 2 for v in everyone) / (len(everyone) - 1))
            result = (value - mean) / ((deviation + eps) if scale else 1.0)
        for row, t in tokens:
            advantages[row][t] = result
    return advantages


def adaptive_lam(num_actions: int, alpha: float) -> float:
    """VAPO, equation 6: the reach is a share of the response."""
    return max(0.0, 1 - 1 / (alpha * num_actions))


def peak_starts(x: list[float], first: int, quantile: float, threshold: float | None) -> list[bool]:
    """One row without holes: the highest of x[first:], or those above the threshold."""
    starts = [t == 0 for t in range(len(x))]
    ranked = sorted(range(first, len(x)), key=lambda t: -x[t])
    count = round((1 - quantile) * len(ranked))
    for place, t in enumerate(ranked):
        if x[t] > threshold if threshold is not None else place < count:
            starts[t] = True
    return starts


def overlong(length: int, start: int, end: int) -> float:
    """DAPO, equation 13, with L_max = end and L_cache = end - start."""
    if length <= start:
        return 0.0
    if length <= end:
        return (start - length) / (end - start)
    return -1.0
