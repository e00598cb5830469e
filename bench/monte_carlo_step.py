"""A PPO step with values from continuations, or from known answers, beside one of RLOO.

    python bench/monte_carlo_step.py                     # Qwen2.5-1.5B's shape on a GPU
    python bench/monte_carlo_step.py --deadline 80       # stop in time, with what there is by then
    python bench/monte_carlo_step.py --tiny              # a CPU, to see that it runs

All train on as many responses. Random weights, which never end a response by themselves: each ends
where lengths like those of GSM8K's solutions say, and continuations do so past their beginning. The
reward is the parity of a response's tokens, so its time is in no row. The first step compiles.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ppo_step
import torch
import transformers
from torch import Tensor

from marlhf.core import NGram, Vocabulary
from marlhf.data import Row
from marlhf.models.base import cast_linear_layers, frozen_dtype
from marlhf.models.forward import choose_passes
from marlhf.models.tiny import tiny_tokenizer
from marlhf.reward import Rewards
from marlhf.rollout import Sampling
from marlhf.rollout.engine import Rollout
from marlhf.rollout.native import NativeEngine
from marlhf.runtime.distributed import start
from marlhf.runtime.loop import Clock
from marlhf.runtime.optim import make_optimizer
from marlhf.runtime.stage import Example
from marlhf.spans import vocabulary
from marlhf.train import ppo, rloo
from marlhf.train.experience import RolloutScorer
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models
from marlhf.train.rl_run import Learner
from marlhf.train.rloo_config import RLOOConfig
from marlhf.train.sampling import sample_responses
from marlhf.train.state_values import StateValues

GROUP = 4
"""Responses to a prompt, where there are several."""
COMMON = {"model": "random", "reward_model": "random", "output_dir": "unused", "kl_coef": 0.01}
PPO = COMMON | {"values": "monte_carlo", "segmenter": NGram(8), "lam": 0.0, "continuations": 2}
FEW, SIBLINGS = {"boundaries": 3}, {"boundaries": 3, "num_samples": GROUP}
SYSTEMS: dict[str, Any] = {
    "RLOO": RLOOConfig(**COMMON, num_samples=GROUP),
    "continuations at 3 boundaries": PPOConfig(**PPO, **FEW),
    "and num_samples: 4": PPOConfig(**PPO, **SIBLINGS),
    "and continuation_kl: false": PPOConfig(**PPO, **SIBLINGS, continuation_kl=False),
    "the same at 2 boundaries": PPOConfig(
        **PPO, **SIBLINGS | {"boundaries": 2}, continuation_kl=False
    ),
    "values: answer, 3 boundaries": PPOConfig(**PPO | {"values": "answer"}, **SIBLINGS),
    "every 64 tokens, no new setting": PPOConfig(**PPO | {"segmenter": NGram(64)}),
}


class GivenLengths:
    """An engine whose responses end where drawn lengths say."""

    serves_all_ranks = False

    def __init__(self, engine: NativeEngine, mean: float, longest: int) -> None:
        self.engine, self.mean, self.longest = engine, mean, longest
        self.generator = torch.Generator().manual_seed(0)
        self.tokens = 0  # sampled since this was last set to 0

    def update_weights(self, model: torch.nn.Module) -> None:
        self.engine.update_weights(model)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
    ) -> Rollout:
        begun = [0] * len(prompts) if limits is None else [self.longest - n for n in limits]
        ends = [self._length(after=n) - n for n in begun]
        self.tokens += sum(ends)
        return self.engine.generate(prompts, sampling, seeds, ends)

    def _length(self, after: int) -> int:
        """Log-normal, with a deviation of 0.4 of the mean, beyond the tokens there are already."""
        for _ in range(100):
            normal = float(torch.randn((), generator=self.generator))
            length = min(round(self.mean * math.exp(0.4 * normal - 0.08)), self.longest)
            if length > after:
                return length
        return after + 1


def parity(_: Any, responses: Sequence[Sequence[int]], rows: Sequence[Row]) -> Tensor:
    """A reward that says nothing and costs nothing."""
    return torch.tensor([float(sum(r) % 2) for r in responses])


class Bench:
    """Steps of each system on one policy."""

    def __init__(self, shape: ppo_step.Shape, device: torch.device, mean: float) -> None:
        self.shape = shape
        policy, reference = (ppo_step.random_model(shape, device, False, False) for _ in range(2))
        reference.requires_grad_(False)
        if (dtype := frozen_dtype(device, "auto")) is not None:
            cast_linear_layers(reference, dtype)
        for model in (policy, reference):
            choose_passes(model)
        tokenizer = tiny_tokenizer()
        table = vocabulary(tokenizer, shape.vocabulary)
        sampling = Sampling(max_new_tokens=shape.response)
        self.engine = GivenLengths(NativeEngine(policy, [-1], 0), mean, shape.response)
        self.models = Models(
            policy,
            reference,
            None,
            Rewards([("parity", lambda *x: parity(*x).to(device), 1.0)]),
            self.engine,
            tokenizer,
            Vocabulary(**{k: v.to(device) for k, v in vars(table).items()}),
            start(device.type),
            sampling,
            shape.budget,
        )
        self.optimizers = {"policy": make_optimizer(policy, 1e-6)}
        self.sampler = torch.Generator().manual_seed(1)

    def step(self, config: Any) -> dict[str, float]:
        """Seconds by part, and tokens sampled for values."""
        models, shape = self.models, self.shape
        clock, begun = Clock(models.world.device), time.perf_counter()
        prompts = torch.randint(
            2, shape.vocabulary, (shape.rows // config.num_samples, shape.prompt)
        ).tolist()
        row = Row("", columns={"answer": "128"})
        batch = [Example(row, p, [], []) for p in prompts for _ in range(config.num_samples)]
        config = replace(config, sampling=models.sampling)
        score = RolloutScorer(models, config)
        is_ppo = isinstance(config, PPOConfig)
        score.reads_entropy |= is_ppo and config.boundaries is not None
        rollout = sample_responses([e.prompt for e in batch], models, self._seeds(len(batch)))
        clock.mark("rollout")
        experience = score(batch, rollout)
        clock.mark("score")
        self.engine.tokens = 0
        learner = Learner(models, self.optimizers, 1, config.max_grad_norm, self.sampler)
        shuffler, rates = torch.Generator(), {"policy": 1e-6}
        if is_ppo:
            rewards, segments = ppo.shape_and_segment(experience, models, config, 0.01, shuffler)
            rl = SimpleNamespace(
                score=score,
                kl=SimpleNamespace(coef=config.kl_coef),
                response_seeds=self._seeds,
                models=models,
                examples=batch,
            )
            values_without_critic = StateValues(rl, config)
            segments, values = values_without_critic(batch, experience, segments, rewards, config)
            clock.mark("values")
            credit = ppo.assign_credit(rewards, values, segments, config)
            ppo.update(experience, credit, learner, rates, config)
        else:
            credit = rloo.assign_credit(experience, models, config, 0.01, shuffler)
            clock.mark("values")
            rloo.update(experience, credit, learner, rates, config, 0.01)
        clock.mark("update")
        found = {name.removeprefix("time/"): x for name, x in clock.phases.items()}
        return found | {"step": time.perf_counter() - begun, "tokens": float(self.engine.tokens)}

    def _seeds(self, count: int) -> list[int]:
        return torch.randint(2**62, (count,), generator=self.sampler).tolist()


PARTS = ("rollout", "score", "values", "update", "step")


def main() -> None:
    begun = time.perf_counter()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each system")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds, all in all")
    args = parser.parse_args()
    gpu = torch.cuda.is_available() and not args.tiny
    shape = ppo_step.SHAPES["tiny" if args.tiny else "qwen2-1.5b"]
    shape = shape if args.tiny else replace(shape, prompt=130, response=320)
    device, mean = torch.device("cuda" if gpu else "cpu"), 0.5 * shape.response
    name = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{shape.rows} responses of {mean:.0f} tokens in the mean, {shape.response} at most")
    torch.manual_seed(0)
    bench = Bench(shape, device, mean)
    systems = list(SYSTEMS.items())
    # The one with the most continuations first: it makes the cache that the others use.
    bench.step(systems[1][1])
    print(f"{time.perf_counter() - begun:.0f} s: loaded and compiled\n", flush=True)
    best: dict[str, dict[str, float]] = {}
    print(f"{'':34}{'samples/s':>10}{''.join(f'{p:>9}' for p in PARTS)}{'ratio':>7}{'tokens':>9}")
    for number in range(1, args.rounds + 1):
        for system, config in systems:
            if time.perf_counter() - begun > args.deadline:
                break
            found = bench.step(config)
            if system not in best or found["step"] < best[system]["step"]:
                best[system] = found
            print_row(f"{number} {system}", found, best["RLOO"]["step"], shape.rows)
    print("\nthe best of each")
    for system, found in best.items():
        print_row(f"  {system}", found, best["RLOO"]["step"], shape.rows)
    if gpu:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def print_row(name: str, found: dict[str, float], rloo_seconds: float, rows: int) -> None:
    parts = "".join(f"{found[part]:9.3f}" for part in PARTS)
    ratio = found["step"] / rloo_seconds
    rate = rows / found["step"]
    print(f"{name:34}{rate:10.1f}{parts}{ratio:7.2f}{found['tokens']:9.0f}", flush=True)


if __name__ == "__main__":
    main()
