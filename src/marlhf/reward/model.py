"""A learnt reward model, with the policy's tokenizer or its own; and how well it tells pairs apart.

Axes: B rows or pairs, M members of an ensemble.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from marlhf.config.rl import parse_combine
from marlhf.data import Row
from marlhf.data.collate import SingleProcess, TokenRows
from marlhf.data.encode import decode, encode_prompts, encode_responses, opening_ids
from marlhf.models.base import Precision, autocast, loaded
from marlhf.models.facts import same_tokenizer
from marlhf.models.forward import final_scores
from marlhf.models.heads import members_of
from marlhf.models.sequences import Sequences, send
from marlhf.spans import special_tokens

BINS = 10
"""Of the calibration error."""


class RewardModel:
    """Scores prompt and response as one sequence, at the last real token.

    If its tokenizer differs from the policy's, the text is encoded again, as in the reward model's
    own training. Special tokens, such as those of a chat template, are kept if its tokenizer has a
    special token of the same name and dropped otherwise: as plain text they would be noise that
    it never saw. So the turns of a chat survive only between models with the same special tokens.

    >>> from marlhf.models.load import load_scalar
    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> reward_model = RewardModel(load_scalar("tiny"), tokenizer, tokenizer)
    >>> reward_model([[5, 6], [5, 7]], [[8], [9, 1]]).shape
    torch.Size([2])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        *,
        token_budget: int = 1 << 15,
        precision: Precision = "auto",
        processes: SingleProcess | None = None,
        combine: str = "mean",
    ) -> None:
        self.model = model.requires_grad_(False)
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        self.token_budget = token_budget
        self.precision: Precision = precision
        self.processes = processes or SingleProcess()
        self.combine: float | Literal["min"] = parse_combine(combine)
        self.members = sum(member.score.out_features for member in members_of(model))
        self.disagreement: Tensor | None = None
        """Of the last call: the standard deviation over an ensemble's members, mean over rows."""
        self.foreign = not same_tokenizer(tokenizer, policy_tokenizer)
        marks = special_tokens(policy_tokenizer)
        self._marks = set(marks.values())
        self._unknown = {i for mark, i in marks.items() if mark not in special_tokens(tokenizer)}
        self._opening = opening_ids(policy_tokenizer)

    @torch.no_grad()
    def __call__(
        self, prompts: TokenRows, responses: TokenRows, rows: Sequence[Row] = ()
    ) -> Tensor:
        """One score per row: [B], float32. `rows` is for reward functions only."""
        scores = self.member_scores(prompts, responses)
        if self.members == 1:
            return scores[:, 0]
        spread = scores.std(dim=1, correction=0)
        self.disagreement = spread.mean()
        if self.combine == "min":
            return scores.amin(dim=1)
        return scores.mean(dim=1) - self.combine * spread

    @torch.no_grad()
    def member_scores(self, prompts: TokenRows, responses: TokenRows) -> Tensor:
        """The scores of each member of an ensemble, or of the one head: [B, M]."""
        if self.foreign:
            prompts, responses = self._translate(prompts, responses)

        def of_members(part: Sequences, rows: Sequence[int]) -> Tensor:
            return final_scores(self.model, part).view(len(rows), self.members)

        return self._passes(prompts, responses, of_members, (self.members,))

    def _passes(
        self,
        prompts: TokenRows,
        responses: TokenRows,
        compute: Callable[[Sequences, Sequence[int]], Tensor],
        size: Sequence[int] = (),
    ) -> Tensor:
        """What `compute` gives of some rows and their numbers, of all rows: [B, *size]."""
        pad_id = cast(int, self.tokenizer.pad_token_id)
        with loaded(self.model):
            device = self.model.device
            whole = Sequences.from_lists(prompts, responses, pad_id, device)
            scores = torch.zeros(len(prompts), *size, device=device)
            with autocast(device, self.precision):
                for micro in self.processes.batches(whole.total_lengths, self.token_budget):
                    where = send(torch.tensor(micro.rows), device)
                    scores[where] += compute(whole.rows(micro.rows), micro.rows) * micro.weight
        return self.processes.sum(scores)

    def _translate(
        self, prompts: TokenRows, responses: TokenRows
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Encode the same text in this model's tokens, with EOS if the policy ended with one."""
        mine, theirs = self.tokenizer, self.policy_tokenizer
        eos_id = cast(int, mine.eos_token_id)
        texts = [self._prompt_text(prompt) for prompt in prompts]
        pairs = [(prompt, decode(theirs, ids)) for prompt, ids in zip(texts, responses)]
        new_responses = []
        for response, ids in zip(responses, encode_responses(mine, pairs, eos_id)):
            ended = len(response) > 0 and response[-1] in self._marks
            new_responses.append(ids if ended else ids[:-1])
        # An empty prompt still needs a token: the score is read at one.
        return [ids or [eos_id] for ids in encode_prompts(mine, texts)], new_responses

    def _prompt_text(self, prompt: Sequence[int]) -> str:
        """A prompt's text, with those special tokens that both tokenizers have."""
        opens = list(prompt[: len(self._opening)]) == self._opening
        body = prompt[len(self._opening) :] if opens else prompt
        known = [i for i in body if i not in self._unknown]
        text = self.policy_tokenizer.decode(
            known, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return cast(str, text)


def pair_metrics(
    chosen: Tensor,  # [B], scores
    rejected: Tensor,  # [B]
    lengths: Tensor,  # [2, B], tokens of the chosen and of the rejected responses
    decided: Tensor,  # [B] bool, False for ties
) -> dict[str, float]:
    """Accuracy, also where the shorter response won, calibration, correlation with length.

    What no pair says anything about is left out.
    """
    margins, shorter = (chosen - rejected)[decided], (lengths[0] < lengths[1])[decided]
    metrics = {
        "length_correlation": float(correlation(torch.cat([chosen, rejected]), lengths.flatten()))
    }
    if len(margins):
        metrics["accuracy"] = accuracy(margins)
        metrics["calibration_error"] = calibration_error(margins)
    if bool(shorter.any()):
        metrics["accuracy_short"] = accuracy(margins[shorter])
    return metrics


def accuracy(margins: Tensor) -> float:
    """Share of pairs whose chosen response scores higher; a tie counts half."""
    return float(((margins > 0).float() + 0.5 * (margins == 0).float()).mean())


def calibration_error(margins: Tensor) -> float:
    """The expected calibration error: how far confidence is from accuracy, in ten bins.

    A model is sigmoid(|margin|) sure of the response that it prefers, 0.5 to 1, and right where
    people chose that one. Bins are weighted by their pairs.

    >>> round(calibration_error(torch.tensor([9.0, 9.0, 9.0, -9.0])), 2)  # sure, right in 3 of 4
    0.25
    """
    sure = margins.double().abs().sigmoid()
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    bins = ((sure - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64, device=margins.device)
    return float(gaps.index_add(0, bins, sure - right).abs().sum() / len(margins))


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's, with gradients; 0 where either is constant."""
    x, y = x.float() - x.float().mean(), y.float() - y.float().mean()
    return (x * y).sum() / (x.norm() * y.norm()).clamp(min=1e-8)
