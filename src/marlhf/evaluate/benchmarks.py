"""Published benchmarks: EleutherAI's lm-eval, and RewardBench.

lm-eval is the real package, run on a model folder. RewardBench tells how often a reward model
prefers the better of two responses, by subject. Its sections, their subsets and the weights of
subsets are those of allenai/reward-bench (rewardbench/constants.py; arXiv 2403.13787): the score
of a section is the mean over its subsets weighted by their size, where math-prm counts as much as
all code together, and the overall score is the mean of the sections. RewardBench 2 (arXiv
2506.01937) has several rejected responses: a prompt is right where the chosen one is ahead of all,
and sections are its subsets. Its ties are left out, since they are scored otherwise.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from marlhf.data import encode_responses
from marlhf.data.encode import encode_prompts
from marlhf.data.files import read_hub, read_records
from marlhf.data.local import as_text
from marlhf.data.rows import Text
from marlhf.errors import MarlhfError
from marlhf.evaluate.eval_plan import EvaluationError
from marlhf.evaluate.results import text_table
from marlhf.intervals import mean
from marlhf.models.base import Tokenizer, pick_device
from marlhf.models.facts import adapter_base, model_facts
from marlhf.models.load import load_scalar, load_tokenizer
from marlhf.reward import RewardModel
from marlhf.reward.model import pair_metrics
from marlhf.runs.layout import EVALUATION, is_run, model_folder


def lm_eval_command(
    run: Path, tasks: str, *, device: str = "auto", seed: int = 0, trust_code: bool = False
) -> list[str]:
    """The command line of lm-eval for a run, a model folder or a name on the hub."""
    model = model_folder(str(run))
    base = adapter_base(model)
    args = f"pretrained={model}" if base is None else f"pretrained={base},peft={model}"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", args]
    command += ["--tasks", tasks, "--seed", str(seed), "--batch_size", "8"]
    command += [] if device == "auto" else ["--device", device]
    command += ["--trust_remote_code"] if trust_code else []
    if is_run(run):
        command += ["--output_path", str(run / EVALUATION / "lm_eval")]
    return command


def run_lm_eval(command: list[str]) -> None:
    """Run lm-eval, which prints its table; an error where it is missing or fails."""
    if importlib.util.find_spec("lm_eval") is None:
        raise EvaluationError(
            "--lm-eval needs lm-eval, which is not installed. Run `pip install 'marlhf[lm-eval]'`."
        )
    status = subprocess.run(command, check=False).returncode
    if status:
        raise EvaluationError(f"lm-eval failed (exit status {status}): see its message above.")


SECTIONS: dict[str, dict[str, int]] = yaml.safe_load(
    Path(__file__).with_name("rewardbench.yaml").read_text(encoding="utf-8")
)
"""RewardBench 1: subsets by section, and what each weighs."""
TIES = "Ties"


class RewardBenchError(MarlhfError, ValueError):
    """Something about the benchmark's file that the user has to put right."""


@dataclass(frozen=True)
class Comparison:
    """A prompt with the response that should win and those that should lose."""

    prompt: Text
    chosen: str
    rejected: tuple[str, ...]
    subset: str


def read_benchmark(path: str) -> tuple[list[Comparison], int]:
    """The rows of a file, a folder or a hub data set, and how many ties were left out."""
    split = "filtered" if path == "allenai/reward-bench" else "test"
    records = read_records(path) if Path(path).exists() else read_hub(path, split)
    rows: list[Comparison] = []
    ties = 0
    for record, position in records:
        if record.get("subset") == TIES:
            ties += 1
        else:
            rows.append(_comparison(record, position))
    if not rows:
        raise RewardBenchError(f"{path} has no rows to compare responses on.")
    return rows, ties


def _comparison(record: Mapping[str, Any], position: str) -> Comparison:
    prompt = as_text(record.get("prompt"))
    sides = [record.get(name) for name in ("chosen", "rejected")]
    chosen, rejected = ([x] if isinstance(x, str) else x for x in sides)
    subset = record.get("subset")
    texts = [*chosen, *rejected] if isinstance(chosen, list) and isinstance(rejected, list) else []
    if not (prompt and subset and len(texts) > 1 and all(isinstance(x, str) for x in texts)):
        raise RewardBenchError(
            f"{position} is no row of RewardBench: it needs `prompt`, `chosen`, `rejected` and "
            f"`subset`, and has {', '.join(f'`{name}`' for name in record)}."
        )
    assert isinstance(chosen, list)
    if len(chosen) != 1 or not rejected:
        raise RewardBenchError(
            f"{position} has {len(chosen)} chosen and {len(rejected or ())} rejected responses. "
            "There must be one chosen response, and one rejected response or more."
        )
    return Comparison(prompt, chosen[0], tuple(rejected), str(subset))


def rewardbench(
    reward: str, path: str, *, combine: str = "mean", device: str = "auto", trust_code: bool = False
) -> dict[str, Any]:
    """Accuracy by subset and section, and overall, with how far scores go by length."""
    rows, ties = read_benchmark(path)
    folder = model_folder(reward)
    if not model_facts(folder, trust_remote_code=trust_code).is_scalar:
        raise RewardBenchError(
            f"{reward} is a language model without a scalar head, so it scores nothing. Give a "
            "reward model; `marlhf reward` trains one."
        )
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_code)
    model = load_scalar(folder, trust_remote_code=trust_code).to(pick_device(device)).eval()
    scorer = RewardModel(model, tokenizer, tokenizer, combine=combine)
    right: dict[str, list[float]] = {}
    pairs: list[tuple[float, float, int, int]] = []  # scores and lengths of chosen and rejected
    prompts, responses = _encode(rows, tokenizer)
    scored = zip(scorer(prompts, responses).tolist(), map(len, responses))
    for row in rows:
        (score, length), *others = [next(scored) for _ in range(1 + len(row.rejected))]
        best = max(other for other, _ in others)
        right.setdefault(row.subset, []).append((score > best) + 0.5 * (score == best))
        pairs += [(score, other, length, longer) for other, longer in others]
    chosen, rejected, *sizes = torch.tensor(pairs).T
    decided = torch.ones_like(chosen, dtype=torch.bool)
    subsets = {name: {"accuracy": mean(x), "rows": len(x)} for name, x in right.items()}
    sections = section_scores({name: mean(x) for name, x in right.items()})
    return {
        "reward": reward,
        "rows": len(rows),
        "ties_left_out": ties,
        "overall": mean(list(sections.values())),
        "sections": sections,
        "subsets": subsets,
        "pairs": pair_metrics(chosen, rejected, torch.stack(sizes), decided),
    }


def section_scores(accuracy: Mapping[str, float]) -> dict[str, float]:
    """The weighted mean of each section that has subsets here; other subsets are sections.

    >>> section_scores({"alpacaeval-easy": 1.0, "mt-bench-med": 0.3, "Factuality": 0.5})
    {'Chat': 0.8, 'Factuality': 0.5}
    """
    scores: dict[str, float] = {}
    for section, weights in SECTIONS.items():
        known = {name: weight for name, weight in weights.items() if name in accuracy}
        if known:
            total = sum(accuracy[name] * weight for name, weight in known.items())
            scores[section] = total / sum(known.values())
    known = {name for weights in SECTIONS.values() for name in weights}
    return scores | {name: x for name, x in accuracy.items() if name not in known}


def _encode(
    rows: Sequence[Comparison], tokenizer: Tokenizer
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses in tokens, the chosen response of each row before the rejected ones.

    Text becomes a chat where the reward model has a chat template, as in RewardBench itself.
    """
    texts: list[tuple[Text, Text]] = []
    for row in rows:
        prompt = row.prompt
        if tokenizer.chat_template and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        elif not tokenizer.chat_template and not isinstance(prompt, str):
            prompt = "\n\n".join(message["content"] for message in prompt) + "\n\n"
        for response in (row.chosen, *row.rejected):
            chat = [{"role": "assistant", "content": response}]
            texts.append((prompt, response if isinstance(prompt, str) else chat))
    eos = cast(int, tokenizer.eos_token_id)
    prompts = encode_prompts(tokenizer, [prompt for prompt, _ in texts])
    return [ids or [eos] for ids in prompts], encode_responses(tokenizer, texts, eos)


def describe(result: Mapping[str, Any]) -> str:
    """The result as a table for the terminal."""
    rows = [[name, str(x["rows"]), f"{x['accuracy']:.1%}"] for name, x in result["subsets"].items()]
    ends = [[f"= {name}", "", f"{score:.1%}"] for name, score in result["sections"].items()]
    table = text_table(
        ["subset", "rows", "right"], [*rows, *ends, ["= overall", "", f"{result['overall']:.1%}"]]
    )
    lines = [table, ", ".join(f"{k.replace('_', ' ')} {x:.3f}" for k, x in result["pairs"].items())]
    if result["ties_left_out"]:
        lines.append(f"{result['ties_left_out']} rows of {TIES} are left out")
    return "\n".join(lines)
