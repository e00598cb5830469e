"""Do sketches of token scores rank ways to assign credit as whole gradients do?

`marlhf credit` and `credit: auto` compare gradients of a linear map before the head, sketched to
576 numbers. This compares them, on the same batches of a PPO run, with that map's exact gradient
and with the exact gradient of all weights: one backward pass for each way and batch.

    python bench/credit_sketch.py runs/toy/macro-ppo --batches 12
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from scipy.stats import spearmanr

from marlhf.config.candidates import parse_candidates
from marlhf.credit.measure import MEASURED, credit_of
from marlhf.credit.state import open_state, sample_batch
from marlhf.evaluate.results import text_table
from marlhf.models.forward import token_stats
from marlhf.models.logprobs import BLOCKS
from marlhf.train.agreement import gradient_agreement
from marlhf.train.credit_choice import Measurement, by_each, options_of, unbiased
from marlhf.train.ppo import assign_credit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--step", type=int)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    state = open_state(asked.run, step=asked.step, device=asked.device)
    config, models = state.config, state.models
    options = options_of(config, parse_candidates(MEASURED))
    configs = [*(option.config for option in options), unbiased(config)]
    kinds: dict[str, list[torch.Tensor]] = {"sketch": [], "exact map": [], "all weights": []}
    for number in range(asked.batches):
        experience, _ = sample_batch(state, number, seed=0)
        shuffler = torch.Generator().manual_seed(number)
        credit = credit_of(state, experience, shuffler)
        advantages = by_each(experience, credit, models, shuffler, configs, assign_credit)
        sketch, exact = Measurement(advantages, range(BLOCKS)), Measurement(advantages, None)
        models.policy.requires_grad_(True)
        whole = [torch.zeros(0)] * len(configs)
        for micro in experience.micro_batches(models):
            for measurement in (sketch, exact):
                part = measurement.begin()
                models.logprobs(models.policy, micro.sequences, part.watch())
                part.add(micro)
                part.end()
            for i in range(len(configs)):
                models.policy.zero_grad()
                logprobs = token_stats(models.policy, micro.sequences).logprobs
                (micro.take(advantages[i]) * logprobs).sum().backward()
                grads = [p.grad.flatten() for p in models.policy.parameters() if p.grad is not None]
                found = torch.cat(grads)
                whole[i] = whole[i] + found if len(whole[i]) else found
        kinds["sketch"].append(sketch.sums)
        kinds["exact map"].append(exact.sums)
        kinds["all weights"].append(torch.stack(whole))
        print(f"batch {number + 1} of {asked.batches}", flush=True)
    cosines = {}
    for kind, found in kinds.items():
        gradients = torch.stack(found, dim=1)
        blocks = BLOCKS if kind == "sketch" else 1
        cosines[kind] = gradient_agreement(gradients[:-1], gradients[-1], blocks=blocks)
    rows = [
        [option.name]
        + [f"{float(a.cosine[i]):.3f} +- {float(a.error[i]):.3f}" for a in cosines.values()]
        for i, option in enumerate(options)
    ]
    print(text_table(["credit by", *cosines], rows))
    truth = cosines["all weights"].cosine.tolist()
    for kind in ("sketch", "exact map"):
        rank = spearmanr(cosines[kind].cosine.tolist(), truth).statistic
        print(f"rank correlation of {kind} with all weights: {rank:.2f}")


if __name__ == "__main__":
    main()
