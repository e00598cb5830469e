"""One PPO step, phase by phase: samples a second, memory, and how far from the hardware's limit.

    python bench/ppo_step.py                          # SmolLM2-135M's shape on a GPU
    python bench/ppo_step.py --shape tiny             # a CPU; beside TRL 1.12 where installed
    python bench/ppo_step.py --shape qwen2-1.5b       # 1.5B parameters, trained whole
    python bench/ppo_step.py --shape gemma-2b         # 2.5B
    python bench/ppo_step.py --shape llama-7b-lora    # adapters on one shared base
    python bench/ppo_step.py --rules                  # what macro actions cost
    python bench/ppo_step.py --lengths tldr           # prompts and responses as long as TL;DR's
    python bench/ppo_step.py --profile                # where a GPU's time goes

Models with random weights (policy, reference, critic, reward), one PPO epoch, prompts and responses
of fixed length unless told otherwise: what is measured is the machinery, not the learning. The
first steps warm up and compile; the table has the best and the median of the rest.

The limit counts what must be done, at the rates that this machine reaches in the same run: every
multiplication at the rate of a large matrix product, and for each sampled token the weights and the
cache once through memory.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from marlhf.config.stage import LoRA
from marlhf.core import NGram, Perplexity, RandomNGram, Vocabulary
from marlhf.data import DataConfig, Row
from marlhf.models.adapters import FrozenBaseModel
from marlhf.models.base import (
    cast_linear_layers,
    cast_trained_weights,
    frozen_dtype,
    offload,
    pick_device,
)
from marlhf.models.compile import compile_blocks
from marlhf.models.forward import choose_passes
from marlhf.models.tiny import tiny_tokenizer
from marlhf.reward import RewardModel, Rewards
from marlhf.rollout import Sampling
from marlhf.rollout.native import NativeEngine, total_memory
from marlhf.runtime.distributed import start
from marlhf.runtime.loop import Clock, to_numbers
from marlhf.runtime.memory import busy_tokens
from marlhf.runtime.memory_plan import GIB, MemoryPlan, Size, plan_run
from marlhf.runtime.optim import make_optimizer
from marlhf.runtime.stage import Example
from marlhf.spans import vocabulary
from marlhf.train.experience import RolloutScorer, batch_metrics
from marlhf.train.ppo import (
    assign_credit,
    critic_values_and_backward,
    shape_and_segment,
    update,
)
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models
from marlhf.train.rl_run import Learner
from marlhf.train.sampling import sample_responses


@dataclass(frozen=True)
class Shape:
    kind: str
    hidden: int
    layers: int
    heads: int
    groups: int  # KV heads
    head: int
    mlp: int
    vocabulary: int
    rows: int
    prompt: int
    response: int
    lora: bool = False
    quantize: Literal["none", "4bit"] = "none"

    @property
    def budget(self) -> int:
        """Tokens in a micro-batch, as `token_budget: auto` has them on a GPU."""
        return busy_tokens(self.hidden)

    def config(self) -> Any:
        return getattr(transformers, self.kind)(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            head_dim=self.head,
            intermediate_size=self.mlp,
            vocab_size=self.vocabulary,
            tie_word_embeddings=not self.lora or self.kind == "Qwen3Config",
            max_position_embeddings=max(2048, self.prompt + self.response),
            num_labels=1,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
        )

    @property
    def matrices(self) -> int:
        """Weights of the layers, without embeddings and head."""
        attention = 2 * self.hidden * self.head * (self.heads + self.groups)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    def operations(self) -> float:
        """Floating-point operations of a step."""
        tokens = self.rows * (self.prompt + self.response)
        attention = self.layers * 2 * self.heads * self.head * (self.prompt + self.response)
        forward = tokens * (2 * self.matrices + attention)
        head = 2 * self.rows * self.response * self.hidden * self.vocabulary
        trained = 2 if self.lora else 3  # forward and backward; frozen weights have no gradient
        # Sampling, reference, reward model and critic once each, then policy and critic.
        return (4 + 2 * trained) * forward + (2 + trained) * head

    def decode_bytes(self, width: int) -> float:
        """Bytes that sampling must read: weights and cache for each token of a response."""
        weights = self.matrices + self.hidden * self.vocabulary
        length = self.prompt + self.response / 2
        cache = self.rows * length * self.layers * 2 * self.groups * self.head
        return self.response * (weights + cache) * width


SHAPES = {
    "tiny": Shape("LlamaConfig", 64, 2, 4, 2, 16, 128, 512, 32, 32, 32),
    "smollm2": Shape("LlamaConfig", 576, 30, 9, 3, 64, 1536, 49152, 256, 256, 64),
    "qwen2.5-0.5b": Shape("Qwen2Config", 896, 24, 14, 2, 64, 4864, 151936, 128, 256, 256),
    "qwen2-1.5b": Shape("Qwen2Config", 1536, 28, 12, 2, 128, 8960, 151936, 64, 256, 256),
    "gemma-2b": Shape("GemmaConfig", 2048, 18, 8, 1, 256, 16384, 256000, 64, 256, 128),
    "llama-7b-lora": Shape(
        "LlamaConfig", 4096, 32, 32, 32, 128, 11008, 32000, 64, 256, 128, lora=True
    ),
    "llama-8b-lora": Shape(
        "LlamaConfig", 4096, 32, 32, 8, 128, 14336, 128256, 32, 512, 512, lora=True
    ),
    "llama-8b-qlora": Shape(
        *("LlamaConfig", 4096, 32, 32, 8, 128, 14336, 128256, 32, 512, 512),
        lora=True,
        quantize="4bit",
    ),
    "qwen3-4b-lora": Shape(
        "Qwen3Config", 2560, 36, 32, 8, 128, 9728, 151936, 64, 512, 1024, lora=True
    ),
}
RULES: dict[str, Callable[..., Any]] = {
    "ngram 1": NGram(1),
    "ngram 5": NGram(5),
    "ngram inf": NGram(math.inf),
    "random ngram": RandomNGram(),
    "perplexity": Perplexity(),
}
WARMUP = 2
IDLE = 20
"""Microseconds without a kernel that a profile counts as such: launches take a few."""
TLDR = {"rows": 128, "prompt": 228, "response": 48}
"""A step of the runs behind docs/results.md: mean prompt, longest response."""
TLDR_ENDS = 0.0162
"""Share of the vocabulary that ends a response there: 33 tokens in the mean."""


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="smollm2" if gpu else "tiny")
    parser.add_argument("--steps", type=int, default=8, help="timed steps, of each rule")
    parser.add_argument("--budget", type=int, help="tokens in a micro-batch (default: as auto)")
    parser.add_argument("--optimizer", default="adamw", help="adamw, adamw_8bit or adafactor")
    parser.add_argument("--weights", default="float32", help="trained in float32 or bfloat16")
    parser.add_argument("--offload", action="store_true", help="of reference and reward model")
    parser.add_argument("--lengths", choices=("fixed", "tldr"), default="fixed")
    parser.add_argument("--rules", action="store_true", help="compare rules of macro actions")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--modules", action="store_true", help="transformers' layers, compiled")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--profile", action="store_true", help="a GPU's time by kernel")
    parser.add_argument("--no-trl", action="store_true", help="do not run TRL beside it")
    parser.add_argument("--trl-only", action="store_true", help="TRL's half, as JSON")
    args = parser.parse_args()
    if args.profile and not gpu:
        parser.error("--profile: there is no GPU here")
    shape = SHAPES[args.shape]
    varied = args.lengths == "tldr"
    shape = replace(shape, **TLDR) if varied else shape
    device = pick_device("cuda" if gpu else "cpu")
    if args.trl_only:
        print(json.dumps(trl_times(shape, device, args.steps, None)))
        return
    name = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    threads = "" if gpu else f", {torch.get_num_threads()} thread(s)"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{name}{threads}, {versions}")

    beside_trl = not args.no_trl and not shape.lora and not varied
    # First: neither half holds memory that the other needs, for each has a process of its own.
    theirs = trl_process(args.shape, args.steps) if beside_trl and gpu else {}
    torch.manual_seed(0)
    models, config = build(shape, device, args)
    parameters = {p for m in (models.policy, models.critic) for p in m.parameters()}
    print(
        f"{args.shape}: {shape.matrices / 1e6:.1f}M weights in layers, "
        f"{sum(p.numel() for p in parameters) / 1e6:.1f}M trained, "
        f"{shape.rows} x ({shape.prompt} + {shape.response}) tokens, "
        f"{config.token_budget} in a micro-batch\n"
    )
    rules = RULES if args.rules else {"ngram 5": RULES["ngram 5"]}
    bench = Bench(models, config, shape, tldr_prompts(shape.rows) if varied else None)
    phases, by_rule = measure(bench, rules, args.steps)
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else None
    print(f"{'phase':12}{'best s':>9}{'median s':>10}")
    for phase, seconds in phases.items():
        print(f"{phase:12}{min(seconds):9.3f}{statistics.median(seconds):10.3f}")
    best, median = (shape.rows / f(phases["step"]) for f in (min, statistics.median))
    print(f"\nsamples/s            {best:.1f} (best) {median:.1f} (median)")
    if varied:  # what the limit counts
        shape = replace(shape, prompt=bench.mean_prompt, response=round(bench.numbers["rl/length"]))
        print(f"mean tokens          {shape.prompt} + {shape.response}")
    tokens = shape.rows * shape.response / min(phases["rollout"])
    print(f"rollout tokens/s     {tokens:.0f} (with prefill)")
    print(f"log-prob gap         {bench.numbers['rl/logprob_gap']:.2e} (rollout - training)")
    if peak is not None:
        predicted = predict(shape, config).peak / GIB
        print(f"peak memory          {peak:.1f} GiB, {predicted:.1f} by `marlhf doctor`")
    print_limit(shape, device, min(phases["step"]))
    if args.rules:
        print_rules(by_rule)
    if args.profile:
        print_profile(bench)
    if beside_trl:
        # On a CPU the two take turns, step by step: a busy machine is busy for both.
        print_trl(shape, theirs or trl_times(shape, device, args.steps, bench), phases["step"])


def build(shape: Shape, device: torch.device, args: argparse.Namespace) -> tuple[Models, PPOConfig]:
    """The four models; with fixed lengths no token ends a response."""
    config = PPOConfig(
        model="random",
        reward_model="random",
        output_dir="unused",
        batch_size=shape.rows,
        token_budget=args.budget or shape.budget,
        optimizer=args.optimizer,
        trained_weights=args.weights,
        precision="auto" if args.weights == "float32" else "bfloat16",
        offload=args.offload,
        gradient_checkpointing=args.checkpointing,
        lora=LoRA(shared_base=True, quantize=shape.quantize) if shape.lora else None,
        data=DataConfig(source="toy", max_prompt_tokens=shape.prompt),
        sampling=Sampling(max_new_tokens=shape.response, temperature=1.0, top_k=0),
    )
    tokenizer = tiny_tokenizer()
    policy, reference, critic, reward = build_four(shape, device, args.checkpointing)
    if args.weights == "bfloat16":
        for model in (policy, critic):
            cast_trained_weights(model)
    if not args.eager:  # as World.place does it
        for model in (policy, reference, critic, reward):
            if not args.modules:
                choose_passes(model)
            elif device.type == "cuda":
                compile_blocks(model)
    if args.offload and not shape.lora:
        for model in (reference, reward):
            offload(model)
    budget = 2 * config.pass_tokens
    scorer = RewardModel(reward, tokenizer, tokenizer, token_budget=budget)
    table = vocabulary(tokenizer, shape.vocabulary)
    ends = [-1]
    if args.lengths == "tldr":
        ends = list(range(1, 1 + round(TLDR_ENDS * shape.vocabulary)))
    precision = config.precision
    engine = NativeEngine(policy, ends, 0, token_budget=config.rollout_tokens, precision=precision)
    models = Models(
        policy,
        reference,
        critic,
        Rewards([("reward", scorer, 1.0)]),
        engine,
        tokenizer,
        Vocabulary(**{k: v.to(device) for k, v in vars(table).items()}),
        start(device.type),
        config.sampling,
        config.pass_tokens,
        precision,
    )
    return models, config


def predict(shape: Shape, config: PPOConfig) -> MemoryPlan:
    """The memory that `marlhf doctor` would say."""
    gpu = total_memory(torch.device("cuda")) if torch.cuda.is_available() else 141 * GIB
    return plan_run(config, gpu, lambda _: Size.of(shape.config()))


def build_four(
    shape: Shape, device: torch.device, checkpointing: bool, *, cast: bool = True
) -> tuple[Any, ...]:
    """Policy, reference, critic, reward model.

    With `cast` the frozen two compute in bfloat16 where the device has it, as in marlhf's runs.
    """
    if shape.lora:
        lora = LoRA(shared_base=True)
        dtype = frozen_dtype(device, "auto")
        # 8B in float32 would not fit the card that its four bits are for.
        quantized = shape.quantize != "none"
        built_on = torch.device("meta") if quantized else device
        model = random_model(shape, built_on, False, checkpointing)
        if quantized:
            fill_quantized(model, device)
        base = FrozenBaseModel(model, linear_dtype=dtype)
        reward = base.scalar_model(lora, "reward", trainable=False)
        views = (
            base.language_model(lora),
            base.language_model(None),
            base.scalar_model(lora),
            reward,
        )
        return tuple(view.to(device) for view in views)
    policy, reference = (random_model(shape, device, False, checkpointing) for _ in range(2))
    reference.requires_grad_(False).load_state_dict(policy.state_dict())
    critic, reward = (random_model(shape, device, True, checkpointing) for _ in range(2))
    if cast and (dtype := frozen_dtype(device, "auto")) is not None:
        for frozen in (reference, reward):
            cast_linear_layers(frozen.requires_grad_(False), dtype)
    return policy, reference, critic, reward


def fill_quantized(model: Any, device: torch.device) -> None:
    """Random weights for a model without any; matrices in 4 bits, as `quantize: 4bit` loads."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    model.hf_quantizer, model.is_loaded_in_4bit = "bitsandbytes", True  # as marlhf and peft ask
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "quant_type": "nf4"}
            with torch.device("meta"):
                packed = Linear4bit(layer.in_features, layer.out_features, False, **options)
            weight = torch.randn(layer.weight.shape, dtype=torch.bfloat16, device=device) * 0.02
            packed.weight = Params4bit(weight, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, packed.to(device))
        elif hasattr(layer, "inv_freq"):
            with torch.device(device):
                model.set_submodule(name, type(layer)(model.config))
        elif list(layer.parameters(recurse=False)):
            layer.to_empty(device=device, recurse=False)
            if layer.weight.ndim == 1:
                layer.weight.data.fill_(1.0)
            else:
                layer.weight.data.normal_(std=0.02)
    model.tie_weights()


def random_model(shape: Shape, device: torch.device, scalar: bool, checkpointing: bool) -> Any:
    auto: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    with torch.device(device):
        model = auto.from_config(shape.config(), dtype=torch.float32, attn_implementation="sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


class Bench:
    """PPO steps on the same prompts, one after another, each with its seconds."""

    def __init__(
        self, models: Models, config: PPOConfig, shape: Shape, prompts: list[int] | None = None
    ) -> None:
        self.models, self.config, self.shape = models, config, shape
        self.optimizers = {
            "policy": make_optimizer(models.policy, 1e-6, name=config.optimizer),
            "critic": make_optimizer(models.critic, 1e-6, name=config.optimizer),
        }
        lengths = prompts or [shape.prompt] * shape.rows
        ids = [torch.randint(2, shape.vocabulary, (n,)).tolist() for n in lengths]
        self.mean_prompt = round(sum(lengths) / len(lengths))
        self.examples = [Example(Row(""), prompt, [], []) for prompt in ids]
        self.sampler, self.shuffler = (torch.Generator().manual_seed(i) for i in range(2))
        self.steps = 0
        self.numbers: dict[str, float] = {}  # the last step's metrics

    def step(self, segmenter: Callable[..., Any]) -> dict[str, float]:
        """Seconds by phase, and of the whole."""
        self.steps += 1
        models, settings = self.models, replace(self.config, segmenter=segmenter)
        seeds = torch.randint(2**62, (self.shape.rows,), generator=self.sampler).tolist()
        clock = Clock(models.world.device)
        start = time.perf_counter()
        rollout = sample_responses([e.prompt for e in self.examples], models, seeds)
        clock.mark("rollout")
        experience = RolloutScorer(models, settings)(self.examples, rollout)
        clock.mark("score")
        rewards, segments = shape_and_segment(experience, models, settings, 0.05, self.shuffler)
        values, losses = critic_values_and_backward(experience, rewards, segments, models, settings)
        credit = assign_credit(rewards, values, segments, settings)
        clock.mark("credit")
        rates = {
            "policy": settings.rate(self.steps, 10**6),
            "critic": settings.rate(self.steps, 10**6, settings.critic_learning_rate),
        }
        learner = Learner(models, self.optimizers, 1, settings.max_grad_norm, self.shuffler)
        metrics = losses | update(experience, credit, learner, rates, settings)
        metrics |= batch_metrics(experience, credit, 0.05) | credit.value_metrics()
        self.numbers = to_numbers(metrics)
        clock.mark("update")
        whole = {"step": time.perf_counter() - start}
        return {name.removeprefix("time/"): x for name, x in clock.phases.items()} | whole


def tldr_prompts(rows: int) -> list[int]:
    """Lengths of prompts, 228 tokens in the mean."""
    return (torch.randn(rows) * 60 + TLDR["prompt"]).clamp(60, 400).int().tolist()


def measure(
    bench: Bench, rules: dict[str, Callable[..., Any]], steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each phase, and seconds of a step by rule.

    Rules take turns, so that a machine that grows warm or busy slows all of them alike.
    """
    phases: dict[str, list[float]] = {}
    by_rule: dict[str, list[float]] = {name: [] for name in rules}
    for step in range(1, steps + WARMUP + 1):
        for rule, segmenter in rules.items():
            found = bench.step(segmenter)
            if step > WARMUP:
                for name, seconds in found.items():
                    phases.setdefault(name, []).append(seconds)
                by_rule[rule].append(found["step"])
        if step == WARMUP and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # not the compiler's own trials
    return phases, by_rule


def print_limit(shape: Shape, device: torch.device, seconds: float) -> None:
    compute, decode, rates = limit_seconds(shape, device)
    limit = compute + decode
    print(
        f"limit                {shape.rows / limit:.1f} samples/s: {compute:.4f} s at "
        f"{rates[0] / 1e12:.3g} TFLOP/s and {decode:.4f} s at {rates[1] / 1e12:.3g} TB/s; "
        f"{100 * limit / seconds:.0f}% of it reached"
    )


def limit_seconds(shape: Shape, device: torch.device) -> tuple[float, float, tuple[float, float]]:
    """What a step would take if nothing but multiplying and reading weights took time.

    Seconds of both, and the rates that this machine reaches.
    """
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    rate = 2 * size**3 / best_time(lambda: a @ b, device)
    source = torch.randn(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * 4 * source.numel() / best_time(lambda: target.copy_(source), device)
    width = 2 if device.type == "cuda" else 4
    decode = shape.decode_bytes(width) / bandwidth
    return shape.operations() / rate, decode, (rate, bandwidth)


def best_time(run: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(12):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def print_rules(by_rule: dict[str, list[float]]) -> None:
    """Each rule's step beside that of single tokens, from the same rounds."""
    print(f"\n{'rule':14}{'best s':>9}{'median s':>10}{'over n = 1':>12}")
    base = by_rule["ngram 1"]
    for rule, seconds in by_rule.items():
        over = statistics.median(a / b for a, b in zip(seconds, base)) - 1
        line = f"{rule:14}{min(seconds):9.4f}{statistics.median(seconds):10.4f}"
        print(f"{line}{100 * over:11.2f}%")


def print_profile(bench: Bench) -> None:
    """The kernels of one step by their time, and when the GPU had nothing to do."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        bench.step(RULES["ngram 5"])
        torch.cuda.synchronize()
    events: list[Any] = [e for e in found.events() or [] if "CUDA" in str(e.device_type)]
    busy: dict[str, float] = {}
    count, idle = Counter[str](), list[tuple[float, str]]()
    begin = end = min(event.time_range.start for event in events)
    before = ""
    for event in sorted(events, key=lambda event: event.time_range.start):
        name = re.split(r"[<(]", event.name.removeprefix("void "))[0][-50:]
        start, stop = event.time_range.start, event.time_range.end
        if start - end > IDLE:
            idle.append((start - end, f"at {(end - begin) / 1000:.1f}, {before} -> {name}"))
        busy[name] = busy.get(name, 0.0) + max(0.0, stop - max(start, end))
        count[name] += 1
        end, before = max(end, stop), name
    print(f"\n{'ms':>8}{'times':>7}  one step, {(end - begin) / 1000:.1f} ms")
    for name in sorted(busy, key=busy.__getitem__, reverse=True)[:24]:
        print(f"{busy[name] / 1000:8.2f}{count[name]:7}  {name}")
    print(f"{sum(busy.values()) / 1000:8.2f}{len(events):7}  all kernels")
    print(f"{sum(gap for gap, _ in idle) / 1000:8.2f}{len(idle):7}  idle for longer than {IDLE} us")
    for gap, where in sorted(idle, reverse=True)[:12]:
        print(f"{gap / 1000:8.2f}         {where}")


def trl_process(name: str, steps: int) -> dict[str, Any]:
    """TRL's half on a GPU."""
    command = [sys.executable, __file__, "--shape", name, "--steps", str(steps), "--trl-only"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def print_trl(shape: Shape, found: dict[str, Any], ours: list[float]) -> None:
    """TRL's PPOTrainer on models of the same shape, as it comes."""
    if "failed" in found:
        print(f"\nTRL's half failed:\n{found['failed']}")
        return
    if "missing" in found:
        print(
            f"\nTRL's PPOTrainer is not here ({found['missing']}); TRL 1.12 is the last to have it."
        )
        return
    ours = found["turns"] or ours
    rates = [
        shape.rows / f(times)
        for times in (found["seconds"], ours)
        for f in (min, statistics.median)
    ]
    memory = f", {found['gibibytes']:.1f} GiB" if found["gibibytes"] else ""
    print(
        f"\nTRL {found['version']} PPOTrainer: {rates[0]:.1f} samples/s (best), "
        f"{rates[1]:.1f} (median){memory}. marlhf{', in turns' if found['turns'] else ''}: "
        f"{rates[2]:.1f} (best), {rates[3]:.1f} (median), {rates[2] / rates[0]:.2f} and "
        f"{rates[3] / rates[1]:.2f} times as many."
    )


def trl_times(
    shape: Shape, device: torch.device, steps: int, bench: Bench | None
) -> dict[str, Any]:
    """Seconds of TRL's steps and, with `bench`, of ours in turns with them."""
    try:
        from datasets import Dataset
        from trl.experimental.ppo import PPOConfig as TRLConfig
        from trl.experimental.ppo import PPOTrainer
    except ImportError as error:
        return {"missing": str(error)}
    theirs: list[float] = []
    turns: list[float] = []

    class Turns(transformers.TrainerCallback):
        began = 0.0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            theirs.append(time.perf_counter() - self.began)
            if bench is not None:
                torch.backends.mkldnn.enabled = as_we_had_it
                turns.append(bench.step(NGram(5))["step"])
                torch.backends.mkldnn.enabled = True
            self.began = time.perf_counter()

    as_we_had_it = torch.backends.mkldnn.enabled  # marlhf turns it off on ARM
    torch.backends.mkldnn.enabled = True  # TRL's users have it on
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    micro = min(shape.rows, max(1, shape.budget // (shape.prompt + shape.response)))
    accumulation = math.ceil(shape.rows / micro)
    while shape.rows % accumulation:
        accumulation += 1
    total = shape.rows * (steps + WARMUP)
    ids = torch.randint(2, shape.vocabulary, (total, shape.prompt)).tolist()
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    with tempfile.TemporaryDirectory() as folder:
        settings = TRLConfig(
            output_dir=folder,
            per_device_train_batch_size=shape.rows // accumulation,
            gradient_accumulation_steps=accumulation,
            local_rollout_forward_batch_size=shape.rows,
            total_episodes=total,
            response_length=shape.response,
            temperature=1.0,
            num_ppo_epochs=1,
            num_mini_batches=1,
            num_sample_generations=0,
            gradient_checkpointing=False,
            bf16=gpu,
            use_cpu=not gpu,
            learning_rate=1e-6,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        # Not cast: TRL calls the frozen two outside of autocast, where float32 meets bfloat16.
        policy, reference, critic, reward = build_four(shape, device, False, cast=False)
        trainer = PPOTrainer(
            args=settings,
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=reward,
            value_model=critic,
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            eval_dataset=Dataset.from_dict({"input_ids": ids[: shape.rows]}),
            callbacks=[Turns()],
        )
        trainer.train()
    return {
        "version": importlib.metadata.version("trl"),
        "seconds": theirs[WARMUP:],
        "turns": turns[WARMUP:],
        "gibibytes": torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0,
    }


if __name__ == "__main__":
    main()
