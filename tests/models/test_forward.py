import math

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from marlhf.errors import SettingError
from marlhf.models.forward import (
    Sequences,
    choose_passes,
    final_scores,
    plain_token_stats,
    token_stats,
    token_values,
)

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [0, 3], [20], [1, 0]]  # 0 pads, 1 is EOS; both occur
RESPONSES = [[4, 0, 1], [8, 9, 10, 11, 12, 13, 1], [], [0]]


def batch(pad_id=0, rows=(0, 1, 2, 3)):
    return Sequences.from_lists([PROMPTS[i] for i in rows], [RESPONSES[i] for i in rows], pad_id)


class Bigram(nn.Module):
    """Next-token logits that depend on the last token alone, to compute by hand with."""

    def __init__(self, logits):
        super().__init__()
        self.head = nn.Linear(len(logits), len(logits), bias=False)
        self.head.weight.data = torch.tensor(logits).T.contiguous()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache):
        hidden = nn.functional.one_hot(input_ids, self.head.in_features).float()
        return CausalLMOutput(logits=self.head(hidden))


class Depth(nn.Module):
    """A scalar model whose value is the sum of the tokens up to and with each one."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.score.weight)

    def base_model(self, input_ids, use_cache):
        seen = input_ids.cumsum(dim=1).float()
        return BaseModelOutput(last_hidden_state=seen[:, :, None])


@pytest.mark.parametrize("attention", ["eager", None])  # None is what transformers prefers
@torch.no_grad()
def test_padding_changes_nothing(small, family, attention):
    policy, scalar = small(family, attention=attention), small(family, True, attention)
    for pad_id in (0, 1):
        whole = batch(pad_id)
        logprobs = token_stats(policy, whole, temperature=0.7).logprobs
        values, scores = token_values(scalar, whole), final_scores(scalar, whole)
        for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
            alone = torch.tensor([prompt + response])
            states = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
            real = slice(0, len(response))
            expected = (policy(alone).logits / 0.7).log_softmax(dim=2)[0, states]
            expected = expected[range(len(response)), response]
            torch.testing.assert_close(logprobs[i, real], expected, atol=1e-5, rtol=0)
            hidden = scalar.base_model(alone).last_hidden_state
            expected = scalar.score(hidden)[0, :, 0]
            torch.testing.assert_close(values[i, real], expected[states], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(scores[i], expected[-1], atol=1e-5, rtol=1e-5)
            assert not logprobs[i, len(response) :].any()
            assert not values[i, len(response) :].any()


def test_logprobs_and_entropy_by_hand():
    model = Bigram([[0.0, math.log(3.0)], [0.0, 0.0]])
    sequences = Sequences.from_lists([[0]], [[1, 0]], pad_id=0)
    logprobs, entropy = token_stats(model, sequences, entropy=True)
    # after 0: 1/4 and 3/4; after 1: 1/2 and 1/2
    half = math.log(2)
    expected = [[math.log(3 / 4), -half]]
    torch.testing.assert_close(logprobs, torch.tensor(expected))
    first = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    torch.testing.assert_close(entropy, torch.tensor([[first, half]]))
    # at temperature 0.5 logits double: after 0 the odds are 1 to 9
    cold = token_stats(model, sequences, 0.5).logprobs
    torch.testing.assert_close(cold, torch.tensor([[math.log(9 / 10), -half]]))


def test_values_are_of_the_state_before_each_token():
    sequences = Sequences.from_lists([[1, 2], [4]], [[8, 16], [32]], pad_id=7)
    # before 8: 1 + 2; before 16: 3 + 8; before 32: 4
    expected = torch.tensor([[3.0, 11.0], [4.0, 0.0]])
    torch.testing.assert_close(token_values(Depth(), sequences), expected)


def test_scores_are_read_at_the_last_real_token():
    sequences = Sequences.from_lists([[1, 2], [4], [5]], [[8, 16], [32], []], pad_id=7)
    torch.testing.assert_close(final_scores(Depth(), sequences), torch.tensor([27.0, 36.0, 5.0]))


@torch.no_grad()
def test_a_batch_of_empty_responses_is_scored_and_has_no_logprobs(small):
    sequences = Sequences.from_lists([[5, 6], [7]], [[], []], pad_id=0)
    logprobs, entropy = token_stats(small("llama"), sequences, entropy=True)
    assert logprobs.shape == entropy.shape == (2, 0)
    scalar = small("llama", scalar=True)
    assert token_values(scalar, sequences).shape == (2, 0)
    assert final_scores(scalar, sequences).isfinite().all()


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"Rows \[1\] have no prompt.*BOS"):
        Sequences.from_lists([[5], []], [[6], [7]], pad_id=0)


@torch.no_grad()
def test_some_rows_without_others_padding_are_the_same_rows(small):
    whole = batch()
    some = whole.rows([3, 1])
    assert some.ids.tolist() == [[1, 0, 0] + [0] * 6, [0, 3, 8, 9, 10, 11, 12, 13, 1]]
    assert some.before.tolist() == [[1] + [0] * 6, [1, 2, 3, 4, 5, 6, 7]]
    assert (some.responses.shape, some.lengths) == ((2, 7), (1, 7))
    assert some.total_lengths == [3, 9]
    policy, scalar = small("gpt2"), small("gpt2", scalar=True)
    expected = token_stats(policy, whole).logprobs[[3, 1]]
    torch.testing.assert_close(token_stats(policy, some).logprobs, expected, atol=1e-5, rtol=0)
    expected = final_scores(scalar, whole)[[3, 1]]
    torch.testing.assert_close(final_scores(scalar, some), expected, atol=1e-5, rtol=1e-5)
    assert whole.rows([2]).responses.shape == (1, 0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradients_are_those_of_rows_alone_and_never_nan(small, attention):
    together, alone = (small("llama", attention=attention) for _ in range(2))
    token_stats(together, batch()).logprobs.sum().backward()
    for i in (0, 1, 3):
        token_stats(alone, batch(rows=[i])).logprobs.sum().backward()
    for a, b in zip(together.parameters(), alone.parameters()):
        assert a.grad.isfinite().all()
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


def test_padding_has_no_gradient():
    model = Bigram(torch.zeros(4, 4).tolist())
    sequences = Sequences.from_lists([[1, 2], [2]], [[1, 2], [1]], pad_id=3)
    token_stats(model, sequences).logprobs.sum().backward()
    gradient = model.head.weight.grad.T
    assert gradient[:3].any(dim=1).tolist() == [False, True, True]
    assert not gradient[3].any()


def test_the_plain_way_runs_the_head_on_response_positions_only(small):
    model, shapes = small("llama"), []
    model.lm_head.register_forward_hook(lambda _, __, out: shapes.append(out.shape))
    plain_token_stats(model, batch())
    assert shapes == [(4, 7, 48)]
    assert not model.lm_head._forward_pre_hooks  # and is left as it was


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_passes_never_wait_for_the_device(small):
    """Those of llama.py; transformers' own search their positions for packed rows."""
    policy, scalar = small("llama").cuda(), small("llama", scalar=True).cuda()
    for model in (policy, scalar):
        choose_passes(model)
    sequences = Sequences.from_lists(PROMPTS, RESPONSES, 0, "cuda")
    token_stats(policy, sequences)  # the first pass looks at what the model does to logits
    some = sequences.rows([3, 1])
    token_stats(policy, some).logprobs.sum().backward()  # and these are compiled
    token_values(scalar, some).sum().backward()
    final_scores(scalar, some)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        token_stats(policy, some).logprobs.sum().backward()
        token_values(scalar, some).sum().backward()
        final_scores(scalar, some)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_logprobs_are_float32_under_autocast(small):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stats = token_stats(small("llama"), batch(), entropy=True)
        values = token_values(small("llama", scalar=True), batch())
    assert {stats.logprobs.dtype, stats.entropy.dtype, values.dtype} == {torch.float32}


def test_rotary_angles_that_depend_on_the_batch_are_refused(small):
    """As in sampling: a row's log-probs would depend on the longest of its batch."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = small("llama", rope_parameters=rope, max_position_embeddings=8)
    short, long = ([[5] * n] for n in (4, 7))
    token_stats(model, Sequences.from_lists(short, [[6, 7]], 0))
    with pytest.raises(SettingError, match="change beyond 8 tokens"):
        token_stats(model, Sequences.from_lists(long, [[6, 7]], 0))


@torch.no_grad()
def test_what_the_world_said_is_read_but_has_no_logprob_and_no_value(small, family):
    policy, scalar = small(family), small(family, True)
    whole = batch()
    sampled = torch.ones(4, 9).bool()
    sampled[1, 2:5] = sampled[0, 0] = False
    holed = Sequences.from_lists(PROMPTS, RESPONSES, 0, sampled=sampled)
    kept = sampled[:, : whole.mask.shape[1]] & whole.mask
    assert torch.equal(holed.mask, kept)
    for seen, all_seen in (
        (token_stats(policy, holed).logprobs, token_stats(policy, whole).logprobs),
        (plain_token_stats(policy, holed).logprobs, plain_token_stats(policy, whole).logprobs),
        (token_values(scalar, holed), token_values(scalar, whole)),
    ):
        assert torch.equal(seen, torch.where(kept, all_seen, 0.0))
    assert torch.equal(final_scores(scalar, holed), final_scores(scalar, whole))
    part = holed.rows([1, 0])
    assert torch.equal(part.mask, kept[[1, 0]])
