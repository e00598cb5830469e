"""Process reward models: where steps end, what they earn, and which models are refused."""

import pytest
import torch
from transformers import AutoModelForTokenClassification

from marlhf.models.forward import final_scores, token_scores
from marlhf.models.load import load_scalar
from marlhf.models.sequences import Sequences
from marlhf.models.tiny import tiny_tokenizer
from marlhf.reward import RewardModel
from marlhf.reward.process import TEMPERATURE, ProcessModel, StepEnds, cut_steps, pool

TEXTS = ["1+1=2\n2+1=4", "7\n\n8\n", "none", "\n", "ä\né\n鳥"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    model = load_scalar("tiny").eval()
    torch.nn.init.normal_(model.score.weight, std=0.5)
    return model


def ids_of(texts, ended=True):
    tokenizer = tiny_tokenizer()
    return [[*tokenizer.encode(text), *[tokenizer.eos_token_id] * ended] for text in texts]


@pytest.mark.parametrize("ended", [True, False])
def test_a_step_ends_where_its_separator_is_complete(ended, trained):
    """Token by token: the text up to the end has the steps so far, the text before it has not."""
    for tokenizer in (tiny_tokenizer(), trained("byte-level")):
        eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 2
        for text in [*TEXTS, "a. b. . c", "x"]:
            separator = ". " if ". " in text else "\n"
            tokens = [*tokenizer.encode(text, add_special_tokens=False), *[eos] * ended]
            [ends] = StepEnds(tokenizer, separator)([tokens])
            assert len(ends) == max(1, len(cut_steps(text, separator)))
            assert ends[-1] == len(tokens) - 1
            for number, end in enumerate(ends[:-1], start=1):
                until, before = (tokenizer.decode(tokens[:n]) for n in (end + 1, end))
                assert len(cut_steps(until, separator)) == number
                assert until.rstrip(" ").endswith(separator.rstrip(" "))
                assert before.count(separator) < until.count(separator)


def test_no_tokens_have_no_steps():
    assert StepEnds(tiny_tokenizer(), "\n")([[]]) == [[]]


def test_pooling_is_a_loop_over_steps():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(6, 5, generator=generator, dtype=torch.float64) * 2 - 1
    counts = [1, 5, 3, 2, 4, 5]
    mask = torch.tensor([[s < n for s in range(5)] for n in counts])
    for row, count in enumerate(counts):
        own = rewards[row, :count]
        whole = torch.stack([(-r / TEMPERATURE).exp() for r in own]).sum()
        wanted = {
            "sum": own.tolist(),
            "last": [0.0] * (count - 1) + [own[-1].item()],
            "min": [float(r * (-r / TEMPERATURE).exp() / whole) for r in own],
        }
        for how, values in wanted.items():
            got = pool(rewards, mask, how)[row].tolist()
            assert got[:count] == pytest.approx(values, abs=1e-12), how
            assert got[count:] == [0.0] * (5 - count)


def test_the_minimum_is_the_return_where_one_step_is_worst():
    rewards = torch.tensor([[0.9, 0.8, -0.9, 0.7]])
    earned = pool(rewards, torch.ones(1, 4).bool(), "min")
    assert earned.sum().item() == pytest.approx(-0.9, abs=1e-4)
    assert earned[0, 2].item() == pytest.approx(-0.9, abs=1e-4)


@torch.no_grad()
def test_rewards_stand_at_the_ends_of_steps_alone(model):
    tokenizer, responses = tiny_tokenizer(), ids_of(TEXTS)
    prompts = [[5, 6], [7], [8, 9, 10], [5], [6]]
    process = ProcessModel(model, tokenizer, tokenizer, separator="\n")
    rewards = process(prompts, responses)
    for row, ends in enumerate(process.ends(responses)):
        alone = model.score(
            model.base_model(torch.tensor([prompts[row] + responses[row]])).last_hidden_state
        )[0, :, 0]
        for token in range(rewards.shape[1]):
            wanted = 0.0
            if token in ends:
                wanted = 2 * alone[len(prompts[row]) + token].sigmoid().item() - 1
            assert rewards[row, token].item() == pytest.approx(wanted, abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["sum", "min", "last"])
def test_one_step_is_an_outcome(model, pooling):
    """Where there is one step, it earns what a reward model with this head gives."""
    tokenizer, responses = tiny_tokenizer(), ids_of(["one", "two three"])
    process = ProcessModel(model, tokenizer, tokenizer, separator="\n", pooling=pooling)
    outcome = RewardModel(model, tokenizer, tokenizer)([[5], [6]], responses)
    rewards = process([[5], [6]], responses)
    torch.testing.assert_close(rewards.sum(dim=1), 2 * outcome.sigmoid() - 1)
    assert rewards.nonzero().tolist() == [[row, len(r) - 1] for row, r in enumerate(responses)]


@torch.no_grad()
def test_batches_change_nothing(model):
    tokenizer, responses = tiny_tokenizer(), ids_of(TEXTS, ended=False)
    prompts = [[5] * n for n in (1, 4, 2, 9, 3)]
    one = ProcessModel(model, tokenizer, tokenizer, separator="\n", token_budget=1)
    all_at_once = ProcessModel(model, tokenizer, tokenizer, separator="\n")
    torch.testing.assert_close(one(prompts, responses), all_at_once(prompts, responses))


@torch.no_grad()
def test_another_tokenizer_scores_the_same_text(model, trained):
    """Rewards are those of its own tokens, placed at the policy's."""
    mine, theirs = tiny_tokenizer(), trained("byte-level")
    text = "The fox\nsaw 3 apples\nin a tree"
    response = [*theirs.encode(text), 2]
    process = ProcessModel(model, mine, theirs, separator="\n")
    assert process.foreign
    prompt = theirs.encode("Was it late?")
    rewards = process([prompt], [response])
    own = ProcessModel(model, mine, mine, separator="\n")
    same = own([mine.encode("Was it late?")], [[*mine.encode(text), mine.eos_token_id]])
    torch.testing.assert_close(rewards[rewards != 0], same[same != 0])
    [ends] = process.ends([response])
    assert rewards[0].nonzero().flatten().tolist() == ends


@torch.no_grad()
def test_token_scores_are_those_of_every_prefix(model):
    sequences = Sequences.from_lists([[5, 6], [7]], [[8, 9, 10], [11]], 0)
    scores = token_scores(model, sequences)
    for row, (prompt, response) in enumerate((([5, 6], [8, 9, 10]), ([7], [11]))):
        for n in range(len(response)):
            prefix = Sequences.from_lists([prompt], [response[: n + 1]], 0)
            torch.testing.assert_close(scores[row, n : n + 1], final_scores(model, prefix))
    assert scores[1, 1:].tolist() == [0.0, 0.0]


@torch.no_grad()
def test_plain_transformers_gives_the_same_logits(model, tmp_path):
    model.save_pretrained(tmp_path)
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=1).eval()
    sequences = Sequences.from_lists([[5, 6]], [[8, 9, 10]], 0)
    logits = plain(sequences.ids).logits[0, 2:, 0]
    torch.testing.assert_close(token_scores(model, sequences)[0], logits)
