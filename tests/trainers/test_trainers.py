"""The Python API as someone who comes from TRL uses it."""

import dataclasses
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
)

import marlhf
from marlhf import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    LoRA,
    MacroPPOTrainer,
    NGram,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    Sampling,
    SFTConfig,
    SFTTrainer,
)
from marlhf.config.settings import hint_for
from marlhf.data import DataConfig, DataError, toy
from marlhf.fields import read_table
from marlhf.models.load import load_policy, load_scalar
from marlhf.models.tiny import tiny_model, tiny_tokenizer
from marlhf.reward import RewardError
from marlhf.runs.layout import RunError, read_state
from small_runs import assert_close, read_lines

RENAMED = read_table("trl_names")["renamed"]
ROWS = [
    {"prompt": r.prompt, "chosen": r.chosen, "rejected": r.rejected, "wanted": 20}
    for r in toy.rows(num_rows=40)
]
SHORT = {
    "batch_size": 4,
    "num_steps": 2,
    "learning_rate": 1e-3,
    "schedule": "constant",
    "warmup_ratio": 0.0,
    "eval_every": 1,
    "save_every": 1,
}
RL = {**SHORT, "eval_prompts": 3, "log_samples": 1, "sampling": Sampling(max_new_tokens=6)}
STAGES = {
    "sft": (SFTTrainer, SFTConfig, SHORT),
    "reward": (RewardTrainer, RewardConfig, SHORT),
    "dpo": (DPOTrainer, DPOConfig, SHORT),
    "ppo": (MacroPPOTrainer, PPOConfig, {**RL, "critic_learning_rate": 1e-3}),
    "rloo": (RLOOTrainer, RLOOConfig, {**RL, "num_samples": 2}),
    "grpo": (GRPOTrainer, GRPOConfig, {**RL, "num_samples": 2}),
}


def brevity(completions, **_):
    return [-len(completion) / 100 for completion in completions]


def near(completions, wanted):
    return [-abs(len(c) - n) / 10 for c, n in zip(completions, wanted)]


@pytest.fixture
def trainer(tmp_path):
    """`trainer("ppo", "a", settings={...}, ...)`: one that is done in a second."""

    def make(stage="ppo", name="run", settings=None, **given):
        kind, config, short = STAGES[stage]
        args = config(output_dir=str(tmp_path / name), **{**short, **(settings or {})})
        rewards = {"reward_funcs": brevity} if stage in ("ppo", "rloo", "grpo") else {}
        usual = {"model": "tiny", "train_dataset": ROWS, "args": args, **rewards}
        return kind(**{**usual, **given})

    return make


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """The folder of a reward model."""
    folder = tmp_path_factory.mktemp("judge")
    args = RewardConfig(output_dir=str(folder), **{**SHORT, "num_steps": 1})
    RewardTrainer(model="tiny", train_dataset=ROWS, args=args).train()
    return folder / "model"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """PPO that nothing goes wrong with."""
    settings = {**STAGES["ppo"][2], "num_steps": 3}
    args = PPOConfig(output_dir=str(tmp_path_factory.mktemp("unbroken")), **settings)
    made = MacroPPOTrainer("tiny", reward_funcs=brevity, train_dataset=ROWS, args=args)
    made.train()
    return made


def metrics(trainer) -> list[dict]:
    return read_lines(trainer.args.output_dir)


def weights(model) -> dict:
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def same(a, b) -> bool:
    return all(torch.equal(x, b[name]) for name, x in a.items())


def status(trainer) -> dict:
    return json.loads((Path(trainer.args.output_dir) / "run.json").read_text())


@pytest.mark.parametrize("stage", STAGES)
def test_objects_are_as_good_as_paths_and_datasets_as_lists(stage, trainer):
    train, aside = ROWS[:30], ROWS[30:]
    plain = trainer(stage, "plain", train_dataset=train, eval_dataset=aside)
    result = plain.train()
    assert result.global_step == result.metrics["steps"] == 2
    scalar = stage == "reward"
    model = load_scalar("tiny") if scalar else tiny_model()
    before = weights(model)
    given = trainer(
        stage,
        "given",
        model=model,
        processing_class=tiny_tokenizer(),
        train_dataset=Dataset.from_list(train),
        eval_dataset=iter(Dataset.from_list(aside)),
    )
    given.train()
    assert metrics(given) == metrics(plain)
    assert given.model is model
    assert not same(before, weights(model))
    loader = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    saved = loader.from_pretrained(Path(given.args.output_dir) / "model")
    assert same(weights(saved), weights(model))
    assert same(weights(saved), weights(plain.model))


def test_prompts_come_as_text_tokens_or_messages(trainer):
    tokenizer = tiny_tokenizer()
    text = trainer(name="text", processing_class=tokenizer)
    text.train()
    ids = Dataset.from_list(ROWS).map(
        lambda row: tokenizer(row["prompt"]), remove_columns=list(ROWS[0])
    )
    assert set(ids.column_names) >= {"input_ids", "attention_mask"}
    tokens = trainer(name="ids", processing_class=tokenizer, train_dataset=ids)
    tokens.train()
    assert metrics(tokens) == metrics(text)

    seen = []

    def reward(prompts, completions):
        seen.extend(zip(prompts, completions))
        return brevity([turn[0]["content"] for turn in completions])

    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    trainer(name="chat", train_dataset=chats, reward_funcs=reward).train()
    prompt, completion = seen[0]
    assert prompt[0]["role"] == "user"
    assert completion[0]["role"] == "assistant"


def test_tokens_that_are_given_are_taken_as_they_are(trainer):
    """A prompt need not be what the tokenizer would make of its text."""
    odd = [{"input_ids": [5 + n % 7, 6, 7]} for n in range(40)]
    made = trainer(train_dataset=odd, processing_class="tiny")
    assert made.objects.train_rows[0].columns["prompt_ids"][1:] == [6, 7]
    made.train()


def test_rewards_are_paths_models_functions_and_weighted_lists(trainer, judge):
    path = trainer(name="path", reward_funcs=str(judge))
    path.train()
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    before = weights(model)
    given = trainer(name="model", reward_funcs=model)
    given.train()
    assert metrics(given) == metrics(path)
    assert same(before, weights(model))

    mixed = trainer(
        name="mixed",
        reward_funcs=[near, judge, brevity],
        settings={"reward_weights": (0.5, 2.0, 0.0)},
    )
    mixed.train()
    step = next(line for line in metrics(mixed) if line["kind"] == "train")
    parts = {name: step[f"rewards/{name}"] for name in ("near", judge.parent.name, "brevity")}
    total = 0.5 * parts["near"] + 2.0 * parts[judge.parent.name]
    assert step["rl/score"] == pytest.approx(total, abs=1e-5)


def test_a_segmenter_is_a_setting(trainer):
    argument = trainer(name="argument", segmenter=NGram(1))
    setting = trainer(name="setting", settings={"segmenter": NGram(1)})
    longer = trainer(name="longer", segmenter=NGram(3))
    for one in (argument, setting, longer):
        one.train()
    configs = [
        yaml.safe_load((Path(t.args.output_dir) / "config.yaml").read_text())
        for t in (argument, setting)
    ]
    assert configs[0]["segmenter"] == configs[1]["segmenter"] == {"type": "ngram", "n": 1}
    assert metrics(argument) == metrics(setting) != metrics(longer)


def raises(completions, **_):
    raise KeyError("no such word")


def leaves(completions, **_):
    sys.exit(3)


def nans(completions, **_):
    return [0.0, float("nan"), *[0.0] * (len(completions) - 2)]


def nones(completions, **_):
    return [None] * len(completions)


def short(completions, **_):
    return [0.0] * (len(completions) - 1)


def hangs(completions, **_):
    time.sleep(2)
    return brevity(completions)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (raises, "raised KeyError: 'no such word'"),
        (leaves, "raised SystemExit: 3 (test_trainers.py, line"),
        (nans, "returned nan for\n  prompt:"),
        (nones, "No reward applies to this sample"),
        (short, "returned 3 values for 4 completions"),
        (hangs, "has not returned after 0.3 seconds"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_reward_that_fails_is_a_sentence_and_the_run_goes_on(fault, says, trainer, unbroken):
    calls = []

    def reward(completions, **columns):
        calls.append(len(completions))
        broken = len(calls) >= 4 and fault is not None  # two evaluations and a step went well
        return (fault if broken else brevity)(completions, **columns)

    settings = {"num_steps": 3}
    timeout = {"reward_timeout": 0.3} if fault is hangs else {}
    failing = trainer(name="failing", reward_funcs=reward, settings={**settings, **timeout})
    with pytest.raises(RewardError, match="reward") as error:
        failing.train()
    assert says in str(error.value)
    if fault not in (short, hangs):
        assert "\n  prompt:     '" in str(error.value)
    assert status(failing)["status"] == "failed"
    assert says.splitlines()[0] in status(failing)["note"]

    fault = None
    mended = trainer(name="failing", reward_funcs=reward, settings=settings)
    mended.train(resume_from_checkpoint=True)
    assert status(mended)["status"] == "finished"
    assert metrics(mended) == metrics(unbroken)
    assert same(weights(mended.model), weights(unbroken.model))


def test_a_column_that_vanishes_is_found_before_training(trainer):
    rows = [dict(row) for row in ROWS]
    del rows[30]["wanted"]
    with pytest.raises(RewardError, match=r"takes the column `wanted`, which row 3.* lacks"):
        trainer(train_dataset=rows, eval_dataset=ROWS[:3], reward_funcs=near).train()
    with pytest.raises(RewardError, match="needs `wanted`, which the data does not have"):
        trainer(train_dataset=[{"prompt": r["prompt"]} for r in ROWS], reward_funcs=near).train()
    trainer(reward_funcs=near).train()  # the same folder: nothing was learnt there


def test_callbacks_may_stop_a_run_and_their_faults_are_sentences(trainer):
    class Clumsy(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise ZeroDivisionError("oh")

    settings = {"num_steps": 4}
    clumsy = trainer("sft", settings=settings, callbacks=[Clumsy])
    with pytest.raises(RunError, match="The callback Clumsy failed in on_step_end at step 2"):
        clumsy.train()
    assert status(clumsy)["status"] == "failed"
    going_on = trainer("sft", settings=settings)
    going_on.train(resume_from_checkpoint=True)
    unbroken = trainer("sft", "unbroken", settings=settings)
    unbroken.train()
    assert metrics(going_on) == metrics(unbroken)

    # the loss of a rate this high rises at once
    patient = trainer(
        "sft",
        "early",
        settings={**settings, "learning_rate": 1.0},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
    )
    assert patient.train().global_step < 4
    assert status(patient)["note"].startswith("Stopped by a callback")


def test_samples_go_to_tensorboard(trainer):
    made = trainer("ppo", settings={"report_to": "tensorboard", "num_steps": 1})
    made.train()
    events = EventAccumulator(str(Path(made.args.output_dir) / "tensorboard")).Reload()
    written = [e.step for e in events.Tensors("samples/text_summary")]
    assert written == [0, 1]
    (run,) = Path(made.args.output_dir).glob("samples.jsonl")
    assert len(run.read_text("utf-8").splitlines()) == 2  # log_samples of each


def test_metrics_go_to_tensorboard(trainer):
    made = trainer("sft", settings={"report_to": "tensorboard"})
    made.train()
    events = EventAccumulator(str(Path(made.args.output_dir) / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("sft/loss")] == [1, 2]


def test_a_model_goes_to_the_hub_with_its_card(trainer, monkeypatch):
    uploads = []

    class Hub:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo_id, **_):
            return type("Url", (str,), {"repo_id": repo_id})(f"https://hub/{repo_id}")

        def upload_folder(self, repo_id, folder_path, **_):
            uploads.append((repo_id, (Path(folder_path) / "README.md").read_text()))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    made = trainer("sft", settings={"push_to_hub": True, "hub_model_id": "me/mine"})
    with pytest.raises(RunError, match="Call train\\(\\) first"):
        made.push_to_hub()
    made.train()
    assert made.push_to_hub(dataset_name="trl-lib/tldr") == "https://hub/me/mine"
    assert [name for name, _ in uploads] == ["me/mine", "me/mine"]
    assert 'from_pretrained("me/mine")' in uploads[0][1]
    assert "trl-lib/tldr" in uploads[1][1]


def test_save_model_copies_what_transformers_loads(trainer, tmp_path):
    made = trainer("sft")
    made.train()
    made.save_model(tmp_path / "copy")
    copied = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert same(weights(copied), weights(made.model))
    made.save_model(made.args.output_dir)  # as TRL's scripts do: it is there already
    assert not (Path(made.args.output_dir) / "config.json").exists()


def test_the_model_is_the_trained_one_even_if_it_was_looked_at_before(trainer):
    made = trainer("sft")
    before = weights(made.model)
    made.train()
    assert not same(before, weights(made.model))
    assert same(weights(made.model), weights(load_policy(f"{made.args.output_dir}/model")))


def test_a_half_trained_object_is_no_start_for_the_same_run(trainer, unbroken):
    """It is the reference's weights that would be wrong, and nothing would tell."""
    calls = []

    def reward(completions, **_):
        calls.append(1)
        return raises(completions) if len(calls) == 4 else brevity(completions)

    def make(model):
        given = {"model": model, "processing_class": tiny_tokenizer(), "reward_funcs": reward}
        return trainer(settings={"num_steps": 3}, **given)

    model = tiny_model()
    with pytest.raises(RewardError):
        make(model).train()
    with pytest.raises(RunError, match="Load them again to resume the run"):
        make(model).train()
    again = make(tiny_model())
    again.train(resume_from_checkpoint=True)
    assert metrics(again) == metrics(unbroken)

    late = make(tiny_model())  # as when a script runs a second time
    assert late.train().global_step == 3
    assert same(weights(late.model), weights(unbroken.model))
    again.train()  # and a notebook's cell


def test_an_adapter_leaves_the_object_that_was_given_as_it_was(trainer):
    model, tokens = tiny_model(), torch.tensor([[5, 6, 7]])
    before = model(tokens).logits
    given = {"processing_class": tiny_tokenizer(), "peft_config": LoraConfig(r=4)}
    made = trainer("sft", model=model, **given)
    made.train()
    torch.testing.assert_close(model(tokens).logits, before)
    assert made.model is not model
    saved = AutoModelForCausalLM.from_pretrained(Path(made.args.output_dir) / "model")
    torch.testing.assert_close(made.model(tokens).logits, saved(tokens).logits)
    assert not torch.allclose(saved(tokens).logits, before, atol=1e-3)
    again = trainer("sft", model=tiny_model(), **given)  # finished: nothing to do
    again.train()
    assert same(weights(again.model), weights(made.model))


def test_the_trained_critic_is_saved_and_exposed(trainer):
    made = trainer(name="critic")
    with pytest.raises(RunError, match=r"Call train\(\) first"):
        _ = made.value_model
    made.train()
    folder = Path(made.args.output_dir) / "critic"
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    tokens = torch.tensor([[5, 6, 7]])
    assert plain(tokens).logits.shape == (1, 1)
    torch.testing.assert_close(made.value_model(tokens).logits, plain(tokens).logits)
    given = AutoModelForSequenceClassification.from_pretrained(folder)
    before = weights(given)
    again = trainer(name="given", value_model=given)
    again.train()
    assert again.value_model is given
    assert not same(before, weights(given))
    saved = AutoModelForSequenceClassification.from_pretrained(
        Path(again.args.output_dir) / "critic"
    )
    assert same(weights(saved), weights(given))


def test_with_lora_the_model_keeps_its_adapter_unless_it_is_merged(trainer):
    kept = trainer(name="kept", peft_config=LoraConfig(r=4))
    merged = trainer(name="merged", settings={"lora": LoRA(r=4)})
    for made in (kept, merged):
        made.train()
    assert isinstance(kept.model, PeftModel)
    assert isinstance(kept.value_model, PeftModel)
    assert not isinstance(merged.model, PeftModel)
    tokens = torch.tensor([[5, 6, 7]])
    plain = AutoModelForCausalLM.from_pretrained(Path(kept.args.output_dir) / "model")
    torch.testing.assert_close(kept.model(tokens).logits, plain(tokens).logits)
    plain = AutoModelForSequenceClassification.from_pretrained(
        Path(kept.args.output_dir) / "critic"
    )
    torch.testing.assert_close(kept.value_model(tokens).logits, plain(tokens).logits)
    given = {"model": tiny_model(), "processing_class": tiny_tokenizer()}
    made = trainer(name="object", peft_config=LoraConfig(r=4), **given)
    made.train()
    assert isinstance(made.model, PeftModel)
    assert made.value_model(tokens).logits.shape == (1, 1)


def test_resuming_is_asked_for_or_refused(trainer):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise RuntimeError

    with pytest.raises(RunError):
        trainer("sft", callbacks=[Stop]).train()
    last = Path(trainer("sft").args.output_dir) / "checkpoints" / "step-000001"
    with pytest.raises(RunError, match="holds an unfinished run"):
        trainer("sft").train(resume_from_checkpoint=False)
    with pytest.raises(RunError, match=f"not from elsewhere. The last is {last}"):
        trainer("sft").train(resume_from_checkpoint="elsewhere")
    with pytest.raises(RunError, match=r"It differs in\n  data.path"):
        trainer("sft", train_dataset=ROWS[1:]).train()
    trainer("sft").train(resume_from_checkpoint=str(last))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": None}, "nothing to train. Pass model"),
        ({"model": 3}, "model must be a path or a model of transformers; got int"),
        ({"model": torch.nn.Linear(1, 1)}, "got Linear"),
        ({"model": tiny_model()}, "without its tokenizer. Pass it as processing_class"),
        ({"args": TrainingArguments(output_dir="x")}, "takes args of marlhf.PPOConfig; got trans"),
        ({"args": SFTConfig()}, "takes args of marlhf.PPOConfig; got marlhf.*SFTConfig"),
        ({"reward_funcs": None}, "Nothing scores the responses"),
        ({"reward_funcs": []}, "Nothing scores the responses"),
        ({"reward_funcs": [brevity, 3]}, "paths, models or functions .*; got 3"),
        ({"args": PPOConfig(reward_model="x")}, "Put all of them into reward_funcs"),
        ({"reward_processing_classes": [None, None]}, "1 reward_funcs but 2 reward_processing"),
        ({"reward_model": "x"}, "no argument reward_model. Pass it as reward_funcs"),
        ({"tokenizer": "x"}, "no argument tokenizer. Pass it as processing_class"),
        ({"segmentor": NGram(3)}, "no argument segmentor. Did you mean segmenter"),
        ({"segmenter": 3}, "segmenter must be a rule such as NGram"),
        ({"train_dataset": "trl-lib/tldr"}, "train_dataset is a path. Set data=DataConfig"),
        ({"train_dataset": DatasetDict(train=[], test=[])}, "a dictionary with train, test"),
        ({"train_dataset": ["Tell me"]}, "Row 1 of train_dataset is a str, not a dictionary"),
        ({"train_dataset": [{"prompts": "Tell me"}]}, "no column `prompt`.*Did you mean `prompts`"),
        ({"train_dataset": [{"input_ids": [5]}]}, "given as input_ids. Pass processing_class"),
        ({"train_dataset": None, "eval_dataset": ROWS}, "without train_dataset. Pass both"),
        ({"ref_model": object()}, "ref_model must be a path or a model"),
        ({"value_model": object()}, "value_model must be a path or a model"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_a_sentence(given, says, trainer):
    with pytest.raises((TypeError, ValueError, DataError), match=says):
        trainer(**given)


def test_models_of_the_wrong_kind_are_refused(trainer):
    scalar = load_scalar("tiny")
    for name in ("model", "ref_model"):
        with pytest.raises(TypeError, match=f"{name} is a LlamaForSeq.*cannot write"):
            trainer(**{name: scalar, "processing_class": "tiny"})
    with pytest.raises(TypeError, match=r"has no argument value_model\. There is no critic"):
        trainer("rloo", value_model=scalar)
    with pytest.raises(TypeError, match="has no argument value_model"):
        trainer("sft", value_model=scalar)
    model = tiny_model()
    with pytest.raises(RunError, match="The reference is the policy itself"):
        trainer(model=model, ref_model=model, processing_class="tiny").train()
    with pytest.raises(ValueError, match="no scalar head"):
        trainer("reward", "judge", model=model, processing_class="tiny").train()


def test_the_reference_and_the_critic_may_be_given(trainer, judge):
    plain = trainer(name="plain", reward_funcs=str(judge))
    plain.train()
    critic = AutoModelForSequenceClassification.from_pretrained(judge)
    before = weights(critic)
    given = trainer(
        name="given",
        model=tiny_model(),
        ref_model=tiny_model(),
        value_model=critic,
        reward_funcs=AutoModelForSequenceClassification.from_pretrained(judge),
        processing_class=tiny_tokenizer(),
    )
    given.train()
    assert_close(metrics(given), metrics(plain), 1e-5)
    assert not same(before, weights(critic))
    paths = trainer(name="paths", ref_model="tiny", value_model=judge, reward_funcs=judge)
    paths.train()
    assert metrics(paths) == metrics(plain)


def test_ppo_is_found_by_the_name_that_trl_gave_it():
    assert PPOTrainer is MacroPPOTrainer


def test_settings_by_their_names_in_trl_are_all_answered_at_once():
    with pytest.raises(TypeError) as caught:
        PPOConfig(per_device_train_batch_size=8, cliprange=0.2, optim="adamw", kl_cof=0.1, gamma=1)
    assert str(caught.value).splitlines() == [
        "PPOConfig has no settings",
        "  per_device_train_batch_size. In marlhf it is batch_size, over all devices and "
        "accumulation steps.",
        "  cliprange. In marlhf it is clip.",
        "  optim. In marlhf it is optimizer.",
        "  kl_cof. Did you mean kl_coef?",
    ]


def test_arguments_by_their_names_in_trl_are_all_answered_at_once():
    with pytest.raises(TypeError) as caught:
        PPOTrainer(model="tiny", reward_model="x", tokenizer="y", learning_rate=1e-5, cliprange=0.2)
    lines = str(caught.value).splitlines()
    assert lines[0] == "MacroPPOTrainer has no arguments"
    assert "  reward_model. Pass it as reward_funcs." in lines
    assert "  learning_rate. Settings go into args." in lines
    assert "  cliprange. Settings go into args. In marlhf it is clip." in lines


def test_what_trl_renamed_exists_here():
    known = {
        f.name
        for cls in (*(s[1] for s in STAGES.values()), Sampling, DataConfig)
        for f in dataclasses.fields(cls)
    }
    for new in RENAMED.values():
        assert re.findall(r"\w+", new)[0] in known


@pytest.mark.parametrize("stage", ["ppo", "grpo", "rloo", "dpo", "sft", "reward", "prm"])
def test_every_setting_of_trls_configs_is_answered(stage):
    trl = pytest.importorskip("trl")
    from trl.experimental.ppo import PPOConfig as TheirPPOConfig
    from trl.experimental.prm import PRMConfig as TheirPRMConfig

    name = {"sft": "SFTConfig", "reward": "RewardConfig"}.get(stage, f"{stage.upper()}Config")
    experimental = {"ppo": TheirPPOConfig, "prm": TheirPRMConfig}
    theirs = experimental.get(stage) or getattr(trl, name)
    ours = {f.name for f in dataclasses.fields(getattr(marlhf, name))}
    settings = {f.name for f in dataclasses.fields(theirs)}
    for setting in settings - {f.name for f in dataclasses.fields(TrainingArguments)} - ours:
        assert hint_for(setting, ours), setting
        if setting in RENAMED and "max_response_tokens" not in hint_for(setting, ours):
            assert re.findall(r"\w+", RENAMED[setting])[0] in ours, setting


def test_a_setting_of_another_stage_is_not_advised():
    with pytest.raises(TypeError, match="num_samples, which this stage does not have"):
        DPOConfig(num_generations=4)
    for name, new in {"lr": "learning_rate", "hub_strategy": "uploaded, once"}.items():
        with pytest.raises(TypeError, match=new):
            PPOConfig(**{name: 0.1})
    with pytest.raises(TypeError, match="TRL counts responses there, and marlhf prompts"):
        GRPOConfig(per_device_train_batch_size=8)


def test_state_evaluation_and_loss_are_those_of_the_run(unbroken):
    history = unbroken.state.log_history
    lines = metrics(unbroken)
    assert [row["step"] for row in history] == [line["step"] for line in lines]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [x["loss"] for x in history if "loss" in x] == [x["rl/policy_loss"] for x in steps]
    assert unbroken.state.global_step == 3
    evaluation = [line for line in lines if line["kind"] == "eval"][-1]
    wanted = {f"eval_{k[5:]}": x for k, x in evaluation.items() if k.startswith("eval/")}
    assert unbroken.evaluate() == wanted
    unbroken.save_state()
    saved = json.loads((Path(unbroken.args.output_dir) / "trainer_state.json").read_text())
    assert saved["log_history"] == history


def test_the_training_loss_is_the_mean_over_steps(trainer):
    sft = trainer("sft")
    with pytest.raises(RuntimeError, match=r"no trained model .* Call train\(\) first"):
        sft.evaluate()
    with pytest.raises(RuntimeError, match=r"no step in .* yet\. Call train\(\) first"):
        sft.save_state()
    out = sft.train()
    losses = [line["sft/loss"] for line in metrics(sft) if line["kind"] == "train"]
    assert out.training_loss == pytest.approx(sum(losses) / len(losses))
    assert out.metrics["train_loss"] == out.training_loss
    held_out = len(sft.objects.eval_rows)
    rows = {"training": len(ROWS) - held_out, "held-out": held_out}
    assert read_state(Path(sft.args.output_dir))["rows"] == rows
    with pytest.raises(ValueError, match="pass eval_dataset to the trainer"):
        sft.evaluate(ROWS)


def test_callbacks_come_and_go(trainer):
    class Count(TrainerCallback):
        def __init__(self):
            self.steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1

    class Never(Count): ...

    kept, dropped = Count(), Never()
    sft = trainer("sft", callbacks=[dropped])
    sft.add_callback(kept)
    sft.remove_callback(Never)
    sft.train()
    assert (kept.steps, dropped.steps) == (2, 0)
    sft.remove_callback(kept)
    with pytest.raises(ValueError, match="There is no callback"):
        sft.remove_callback(kept)


def test_grpos_defaults_are_trls():
    trl = pytest.importorskip("trl")
    theirs = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}
    ours = GRPOConfig()
    for name, mine in {
        "learning_rate": ours.learning_rate,
        "num_generations": ours.num_samples,
        "beta": ours.kl_coef,
        "epsilon": ours.clip,
        "temperature": ours.sampling.temperature,
        "max_completion_length": ours.sampling.max_new_tokens,
        "importance_sampling_level": ours.ratio,
        "lr_scheduler_type": ours.schedule,
        "warmup_steps": ours.warmup(100),
    }.items():
        assert theirs[name] == mine, name


def test_grpo_is_rloo_with_its_settings(tmp_path):
    settings = {**RL, "num_steps": 1, "num_samples": 2}
    args = GRPOConfig(output_dir=str(tmp_path / "grpo"), **settings)
    trainer = GRPOTrainer(
        model="tiny",
        reward_funcs=brevity,
        train_dataset=ROWS,
        args=args,
    )
    assert (trainer.args.baseline, trainer.args.kl_in) == ("group", "loss")
    assert trainer.train().global_step == 1
    assert read_state(tmp_path / "grpo")["stage"] == "grpo"
    assert "tags:\n- marlhf\n- rlhf\n- grpo" in (tmp_path / "grpo/model/README.md").read_text()
    with pytest.raises(TypeError, match=r"takes args of marlhf\.GRPOConfig"):
        GRPOTrainer(model="tiny", reward_funcs=brevity, args=RLOOConfig())


def test_without_data_nothing_is_trained(tmp_path):
    args = PPOConfig(output_dir=str(tmp_path / "ppo"))
    with pytest.raises(ValueError, match=r"nothing to learn from\. Pass train_dataset"):
        PPOTrainer(model="tiny", reward_funcs=brevity, args=args).train()


def test_rows_held_out_are_counted_in_args_beside_train_dataset(tmp_path):
    args = SFTConfig(output_dir=str(tmp_path / "sft"), data=DataConfig(eval_size=3))
    trainer = SFTTrainer(model="tiny", train_dataset=ROWS, args=args)
    assert len(trainer.objects.eval_rows) == 3
