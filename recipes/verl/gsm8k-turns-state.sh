#!/usr/bin/env bash
# gsm8k-turns.sh without a critic: GRPO over whole responses, plus each turn against those that
# read the same answer of the calculator (GiGPO). For plain GRPO to compare with:
#   recipes/verl/gsm8k-turns-state.sh algorithm.adv_estimator=macro_grpo
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
DATA=${DATA:-data/gsm8k}

exec marlhf verl \
  algorithm.adv_estimator=macro_state \
  algorithm.macro.segmenter=turns \
  actor_rollout_ref.rollout.multi_turn.enable=True \
  actor_rollout_ref.rollout.multi_turn.function_tool_path="$here/calculator.py" \
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4 \
  actor_rollout_ref.rollout.multi_turn.format=hermes \
  actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.train_batch_size=64 \
  data.max_prompt_length=1024 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
  trainer.n_gpus_per_node=1 \
  trainer.nnodes=1 \
  trainer.project_name=marlhf \
  trainer.experiment_name=gsm8k-turns-state \
  trainer.save_freq=20 \
  trainer.test_freq=10 \
  trainer.total_epochs=5 \
  trainer.logger=[console] \
  "$@"
