"""The numbers of the real data, where it is on this machine."""

import pytest

from marlhf.data import DataConfig, load_data
from marlhf.reward.gsm8k import right_answer

PAIR = {"prompt", "chosen", "rejected"}


def load(path, **options):
    return load_data(DataConfig(path=str(path), parts={}, eval_size=0, **options), needs=PAIR)


@pytest.mark.parametrize(
    ("file", "rows", "posts"),
    [("pairs_a.jsonl", 5840, 3498), ("openai_comparisons_batch18.json", 674, None)],
)
def test_tldr(shared_data, file, rows, posts):
    loaded = load(shared_data / "tldr" / file)
    assert len(loaded.train) == rows
    assert posts is None or len({row.prompt for row in loaded.train}) == posts
    for row in loaded.train:
        assert row.prompt.startswith("POST")
        assert row.prompt.endswith("\nTL;DR:")
        assert row.chosen.startswith(" ")
        assert not row.chosen.startswith("  ")


def test_hh(shared_data):
    loaded = load(shared_data / "hh")
    assert loaded.counts.read == 7701
    assert loaded.counts.dropped.total() == 44  # 32 equal, 9 empty, 3 that part early
    assert loaded.counts.noted.total() == 13
    for row in loaded.train:
        assert row.prompt.startswith("Human:")
        assert row.prompt.endswith("\n\nAssistant:")
        assert "\n\nHuman:" not in row.chosen + row.rejected


def test_webgpt(shared_data):
    loaded = load(shared_data / "webgpt" / "comparisons.json")
    assert len(loaded.train) == 656
    assert loaded.counts.dropped.total() == 245
    assert all(row.columns["chosen_score"] > row.columns["rejected_score"] for row in loaded.train)


def test_gsm8k_solutions_are_right(shared_data):
    path = str(shared_data / "gsm8k" / "test.jsonl")
    rows = load_data(DataConfig(path=path, parts={}, eval_size=0), needs=("prompt", "chosen")).train
    assert len(rows) == 1319
    answers = [row.columns["answer"] for row in rows]
    assert right_answer([row.chosen for row in rows], answers) == [1.0] * 1319
    assert sum(right_answer([f"#### {i}" for i in range(1319)], answers)) < 20
