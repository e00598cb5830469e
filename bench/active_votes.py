"""How many votes does a reward model need, if it asks for those that its ensemble disagrees on?

    python bench/smollm2_from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
    python bench/active_votes.py features models/smollm2 tldr/pairs_b.jsonl -o features.safetensors
    python bench/active_votes.py compare features.safetensors

The labels of a data set of comparisons stand for people's votes. The reward model is an ensemble of
linear heads on frozen features of a language model, each fitted to a bootstrap of the votes: poor,
but honest, and cheap enough for a CPU. Each round it is fitted to the votes so far, and asks for
more of the pool: at random, where its heads disagree most, or where their mean is nearest to even.
Held-out pairs are of other prompts. Random and active picking begin with the same votes, so they
are compared seed by seed.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from marlhf.data import read_records
from marlhf.evaluate.text_table import text_table
from marlhf.intervals import interval
from marlhf.judge.annotate.pick import pick
from marlhf.models.load import load_policy, load_tokenizer

LAYERS = (0, 4)
"""Whose outputs are the features; layers above the last of them are not computed."""
WAYS = ("random", "disagreement", "margin")
MEMBERS = 6
DIMENSIONS = 64
"""Principal directions of the differences of features that the heads see."""
LONGEST = 128
"""Tokens of a post; of a longer one the middle is cut out."""


@torch.no_grad()
def features(folder: str, data: str, num_pairs: int, output: Path) -> None:
    """Mean and last hidden states of each response, at some layers: [pairs, 2, layers * 2 * D]."""
    tokenizer, model = load_tokenizer(folder), load_policy(folder).eval()
    model.model.layers = model.model.layers[: LAYERS[-1]]
    records = [record for record, _ in read_records(data)]
    records.sort(key=lambda r: r["post"])  # responses to one post share a pass over it
    found: dict[str, list] = {"features": [], "lengths": [], "prompt": []}
    for number, (post, group) in enumerate(groupby(records, key=lambda r: r["post"])):
        group = list(group)
        head = f"SUBREDDIT: r/{group[0]['subreddit']}\nTITLE: {group[0]['title']}\nPOST: {post}"
        ids = tokenizer(head).input_ids
        if len(ids) > LONGEST:
            ids = ids[: LONGEST // 2] + ids[-LONGEST // 2 :]
        ids += tokenizer("\nTL;DR:").input_ids
        cache = model.model(torch.tensor([ids[:-1]])).past_key_values
        texts = list(dict.fromkeys(r[side] for r in group for side in ("chosen", "rejected")))
        responses = tokenizer([" " + text.strip() for text in texts]).input_ids
        width = max(map(len, responses))
        rows = [[ids[-1], *r, *[0] * (width - len(r))] for r in responses]
        mask = torch.tensor([[0] + [1] * len(r) + [0] * (width - len(r)) for r in responses])
        seen = torch.cat([torch.ones(len(rows), len(ids) - 1).long(), mask], dim=1)
        seen[:, len(ids) - 1] = 1
        cache.batch_repeat_interleave(len(rows))
        out = model.model(
            torch.tensor(rows),
            attention_mask=seen,
            past_key_values=cache,
            output_hidden_states=True,
        )
        states = torch.stack([out.hidden_states[layer] for layer in LAYERS], dim=1)  # [R, L, T, D]
        mean = (states * mask[:, None, :, None]).sum(2) / mask.sum(1)[:, None, None]
        last = states[torch.arange(len(rows)), :, mask.sum(1)]
        by_text = dict(zip(texts, torch.cat([mean, last], dim=1).flatten(1).half()))
        for r in group:
            found["features"].append(torch.stack([by_text[r["chosen"]], by_text[r["rejected"]]]))
            found["lengths"].append([len(r["chosen"]), len(r["rejected"])])
            found["prompt"].append(number)
        if number % 20 == 0:
            print(f"{len(found['prompt'])} pairs", flush=True)
            save(found, output)  # a start for those who are short of time
        if len(found["prompt"]) >= num_pairs:
            break
    save(found, output)


def save(found: dict[str, list], output: Path) -> None:
    tensors = {
        "features": torch.stack(found["features"]),
        "lengths": torch.tensor(found["lengths"]),
        "prompt": torch.tensor(found["prompt"]),
    }
    save_file(tensors, output)


def compare(file: Path, seeds: int, start: int, batch: int, ridge: float) -> None:
    """Print held-out accuracy by votes, and the votes that each way of picking takes for it."""
    data = load_file(file)
    chosen, rejected = data["features"].double().unbind(1)
    lengths = data["lengths"].double().log()
    x = torch.cat([chosen - rejected, lengths[:, :1] - lengths[:, 1:]], dim=1)
    x = x / x.square().mean(0).sqrt().clamp(min=1e-6)  # no mean: a pair turned round is its minus
    torch.manual_seed(0)
    _, _, axes = torch.svd_lowrank(x, q=DIMENSIONS, niter=4)
    x = x @ axes
    x = x / x.square().mean(0).sqrt().max()
    curves: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        prompts = data["prompt"].unique()
        generator = torch.Generator().manual_seed(seed)
        aside = prompts[torch.randperm(len(prompts), generator=generator)[: len(prompts) // 3]]
        test = torch.isin(data["prompt"], aside)
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
    """Held-out accuracy after each round of votes, until two thirds of the pool have one."""
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    voted, left = order[:start].tolist(), order[start:].tolist()
    accuracies: list[float] = []
    while len(voted) <= 2 * len(pool) // 3:
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
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("features")
    make.add_argument("model")
    make.add_argument("data")
    make.add_argument("--pairs", type=int, default=4000)
    make.add_argument("-o", "--output", type=Path, required=True)
    run = commands.add_parser("compare")
    run.add_argument("features", type=Path)
    run.add_argument("--seeds", type=int, default=5)
    run.add_argument("--start", type=int, default=200)
    run.add_argument("--batch", type=int, default=200)
    run.add_argument("--ridge", type=float, default=1.0)
    args = parser.parse_args()
    if args.command == "features":
        features(args.model, args.data, args.pairs, args.output)
    else:
        compare(args.features, args.seeds, args.start, args.batch, args.ridge)


if __name__ == "__main__":
    main()
