"""How well the probability of the known answer agrees with values from continuations, on sums.

    marlhf sft sums output_dir=runs/sums/sft
    python bench/answer_values.py runs/sums/sft/model --seeds 0 1

Responses of an SFT model are cut at their lines. At each start of a line stand the share of
`--continuations` that come out right, and the probability of the right last line, if the policy had
to write it at once. Then the time of each pass, beside that of a training pass on these responses.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from marlhf.core import Lines, Segments, segment
from marlhf.data import DataConfig
from marlhf.data.sums import solution
from marlhf.evaluate.results import text_table
from marlhf.models.forward import pass_choice
from marlhf.rollout import Sampling
from marlhf.runtime.distributed import start
from marlhf.runtime.stage import NO_OBJECTS
from marlhf.train.experience import RolloutScorer
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import load_models, load_prompts
from marlhf.train.sampling import sample_responses
from marlhf.train.state_values import (
    NEVER,
    answer_branches,
    answer_logprobs,
    continuation_returns,
    states_of,
)

TEMPLATES = {"last line": "\n{answer}", "last line after ####": "\n#### {answer}"}
CHUNK = 32
"""States whose continuations are sampled at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="the folder of a model that `marlhf sft sums` has trained")
    parser.add_argument("--responses", type=int, default=24, help="for each seed")
    parser.add_argument("--every", type=int, default=1, help="continue every so many starts")
    parser.add_argument("--continuations", type=int, default=32)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--times", action="store_true", help="only the times of passes")
    args = parser.parse_args()
    config = PPOConfig(
        model=args.model,
        reward_funcs=("marlhf.reward.sums:solved",),
        data=DataConfig(source="sums", parts={"sft": 0.4, "ppo": 0.6}, eval_size=128),
        sampling=Sampling(max_new_tokens=176),
        segmenter=Lines(),
        values="answer",
        answer_column="last_line",
        precision="float32",
        kl_coef=0.0,
        output_dir=str(Path(args.model).parent / "answer_values"),
    )
    models = load_models(config, NO_OBJECTS, start("auto"), critic=False)
    examples, _ = load_prompts(config, models, NO_OBJECTS)
    for example in examples:
        example.row.columns["last_line"] = solution(str(example.row.prompt)).split("\n")[-1]
    score = RolloutScorer(models, config)
    print(f"{platform.machine()}, {models.world.device}, torch {torch.__version__}", flush=True)

    thirds: list[Tensor] = []
    sampled: list[Tensor] = []
    answers: dict[str, list[Tensor]] = {name: [] for name in TEMPLATES}
    for seed in args.seeds:
        chosen = examples[seed * args.responses :][: args.responses]
        torch.manual_seed(seed)
        seeds = torch.randint(2**62, (args.responses,)).tolist()
        experience = score(chosen, sample_responses([e.prompt for e in chosen], models, seeds))
        responses = experience.responses(models.vocabulary, torch.Generator())
        segments = segment(config.segmenter, responses)
        states = states_of(chosen, segments, experience)
        lines = torch.cat([torch.arange(int(n)) for n in segments.starts.sum(dim=1)])
        kept = lines % args.every == 0
        thirds.append(third_of_each(segments)[kept])
        for name, template in TEMPLATES.items():
            branches = answer_branches(
                states, models.tokenizer, replace(config, answer_template=template)
            )
            logprobs = answer_logprobs(states, branches, experience, models).cpu()
            answers[name].append(logprobs.exp()[kept])
        right = float(experience.raw_scores.mean())
        print(f"seed {seed}: {len(states)} states of {len(chosen)} responses, {right:.0%} right")
        if seed == args.seeds[0]:
            print_times(states, branches, experience, segments, models)
            if args.times:
                return
        states = [state for state, keep in zip(states, kept.tolist()) if keep]
        for begin in range(0, len(states), CHUNK):
            part = states[begin : begin + CHUNK]
            drawn = torch.randint(2**62, (len(part) * args.continuations,)).tolist()
            returns = continuation_returns(part, score, args.continuations, drawn, 0.0, "k1")
            sampled.append(returns.cpu())
            print(f"  {begin + len(part)} states continued", end="\r", flush=True)
    returns, third = torch.cat(sampled), torch.cat(thirds)
    print_agreement(returns, third, {name: torch.cat(x).cpu() for name, x in answers.items()})


def third_of_each(segments: Segments) -> Tensor:
    """Of the response, that each macro action begins in: [S]."""
    place = torch.arange(segments.mask.shape[1], device=segments.mask.device)
    part = place * 3 // segments.mask.sum(dim=1, keepdim=True)
    return part[segments.starts].cpu()


def print_agreement(returns: Tensor, third: Tensor, answers: dict[str, Tensor]) -> None:
    """Correlations with the mean return [S], and what its noise leaves possible."""
    true, count = returns.mean(dim=1), returns.shape[1]
    noise = returns.var(dim=1) / count
    rows: list[list[str]] = []
    for name, here in [("all", third >= 0), *((f"third {n + 1}", third == n) for n in range(3))]:
        spread = float(true[here].var())
        most = math.sqrt(max(0.0, 1 - float(noise[here].mean()) / spread))
        found = [correlation(true[here], x[here]) for x in answers.values()]
        means = [float(x[here].mean()) for x in answers.values()]
        numbers = [float(true[here].mean()), most, *(x for pair in zip(found, means) for x in pair)]
        rows.append([name, str(int(here.sum())), *(f"{x:.2f}" for x in numbers)])
    heads = [head for name in answers for head in (name, "its mean")]
    print(f"\ncorrelation with the mean of {count} continuations")
    print(text_table(["states", "number", "mean", "at most", *heads], rows))


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


def print_times(states, branches, experience, segments, models) -> None:
    """Of the pass over rows with their branches, of a row for each, and of a training pass."""
    choice, device = pass_choice(models.policy), models.world.device

    def each_alone() -> None:
        until, choice.branches_until = choice.branches_until, NEVER
        answer_logprobs(states, branches, experience, models)
        choice.branches_until = until

    def training() -> None:
        for micro in experience.micro_batches(models):
            models.logprobs(models.policy, micro.sequences).sum().backward()
        models.policy.zero_grad()

    training_seconds = best(training, device)
    together = best(lambda: answer_logprobs(states, branches, experience, models), device)
    apart = best(each_alone, device)
    rows, tokens = len(segments.mask), sum(experience.sequences.total_lengths)
    print(
        f"per response: {tokens / rows:.0f} tokens, {len(states) / rows:.1f} starts, answers of "
        f"{sum(len(b.tokens) for b in branches) / len(branches):.1f} tokens. Training pass "
        f"{training_seconds:.3f} s; answers in one pass {together / training_seconds:.2f} of it, "
        f"a row for each {apart / training_seconds:.2f}",
        flush=True,
    )


def best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds; on a CPU those of the process, whatever else the machine does."""
    gpu = device.type == "cuda"
    clock = time.perf_counter if gpu else time.process_time
    seconds: list[float] = []
    for _ in range(4):
        begin = clock()
        work()
        if gpu:
            torch.cuda.synchronize()
        seconds.append(clock() - begin)
    return min(seconds[1:])


if __name__ == "__main__":
    main()
