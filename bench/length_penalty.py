"""Why the quality head's penalty is a covariance with length and not ODIN's correlation.

    python bench/length_penalty.py

Made-up pairs: responses have a length, a quality and 62 numbers of noise, mixed; votes follow both,
weakly. A small network learns from 64 pairs a step, as a reward model does. Two minutes on a core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, logsigmoid

from marlhf.evaluate.results import text_table
from marlhf.reward.model import correlation
from marlhf.train.reward import Labels, Objective

DIM, BATCH, STEPS = 64, 64, 220
Penalty = Callable[[Tensor, Tensor], Tensor]


def ours(scores: Tensor, lengths: Tensor) -> Tensor:
    nothing = torch.zeros(scores.shape[1])
    labels = Labels(margin=nothing, flipped=nothing, lengths=lengths)
    objective = Objective(labels, torch.ones(1, len(nothing), dtype=torch.long), length_head=True)
    return objective.length_penalty(scores)


def of_odin(scores: Tensor, lengths: Tensor) -> Tensor:
    quality, length = (correlation(head.flatten(), lengths.flatten()) for head in scores.unbind(2))
    return quality.abs() - length


def pairs(count: int, votes: tuple[float, float], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [2, N, DIM], lengths and qualities [2, N] of chosen and rejected responses."""
    rng = torch.Generator().manual_seed(seed)
    mix = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(0)) / DIM**0.5
    of_prompt = torch.randn(1, count, generator=rng)
    length = 0.7 * (torch.randn(2, count, generator=rng) + of_prompt)
    x = torch.randn(2, count, DIM, generator=rng)
    x[..., 0] = length
    worth = votes[0] * x[..., 1] + votes[1] * length
    wins = torch.rand(count, generator=rng) < torch.sigmoid(worth[0] - worth[1])
    x = torch.where(wins[:, None], x, x.flip(0))
    return x @ mix, x[..., 0], x[..., 1]


def trained(penalty: Penalty | None, votes: tuple[float, float], seed: int) -> list[float]:
    """Accuracy, that where the shorter won, and the correlation with length and with quality."""
    torch.manual_seed(seed)
    x, length, _ = pairs(14000, votes, seed=seed + 1)
    body = nn.Sequential(nn.Linear(DIM, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
    head = nn.Linear(128, 2 if penalty else 1, bias=False)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for rows in torch.randint(x.shape[1], (STEPS, BATCH)):
        scores = head(body(x[:, rows]))
        loss = -logsigmoid(scores[0].sum(-1) - scores[1].sum(-1)).mean()
        if penalty:
            overlap = cosine_similarity(head.weight[0], head.weight[1], dim=0).abs()
            loss = loss + penalty(scores, length[:, rows]) + overlap
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    x, length, quality = pairs(4000, votes, seed=seed + 1001)
    with torch.no_grad():
        scores = head(body(x))[..., 0]
    right = (scores[0] > scores[1]).double()
    by = [correlation(scores.flatten(), of.flatten()) for of in (length, quality)]
    return [float(v) for v in (right.mean(), right[length[0] < length[1]].mean(), *by)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    rows: list[list[str]] = []
    for votes in ((0.3, 0.4), (0.6, 0.5), (2.0, 2.0)):
        for name, penalty in (("plain", None), ("ODIN's", of_odin), ("marlhf's", ours)):
            ends = torch.tensor([trained(penalty, votes, seed) for seed in range(args.seeds)])
            means = [f"{value:.2f}" for value in ends.mean(0).tolist()]
            rows.append([f"{votes[0]}, {votes[1]}", name, *means])
    header = ["votes by quality, length", "penalty", "accuracy", "where the shorter won"]
    print(text_table([*header, "correlation with length", "with quality"], rows))


if __name__ == "__main__":
    main()
