import json
from pathlib import Path

import pytest

from marlhf.core import Constituents
from marlhf.models.tiny import tiny_tokenizer
from marlhf.rollout import Sampling
from marlhf.spans.apply import open_parsing
from marlhf.spans.phrases import ParserError
from marlhf.train import ppo, rloo
from marlhf.train.rloo_config import RLOOConfig
from small_runs import TOY, assert_close, read_lines

RULE = Constituents(max_length=8)


def test_ppo_learns_along_constituents(ppo_config):
    config = ppo_config(segmenter=RULE, sampling=Sampling(max_new_tokens=24))
    ppo.train(config)
    lines = read_lines(config.output_dir)
    train = [line for line in lines if line["kind"] == "train"]
    assert len(train) == 3
    assert all(1 < line["rl/macro_length"] < 8 for line in train)
    samples = (Path(config.output_dir) / "samples.jsonl").read_text().splitlines()
    for sample in map(json.loads, samples):
        assert sample["starts"][0]
        assert len(sample["starts"]) == sample["length"]


def test_rloo_learns_along_constituents(parents, tmp_path):
    config = RLOOConfig(
        model=str(parents / "sft" / "model"),
        reward_model=str(parents / "reward" / "model"),
        output_dir=str(tmp_path / "rloo"),
        data=TOY,
        batch_size=4,
        num_samples=2,
        num_steps=2,
        eval_every=0,
        save_every=0,
        segmenter=RULE,
        sampling=Sampling(max_new_tokens=24),
    )
    rloo.train(config)
    train = [line for line in read_lines(config.output_dir) if line["kind"] == "train"]
    assert all(1 < line["rl/macro_length"] < 8 for line in train)


def test_workers_and_this_process_train_alike(ppo_config, monkeypatch):
    def run(name: str, small: int) -> list[dict]:
        monkeypatch.setattr("marlhf.spans.workers.SMALL", small)
        config = ppo_config(name, segmenter=RULE, num_steps=2)
        ppo.train(config)
        return read_lines(config.output_dir)

    assert_close(run("here", 10**9), run("there", 0), 0.0)


def test_a_parser_that_is_not_there_stops_a_run_before_it_begins(ppo_config):
    with pytest.raises(ParserError, match="There is no parser 'klingon'"):
        ppo.train(ppo_config(segmenter=Constituents(parser="klingon")))


def test_most_rules_need_no_parser():
    assert open_parsing(lambda responses: responses.mask, tiny_tokenizer()) is None
