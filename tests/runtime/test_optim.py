"""An update that would harm is refused, and leaves weights and optimiser as they were."""

import copy

import pytest
import torch

from marlhf.runtime.distributed import start
from marlhf.runtime.optim import Diverged, Update, apply_updates, make_optimizer

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
