"""How SkyRL 0.3.0 makes the batch that its advantage estimators get, for tests without SkyRL.

Excerpts of `skyrl/train/dataset/preprocess.py` and `skyrl/train/trainer.py` (NovaSky-AI/SkyRL,
Apache-2.0), shortened to what estimators see: no prompts, no log-probs, no step-wise trajectories.
`test_the_excerpt_is_what_skyrl_does` compares the first with SkyRL itself where it is installed.
"""

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


class RayPPOTrainer:
    def __init__(self, estimator, gamma, lambd):
        self.estimator, self.gamma, self.lambd = estimator, gamma, lambd

    def compute_advantages_and_returns(self, data):
        token_level_rewards = data["rewards"]
        advantages, returns = self.estimator(
            token_level_rewards=token_level_rewards,
            response_mask=data["response_mask"],
            index=data["uids"],
            values=data["values"],
            grpo_norm_by_std=True,
            gamma=self.gamma,
            lambd=self.lambd,
            config=None,
        )
        data["returns"] = returns
        data["advantages"] = advantages
        return data
