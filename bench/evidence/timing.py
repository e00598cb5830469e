"""What a step costs when nothing else runs, and what the machine could do.

Runs side by side share the GPU, so their own clocks say nothing about a method. Here a few steps
of each run alone, one after the other in one process; compiled code stays for those that follow.
"""

from __future__ import annotations

import importlib
import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ppo_step import Shape, best_time
from transformers import AutoConfig

from evidence import methods
from evidence.settings import Settings
from marlhf.models.base import pick_device
from marlhf.models.load import load_tokenizer
from marlhf.runs.read import read_run
from marlhf.train.stage import load_examples

METHODS = ("ppo", "n5-sum", "parsing", "rloo")
WARM = 4
"""Steps left out: kernels are still being made."""
FILE = "timing.json"


def time_alone(settings: Settings) -> None:
    folder = settings.folder("timing/tldr")
    found: dict[str, Any] = {}
    steps = WARM + settings.time_steps
    for name in METHODS:
        rate, run = settings.rates[0], f"timing/tldr/{name}"
        config: Any = methods.method(settings, name, rate, 0, run, steps)
        config = replace(config, eval_every=0, eval_prompts=min(32, settings.eval_prompts))
        importlib.import_module(f"marlhf.train.{methods.KINDS[type(config)]}").train(config)
        shutil.rmtree(folder / name / "model", ignore_errors=True)  # only its times are wanted
        done = read_run(folder / name)
        rows = [row for row in done.train if row["step"] > WARM]
        times = [key for key in rows[0] if key.startswith("time/")]
        found[name] = {key: statistics.median(row[key] for row in rows) for key in times}
        found[name]["response_tokens"] = statistics.fmean(
            row[f"{done.stage}/length"] for row in rows
        )
        found[name]["peak_memory_gib"] = done.about.get("peak_memory_gib")
        if "limit" not in found:
            found["limit"] = limit(settings, found["ppo"]["response_tokens"])
        (folder / FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def limit(settings: Settings, response_tokens: float) -> dict[str, Any]:
    """The least time of a PPO step if only multiplying and reading weights took any."""
    device = pick_device(settings.device)
    gpu = device.type == "cuda"
    sft = settings.model_of("tldr/sft")
    config: Any = AutoConfig.from_pretrained(sft)
    ppo: Any = methods.method(settings, "ppo", settings.rates[0], 0, "unused", 1)
    examples, _ = load_examples(ppo, "ppo", load_tokenizer(sft), needs=("prompt",))
    prompt_tokens = statistics.fmean(len(e.prompt) for e in examples)
    shape = Shape(
        type(config).__name__,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim or config.hidden_size // config.num_attention_heads,
        config.intermediate_size,
        config.vocab_size,
        settings.batch,
        round(prompt_tokens),
        round(response_tokens),
        settings.token_budget,
    )
    size = 8192 if gpu else 512
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    if gpu:
        a, b = a.bfloat16(), b.bfloat16()
    rate = 2 * size**3 / best_time(lambda: a @ b, device)
    source = torch.randn(2**28 if gpu else 2**22, device=device)
    target = torch.empty_like(source)
    bandwidth = 8 * source.numel() / best_time(lambda: target.copy_(source), device)
    return {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "torch": torch.__version__,
        "prompt_tokens": prompt_tokens,
        "flops": rate,
        "bytes_per_second": bandwidth,
        "seconds": shape.operations() / rate + shape.decode_bytes(2 if gpu else 4) / bandwidth,
    }


def read_timing(settings: Settings) -> dict[str, Any]:
    file = Path(settings.out) / "timing" / "tldr" / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
