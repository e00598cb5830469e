"""How much of a GPU's memory a run will take: arithmetic over shapes, before anything is loaded.

What stays (weights, moments, the sampler's copies) and what each pass adds (gradients,
activations, the cache) are counted as this code allocates them, in bfloat16. What a pass keeps of
a layer was measured: `bench/memory.py` prints the peak beside the one that is predicted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from marlhf.config.rl import RLConfig
from marlhf.config.stage import LoRA, StageConfig
from marlhf.errors import MarlhfError, SettingError
from marlhf.models.base import quiet_transformers
from marlhf.models.facts import locate
from marlhf.models.llama import is_plain_llama
from marlhf.models.logprobs import CHUNK, CHUNK_ROWS
from marlhf.models.tiny import tiny_config
from marlhf.rollout.native import AUTO_TOKENS, KEPT_CACHE_SHARE, SIZE_MULTIPLE, token_bytes
from marlhf.rollout.slots import PREFILL_TOKENS
from marlhf.runtime.memory import busy_tokens
from marlhf.runtime.progress import say

GIB = 2**30
CONTEXT = 0.6 * GIB
"""What CUDA itself takes."""
USABLE = 0.96
"""Of the rest: the allocator's blocks do not fit each other without gaps."""
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.04, "adafactor": 0.01}
"""Per weight."""
QUANTIZED_BYTES = {"none": 2.0, "4bit": 0.53, "8bit": 1.0}
SAVED_CASTS = 1.3
"""Bytes per weight of a layer: casts to bfloat16 that the fast pass keeps for its backward pass."""
BY_MODULES, BY_ADAPTERS = 1.3, 1.5
"""What transformers' layers keep, and layers with adapters, relative to the fast pass."""

#           family, hidden, layers, heads, KV heads, head size, MLP, vocabulary, tied embeddings
_SHAPES = {
    "smollm2-135m": ("Llama", 576, 30, 9, 3, 64, 1536, 49152, True),
    "smollm2-360m": ("Llama", 960, 32, 15, 5, 64, 2560, 49152, True),
    "smollm2-1.7b": ("Llama", 2048, 24, 32, 32, 64, 8192, 49152, True),
    "qwen2.5-0.5b": ("Qwen2", 896, 24, 14, 2, 64, 4864, 151936, True),
    "qwen2.5-1.5b": ("Qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True),
    "qwen2.5-3b": ("Qwen2", 2048, 36, 16, 2, 128, 11008, 151936, True),
    "qwen2.5-7b": ("Qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False),
    "qwen3-0.6b": ("Qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True),
    "qwen3-1.7b": ("Qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True),
    "qwen3-4b": ("Qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True),
    "qwen3-8b": ("Qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False),
    "llama-3.2-1b": ("Llama", 2048, 16, 32, 8, 64, 8192, 128256, True),
    "llama-3.2-3b": ("Llama", 3072, 28, 24, 8, 128, 8192, 128256, True),
    "llama-8b": ("Llama", 4096, 32, 32, 8, 128, 14336, 128256, False),
    "llama-7b": ("Llama", 4096, 32, 32, 32, 128, 11008, 32000, False),
    "gemma-2b": ("Gemma", 2048, 18, 8, 1, 256, 16384, 256000, True),
    "gemma-7b": ("Gemma", 3072, 28, 16, 16, 256, 24576, 256000, True),
}
"""Models that are known without a network, by their name on the hub in lower case."""
ALIASES = {
    "qwen2-": "qwen2.5-",
    "qwen2.5-coder-": "qwen2.5-",
    "qwen2.5-math-": "qwen2.5-",
    "llama-3.1-": "llama-",
    "meta-llama-3-": "llama-",
}


def named_config(name: str) -> Any | None:
    """The config of a well-known model by its name, with or without its owner and `-Instruct`."""
    words = name.rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-it")
    words = words.removesuffix("-base")
    for alias, real in ALIASES.items():
        words = real + words.removeprefix(alias) if words.startswith(alias) else words
    if words not in _SHAPES:
        return None
    family, hidden, layers, heads, groups, width, mlp, vocabulary, tied = _SHAPES[words]
    return getattr(transformers, f"{family}Config")(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
    )


@dataclass(frozen=True)
class Size:
    """What the arithmetic needs to know of a model: numbers of weights, and its shape."""

    total: int
    embeddings: int
    head: int  # vocabulary times hidden size
    tied: bool
    matrices: int  # linear layers of its blocks
    per_rank: int  # weights of an adapter of rank 1 on all of them
    hidden: int
    layers: int
    heads_width: int  # of all queries
    groups_width: int  # of all keys
    mlp: int
    vocabulary: int
    token_cache: int  # bytes
    fast: bool  # whether models/llama.py computes it

    @classmethod
    def of(cls, config: Any) -> Size:
        """Counted on a model without weights."""
        with torch.device("meta"), quiet_transformers():
            model = AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        head: Any = model.get_output_embeddings()
        linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        total = sum(p.numel() for p in model.parameters())
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(
            total=total,
            embeddings=sum(
                m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)
            ),
            head=head.weight.numel(),
            tied=head.weight is model.get_input_embeddings().weight,
            matrices=sum(m.weight.numel() for m in linear),
            per_rank=sum(m.in_features + m.out_features for m in linear),
            hidden=text.hidden_size,
            layers=text.num_hidden_layers,
            heads_width=heads * width,
            groups_width=(getattr(text, "num_key_value_heads", None) or heads) * width,
            mlp=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            vocabulary=text.vocab_size,
            token_cache=token_bytes(config, torch.bfloat16),
            fast=is_plain_llama(model),
        )

    @property
    def scalar(self) -> int:
        """Weights of a critic or reward model, which has no head for the vocabulary."""
        return self.total - (0 if self.tied else self.head)


@cache
def size_named(name: str) -> Size:
    """The size of a model by its folder, its hub name, or a well-known name."""
    if name == "tiny":
        return Size.of(tiny_config())
    known = None if Path(name).exists() else named_config(name)
    if known is None:
        try:
            with quiet_transformers():
                known = AutoConfig.from_pretrained(**locate(name))
        except (MarlhfError, OSError, ValueError) as error:
            raise SettingError(
                f"What {name} would take is not known: {str(error).splitlines()[0]} Names known "
                f"without a network: {', '.join(_SHAPES)}."
            ) from error
    return Size.of(known)


@dataclass(frozen=True)
class MemoryPlan:
    """What stays in memory, and what each kind of pass adds, in bytes."""

    kept: Mapping[str, float]
    passes: Mapping[str, float]
    tokens: int
    """Of a pass with gradients."""
    rows: int
    length: int
    """Of the longest row: prompt and response."""

    @property
    def peak(self) -> float:
        return sum(self.kept.values()) + max(self.passes.values())

    def fits(self, gpu: float) -> bool:
        """Whether a card of so many bytes has room."""
        return self.peak + CONTEXT <= USABLE * gpu


def plan_run(
    config: StageConfig, gpu: float, size: Callable[[str], Size] = size_named
) -> MemoryPlan:
    """The memory of a run on one GPU of so many bytes.

    Passes have the tokens that `token_budget` says; with `auto` fewer, down to one row, where
    that is what fits.
    """
    length = _row_tokens(config)
    policy = size(config.model)
    per_prompt = config.responses_per_prompt if isinstance(config, RLConfig) else 1
    rows = config.batch_size * per_prompt
    auto = config.token_budget == "auto"
    tokens = busy_tokens(policy.hidden) if config.token_budget == "auto" else config.token_budget
    tokens = max(length, min(tokens, rows * length))
    while True:
        plan = _Arithmetic(config, gpu, size, rows, length, tokens).plan()
        if plan.fits(gpu) or not auto or tokens <= length:
            return plan
        tokens = max(length, tokens // 2)


def remedies(config: StageConfig, gpu: float) -> Iterator[tuple[str, MemoryPlan]]:
    """Settings that take less and less memory, each with its plan, up to the first that fits."""
    eight_bit = {"optimizer": "adamw_8bit"}
    checkpointed = {"gradient_checkpointing": True}
    adapters = {"lora": replace(config.lora or LoRA(), shared_base=True)}
    quantized = {"lora": replace(adapters["lora"], quantize="4bit")}
    whole: list[dict[str, Any]] = [
        {},
        eight_bit,
        eight_bit | {"offload": True},
        eight_bit | {"offload": True} | checkpointed,
        eight_bit | {"offload": True, "trained_weights": "bfloat16"} | checkpointed,
    ]
    plain = {"optimizer": "adamw", "trained_weights": "float32", "offload": False}
    ladder = [] if config.lora else whole
    ladder += [plain | x for x in (adapters, adapters | checkpointed)]
    ladder += [plain | x for x in (quantized, quantized | checkpointed)]
    least = plan_run(config, gpu).peak
    for changes in ladder:
        # A smaller cache is made for the time of sampling, or stays and is there in every pass.
        with_cache = (changes, changes | {"rollout_tokens": 1 << 15})
        known = [
            {name: x for name, x in each.items() if hasattr(config, name)} for each in with_cache
        ]
        plans = [plan_run(replace(config, **each), gpu) for each in known]
        plan, settings = min(zip(plans, known, strict=True), key=lambda found: found[0].peak)
        new = {name: x for name, x in settings.items() if getattr(config, name) != x}
        if plan.peak >= least:  # it has no such setting, or nothing of that kind
            continue
        least = plan.peak
        yield ", ".join(f"{name}: {_shown(x)}" for name, x in new.items()), plan
        if plan.fits(gpu):
            return


def _shown(value: Any) -> str:
    if isinstance(value, LoRA):
        quantized = "" if value.quantize == "none" else f", quantize: {value.quantize}"
        return f"{{r: {value.r}, shared_base: true{quantized}}}"
    return str(value).lower()


def _row_tokens(config: Any) -> int:
    """Of the longest prompt and response; of a conversation all turns."""
    if not isinstance(config, RLConfig):
        return config.data.max_prompt_tokens + config.max_response_tokens
    if config.environment:
        return config.episode_tokens
    return config.data.max_prompt_tokens + config.sampling.max_new_tokens


@dataclass(frozen=True)
class _Arithmetic:
    config: Any
    gpu: float
    size: Callable[[str], Size]
    rows: int
    length: int
    tokens: int

    def plan(self) -> MemoryPlan:
        config, policy = self.config, self.size(self.config.model)
        if isinstance(config, RLConfig):
            return self._of_rl(policy)
        kept = self._trained("model", policy.total, policy)
        grads = self._gradients(policy.total, policy)
        passes = {"pass with gradients": grads + self._backward(policy, head=True)}
        return MemoryPlan(kept, passes, self.tokens, self.rows, self.length)

    def _of_rl(self, policy: Size) -> MemoryPlan:
        config = self.config
        has_critic = getattr(config, "has_critic", False)
        shared = config.lora is not None and config.lora.shared_base
        critic_name = getattr(config, "critic_model", None) or config.reward_model or config.model
        critic = policy if shared else self.size(critic_name)
        kept = self._trained("policy", policy.total, policy)
        if has_critic:
            kept |= self._trained("critic", critic.scalar, critic, base=not shared)
        frozen: dict[str, float] = {}
        if config.lora is None or config.ref_model:
            frozen["reference"] = _frozen(self.size(config.ref_model or config.model), head=True)
        for name in (config.reward_model, *config.reward_funcs):
            # With adapters a reward model is on the base of the critic, or of all.
            if name and ":" not in name and not shared and (not config.lora or name != critic_name):
                frozen[f"reward model {name}"] = _frozen(self.size(name))
        largest = max(frozen.values(), default=0.0) if config.offload else 0.0
        kept |= {} if config.offload else frozen
        fast = policy.fast and config.lora is None
        if fast and config.trained_weights == "float32" and config.engine == "native":
            kept["copies for sampling"] = 2.0 * (policy.matrices + policy.head)
        cache = self._cache(policy)
        stays = cache if cache <= KEPT_CACHE_SHARE * self.gpu else 0.0
        wide = 2 * self.tokens * (6 * policy.mlp + 12 * policy.hidden) + _chunk(policy)
        passes = {
            "sampling": cache + self._sampling(policy),
            "scoring": stays + largest + wide,
        }
        gradients = self._gradients(policy.total, policy)
        if has_critic:
            of_critic = self._gradients(critic.scalar, critic)
            passes["critic's update"] = stays + of_critic + self._backward(critic, head=False)
            gradients += 0.0 if config.one_update else of_critic
        passes["policy's update"] = stays + gradients + self._backward(policy, head=True)
        return MemoryPlan(kept, passes, self.tokens, self.rows, self.length)

    def _trained(
        self, name: str, weights: int, size: Size, *, base: bool = True
    ) -> dict[str, float]:
        """Weights and moments of a model that trains, or of its adapter and its base."""
        config = self.config
        moments = OPTIMIZER_BYTES[config.optimizer]
        if config.lora is None:
            each = 2.0 if config.trained_weights == "bfloat16" else 4.0
            return {f"{name}: weights": each * weights, f"{name}: optimizer": moments * weights}
        adapter = (4.0 + moments) * config.lora.r * size.per_rank
        kept = {f"{name}: adapter, optimizer": adapter}
        if base:
            each = QUANTIZED_BYTES[config.lora.quantize]
            # The head is a linear layer as well, which is cast but not quantized.
            head = 0.0 if size.tied else size.head * 2.0
            kept[f"{name}: frozen base"] = each * size.matrices + 4.0 * size.embeddings + head
        return kept

    def _gradients(self, weights: int, size: Size) -> float:
        if self.config.lora is not None:
            return 4.0 * self.config.lora.r * size.per_rank
        return (2.0 if self.config.trained_weights == "bfloat16" else 4.0) * weights

    def _backward(self, size: Size, *, head: bool) -> float:
        """What a pass with gradients takes besides them: most of it is what its layers keep."""
        config, adapted = self.config, self.config.lora is not None
        inner = 2 * size.hidden + 3 * size.heads_width + 3 * size.groups_width + 2 * size.mlp
        each = 2.0 * inner * (BY_ADAPTERS if adapted else 1.0 if size.fast else BY_MODULES)
        if config.gradient_checkpointing is True:  # layers keep their input, and one is at work
            each = each * BY_ADAPTERS if size.fast and not adapted else each
            taken = self.tokens * (4.0 * size.hidden * size.layers + each)
        else:
            taken = self.tokens * each * size.layers
        if not adapted and config.trained_weights == "float32":
            taken += (SAVED_CASTS if size.fast else 2.0) * size.matrices
        if not adapted:  # the gradient of embeddings, before it is added to the head's
            taken += (2.0 if config.trained_weights == "bfloat16" else 4.0) * size.embeddings
        return taken + (_chunk(size) if head else 0.0)

    def _cache(self, policy: Size) -> float:
        if self.config.engine != "native":
            return self.config.vllm_memory * self.gpu
        length = -(-self.length // SIZE_MULTIPLE) * SIZE_MULTIPLE
        rows = -(-self.rows // SIZE_MULTIPLE) * SIZE_MULTIPLE
        budget = self.config.rollout_tokens
        if budget == "auto":
            more = KEPT_CACHE_SHARE * self.gpu // policy.token_cache
            budget = max(AUTO_TOKENS, int(more))
        return min(rows, budget // length) * length * float(policy.token_cache)

    def _sampling(self, policy: Size) -> float:
        """A prefill's layer, and the logits of a step."""
        prefill = min(PREFILL_TOKENS, self.rows * self.length)
        return (
            prefill * (6.0 * policy.mlp + 12.0 * policy.hidden)
            + 8.0 * min(self.rows, 1024) * policy.vocabulary
        )


def _frozen(size: Size, *, head: bool = False) -> float:
    """A model that is only evaluated: matrices in bfloat16, embeddings and norms in float32."""
    untied = 2.0 * size.head if head and not size.tied else 0.0
    return 2.0 * size.matrices + 4.0 * (size.scalar - size.matrices) + untied


def _chunk(size: Size) -> float:
    """The logits that exist at once, with their gradient; and the head in bfloat16."""
    rows = max(CHUNK_ROWS, CHUNK // size.vocabulary)
    return 6.0 * rows * size.vocabulary + 2.0 * size.head


def checkpoints_activations(config: StageConfig, device: torch.device) -> bool:
    """Whether a run checkpoints its activations: with `auto`, where it would not fit without."""
    if config.gradient_checkpointing != "auto" or device.type != "cuda":
        return config.gradient_checkpointing is True
    gpu = torch.cuda.get_device_properties(device).total_memory
    try:
        fits = plan_run(config, gpu).fits(gpu)
    except MarlhfError:  # a model of another kind, or an object given in Python
        return False
    if not fits:
        say("gradient_checkpointing: auto checkpoints activations, or this run would not fit")
    return not fits
