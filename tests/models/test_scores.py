import pytest
import torch

from marlhf.models.forward import Sequences, plain_token_stats, token_stats
from marlhf.models.scores import TokenScores

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
    scores = TokenScores(size=None)
    logprobs = stats(model, sequences, scores=scores).logprobs
    # Some other loss of the log-probs, as PPO's: what it weighs tokens by does not matter.
    loss_weights = torch.rand(sequences.mask.shape, generator=generator) + 0.5
    (-3 * loss_weights * logprobs).sum().backward()
    found = scores.gradients(weights[:, sequences.mask])
    for row, expected in zip(found, weights):
        wanted = exact(model, sequences, expected, stats)
        torch.testing.assert_close(row.view_as(wanted), wanted, rtol=1e-3, atol=1e-5)


def test_a_sketch_keeps_inner_products():
    generator = torch.Generator().manual_seed(0)
    whole, sketch = TokenScores(size=None), TokenScores()
    hidden = torch.randn(300, 64, generator=generator)
    grad = torch.randn(300, 64, generator=generator)
    for scores in (whole, sketch):
        scores._hidden, scores._hidden_grad = hidden, grad
        scores._logprob_grad = torch.ones(300)
    weights = torch.randn(6, 300, generator=generator) + 0.5
    exact, short = whole.gradients(weights), sketch.gradients(weights)
    assert short.shape == (6, 576)
    norms = exact.norm(dim=1)
    off = (short @ short.T - exact @ exact.T) / (norms[:, None] * norms)
    assert float(off.abs().mean()) < 0.1


def test_a_token_whose_loss_is_clipped_counts_nothing(small):
    model = small("llama")
    sequences = Sequences.from_lists(PROMPTS[:1], RESPONSES[:1], 0)
    scores = TokenScores(size=None)
    logprobs = token_stats(model, sequences, scores=scores).logprobs
    (logprobs * torch.tensor([[1.0, 0.0, 1.0]])).sum().backward()
    found = scores.gradients(torch.tensor([[0.0, 1.0, 0.0]]))
    assert float(found.abs().max()) == 0
