"""RewardBench: its format, its sections and weights, and the same scores as one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from marlhf.cli import app
from marlhf.data.encode import encode_prompt, encode_response
from marlhf.evaluate.benchmarks import (
    SECTIONS,
    RewardBenchError,
    describe,
    rewardbench,
    section_scores,
)
from marlhf.models.load import load_scalar, load_tokenizer

ROWS = [
    {"prompt": "Tell me a tale.", "chosen": "The fox smiled.", "rejected": "The fox cried."},
    {"prompt": "Tell me a tale.", "chosen": "No.", "rejected": "They danced home together."},
    {"prompt": "Write.", "chosen": "A short story.", "rejected": "A story of a bear and an owl."},
]
SUBSETS = ("alpacaeval-easy", "mt-bench-med", "donotanswer")


def write(file: Path, rows: list[dict]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def bench(tmp_path) -> str:
    rows = [{**r, "subset": s, "id": i} for i, (r, s) in enumerate(zip(ROWS, SUBSETS))]
    return write(tmp_path / "bench.jsonl", rows)


def score(folder: str, prompt: str, response: str) -> float:
    """A response alone, by transformers' own module."""
    tokenizer, model = load_tokenizer(folder), load_scalar(folder).eval()
    chat = [{"role": "user", "content": prompt}]
    turn = [{"role": "assistant", "content": response}]
    ids = encode_prompt(tokenizer, chat)
    ids = ids + encode_response(tokenizer, chat, turn, tokenizer.eos_token_id)
    with torch.no_grad():
        return float(model.score(model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]))


def test_each_subset_counts_as_its_section_weighs_it(parents, bench):
    folder = str(parents / "reward" / "model")
    result = rewardbench(str(parents / "reward"), bench)
    right = [
        float(score(folder, r["prompt"], r["chosen"]) > score(folder, r["prompt"], r["rejected"]))
        for r in ROWS
    ]
    assert [x["accuracy"] for x in result["subsets"].values()] == right
    chat = (100 * right[0] + 40 * right[1]) / 140
    assert result["sections"] == {"Chat": pytest.approx(chat), "Safety": right[2]}
    assert result["overall"] == pytest.approx((chat + right[2]) / 2)
    assert result["pairs"]["accuracy"] == pytest.approx(sum(right) / 3)
    assert "= overall" in describe(result)


def test_sections_weigh_as_in_reward_bench():
    totals = {section: sum(weights.values()) for section, weights in SECTIONS.items()}
    assert totals == {"Chat": 358, "Chat Hard": 456, "Safety": 740, "Reasoning": 1968}
    code = dict.fromkeys([name for name in SECTIONS["Reasoning"] if name != "math-prm"], 0.0)
    assert section_scores({"math-prm": 1.0, **code}) == {"Reasoning": 0.5}


def test_rewardbench_2_wants_the_best_of_four(parents, tmp_path):
    """One prompt with three rejected responses; ties are left out."""
    texts = ["The fox smiled.", "The fox cried.", "No.", "They danced home together."]
    folder = str(parents / "reward" / "model")
    ranked = sorted(texts, key=lambda text: score(folder, "Tell me a tale.", text))
    rows = [
        {"prompt": "Tell me a tale.", "chosen": [c], "rejected": [t for t in texts if t != c]}
        for c in (ranked[-1], ranked[-2])
    ]
    rows = [{**row, "subset": name} for row, name in zip(rows, ("Math", "Focus"))]
    file = write(tmp_path / "two.jsonl", [*rows, {**rows[0], "subset": "Ties"}])
    result = rewardbench(folder, file)
    assert result["sections"] == {"Math": 1.0, "Focus": 0.0}
    assert (result["rows"], result["ties_left_out"], result["overall"]) == (2, 1, 0.5)


def test_the_command_prints_a_table_or_json(parents, bench):
    words = ["evaluate", str(parents / "reward"), "--rewardbench", bench]
    table = CliRunner().invoke(app, words)
    assert table.exit_code == 0, table.output
    assert "alpacaeval-easy" in table.output
    result = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert result["rows"] == 3


def test_bad_input_is_a_sentence(parents, bench, tmp_path):
    with pytest.raises(RewardBenchError, match="without a scalar head"):
        rewardbench(str(parents / "sft"), bench)
    with pytest.raises(RewardBenchError, match="no rows"):
        rewardbench(str(parents / "reward"), write(tmp_path / "ties.jsonl", [{"subset": "Ties"}]))
    with pytest.raises(RewardBenchError, match=r"jsonl:1 is no row of RewardBench"):
        rewardbench(str(parents / "reward"), write(tmp_path / "odd.jsonl", ROWS[:1]))
    several = {**ROWS[0], "chosen": ["a", "b"], "subset": "Math"}
    with pytest.raises(RewardBenchError, match="2 chosen and 1 rejected"):
        rewardbench(str(parents / "reward"), write(tmp_path / "several.jsonl", [several]))
