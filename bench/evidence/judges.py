"""The reward models: what was tried, and how often they are right on test pairs."""

from __future__ import annotations

import json
from typing import Any

from evidence.data import read_pairs
from evidence.methods import RESPONSES, REWARDS
from evidence.settings import Settings
from marlhf.data import encode_response, fit_prompts
from marlhf.models.base import pick_device
from marlhf.models.load import load_scalar, load_tokenizer
from marlhf.reward import RewardModel
from marlhf.runs.read import read_run

FILE = "accuracy.json"


def accuracies(settings: Settings) -> dict[str, float]:
    """Accuracy on held-out pairs of the reward model and of what it is compared with."""
    folders = {name: settings.folder(f"tldr/{name}") for name in REWARDS}
    return {
        name: read_run(folder).final("eval/accuracy")
        for name, folder in folders.items()
        if (folder / "run.json").is_file()
    }


def load_judge(settings: Settings, name: str) -> RewardModel:
    path = settings.model_of(f"tldr/{name}")
    tokenizer = load_tokenizer(path)
    model = load_scalar(path).to(pick_device(settings.device)).eval()
    return RewardModel(model, tokenizer, tokenizer)


def judge_test_pairs(settings: Settings) -> None:
    """Test pairs chose nothing, so this is what the accuracy of both reward models is."""
    rows = read_pairs(settings, "tldr", "test")
    found: dict[str, Any] = {"pairs": len(rows)}
    for name in ("reward", "gold"):
        judge = load_judge(settings, name)
        tokenizer, end = judge.tokenizer, judge.tokenizer.eos_token_id
        fitted, _ = fit_prompts(rows, tokenizer, settings.reward_prompt_tokens, "truncate")
        prompts = [each.prompt_ids for each in fitted]
        pairs = [
            [
                encode_response(tokenizer, row.prompt, text or "", end)[: RESPONSES["tldr"]]
                for text in (row.chosen, row.rejected)
            ]
            for row in rows
        ]
        chosen, rejected = (judge(prompts, side) for side in zip(*pairs))
        right = (chosen > rejected).double() + (chosen == rejected).double() / 2
        found[name] = float(right.mean())
    folder = settings.folder("tldr/judged")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def read_accuracy(settings: Settings) -> dict[str, Any]:
    file = settings.folder("tldr/judged") / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
