"""What PPO takes of a GPU with the settings that save memory, beside what `marlhf doctor` predicts.

    python bench/memory.py                       # all settings, each in a process of its own
    python bench/memory.py --settings a,b,d      # some of them
    python bench/memory.py --settings e --card 24   # as much memory as a card of 24 GB has
    python bench/memory.py --tiny                # a CPU: whether the script works

A line per setting as it finishes: samples per second, share of the hardware's limit, peak memory,
predicted memory and their ratio. Random weights, one PPO epoch, the fewest steps that tell: peaks
are those of the steps after the warm-up. With `--card` a process gets no more than that card has,
and caches have the size they have on it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
import ppo_step

from marlhf.core import NGram
from marlhf.models.base import pick_device
from marlhf.rollout import native
from marlhf.runtime.memory_plan import GIB


class Setting(NamedTuple):
    name: str
    shape: str
    options: dict[str, Any]
    steps: int = 2  # of the warm-up, and as many that are measured


SAVING = {"optimizer": "adamw_8bit"}
SETTINGS = {
    "a": Setting("1.5B, defaults", "qwen2-1.5b", {}),
    "b": Setting("1.5B, adamw_8bit", "qwen2-1.5b", SAVING),
    "d": Setting("8B, LoRA, shared base", "llama-8b-lora", {}, 1),
    "e": Setting("8B, QLoRA, shared base", "llama-8b-qlora", {}, 1),
    "c": Setting("1.5B, offload", "qwen2-1.5b", {"offload": True}),
    "g": Setting("1.5B, adamw_8bit, bfloat16", "qwen2-1.5b", {**SAVING, "weights": "bfloat16"}),
    "h": Setting("1.5B, passes of 8192", "qwen2-1.5b", {"budget": 8192}),
    "f": Setting("4B, LoRA, shared base", "qwen3-4b-lora", {}, 1),
    "i": Setting("8B, QLoRA, checkpointing", "llama-8b-qlora", {"checkpointing": True}, 1),
}
"""In the order in which they matter."""
CUDA_CONTEXT = 0.6e9
"""What CUDA takes of a card before anything of ours."""
COLUMNS = ("samples/s", "of limit", "peak GiB", "predicted", "ratio", "step s", "all s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", default=",".join(SETTINGS), help="some of a to i")
    parser.add_argument("--limit", type=float, default=150, help="seconds that one may take")
    parser.add_argument("--total", type=float, default=1e9, help="seconds after which none begins")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--card", type=float, help="GB of the card to stand in for")
    parser.add_argument("--one", choices=SETTINGS, help="measure one, as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(SETTINGS[args.one], args.tiny, args.card)))
        return
    begun = time.perf_counter()
    print(f"{'':31}" + "".join(f"{name:>11}" for name in COLUMNS), flush=True)
    for key in args.settings.split(","):
        if time.perf_counter() - begun > args.total:
            print(f"{key}  {SETTINGS[key].name:28}not begun: out of time", flush=True)
            continue
        print(f"{key}  {SETTINGS[key].name:28}" + in_a_process(key, args), flush=True)


def in_a_process(key: str, args: argparse.Namespace) -> str:
    """The numbers of a setting, or why there are none."""
    command = [sys.executable, __file__, "--one", key, *(["--tiny"] if args.tiny else [])]
    command += ["--card", str(args.card)] if args.card else []
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=args.limit
        )
    except subprocess.TimeoutExpired:
        return f"did not finish in {args.limit:.0f} s"
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        return f"failed: {' '.join(last)[:300]}"
    found = json.loads(done.stdout.splitlines()[-1])
    found["all s"] = time.perf_counter() - start
    return "".join(f"{found[name]:11.2f}" for name in COLUMNS)


def measure(setting: Setting, tiny: bool, card: float | None) -> dict[str, float]:
    """Build the models, take some steps, and measure the last ones."""
    device = pick_device("cpu" if tiny else "cuda")
    if card is not None:  # the GPU's own size is all that tells it from such a card
        native.total_memory = ppo_step.total_memory = lambda _: int(card * 1e9)
    if card is not None and not tiny:
        of_gpu = (card * 1e9 - CUDA_CONTEXT) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(of_gpu)
    shape = ppo_step.SHAPES[setting.shape]
    if tiny:
        small = ppo_step.SHAPES["tiny"]
        shape = replace(small, lora=shape.lora, quantize=shape.quantize, rows=4)
    defaults = {
        "budget": None,
        "optimizer": "adamw",
        "weights": "float32",
        "offload": False,
        "checkpointing": False,
        "eager": False,
        "modules": False,
        "lengths": "fixed",
    }
    torch.manual_seed(0)
    options = argparse.Namespace(**(defaults | setting.options))
    models, config = ppo_step.build(shape, device, options)
    bench = ppo_step.Bench(models, config, shape)
    for _ in range(setting.steps):
        bench.step(NGram(5))
    if not tiny:
        torch.cuda.reset_peak_memory_stats()
    best = min(bench.step(NGram(5))["step"] for _ in range(setting.steps))
    peak = 0.0 if tiny else torch.cuda.max_memory_allocated() / GIB
    del bench, models
    if not tiny:
        torch.cuda.empty_cache()
    compute, decode, _ = ppo_step.limit_seconds(shape, device)
    predicted = ppo_step.predict(shape, config).peak / GIB
    return {
        "samples/s": shape.rows / best,
        "of limit": (compute + decode) / best,
        "peak GiB": peak,
        "predicted": predicted,
        "ratio": peak / predicted,
        "step s": best,
    }


if __name__ == "__main__":
    main()
