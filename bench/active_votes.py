"""How many votes does a reward model need, if it asks for those that its ensemble disagrees on?

    python bench/active_votes.py tldr/pairs_b.jsonl

The labels of TL;DR comparisons (post, title, chosen, rejected) stand for people's votes. The reward
model is an ensemble of linear heads on features of the text, each fitted to a bootstrap of the
votes: poor, but honest, and it takes no GPU. Each round it is fitted to the votes so far, and asks
for more of the pool: at random, where its heads disagree most, or where their mean is nearest to
even. Held-out pairs are of other posts. All ways begin with the same votes, so they are compared
seed by seed.
"""

from __future__ import annotations

import argparse
import math
import re
import zlib
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from marlhf.data import read_records
from marlhf.evaluate.results import text_table
from marlhf.intervals import interval
from marlhf.judge.annotate.pick import pick

WAYS = ("random", "disagreement", "margin")
MEMBERS = 6
MOST = 1500
"""Votes."""
HASHED = 64
"""Features that words are hashed to, beside those of form and of overlap with the post."""


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def describe(post: str, response: str) -> list[float]:
    """Length, overlap with the post, form, and hashed words."""
    said, known = words(response), words(post)
    pairs, known_pairs = set(pairwise(said)), set(pairwise(known))
    length = max(len(said), 1)
    form = [
        length**0.5,
        math.log(length),
        len(said) < 12,
        len(said) > 35,
        sum(word in set(known) for word in said) / length,
        len(pairs & known_pairs) / max(len(pairs), 1),
        len(set(said)) / length,
        response.count(",") / length,
        response.count("."),
        "?" in response,
        response.strip()[-1:] in ".!?",
        response[:1].isupper(),
        "i" in said,
    ]
    counts = [0.0] * HASHED
    for word in said:
        digest = zlib.crc32(word.encode())
        counts[digest % HASHED] += 1 if digest & 1024 else -1
    return [*map(float, form), *counts]


def compare(file: Path, seeds: int, start: int, batch: int, ridge: float) -> None:
    """Print held-out accuracy by votes, and the votes that each way of picking takes for it."""
    records = [record for record, _ in read_records(file)]
    sides = [
        [describe(f"{r['title']} {r['post']}", r[side]) for side in ("chosen", "rejected")]
        for r in records
    ]
    chosen, rejected = torch.tensor(sides, dtype=torch.float64).unbind(1)
    x = chosen - rejected
    x = x / x.square().mean(0).sqrt()  # no mean: a pair turned round is its minus
    x[:, -HASHED:] *= HASHED**-0.5  # words together count as one feature of form
    posts = {post: number for number, post in enumerate(dict.fromkeys(r["post"] for r in records))}
    prompt = torch.tensor([posts[r["post"]] for r in records])
    curves: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        aside = torch.randperm(len(posts), generator=generator)[: len(posts) // 3]
        test = torch.isin(prompt, aside)
        for way in WAYS:
            curves[way].append(curve(x[~test], x[test], way, seed, start, batch, ridge))
        counts = f"{int((~test).sum())} pairs to pick from, {int(test.sum())} held out"
        print(f"seed {seed}: {counts}", flush=True)
    votes = [start + batch * i for i in range(len(curves["random"][0]))]
    columns = [f"{way}, 95%" for way in WAYS] + [f"{way} - random" for way in WAYS[1:]]
    rows = []
    for i, count in enumerate(votes):
        at = {way: [run[i] for run in curves[way]] for way in WAYS}
        gains = [[a - b for a, b in zip(at[way], at["random"])] for way in WAYS[1:]]
        texts = [interval(at[way]).text("{:.3f}".format) for way in WAYS]
        texts += [interval(gain).text("{:+.3f}".format) for gain in gains]
        rows.append([str(count), *texts])
    print(text_table(["votes", *columns], rows))
    rows = []
    for count in votes[1::2]:
        row = [str(count)]
        for way in WAYS[1:]:
            needed = [
                reach(votes, run, base[votes.index(count)])
                for run, base in zip(curves[way], curves["random"])
            ]
            row.append(interval([n / count for n in needed]).text("{:.2f}".format))
        rows.append(row)
    print("\nVotes for the accuracy that random picking has, as a share of its votes")
    print(text_table(["votes of random picking", *WAYS[1:]], rows))


def curve(
    pool: Tensor, test: Tensor, way: str, seed: int, start: int, batch: int, ridge: float
) -> list[float]:
    """Held-out accuracy after each round of votes, up to `MOST`."""
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    voted, left = order[:start].tolist(), order[start:].tolist()
    accuracies: list[float] = []
    while len(voted) <= MOST:
        # The same bootstraps in all ways; each head sees its own.
        generator = torch.Generator().manual_seed(1000 * seed + len(voted))
        drawn = torch.randint(len(voted), (MEMBERS, len(voted)), generator=generator)
        heads = torch.stack([fit(pool[torch.tensor(voted)[rows]], ridge) for rows in drawn])
        chances = (test @ heads.T).sigmoid().mean(1)
        accuracies.append(float((chances > 0.5).double().mean()))
        margins = (heads @ pool[left].T).numpy()  # [M, N]
        # Which side people preferred decides no pick: margins of either sign are as uncertain.
        if way == "margin":
            margins = margins.mean(0, keepdims=True)
        how = "random" if way == "random" else "active"
        for i in sorted(pick(margins, batch, how, seed + len(voted)), reverse=True):
            voted.append(left.pop(i))
    return accuracies


def fit(x: Tensor, ridge: float, steps: int = 5) -> Tensor:
    """Logistic regression on differences of pairs, all won by the first, by Newton's method."""
    w = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(steps):
        p = (x @ w).sigmoid()
        gradient = x.T @ (p - 1) + ridge * w
        hessian = (x * (p * (1 - p))[:, None]).T @ x + ridge * torch.eye(len(w), dtype=x.dtype)
        w = w - torch.linalg.solve(hessian, gradient)
    return w


def reach(votes: list[int], accuracies: list[float], target: float) -> float:
    """The first votes with at least the target accuracy, between the points on a line.

    Where it is never reached, the last: the share is then too low, so look at the accuracies.
    """
    for i, accuracy in enumerate(accuracies):
        if accuracy >= target:
            if i == 0:
                return float(votes[0])
            share = (target - accuracies[i - 1]) / (accuracy - accuracies[i - 1])
            return votes[i - 1] + share * (votes[i] - votes[i - 1])
    return float(votes[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--start", type=int, default=100)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--ridge", type=float, default=10.0)
    args = parser.parse_args()
    compare(args.pairs, args.seeds, args.start, args.batch, args.ridge)


if __name__ == "__main__":
    main()
