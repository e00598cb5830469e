"""A learnt reward model, with the policy's tokenizer or with one of its own.

Axes: B rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from marlhf.data.collate import token_budget_batches
from marlhf.data.encode import decode
from marlhf.models.forward import Sequences, final_scores
from marlhf.models.load import Precision, autocast, same_tokenizer


class RewardModel:
    """Scores prompt and response as one text, read at the last real token."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        *,
        token_budget: int = 1 << 15,
        precision: Precision = "auto",
    ) -> None:
        self.model = model.requires_grad_(False)
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        self.token_budget = token_budget
        self.precision: Precision = precision
        self.foreign = not same_tokenizer(tokenizer, policy_tokenizer)

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> Tensor:
        """One score a row: [B], float32."""
        if self.foreign:
            prompts, responses = self._translate(prompts, responses)
        device = self.model.device
        whole = Sequences.from_lists(prompts, responses, self.tokenizer.pad_token_id, device)
        scores = torch.empty(len(prompts), device=device)
        with autocast(device, self.precision):
            for batch in token_budget_batches(whole.total_lengths, self.token_budget):
                where = torch.tensor(batch, device=device)
                scores[where] = final_scores(self.model, whole.rows(batch))
        return scores

    def _translate(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The same text in this model's own tokens, ended by EOS where the policy ended it."""
        mine, theirs = self.tokenizer, self.policy_tokenizer
        new_prompts, new_responses = [], []
        for prompt, response in zip(prompts, responses):
            text = decode(theirs, response)
            ids = list(mine(text, add_special_tokens=False)["input_ids"])
            if response and response[-1] == theirs.eos_token_id:
                ids.append(mine.eos_token_id)
            new_prompts.append(list(mine(decode(theirs, prompt))["input_ids"]))
            new_responses.append(ids)
        return new_prompts, new_responses
