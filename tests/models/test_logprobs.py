import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig
from transformers.modeling_outputs import CausalLMOutput

import marlhf.kernels as kernels
from marlhf.models import forward
from marlhf.models.forward import Sequences, plain_token_stats, token_stats
from marlhf.models.logprobs import LogitRule, chosen_logprobs, fit_rule, probe

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [0, 3], [20], [1, 0]]
RESPONSES = [[4, 0, 1], [8, 9, 10, 11, 12, 13, 1], [], [0]]


def batch():
    return Sequences.from_lists(PROMPTS, RESPONSES, 0)


def compare(model, atol=1e-5, **options):
    """Values, entropies and all gradients of the fast path against the plain one."""
    found = []
    for stats in (token_stats, plain_token_stats):
        model.zero_grad()
        logprobs, entropy = stats(model, batch(), entropy=True, **options)
        assert entropy is not None
        weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
        (logprobs * weights).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([logprobs.detach(), entropy, *gradients])
    fast, plain = found
    assert len(fast) == len(plain) > 2
    for a, b in zip(fast, plain):
        torch.testing.assert_close(a, b, atol=atol * max(1, float(b.abs().max())), rtol=0)


def fast_only(monkeypatch):
    """Let a test fail where the plain path would help out."""
    monkeypatch.setattr(forward, "plain_token_stats", None)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_family_gives_the_plain_values_and_gradients(small, family, temperature, monkeypatch):
    fast_only(monkeypatch)
    compare(small(family), temperature=temperature)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("family", ["llama-tied", "gemma2", "phi"])
def test_bfloat16_gives_the_plain_values_and_gradients_nearly(small, family, monkeypatch):
    fast_only(monkeypatch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(small(family), temperature=0.7, atol=0.03)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (GraniteConfig(logits_scaling=3.0), LogitRule(1 / 3)),
        (CohereConfig(logit_scale=0.125), LogitRule(0.125)),
    ],
    ids=["granite", "cohere"],
)
def test_scaled_logits_are_noticed(config, rule, monkeypatch):
    fast_only(monkeypatch)
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    for name, value in (sizes | heads | {"pad_token_id": 0, "initializer_range": 0.3}).items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config).eval()
    compare(model, temperature=0.7)
    assert forward.pass_choice(model).logit_rule.scale == pytest.approx(rule.scale, rel=1e-5)


def test_soft_caps_are_noticed(small):
    model = small("gemma2")
    token_stats(model, batch())
    assert forward.pass_choice(model).logit_rule == pytest.approx(LogitRule(1.0, 2.0))


class Squares(nn.Module):
    """A model that does something to its logits that no rule describes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(48, 8), nn.Linear(8, 48)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache):
        return CausalLMOutput(logits=self.head(self.embed(input_ids)).square())


def test_what_no_rule_describes_goes_the_plain_way():
    compare(Squares())
    size = 48
    assert fit_rule(probe(size, torch.device("cpu")), probe(size, torch.device("cpu"))[1:]) is None


def test_an_adapted_head_goes_the_plain_way(small):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
    compare(get_peft_model(small("llama"), lora))


def test_an_adapted_body_goes_the_fast_way(small, monkeypatch):
    from peft import LoraConfig, get_peft_model

    fast_only(monkeypatch)
    torch.manual_seed(0)
    lora = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    compare(get_peft_model(small("llama"), lora))


def test_a_hook_on_the_head_is_obeyed(small):
    model = small("llama")
    before, doubled = (token_stats(model, batch(), t).logprobs for t in (1.0, 0.5))
    handle = model.lm_head.register_forward_hook(lambda _, __, logits: logits * 2)
    torch.testing.assert_close(token_stats(model, batch()).logprobs, doubled)
    handle.remove()
    torch.testing.assert_close(token_stats(model, batch()).logprobs, before, atol=0, rtol=0)
    assert not model.lm_head._forward_hooks
    assert not model.lm_head._forward_pre_hooks


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(0.5), LogitRule(1.5, 3.0)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_finite_differences(rule, bias):
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "requires_grad": True}
    hidden, weight = torch.randn(5, 3, **options), torch.randn(7, 3, **options)
    tokens = torch.tensor([0, 6, 3, 3, 1])

    def run(hidden, weight, *rest):
        head = hidden, weight, rest[0] if rest else None
        return chosen_logprobs(*head, tokens, rule=rule, temperature=0.8, chunk=14)[0]

    inputs = (hidden, weight, torch.randn(7, **options)) if bias else (hidden, weight)
    assert torch.autograd.gradcheck(run, inputs)


def test_frozen_parts_have_no_gradient_and_change_no_other():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 3), torch.randn(7, 3)
    tokens, found = torch.tensor([0, 6, 3, 3, 1]), {}
    for trained in ("both", "hidden", "weight"):
        h = hidden.clone().requires_grad_(trained != "weight")
        w = weight.clone().requires_grad_(trained != "hidden")
        chosen_logprobs(h, w, None, tokens)[0].sum().backward()
        found[trained] = h.grad, w.grad
    assert found["hidden"][1] is None
    assert found["weight"][0] is None
    torch.testing.assert_close(found["hidden"][0], found["both"][0], atol=0, rtol=0)
    torch.testing.assert_close(found["weight"][1], found["both"][1], atol=0, rtol=0)


def test_a_sure_token_keeps_its_small_gradient_in_bfloat16():
    # Two logits apart by 9: the likelier one has probability 1 - 1.2e-4, 1 in bfloat16.
    weight = torch.tensor([[9.0], [0.0]])
    hidden = torch.ones(1, 1, requires_grad=True)
    chosen_logprobs(hidden, weight, None, torch.tensor([0]), dtype=torch.bfloat16)[0].backward()
    rest = 1 / (1 + torch.tensor(9.0).exp())
    torch.testing.assert_close(hidden.grad, (9 * rest)[None, None], rtol=0.02, atol=0)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes) if sizes else self.numbers
        return out


def test_all_logits_never_exist_at_once():
    hidden = torch.randn(64, 2, requires_grad=True)
    weight = torch.randn(100, 2, requires_grad=True)
    with Largest() as largest:
        logprobs, _ = chosen_logprobs(hidden, weight, None, torch.arange(64), chunk=800)
        logprobs.sum().backward()
    assert largest.numbers == 800
    plain = weight.grad.clone(), hidden.grad.clone()
    weight.grad = hidden.grad = None
    chosen_logprobs(hidden, weight, None, torch.arange(64))[0].sum().backward()
    torch.testing.assert_close((weight.grad, hidden.grad), plain)


def test_the_head_reads_no_padding(small, monkeypatch):
    shapes = []

    def spy(hidden, *args, **kwargs):
        shapes.append(hidden.shape)
        return chosen_logprobs(hidden, *args, **kwargs)

    monkeypatch.setattr(forward, "chosen_logprobs", spy)
    token_stats(small("llama"), batch())
    assert shapes == [(sum(map(len, RESPONSES)), 32)]


def test_the_kernels_twin_picks_log_probs():
    logits, tokens = torch.randn(4, 9), torch.tensor([0, 8, 2, 2])
    expected = logits.log_softmax(dim=1)[range(4), tokens]
    torch.testing.assert_close(kernels.pick(logits, tokens), expected)
