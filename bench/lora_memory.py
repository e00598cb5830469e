"""Memory of a PPO update with full training, with LoRA, and with LoRA on one shared base.

    python bench/lora_memory.py --shape gemma-2b          # on a GPU
    python bench/lora_memory.py --shape tiny              # a CPU: parameters only

Models with random weights, built on the device: nothing is downloaded. Each step asks reference
and reward model, then trains policy and critic with AdamW, in bfloat16 arithmetic; the table has
the second step, when the optimiser's states are there. Three ways:

    full          four models in float32, as without LoRA
    lora          policy and reference on one frozen base, critic and reward model on another
    shared base   all four on one frozen base
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from marlhf.config.stage import LoRA
from marlhf.models.adapters import FrozenBaseModel
from marlhf.models.base import autocast, frozen_dtype
from marlhf.models.forward import Sequences, final_scores, token_stats, token_values

SHAPES = {
    # config, hidden, layers, heads, KV heads, head size, MLP, vocabulary, tied
    "tiny": ("LlamaConfig", 64, 2, 4, 2, 16, 128, 512, True),
    "smollm2": ("LlamaConfig", 576, 30, 9, 3, 64, 1536, 49152, True),
    "gemma-2b": ("GemmaConfig", 2048, 18, 8, 1, 256, 16384, 256000, True),
    "llama-7b": ("LlamaConfig", 4096, 32, 32, 32, 128, 11008, 32000, False),
}
Four = tuple[Any, Any, Any, Any]


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="smollm2" if gpu else "tiny")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    args = parser.parse_args()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(0)
    size = SHAPES[args.shape][7]
    sequences = Sequences.from_lists(
        torch.randint(2, size, (args.rows, args.prompt)).tolist(),
        torch.randint(2, size, (args.rows, args.response)).tolist(),
        0,
        device,
    )
    name = torch.cuda.get_device_name() if gpu else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    recompute = ", gradient checkpointing" if args.checkpointing else ""
    tokens = f"{args.rows} x ({args.prompt} + {args.response}) tokens"
    print(f"{args.shape}, rank {args.r}, {tokens}{recompute}\n")
    print(f"{'':12}{'parameters':>12}{'trained':>10}{'weights':>10}{'peak':>10}{'step':>9}")
    ways: dict[str, Callable[[], Four]] = {
        "full": lambda: full(args, device),
        "lora": lambda: separate(args, device),
        "shared base": lambda: shared(args, device),
    }
    for way, build in ways.items():
        try:
            row = measure(build, sequences, device)
        except torch.OutOfMemoryError:
            row = "out of memory"
        print(f"{way:12}{row}")
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()


def measure(build: Callable[[], Four], sequences: Sequences, device: torch.device) -> str:
    """Parameters, memory and seconds of one way, as a row of the table."""
    gpu = device.type == "cuda"
    models = build()
    gc.collect()
    weights = torch.cuda.memory_allocated() if gpu else 0
    policy, _, critic, _ = models
    trained = [p for model in (policy, critic) for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=gpu)
    step(models, optimizer, sequences, device)
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step(models, optimizer, sequences, device)
    if gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if gpu else 0
    everything = {
        p for m in models for p in (m.module.parameters() if hasattr(m, "base") else m.parameters())
    } | {*trained}
    counts = f"{count(everything):>12}{count(trained):>10}"
    return f"{counts}{weights / 2**30:>6.1f} GiB{peak / 2**30:>6.1f} GiB{seconds:>7.2f} s"


def step(
    models: Four, optimizer: torch.optim.Optimizer, sequences: Sequences, device: torch.device
) -> None:
    policy, reference, critic, reward = models
    with autocast(device, "bfloat16"):
        with torch.no_grad():
            ref = token_stats(reference, sequences).logprobs
            scores = final_scores(reward, sequences)
        policy_loss = ((token_stats(policy, sequences).logprobs - ref) * scores[:, None]).mean()
        policy_loss.backward()
        value_loss = (token_values(critic, sequences) - scores[:, None]).square().mean()
        value_loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def full(args: argparse.Namespace, device: torch.device) -> Four:
    policy, critic = language(args, device), scalar(args, device)
    reference = language(args, device).requires_grad_(False)
    return policy, reference, critic, scalar(args, device).requires_grad_(False)


def separate(args: argparse.Namespace, device: torch.device) -> Four:
    lora, matrices = LoRA(r=args.r), frozen_dtype(device, "bfloat16")
    one = FrozenBaseModel(language(args, device), linear_dtype=matrices)
    two = FrozenBaseModel(scalar(args, device), linear_dtype=matrices)
    views = (
        one.language_model(lora),
        one.language_model(None),
        two.scalar_model(lora),
        two.scalar_model(None),
    )
    return tuple(view.to(device) for view in views)  # pyright: ignore[reportReturnType]


def shared(args: argparse.Namespace, device: torch.device) -> Four:
    lora = LoRA(r=args.r, shared_base=True)
    base = FrozenBaseModel(language(args, device), linear_dtype=frozen_dtype(device, "bfloat16"))
    reward = base.scalar_model(lora, "reward", trainable=False)
    views = base.language_model(lora), base.language_model(None), base.scalar_model(lora), reward
    return tuple(view.to(device) for view in views)  # pyright: ignore[reportReturnType]


def language(args: argparse.Namespace, device: torch.device) -> Any:
    return build_model(AutoModelForCausalLM, args, device)


def scalar(args: argparse.Namespace, device: torch.device) -> Any:
    return build_model(AutoModelForSequenceClassification, args, device)


def build_model(auto: Any, args: argparse.Namespace, device: torch.device) -> Any:
    kind, hidden, layers, heads, kv, head, mlp, size, tied = SHAPES[args.shape]
    config = getattr(transformers, kind)(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head,
        intermediate_size=mlp,
        vocab_size=size,
        tie_word_embeddings=tied,
        max_position_embeddings=args.prompt + args.response,
        num_labels=1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.device(device):
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def count(parameters: Any) -> str:
    return f"{sum(p.numel() for p in parameters) / 1e6:.1f}M"


if __name__ == "__main__":
    main()
