"""Sampling with the policy itself: no copy of the weights, nothing to install.

Axes: B rows, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from marlhf.data.collate import pad_left, token_budget_batches
from marlhf.models.forward import keeps_logits, position_ids
from marlhf.models.load import Precision, autocast
from marlhf.rollout.engine import Rollout, Sampling

CHECK_EVERY = 8
"""Steps between asking the device whether every row has ended: asking waits for it."""


class NativeEngine:
    """Left-padded batches over transformers' key-value cache, token by token."""

    def __init__(
        self,
        model: PreTrainedModel,
        end_tokens: Sequence[int],
        pad_id: int,
        *,
        token_budget: int = 1 << 17,
        precision: Precision = "auto",
    ) -> None:
        if {"cache_params", "state"} & inspect.signature(type(model).forward).parameters.keys():
            raise ValueError(
                f"A {type(model).__name__} keeps a state where others keep keys and values, and "
                "the native engine does not know how. Take a model with attention."
            )
        self.model = model
        self.end_tokens = list(end_tokens)
        self.pad_id = pad_id
        self.token_budget = token_budget
        self.precision: Precision = precision

    def update_weights(self, model: torch.nn.Module) -> None:
        assert model is self.model, "the native engine samples from the policy itself"

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        generator: torch.Generator | None = None,
    ) -> Rollout:
        """Sample one response a prompt; repeat a prompt for several.

        Prompts of like length share a batch, cut by the token budget with room for the responses.
        """
        if not prompts:
            raise ValueError("There are no prompts to answer.")
        if empty := [i for i, prompt in enumerate(prompts) if not prompt]:
            raise ValueError(
                f"The prompts {empty} have no tokens, so there is nothing to go on from. "
                "Begin each with BOS, or with EOS where the tokenizer has no BOS."
            )
        room = [len(p) + sampling.max_new_tokens for p in prompts]
        tokens, logprobs = [], []
        order: list[int] = []
        training = self.model.training
        self.model.eval()  # gradient checkpointing would leave out the cache
        try:
            for batch in token_budget_batches(room, self.token_budget):
                order += batch
                t, lp = self._sample([prompts[i] for i in batch], sampling, generator)
                tokens.append(t)
                logprobs.append(lp)
        finally:
            self.model.train(training)
        inverse = torch.empty(len(order), dtype=torch.int64).index_copy_(
            0, torch.tensor(order), torch.arange(len(order))
        )
        device = tokens[0].device
        all_tokens = _stack(tokens, self.pad_id)[inverse.to(device)]
        all_logprobs = _stack(logprobs, 0.0)[inverse.to(device)]
        ends = torch.isin(all_tokens, torch.tensor(self.end_tokens, device=device))
        ended = ends.any(dim=1)
        full = torch.full_like(ended, sampling.max_new_tokens, dtype=torch.int64)
        lengths = torch.where(ended, ends.int().argmax(dim=1) + 1, full)
        mask = torch.arange(all_tokens.shape[1], device=device) < lengths[:, None]
        rows = [row[:n] for row, n in zip(all_tokens.tolist(), lengths.tolist())]
        width = max(map(len, rows))
        return Rollout(rows, torch.where(mask, all_logprobs, 0.0)[:, :width], ended)

    def _sample(
        self, prompts: list[Sequence[int]], sampling: Sampling, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs of one batch, [B, up to max_new_tokens]; junk after the end."""
        device = self.model.device
        ids, attention = (x.to(device) for x in pad_left(prompts, self.pad_id))
        width = attention.shape[1] + sampling.max_new_tokens
        # Allocated once, so that a step costs no growing copies.
        seen = torch.ones(len(prompts), width, dtype=torch.int64, device=device)
        seen[:, : attention.shape[1]] = attention
        positions = position_ids(attention)
        ends = torch.tensor(self.end_tokens, device=device)
        running = torch.ones(len(prompts), dtype=torch.bool, device=device)
        cache = DynamicCache(config=self.model.config)  # keeps only the window where one slides
        last_only = {"logits_to_keep": 1} if keeps_logits(type(self.model)) else {}
        tokens, logprobs = [], []
        with autocast(device, self.precision):
            for step in range(sampling.max_new_tokens):
                logits = self.model(
                    input_ids=ids,
                    attention_mask=seen[:, : attention.shape[1] + step],
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    **last_only,
                ).logits[:, -1]
                token, logprob = draw(logits, sampling, generator)
                tokens.append(token)
                logprobs.append(logprob)
                running &= ~torch.isin(token, ends)
                if (step + 1) % CHECK_EVERY == 0 and not running.any():
                    break
                ids, positions = token[:, None], positions[:, -1:] + 1
        return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)


def draw(
    logits: Tensor,  # [B, V]
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-prob under the whole distribution at that temperature: [B]."""
    logits = logits.float() / sampling.scale
    logprobs = logits.log_softmax(dim=1)
    if sampling.temperature == 0:
        token = logits.argmax(dim=1)
    else:
        allowed = _truncate(logprobs, sampling) if sampling.truncated else logprobs
        # Gumbel's trick: the largest of log-prob plus noise is a draw, without a host sync.
        noise = torch.empty_like(allowed).exponential_(generator=generator).log()
        token = (allowed - noise).argmax(dim=1)
    return token, logprobs.gather(1, token[:, None]).squeeze(1)


def _truncate(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs with what top-k and top-p exclude set to minus infinity."""
    vocabulary = logprobs.shape[1]
    if 0 < sampling.top_k < vocabulary:
        least = logprobs.topk(sampling.top_k, dim=1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
    if sampling.top_p < 1:
        ranked, order = logprobs.softmax(dim=1).sort(dim=1, descending=True)
        beyond = ranked.cumsum(dim=1) - ranked >= sampling.top_p  # the first always stays
        excluded = torch.zeros_like(beyond).scatter(1, order, beyond)
        logprobs = logprobs.masked_fill(excluded, -torch.inf)
    return logprobs


def _stack(parts: list[Tensor], fill: float) -> Tensor:
    width = max(p.shape[1] for p in parts)
    padded = [torch.nn.functional.pad(p, (0, width - p.shape[1]), value=fill) for p in parts]
    return torch.cat(padded)
