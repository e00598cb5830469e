import pytest
import torch

from marlhf.data.encode import encode_prompt
from marlhf.models.forward import Sequences, final_scores
from marlhf.reward import RewardModel

OTHER = ["Rivers run to the sea.", "The owl and the fox read a book about apples and red birds."]
PROMPTS = ["The fox saw", "Was it late? No", "A small bird sang about the river, the", "The owl"]
RESPONSES = [" three red apples.", "", " long way to the sea", " Zoë 鳥 said half past nine."]


@pytest.fixture(scope="module")
def scorer(small):
    return small("llama", scalar=True, vocab_size=400, initializer_range=0.1)


def plain_score(model, ids):
    """transformers' own forward of one row."""
    with torch.no_grad():
        return model.score(model.base_model(torch.tensor([ids])).last_hidden_state)[0, -1, 0]


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def rows(tokenizer, ends=(True, False, False, True)):
    """Ids as a rollout has them: EOS (2) where the response ended."""
    responses = [encode(tokenizer, r) + [2] * end for r, end in zip(RESPONSES, ends)]
    return [encode(tokenizer, p) for p in PROMPTS], responses


@pytest.mark.parametrize("budget", [1, 40, 10_000])
@torch.no_grad()
def test_with_the_policys_tokenizer_scores_are_of_the_very_tokens(scorer, trained, budget):
    tokenizer = trained("byte-level")
    reward = RewardModel(scorer, tokenizer, trained("byte-level"), token_budget=budget)
    assert not reward.foreign
    prompts, responses = rows(tokenizer)
    scores = reward(prompts, responses)
    whole = final_scores(scorer, Sequences.from_lists(prompts, responses, 0))
    alone = torch.stack([plain_score(scorer, p + r) for p, r in zip(prompts, responses)])
    torch.testing.assert_close(scores, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [1, 10_000])
def test_with_another_tokenizer_scores_are_of_the_same_text(scorer, trained, budget):
    theirs, mine = trained("byte-level"), trained("byte-level", OTHER, size=320, bos=True)
    reward = RewardModel(scorer, mine, theirs, token_budget=budget)
    assert reward.foreign
    prompts, responses = rows(theirs)
    scores = reward(prompts, responses)
    for score, prompt, response, ended in zip(scores, PROMPTS, RESPONSES, (1, 0, 0, 1)):
        ids = [1, *encode(mine, prompt), *encode(mine, response), *[2] * ended]
        torch.testing.assert_close(score, plain_score(scorer, ids), atol=1e-5, rtol=1e-5)


def test_their_bos_becomes_mine(scorer, trained):
    theirs = trained("byte-level", bos=True)
    mine = trained("byte-level", OTHER, size=320)  # adds no BOS
    reward = RewardModel(scorer, mine, theirs)
    [score] = reward([[1, *encode(theirs, "The fox")]], [encode(theirs, " saw")])
    ids = encode(mine, "The fox") + encode(mine, " saw")
    torch.testing.assert_close(score, plain_score(scorer, ids), atol=1e-5, rtol=1e-5)


def test_sentencepiece_puts_no_space_before_a_response(scorer, trained):
    theirs, mine = trained("byte-level"), trained("metaspace", size=144)
    reward = RewardModel(scorer, mine, theirs)
    rows = [encode(theirs, "The f")], [encode(theirs, "ox ate")]
    [prompt], [response] = reward._translate(*rows)
    assert mine.decode(prompt) == "The f"
    assert mine.decode(prompt + response) == "The fox ate"


def test_chat_marks_are_kept_where_both_know_them(scorer, trained):
    theirs = trained("byte-level", extra=["<|user|>", "<|bot|>"])
    template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}<|bot|>"
    theirs.chat_template = template
    prompt = encode_prompt(theirs, [{"role": "user", "content": "Was it late?"}])
    assert theirs.decode(prompt) == "<|user|>Was it late?<|bot|>"
    for extra, text in (
        (["<|bot|>", "<|user|>"], "<|user|>Was it late?<|bot|>"),
        (["<|bot|>"], "Was it late?<|bot|>"),
        ([], "Was it late?"),
    ):
        mine = trained("byte-level", OTHER, extra=extra, size=320)
        [translated], _ = RewardModel(scorer, mine, theirs)._translate([prompt], [[]])
        assert mine.decode(translated) == text
        known = set(mine.convert_tokens_to_ids(extra))
        assert known <= set(translated)  # as one token, not spelt out


def test_any_special_token_at_the_end_has_ended_the_response(scorer, trained):
    theirs = trained("byte-level", extra=["<|turn|>"])
    mine = trained("byte-level", OTHER, size=320)
    reward, turn = RewardModel(scorer, mine, theirs), theirs.convert_tokens_to_ids("<|turn|>")
    said = encode(theirs, " No.")
    _, ends = reward._translate([[9]] * 4, [[*said, turn], [*said, 2], said, [2]])
    expected = encode(mine, " No.")
    assert ends == [[*expected, 2], [*expected, 2], expected, [2]]


def test_nothing_at_all_still_has_a_score(scorer, trained):
    theirs = trained("byte-level", extra=["<|user|>"])
    mine = trained("byte-level", OTHER, size=320)  # does not know the mark
    [score] = RewardModel(scorer, mine, theirs)([[3]], [[]])
    torch.testing.assert_close(score, plain_score(scorer, [2]), atol=1e-5, rtol=1e-5)


def test_no_rows_have_no_scores(scorer, trained):
    assert RewardModel(scorer, trained("byte-level"), trained("byte-level"))([], []).shape == (0,)


def test_a_reward_model_does_not_learn(small, trained):
    model = small("llama", scalar=True, vocab_size=300)
    reward = RewardModel(model, trained("byte-level"), trained("byte-level"))
    assert not any(p.requires_grad for p in model.parameters())
    assert not reward(*rows(trained("byte-level"))).requires_grad
