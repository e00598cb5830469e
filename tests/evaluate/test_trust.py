"""Code that a run folder names runs only if the user's own command line says so."""

import functools
import json
import sys

import pytest
import yaml

from marlhf import MacroPPOTrainer, NGram, PPOConfig, Sampling
from marlhf.chat.models import load_chat_models
from marlhf.cli import main
from marlhf.evaluate import best_of_n, pass_at_k, score
from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions, find_policies, make_plan
from marlhf.evaluate.score import evaluate
from marlhf.models.base import ModelError, pick_device
from marlhf.models.load import load_policy

FEW = {"prompts": 2, "device": "cpu"}
HOSTILE = """
from pathlib import Path

Path(__file__).with_name("ran").touch()


def short(completions):
    return [1.0 for _ in completions]


class Rule:
    def __call__(self, responses):
        return responses.mask
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A module that leaves a trace when it is imported; returns whether it was."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "hostile.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    sys.modules.pop("hostile", None)
    return (tmp_path / "code" / "ran").exists


def change(folder, **settings):
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config | settings))


@pytest.mark.parametrize("key", ["reward_funcs", "reward_model"])
def test_a_reward_that_a_run_names_is_not_imported_unless_trusted(finished, hostile, key):
    name = "hostile:short"
    change(finished / "ppo", **{"reward_model": None, key: [name] if key.endswith("s") else name})
    for run in (finished / "ppo", finished):
        with pytest.raises(EvaluationError, match=r"hostile:short .*--trust-code"):
            evaluate([run], EvaluationOptions(**FEW))
    with pytest.raises(EvaluationError, match=r"hostile:short .*--trust-code"):
        best_of_n.best_of_n(finished / "ppo", EvaluationOptions(**FEW), [1])
    with pytest.raises(EvaluationError, match=r"hostile:short .*--trust-code"):
        evaluate([finished / "sft"], EvaluationOptions(**FEW, like=str(finished / "ppo")))
    assert not hostile()
    [found] = evaluate([finished / "ppo"], EvaluationOptions(**FEW, trust_code=True))
    assert found.summary.scores["hostile:short"].mean == 1.0
    assert hostile()


def test_a_reward_that_the_user_names_needs_no_more_trust(finished, hostile):
    options = EvaluationOptions(**FEW, rewards=("hostile:short",))
    assert "hostile:short" in evaluate([finished / "ppo"], options)[0].summary.scores


def test_marlhf_s_own_functions_need_no_trust(finished):
    change(finished / "ppo", reward_model=None, reward_funcs=["marlhf.reward.code:unit_tests"])
    [policy] = find_policies([finished / "ppo"])
    assert make_plan(policy, EvaluationOptions(), None).rewards


@pytest.mark.parametrize("trust", [False, True])
def test_remote_code_is_the_users_choice_not_the_folders(finished, monkeypatch, trust):
    change(finished / "ppo", trust_remote_code=True)
    asked = []

    def load(path, **options):
        asked.append(options.pop("trust_remote_code"))
        return load_policy(path, **options)

    for module in ("marlhf.evaluate.sampling", "marlhf.chat.models"):
        monkeypatch.setattr(f"{module}.load_policy", load)
    evaluate([finished / "ppo"], EvaluationOptions(**FEW, trust_code=trust))
    load_chat_models([finished / "ppo"], pick_device("cpu"), trust_code=trust)
    assert set(asked) == {trust}


def test_a_model_that_needs_its_code_says_how_to_allow_it(finished):
    file = finished / "ppo/model/config.json"
    config = json.loads(file.read_text())
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    file.write_text(json.dumps(config | {"model_type": "mine", "auto_map": auto}))
    change(finished / "ppo", trust_remote_code=True)
    with pytest.raises(ModelError, match=r"Python code of its own.*--trust-code"):
        evaluate([finished / "ppo"], EvaluationOptions(**FEW))


def test_chat_does_not_import_a_segmenter_unless_trusted(finished, hostile):
    change(finished / "ppo", segmenter={"type": "hostile:Rule"})
    [model] = load_chat_models([finished / "ppo"], pick_device("cpu"))
    turn = model.ask("Hello", 1, seed=0)
    with pytest.raises(EvaluationError, match=r"hostile:Rule .*--trust-code"):
        model.actions(turn)
    assert not hostile()
    [model] = load_chat_models([finished / "ppo"], pick_device("cpu"), trust_code=True)
    assert model.actions(turn)


@pytest.mark.parametrize("command", ["evaluate", "best-of-n", "pass-at-k", "chat"])
def test_the_flag_reaches_each_command(finished, monkeypatch, command):
    seen = []

    def stop(*words, **options):
        chosen = [x for x in words if isinstance(x, EvaluationOptions)]
        seen.append(chosen[0].trust_code if chosen else options["trust_code"])
        raise EvaluationError("enough")

    monkeypatch.setattr(score, "evaluate", stop)
    monkeypatch.setattr(best_of_n, "best_of_n", stop)
    monkeypatch.setattr(pass_at_k, "measure", stop)
    as_declared = functools.wraps(load_chat_models)(stop)
    monkeypatch.setattr("marlhf.chat.models.load_chat_models", as_declared)
    for flags in ([], ["--trust-code"]):
        monkeypatch.setattr(sys, "argv", ["marlhf", command, str(finished / "ppo"), *flags])
        with pytest.raises(SystemExit):
            main()
    assert seen == [False, True]


def brevity(completions, **_):
    return [-float(len(text)) for text in completions]


def test_a_run_started_from_python_says_what_to_name(tmp_path, monkeypatch):
    rows = [{"prompt": f"Say {n}"} for n in range(16)]
    sampling = Sampling(max_new_tokens=4)
    folder = tmp_path / "ppo"
    args = PPOConfig(output_dir=str(folder), num_steps=1, batch_size=4, sampling=sampling)
    MacroPPOTrainer(
        model="tiny",
        reward_funcs=brevity,
        segmenter=NGram(2),
        train_dataset=rows[:12],
        eval_dataset=rows[12:],
        args=args,
    ).train()
    with pytest.raises(EvaluationError, match=r"function brevity, given in Python.*--reward MOD"):
        evaluate([folder], EvaluationOptions(**FEW))
    reward = ("brief:brevity",)
    with pytest.raises(EvaluationError, match=r"rows given in Python.*--path FILE"):
        evaluate([folder], EvaluationOptions(**FEW, rewards=reward))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = "def brevity(completions):\n    return [0.5] * len(completions)"
    (tmp_path / "brief.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    [found] = evaluate([folder], EvaluationOptions(**FEW, rewards=reward, path=str(file)))
    assert found.summary.scores["brief:brevity"].mean == 0.5


def test_a_model_given_in_python_is_asked_for(finished):
    given = "(given in Python) LlamaForCausalLM abc"
    change(finished / "ppo", model=given, ref_model=None)
    with pytest.raises(EvaluationError, match=r"model given in Python.*--reference PATH"):
        evaluate([finished / "ppo"], EvaluationOptions(**FEW))
    options = EvaluationOptions(**FEW, reference="none")
    assert len(evaluate([finished / "ppo"], options)[0].lines) == 2
    change(finished / "ppo", reward_model=None, reward_funcs=[given])
    with pytest.raises(EvaluationError, match=r"scored by a model given in Python.*--reward PATH"):
        evaluate([finished / "ppo"], options)
