"""Macro actions in slime: a function for `--custom-advantage-function-path`.

    --custom-advantage-function-path marlhf.engines.slime.macro_gae --custom-config-path macro.yaml

with `macro: {segmenter: {type: ngram, n: 5}, sigma: start}` in macro.yaml. slime computes rows by
rank, so whitening by macro action is over one rank's rows; leave `whiten: none` and use slime's own
`--normalize-advantages`, which counts tokens over all ranks.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from marlhf.engines.advantages import (
    Estimator,
    MacroSettings,
    TokenText,
    macro_advantages,
    needs_text,
    read_settings,
    refuse_unseen,
)
from marlhf.engines.batch import EngineBatch, EngineError


def macro_gae(args: Any, rollout_data: dict[str, Any]) -> None:
    """Put "advantages" and "returns" into `rollout_data`: lists with one tensor per response.

    >>> from argparse import Namespace
    >>> args = Namespace(macro={"segmenter": {"type": "ngram", "n": 2}, "whiten": "none"},
    ...     kl_coef=0.0, gamma=1.0, lambd=1.0, context_parallel_size=1, hf_checkpoint="")
    >>> zeros, ones = torch.zeros(3), torch.ones(3)
    >>> data = {"rewards": [1.0], "kl": [zeros], "values": [ones], "loss_masks": [ones],
    ...     "tokens": [torch.arange(5)]}
    >>> macro_gae(args, data)
    >>> data["advantages"], data["returns"]
    ([tensor([0., 0., 0.])], [tensor([1., 1., 1.])])
    """
    _credit(args, rollout_data, "macro_gae")


def _credit(args: Any, rollout_data: dict[str, Any], estimator: Estimator) -> None:
    settings, text = _prepared(json.dumps(vars(args).get("macro")), args.hf_checkpoint, estimator)
    if args.context_parallel_size > 1:
        raise EngineError(
            "Macro actions need whole responses, and with --context-parallel-size above 1 a rank "
            "has parts of them. Leave it at 1."
        )
    values, masks = rollout_data.get("values"), rollout_data["loss_masks"]
    batch = EngineBatch(
        rewards=_token_rewards(rollout_data["rewards"], rollout_data["kl"], masks, args.kl_coef),
        mask=_padded(masks),
        values=None if values is None else _padded(values),
        tokens=_padded(_responses(rollout_data)),
        ref_logprobs=_optional(rollout_data.get("ref_log_probs")),
        logprobs=_optional(rollout_data.get("rollout_log_probs") or rollout_data.get("log_probs")),
        groups=None if estimator == "macro_gae" else _groups(args, rollout_data),
    )
    options = {"estimator": estimator, "scale": vars(args).get("grpo_std_normalization", True)}
    advantages, returns = macro_advantages(
        batch, settings, gamma=args.gamma, lam=args.lambd, text=text, **options
    )
    lengths = [len(mask) for mask in masks]
    rollout_data["advantages"] = [row[:n] for row, n in zip(advantages, lengths)]
    rollout_data["returns"] = [row[:n] for row, n in zip(returns, lengths)]


def _groups(args: Any, rollout_data: dict[str, Any]) -> list[int]:
    """The prompt of each row. slime numbers samples prompt by prompt."""
    if args.rewards_normalization and args.advantage_estimator != "ppo":
        raise EngineError(
            "slime has already compared the rewards of a group before a custom advantage function "
            "sees them. Add --disable-rewards-normalization."
        )
    num_samples = args.n_samples_per_prompt
    groups = [index // num_samples for index in rollout_data["sample_indices"]]
    if any(count != num_samples for count in Counter(groups).values()):
        raise EngineError(
            f"A rank needs all {num_samples} responses to a prompt, one row each, and has others. "
            "Set --micro-batch-size to a multiple of --n-samples-per-prompt, and leave out "
            "--use-dynamic-batch-size and --balance-data."
        )
    return groups


macro_rloo = functools.partial(_credit, estimator="macro_rloo")
macro_grpo = functools.partial(_credit, estimator="macro_grpo")
macro_state = functools.partial(_credit, estimator="macro_state")
"""The same without a critic, each response against the others to its prompt."""


@functools.lru_cache
def _prepared(
    macro: str, checkpoint: str, estimator: Estimator
) -> tuple[MacroSettings, TokenText | None]:
    """Settings, and the tokenizer's tables where they are needed, once per process."""
    settings = read_settings(json.loads(macro), "macro", estimator)
    refuse_unseen(settings, "slime")
    if not needs_text(settings.segmenter):
        return settings, None
    from transformers import AutoTokenizer

    return settings, TokenText(settings.segmenter, AutoTokenizer.from_pretrained(checkpoint))


def _token_rewards(
    scores: Sequence[float], kl: Sequence[Tensor], masks: Sequence[Tensor], kl_coef: float
) -> Tensor:
    """The KL penalty of each token, and the score at the last one that the policy wrote: [B, T].

    slime puts the score on the last token. Where that is masked, such as tool output, no macro
    action would have it. A response without any token of the policy has nothing to learn from it.
    """
    rows = [
        -kl_coef * of_row.float() * torch.as_tensor(mask, device=of_row.device)
        for of_row, mask in zip(kl, masks)
    ]
    for row, mask, score in zip(rows, masks, scores, strict=True):
        written = torch.as_tensor(mask).nonzero()
        if len(written):
            row[written[-1]] += score
    return _padded(rows)


def _responses(rollout_data: dict[str, Any]) -> list[Tensor]:
    """The tokens of each response, without its prompt."""
    rows = [torch.as_tensor(row) for row in rollout_data["tokens"]]
    return [row[len(row) - len(mask) :] for row, mask in zip(rows, rollout_data["loss_masks"])]


def _optional(rows: Sequence[Tensor] | None) -> Tensor | None:
    return None if not rows else _padded(rows)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)
