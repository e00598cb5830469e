"""How SkyRL 0.3.0 makes the batch that its advantage estimators get, for tests without SkyRL.

Excerpts of `skyrl/train/dataset/preprocess.py` and `skyrl/train/trainer.py` (NovaSky-AI/SkyRL,
Apache-2.0), shortened to what estimators see: no log-probs, no metrics.
`test_the_excerpt_is_what_skyrl_does` compares the first with SkyRL itself where it is installed.
"""

import numpy as np
import torch


def convert_prompts_responses_to_batch_tensors(responses, rewards, loss_masks):
    """`response_mask`, `rewards` and `loss_mask`: (batch, max_response), right-aligned."""
    response_token_lens = [len(r) for r in responses]
    max_response = max(response_token_lens)
    action_masks = []
    for i in range(len(responses)):
        # Response indicator within the last max_response positions (right-aligned).
        resp_pad = max_response - response_token_lens[i]
        action_mask_i = [0] * resp_pad + [1] * response_token_lens[i]
        action_masks.append(action_mask_i)
    action_mask = torch.tensor(action_masks, dtype=torch.int64)

    # Response-level tensors are RIGHT-ALIGNED to match the model output.
    ret_loss_masks = torch.zeros(len(responses), max_response, dtype=torch.float)
    for i, lm in enumerate(loss_masks):
        ret_loss_masks[i, max_response - len(lm) :] = torch.tensor(lm, dtype=torch.float)

    # Same thing for rewards.
    ret_rewards = torch.zeros(len(responses), max_response, dtype=torch.float)
    for i, custom_reward in enumerate(rewards):
        if isinstance(custom_reward, list):
            custom_reward = torch.tensor(custom_reward)
        ret_rewards[i, max_response - len(custom_reward) :] = custom_reward
    return action_mask, ret_rewards, ret_loss_masks


def lay_out_sequences(prompts, responses):
    """`sequences` and `attention_mask`, (batch, max_total): one left-padded block per row."""
    rows = [prompt + response for prompt, response in zip(prompts, responses)]
    max_total = max(map(len, rows))
    sequences = torch.tensor([[0] * (max_total - len(row)) + row for row in rows])
    attention_mask = torch.tensor([[0] * (max_total - len(row)) + [1] * len(row) for row in rows])
    return sequences, attention_mask


class TrainingInputBatch(dict):
    """Tensors by name, and `metadata`: uids, and is_last_step with step-wise trajectories."""

    def __init__(self, tensors, **metadata):
        super().__init__(tensors)
        self.metadata = metadata


class RayPPOTrainer:
    def __init__(self, estimator, gamma, lambd):
        self.estimator, self.gamma, self.lambd = estimator, gamma, lambd

    def compute_advantages_and_returns(self, data):
        token_level_rewards = data["rewards"]
        values = data["values"]
        options = {"grpo_norm_by_std": True, "gamma": self.gamma, "lambd": self.lambd}
        options["config"] = None
        if "is_last_step" in data.metadata:  # cfg.generator.step_wise_trajectories
            is_last_step = torch.tensor(data.metadata["is_last_step"], dtype=torch.bool)
            index = np.array(data.metadata["uids"])
            last_step_response_mask = data["response_mask"][is_last_step]
            last_step_advantages, last_step_returns = self.estimator(
                token_level_rewards=token_level_rewards[is_last_step],
                response_mask=torch.ones_like(last_step_response_mask, dtype=torch.float),
                index=index[is_last_step.numpy()],
                values=values[is_last_step] if values is not None else None,
                **options,
            )
            traj_ids = torch.cat([torch.tensor([False]), is_last_step[:-1]]).int().cumsum(dim=0)
            assert traj_ids[-1].item() + 1 == len(last_step_advantages)
            response_mask_float = data["response_mask"].to(last_step_advantages.dtype)
            advantages = last_step_advantages[traj_ids] * response_mask_float
            returns = last_step_returns[traj_ids] * response_mask_float
        else:
            advantages, returns = self.estimator(
                token_level_rewards=token_level_rewards,
                response_mask=data["response_mask"],
                index=data.metadata["uids"],
                values=values,
                **options,
            )
        data["returns"] = returns
        data["advantages"] = advantages
        return data
