"""One PPO step, phase by phase: samples a second and peak memory.

    python bench/ppo_step.py                    # SmolLM2-135M's shape on a GPU
    python bench/ppo_step.py --shape tiny       # a CPU

Four models with random weights (policy, reference, critic, reward), full parameters, one PPO epoch,
prompts and responses of fixed length: what is measured is the machinery, not the learning. The
first steps warm up; the table has the best and the median of the rest.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from marlhf.core import NGram, Vocabulary
from marlhf.models.tiny import tiny_tokenizer
from marlhf.reward import RewardModel
from marlhf.rollout import NativeEngine, Sampling
from marlhf.spans import vocabulary
from marlhf.train.measure import Clock, to_numbers
from marlhf.train.optim import make_optimizer
from marlhf.train.ppo import collect, credit, describe, update
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.ppo_models import Models

SHAPES = {
    # hidden, layers, heads, KV heads, MLP, vocabulary, rows, prompt, response, token budget
    "smollm2": (576, 30, 9, 3, 1536, 49152, 256, 256, 64, 32768),
    "tiny": (64, 2, 4, 2, 128, 512, 32, 32, 32, 16384),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="smollm2" if gpu else "tiny")
    parser.add_argument("--n", type=float, default=5, help="tokens in a macro action")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    hidden, layers, heads, kv, mlp, size, rows, prompt, response, budget = SHAPES[args.shape]
    device = torch.device("cuda" if gpu else "cpu")
    shape = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=mlp,
        vocab_size=size,
        tie_word_embeddings=True,
        num_labels=1,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    config = PPOConfig(
        model="random",
        reward_model="random",
        output_dir="unused",
        batch_size=rows,
        token_budget=budget,
        segmenter=NGram(args.n if args.n == float("inf") else int(args.n)),
        sampling=Sampling(max_new_tokens=response, temperature=1.0, top_k=0),
    )
    torch.manual_seed(0)
    models = build(shape, config, device)
    optimizers = {
        "policy": make_optimizer(models.policy, 1e-6),
        "critic": make_optimizer(models.critic, 1e-6),
    }
    prompts = torch.randint(2, size, (rows, prompt)).tolist()
    sampler, shuffler = torch.Generator(device).manual_seed(0), torch.Generator().manual_seed(0)
    phases: dict[str, list[float]] = {}
    for step in range(1, args.steps + 3):
        clock = Clock(device)
        start = time.perf_counter()
        experience = collect(prompts, models, config, sampler, lambda x: x, clock)
        plan = credit(experience, models.vocabulary, config, 0.05, shuffler)
        clock.mark("credit")
        metrics = update(experience, plan, models, optimizers, config, step, 100, shuffler)
        numbers = to_numbers(metrics | describe(experience, plan, 0.05))
        clock.mark("update")
        if step > 2:  # the first two warm up
            times = clock.phases | {"time/step": time.perf_counter() - start}
            for name, seconds in times.items():
                phases.setdefault(name.removeprefix("time/"), []).append(seconds)
    name = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    count = sum(p.numel() for p in models.policy.parameters()) / 1e6
    print(f"{args.shape}: {count:.1f}M parameters, {rows} x ({prompt} + {response}) tokens\n")
    print(f"{'phase':12}{'best s':>9}{'median s':>10}")
    for phase, seconds in phases.items():
        print(f"{phase:12}{min(seconds):9.3f}{statistics.median(seconds):10.3f}")
    print(f"\nsamples/s {rows / min(phases['step']):.1f} (best)")
    print(f"rollout tokens/s {rows * response / min(phases['rollout']):.0f} (with prefill)")
    print(f"log-prob gap rollout - training {numbers['ppo/logprob_gap']:.2e}")
    if gpu:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def build(shape: LlamaConfig, config: PPOConfig, device: torch.device) -> Models:
    """The four models; no token ends a response, so that lengths are fixed."""
    tokenizer = tiny_tokenizer()
    policy = LlamaForCausalLM(shape).to(device)
    reference = LlamaForCausalLM(shape).to(device).requires_grad_(False)
    reference.load_state_dict(policy.state_dict())
    reward = RewardModel(
        LlamaForSequenceClassification(shape).to(device),
        tokenizer,
        tokenizer,
        token_budget=2 * config.token_budget,
    )
    table = vocabulary(tokenizer, shape.vocab_size)
    return Models(
        policy,
        reference,
        LlamaForSequenceClassification(shape).to(device),
        reward,
        NativeEngine(policy, [-1], 0, token_budget=config.rollout_tokens),
        tokenizer,
        Vocabulary(**{k: v.to(device) for k, v in vars(table).items()}),
    )


if __name__ == "__main__":
    main()
