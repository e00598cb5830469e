"""What a run takes of a GPU: counted by hand, and beside what was measured."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from marlhf.cli.memory import explain_memory, planned_stages
from marlhf.config.stage import LoRA
from marlhf.data import DataConfig
from marlhf.errors import SettingError
from marlhf.models.adapters import FrozenBaseModel
from marlhf.models.load import load_policy
from marlhf.models.tiny import tiny_config
from marlhf.rollout import Sampling
from marlhf.runtime import memory_plan
from marlhf.runtime.memory_plan import (
    CONTEXT,
    GIB,
    USABLE,
    Size,
    checkpoints_activations,
    plan_run,
    remedies,
    size_named,
)
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.supervised_config import SFTConfig

H200 = 139.8 * GIB
SHARED = LoRA(shared_base=True)


def ppo(model, rows, prompt, new, **changes):
    return PPOConfig(
        model=model,
        reward_model=model,
        output_dir="unused",
        batch_size=rows,
        sampling=Sampling(max_new_tokens=new),
        data=DataConfig(source="toy", max_prompt_tokens=prompt),
        **changes,
    )


def test_weights_are_those_of_the_model():
    size, model = Size.of(tiny_config()), load_policy("tiny")
    assert size.total == sum(p.numel() for p in model.parameters())
    assert size.embeddings == size.head == model.lm_head.weight.numel()
    assert size.tied
    assert size.fast
    adapted = FrozenBaseModel(model).language_model(LoRA(r=4))
    assert 4 * size.per_rank == sum(p.numel() for p in adapted.parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", 1.544),
        ("Qwen/Qwen3-8B", 8.19),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03),
        ("meta-llama/Llama-3.2-1B", 1.236),
        ("google/gemma-7b", 8.54),
    ],
)
def test_well_known_models_need_no_network(name, billions):
    assert size_named(name).total == pytest.approx(billions * 1e9, rel=0.003)


def test_what_stays_by_hand():
    """SFT: weights, gradients, and the optimizer's bytes per weight."""
    weights = Size.of(tiny_config()).total
    common = {"model": "tiny", "output_dir": "unused"}
    for settings, kept in (
        ({}, 4 + 8),
        ({"optimizer": "adamw_8bit"}, 4 + 2.04),
        ({"optimizer": "adamw_8bit", "trained_weights": "bfloat16"}, 2 + 2.04),
        ({"optimizer": "adafactor"}, 4 + 0.01),
    ):
        plan = plan_run(SFTConfig(**common, **settings), H200)
        assert sum(plan.kept.values()) == pytest.approx(kept * weights)


@pytest.mark.parametrize(
    ("config", "gib"),
    [
        (ppo("smollm2-135m", 256, 256, 64, token_budget=40960), 22.2),
        (ppo("qwen2.5-0.5b", 128, 256, 256, token_budget=16384), 31.3),
        (ppo("qwen2-1.5b", 64, 256, 256, token_budget=8192), 71.2),
        (ppo("gemma-2b", 64, 256, 128, token_budget=4096), 102.5),
        (ppo("llama-7b", 64, 256, 128, token_budget=4096, lora=SHARED), 33.2),
    ],
    ids=lambda x: getattr(x, "model", ""),
)
def test_the_peak_is_what_an_h200_measured(config, gib):
    """docs/performance.md; before the critic moved first, when its gradients were there as well."""
    critics = 0 if config.lora else 4 * size_named(config.model).scalar
    predicted = plan_run(config, H200).peak + critics
    assert predicted / GIB == pytest.approx(gib, rel=0.15)


def test_passes_shrink_to_what_fits_down_to_one_row():
    config, small = ppo("qwen2.5-0.5b", 64, 256, 256), 24 * GIB
    assert plan_run(config, H200).tokens == 16384
    tokens = plan_run(config, small).tokens
    assert 512 <= tokens < 16384
    assert plan_run(config, small).peak + CONTEXT <= USABLE * small
    assert plan_run(config, 8 * GIB).tokens == 512  # one row, and still too much
    fixed = ppo("qwen2.5-0.5b", 64, 256, 256, token_budget=16384)
    assert plan_run(fixed, small).tokens == 16384


def test_a_conversation_is_as_long_as_all_its_turns():
    config = ppo("qwen2.5-0.5b", 64, 256, 256, environment="python", episode_tokens=1536)
    plan, twice = (plan_run(c, H200) for c in (config, replace(config, episode_tokens=3072)))
    assert (plan.length, twice.length) == (1536, 3072)
    assert twice.passes["sampling"] > 1.5 * plan.passes["sampling"]


@pytest.mark.parametrize("gpu", [16, 24, 48])
def test_each_remedy_is_a_plan_and_the_last_fits(gpu):
    config = ppo("qwen2-1.5b", 64, 256, 256)
    found = list(remedies(config, gpu * GIB))
    assert not plan_run(config, gpu * GIB).fits(gpu * GIB)
    assert [plan.fits(gpu * GIB) for _, plan in found] == [False] * (len(found) - 1) + [True]
    peaks = [plan.peak for plan in (plan_run(config, gpu * GIB), *(plan for _, plan in found))]
    assert peaks == sorted(set(peaks), reverse=True)


def test_auto_checkpoints_where_a_run_would_not_fit(monkeypatch):
    cuda, card = torch.device("cuda"), SimpleNamespace(total_memory=24 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    large, small = (ppo(x, 64, 256, 256) for x in ("qwen2-1.5b", "qwen2.5-0.5b"))
    assert checkpoints_activations(large, cuda)
    assert not checkpoints_activations(small, cuda)
    assert not checkpoints_activations(large, torch.device("cpu"))
    assert not checkpoints_activations(ppo("nowhere/none", 1, 1, 1), torch.device("cpu"))


def test_doctor_says_what_would_make_a_model_fit():
    stages = planned_stages(None, ["batch_size=32"], "qwen2-1.5b", "full")
    text = "\n".join(explain_memory(stages, 24))
    assert "ppo: qwen2-1.5b, 1.54B parameters, 32 rows of up to 512 tokens" in text
    assert "does not fit a GPU of 24 GB" in text
    last = text.splitlines()[-1]
    assert "fits: " in last
    assert "optimizer: adamw_8bit" in last


def test_doctor_follows_a_recipe_to_the_models_it_begins_with():
    stages = planned_stages("smollm2/tldr", [], None, "full")
    assert {stage.config.reward_model for stage in stages[2:]} == {
        "HuggingFaceTB/SmolLM2-135M-Instruct"
    }
    text = "\n".join(explain_memory(stages[2:3], None))
    assert "fits" in text


def test_a_model_that_is_not_known_is_a_sentence(monkeypatch):
    def nowhere(name):
        raise SettingError(f"There is no {name}.")

    monkeypatch.setattr(memory_plan, "locate", nowhere)
    with pytest.raises(SettingError, match=r"There is no owner/none\. Names known .*qwen3-4b"):
        size_named("owner/none")
