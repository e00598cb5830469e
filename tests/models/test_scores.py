import pytest
import torch

from marlhf.models.forward import Sequences, plain_token_stats, token_stats
from marlhf.models.logprobs import BLOCK, BLOCKS, TokenScores, sketch

PROMPTS = [[5, 6, 7, 8], [9, 3], [20]]
RESPONSES = [[4, 2, 11], [8, 9, 10, 11, 12], []]


def exact(model, sequences, weights, stats):
    """The gradient of sum(weights * log-probs) by a linear map in front of the head."""
    head = model.get_output_embeddings()
    size = head.weight.shape[1]
    change = torch.zeros(size, size, requires_grad=True)

    def insert(_, args):
        return (args[0] + args[0] @ change.T, *args[1:])

    handle = head.register_forward_pre_hook(insert)
    try:
        logprobs = plain_token_stats(model, sequences).logprobs
    finally:
        handle.remove()
    return torch.autograd.grad((weights * logprobs).sum(), change)[0]


@pytest.mark.parametrize("stats", [token_stats, plain_token_stats])
def test_gradients_are_those_of_a_linear_map_before_the_head(small, stats):
    model = small("llama")
    sequences = Sequences.from_lists(PROMPTS, RESPONSES, 0)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, *sequences.mask.shape, generator=generator)
    scores = TokenScores(None)
    logprobs = stats(model, sequences, scores=scores).logprobs
    found = scores.gradients(weights[:, sequences.mask])
    logprobs.sum().backward()  # the graph is still there for a loss
    for row, expected in zip(found, weights):
        wanted = exact(model, sequences, expected, stats)
        torch.testing.assert_close(row.view_as(wanted), wanted, rtol=1e-3, atol=1e-5)


def test_a_sketch_keeps_inner_products_of_gradients_with_a_low_rank():
    """Policy gradients have a stable rank near 3: few directions carry most of the norm."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 300, 64, generator=generator)
    left[:, 3:] *= 0.1
    weights = torch.randn(6, 300, generator=generator) + 0.5
    exact = sketch(left, right, weights, None)
    norms = exact.norm(dim=1)
    assert float((norms[0] / torch.linalg.matrix_norm(exact[0].view(64, 64), 2)) ** 2) < 4
    off = []
    for seed in range(8):
        short = sketch(left, right, weights, [seed] * BLOCKS)
        assert short.shape == (6, BLOCKS * BLOCK)
        off.append((short @ short.T - exact @ exact.T) / (norms[:, None] * norms))
    assert float(torch.stack(off).square().mean().sqrt()) < 0.06
    assert float(torch.stack(off).mean(dim=0).abs().max()) < 0.05  # right in the mean


def test_a_token_that_the_loss_clips_counts_all_the_same(small):
    """Its log-prob has no part in the loss, but a part in the gradient that is measured."""
    model = small("llama")
    sequences = Sequences.from_lists(PROMPTS[:1], RESPONSES[:1], 0)
    weights = torch.tensor([[[0.0, 1.0, 0.0]]])
    scores = TokenScores(None)
    logprobs = token_stats(model, sequences, scores=scores).logprobs
    measured = scores.gradients(weights[:, sequences.mask])
    (logprobs * torch.tensor([[1.0, 0.0, 1.0]])).sum().backward()
    wanted = exact(model, sequences, weights[0], token_stats)
    torch.testing.assert_close(measured[0].view_as(wanted), wanted, rtol=1e-3, atol=1e-5)
