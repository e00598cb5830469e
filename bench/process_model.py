"""How well a process model finds the first wrong line of chained sums that a policy writes.

    marlhf sweep evidence/prm
    python bench/process_model.py runs/evidence/prm-sweep

Judges lines for held-out prompts: solutions with slips as in the data for SFT, and responses that
the SFT model samples at temperature 1. Keeps the shares in `measured/found.json` of the folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch.nn.utils.rnn import pad_sequence

from marlhf.data import DataConfig, load_data
from marlhf.data.encode import decode, encode_prompts, encode_response
from marlhf.models.load import end_tokens, load_policy, load_scalar, load_tokenizer
from marlhf.reward.process import ProcessModel, cut_steps
from marlhf.reward.sums import each_line
from marlhf.rollout import Sampling
from marlhf.rollout.native import NativeEngine
from marlhf.train.prm import judge

MEASURES = ("loss", "accuracy", "balanced_accuracy", "first_error", "error_free")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--models", nargs="+", default=["prm"], help="stages of process models")
    parser.add_argument("--responses", type=int, default=1024, help="in turn to all prompts")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = str(args.sweep / "sft" / "model")
    tokenizer, policy = load_tokenizer(folder), load_policy(folder)
    eos = cast(int, tokenizer.eos_token_id)
    rows = load_data(DataConfig(source="sums", parts={}, eval_size=256), needs=["chosen"]).eval
    prompts = [str(row.prompt) for row in rows]
    written = [encode_response(tokenizer, p, str(r.chosen), eos) for p, r in zip(prompts, rows)]
    asked = [prompts[i % len(prompts)] for i in range(args.responses)]
    engine = NativeEngine(policy, end_tokens(policy, tokenizer), tokenizer.pad_token_id)
    seeds = [args.seed * args.responses + i for i in range(args.responses)]
    ids = encode_prompts(tokenizer, asked)
    sampled = engine.generate(ids, Sampling(max_new_tokens=176), seeds).responses
    found: dict[str, dict[str, float]] = {}
    for stage in args.models:
        path = str(args.sweep / stage / "model")
        model = ProcessModel(load_scalar(path), tokenizer, tokenizer, separator="\n")
        found[f"{stage}, slips"] = judged(model, prompts, written)
        found[f"{stage}, sampled"] = judged(model, asked, sampled)
    print(json.dumps(found, indent=1))
    file = args.sweep / "measured" / "found.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1), encoding="utf-8")


def judged(
    model: ProcessModel, prompts: Sequence[str], responses: Sequence[Sequence[int]]
) -> dict[str, float]:
    """The shares that `marlhf prm` logs, and of how many responses."""
    texts = [decode(model.tokenizer, response) for response in responses]
    lines = ["\n".join(cut_steps(text, "\n")) for text in texts]
    labels = [torch.tensor(each) for each in each_line(prompts=prompts, completions=lines)]
    padded = pad_sequence(labels, batch_first=True, padding_value=-1.0)
    logits = model.step_logits(
        encode_prompts(model.tokenizer, prompts), responses, model.ends(responses)
    )
    errors = sum(bool((each < 0.5).any()) for each in labels)
    shares = dict(zip(MEASURES, judge(logits, padded), strict=True))
    return {"responses": len(texts), "with an error": errors, **shares}


if __name__ == "__main__":
    main()
