"""Macro actions in verl's own functions: its estimator registry, policy loss and value loss.

Needs verl, and so runs in the environment of `make test-engines`. No Ray is started.
"""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from marlhf.core import (
    NGram,
    Perplexity,
    Responses,
    Segments,
    Turns,
    macro_gae,
    ppo_policy_loss,
    ppo_value_loss,
    segment,
    whiten,
)
from marlhf.engines.advantages import MacroSettings, TokenText
from marlhf.engines.batch import EngineError

pytestmark = pytest.mark.engines
pytest.importorskip("verl", reason="needs verl: make test-engines")

from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from verl import DataProto
from verl.trainer.ppo import core_algos, ray_trainer
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig

from marlhf.engines import verl as plugin

B, T = 6, 20


@pytest.fixture
def batch():
    """Responses of several lengths; every other one has tool output in the middle."""
    torch.manual_seed(0)
    lengths = torch.tensor([20, 17, 12, 9, 20, 4])
    mask = (torch.arange(T) < lengths[:, None]).long()
    mask[::2, 6:9] = 0
    scores = torch.zeros(B, T)
    scores[torch.arange(B), lengths - 1] = torch.randn(B)
    return {
        "responses": torch.randint(0, 400, (B, T)),
        "response_mask": mask,
        "old_log_probs": -4 * torch.rand(B, T),
        "ref_log_prob": -4 * torch.rand(B, T),
        "token_level_scores": scores * mask,
        "values": torch.randn(B, T) * mask,
    }


def estimate(batch, estimator, settings=None):
    """verl's KL penalty and `compute_advantage`, as its trainers call them."""
    config = OmegaConf.create({"gamma": 0.99, "lam": 0.9, "use_pf_ppo": False})
    data = DataProto.from_single_dict({name: x.clone() for name, x in batch.items()})
    data, _ = ray_trainer.apply_kl_penalty(data, core_algos.FixedKLController(0.05))
    shown = None
    if settings is not None:
        shown = plugin.VerlBatch(settings, TokenText(settings.segmenter, None), data.batch)
    token = plugin._shown.set(shown)
    try:
        return ray_trainer.compute_advantage(
            data, adv_estimator=estimator, gamma=0.99, lam=0.9, config=config
        ).batch
    finally:
        plugin._shown.reset(token)


def test_single_tokens_are_verls_own_gae(batch):
    ours = estimate(batch, "macro_gae", MacroSettings(segmenter=NGram(1)))
    verls = estimate(batch, AdvantageEstimator.GAE)
    on = batch["response_mask"].bool()
    for name in ("advantages", "returns"):
        torch.testing.assert_close(ours[name][on], verls[name][on], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [NGram(5), Perplexity(max_length=8), Turns()])
def test_the_estimator_is_exactly_the_core(batch, rule):
    found = estimate(batch, "macro_gae", MacroSettings(segmenter=rule, sigma="start"))
    on = batch["response_mask"].bool()
    segments = segment(rule, Responses(found["responses"], on, found["ref_log_prob"]))
    advantages, returns = macro_gae(
        found["token_level_rewards"], found["values"], segments, gamma=0.99, lam=0.9, sigma="start"
    )
    assert torch.equal(found["advantages"], whiten(advantages, on))
    assert torch.equal(found["returns"], returns)


def test_a_trainer_that_shows_nothing_is_named(batch):
    with pytest.raises(EngineError, match="v1 trainers"):
        estimate(batch, "macro_gae")


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_every_v1_trainer_has_macro_actions(mode):
    assert issubclass(get_trainer_cls(mode), plugin.MacroActions)


def test_a_trainer_without_a_critic_is_refused_before_it_starts():
    config = OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "macro_gae"},
            "actor_rollout_ref": {"actor": {}},
            "critic": {"enable": None},
        }
    )
    with pytest.raises(EngineError, match=r"Set critic\.enable=True"):
        get_trainer_cls("sync")(config)


def test_the_calculator_of_the_recipe():
    path = Path(__file__).parents[2] / "recipes/verl/calculator.py"
    calculate = runpy.run_path(str(path))["calculate"]
    assert calculate("12 * (3 + 4) / 7") == "12"
    assert calculate("-2.5 * 2") == "-5"
    for wrong in ("1 / 0", "__import__('os')", "2 **", "9 ** 9 ** 9", "1 + " * 100 + "1"):
        assert calculate(wrong).startswith("error: ")


def nested(rows, lengths):
    return torch.nested.as_nested_tensor(
        [row[:n] for row, n in zip(rows, lengths)], layout=torch.jagged
    )


@pytest.fixture
def update(batch):
    """New log-probs and values after some updates, and macro actions of three tokens."""
    mask = batch["response_mask"].bool()
    segments = segment(NGram(3), Responses(batch["responses"], mask))
    advantages = segments.spread(torch.randn(B, T))
    return {
        "segments": segments,
        "log_prob": batch["old_log_probs"] + 0.3 * torch.randn(B, T),
        "advantages": advantages,
        "values": batch["values"] + 0.4 * torch.randn(B, T),
        "returns": segments.spread(torch.randn(B, T)),
    }


def policy_loss(batch, update, segments, mode, agg="token-mean", weights=None, **clips):
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=agg, **clips
    )
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=int(batch["response_mask"].sum()), global_batch_size=B
    )
    token = plugin._micro_batch.set((segments, int(segments.macro_mask.sum())))
    try:
        loss, _ = core_algos.get_policy_loss_fn(mode)(
            old_log_prob=batch["old_log_probs"],
            log_prob=update["log_prob"],
            advantages=update["advantages"],
            response_mask=batch["response_mask"].bool(),
            loss_agg_mode=agg,
            config=config,
            rollout_is_weights=weights,
        )
    finally:
        plugin._micro_batch.reset(token)
    assert config.global_batch_info["batch_num_tokens"] == batch["response_mask"].sum()
    return loss


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("mode", ["macro_ratio", "macro_mean_ratio"])
def test_a_macro_ratio_of_single_tokens_is_verls_own_loss(batch, update, agg, mode):
    mask = batch["response_mask"].bool()
    single = segment(NGram(1), Responses(batch["responses"], mask))
    clips = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28}
    weights = torch.rand(B, T)
    ours = policy_loss(batch, update, single, mode, agg, weights, **clips)
    verls = policy_loss(batch, update, single, "vanilla", agg, weights, **clips)
    torch.testing.assert_close(ours, verls)


@pytest.mark.parametrize("mode", ["macro_ratio", "macro_mean_ratio"])
def test_a_macro_ratio_is_that_of_the_core(batch, update, mode):
    segments = update["segments"]
    ours = policy_loss(batch, update, segments, mode, clip_ratio=0.2, clip_ratio_c=3.0)
    expected = ppo_policy_loss(
        update["log_prob"],
        batch["old_log_probs"],
        update["advantages"],
        segments.mask,
        dual_clip=3.0,
        ratio=plugin.RATIOS[mode],
        segments=segments,
    )
    torch.testing.assert_close(ours, expected)


def test_clips_of_both_sides_and_weights_count_for_macro_actions(batch, update):
    segments = update["segments"]
    weights = segments.spread(torch.rand(B, T))  # constant within a macro action
    clips = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.4, "clip_ratio_c": 10.0}
    ours = policy_loss(batch, update, segments, "macro_ratio", weights=weights, **clips)
    total, count = 0.0, 0
    for row in range(B):
        for action in range(int(segments.macro_mask[row].sum())):
            on = segments.mask[row] & (segments.ids[row] == action)
            change = (update["log_prob"] - batch["old_log_probs"])[row, on].sum().exp()
            advantage = update["advantages"][row, on][0]
            term = torch.maximum(-advantage * change, -advantage * change.clamp(0.95, 1.4))
            if advantage < 0:
                term = torch.minimum(term, -advantage * 10)
            total, count = total + term * weights[row, on][0], count + 1
    torch.testing.assert_close(ours, total / count)


def value_loss(batch, update, segments, sigma, rows=slice(None), count=None):
    """Our loss on some rows as a worker has them: without padding, prompts of two tokens."""
    lengths = (batch["response_mask"].cumsum(1).argmax(1) + 1)[rows].tolist()
    size = len(lengths)
    whole = [
        torch.cat([torch.zeros(1), v[:n], torch.zeros(1)])
        for v, n in zip(update["values"][rows], lengths)
    ]
    fields = {
        "macro_ids": segments.ids,
        "response_mask": batch["response_mask"],
        "values": batch["values"],
        "returns": update["returns"],
        "responses": batch["responses"],
    }
    data = TensorDict({k: nested(x[rows], lengths) for k, x in fields.items()}, batch_size=size)
    data["prompts"] = torch.nested.as_nested_tensor(
        [torch.zeros(2).long()] * size, layout=torch.jagged
    )
    count = int(segments.macro_mask.sum()) if count is None else count
    plugin.tensordict_utils.assign_non_tensor(
        data, dp_size=1, batch_num_tokens=1, global_batch_size=B, **{plugin.COUNT: count}
    )
    config = FSDPCriticConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, cliprange_value=0.2
    )
    output = {"values": torch.nested.as_nested_tensor(whole, layout=torch.jagged)}
    return plugin.macro_value_loss(config, output, data, sigma=sigma)[0]


@pytest.mark.parametrize("sigma", ["equal", "start"])
def test_the_macro_value_loss_is_that_of_the_core_and_micro_batches_add_up(batch, update, sigma):
    segments = update["segments"]
    expected = ppo_value_loss(
        update["values"],
        batch["values"],
        update["returns"],
        segments.mask,
        clip=0.2,
        level="macro",
        sigma=sigma,
        segments=segments,
    )
    torch.testing.assert_close(value_loss(batch, update, segments, sigma), expected)
    parts = [value_loss(batch, update, segments, sigma, slice(i, i + 2)) for i in (0, 2, 4)]
    torch.testing.assert_close(sum(parts), expected)


def test_macro_actions_are_read_from_a_batch_of_verls(batch, update):
    lengths = (batch["response_mask"].cumsum(1).argmax(1) + 1).tolist()
    fields = {"macro_ids": update["segments"].ids, "response_mask": batch["response_mask"]}
    data = TensorDict({k: nested(x, lengths) for k, x in fields.items()}, batch_size=B)
    found = plugin.read_segments(data)
    assert isinstance(found, Segments)
    assert torch.equal(found.macro_mask.sum(1), update["segments"].macro_mask.sum(1))
    assert torch.equal(found.starts, update["segments"].starts[:, : found.mask.shape[1]])


KEYS = [f"uid_{i}_0" for i in range(B)]


class Batch(list):
    keys, partition_id = KEYS, "train"


class FakeQueue:
    """TransferQueue as verl's trainer calls it, in this process: one batch, by field."""

    def __init__(self, fields):
        self.fields = fields

    def kv_batch_get(self, keys, partition_id, select_fields):
        assert (keys, partition_id) == (KEYS, "train")
        chosen = {name: self.fields[name] for name in select_fields if name in self.fields}
        return TensorDict(chosen, batch_size=B)

    def kv_batch_put(self, keys, partition_id, fields):
        self.fields |= dict(fields.items())
        return Batch(keys)


def test_a_trainer_shows_the_estimator_its_batch_and_the_workers_its_macro_actions(
    batch, monkeypatch
):
    lengths = (batch["response_mask"].cumsum(1).argmax(1) + 1).tolist()
    fields = {name: nested(x, lengths) for name, x in batch.items()}
    fields["rm_scores"] = fields.pop("token_level_scores")
    fields["uid"] = NonTensorStack(*KEYS)
    queue = FakeQueue(fields)
    monkeypatch.setattr(plugin.trainer_base, "tq", queue)
    trainer = object.__new__(get_trainer_cls("sync"))
    algorithm = {"adv_estimator": "macro_gae", "gamma": 0.99, "lam": 0.9, "use_kl_in_reward": False}
    trainer.config = OmegaConf.create(
        {"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 1}}}
    )
    trainer.macro = MacroSettings(segmenter=Perplexity(max_length=8), sigma="start")
    trainer.macro_text = TokenText(trainer.macro.segmenter, None)
    metrics = {}
    trainer._compute_advantage(Batch(KEYS), metrics)

    on = batch["response_mask"].bool()
    rule = trainer.macro.segmenter
    segments = segment(rule, Responses(batch["responses"], on, batch["ref_log_prob"]))
    expected, returns = macro_gae(
        batch["token_level_scores"], batch["values"], segments, gamma=0.99, lam=0.9, sigma="start"
    )
    stored = TensorDict({k: queue.fields[k] for k in ("advantages", "returns", "macro_ids")}, [B])
    stored = stored.to_padded_tensor()
    torch.testing.assert_close(stored["advantages"], whiten(expected, on))
    torch.testing.assert_close(stored["returns"], returns)
    assert torch.equal(stored["macro_ids"][on], segments.ids[on])
    assert metrics["macro/actions"] == segments.macro_mask.sum()


def test_the_rows_of_a_session_are_one_episode_whose_score_counts_once(batch, monkeypatch):
    """verl's agent loops may return several outputs, each with the score of the last."""
    keys = ["a_0_0", "a_0_1", "a_1_0", "b_0_0", "b_1_0", "b_1_1"]
    mask = torch.ones(B, T)
    scores = torch.zeros(B, T)
    scores[:, -1] = torch.tensor([3.0, 3.0, 1.0, 0.0, 2.0, 2.0])
    bonus = ["[0.0]", [1.0], np.array([2.0]), [3.0], [4.0], "[5.0]"]
    extra = [{"reward_extra_info": {"bonus": of_row}} for of_row in bonus]
    tensors = {"responses": batch["responses"], "response_mask": mask.long(), "rm_scores": scores}
    fields = {name: nested(x, [T] * B) for name, x in tensors.items()}
    fields |= {"uid": NonTensorStack(*"aaabbb"), "extra_fields": NonTensorStack(*extra)}
    fields["prompts"] = nested(batch["responses"], [3] * B)

    class Session(list):
        pass

    def get(keys, partition_id, select_fields):
        chosen = {name: fields[name] for name in select_fields if name in fields}
        return TensorDict(chosen, batch_size=B)

    def put(keys, partition_id, fields):
        stored.update(fields.items())
        return Session(keys)

    queue, stored, rows = SimpleNamespace(kv_batch_get=get, kv_batch_put=put), {}, Session(keys)
    rows.keys, rows.partition_id = keys, "train"
    monkeypatch.setattr(plugin.trainer_base, "tq", queue)
    trainer = object.__new__(get_trainer_cls("sync"))
    algorithm = {"adv_estimator": "macro_rloo", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False}
    config = {"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}}
    trainer.config = OmegaConf.create(config)
    trainer.macro = MacroSettings(segmenter=Turns(), turn_rewards="bonus")
    trainer.macro_text = TokenText(trainer.macro.segmenter, None)
    trainer._compute_advantage(rows, {})
    # Returns of the episodes of a: 0 + 1 + 3 and 2 + 1; of b: 3 + 0 and 4 + 5 + 2.
    expected = [4 - 3, 4 - 3, 3 - 4, 3 - 11, 11 - 3, 7 - 3]
    assert torch.stack(list(stored["advantages"].unbind()))[:, 0].tolist() == expected
    trainer.macro = MacroSettings(segmenter=Turns(), turn_rewards="bonuss")
    with pytest.raises(EngineError, match=r"no field bonuss.*there is: bonus, extra_fields"):
        trainer._compute_advantage(rows, {})


def test_workers_count_the_macro_actions_of_a_mini_batch(batch, update, tmp_path, monkeypatch):
    monkeypatch.setattr(plugin.engine_workers, "get_device_name", lambda: "cpu")
    lengths = (batch["response_mask"].cumsum(1).argmax(1) + 1).tolist()
    fields = {"macro_ids": update["segments"].ids, "response_mask": batch["response_mask"]}
    data = TensorDict({k: nested(x, lengths) for k, x in fields.items()}, batch_size=B)
    counted = plugin._counted(lambda worker, data: data[plugin.COUNT])
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        engine = SimpleNamespace(get_data_parallel_group=lambda: None)
        count = counted(SimpleNamespace(engine=engine), data)
    finally:
        torch.distributed.destroy_process_group()
    assert count == update["segments"].macro_mask.sum()
