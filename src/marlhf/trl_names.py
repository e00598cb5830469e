"""Settings of TRL and of transformers' TrainingArguments, and what they are called here.

docs/migrate.md has the same as tables, with the defaults.
"""

from __future__ import annotations

RENAMED = {
    "lr_scheduler_type": "schedule",
    "num_train_epochs": "num_epochs",
    "max_steps": "num_steps",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "hub_private_repo": "hub_private",
    "cliprange": "clip",
    "cliprange_value": "value_clip",
    "epsilon": "clip",
    "delta": "dual_clip",
    "num_generations": "num_samples",
    "rloo_k": "num_samples",
    "sft_model_path": "model",
    "model_name_or_path": "model",
    "reward_model_path": "reward_model",
    "response_length": "sampling=Sampling(max_new_tokens=...)",
    "max_completion_length": "sampling=Sampling(max_new_tokens=...)",
    "temperature": "sampling=Sampling(temperature=...)",
    "top_k": "sampling=Sampling(top_k=...)",
    "top_p": "sampling=Sampling(top_p=...)",
    "max_prompt_length": "data=DataConfig(max_prompt_tokens=...)",
    "max_length": "max_response_tokens, and data=DataConfig(max_prompt_tokens=...)",
    "center_rewards_coefficient": "center_coef",
    "scale_rewards": "scale_group",
    "normalize_advantages": "whiten",
    "num_sample_generations": "eval_every and log_samples",
    "eval_strategy": "eval_every, 0 for the end alone",
    "save_strategy": "save_every, 0 for none",
    "total_episodes": "num_steps, which is total_episodes / batch_size",
    "per_device_train_batch_size": "batch_size, over all devices and accumulation steps",
    "gradient_accumulation_steps": "batch_size, over all devices and accumulation steps",
    "bf16": 'precision="bfloat16"',
    "fp16": 'precision="auto"; float16 is not used',
    "tf32": "precision",
    "fsdp": 'parallel="fsdp"',
    "deepspeed": 'parallel="fsdp"',
    "use_vllm": 'engine="vllm"',
    "vllm_server_base_url": "vllm_url",
    "vllm_gpu_memory_utilization": "vllm_memory",
}
REMOVED = {
    "logging_steps": "every step is logged",
    "vf_coef": "the critic has an optimiser of its own: set critic_learning_rate",
    "whiten_rewards": "advantages are whitened; normalize_scores scales scores",
    "stop_token": "responses end at EOS",
    "stop_token_id": "set model.generation_config.eos_token_id",
    "local_rollout_forward_batch_size": "rollout_tokens bounds memory and changes no result",
    "per_device_eval_batch_size": "eval_prompts are evaluated in passes of token_budget tokens",
    "optim": "it is AdamW",
    "adam_beta1": "it is 0.9",
    "adam_beta2": "it is 0.95",
    "adam_epsilon": "it is 1e-8",
    "lr_scheduler_kwargs": "schedules have none",
    "dataset_num_proc": "fast tokenizers use all cores",
    "remove_unused_columns": "reward functions get the columns that they name",
    "padding_free": "micro-batches are cut by token_budget",
    "packing": "micro-batches are cut by token_budget",
    "torch_compile": "set compile",
    "use_liger_kernel": "log-probs are computed in chunks",
    "ds3_gather_for_generation": "with fsdp weights are gathered for sampling",
    "model_adapter_name": "marlhf names adapters itself",
    "ref_adapter_name": "the reference is the policy with the adapter off",
}


def hint_for(name: str) -> str:
    """What to write in place of one of their settings; empty for names that they do not have.

    >>> hint_for("cliprange"), hint_for("optim"), hint_for("clip")
    ('In marlhf it is clip.', 'Leave it out: it is AdamW.', '')
    """
    if name in RENAMED:
        return f"In marlhf it is {RENAMED[name]}."
    return f"Leave it out: {REMOVED[name]}." if name in REMOVED else ""
