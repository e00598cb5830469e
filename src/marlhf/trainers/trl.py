"""Scripts for TRL's GRPO and RLOO trainers, with one import changed.

    from marlhf.trainers.trl import GRPOConfig, GRPOTrainer

The configs take TRL's settings with TRL's defaults, and count batches in responses; marlhf's own
settings work beside them. What would change a result and has no equivalent here is refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from marlhf.config.build import field_names
from marlhf.config.settings import hint_for
from marlhf.config.stage import Sampling, refuse_unknown
from marlhf.errors import SettingError
from marlhf.train import rloo_config
from marlhf.trainers import GRPOTrainer, RLOOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer"]

RENAMED = {
    "beta": "kl_coef",
    "delta": "dual_clip",
    "hub_private_repo": "hub_private",
    "load_best_model_at_end": "keep_best",
    "num_generations": "num_samples",
    "save_total_limit": "keep_checkpoints",
    "vllm_gpu_memory_utilization": "vllm_memory",
    "vllm_server_base_url": "vllm_url",
}
SAMPLING = {
    "max_completion_length": "max_new_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
MEANING: dict[str, dict[Any, dict[str, Any]]] = {
    "bf16": {True: {"precision": "bfloat16"}, False: {"precision": "float32"}},
    "use_cpu": {True: {"device": "cpu"}},
    "use_vllm": {True: {"engine": "vllm"}},
    "lr_scheduler_type": {
        **{name: {"schedule": name} for name in ("constant", "cosine", "linear")},
        "constant_with_warmup": {"schedule": "constant"},
    },
    "optim": {
        **{name: {"optimizer": "adamw"} for name in ("adamw_torch", "adamw_torch_fused")},
        **{
            name: {"optimizer": "adamw_8bit"}
            for name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
        },
        "adafactor": {"optimizer": "adafactor"},
    },
    "scale_rewards": {
        **{value: {"scale_group": True} for value in (True, "group")},
        **{value: {"scale_group": False} for value in (False, "none")},
    },
    "importance_sampling_level": {"token": {"ratio": "token"}, "sequence": {"ratio": "macro_mean"}},
    "loss_type": {
        **{name: {} for name in ("bnpo", "dapo")},
        "grpo": {"ratio": "macro_mean"},
        "dr_grpo": {"divide_by": "max_tokens"},
    },
}
"""What a value of TRL's setting is here."""
AS_HERE = {
    "adam_epsilon": 1e-8,
    "multi_objective_aggregation": "sum_then_normalize",
    "num_iterations": 1,
    "repetition_penalty": 1.0,
    "shuffle_dataset": True,
    "top_entropy_quantile": 1.0,
    "train_sampling_strategy": "random",
    "vllm_tensor_parallel_size": 1,
}
"""Values that say what happens here anyway, as None, False and 0 of any other setting do."""
NO_MATTER = (
    "auto_find_batch_size", "average_tokens", "cache_implementation", "dataloader_",
    "dataset_num_proc", "ddp_", "disable_dropout", "disable_tqdm", "do_eval", "do_predict",
    "do_train", "ds3_gather", "enable_jit_checkpoint", "entropy_coef_", "entropy_target",
    "eval_accumulation_steps", "eval_do_concat", "eval_on_start", "gradient_checkpointing_kwargs",
    "hub_strategy", "include_num", "length_column", "local_rank", "log_", "logging_",
    "num_completions_to_print", "pad_to_", "per_device_eval", "project", "ref_model_mixup_alpha",
    "ref_model_sync_steps", "remove_unused", "sapo_", "skip_memory", "tf32", "torch_compile",
    "torch_empty_cache_steps", "trackio_", "use_liger", "use_transformers_", "vespo_",
    "vllm_enable_sleep_mode", "vllm_group", "vllm_max_model_length", "vllm_mode", "vllm_model_impl",
    "vllm_server_timeout",
)  # fmt: skip
"""Settings, or how their names begin, that change no result: not here, or not without others that
are refused."""
LOADING = {"attn_implementation", "device_map", "dtype", "torch_dtype", "use_cache"}
"""What `model_init_kwargs` may hold: none of it changes what is learnt."""


class GRPOConfig:
    """`marlhf.GRPOConfig` from TRL's settings.

    >>> config = GRPOConfig(per_device_train_batch_size=16, num_generations=4, max_steps=10)
    >>> config.batch_size, config.num_samples, config.num_steps
    (4, 4, 10)
    """

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        return rloo_config.GRPOConfig(
            **translated(rloo_config.GRPOConfig, args, settings, beta=0.0)
        )


class RLOOConfig:
    """`marlhf.RLOOConfig` from TRL's settings.

    >>> RLOOConfig(num_generations=2, epsilon=0.1).clip
    0.1
    """

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        more = {"beta": 0.05, "num_generations": 2}
        return rloo_config.RLOOConfig(**translated(rloo_config.RLOOConfig, args, settings, **more))


def translated(
    ours: type, args: tuple[Any, ...], given: Mapping[str, Any], **defaults: Any
) -> dict[str, Any]:
    """Settings of marlhf for those of TRL."""
    if len(args) > 1:
        raise SettingError("Settings are given by name; only output_dir may stand without one.")
    left: dict[str, Any] = {
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-6,
        "load_best_model_at_end": False,
        "lr_scheduler_type": "linear",
        "max_completion_length": 512,
        "num_generations": 8,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 8,
        "save_steps": 500,
        "seed": 42,
        "warmup_ratio": 0.0,
        **defaults,
        **dict(zip(("output_dir",), args)),
    }
    left |= {name: value for name, value in given.items() if value is not None or name not in left}
    found = _batch(left) | _when(left) | _vllm(left)
    sampling = {new: left.pop(name) for name, new in SAMPLING.items() if name in left}
    found["sampling"] = Sampling(**{k: v for k, v in sampling.items() if v is not None})
    found["adam_betas"] = left.pop("adam_beta1"), left.pop("adam_beta2")
    # TRL counts the tokens of all turns together, without the prompt.
    found["episode_tokens"] = found["sampling"].max_new_tokens + 512
    # After so many rounds of calls the model speaks once more; without a limit tokens are one.
    rounds = left.pop("max_tool_calling_iterations", None)
    found["max_turns"] = found["sampling"].max_new_tokens if rounds is None else rounds + 1
    if "epsilon" in left or left.get("epsilon_high") is not None:
        low, high = left.pop("epsilon", 0.2), left.pop("epsilon_high", None)
        found["clip"] = low if high is None else (low, high)
    left.update({new: left.pop(name) for name, new in RENAMED.items() if name in left})
    if not left.get("kl_coef"):
        left.pop("use_bias_correction_kl", None)
    if LOADING.issuperset(left.get("model_init_kwargs") or {}):
        left.pop("model_init_kwargs", None)
    known, hints = set(field_names(ours)), dict[str, str]()
    for name, value in left.items():
        meaning = MEANING.get(name, {})
        if meaning and _plain(value) in meaning:
            found |= meaning[_plain(value)]
        elif value is None or name in known:
            found |= {} if value is None else {name: value}
        elif not value or AS_HERE.get(name) == value or name.startswith(NO_MATTER):
            continue
        else:
            allowed = ", ".join(map(repr, meaning))
            hint = hint_for(name, known) or "marlhf has nothing like it."
            hints[name] = f"It may be {allowed}; got {value!r}." if meaning else hint
    refuse_unknown(ours.__name__, "setting", hints)
    return found


def _batch(left: dict[str, Any]) -> dict[str, Any]:
    """Prompts of a step, the updates of it, and how long training takes."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    of_pass = left.pop("per_device_train_batch_size") * processes
    accumulated = left.pop("gradient_accumulation_steps")
    passes = left.pop("steps_per_generation", None) or accumulated
    generated = left.pop("generation_batch_size", None) or of_pass * passes
    samples, updated = left["num_generations"], of_pass * accumulated
    if generated % samples or generated % updated:
        raise SettingError(
            f"{generated} responses are sampled at a time: that must be a multiple of "
            f"num_generations ({samples}) and of the {updated} responses of an update."
        )
    updates, steps = generated // updated, left.pop("max_steps", -1)
    epochs = left.pop("num_train_epochs")
    num_steps = math.ceil(steps / updates) if steps > 0 else None
    if epochs != int(epochs) and not num_steps:
        raise SettingError(f"num_train_epochs is a whole number here; got {epochs}. Set max_steps.")
    found = {
        "batch_size": generated // samples,
        "num_mini_batches": updates,
        "num_epochs": num_steps or max(1, int(epochs)),  # max_steps goes through data anew
        "num_steps": num_steps,
    }
    return {name: left.pop(name, value) for name, value in found.items()}


def _when(left: dict[str, Any]) -> dict[str, Any]:
    """When a run is evaluated and saved, and how it warms up."""
    evaluated = _plain(left.pop("eval_strategy", "no")) == "steps"
    saved = _plain(left.pop("save_strategy", "steps")) != "no"
    eval_steps = left.pop("eval_steps", None) or left.get("logging_steps", 10)
    save_steps = left.pop("save_steps")
    found = {
        "eval_every": eval_steps if evaluated else 0,
        "save_every": save_steps if saved else 0,
    }
    if steps := left.pop("warmup_steps", 0):  # a share below 1, as transformers 5 has it
        left["warmup_ratio" if steps < 1 else "warmup_steps"] = steps
    return {name: left.pop(name, value) for name, value in found.items()}


def _vllm(left: dict[str, Any]) -> dict[str, Any]:
    """Where vLLM's server is; without vLLM its settings mean nothing."""
    used = left.get("use_vllm") or left.get("engine") == "vllm"
    ours = set(field_names(rloo_config.RLOOConfig))
    for name in [name for name in left if name.startswith("vllm_") and not used]:
        if name not in ours:
            del left[name]
    host, port = left.pop("vllm_server_host", None), left.pop("vllm_server_port", None)
    if not used or left.get("vllm_mode") != "server" or left.get("vllm_server_base_url"):
        return {}
    host = "127.0.0.1" if host in (None, "0.0.0.0") else host
    return {"vllm_url": f"http://{host}:{port or 8000}"}


def _plain(value: Any) -> Any:
    """The text of transformers' enums."""
    return getattr(value, "value", value)
