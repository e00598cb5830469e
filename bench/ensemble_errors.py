"""How alike the errors of reward models are on the offline task, whose true score is known.

    python bench/ensemble_errors.py runs/ensemble/reward             # the members of one model
    python bench/ensemble_errors.py runs/a/reward runs/b/reward      # models trained apart

Scores of new stories are regressed on the true score; what is left are errors. Printed is the
mean correlation of the errors of two members, and the accuracy on pairs of one and of the mean.
"""

from __future__ import annotations

import argparse
from itertools import combinations

import torch
from torch import Tensor

from marlhf.data import encode_responses
from marlhf.data.encode import encode_prompts
from marlhf.data.toy import rows
from marlhf.intervals import mean
from marlhf.models.load import load_scalar, load_tokenizer
from marlhf.reward import RewardModel
from marlhf.reward.model import accuracy, correlation
from marlhf.runs.layout import model_folder

PAIRS, SEED = 512, 1
"""Stories that no recipe trains on: theirs are of seed 0."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rewards", nargs="+", help="runs of reward models of the offline task")
    folders = [model_folder(path) for path in parser.parse_args().rewards]
    stories = rows(PAIRS, SEED)
    sides = ("chosen", "rejected")
    pairs = [(str(row.prompt), getattr(row, side)) for side in sides for row in stories]
    gold = [row.columns[f"gold_{side}"] for side in sides for row in stories]
    scores = torch.cat([_scores(folder, pairs) for folder in folders], dim=1)  # [2 N, M]
    errors = [
        _residual(member, torch.tensor(gold, dtype=torch.float32)) for member in scores.unbind(1)
    ]
    alike = [float(correlation(a, b)) for a, b in combinations(errors, 2)]
    scores = scores / scores.std(dim=0)  # models trained apart have scales of their own
    chosen, rejected = scores.chunk(2)
    right = [accuracy(margins) for margins in (chosen - rejected).unbind(1)]
    together = accuracy((chosen - rejected).mean(dim=1))
    print(
        f"{scores.shape[1]} members, {PAIRS} pairs: correlation of errors {mean(alike):.3f}; "
        f"accuracy {mean(right):.3f} of one, {together:.3f} of the mean"
    )


def _scores(folder: str, pairs: list[tuple[str, str]]) -> Tensor:
    tokenizer = load_tokenizer(folder)
    model = RewardModel(load_scalar(folder).eval(), tokenizer, tokenizer)
    prompts = encode_prompts(tokenizer, [prompt for prompt, _ in pairs])
    return model.member_scores(prompts, encode_responses(tokenizer, pairs, tokenizer.eos_token_id))


def _residual(scores: Tensor, gold: Tensor) -> Tensor:
    x, y = gold - gold.mean(), scores - scores.mean()
    return y - x * (x @ y) / (x @ x)


if __name__ == "__main__":
    main()
