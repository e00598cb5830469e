"""Best of 8: the SFT model asked eight times, the reward model's favourite judged by the other."""

from __future__ import annotations

from pathlib import Path

import torch

from evidence.judges import load_judge
from evidence.settings import Settings
from marlhf.data import Row, encode_response, fit_prompts
from marlhf.evaluate.best_of_n import best_of_n
from marlhf.evaluate.eval_plan import EvaluationOptions
from marlhf.rollout.repetition import repetition
from marlhf.runs.jsonl import write_jsonl

NS = (1, 2, 4, 8)


@torch.no_grad()
def best_of_eight(settings: Settings, folder: Path, seed: int) -> None:
    """Grid in the SFT run's folder, as `marlhf best-of-n` leaves it; the best ones in `folder`."""
    question = EvaluationOptions(
        prompts=settings.test_prompts,
        temperature=1.0,
        max_new_tokens=settings.response_tokens,
        seed=seed,
        rewards=(settings.model_of("tldr/reward"),),
        source="tldr",
        path=str(settings.data("tldr", "test")),
        device=settings.device,
    )
    grid = best_of_n(settings.folder("tldr/sft"), question, NS, notice=print)
    [lines] = grid.lines.values()
    model = load_judge(settings, "gold")
    tokenizer = model.tokenizer
    rows = [Row(line["prompt"]) for line in lines]
    fitted, _ = fit_prompts(rows, tokenizer, settings.prompt_tokens, "truncate")
    responses: list[list[int]] = []
    for line in lines:
        best, eos = line["best"], tokenizer.eos_token_id
        ids = encode_response(tokenizer, line["prompt"], best["response"], eos)
        responses.append(ids if best["ended"] else ids[:-1])
    scores = model([each.prompt_ids for each in fitted], responses).tolist()
    found = [
        {
            "setting": "best of 8",
            "key": line["key"],
            "prompt": line["prompt"],
            "response": line["best"]["response"],
            "scores": {"reward": line["best"]["score"], "gold": score},
            "kl": None,
            "length": line["lengths"][line["best"]["number"]],
            "repetition": repetition(ids),
            "ended": line["best"]["ended"],
        }
        for line, score, ids in zip(lines, scores, responses)
    ]
    write_jsonl(folder / "evaluation" / "best.jsonl", found)
