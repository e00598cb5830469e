"""Adapters in every stage: what trains, what is saved, what shares a base, what is refused."""

import builtins
import json
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from marlhf.config.settings import to_raw
from marlhf.config.stage import LoRA
from marlhf.core import NGram
from marlhf.credit.state import open_state
from marlhf.data import DataConfig, Row
from marlhf.models.adapters import AdaptedLanguageModel, AdaptedScalarModel
from marlhf.models.base import ModelError
from marlhf.models.forward import (
    Sequences,
    final_scores,
    pass_choice,
    token_stats,
    token_values,
)
from marlhf.models.load import load_policy, load_scalar
from marlhf.models.tiny import tiny_tokenizer
from marlhf.rollout import Sampling
from marlhf.runs.layout import RunError
from marlhf.runs.write import RunFolder
from marlhf.runtime.checkpoint import list_checkpoints
from marlhf.runtime.distributed import World
from marlhf.runtime.loop import Loop
from marlhf.runtime.model_loader import load_trained_policy
from marlhf.runtime.stage import NO_OBJECTS, GivenObjects
from marlhf.train import dpo, ppo, reward, rl_run, rloo, sft
from marlhf.train.experience import RolloutScorer
from small_runs import assert_close, read_lines

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.xdist_group("forked")  # one process, so that shared runs are trained once
TOY = DataConfig(source="toy", limit=120, eval_size=8)
STAGES = {
    "sft": (sft, sft.SFTConfig),
    "reward": (reward, reward.RewardConfig),
    "dpo": (dpo, dpo.DPOConfig),
    "rloo": (rloo, rloo.RLOOConfig),
    "ppo": (ppo, ppo.PPOConfig),
}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHARED = LoRA(r=2, alpha=8, shared_base=True)
TEXT = Sequences.from_lists([[65, 66, 67], [70]], [[71, 72, 73, 1], [80, 81]], 0)


def settings(stage: str, folder: Path, **changes):
    """A run of seconds."""
    common = {
        "output_dir": str(folder),
        "data": TOY,
        "batch_size": 4,
        "num_steps": 3,
        "learning_rate": 1e-2,
        "schedule": "constant",
        "warmup_ratio": 0.0,
        "eval_every": 0,
        "save_every": 2,
        "device": "cpu",
    }
    if stage in ("ppo", "rloo"):
        common |= {"eval_prompts": 4, "log_samples": 2, "sampling": Sampling(max_new_tokens=10)}
    if stage == "ppo":
        common |= {"critic_learning_rate": 1e-2}
    return STAGES[stage][1](**{**common, **changes})


def train(stage: str, config, objects: GivenObjects = NO_OBJECTS) -> SimpleNamespace:
    """Train a stage, and keep hold of what was inside."""
    seen = SimpleNamespace(config=config, path=Path(config.output_dir), experiences=[], plans=[])
    close, load = Loop.close, rl_run.load_models
    score, assign_credit = RolloutScorer.__call__, ppo.assign_credit

    def watched_close(loop, *args):
        seen.models = dict(loop.models)
        return close(loop, *args)

    def watched_load(*args, **options):
        seen.all = load(*args, **options)
        return seen.all

    def watched_score(*args):
        seen.experiences.append(score(*args))
        return seen.experiences[-1]

    def watched_credit(*args):
        seen.plans.append(assign_credit(*args))
        return seen.plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "close", watched_close)
        patch.setattr(ppo, "assign_credit", watched_credit)
        patch.setattr(rl_run, "load_models", watched_load)
        patch.setattr(RolloutScorer, "__call__", watched_score)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen.model = STAGES[stage][0].train(config, objects)
    seen.warnings = [str(warning.message) for warning in caught]
    return seen


@pytest.fixture(scope="module")
def made(parents, tmp_path_factory):
    """`made("ppo", "lora")`: a run that trained adapters, by a recipe's `lora` or a LoraConfig."""
    done: dict[tuple[str, str], SimpleNamespace] = {}
    start = str(parents / "sft" / "model")

    def make(stage: str, by: str) -> SimpleNamespace:
        if (stage, by) not in done:
            folder = tmp_path_factory.mktemp("lora") / stage
            more = (
                {"reward_model": str(make("reward", by).model)} if stage in ("ppo", "rloo") else {}
            )
            theirs = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"])
            objects = GivenObjects(peft_config=theirs if by == "peft" else None)
            lora = LoRA(r=2, alpha=8) if by == "lora" else None
            done[stage, by] = train(
                stage, settings(stage, folder, model=start, lora=lora, **more), objects
            )
        return done[stage, by]

    return make


@pytest.fixture(scope="module")
def shared(made, tmp_path_factory):
    """PPO on one base, with the adapter that lies beside a merged reward model."""
    source, folder = made("reward", "lora"), tmp_path_factory.mktemp("shared") / "ppo"
    models = {"model": source.config.model, "reward_model": str(source.model)}
    return train("ppo", settings("ppo", folder, lora=SHARED, eval_every=2, **models))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """SFT and a reward model on it that are adapters and nothing else, both on `tiny`."""
    root, lora = tmp_path_factory.mktemp("alone"), LoRA(r=3, alpha=12, merge=False)
    start = train("sft", settings("sft", root / "sft", model="tiny", lora=lora))
    config = settings("reward", root / "reward", model=str(start.model), lora=lora)
    return SimpleNamespace(sft=start, reward=train("reward", config))


def bits(module) -> dict[str, torch.Tensor]:
    """Weights under the names that they have without adapters."""
    found = module.state_dict()
    return {n.replace(".base_layer", ""): x for n, x in found.items() if ".lora_" not in n}


def logprobs(model) -> torch.Tensor:
    with torch.no_grad():
        return token_stats(model, TEXT).logprobs


def scores(model) -> torch.Tensor:
    with torch.no_grad():
        return final_scores(model, TEXT)


@pytest.mark.parametrize("by", ["lora", "peft"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_its_adapters_and_nothing_else(made, stage, by):
    run = made(stage, by)
    start = load_policy(run.config.model)
    for name, view in run.models.items():
        assert isinstance(
            view,
            AdaptedScalarModel if name == "critic" or stage == "reward" else AdaptedLanguageModel,
        )
        layers = {n.split(".")[-3] for n, _ in view.named_parameters() if "lora_B" in n}
        assert (layers == {"q_proj", "down_proj"}) == (by == "peft")
        for key, x in view.adapter_tensors().items():
            assert x.abs().max() > 0, f"{key} has not moved"  # lora_B starts at zero
        if name != "critic":
            before, after = bits(start.base_model), bits(view.module.base_model)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)
    lines = [line for line in read_lines(run.path) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize("stage", ["reward", "ppo"])
def test_a_checkpoint_holds_only_what_trains(made, stage):
    run = made(stage, "lora")
    (folder,) = list_checkpoints(RunFolder(run.path, stage, run.config).checkpoints)
    for name, view in run.models.items():
        saved = load_file(folder / f"{name}.safetensors")
        assert {k: x.shape for k, x in saved.items()} == {
            k: p.shape for k, p in view.named_parameters()
        }
        assert all(".lora_" in key or key == "score.weight" for key in saved)
    plain = (run.model / "model.safetensors").stat().st_size
    assert sum(f.stat().st_size for f in folder.glob("*.safetensors")) < plain


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "rloo", "ppo"])
def test_the_result_loads_in_transformers_and_its_adapter_in_peft(made, stage, monkeypatch):
    run, scalar = made(stage, "lora"), stage == "reward"
    view = next(iter(run.models.values()))
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    measure, options = (scores, {"num_labels": 1}) if scalar else (logprobs, {})
    assert not (run.model / "adapter_config.json").exists()
    plain = auto.from_pretrained(run.model)
    torch.testing.assert_close(measure(plain), measure(view), rtol=1e-4, atol=1e-4)
    base = auto.from_pretrained(run.config.model, **options)
    untrained = measure(base)
    wrapped = peft.PeftModel.from_pretrained(base, run.model / "adapter")
    monkeypatch.setattr(pass_choice(view), "by_llama", False)  # whose sums have another order
    assert torch.equal(measure(wrapped.base_model.model), measure(view))
    if not scalar:
        assert (measure(view) - untrained).abs().max() > 1e-3


def test_the_reference_is_the_base_with_the_adapter_off(made, monkeypatch):
    run = made("ppo", "lora")
    lines = read_lines(run.path)
    assert abs(next(x for x in lines if x.get("step") == 0)["eval/kl"]) < 1e-4
    first, _, third = [x for x in lines if x["kind"] == "train"]
    assert abs(first["rl/kl"]) < 1e-4
    assert abs(third["rl/kl"]) > 1e-3
    assert run.all.reference.base is run.all.policy.base
    monkeypatch.setattr(pass_choice(run.all.reference), "by_llama", False)
    assert torch.equal(logprobs(run.all.reference), logprobs(load_policy(run.config.model)))


@pytest.mark.parametrize("stage", ["ppo", "rloo"])
def test_the_engine_samples_from_the_adapted_policy(made, stage):
    run = made(stage, "lora")
    assert not [line for line in run.warnings if "plain loop" in line]  # it copes with adapters
    lines = [x for x in read_lines(run.path) if x["kind"] == "train"]
    gaps = [x["rl/logprob_gap"] for x in lines]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4


def test_a_shared_base_equals_separate_models_step_for_step(shared, tmp_path):
    """From the same adapters and heads, all that differs is how often the base is in memory."""
    adapter = f"{shared.config.reward_model}/adapter"  # alone, so that the critic goes on with it
    changes = {"lora": LoRA(r=2, alpha=8), "reward_model": adapter}
    many = train("ppo", replace(shared.config, output_dir=str(tmp_path / "many"), **changes))
    (scorer,) = (s for _, s, _ in shared.all.reward.parts)
    views = (shared.all.policy, shared.all.reference, shared.all.critic, scorer.model)
    assert len({id(view.base) for view in views}) == 1
    assert many.all.critic.base is not many.all.policy.base
    assert len(shared.experiences) == len(many.experiences) > 3
    for mine, theirs in zip(shared.experiences, many.experiences):
        assert mine.sequences.responses.equal(theirs.sequences.responses)
        for name in ("logprobs", "ref_logprobs", "scores"):
            a, b = getattr(mine, name), getattr(theirs, name)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(shared.plans) == len(many.plans) >= 3
    for mine, theirs in zip(shared.plans, many.plans):
        for name in ("values", "rewards", "advantages"):
            a, b = getattr(mine, name), getattr(theirs, name)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert_close(read_lines(shared.path), read_lines(many.path), 1e-4)
    for name, view in shared.models.items():
        other = many.models[name].adapter_tensors()
        torch.testing.assert_close(view.adapter_tensors(), other, rtol=1e-3, atol=1e-4)


def test_gradient_checkpointing_changes_no_number(shared, tmp_path):
    changes = {"output_dir": str(tmp_path / "run"), "gradient_checkpointing": True}
    run = train("ppo", replace(shared.config, **changes))
    assert run.all.policy.module.is_gradient_checkpointing
    assert_close(read_lines(shared.path), read_lines(run.path), 1e-4)


class Killed(Exception):
    pass


def killed(stage: str, config, monkeypatch) -> None:
    """End a run while its third step is written down, after the second was saved."""
    real = RunFolder.log

    def log(self, kind, step, metrics):
        if kind == "train" and step == 3:
            raise Killed
        real(self, kind, step, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", log)
        with pytest.raises(Killed):
            STAGES[stage][0].train(config)


@pytest.mark.parametrize("stage", ["ppo", "dpo"])
def test_a_stopped_run_resumes_identically(made, shared, tmp_path, monkeypatch, stage):
    whole = shared if stage == "ppo" else made("dpo", "lora")
    interrupted = replace(whole.config, output_dir=str(tmp_path / "parts"))
    killed(stage, interrupted, monkeypatch)
    folder = STAGES[stage][0].train(interrupted)
    assert read_lines(whole.path) == read_lines(interrupted.output_dir)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (whole.model / name).read_bytes() == (folder / name).read_bytes()


def test_a_base_that_changed_under_way_is_noticed(tmp_path, monkeypatch):
    model = load_policy("tiny")
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    lora = LoRA(r=2, merge=False)
    config = settings("sft", tmp_path / "run", model=str(tmp_path / "base"), lora=lora)
    killed("sft", config, monkeypatch)
    load_policy("tiny", seed=1).save_pretrained(tmp_path / "base")
    with pytest.raises(RunError, match=r"other inputs(.|\n)*base has changed"):
        sft.train(config)
    state = json.loads((tmp_path / "run" / "run.json").read_text())
    state.pop("inputs")  # as in a folder of version 0.1
    (tmp_path / "run" / "run.json").write_text(json.dumps(state))
    with pytest.raises(RunError, match=r"has changed since step 2.*Put that model back"):
        sft.train(config)
    model.save_pretrained(tmp_path / "base")
    folder = sft.train(config)
    load_policy("tiny", seed=1).save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match=r"does not fit its base .*weights are not those"):
        load_policy(str(folder))


def test_an_adapter_alone_loads_back_here_and_in_peft(alone, monkeypatch):
    for run, scalar in ((alone.sft, False), (alone.reward, True)):
        files = {p.name for p in run.model.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
        assert not files & {"config.json", "model.safetensors"}
        (view,) = run.models.values()
        measure = scores if scalar else logprobs
        load = load_scalar if scalar else load_policy
        mine = load(str(run.model))
        torch.testing.assert_close(measure(mine), measure(view), rtol=1e-4, atol=1e-4)
        wrapped = peft.PeftModel.from_pretrained(load("tiny"), run.model)
        monkeypatch.setattr(pass_choice(view), "by_llama", False)  # whose sums have another order
        assert torch.equal(measure(wrapped.base_model.model), measure(view))


def test_adapters_all_the_way_stand_on_one_base(alone, tmp_path):
    """SFT, reward model and PPO as adapters on `tiny`: the reference is that with SFT's."""
    lora = replace(SHARED, merge=False)
    models = {"model": str(alone.sft.model), "reward_model": str(alone.reward.model)}
    run = train("ppo", settings("ppo", tmp_path / "ppo", lora=lora, **models))
    everything = run.all
    (scorer,) = (s for _, s, _ in everything.reward.parts)
    views = (everything.policy, everything.reference, everything.critic, scorer.model)
    assert len({id(view.base) for view in views}) == 1
    assert all(
        torch.equal(bits(run.models["policy"].module)[k], x)
        for k, x in bits(load_policy("tiny")).items()
    )
    started = load_policy(str(alone.sft.model))
    torch.testing.assert_close(logprobs(everything.reference), logprobs(started))
    assert (logprobs(everything.reference) - logprobs(load_policy("tiny"))).abs().max() > 1e-3
    assert (logprobs(everything.policy) - logprobs(everything.reference)).abs().max() > 1e-3
    torch.testing.assert_close(scores(scorer.model), scores(load_scalar(str(alone.reward.model))))
    assert abs(next(x for x in read_lines(run.path) if x["kind"] == "train")["rl/kl"]) < 1e-4
    described = json.loads((run.model / "adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["r"]) == (
        "tiny",
        3,
    )  # goes on with SFT's
    torch.testing.assert_close(logprobs(load_policy(str(run.model))), logprobs(everything.policy))


def test_adapters_alone_also_serve_whole_models_and_rewards(alone, tmp_path):
    """An adapter's folder is a model like any other to a run that trains all weights."""
    models = {"model": str(alone.sft.model), "reward_model": str(alone.reward.model)}
    run = train("rloo", settings("rloo", tmp_path / "rloo", num_steps=1, **models))
    assert type(run.all.policy).__name__ == "LlamaForCausalLM"
    assert (run.model / "model.safetensors").is_file()


def test_python_objects_take_adapters(tmp_path):
    rows = [Row(f"Tell me of fox {i}.") for i in range(16)]

    def brevity(completions, **_):
        return [-float(len(text)) for text in completions]

    model = load_policy("tiny")
    before = {name: x.clone() for name, x in bits(model).items()}
    objects = GivenObjects(
        model=model,
        tokenizer=tiny_tokenizer(),
        reward_funcs=[brevity],
        train_rows=rows,
        eval_rows=rows[:4],
        peft_config=peft.LoraConfig(r=2, lora_dropout=0.1),
    )
    run = train("ppo", settings("ppo", tmp_path / "run", model="(given)"), objects)
    assert any("lora_dropout 0.1 is taken as 0" in line for line in run.warnings)
    assert run.all.critic.base is run.all.policy.base  # both start from the model given
    assert all(torch.equal(before[name], x) for name, x in bits(model).items())
    torch.testing.assert_close(
        logprobs(load_policy(str(run.model))), logprobs(run.all.policy), rtol=1e-4, atol=1e-4
    )
    reward_model = load_scalar("tiny", seed=5)
    objects = replace(objects, model=load_policy("tiny"), reward_funcs=[reward_model])
    run = train("ppo", settings("ppo", tmp_path / "object", model="(given)", num_steps=1), objects)
    assert not hasattr(reward_model, "peft_config")  # the critic starts from a copy of it
    started = bits(run.all.critic.base.module)
    assert all(torch.equal(x, started[name]) for name, x in bits(reward_model).items())


def test_a_base_that_does_not_fit_is_refused_with_a_remedy(made, alone, tmp_path):
    start = made("reward", "lora").config.model
    wrong = settings(
        "ppo", tmp_path / "a", model=start, reward_model=str(alone.reward.model), lora=SHARED
    )
    with pytest.raises(ModelError, match=r"trained on tiny, not on .*shared_base: false"):
        ppo.train(wrong)
    with pytest.raises(RunError, match=r"is a whole model.*leave it out, or set lora.shared_base"):
        ppo.train(
            replace(wrong, reward_model=str(made("reward", "lora").model), critic_model="tiny")
        )
    run = train("ppo", replace(wrong, num_steps=1, lora=LoRA(r=2)))  # the remedy
    assert run.all.critic.base.source == "tiny"


def test_a_whole_reward_model_beside_a_shared_base_is_told(parents, tmp_path, capsys):
    models = {
        name: str(parents / kind / "model")
        for name, kind in (("model", "sft"), ("reward_model", "reward"))
    }
    config = settings("ppo", tmp_path / "run", lora=SHARED, num_steps=1, **models)
    run = train("ppo", config)
    assert "takes memory of its own" in " ".join(capsys.readouterr().err.split())
    assert run.all.critic.base is run.all.policy.base
    given = GivenObjects(critic_model=load_scalar("tiny"))
    with pytest.raises(RunError, match="a critic of its own is given"):
        ppo.train(replace(config, output_dir=str(tmp_path / "other")), given)


def test_what_is_missing_is_told_before_a_model_loads(tmp_path, monkeypatch):
    config = settings("sft", tmp_path / "run", model="nowhere/at-all", lora=LoRA())
    halves = World(torch.device("cpu"), 0, 2, sharded=True)
    packed = replace(config, lora=LoRA(quantize="4bit"))
    with pytest.raises(RunError, match=r"quantize does not work with parallel: fsdp.*parallel: d"):
        load_trained_policy(packed, NO_OBJECTS, halves)
    here = World(torch.device("cpu"))
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(ModelError, match=r"pip install .marlhf\[quant\]"):
            load_trained_policy(packed, NO_OBJECTS, here)
    real = builtins.__import__

    def without(name, *args, **options):
        if name.split(".")[0] == "peft":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "peft")
    with pytest.raises(ModelError, match=r"pip install 'marlhf\[lora\]'"):
        load_trained_policy(config, NO_OBJECTS, here)


def test_bits_are_not_saved_in_silence(monkeypatch, tmp_path):
    """A model that cannot be quantised must not pass for one that is."""
    monkeypatch.setattr("marlhf.runtime.model_loader.quantization", lambda lora: None)
    config = settings("sft", tmp_path / "run", model="tiny", lora=LoRA(quantize="4bit"))
    with pytest.raises(RunError, match=r"tiny does not\. Leave out quantize"):
        load_trained_policy(config, NO_OBJECTS, World(torch.device("cpu")))


def test_the_card_of_an_adapter_names_its_base(made, alone, tmp_path):
    config = settings(
        "sft", tmp_path / "run", model=made("sft", "lora").config.model, lora=LoRA(r=2, merge=False)
    )
    text = (sft.train(replace(config, num_steps=1)) / "README.md").read_text()
    assert "library_name: peft" in text
    assert "It is an adapter over `sft`, a folder where it was trained." in text
    assert str(tmp_path) not in text
    text = (alone.reward.model / "README.md").read_text()
    assert "AutoPeftModelForSequenceClassification" in text
    assert "adapter over `tiny`, which is loaded with it" in text
    merged = (made("ppo", "lora").model / "README.md").read_text()
    assert "library_name: transformers" in merged
    assert re.search(r"lora:\n\s+r: 2", merged)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_the_engine_follows_the_adapter_in_bfloat16(shared, tmp_path, device):
    """Frozen matrices in bfloat16; the adapters in float32 move from step to step."""
    changes = {"output_dir": str(tmp_path / "run"), "device": device, "precision": "bfloat16"}
    # Many CPUs have no instructions for bfloat16.
    changes |= {"eval_every": 0, "eval_prompts": 1, "num_steps": 2, "save_every": 0}
    run = train("ppo", replace(shared.config, **changes))
    kinds = {p.dtype for n, p in run.all.policy.module.named_parameters() if "base_layer" in n}
    assert kinds == {torch.bfloat16}
    assert {p.dtype for view in run.models.values() for p in view.parameters()} == {torch.float32}
    lines = [x for x in read_lines(run.path) if x["kind"] == "train"]
    assert max(x["rl/logprob_gap"] for x in lines) < 0.05
    assert abs(lines[0]["rl/kl"]) < 0.1
    assert not [line for line in run.warnings if "plain loop" in line]


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", ["data", "fsdp"])
def test_two_processes_equal_one(shared, tmp_path, parallel, fork_server):
    two = replace(shared.config, output_dir=str(tmp_path / "two"), parallel=parallel)
    recipe = tmp_path / "two.yaml"
    recipe.write_text(yaml.safe_dump(to_raw(two)))
    process = fork_server.start_ranks("-m", "marlhf", "ppo", str(recipe))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-2000:]
    assert_close(read_lines(shared.path), read_lines(two.output_dir), 1e-3)
    name = "model/adapter/adapter_model.safetensors"
    files = [Path(config.output_dir) / name for config in (shared.config, two)]
    torch.testing.assert_close(*map(load_file, files), rtol=1e-2, atol=1e-3)


def test_a_tree_of_samples_branches_from_the_adapted_policy(alone, tmp_path):
    models = {"model": str(alone.sft.model), "reward_model": str(alone.reward.model)}
    changes = {"lora": LoRA(r=2, alpha=8), "tree": (2, 2), "segmenter": NGram(2), "num_steps": 2}
    run = train("rloo", settings("rloo", tmp_path / "tree", **changes, **models))
    lines = [x for x in read_lines(run.path) if x["kind"] == "train"]
    assert max(x["rl/logprob_gap"] for x in lines) < 1e-4
    assert abs(lines[1]["rl/kl"]) > 1e-3


def test_credit_is_measured_on_the_merged_models_of_a_shared_base(shared):
    state = open_state(shared.path)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(logprobs(state.models.policy), logprobs(shared.all.policy), **close)
    values = [token_values(each, TEXT) for each in (state.models.critic, shared.all.critic)]
    torch.testing.assert_close(*values, **close)
