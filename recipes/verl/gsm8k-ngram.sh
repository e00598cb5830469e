#!/usr/bin/env bash
# GSM8K with verl: PPO over 5-grams, `sigma: start`. Data in verl's format:
#   python -m examples.data_preprocess.gsm8k --local_save_dir data/gsm8k   (in a checkout of verl)
# For plain PPO to compare with: recipes/verl/gsm8k-ngram.sh algorithm.macro.segmenter.n=1
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-data/gsm8k}

exec marlhf verl \
  algorithm.adv_estimator=macro_gae \
  algorithm.macro.segmenter.type=ngram \
  algorithm.macro.segmenter.n=5 \
  algorithm.macro.sigma=start \
  algorithm.gamma=1.0 \
  algorithm.lam=0.95 \
  algorithm.use_kl_in_reward=True \
  algorithm.kl_ctrl.kl_coef=0.001 \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.train_batch_size=256 \
  data.max_prompt_length=512 \
  data.max_response_length=512 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 \
  critic.model.path="$MODEL" \
  critic.optim.lr=1e-5 \
  critic.ppo_micro_batch_size_per_gpu=8 \
  trainer.n_gpus_per_node=1 \
  trainer.nnodes=1 \
  trainer.project_name=marlhf \
  trainer.experiment_name=gsm8k-ngram \
  trainer.save_freq=20 \
  trainer.test_freq=10 \
  trainer.total_epochs=5 \
  trainer.logger=[console] \
  "$@"
