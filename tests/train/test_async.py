"""`async_steps: 1`: responses of the weights one step ago, weighed, and the same after a kill."""

import copy
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from marlhf.core import NGram
from marlhf.models.forward import Sequences, token_stats
from marlhf.rollout import Sampling
from marlhf.rollout.sampler_process import SamplerError
from marlhf.runs.layout import RunError
from marlhf.runtime.distributed import World
from marlhf.runtime.loop import Loop
from marlhf.runtime.stage import GivenObjects
from marlhf.train import ppo, rl_models, rloo
from marlhf.train.experience import Experience
from marlhf.train.rloo_config import GRPOConfig
from marlhf.train.sampling import RolloutPrefetcher
from small_runs import TOY, assert_close, everything, read_lines, wait_for_step, weights

pytestmark = [pytest.mark.xdist_group("forked"), pytest.mark.usefixtures("forked_samplers")]


def train_lines(config) -> list[dict]:
    return [line for line in read_lines(config.output_dir) if line["kind"] == "train"]


@pytest.fixture
def grpo_config(parents, tmp_path):
    def make(name: str = "grpo", **changes) -> GRPOConfig:
        settings = {
            "model": str(parents / "sft" / "model"),
            "reward_model": str(parents / "reward" / "model"),
            "output_dir": str(tmp_path / name),
            "data": TOY,
            "batch_size": 4,
            "num_samples": 2,
            "num_steps": 3,
            "learning_rate": 1e-3,
            "schedule": "constant",
            "warmup_steps": 0,
            "eval_prompts": 2,
            "save_every": 1,
            "async_steps": 1,
            "segmenter": NGram(4),
            "sampling": Sampling(max_new_tokens=12),
        }
        return GRPOConfig(**{**settings, **changes})

    return make


@pytest.mark.parametrize("module", [ppo, rloo], ids=["ppo", "grpo"])
def test_samples_are_of_the_weights_one_step_ago(ppo_config, grpo_config, module, monkeypatch):
    policies, seen = [], []
    real = module.update

    def update(experience, credit, learner, *args):
        policies.append(copy.deepcopy(learner.models.policy).requires_grad_(False))
        seen.append(experience)
        return real(experience, credit, learner, *args)

    monkeypatch.setattr(module, "update", update)
    make, changes = (ppo_config, {"num_mini_batches": 2}) if module is ppo else (grpo_config, {})
    config = make(async_steps=1, num_steps=3, eval_prompts=2, importance_cap=1.01, **changes)
    module.train(config)
    assert len(seen) == 3

    def logprobs(step, age):
        return token_stats(policies[step - age], seen[step].sequences).logprobs

    for step in range(3):
        age = min(step, 1)
        torch.testing.assert_close(seen[step].logprobs, logprobs(step, age), atol=1e-5, rtol=0)
        torch.testing.assert_close(seen[step].old_logprobs, logprobs(step, 0), atol=1e-5, rtol=0)
        if age:
            assert (seen[step].logprobs - seen[step].old_logprobs).abs().max() > 1e-2
    lines = train_lines(config)
    assert [line["async/age"] for line in lines] == [0, 1, 1]
    assert lines[0]["async/kl"] < 1e-6 < lines[1]["async/kl"]
    assert lines[0]["async/weight_max"] == pytest.approx(1, abs=1e-4)
    assert lines[0]["async/truncated"] == 0 < lines[1]["async/truncated"] < 1
    assert lines[1]["async/weight_mean"] < 1.01 < lines[1]["async/weight_max"]


def test_the_kl_penalty_is_of_the_policy_that_learns():
    sequences, zeros = Sequences.from_lists([[5]], [[7, 8]], pad_id=0), torch.zeros(1)
    sampled, learning, reference = (torch.full((1, 2), x) for x in (-3.0, -2.0, -1.0))
    config = ppo.PPOConfig(model="tiny", output_dir="x", async_steps=1)
    made = Experience(sequences, zeros, zeros, zeros == 0, sampled, reference, learning, stale=True)

    def rewards(experience):
        models = SimpleNamespace(vocabulary=None)
        shaped = ppo.shape_and_segment(experience, models, config, 0.1, torch.Generator())
        return shaped[0].tolist()

    assert rewards(made) == [[pytest.approx(0.1)] * 2]
    fresh = replace(made, stale=False)  # continuations, which the policy itself samples
    assert rewards(fresh) == [[pytest.approx(0.2)] * 2]


def test_while_the_policy_stands_still_it_is_training_without_async(ppo_config):
    """The critic alone learns, so older weights are the same ones, and weights are 1."""
    frozen = {"critic_warmup_steps": 3, "num_ppo_epochs": 2}  # old log-probs are there in both
    plain, ahead = ppo_config("plain", **frozen), ppo_config("ahead", async_steps=1, **frozen)
    ppo.train(plain)
    ppo.train(ahead)
    lines = train_lines(ahead)
    for line in lines:
        assert line["async/weight_mean"] == pytest.approx(1, abs=1e-5)
        assert line["async/weight_max"] == pytest.approx(1, abs=1e-4)
        assert line["async/truncated"] == 0
        assert line["async/kl"] < 1e-6
    known = [{k: v for k, v in line.items() if not k.startswith("async/")} for line in lines]
    assert_close(known, train_lines(plain), 1e-4)


def test_a_killed_run_resumes_identically(ppo_config, start, capfd):
    """kill -9 of trainer, and so of its sampler; then the same numbers, bit by bit."""
    unbroken, broken = (
        ppo_config(name, async_steps=1, num_steps=10, save_every=2)  # time to be killed in
        for name in ("unbroken", "broken")
    )
    ppo.train(unbroken)
    process = start(broken)
    wait_for_step(broken.output_dir, 3, process)
    process.kill()
    process.communicate()
    capfd.readouterr()
    ppo.train(broken)
    assert "resuming from step" in capfd.readouterr().err
    assert everything(unbroken.output_dir) == everything(broken.output_dir)
    assert weights(unbroken.output_dir) == weights(broken.output_dir)


def test_a_dead_sampler_is_a_sentence_and_the_run_resumes(grpo_config, monkeypatch):
    unbroken, broken = grpo_config("unbroken"), grpo_config("broken")
    rloo.train(unbroken)
    real = RolloutPrefetcher.take

    def take(self, step):
        if step == 3:
            os.kill(self.engine.process.pid, signal.SIGKILL)
            time.sleep(0.1)
            self.in_flight = replace(self.in_flight, wait=self.engine._receive)
        return real(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(RolloutPrefetcher, "take", take)
        with pytest.raises(SamplerError, match="The process that samples ahead was killed"):
            rloo.train(broken)
    rloo.train(broken)
    assert everything(unbroken.output_dir) == everything(broken.output_dir)
    assert weights(unbroken.output_dir) == weights(broken.output_dir)


def count_e(completions, **_):
    return [text.count("e") / max(len(text), 1) for text in completions]


def test_it_learns_from_stale_samples(tmp_path):
    config = rloo.RLOOConfig(
        model="tiny",
        output_dir=str(tmp_path),
        data=TOY,
        batch_size=8,
        num_samples=4,
        num_steps=13,
        learning_rate=5e-3,
        schedule="constant",
        warmup_steps=0,
        kl_coef=0.0,
        ratio="token",
        async_steps=1,
        eval_prompts=24,
        eval_every=0,
        save_every=0,
        sampling=Sampling(max_new_tokens=16),
    )
    rloo.train(config, GivenObjects(reward_funcs=[count_e]))
    before, after = (x["eval/score"] for x in read_lines(tmp_path) if x["kind"] == "eval")
    assert after > 2 * before


@pytest.mark.parametrize(
    ("config", "changes", "sentence"),
    [
        (ppo.PPOConfig, {"values": "monte_carlo"}, "samples again after each rollout"),
        (ppo.PPOConfig, {"credit": "auto"}, "measures responses of the policy itself"),
        (ppo.PPOConfig, {"engine": "vllm"}, "Set vllm_url to a vLLM server"),
        (
            ppo.PPOConfig,
            {
                "engine": "vllm",
                "vllm_url": "http://127.0.0.1:8000",
                "sampling": Sampling(top_k=50),
            },
            "not of the whole distribution",
        ),
        (rloo.RLOOConfig, {"tree": (2,)}, "Leave out async_steps, or tree"),
        (ppo.PPOConfig, {"async_steps": 2}, "async_steps must be at least 0 and at most 1"),
        (ppo.PPOConfig, {"importance_cap": 0.5}, "importance_cap must be at least 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(config, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        config(**{"model": "tiny", "output_dir": "x", "async_steps": 1, **changes})


@pytest.mark.distributed
def test_two_processes_go_on_with_what_one_has_sampled_ahead(ppo_config, start, monkeypatch):
    """Step 3's responses are in the checkpoint; step 4's are sampled by two, in equal shares."""
    settings = {"async_steps": 1, "num_steps": 4, "keep_checkpoints": 4, "device": "cpu"}
    alone, two = ppo_config("alone", **settings), ppo_config("two", **settings)
    ppo.train(alone)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ppo.train(two)
    for step in (3, 4):
        shutil.rmtree(Path(two.output_dir) / "checkpoints" / f"step-00000{step}")
    process = start(two, ranks=True)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    assert "resuming from step 2" in errors
    assert_close(read_lines(two.output_dir), read_lines(alone.output_dir), 1e-4)


def test_a_policy_in_shards_needs_a_server_to_sample_ahead(small, tmp_path):
    world = World(torch.device("cpu"), rank=0, size=2)
    config = ppo.PPOConfig(model="tiny", output_dir=str(tmp_path), async_steps=1, parallel="fsdp")
    with pytest.raises(RunError, match="Set engine: vllm and vllm_url"):
        rl_models._load_engine(config, small("llama"), [2], 0, world)
