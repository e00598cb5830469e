"""One readable loop a stage: sft, reward, ppo."""
