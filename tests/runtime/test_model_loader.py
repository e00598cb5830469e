"""Which model fills each role, decided before weights are read; and that roles share no memory."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from marlhf.config.stage import LoRA, StageConfig
from marlhf.models.facts import model_facts
from marlhf.models.tiny import tiny_tokenizer
from marlhf.runs.layout import RunError
from marlhf.runtime.distributed import World
from marlhf.runtime.model_loader import load_sources
from marlhf.runtime.sources import OnBase, WholeModel, reward_items, rl_sources, trained_source
from marlhf.runtime.stage import NO_OBJECTS, GivenObjects
from marlhf.train.ppo_config import PPOConfig

TOKENIZER = tiny_tokenizer()
WHOLE = PPOConfig(model="tiny", reward_model="reward", seed=3)
APART = LoRA(r=2)
SHARED = LoRA(r=2, shared_base=True)


class Language(torch.nn.Module):
    """Stands for a language model given in Python."""


class Scalar(torch.nn.Module):
    """Stands for a reward model given in Python."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()
        self.score = torch.nn.Linear(2, 1, bias=False)


def whole(model, head, **settings):
    return WholeModel(model_facts(model), head, **settings)


def brevity(completions, **_):
    return [0.0 for _ in completions]


@pytest.fixture(autouse=True)
def one_tokenizer(tmp_path, monkeypatch):
    """Folders with a config and the policy's tokenizer, and no weights."""
    monkeypatch.chdir(tmp_path)
    for name in ("reward", "critic", "reference", "gold", "merged", "language-merged"):
        TOKENIZER.save_pretrained(name)
        kind = "LlamaForCausalLM" if name == "reference" else "LlamaForSequenceClassification"
        settings = {"model_type": "llama", "architectures": [kind]}
        (Path(name) / "config.json").write_text(json.dumps(settings))
    adapter("merged/adapter", "SEQ_CLS")
    adapter("language-merged/adapter", "CAUSAL_LM")
    adapter("sft-adapter", "CAUSAL_LM")
    adapter("reward-adapter", "SEQ_CLS")


def adapter(folder: str, task: str) -> None:
    path = Path(folder)
    path.mkdir()
    settings = {"peft_type": "LORA", "task_type": task, "base_model_name_or_path": "tiny"}
    (path / "adapter_config.json").write_text(json.dumps(settings))


def resolve(config, objects=NO_OBJECTS, *, critic=True):
    return rl_sources(config, objects, critic=critic).roles


def test_whole_models_come_from_their_paths():
    assert resolve(WHOLE) == {
        "policy": whole("tiny", "language", seed=3),
        "reference": whole("tiny", "language", seed=3),
        "critic": whole("reward", "scalar", seed=3),
        "reward-0": whole("reward", "scalar"),
    }


def test_what_is_named_wins_over_what_follows():
    config = replace(WHOLE, ref_model="reference", critic_model="critic", gold_model="gold")
    sources = resolve(config)
    assert sources["reference"] == whole("reference", "language", seed=3)
    assert sources["critic"] == whole("critic", "scalar", seed=3)
    assert sources["gold"] == whole("gold", "scalar")


def test_a_method_without_a_critic_has_none():
    assert "critic" not in resolve(WHOLE, critic=False)


def test_without_a_reward_model_the_critic_starts_from_the_policy():
    config = replace(WHOLE, reward_model="", reward_funcs=("mine:brevity",))
    sources = resolve(config)
    assert sources.keys() == {"policy", "reference", "critic"}
    assert sources["critic"] == whole("tiny", "scalar", seed=3)


def test_a_policy_given_as_an_object_is_copied_for_reference_and_critic():
    policy = Language()
    objects = GivenObjects(model=policy, tokenizer=TOKENIZER, reward_funcs=[brevity])
    config = replace(WHOLE, model="(given)", reward_model="")
    assert resolve(config, objects) == {
        "policy": whole(policy, "language", seed=3),
        "reference": whole(policy, "language", copied=True),
        "critic": whole(policy, "scalar", copied=True, seed=3),
    }


def test_objects_given_for_every_role_are_taken_as_they_are():
    policy, reference, critic, reward = Language(), Language(), Scalar(), Scalar()
    objects = GivenObjects(policy, TOKENIZER, reference, critic, [brevity, reward])
    sources = resolve(replace(WHOLE, reward_model=""), objects)
    assert sources["reference"] == whole(reference, "language")
    assert sources["critic"] == whole(critic, "scalar")
    assert sources["reward-1"] == whole(reward, "scalar")
    assert "reward-0" not in sources  # a function


def test_a_reward_model_given_as_an_object_is_copied_for_the_critic():
    reward = Scalar()
    objects = GivenObjects(model=Language(), tokenizer=TOKENIZER, reward_funcs=[reward])
    config = replace(WHOLE, reward_model="")
    assert resolve(config, objects)["critic"] == whole(reward, "scalar", copied=True)
    adapted = resolve(replace(config, lora=APART), objects)
    assert adapted["critic"].base == whole(reward, "scalar", copied=True)
    assert adapted["reward-0"] == whole(reward, "scalar")


def test_a_reward_model_of_other_tokens_is_no_start_for_a_critic(trained):
    policy = Language()
    objects = GivenObjects(
        model=policy,
        tokenizer=TOKENIZER,
        reward_funcs=[Scalar()],
        reward_tokenizers=[trained("byte-level")],
    )
    config = replace(WHOLE, reward_model="")
    assert resolve(config, objects)["critic"].facts.model is policy


def test_adapters_apart_have_two_bases():
    sources = resolve(replace(WHOLE, lora=APART))
    base, second = whole("tiny", "language", seed=3), whole("reward", "scalar", seed=3)
    assert sources == {
        "policy": OnBase(base, "language", APART),
        "reference": OnBase(base, "language", None),
        "critic": OnBase(second, "scalar", APART),
        "reward-0": OnBase(second, "scalar", None),  # the critic's base, without its adapter
    }


def test_adapters_from_one_model_have_one_base():
    config = replace(WHOLE, reward_model="", reward_funcs=("mine:brevity",), lora=APART)
    sources = resolve(config)
    assert sources["critic"] == OnBase(sources["policy"].base, "scalar", APART)
    assert resolve(replace(config, critic_model="tiny")) == sources


@pytest.mark.parametrize("reward", ["merged", "reward-adapter"])
def test_a_shared_base_holds_every_role(reward):
    sources = resolve(replace(WHOLE, reward_model=reward, lora=SHARED))
    saved = Path("merged/adapter" if reward == "merged" else reward)
    assert {source.base for source in sources.values()} == {whole("tiny", "language", seed=3)}
    assert {role: source.adapter for role, source in sources.items()} == {
        "policy": SHARED,
        "reference": None,
        "critic": saved,
        "reward-0": saved,
    }


@pytest.mark.parametrize("lora", [SHARED, APART])
def test_saved_adapters_are_continued_on_their_base(lora):
    config = replace(WHOLE, model="sft-adapter", reward_model="reward-adapter", lora=lora)
    sources = resolve(config)
    assert sources["policy"].base == whole("tiny", "language", seed=3)
    assert sources["policy"].adapter == sources["reference"].adapter == Path("sft-adapter")
    assert sources["critic"].adapter == sources["reward-0"].adapter == Path("reward-adapter")
    assert (sources["critic"].base == sources["policy"].base) == lora.shared_base


def test_a_whole_reward_model_stands_beside_a_shared_base(capsys):
    sources = resolve(replace(WHOLE, lora=SHARED))
    assert sources["reward-0"] == whole("reward", "scalar")
    assert sources["critic"] == OnBase(sources["policy"].base, "scalar", SHARED)
    assert "takes memory of its own" in " ".join(capsys.readouterr().err.split())
    # The adapter beside a merged language model is not a critic's start.
    sources = resolve(replace(WHOLE, reward_model="language-merged", lora=SHARED))
    assert sources["critic"].adapter == SHARED


def test_contradictions_are_refused():
    policy = Language()
    with pytest.raises(RunError, match="reference is the policy itself"):
        resolve(WHOLE, GivenObjects(model=policy, ref_model=policy))
    with pytest.raises(RunError, match="a critic of its own is given"):
        resolve(replace(WHOLE, lora=SHARED), GivenObjects(critic_model=Scalar()))
    with pytest.raises(RunError, match="is a whole model"):
        resolve(replace(WHOLE, critic_model="critic", lora=SHARED))
    with pytest.raises(RunError, match="Nothing scores"):
        reward_items(replace(WHOLE, reward_model=""), NO_OBJECTS)
    with pytest.raises(RunError, match="1 rewards but 2 reward_weights"):
        reward_items(replace(WHOLE, reward_weights=(1.0, 2.0)), NO_OBJECTS)


def test_other_tokenizers_are_refused(tmp_path, trained):
    trained("byte-level").save_pretrained("other")
    (Path("other") / "config.json").write_text(Path("critic/config.json").read_text())
    with pytest.raises(RunError, match="The critic other does not have the tokenizer"):
        resolve(replace(WHOLE, critic_model="other"))
    with pytest.raises(RunError, match="The reference other does not have the tokenizer"):
        resolve(replace(WHOLE, ref_model="other"))


@pytest.mark.parametrize("setting", ["reward_model", "gold_model", "reward_funcs"])
def test_a_language_model_scores_only_where_that_was_asked_for(setting):
    value = ("tiny",) if setting == "reward_funcs" else "tiny"
    config = replace(WHOLE, **{setting: value})
    with pytest.raises(RunError, match=rf"`{setting}`: tiny is a language model .*marlhf reward"):
        resolve(config)
    assert resolve(replace(config, random_reward_head=True))


def test_stages_with_one_model():
    def start(head, model, adapter=None):
        return trained_source(head, model_facts(model), adapter, seed=2)

    assert start("language", "tiny") == whole("tiny", "language", seed=2)
    assert start("scalar", "tiny") == whole("tiny", "scalar", seed=2)
    base = whole("tiny", "language", seed=2)  # stays a language model, for a policy to share
    assert start("scalar", "tiny", APART) == OnBase(base, "scalar", APART)
    started = start("scalar", "reward-adapter", APART)
    assert started == OnBase(whole("tiny", "scalar", seed=2), "scalar", Path("reward-adapter"))
    assert start("scalar", Scalar(), APART).base.head == "scalar"


def test_roles_that_start_from_the_same_weights_share_no_memory():
    sources = {
        "policy": whole("tiny", "language"),
        "reference": whole("tiny", "language"),
        "critic": whole("tiny", "scalar"),
        "reward-0": whole("tiny", "scalar"),
        "gold": whole("tiny", "scalar"),
        "another": whole("tiny", "scalar", seed=1),
    }
    config = StageConfig(gradient_checkpointing=True)
    models = load_sources(sources, {"policy", "critic"}, config, World(torch.device("cpu")))
    weights = {role: dict(model.named_parameters()) for role, model in models.items()}
    assert not weights["critic"]["score.weight"].any()  # which has no head of its own
    heads = [weights[role].pop("score.weight") for role in ("critic", "reward-0", "another")]
    assert not torch.equal(heads[1], heads[2])
    alike = (("policy", "reference"), ("critic", "reward-0"), ("critic", "gold"))
    for one, other in alike:
        for name, weight in weights[one].items():
            assert torch.equal(weight, weights[other][name])
    addresses = [w.data_ptr() for role in weights.values() for w in role.values()]
    addresses += [w.data_ptr() for w in heads]
    assert len(set(addresses)) == len(addresses)
    trained = {"policy", "critic"}
    for role, model in models.items():
        assert model.is_gradient_checkpointing == (role in trained)
        assert all(w.requires_grad == (role in trained) for w in model.parameters())


@pytest.mark.parametrize("lora", [None, APART, SHARED], ids=["whole", "apart", "shared"])
def test_a_critic_without_a_head_of_its_own_starts_at_zero(lora, small, tmp_path):
    start, scores = (str(tmp_path / name) for name in ("sft", "scores"))
    for folder, scalar in ((start, False), (scores, True)):
        small("llama", scalar, vocab_size=len(TOKENIZER)).save_pretrained(folder)
        TOKENIZER.save_pretrained(folder)

    def head(**models):
        config = PPOConfig(model=start, reward_model=scores, lora=lora, **models)
        source = {"critic": resolve(config)["critic"]}
        return load_sources(source, {"critic"}, config, World(torch.device("cpu")))["critic"].score

    assert not head(critic_model=start).weight.any()
    trained = head()
    assert bool(trained.weight.any()) != (lora is SHARED)  # where it cannot start from the reward's
