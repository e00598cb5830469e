"""The simplest engine: left-padded batches over transformers' own cache, token by token.

The fast engine is tested against it, and falls back to it for models whose attention it cannot
replace. Axes: B rows, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from marlhf.data.collate import TokenRows, pad_left, token_budget_batches
from marlhf.kernels.sampling import draw
from marlhf.models.base import Model, Precision, autocast
from marlhf.models.forward import keeps_logits, position_ids
from marlhf.models.sequences import receive, send
from marlhf.rollout.engine import (
    CheckedEngine,
    Reply,
    Rollout,
    Sampling,
    SamplingRequest,
    ask_all,
    converse_in_rounds,
    draws,
)

CHECK_EVERY = 8
"""Steps between checks whether every row has ended: each check waits for the device."""


class PlainEngine(CheckedEngine):
    """One batch after another, each as long as its longest response."""

    def __init__(
        self,
        model: Model,
        end_tokens: Sequence[int],
        pad_id: int,
        *,
        token_budget: int = 1 << 17,
        precision: Precision = "auto",
    ) -> None:
        self.model = model
        self.end_tokens = list(end_tokens)
        self.pad_id = pad_id
        self.token_budget = token_budget
        self.precision: Precision = precision
        self.one_by_one = False  # for families that left padding disturbs

    def update_weights(self, model: nn.Module) -> None:
        assert model is self.model, "the plain engine samples from the policy itself"

    def respond(self, request: SamplingRequest, reply: Reply | None) -> Rollout:
        device = self.model.device
        if reply is None:
            uniform = draws(request.seeds, request.sampling.max_new_tokens, device)
            return self._sample_all(request, uniform)

        def sample_turns(turns: SamplingRequest, used: list[int]) -> list[Any]:
            """Each turn is a response to the whole text so far."""
            length = max(turns.limits)
            # The random numbers of a turn are those of its positions in the response.
            columns = send(torch.tensor(used)[:, None] + torch.arange(length), device)
            uniform = draws(turns.seeds, max(request.limits), device)
            own = uniform.gather(1, columns.clamp(max=uniform.shape[1] - 1))
            sampling = replace(turns.sampling, max_new_tokens=length)
            rollout = self._sample_all(turns._replace(sampling=sampling), own)
            lists = zip(rollout.responses, rollout.logprobs.tolist())
            return [(tokens, logprobs[: len(tokens)]) for tokens, logprobs in lists]

        talk = converse_in_rounds(request, sample_turns, partial(ask_all, reply))
        return talk.rollout(self.end_tokens, device)

    def _sample_all(self, request: SamplingRequest, uniform: Tensor) -> Rollout:
        """With random numbers [B, R]."""
        prompts, sampling = request.prompts, request.sampling
        device, length = self.model.device, sampling.max_new_tokens
        tokens = torch.full((len(prompts), length), self.pad_id, device=device)
        logprobs = torch.zeros(len(prompts), length, device=device)
        training = self.model.training
        self.model.eval()  # gradient checkpointing would disable the cache
        lengths = [len(p) + length for p in prompts]
        batches = token_budget_batches(lengths, self.token_budget)
        if self.one_by_one:
            batches = [[row] for row in range(len(prompts))]
        try:
            with autocast(device, self.precision):
                for batch in batches:
                    rows = torch.tensor(batch, device=device)
                    drawn, their_logprobs = self._sample(
                        [prompts[i] for i in batch], sampling, uniform[rows]
                    )
                    tokens[rows, : drawn.shape[1]] = drawn
                    logprobs[rows, : drawn.shape[1]] = their_logprobs
        finally:
            self.model.train(training)
        lengths = response_lengths(tokens, self.end_tokens, request.limits)
        return to_rollout(tokens, logprobs, lengths, self.end_tokens)

    def _sample(
        self, prompts: list[Sequence[int]], sampling: Sampling, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs of one batch, [B, up to R]; junk after the end."""
        ends = torch.tensor(self.end_tokens, device=self.model.device)
        running = torch.ones(len(prompts), dtype=torch.bool, device=self.model.device)
        decode = self.decode(prompts, sampling.max_new_tokens)
        logits = next(decode)
        tokens, logprobs = [], []
        for step in range(1, sampling.max_new_tokens + 1):
            token, logprob = draw(logits, sampling, uniform[:, step - 1])
            tokens.append(token)
            logprobs.append(logprob)
            running &= ~torch.isin(token, ends)
            ended = step % CHECK_EVERY == 0 and not running.any()
            if ended or step == sampling.max_new_tokens:
                break
            logits = decode.send(token)
        return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)

    def decode(self, prompts: TokenRows, max_new_tokens: int) -> Generator[Tensor, Tensor, None]:
        """Logits [B, V] after the prompts, then after each token [B] that is sent."""
        device = self.model.device
        ids, attention = (x.to(device) for x in pad_left(prompts, self.pad_id))
        width = attention.shape[1]
        # The mask of the longest text, allocated once: each step takes a longer slice of it.
        mask = torch.ones(len(prompts), width + max_new_tokens, dtype=torch.int64, device=device)
        mask[:, :width] = attention
        positions = position_ids(attention)
        cache = DynamicCache(config=self.model.config)  # keeps only the window of sliding layers
        last_only = {"logits_to_keep": 1} if keeps_logits(type(self.model)) else {}
        for step in range(max_new_tokens):
            logits = self.model(
                input_ids=ids,
                attention_mask=mask[:, : width + step],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                **last_only,
            ).logits[:, -1]
            token = yield logits
            ids, positions = token[:, None], positions[:, -1:] + 1


def response_lengths(tokens: Tensor, end_tokens: Sequence[int], limits: Sequence[int]) -> Tensor:
    """Up to the first end token of each row, or its limit where that comes first: [B]."""
    longest = torch.tensor(limits, device=tokens.device)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    ends = torch.isin(tokens, torch.tensor(end_tokens, device=tokens.device))
    ends &= columns < longest[:, None]
    return torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, longest)


def to_rollout(
    tokens: Tensor,  # [B, R], junk after the end
    logprobs: Tensor,  # [B, R]
    lengths: Tensor,  # [B]
    end_tokens: Sequence[int],
) -> Rollout:
    """Responses of some lengths; those whose last token is an end token have ended."""
    # In numpy: a GPU would be asked, and waited for, several times.
    ids, counts = receive(tokens, lengths)
    mask = np.arange(ids.shape[1]) < counts[:, None]
    flat, ends = ids[mask].tolist(), counts.cumsum().tolist()
    rows = [flat[start:end] for start, end in zip([0, *ends], ends)]
    last = set(end_tokens)
    ended = torch.tensor([row[-1] in last for row in rows])
    where = torch.arange(int(counts.max()), device=lengths.device) < lengths[:, None]
    kept = torch.where(where, logprobs[:, : where.shape[1]], 0.0)
    return Rollout(rows, kept, send(ended, tokens.device))
