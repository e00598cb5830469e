"""An update that would harm is refused, and leaves weights and optimiser as they were."""

import copy

import pytest
import torch

from marlhf.errors import SettingError
from marlhf.models.base import cast_trained_weights
from marlhf.models.load import load_scalar
from marlhf.runtime.distributed import start
from marlhf.runtime.optim import (
    Diverged,
    Update,
    apply_updates,
    make_optimizer,
    set_learning_rate,
)
from marlhf.train.supervised_config import SFTConfig

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def learner(device, scale=1.0):
    """A model that has moved once, with gradients for a second update."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = make_optimizer(model, 0.1)
    for _ in range(2):
        model(torch.ones(1, 3, device=device)).sum().backward()
        if optimizer.state:
            break
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad *= scale
    return Update(model, optimizer, 0.01)


def state(update):
    tensors = [v.clone() for s in update.optimizer.state.values() for v in s.values()]
    return [p.detach().clone() for p in update.model.parameters()] + tensors


def same(update, before):
    return all(torch.equal(a, b) for a, b in zip(state(update), before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_an_update_is_that_of_the_plain_optimiser(device):
    update = learner(device)
    plain = copy.deepcopy(update.model)
    optimizer = make_optimizer(plain, 0.01)
    optimizer.load_state_dict(copy.deepcopy(update.optimizer.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    for ours, theirs in zip(update.model.parameters(), plain.parameters()):
        theirs.grad = ours.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    [found] = apply_updates([update], 0.5, start(device), [])
    assert torch.equal(found, norm)
    for ours, theirs in zip(update.model.parameters(), plain.parameters()):
        assert torch.equal(ours, theirs)
        assert ours.grad is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(device, scale):
    update = learner(device, scale)
    before = state(update)
    with pytest.raises(Diverged, match=f"the gradient of weight is {scale}"):
        apply_updates([update], 1.0, start(device), [])
    assert same(update, before)
    assert all(p.grad is None for p in update.model.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_no_model_moves_where_something_else_is_not_finite(device):
    updates = [learner(device), learner(device)]
    before = [state(update) for update in updates]
    bad = torch.tensor([0.0, torch.nan, torch.inf], device=device)
    finite = [("the scores", torch.ones(3, device=device)), ("the values", bad)]
    with pytest.raises(Diverged, match="2 of 3 values of the values"):
        apply_updates(updates, 1.0, start(device), finite)
    assert all(map(same, updates, before))


@pytest.mark.parametrize("device", DEVICES)
def test_no_model_moves_where_another_has_a_bad_gradient(device):
    good, bad = learner(device), learner(device, torch.nan)
    before = [state(good), state(bad)]
    with pytest.raises(Diverged, match="the gradient of weight"):
        apply_updates([good, bad], 1.0, start(device), [])
    assert all(map(same, (good, bad), before))


def test_other_optimisers_are_not_stepped_either():
    update = learner("cpu", torch.nan)
    plain = torch.optim.SGD(update.model.parameters(), 0.1)
    before = [p.detach().clone() for p in update.model.parameters()]
    with pytest.raises(Diverged):
        apply_updates([update._replace(optimizer=plain)], 1.0, start("cpu"), [])
    assert all(map(torch.equal, update.model.parameters(), before))


SAVING = [("adamw_8bit", False), ("adamw_8bit", True), ("adafactor", False)]


@pytest.mark.parametrize(("name", "half"), SAVING)
def test_optimisers_that_save_memory_learn_what_adamw_does(name, half):
    """A regression on 8192 weights, enough for moments of 8 bits: losses stay close to AdamW's."""
    if name == "adamw_8bit":
        pytest.importorskip("torchao")

    def losses(name, half):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64)
        )
        x, target = torch.randn(2, 256, 64)
        if half:
            cast_trained_weights(model)
        optimizer, found = make_optimizer(model, 6e-3, name=name), []
        for _ in range(30):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
                loss = (model(x).float() - target).square().mean()
            loss.backward()
            apply_updates([Update(model, optimizer, 6e-3)], 1.0, start("cpu"), [])
            found.append(loss.item())
        return torch.tensor(found)

    expected, found = losses("adamw", False), losses(name, half)
    assert expected[-1] < 0.6 * expected[0]
    bound = 0.05 if name == "adamw_8bit" else 0.5  # Adafactor has no momentum
    assert ((found - expected).abs() < bound * expected).all()


def test_small_updates_are_not_lost_in_bfloat16():
    """A hundred steps, each a hundredth of what bfloat16 can tell apart at 1, are not nothing."""
    pytest.importorskip("torchao")
    weight = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.ones_(weight.weight)
    cast_trained_weights(weight)
    optimizer = make_optimizer(weight, 2**-14, name="adamw_8bit")
    for _ in range(100):
        weight.weight.grad = torch.ones_like(weight.weight)
        optimizer.step()
    moved = 1 - weight.weight.float().mean()
    torch.testing.assert_close(moved.item(), 100 * 2**-14, rtol=0.1, atol=0)


def test_rounding_depends_on_the_step_alone():
    """So that ranks whose generators differ move alike, and the run's own numbers stay."""
    pytest.importorskip("torchao")

    def moved(seed):
        model = torch.nn.Linear(64, 64)
        torch.nn.init.constant_(model.weight, 0.3)
        cast_trained_weights(model)
        torch.manual_seed(seed)
        optimizer = make_optimizer(model, 1e-4, name="adamw_8bit")
        model.weight.grad = torch.linspace(-1, 1, 4096).view(64, 64).to(torch.bfloat16)
        optimizer.step()
        return model.weight.detach(), torch.rand(1)

    (first, _), (second, drawn) = moved(1), moved(2)
    assert torch.equal(first, second)
    torch.manual_seed(2)
    assert torch.equal(drawn, torch.rand(1))


def test_heads_and_vectors_stay_in_float32():
    model = load_scalar("tiny")
    cast_trained_weights(model)
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert kinds["score.weight"] == kinds["model.norm.weight"] == torch.float32
    assert kinds["model.embed_tokens.weight"] == torch.bfloat16


def test_a_rate_reaches_every_optimiser():
    model = torch.nn.Linear(2, 2)
    for name in ("adamw", "adafactor", "adamw_8bit"):
        if name == "adamw_8bit":
            pytest.importorskip("torchao")
        optimizer = make_optimizer(model, 0.5, 0.0, name, betas=(0.8, 0.9))
        if name != "adafactor":
            assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
        set_learning_rate(optimizer, 0.25)
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"trained_weights": "bfloat16"}, "Set optimizer: adamw_8bit"),
        ({"adam_betas": (0.9, 1.0)}, "adam_betas lie from 0 to below 1"),
        ({"optimizer": "adafactor", "parallel": "fsdp"}, "not for weights in shards"),
        (
            {
                "trained_weights": "bfloat16",
                "optimizer": "adamw_8bit",
                "precision": "float32",
            },
            "contradict",
        ),
    ],
)
def test_settings_that_do_not_work_together_are_refused(settings, sentence):
    with pytest.raises(SettingError, match=sentence):
        SFTConfig(model="tiny", output_dir="unused", **settings)
