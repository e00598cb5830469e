"""More updates of the critic per step, on recent batches as well."""

import json
from pathlib import Path

import pytest
import torch

from marlhf.core import RandomNGram
from marlhf.errors import SettingError
from marlhf.runtime.checkpoint import decode, encode
from marlhf.runtime.stage import Stopped
from marlhf.train import critic_training, ppo
from marlhf.train.critic_samples import ValueTargets
from marlhf.train.critic_training import CriticTraining
from small_runs import everything, read_lines, stop_after, weights


def critic(config) -> bytes:
    return (Path(config.output_dir) / "critic" / "model.safetensors").read_bytes()


def test_without_it_a_run_is_what_it_was(ppo_config, monkeypatch):
    """To the bit: the run as it is against one that never heard of it."""
    plain = ppo_config("plain", save_every=0)
    ppo.train(plain)
    never = ppo_config("never", save_every=0, critic_replay=0, critic_updates=1)
    with monkeypatch.context() as patched:
        patched.setattr(CriticTraining, "replay", None)
        patched.setattr(critic_training, "pretrain_critic", lambda *_: None)
        ppo.train(never)
    assert everything(plain.output_dir) == everything(never.output_dir)
    assert weights(plain.output_dir) == weights(never.output_dir)
    assert critic(plain) == critic(never)


def test_it_learns_from_the_present_batch_and_the_ones_before(ppo_config, monkeypatch):
    """Which rows each further update sees, and that the policy's own numbers stay as they are."""
    plain = ppo_config("plain", save_every=0, num_steps=4, lam=1.0)
    ppo.train(plain)
    pools = []
    real = critic_training.regress

    def spy(pool: ValueTargets, rows, *rest):
        pools.append((len(pool), len(set(rows)), max(rows)))
        return real(pool, rows, *rest)

    monkeypatch.setattr(critic_training, "regress", spy)
    replayed = ppo_config("replayed", save_every=0, num_steps=4, lam=1.0, critic_replay=2)
    ppo.train(replayed)
    assert [size for size, _, _ in pools] == [8, 8, 16, 16, 24, 24, 24, 24]
    assert all(rows == 8 for _, rows, _ in pools)
    assert max(last for _, _, last in pools) > 16
    first = [read_lines(c.output_dir)[1] for c in (plain, replayed)]
    assert first[0]["rl/policy_loss"] == first[1]["rl/policy_loss"]
    assert first[1]["rl/replay_loss"] > 0
    assert critic(plain) != critic(replayed)


@pytest.mark.parametrize(
    ("change", "updates"),
    [
        ({"critic_updates": 3}, [2, 2]),
        ({"critic_updates": 2, "num_ppo_epochs": 2, "num_mini_batches": 2}, [4, 4]),
        ({"critic_replay": 3, "critic_updates": 2}, [1, 1]),
    ],
    ids=str,
)
def test_updates_of_the_critic_per_update_of_the_policy(ppo_config, monkeypatch, change, updates):
    made = []
    monkeypatch.setattr(critic_training, "regress", lambda *args: made.append(args[1]) or 0.0)
    ppo.train(ppo_config(save_every=0, num_steps=2, **change))
    assert len(made) == sum(updates)
    assert {len(rows) for rows in made} == {8 // change.get("num_mini_batches", 1)}


def test_a_stopped_run_resumes_identically(ppo_config, monkeypatch):
    options = {"critic_replay": 2, "segmenter": RandomNGram(lengths=(1, 2, 3)), "num_steps": 5}
    whole, parts = ppo_config("whole", **options), ppo_config("parts", **options)
    ppo.train(whole)
    with monkeypatch.context() as patched:
        stop_after(3, patched, ppo)
        with pytest.raises(Stopped):
            ppo.train(parts)
    newest = max((Path(parts.output_dir) / "checkpoints").iterdir())
    state = json.loads((newest / "state.json").read_text())
    assert len(state["critic_replay"]) == 2  # never more, however long the run
    ppo.train(parts)
    assert everything(whole.output_dir) == everything(parts.output_dir)
    assert weights(whole.output_dir) == weights(parts.output_dir)
    assert critic(whole) == critic(parts)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_tensors_survive_json_bit_by_bit(dtype):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).mul(10).to(dtype)
    again = decode(json.loads(json.dumps(encode(x.T))))
    assert again.dtype == dtype
    assert torch.equal(again, x.T)


def test_batches_that_nothing_learns_from_are_refused(ppo_config):
    with pytest.raises(SettingError, match="critic_replay: 3 keeps batches that critic_updates: 1"):
        ppo_config(critic_replay=3, critic_updates=1)
