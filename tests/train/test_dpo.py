"""DPO: the published formula, the cached reference, and a loop that adds up and resumes."""

import json
import math
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax, logsigmoid

from marlhf.data import Row
from marlhf.models.base import ModelError
from marlhf.models.load import load_policy, load_tokenizer
from marlhf.models.tiny import tiny_tokenizer
from marlhf.runs.layout import RunError
from marlhf.runs.write import RunFolder
from marlhf.runtime.distributed import World
from marlhf.runtime.stage import Example, GivenObjects, Stopped, load_examples
from marlhf.train import dpo
from marlhf.train.supervised import Passes
from small_runs import TOY, assert_close, read_lines

HERE = World(torch.device("cpu"))


@pytest.fixture
def dpo_config(parents, tmp_path):
    """A DPO run of a few seconds; keywords change it."""

    def make(name: str = "dpo", **changes) -> dpo.DPOConfig:
        settings = {
            "model": str(parents / "sft" / "model"),
            "output_dir": str(tmp_path / name),
            "data": replace(TOY, eval_size=6),
            "batch_size": 4,
            "num_steps": 3,
            "learning_rate": 1e-3,
            "eval_every": 2,
            "save_every": 1,
        }
        return dpo.DPOConfig(**{**settings, **changes})

    return make


def some_pairs(config, count: int) -> list[Example]:
    needs = ("prompt", "chosen", "rejected")
    return load_examples(config.data, "reward", load_tokenizer("tiny"), needs=needs)[0][:count]


def test_the_loss_by_hand():
    """Two pairs: margins of 3 - 1 = 2 and -1 - 1 = -2 nats over the reference, beta 0.5."""
    logprobs = torch.tensor([[-2.0, -6.0], [-7.0, -4.0]])  # chosen, rejected
    ref = torch.tensor([[-5.0, -5.0], [-8.0, -5.0]])
    good, bad = math.log(1 + math.exp(-1.0)), math.log(1 + math.exp(1.0))
    found = dpo.preference_loss(logprobs, ref, 2, beta=0.5, label_smoothing=0.0)
    torch.testing.assert_close(found, torch.tensor((good + bad) / 2))
    expected = (0.9 * good + 0.1 * bad + 0.9 * bad + 0.1 * good) / 2
    doubtful = dpo.preference_loss(logprobs, ref, 2, beta=0.5, label_smoothing=0.1)
    torch.testing.assert_close(doubtful, torch.tensor(expected))


@pytest.mark.parametrize("budget", [100000, 300])
def test_loss_and_gradients_are_those_of_the_equation(dpo_config, budget):
    """Row by row through the models' own logits, without padding: equation 7 of the DPO paper."""
    config = dpo_config(token_budget=budget, beta=0.3)
    model, other = load_policy("tiny", seed=1), load_policy("tiny", seed=2)
    rows, pad = some_pairs(config, 5), load_tokenizer("tiny").pad_token_id
    ref = dpo.all_logprobs(Passes(other, pad, budget, "auto", HERE), rows)

    def logprob(of, e: Example, response: list[int]) -> torch.Tensor:
        ids = torch.tensor([e.prompt + response])
        each = log_softmax(of(input_ids=ids).logits[0, :-1], dim=1)
        return each[len(e.prompt) - 1 :, :].gather(1, ids[0, len(e.prompt) :, None]).sum()

    losses = []
    for e in rows:
        chosen = logprob(model, e, e.chosen) - logprob(other, e, e.chosen).detach()
        rejected = logprob(model, e, e.rejected) - logprob(other, e, e.rejected).detach()
        losses.append(-logsigmoid(0.3 * (chosen - rejected)))
    wanted = torch.stack(losses).mean()
    wanted.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss_of = partial(dpo.preference_loss, beta=0.3, label_smoothing=0.0)
    mine, _ = dpo.backward(Passes(model, pad, budget, "auto", HERE), rows, ref, loss_of)
    torch.testing.assert_close(mine, wanted.detach(), rtol=1e-4, atol=1e-5)
    for p, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-5)


def test_it_starts_where_the_reference_is(dpo_config):
    config = dpo_config()
    dpo.train(config)
    start, first, *_ = read_lines(config.output_dir)
    assert start["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert start["eval/margin"] == 0
    assert start["eval/accuracy"] == 0.5
    assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["dpo/grad_norm"] > 0


def test_metrics_say_one_thing(dpo_config):
    config = dpo_config()
    dpo.train(config)
    lines = [x for x in read_lines(config.output_dir) if x["kind"] == "train"]
    for x in lines:
        assert x["dpo/margin"] == pytest.approx(
            x["dpo/chosen_reward"] - x["dpo/rejected_reward"], abs=1e-5
        )
        assert 0 <= x["dpo/accuracy"] <= 1
    page = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text()
    assert [k for k in lines[0] if k.startswith("dpo/") and f"`{k}`" not in page] == []


def test_accumulation_is_a_large_batch(dpo_config):
    lines = []
    for budget in (100000, 300):
        config = dpo_config(f"b{budget}", token_budget=budget)
        dpo.train(config)
        lines.append(read_lines(config.output_dir))
    assert_close(*lines, 1e-3)


def stop_after(step: int, monkeypatch) -> None:
    """Ask for an end after so many steps, as Ctrl-C would."""
    real = RunFolder.log

    def log(self, kind, at, metrics):
        real(self, kind, at, metrics)
        if kind == "train" and at == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunFolder, "log", log)


def stopped(config, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        with pytest.raises(Stopped):
            dpo.train(config)


def test_it_resumes_identically_and_never_asks_the_reference_again(dpo_config, monkeypatch):
    whole, interrupted = dpo_config("whole"), dpo_config("parts", save_every=0)
    dpo.train(whole)
    stopped(interrupted, monkeypatch)
    kept = load_file(Path(interrupted.output_dir) / "reference.safetensors")
    assert kept["train"].shape == (2, 12)  # three batches of four, not all rows
    assert kept["held_out"].shape == (2, 6)

    asked = []
    real = dpo.all_logprobs
    monkeypatch.setattr(dpo, "all_logprobs", lambda *a: asked.append(len(a[1])) or real(*a))
    dpo.train(interrupted)
    assert asked == [6]  # the held-out rows at the end
    assert read_lines(whole.output_dir) == read_lines(interrupted.output_dir)
    files = [Path(c.output_dir) / "model" / "model.safetensors" for c in (whole, interrupted)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_reference_that_changed_under_way_is_noticed(dpo_config, parents, tmp_path, monkeypatch):
    model = load_policy(str(parents / "sft" / "model"))
    model.save_pretrained(tmp_path / "ref")
    tiny_tokenizer().save_pretrained(tmp_path / "ref")
    config = dpo_config(ref_model=str(tmp_path / "ref"))
    stopped(config, monkeypatch)
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] += 1
    model.save_pretrained(tmp_path / "ref")
    with pytest.raises(RunError, match=r"other inputs(.|\n)*ref_model: .*ref has changed"):
        dpo.train(config)
    file = Path(config.output_dir) / "run.json"
    state = json.loads(file.read_text())
    state.pop("inputs")  # as in a folder of version 0.1
    file.write_text(json.dumps(state))
    with pytest.raises(RunError, match="log-probs of another reference"):
        dpo.train(config)


def test_a_damaged_cache_is_computed_again(dpo_config, monkeypatch):
    whole, config = dpo_config("whole"), dpo_config("broken", save_every=0)
    dpo.train(whole)
    stopped(config, monkeypatch)
    path = Path(config.output_dir) / "reference.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    dpo.train(config)
    assert read_lines(whole.output_dir) == read_lines(config.output_dir)


def test_another_reference_is_another_run(dpo_config, parents, tmp_path):
    plain, far = dpo_config("plain"), dpo_config("far", ref_model="tiny")
    same = dpo_config("same", ref_model=str(parents / "sft" / "model"))
    for config in (plain, far, same):
        dpo.train(config)
    assert read_lines(plain.output_dir) == read_lines(same.output_dir)
    assert read_lines(far.output_dir)[0]["eval/margin"] != 0


def test_python_objects_in_place_of_paths(tmp_path):
    rows = [Row(f"Tell me of fox {i}.", " It smiled.", " It cried.") for i in range(12)]
    model = load_policy("tiny")
    before = [p.detach().clone() for p in model.parameters()]
    objects = GivenObjects(model=model, tokenizer=tiny_tokenizer(), train_rows=rows)
    config = dpo.DPOConfig(
        output_dir=str(tmp_path / "run"), batch_size=4, num_steps=2, learning_rate=1e-3
    )
    assert dpo.train(config, objects).is_dir()
    assert any((a != b).any() for a, b in zip(before, model.parameters()))
    lines = read_lines(config.output_dir)
    assert lines[0]["eval/loss"] is None  # nothing is held out
    assert lines[-2]["dpo/loss"] < lines[1]["dpo/loss"]


def test_pairs_that_are_alike_teach_nothing(tmp_path):
    rows = [Row(f"Tell me of fox {i}.", " It smiled.", " It smiled.") for i in range(4)]
    objects = GivenObjects(model=load_policy("tiny"), tokenizer=tiny_tokenizer(), train_rows=rows)
    config = dpo.DPOConfig(output_dir=str(tmp_path / "run"), batch_size=4, num_steps=1)
    dpo.train(config, objects)
    line = read_lines(config.output_dir)[1]
    assert line["dpo/grad_norm"] < 1e-6
    assert line["dpo/accuracy"] == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.0}, "beta must be positive"),
        ({"beta": math.nan}, "beta must be finite"),
        ({"label_smoothing": 0.5}, "label_smoothing must be at least 0 and below 0.5"),
        ({"max_response_tokens": 0}, "max_response_tokens must be positive"),
    ],
)
def test_settings_that_make_no_sense(dpo_config, change, message):
    with pytest.raises(ValueError, match=message):
        dpo_config(**change)


def test_a_reference_with_another_tokenizer_is_refused(dpo_config, parents, tmp_path):
    load_policy(str(parents / "sft" / "model")).save_pretrained(tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|user|>"
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(RunError, match=r"The reference .* does not have the tokenizer"):
        dpo.train(dpo_config(ref_model=str(tmp_path / "other")))


def test_a_reference_without_numbers_is_refused(tmp_path):
    rows = [Row(f"Tell me of fox {i}.", " It smiled.", " It cried.") for i in range(4)]
    broken = load_policy("tiny")
    objects = GivenObjects(load_policy("tiny"), tiny_tokenizer(), ref_model=broken, train_rows=rows)
    config = dpo.DPOConfig(output_dir=str(tmp_path / "run"), batch_size=4, num_steps=1)
    with torch.no_grad():
        broken.model.norm.weight.fill_(1e38)  # finite, but no logit is
    with pytest.raises(RunError, match="log-probs are not all finite"):
        dpo.train(config, objects)
    with torch.no_grad():
        broken.get_input_embeddings().weight.fill_(math.nan)
    with pytest.raises(ModelError, match="infinite or not a number"):
        dpo.train(config, objects)


def test_no_rows_of_the_paper_are_shared_with_ppo_unless_asked(dpo_config):
    def prompts(part: str) -> set[str]:
        tokenizer = load_tokenizer("tiny")
        needs = ("prompt", "chosen", "rejected")
        rows, _ = load_examples(dpo_config().data, part, tokenizer, needs=needs)
        return {str(e.row.prompt) for e in rows}

    assert not prompts("reward") & prompts("ppo")
    config = dpo_config(part="ppo")
    dpo.train(config)
    assert len(read_lines(config.output_dir)) > 3


def test_the_loss_is_trls():
    """The same tensors through TRL's own loss, its trainer reduced to what the loss reads."""
    pytest.importorskip("trl")
    from types import SimpleNamespace
    from unittest.mock import MagicMock

    from trl import DPOTrainer

    model, other = load_policy("tiny", seed=1), load_policy("tiny", seed=2)
    config = dpo.DPOConfig(model="tiny", output_dir="x", data=TOY, beta=0.3)
    rows, pad = some_pairs(config, 4), tiny_tokenizer().pad_token_id
    both = [e.prompt + e.chosen for e in rows] + [e.prompt + e.rejected for e in rows]
    width = max(map(len, both))
    ids = torch.tensor([r + [pad] * (width - len(r)) for r in both])
    attention = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in both])
    completion = attention.clone()
    for i, e in enumerate(rows + rows):
        completion[i, : len(e.prompt)] = 0
    ref = dpo.all_logprobs(Passes(other, pad, 16384, "auto", HERE), rows)
    trainer = MagicMock(
        model=model,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=0.3,
        aux_loss_enabled=False,
        use_weighting=False,
        accelerator=SimpleNamespace(
            device=torch.device("cpu"),
            gather_for_metrics=lambda x: x,
            gather=lambda x: x,
            reduce=lambda x, **_: x,
        ),
    )
    inputs = {
        "input_ids": ids,
        "attention_mask": attention,
        "completion_mask": completion,
        "ref_chosen_logps": ref[0],
        "ref_rejected_logps": ref[1],
    }
    theirs = DPOTrainer._compute_loss(trainer, model, inputs, False)
    loss_of = partial(dpo.preference_loss, beta=0.3, label_smoothing=0.0)
    mine, _ = dpo.backward(Passes(model, pad, 16384, "auto", HERE), rows, ref, loss_of)
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-5)
