"""Names of settings in TRL and transformers' TrainingArguments, and what to write instead.

docs/migrate.md has the same as tables, with the defaults.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

RENAMED = {
    "lr": "learning_rate",
    "lr_scheduler_type": "schedule",
    "num_train_epochs": "num_epochs",
    "max_steps": "num_steps",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "hub_private_repo": "hub_private",
    "cliprange": "clip",
    "optim": "optimizer",
    "epsilon": "clip",
    "epsilon_high": "clip, as a pair of low and high: clip=(0.2, 0.28)",
    "cliprange_value": "value_clip",
    "delta": "dual_clip",
    "num_generations": "num_samples",
    "rloo_k": "num_samples",
    "sft_model_path": "model",
    "model_name_or_path": "model",
    "reward_model_path": "reward_model",
    "response_length": "sampling=Sampling(max_new_tokens=...)",
    "max_new_tokens": "sampling=Sampling(max_new_tokens=...)",
    "max_completion_length": "sampling=Sampling(max_new_tokens=...)",
    "temperature": "sampling=Sampling(temperature=...)",
    "top_k": "sampling=Sampling(top_k=...)",
    "top_p": "sampling=Sampling(top_p=...)",
    "max_prompt_length": "data=DataConfig(max_prompt_tokens=...)",
    "max_length": "max_response_tokens, and data=DataConfig(max_prompt_tokens=...)",
    "max_seq_length": "max_response_tokens, and data=DataConfig(max_prompt_tokens=...)",
    "center_rewards_coefficient": "center_coef",
    "scale_rewards": "scale_group",
    "num_sample_generations": "eval_every and log_samples",
    "eval_strategy": "eval_every, 0 for the end alone",
    "save_strategy": "save_every, 0 for none",
    "total_episodes": "num_steps, which is total_episodes / batch_size",
    "per_device_train_batch_size": "batch_size, over all devices and accumulation steps",
    "gradient_accumulation_steps": "batch_size, over all devices and accumulation steps",
    "bf16": 'precision="bfloat16"',
    "fp16": 'precision="auto"; float16 is not used',
    "tf32": "precision",
    "use_vllm": 'engine="vllm"',
    "vllm_gpu_memory_utilization": "vllm_memory",
    "beta": "kl_coef",
    "steps_per_generation": "num_mini_batches",
    "importance_sampling_level": "ratio",
    "reward_clip_range": "score_clip, one number",
    "log_completions": "log_samples",
    "num_completions_to_print": "log_samples",
    "truncation_mode": 'data=DataConfig(too_long="truncate")',
    "dataset_text_field": "data=DataConfig(columns={...})",
    "data_seed": "data=DataConfig(seed=...)",
    "full_determinism": "deterministic",
    "use_cpu": 'device="cpu"',
    "load_best_model_at_end": "keep_best, for ppo and rloo",
    **dict.fromkeys(("fsdp", "deepspeed", "fsdp_config"), 'parallel="fsdp"'),
    **dict.fromkeys(("vllm_server_base_url", "vllm_server_host", "vllm_server_port"), "vllm_url"),
}
REMOVED = {
    "packed": "it was removed, since it made no run faster",
    **dict.fromkeys(
        ("logging_steps", "logging_strategy", "logging_first_step"), "every step is logged"
    ),
    "vf_coef": "the critic has an optimiser of its own: set critic_learning_rate",
    "whiten_rewards": "advantages are whitened; normalize_scores scales scores",
    "stop_token": "responses end at EOS",
    "stop_token_id": "set model.generation_config.eos_token_id",
    "local_rollout_forward_batch_size": "rollout_tokens bounds memory and changes no result",
    "per_device_eval_batch_size": "eval_prompts are evaluated in passes of token_budget tokens",
    "adam_beta1": "it is 0.9",
    "adam_beta2": "it is 0.95",
    "adam_epsilon": "it is 1e-8",
    "lr_scheduler_kwargs": "schedules have none",
    "dataset_num_proc": "fast tokenizers use all cores",
    "remove_unused_columns": "reward functions get the columns that they name",
    "mini_batch_size": "it is batch_size / num_mini_batches",
    "generation_batch_size": "it is batch_size times num_samples",
    "precompute_ref_log_probs": "they always are, and a resumed run keeps them",
    "auto_find_batch_size": 'token_budget="auto" does so',
    "disable_dropout": "dropout is off",
    "train_on_last_step_only": "every step teaches; a reward model is of whole responses",
    "num_iterations": "each response is used once; num_mini_batches makes several updates of them",
    "mask_truncated_completions": (
        "responses that were cut off are trained on; missing_eos_penalty lowers their score"
    ),
    **dict.fromkeys(
        ("hub_strategy", "hub_always_push", "hub_revision"), "the finished model is uploaded, once"
    ),
    "eval_on_start": "the start is always evaluated",
    "greater_is_better": "it is the held-out score",
    "shuffle_dataset": "rows are shuffled by seed",
    "loss_type": (
        'DPO has sigmoid, SFT the log-likelihood; GRPO has ratio="token" (dapo, bnpo), '
        'ratio="macro_mean" (grpo), and scale_group=False besides (dr_grpo)'
    ),
    "normalize_advantages": "RLOO's are not; PPO has whiten",
    "completion_only_loss": "the loss is over the response alone",
    "assistant_only_loss": "the loss is over the response alone",
    "model_init_kwargs": "load the model and pass it to the trainer",
    "min_p": "it would bias the ratio",
    "repetition_penalty": "it would bias the ratio",
    "generation_kwargs": "they would bias the ratio",
    "num_generations_eval": "one response per prompt is evaluated",
    "resume_from_checkpoint": "train() resumes an unfinished run",
    "metric_for_best_model": "it is the held-out score",
    "gradient_checkpointing_kwargs": "set gradient_checkpointing",
    "hub_token": "huggingface_hub finds it",
    "torch_compile": "set compile",
    "use_liger_kernel": "log-probs are computed in chunks",
    "ds3_gather_for_generation": "with fsdp weights are gathered for sampling",
    "model_adapter_name": "marlhf names adapters itself",
    "ref_adapter_name": "the reference is the policy with the adapter off",
    **dict.fromkeys(
        (
            "padding_free",
            "packing",
            "eval_packing",
            "packing_strategy",
            "micro_batch_size",
            "local_batch_size",
            "local_mini_batch_size",
            "precompute_ref_batch_size",
        ),
        "micro-batches are cut by token_budget",
    ),
    **dict.fromkeys(("chat_template_path", "eos_token", "pad_token"), "set it on the tokenizer"),
    **dict.fromkeys(
        ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        "the reference is fixed: ref_model",
    ),
}
PREFIXES = ("dataloader_", "ddp_", "entropy_", "f_", "log_", "sapo_", "use_", "vespo_", "vllm_")
ABSENT = {
    "activation_offloading",
    "cache_implementation",
    "cast_lm_head_to_fp32",
    "chat_template_kwargs",
    "dataset_kwargs",
    "discopop_tau",
    "do_eval",
    "do_predict",
    "do_train",
    "enable_jit_checkpoint",
    "eval_delay",
    "ld_alpha",
    "loss_weights",
    "max_tool_calling_iterations",
    "multi_objective_aggregation",
    "num_total_batches",
    "off_policy_mask_threshold",
    "pad_to_multiple_of",
    "parallelism_config",
    "router_aux_loss_coef",
    "save_only_model",
    "top_entropy_quantile",
    "transformers_continuous_batching_config",
    "world_size",
}
"""Settings of TRL's configs with nothing like them here."""


def hint_for(name: str, known: Iterable[str] = ()) -> str:
    """What to write in place of an unknown setting; empty where nothing comes near.

    >>> hint_for("cliprange"), hint_for("optim"), hint_for("kl_cof", ["kl_coef", "clip"])
    ('In marlhf it is clip.', 'In marlhf it is optimizer.', 'Did you mean kl_coef?')
    """
    known = set(known)
    if name == "max_completion_length" and "step_separator" in known:
        return "In marlhf it is max_response_tokens."
    if new := RENAMED.get(name):
        ours = re.split(r"\W", new)[0]
        if "output_dir" in known and ours not in known:  # the settings of a stage without it
            return f"Leave it out: in marlhf it is {ours}, which this stage does not have."
        if ours == "batch_size" and "tree" in known:  # GRPO, RLOO
            return f"In marlhf it is {new}; TRL counts responses there, and marlhf prompts."
        return f"In marlhf it is {new}."
    if name in REMOVED:
        return f"Leave it out: {REMOVED[name]}."
    absent = name in ABSENT or name.startswith(PREFIXES)
    if near := difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8 if absent else 0.6):
        return f"Did you mean {near[0]}?"
    return "Leave it out: marlhf has nothing like it." if absent else ""
