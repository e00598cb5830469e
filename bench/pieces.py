"""What a PPO step loses without each kernel and fast path.

    python bench/pieces.py qwen2.5-0.5b
    python bench/pieces.py qwen2-1.5b

Each piece is taken out alone, in one process, on the same models. The first line comes again at the
end, to show how far the machine drifts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import ppo_step

from marlhf.core import NGram
from marlhf.kernels import attention
from marlhf.models import llama, logprobs
from marlhf.models.forward import pass_choice
from marlhf.rollout import continuous
from marlhf.rollout import llama as decoders
from marlhf.rollout.native import NativeEngine

WARMUP = 3


@contextlib.contextmanager
def patched(*changes):
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def no(*_, **__):
    return False


def eager(function, _):
    return function


def step_without_graph(step, slots, reach):
    step._step(reach, slots)


PIECES = {
    "everything": [],
    "attention of decode steps (else SDPA)": [
        (attention, "has_kernel", no),
        (decoders, "has_kernel", no),
    ],
    "log-probs of chosen tokens": [(logprobs, "fused", no)],
    "drawing tokens": [(continuous, "fused", no)],
    "compiled halves of layers (else eager)": [
        (llama, "on_device", eager),
        (decoders, "on_device", eager),
    ],
    "decode steps as CUDA graphs": [
        (
            continuous.DecodeStep,
            "__call__",
            lambda self, n, reach, **how: self._step(reach, n, **how),
        )
    ],
    "own decoder (else modules, compiled)": [(decoders.LlamaDecoder, "fits", staticmethod(no))],
    "own training pass (else modules, compiled)": "modules",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=ppo_step.SHAPES)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    shape, device = ppo_step.SHAPES[args.shape], torch.device("cuda")
    options = argparse.Namespace(
        eager=False,
        modules=False,
        checkpointing=False,
        lengths="fixed",
        budget=None,
        optimizer="adamw",
        weights="float32",
        offload=False,
    )
    torch.manual_seed(0)
    models, config = ppo_step.build(shape, device, options)
    bench = ppo_step.Bench(models, config, shape)
    trained = (models.policy, models.reference, models.critic, models.reward.parts[0][1].model)
    whole = 0.0
    print(f"{args.shape}, without{'step s':>36}{'rollout s':>10}{'update s':>10}{'loses':>8}")
    for name in [*PIECES, "everything"]:
        changes = PIECES[name]
        for model in trained:
            pass_choice(model).by_llama = changes != "modules"
        engine = NativeEngine(models.policy, [-1], 0, token_budget=config.rollout_tokens)
        bench.models = replace(models, engine=engine)
        with patched(*(changes if changes != "modules" else [])):
            steps = [bench.step(NGram(5)) for _ in range(WARMUP + args.steps)][WARMUP:]
        best = {key: min(step[key] for step in steps) for key in steps[0]}
        whole = whole or best["step"]
        print(
            f"{name:45}{best['step']:10.4f}{best['rollout']:10.4f}{best['update']:10.4f}"
            f"{100 * (best['step'] / whole - 1):7.1f}%",
            flush=True,
        )
        bench.models = models
        del engine
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
