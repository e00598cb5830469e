"""Everything compiles as one graph and gives what eager gives."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from marlhf.core import (
    Constituents,
    Lines,
    NGram,
    Perplexity,
    RandomNGram,
    Responses,
    Segments,
    Sentences,
    Surprise,
    Turns,
    Vocabulary,
    Words,
    boundary_gae,
    gae,
    macro_gae,
    ppo_policy_loss,
    ppo_value_loss,
    rloo_advantages,
    segment,
    shape_rewards,
    tree_advantages,
    whiten,
)
from marlhf.train.agreement import gradient_agreement


@pytest.fixture
def inputs() -> tuple[Responses, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.arange(24) < torch.tensor([24, 0, 1, 13])[:, None]
    flags = [torch.rand(50) < p for p in (0.5, 0.1, 0.1, 0.1, 0.1)]
    spans = torch.tensor([[[0, 9], [0, 4], [4, 9], [5, 8]]]).repeat(4, 1, 1)
    responses = Responses(
        tokens=torch.randint(50, mask.shape),
        mask=mask,
        ref_logprobs=-torch.rand(mask.shape),
        spans=spans,
        vocabulary=Vocabulary(*flags),
        seeds=torch.arange(4),
        logprobs=-3 * torch.rand(mask.shape),
    )
    return responses, -torch.rand(mask.shape), torch.randn(mask.shape)


RULES = [
    NGram(1),
    NGram(5),
    NGram(float("inf")),
    RandomNGram(),
    Perplexity("macro"),
    Perplexity("macro", max_length=4),
    Perplexity("prefix"),
    Perplexity("token", max_length=4),
    Constituents(5, max_length=8),
    Words(),
    Sentences(),
    Lines(),
    Turns(max_length=7),
    Surprise(),
]


def step(responses: Responses, logprobs, values, rule, sigma="equal", ratio="token"):
    segments = segment(rule, responses)
    rewards = shape_rewards(values[:, 0], logprobs, responses.ref_logprobs, responses.mask, 0.1)
    advantages, returns = macro_gae(rewards, values, segments, rho=0.9, sigma=sigma)
    mask = responses.mask
    white = whiten(advantages, mask)
    policy = ppo_policy_loss(
        logprobs, responses.ref_logprobs, white, mask, ratio=ratio, segments=segments
    )
    level = "token" if ratio == "token" else "macro"
    value = ppo_value_loss(
        values, values + 1, returns, mask, level=level, sigma=sigma, segments=segments
    )
    group = rloo_advantages(rewards, 2, segments)
    return policy + value, advantages + group, segments.ids


def test_the_whole_step_compiles_as_one_graph(inputs):
    responses, logprobs, values = inputs
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=False)
    cases = [("unit", "token"), ("position", "macro_mean"), ("start", "macro"), ("equal", "macro")]
    for sigma, ratio in cases:
        wanted = step(responses, logprobs, values, NGram(5), sigma, ratio)
        torch._dynamo.reset()
        got = compiled(responses, logprobs, values, NGram(5), sigma, ratio)
        for g, w in zip(got, wanted):
            torch.testing.assert_close(g, w, msg=f"{sigma} {ratio}")


def test_every_rule_compiles_as_one_graph(inputs):
    """Whatever the rule, the rest of a step gets tensors of one layout: one rule will do there."""
    responses, _, _ = inputs
    layout = [(x.dtype, x.shape, x.stride()) for x in vars(segment(NGram(5), responses)).values()]
    compiled = torch.compile(segment, fullgraph=True, backend="aot_eager", dynamic=False)
    for rule in RULES:
        wanted = segment(rule, responses)
        torch._dynamo.reset()
        got = vars(compiled(rule, responses)).values()
        assert [(x.dtype, x.shape, x.stride()) for x in got] == layout, rule
        for g, w in zip(got, vars(wanted).values()):
            torch.testing.assert_close(g, w, msg=str(rule))


def test_boundary_advantages_and_agreement_compile_as_one_graph(inputs):
    responses, _, values = inputs
    holes = torch.rand(responses.mask.shape) < 0.7
    responses = replace(responses, mask=responses.mask & holes)

    def compare(responses: Responses, values):
        segments = segment(Surprise(), responses)
        token = gae(values, values, segments.mask)[0]
        boundary = boundary_gae(values, values, segments, lam=0.9, lam_value=1.0)
        macro = macro_gae(values, values, segments, lam=0.9, lam_value=1.0)
        agreement = gradient_agreement(torch.stack((boundary[0], macro[0])), token)
        return (*boundary, *macro, *agreement)

    compiled = torch.compile(compare, fullgraph=True, backend="aot_eager", dynamic=False)
    for got, wanted in zip(compiled(responses, values), compare(responses, values)):
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("baseline", ["leave_one_out", "group"])
def test_tree_advantages_compile_as_one_graph(inputs, baseline):
    responses, _, values = inputs
    rewards = values.repeat_interleave(4, dim=0)
    levels = torch.arange(values.shape[1]).ge(6).long().expand_as(rewards)
    mask = responses.mask.repeat_interleave(4, dim=0)

    def credit(rewards, levels, mask):
        segments = Segments.from_starts(levels != levels.roll(1, dims=1), mask)
        return tree_advantages(rewards, (2, 2), levels, segments, baseline=baseline)

    compiled = torch.compile(credit, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(rewards, levels, mask), credit(rewards, levels, mask))


@pytest.mark.slow
def test_inductor_gives_the_same_losses_and_gradients(inputs):
    responses, logprobs, values = inputs
    segments = segment(NGram(5), responses)

    def losses(logprobs, values, segments: Segments):
        advantages, returns = macro_gae(values.detach(), values.detach(), segments)
        mask = segments.mask
        return ppo_policy_loss(logprobs, responses.ref_logprobs, advantages, mask) + ppo_value_loss(
            values, values.detach(), returns, mask
        )

    # No programs of its own to try what /proc/cpuinfo says the CPU has, which take half the time.
    options = {"cpp.vec_isa_ok": True}
    compiled_losses = torch.compile(losses, fullgraph=True, options=options)
    results = []
    for function in (losses, compiled_losses):
        leaves = [x.clone().requires_grad_() for x in (logprobs, values)]
        loss = function(*leaves, segments)
        loss.backward()
        results.append((loss.detach(), *(x.grad for x in leaves)))
    for eager, compiled in zip(*results):
        torch.testing.assert_close(eager, compiled)


@pytest.fixture
def on_gpu(inputs) -> tuple[Responses, torch.Tensor, torch.Tensor]:
    def move(x):
        return x.cuda() if isinstance(x, torch.Tensor) else x

    responses, logprobs, values = inputs
    flags = vars(responses.vocabulary)
    there = Responses(
        **{k: move(v) for k, v in vars(responses).items() if k != "vocabulary"},
        vocabulary=Vocabulary(**{k: move(v) for k, v in flags.items()}),
    )
    return there, logprobs.cuda(), values.cuda()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_whole_step_is_captured_in_a_cuda_graph(rule, request):
    there, logprobs, values = request.getfixturevalue("on_gpu")
    wanted = step(there, logprobs, values, rule)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(there, logprobs, values, rule)
    graph.replay()
    for c, w in zip(captured, wanted):
        torch.testing.assert_close(c, w)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("sigma", ["equal", "unit", "position", "start"])
def test_nothing_waits_for_the_device(rule, sigma, request):
    there, logprobs, values = request.getfixturevalue("on_gpu")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ratio in ("token", "macro", "macro_mean"):
            step(there, logprobs, values, rule, sigma, ratio)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gae_compiles(inputs):
    _, logprobs, values = inputs
    mask = inputs[0].mask
    compiled = torch.compile(gae, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logprobs, values, mask), gae(logprobs, values, mask))


def test_the_core_needs_only_torch():
    code = (
        "import sys; before = set(sys.modules); import torch; torch_modules = set(sys.modules);"
        "import marlhf.core; new = {m.split('.')[0] for m in set(sys.modules) - torch_modules};"
        "print(sorted(new))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['marlhf']"
