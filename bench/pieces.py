"""What a PPO step loses without each kernel and fast path.

    python bench/pieces.py qwen2-0.5b
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
from marlhf.models import fast_passes, graphs, layer_kernels, llama_layers, logprobs
from marlhf.rollout import continuous
from marlhf.rollout import llama as decoders
from marlhf.rollout.native import NativeEngine

ppo_step.SHAPES["qwen2-0.5b"] = ppo_step.Shape(
    "Qwen2Config", 896, 24, 14, 2, 64, 4864, 151936, 128, 256, 256, 16384
)
WARMUP = 3  # as it is, recorded, replayed


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


def plain(name):
    """A function of a layer as its plain twin computes it."""
    function = getattr(llama_layers, name)

    def run(*args, **options):
        with patched((layer_kernels, "fused", no)):
            return function(*args, **options)

    return llama_layers, name, run


def no(*_, **__):
    return False


PIECES = {
    "everything": [],
    "own attention in training": [
        (llama_layers, "has_attention", no),
        (decoders, "has_attention", no),
    ],
    "gate product and SwiGLU in one kernel": [(layer_kernels, "_is_gated", no)],
    "training passes as CUDA graphs": [
        (graphs.GraphedPasses, "__call__", lambda _, __, run, inputs: run(*inputs))
    ],
    "decode step in five kernels per layer": [(decoders, "can_fuse", no)],
    "gradient of a norm's weight": [plain("normed_weight_grads")],
    "log-probs of chosen tokens": [(logprobs, "fused", no)],
    "drawing tokens": [(continuous, "fused", no)],
    "norms": [plain(name) for name in ("add_norm", "norm_backward", "normed_weight_grads")],
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
        eager=False, modules=False, packed=False, checkpointing=False, lengths="fixed"
    )
    torch.manual_seed(0)
    models, config = ppo_step.build(shape, device, options)
    bench = ppo_step.Bench(models, config, shape)
    with_kernels = list(fast_passes._KERNELS)
    whole = 0.0
    print(f"{args.shape}, without{'step s':>36}{'rollout s':>10}{'update s':>10}{'loses':>8}")
    for name in [*PIECES, "everything"]:
        changes = PIECES[name]
        fast_passes._KERNELS.clear()
        if changes != "modules":
            for model in with_kernels:
                fast_passes.use_kernels(model)  # graphs begin anew
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
