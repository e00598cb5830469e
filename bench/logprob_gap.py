"""How far log-probs of sampling and of training differ in bfloat16, by a model's width and depth.

    python bench/logprob_gap.py

Qwen 2 with random weights on a CPU: 8 prompts of 16 tokens, 24 sampled tokens, three seeds. Beside
the gap is how far training in bfloat16 is from float32.
"""

from __future__ import annotations

import statistics

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from marlhf.models.base import Precision, autocast
from marlhf.models.forward import choose_passes, token_stats
from marlhf.models.sequences import Sequences
from marlhf.rollout import Sampling
from marlhf.rollout.native import NativeEngine

SIZES = ((64, 4), (128, 4), (256, 4), (128, 2), (128, 8), (128, 16))
VOCABULARY = 512


@torch.no_grad()
def gap(hidden: int, layers: int, precision: Precision, seed: int) -> tuple[float, float]:
    """Mean distance of sampling's log-probs to training's, and of those to float32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 128),
        intermediate_size=3 * hidden,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    choose_passes(model)
    prompts = [torch.randint(2, VOCABULARY, (16,)).tolist() for _ in range(8)]
    engine = NativeEngine(model, [-1], 0, precision=precision)
    rollout = engine.generate(prompts, Sampling(max_new_tokens=24, top_k=0), list(range(8)))
    sequences = Sequences.from_lists(prompts, rollout.responses, 0)
    with autocast(torch.device("cpu"), precision):
        trained = token_stats(model, sequences).logprobs
    exact = token_stats(model, sequences).logprobs
    apart = [
        (a - b).abs().mean().item() for a, b in ((rollout.logprobs, trained), (trained, exact))
    ]
    return apart[0], apart[1]


def main() -> None:
    print(f"{'width':>6}{'layers':>7}{'gap':>10}{'to float32':>12}")
    for hidden, layers in SIZES:
        found = [gap(hidden, layers, "bfloat16", seed) for seed in range(3)]
        apart, rounded = (statistics.mean(x) for x in zip(*found))
        print(f"{hidden:6}{layers:7}{apart:10.1e}{rounded:12.1e}", flush=True)
    print(f"\nin float32, 128 wide, 8 layers: {gap(128, 8, 'float32', 0)[0]:.1e}")


if __name__ == "__main__":
    main()
