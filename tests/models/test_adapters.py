import functools
import json
import sys
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from marlhf.config.stage import LoRA
from marlhf.models.adapter_files import (
    merge_adapter,
    quantization,
    to_peft,
)
from marlhf.models.adapters import (
    FrozenBaseModel,
    merged_tensors,
)
from marlhf.models.base import ModelError, frozen_dtype
from marlhf.models.facts import adapter_base, find_adapter, is_scalar_adapter
from marlhf.models.forward import Sequences, final_scores, token_stats, token_values
from marlhf.models.load import load_policy, load_scalar

peft = pytest.importorskip("peft")
SOME = ["llama-tied", "qwen2", "gemma", "gpt2", "gpt-neox"]
BATCH = Sequences.from_lists([[5, 6], [7, 8, 9], [4]], [[7, 8, 1], [3, 1], [9, 9, 12, 1]], 0)
WEIGHTS = torch.arange(12.0).reshape(3, 4) - 5  # of a loss in which no token counts like another


def randomise(*views):
    """Adapters as if they had been trained: fresh ones have no effect."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for view in views:
            for parameter in view.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def bits(module):
    return {name: x.clone() for name, x in module.state_dict().items()}


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logprobs(model):
    return token_stats(model, BATCH).logprobs


@pytest.fixture
def saved(tmp_path, small):
    """A small Llama in a folder, and what stands on it: three views, their adapters saved."""
    small("llama").save_pretrained(tmp_path / "base")
    base = FrozenBaseModel(small("llama"), str(tmp_path / "base"))
    views = {
        "policy": base.language_model(LoRA(r=4)),
        "critic": base.scalar_model(LoRA(r=2), "critic"),
        "reward": base.scalar_model(LoRA(r=3), "reward"),
    }
    randomise(*views.values())
    for name, view in views.items():
        view.save_pretrained(tmp_path / name)
    return base, views, tmp_path


def save_adapter(view, folder):
    """The adapter alone."""
    view.base.merge = False
    view.save_pretrained(folder)


def in_peft(view, plain, folder):
    """The same model by peft alone, on a base of its own."""
    save_adapter(view, folder)
    return peft.PeftModel.from_pretrained(plain, folder, is_trainable=True).train()


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [*((name, False) for name in SOME), ("llama-tied", True), ("gpt2", True)],
)
def test_views_of_one_base_equal_separate_models(tmp_path, small, name, checkpointing):
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    small = functools.partial(small, **quiet if name == "gpt2" else {})  # as load_policy does
    module = small(name)
    if checkpointing:
        module.gradient_checkpointing_enable()
    base = FrozenBaseModel(module)
    policy, reference = base.language_model(LoRA(r=4), seed=1), base.language_model(None)
    critic, reward = base.scalar_model(LoRA(r=4), "critic"), base.scalar_model(LoRA(r=3), "reward")
    randomise(policy, critic, reward)
    policy.train()
    assert module.is_gradient_checkpointing == checkpointing

    def classifier():
        model = small(name, scalar=True)
        model.base_model.load_state_dict(small(name).base_model.state_dict())
        return model

    alone = in_peft(policy, small(name), tmp_path / "policy")
    alone_critic = in_peft(critic, classifier(), tmp_path / "critic")
    alone_reward = in_peft(reward, classifier(), tmp_path / "reward")

    def losses(policy, critic):
        return (logprobs(policy) * WEIGHTS).sum(), (token_values(critic, BATCH) * WEIGHTS).sum()

    # All passes first, then backward: a checkpoint runs again when another view was the last.
    policy_loss, value_loss = losses(policy, critic)
    with torch.no_grad():
        ref, scores = logprobs(reference), final_scores(reward, BATCH)
    policy_loss.backward()
    value_loss.backward()
    expected = losses(alone, alone_critic.base_model.model)
    for loss in expected:
        loss.backward()
    torch.testing.assert_close((policy_loss, value_loss), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scores, final_scores(alone_reward.base_model.model, BATCH).detach())
    assert torch.equal(ref, logprobs(small(name)))
    assert (logprobs(policy) - ref).abs().max() > 0.1
    for view, model in ((policy, alone), (critic, alone_critic)):
        theirs = [p.grad for p in model.parameters() if p.requires_grad]
        assert len(theirs) == len(list(view.parameters()))
        for mine, other in zip(view.parameters(), theirs):
            torch.testing.assert_close(mine.grad, other, rtol=1e-4, atol=1e-4)
    assert all(p.grad is None for p in module.base_model.get_input_embeddings().parameters())


def test_a_fresh_adapter_changes_nothing_and_its_seed_is_its_own(small):
    plain, state = small("llama"), torch.get_rng_state()
    adapters = []
    for seed in (1, 1, 2):
        base = FrozenBaseModel(small("llama"))
        view = base.language_model(LoRA(r=4), seed=seed)
        base.scalar_model(LoRA(), seed=seed)
        assert torch.equal(logprobs(view), logprobs(plain))
        adapters.append(view.adapter_tensors())
    assert same_bits(adapters[0], adapters[1])
    assert not same_bits(adapters[0], adapters[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fresh_shared_critic_is_the_one_that_load_scalar_makes(tmp_path, small):
    small("qwen2").save_pretrained(tmp_path)
    critic = FrozenBaseModel(load_policy(str(tmp_path))).scalar_model(LoRA(), seed=3)
    alone = load_scalar(str(tmp_path), seed=3)
    assert torch.equal(token_values(critic, BATCH), token_values(alone, BATCH))


def test_a_step_changes_only_the_views_own_weights(small):
    base = FrozenBaseModel(small("llama"))
    views = {"policy": base.language_model(LoRA(r=2)), "critic": base.scalar_model(LoRA(r=2))}
    randomise(*views.values())
    for name, other in (("policy", "critic"), ("critic", "policy")):
        before, mine = bits(base.module), bits(views[name])
        theirs = bits(views[other])
        optimizer = torch.optim.AdamW(views[name].parameters(), lr=0.1)
        loss = logprobs(views[name]) if name == "policy" else token_values(views[name], BATCH)
        loss.sum().backward()
        optimizer.step()
        after = bits(base.module)
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        assert moved
        assert all(f".{name}." in n for n in moved)
        assert all(not torch.equal(mine[n], x) for n, x in bits(views[name]).items())
        assert same_bits(theirs, bits(views[other]))
        assert all(p.grad is None for p in views[other].parameters())
        views[name].zero_grad()


def test_a_view_lists_what_it_trains_and_no_more(small):
    base = FrozenBaseModel(small("llama"))
    policy, critic = base.language_model(LoRA(r=2)), base.scalar_model(LoRA(r=2))
    reward = base.scalar_model(LoRA(r=2), "reward", trainable=False)
    layers = 2 * 7
    assert len(list(policy.named_parameters())) == 2 * layers
    assert len(list(critic.named_parameters())) == 2 * layers + 1
    assert not list(base.language_model(None).parameters())
    assert all(p.requires_grad for v in (policy, critic) for p in v.parameters())
    assert not any(p.requires_grad for p in reward.parameters())
    mine = {*policy.parameters(), *critic.parameters()} - {*critic.score.parameters()}
    assert {p for p in base.module.parameters() if p.requires_grad} == mine


def test_an_error_inside_a_pass_leaves_the_base_as_it_was(small):
    base = FrozenBaseModel(small("llama"))
    policy, reference = base.language_model(LoRA(r=2)), base.language_model(None)
    randomise(policy)
    before = logprobs(reference)
    with pytest.raises(IndexError):
        policy(input_ids=torch.tensor([[1000]]))
    assert torch.equal(logprobs(reference), before)
    assert torch.equal(base.module(BATCH.ids).logits, small("llama")(BATCH.ids).logits)


@torch.no_grad()
def test_a_policy_decodes_with_a_cache(small):
    policy = FrozenBaseModel(small("llama")).language_model(LoRA(r=4))
    randomise(policy)
    ids = torch.arange(3, 13)[None]
    first = policy.eval()(input_ids=ids[:, :6], use_cache=True)
    rest = policy(input_ids=ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(rest.logits, policy(input_ids=ids).logits[:, 6:])
    assert not policy.module.training
    assert policy.train().module.training


@torch.no_grad()
@pytest.mark.parametrize("name", SOME)
def test_a_merged_model_needs_no_peft(tmp_path, small, name):
    base = FrozenBaseModel(small(name))
    policy, critic = base.language_model(LoRA(r=4)), base.scalar_model(LoRA(r=4, use_rslora=True))
    randomise(policy, critic)
    before = bits(base.module)
    policy.save_pretrained(tmp_path / "policy")
    critic.save_pretrained(tmp_path / "critic")
    assert same_bits(before, bits(base.module))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    torch.testing.assert_close(logprobs(plain), logprobs(policy), rtol=1e-4, atol=1e-5)
    streamed = dict(merged_tensors(policy))
    assert same_bits(streamed, plain.state_dict())
    scalar = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert scalar.config.num_labels == 1
    torch.testing.assert_close(
        token_values(scalar, BATCH), token_values(critic, BATCH), rtol=1e-4, atol=1e-5
    )
    files = {p.name for p in (tmp_path / "policy").iterdir()}
    assert files >= {"config.json", "model.safetensors"}
    assert "adapter_config.json" not in files


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox"])
def test_one_adapter_on_a_classifier_trains_its_head_and_comes_back(tmp_path, small, name):
    small(name).save_pretrained(tmp_path / "base")
    base = FrozenBaseModel(load_scalar(str(tmp_path / "base"), seed=2), str(tmp_path / "base"))
    model = base.scalar_model(LoRA(r=4), "default")
    randomise(model)
    assert model.score.weight.requires_grad
    untrained = load_scalar(str(tmp_path / "base"), seed=2)
    assert torch.equal(final_scores(base.scalar_model(None), BATCH), final_scores(untrained, BATCH))
    model.save_pretrained(tmp_path / "reward")
    scores = final_scores(model, BATCH)
    merged = load_scalar(str(tmp_path / "reward"))
    torch.testing.assert_close(final_scores(merged, BATCH), scores, rtol=1e-4, atol=1e-5)
    # The adapter beside it, by peft alone, and on a language model's base that others share.
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    wrapped = peft.PeftModel.from_pretrained(plain, tmp_path / "reward" / "adapter")
    torch.testing.assert_close(final_scores(wrapped.base_model.model, BATCH), scores)
    adapter = find_adapter(tmp_path / "reward")
    assert adapter == tmp_path / "reward" / "adapter"
    assert is_scalar_adapter(adapter)
    shared = FrozenBaseModel(load_policy(str(tmp_path / "base")), str(tmp_path / "base"))
    again = shared.scalar_model(adapter, "reward", trainable=False)
    assert torch.equal(final_scores(again, BATCH), scores)


@torch.no_grad()
def test_adapters_alone_load_in_plain_peft_and_go_on_here(saved, small):
    base, views, folder = saved
    expected = logprobs(views["policy"])
    base.merge = False
    views["policy"].save_pretrained(folder / "alone")
    assert adapter_base(folder / "alone") == str(folder / "base")
    assert adapter_base(folder / "policy") is None  # a plain model, with an adapter beside it
    assert not (folder / "alone" / "config.json").exists()
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "alone")
    assert torch.equal(logprobs(loaded), expected)
    other = FrozenBaseModel(small("llama"))  # the weights decide, wherever they came from
    again = other.language_model(folder / "alone")
    assert torch.equal(logprobs(again), expected)
    assert all(p.requires_grad for p in again.parameters())
    critic = other.scalar_model(
        folder / "alone", "critic", seed=3
    )  # starts as a reader like the policy
    assert torch.equal(
        critic.base_model(BATCH.ids).last_hidden_state,
        again.base_model(BATCH.ids).last_hidden_state,
    )


@torch.no_grad()
@pytest.mark.parametrize("name", SOME)
def test_an_adapter_merges_into_its_base(tmp_path, small, name):
    base = FrozenBaseModel(small(name), str(tmp_path / "base"))
    policy, reward = base.language_model(LoRA(r=4)), base.scalar_model(LoRA(r=4), "reward")
    randomise(policy, reward)
    save_adapter(policy, tmp_path / "policy")
    save_adapter(reward, tmp_path / "reward")
    small(name).save_pretrained(tmp_path / "base")
    model = merge_adapter(load_policy(str(tmp_path / "base")), tmp_path / "policy")
    torch.testing.assert_close(logprobs(model), logprobs(policy), rtol=1e-4, atol=1e-5)
    assert model.state_dict().keys() == small(name).state_dict().keys()
    scalar = merge_adapter(load_scalar(str(tmp_path / "base")), tmp_path / "reward")
    assert type(scalar.score) is torch.nn.Linear
    expected = final_scores(reward, BATCH)
    torch.testing.assert_close(final_scores(scalar, BATCH), expected, rtol=1e-4, atol=1e-5)
    # A language model's adapter under a fresh head: where a critic may start.
    critic = merge_adapter(load_scalar(str(tmp_path / "base"), seed=3), tmp_path / "policy")
    torch.testing.assert_close(
        critic.base_model(BATCH.ids).last_hidden_state,
        policy.base_model(BATCH.ids).last_hidden_state,
        rtol=1e-4,
        atol=1e-4,
    )


def test_an_adapter_of_another_base_is_refused(saved, small):
    _, _, folder = saved
    adapter = folder / "reward" / "adapter"
    with pytest.raises(ModelError, match=r"base, not on elsewhere.*shared_base: false"):
        FrozenBaseModel(small("llama", seed=1), "elsewhere").scalar_model(adapter)
    with pytest.raises(ModelError, match="has changed since"):
        FrozenBaseModel(small("llama", seed=1), str(folder / "base")).scalar_model(adapter)
    (adapter / "base.json").unlink()  # an adapter by peft alone: only a name to go by
    FrozenBaseModel(small("llama", seed=1), str(folder / "base")).scalar_model(adapter)
    with pytest.raises(ModelError, match="not on elsewhere"):
        FrozenBaseModel(small("llama"), "elsewhere").scalar_model(adapter)


def test_damaged_and_unfit_adapters_are_refused_with_a_sentence(saved, small):
    _, _, folder = saved
    adapter = folder / "reward" / "adapter"
    with pytest.raises(ModelError, match="cannot write"):
        FrozenBaseModel(small("llama")).language_model(adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"r": 5}))
    with pytest.raises(ModelError, match="not those that its adapter_config"):
        FrozenBaseModel(small("llama")).scalar_model(adapter)
    with pytest.raises(ModelError, match="does not fit its base"):
        merge_adapter(small("llama", scalar=True), adapter)
    with pytest.raises(ModelError, match="does not fit its base"):
        merge_adapter(small("gpt2"), folder / "policy" / "adapter")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"pickled weights \(.bin\) are not read"):
        merge_adapter(small("llama", scalar=True), adapter)
    settings["base_model_name_or_path"] = None
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="does not say which model it belongs to"):
        adapter_base(adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="is damaged"):
        adapter_base(adapter)


@pytest.mark.parametrize("keep", [0.5, 0.0])
def test_a_damaged_weights_file_is_a_sentence(saved, small, keep):
    _, _, folder = saved
    file = folder / "reward" / "adapter" / "adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ModelError, match=r"adapter_model.safetensors is damaged .*Save"):
        merge_adapter(small("llama", scalar=True), file.parent)
    with pytest.raises(ModelError, match=r"adapter_model.safetensors is damaged .*Save"):
        FrozenBaseModel(small("llama")).scalar_model(file.parent)


def test_weights_that_an_adapter_lacks_are_not_left_random(saved, small):
    from safetensors.torch import load_file, save_file

    _, _, folder = saved
    file = folder / "policy" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(min(tensors))
    save_file(tensors, file)
    with pytest.raises(ModelError, match="some of its weights are missing"):
        merge_adapter(small("llama"), file.parent)


def test_a_users_own_config_holds_but_for_dropout(small):
    own = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj"], lora_dropout=0.05)
    with pytest.warns(UserWarning, match="lora_dropout 0.05 is taken as 0"):
        config = to_peft(own, "scalar")
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 7, 0)
    assert config.task_type == "SEQ_CLS"
    assert own.lora_dropout == 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base = FrozenBaseModel(small("llama"))
        view = base.language_model(peft.LoraConfig(r=3, target_modules=["q_proj"]))
        base.scalar_model(peft.LoraConfig(task_type="CAUSAL_LM"))
    assert [p.shape for p in view.parameters()] == [(3, 32), (32, 3)] * 2


@pytest.mark.parametrize(
    "setting",
    [
        {"bias": "all"},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"trainable_token_indices": [1]},
    ],
)
def test_settings_that_would_touch_the_base_are_refused(setting):
    with pytest.raises(ModelError, match=f"peft_config sets {next(iter(setting))}"):
        to_peft(peft.LoraConfig(**setting), "language")


def test_other_adapters_and_other_layers_are_refused(small):
    with pytest.raises(ModelError, match=r"must be a peft.LoraConfig; got a IA3Config"):
        to_peft(peft.IA3Config(), "language")
    with pytest.raises(ModelError, match=r"choose from: .*q_proj.*up_proj"):
        FrozenBaseModel(small("llama")).language_model(LoRA(target_modules=("query",)))
    adapted = peft.get_peft_model(small("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ModelError, match="already has adapters"):
        FrozenBaseModel(adapted)
    for name in ("lm_head", "embed_tokens"):
        with pytest.raises(ModelError, match=f"reach .*{name}"):
            FrozenBaseModel(small("llama")).language_model(LoRA(target_modules=(name, "q_proj")))


def test_settings_are_checked():
    for wrong in ({"r": 0}, {"alpha": 0}, {"alpha": float("nan")}, {"target_modules": ()}):
        with pytest.raises(ValueError, match=f"lora.{next(iter(wrong))}"):
            LoRA(**wrong)


def test_without_peft_there_is_a_sentence(monkeypatch, small):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'marlhf\[lora\]'"):
        FrozenBaseModel(small("llama")).language_model(LoRA())


def test_without_bitsandbytes_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert quantization(LoRA()) is None
    with pytest.raises(ModelError, match=r"pip install .marlhf\[quant\]"):
        quantization(LoRA(quantize="4bit"))


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "gpt-neox"])
def test_matrices_in_bfloat16_change_no_bit_under_autocast(small, name):
    device = torch.device("cpu")
    assert frozen_dtype(device, "auto") is None
    found = []
    for matrices in (None, frozen_dtype(device, "bfloat16")):
        base = FrozenBaseModel(small(name), linear_dtype=matrices)
        views = base.language_model(LoRA(r=4)), base.scalar_model(LoRA(r=4))
        randomise(*views)
        assert {p.dtype for view in views for p in view.parameters()} == {torch.float32}
        assert base.module.get_input_embeddings().weight.dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            out = logprobs(views[0]), token_values(views[1], BATCH)
        sum(x.sum() for x in out).backward()
        found.append([*out, *(p.grad for view in views for p in view.parameters())])
    stored = {layer.get_base_layer().weight.dtype for _, layer in base.adapted_layers()}
    assert stored == {torch.bfloat16}
    for plain, half in zip(*found):
        torch.testing.assert_close(plain, half, rtol=0, atol=0)


@torch.no_grad()
def test_what_is_merged_into_bfloat16_keeps_small_changes(tmp_path, small):
    base = FrozenBaseModel(small("llama"), linear_dtype=torch.bfloat16)
    policy = base.language_model(LoRA(r=4))
    randomise(policy)
    for parameter in policy.parameters():
        parameter *= 0.01
    policy.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.dtype == torch.float32
    path, layer = next(base.adapted_layers())
    change = plain.get_parameter(f"{path}.weight") - layer.get_base_layer().weight.float()
    torch.testing.assert_close(change, layer.get_delta_weight("policy"), rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_a_quantised_base_is_trained_on_and_merged_in_floats(tmp_path, small, kind):
    pytest.importorskip("bitsandbytes")
    small("llama", hidden_size=64, intermediate_size=64).save_pretrained(tmp_path / "base")
    options = {"dtype": torch.float32, "quantization_config": quantization(LoRA(quantize=kind))}
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **options)
    base = FrozenBaseModel(module, str(tmp_path / "base"))
    policy, critic = base.language_model(LoRA(r=4)), base.scalar_model(LoRA(r=4))
    randomise(policy, critic)
    before = logprobs(policy)
    (before.sum() + token_values(critic, BATCH).sum()).backward()
    assert all(p.grad is not None for p in (*policy.parameters(), *critic.parameters()))
    policy.save_pretrained(tmp_path / "policy")
    assert torch.equal(logprobs(policy), before)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert plain.dtype == torch.float32
    assert (logprobs(plain) - before).abs().max() < 0.2
    assert (logprobs(base.language_model(None)) - before).abs().max() > 0.2
    again = base.language_model(
        tmp_path / "policy" / "adapter", "again"
    )  # no digest: the name decides
    assert torch.equal(logprobs(again), before)


def test_layers_of_a_4_bit_base_keep_bfloat16_for_the_backward_pass(tmp_path, small):
    pytest.importorskip("bitsandbytes")
    small("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    options = {"dtype": torch.float32, "quantization_config": quantization(LoRA(quantize="4bit"))}
    module = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    policy = FrozenBaseModel(module, linear_dtype=torch.bfloat16).language_model(LoRA(r=4))
    assert module.lm_head.weight.dtype == torch.bfloat16  # as on a base that is not quantised
    randomise(policy)
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
    ):
        logprobs(policy).sum().backward()
    of_mlp = [x.dtype for x in kept if x.ndim == 3 and x.shape[-1] == 128]
    assert len(of_mlp) >= 4  # what SiLU and the product read, of each of two layers
    assert set(of_mlp) == {torch.bfloat16}
