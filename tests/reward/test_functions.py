import json
import math
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from marlhf.data import Row
from marlhf.data.rows import Conversation
from marlhf.reward import RewardError, RewardFunction, RewardModel, Rewards, import_function

ROWS = [
    Row("The fox", columns={"answer": "red", "level": 1}),
    Row("The owl", columns={"answer": "sea", "level": 2}),
]
TEXTS = [" ate three red apples", " went home."]


@pytest.fixture(scope="module")
def tokenizer(trained):
    return trained("byte-level")


@pytest.fixture
def score(tokenizer):
    """`score(function)`: what it gives for the two rows, whose responses end in EOS."""

    def run(function, rows=ROWS, texts=TEXTS, **options):
        responses = [tokenizer(text)["input_ids"] + [2] for text in texts]
        prompts = [[5]] * len(rows)
        return RewardFunction(function, tokenizer, **options)(prompts, responses, rows)

    return run


def complaint(score, function, **options) -> str:
    with pytest.raises(RewardError) as caught:
        score(function, **options)
    return str(caught.value)


def test_a_function_in_trls_form_sees_prompts_completions_ids_and_columns(score, tokenizer):
    seen = {}

    def reward(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [1.5, -2]

    scores = score(reward)
    torch.testing.assert_close(scores, torch.tensor([1.5, -2.0]))
    assert seen["prompts"] == ["The fox", "The owl"]
    assert seen["completions"] == TEXTS  # no special tokens
    assert [ids[-1] for ids in seen["completion_ids"]] == [2, 2]
    assert seen["answer"] == ["red", "sea"]
    assert seen["level"] == [1, 2]
    assert "chosen" not in seen


def test_messages_come_with_messages(score):
    prompt = [{"role": "user", "content": "Was it late?"}]
    seen = {}

    def reward(prompts, completions, chosen, rejected):
        seen.update(prompts=prompts, completions=completions, chosen=chosen, rejected=rejected)
        return [0.0]

    score(reward, rows=[Row(prompt, "yes", "no")], texts=[" No!"])
    assert seen["prompts"] == [prompt]
    assert seen["completions"] == [[{"role": "assistant", "content": " No!"}]]
    assert (seen["chosen"], seen["rejected"]) == (["yes"], ["no"])


class Length:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, completions):
        return [self.scale * len(text) for text in completions]


def scaled(completions, *, scale):
    return Length(scale)(completions)


async def slowly(completions, level):
    import asyncio

    await asyncio.sleep(0.01)
    return [float(x) for x in level]


@pytest.mark.parametrize(
    ("function", "expected", "name"),
    [
        (lambda completions: [0, 1], [0, 1], "<lambda>"),
        (lambda completions, answer: [a in c for a, c in zip(answer, completions)], [1, 0], None),
        (lambda prompts, completions, unknown=3: [unknown] * 2, [3, 3], None),
        (Length(0.5), [10.5, 5.5], "Length"),
        (partial(scaled, scale=2), [42, 22], "scaled"),
        (slowly, [1, 2], "slowly"),
        (lambda **columns: columns["level"], [1, 2], None),
    ],
)
@pytest.mark.parametrize("timeout", [5.0, None])
def test_only_arguments_that_it_names_are_given(
    score, tokenizer, function, expected, name, timeout
):
    assert score(function, timeout=timeout).tolist() == expected
    if name:
        assert RewardFunction(function, tokenizer).name == name
    assert RewardFunction(function, tokenizer, name="mine").name == "mine"


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.0],
        (True, False),
        [np.float32(1), np.bool_(False)],
        np.array([1.0, 0.0]),
        torch.tensor([1.0, 0.0], requires_grad=True),
        [torch.tensor(1.0), torch.zeros(())],
    ],
)
def test_numbers_of_any_make_are_taken(score, returned):
    scores = score(lambda completions: returned)
    assert scores.tolist() == [1.0, 0.0]
    assert scores.dtype == torch.float32
    assert not scores.requires_grad


def test_none_means_that_it_does_not_apply(score):
    first, second = score(lambda completions: [None, 2.0]).tolist()
    assert math.isnan(first)
    assert second == 2.0


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 completions"),
        (1.0, "returned float: 1.0"),
        (None, "returned NoneType: None"),
        ({0: 1.0, 1: 2.0}, "returned dict"),
        (torch.zeros(2, 3), "returned Tensor"),
        ([1.0, "2.0"], "returned '2.0', which is not a number"),
        ([1.0, np.str_("2.0")], "which is not a number"),
        ([1.0, [2.0, 1.0]], "it has 1 lines, but there are 2 rewards"),
        ([1.0, torch.zeros(2)], "it has 1 lines, but there are 2 rewards"),
        ([1.0, ["2.0"]], "'2.0' is not a finite number"),
        ([1.0, [math.nan]], "nan is not a finite number"),
        ([1.0, [1e39]], "1e+39 is not a finite number"),
        ([1.0, [10**400]], "is not a finite number"),
        ([1.0, [(12, 1.0)]], "the place 12 is outside its 11 characters"),
        ([1.0, [(-1, 1.0)]], "the place -1 is outside"),
        ([1.0, [(0.5, 1.0)]], "the place 0.5 is no character number"),
        ([1.0, [(0, 1.0, 2.0)]], "not every item is a pair"),
        ([1.0, float("nan")], "returned nan"),
        ([1.0, -math.inf], "returned -inf"),
        ([1.0, 1e39], "returned 1e+39"),  # infinite in float32
        ([1.0, 10**400], "returned inf"),
    ],
)
def test_what_is_no_list_of_finite_numbers_is_refused(score, returned, said):
    def odd(completions):
        return returned

    message = complaint(score, odd)
    assert "`odd`" in message
    assert said in message
    if (
        "number," in said
        or "it has" in said
        or said.startswith(("returned nan", "returned -inf", "returned 1e"))
    ):
        assert "'The owl'" in message  # the sample, not the one before it
        assert "' went home.'" in message
        assert "'The fox'" not in message


def test_rewards_of_lines_and_characters_are_earned_at_their_tokens(score, tokenizer):
    texts = ["a red fox\nran  \nhome", "one line"]
    pieces = [[tokenizer.decode([i]) for i in tokenizer(text)["input_ids"]] for text in texts]

    def earned_after(row, reward):  # the text up to and with the token that carries a reward
        [[token]] = (row == reward).nonzero().tolist()
        return "".join(pieces[0][: token + 1])

    lines = score(lambda completions: [[1.0, 2.0, 4.0], 8.0], texts=texts)
    assert lines.shape == (2, max(map(len, pieces)) + 1)
    assert earned_after(lines[0], 1.0).rstrip("\n") == "a red fox"
    assert earned_after(lines[0], 2.0).rstrip() == "a red fox\nran"
    assert earned_after(lines[0], 4.0) == texts[0]
    assert lines[1].tolist().index(8.0) == len(pieces[1])  # a single number: at the end token
    assert lines.sum() == 15.0
    pairs = score(
        lambda completions: [[(3, 1.0), (3, 1.0), (len(texts[0]), 4.0)], None], texts=texts
    )
    assert "r" in earned_after(pairs[0], 2.0)
    assert pairs[0].tolist().index(4.0) == len(pieces[0])
    assert pairs[1].isnan().any()


def test_rewards_of_turns_are_earned_at_their_ends(score):
    said = [{"role": "assistant", "content": "7?"}, {"role": "user", "content": "higher"}]
    said += [{"role": "assistant", "content": "9?"}]
    seen = {}

    def by_turn(completions):
        seen["completions"] = completions
        return [[0.5, -1.0]]

    prompt = [{"role": "user", "content": "Guess"}]
    rows = [Row(prompt, conversation=Conversation(said, [2, 5]))]
    scores = score(by_turn, rows=rows, texts=[" went home."])
    assert seen["completions"] == [said]
    assert scores[0].nonzero().flatten().tolist() == [1, 4]
    assert scores[0, [1, 4]].tolist() == [0.5, -1.0]
    assert "it has 2 turns, but there are 1 rewards" in complaint(
        score, lambda completions: [[1.0]], rows=rows, texts=[" went home."]
    )


def test_rewards_with_places_and_without_add_up(tokenizer):
    placed = RewardFunction(lambda completions: [[1.0], 2.0], tokenizer)
    whole = RewardFunction(lambda completions: [10.0, None], tokenizer)
    responses = [tokenizer(text)["input_ids"] for text in TEXTS]
    for parts in ([placed, whole], [whole, placed]):
        rewards = Rewards([(f"{i}", part, 0.5) for i, part in enumerate(parts)])
        scores = rewards([[5]] * 2, responses, ROWS)
        torch.testing.assert_close(scores.sum(dim=1), torch.tensor([5.5, 1.0]))
        assert scores[0, len(responses[0]) - 1] >= 5.0
        assert sorted(float(x) for x in rewards.latest.values()) == [1.5, 10.0]


def test_the_sample_that_raises_is_found(score):
    def strict(prompts, completions):
        return [json.loads("{" if text == " went home." else "1") for text in completions]

    message = complaint(score, strict)
    assert "`strict` raised JSONDecodeError: " in message
    assert "(test_functions.py, line " in message  # not json's own file
    assert "prompt:     'The owl'" in message
    assert "completion: ' went home.'" in message
    assert "'The fox'" not in message
    assert "the same command resumes" in message


def test_an_error_of_the_whole_batch_names_no_sample(score):
    def pairwise(completions):
        if len(completions) > 1:
            raise KeyError("other")
        raise IndexError("alone")

    message = complaint(score, pairwise)
    assert "KeyError: 'other'" in message
    assert "No single sample of the batch of 2" in message


def test_a_slow_batch_is_not_tried_again(score, monkeypatch):
    monkeypatch.setattr("marlhf.reward.functions.SEARCH_SECONDS", 0.05)
    calls = []

    def slow(completions):
        calls.append(len(completions))
        time.sleep(0.1)
        raise ValueError("late")

    assert "ValueError: late" in complaint(score, slow)
    assert calls == [2]


def test_long_samples_are_shortened(score):
    def broken(completions):
        raise ValueError("no")

    rows = [Row("begin " + "x" * 5000 + " end")]
    message = complaint(score, broken, rows=rows, texts=["a"])
    assert "begin xxx" in message
    assert "xxx end" in message
    assert len(message) < 800


def test_leaving_the_program_is_an_error_like_others(score):
    def leave(completions):
        sys.exit(3)

    assert "SystemExit: 3" in complaint(score, leave)


def test_a_function_that_hangs_is_given_up(score):
    ended = threading.Event()

    def hang(completions):
        ended.wait(30)
        return [0.0, 0.0]

    start = time.perf_counter()
    message = complaint(score, hang, timeout=0.2)
    ended.set()
    assert time.perf_counter() - start < 5
    assert "`hang` has not returned after 0.2 seconds for a batch of 2" in message


def test_functions_with_signals_learn_what_they_need(score):
    def alarmed(completions):
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [0.0, 0.0]

    assert "timeout=None" in complaint(score, alarmed)
    assert score(alarmed, timeout=None).tolist() == [0, 0]


def test_no_gradients_in_the_functions_thread(score):
    weight = torch.ones(2, requires_grad=True)
    seen = []

    def learnt(completions):
        seen.append((weight * 2).requires_grad)
        return weight

    score(learnt)
    assert seen == [False]


def test_a_missing_column_is_named_before_training(tokenizer):
    def graded(prompts, completions, solution):
        return [0.0] * len(prompts)

    with pytest.raises(RewardError) as caught:
        RewardFunction(graded, tokenizer).check(ROWS)
    message = str(caught.value)
    assert "`graded` needs `solution`" in message
    assert "answer, level" in message

    with pytest.raises(RewardError, match="Did you mean completions"):
        RewardFunction(lambda prompts, completion: [], tokenizer).check(ROWS)
    RewardFunction(lambda completions, answer, solution=None: [], tokenizer).check(ROWS)


def test_a_column_that_some_rows_lack_is_named_with_the_row(tokenizer):
    rows = [*ROWS, Row("A small bird")]

    def graded(completions, answer):
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="column `answer`, which row 3 lacks: 'A small bird'"):
        RewardFunction(graded, tokenizer).check(rows)


def test_columns_that_nobody_names_may_have_gaps(tokenizer):
    seen = []

    def reward(completions, **columns):
        seen.append(columns["answer"])
        return [0.0] * len(completions)

    function = RewardFunction(reward, tokenizer)
    bare = Row("A small bird")
    function.check([*ROWS, bare])
    function([[5]] * 2, [[6]] * 2, [ROWS[0], bare])
    function([[5]], [[6]], [bare])  # a batch without a single one is no other case
    assert seen == [["red", None], [None]]


def test_arguments_by_position_are_refused(tokenizer):
    with pytest.raises(RewardError, match="`completions` by position only"):
        RewardFunction(lambda completions, /: [], tokenizer)
    with pytest.raises(RewardError, match="must be callable; got 3"):
        RewardFunction(3, tokenizer)


def test_no_rows_call_nothing(score):
    assert score(lambda: 1 / 0, rows=[], texts=[]).shape == (0,)


def test_rewards_add_up_by_weight_over_those_that_apply(tokenizer):
    first = RewardFunction(lambda completions: [1.0, None, 3.0], tokenizer)
    second = RewardFunction(lambda completions: [10.0, 20.0, None], tokenizer)
    rewards = Rewards([("a", first, 2.0), ("b", second, 0.5)])
    scores = rewards([[5]] * 3, [[6]] * 3, [Row("x")] * 3)
    # 2*1 + 0.5*10 = 7;  0.5*20 = 10;  2*3 = 6
    torch.testing.assert_close(scores, torch.tensor([7.0, 10.0, 6.0]))
    assert {k: float(v) for k, v in rewards.latest.items()} == {"a": 2.0, "b": 15.0}


def test_a_row_that_nothing_applies_to_is_shown(tokenizer):
    function = RewardFunction(lambda completions: [1.0, None], tokenizer)
    rewards = Rewards([("first", function, 1.0), ("other", function, 1.0)])
    responses = [tokenizer(text)["input_ids"] for text in TEXTS]
    with pytest.raises(RewardError) as caught:
        rewards([[5]] * 2, responses, ROWS)
    message = str(caught.value)
    assert "`first`, `other` returned None" in message
    assert "'The owl'" in message
    assert "' went home.'" in message
    assert "'The fox'" not in message


def test_a_model_and_a_function_add_up(small, tokenizer):
    model = RewardModel(small("llama", scalar=True, vocab_size=400), tokenizer, tokenizer)
    function = RewardFunction(lambda completions: [None, 4.0], tokenizer)
    rewards = Rewards([("model", model, 1.0), ("function", function, 0.25)])
    batch = [[5, 6], [7]], [[8], [9, 2]], ROWS
    expected = model(*batch) + torch.tensor([0.0, 1.0])
    torch.testing.assert_close(rewards(*batch), expected)
    torch.testing.assert_close(rewards.latest["model"], model(*batch).mean())


def test_nan_of_a_model_is_not_taken_for_an_opinion(tokenizer):
    rewards = Rewards([("model", lambda *_: torch.tensor([math.nan, 1.0]), 1.0)])
    assert rewards([[5]] * 2, [[6]] * 2, ROWS).isnan().tolist() == [True, False]


def test_rewards_of_one_name_are_told_apart(tokenizer):
    one, two = (RewardFunction(lambda completions, x=x: [x], tokenizer) for x in (1.0, 2.0))
    rewards = Rewards([(f.name, f, 1.0) for f in (one, two)])
    assert rewards([[5]], [[6]], [Row("x")]).tolist() == [3.0]
    assert {k: float(v) for k, v in rewards.latest.items()} == {"<lambda>": 1.0, "<lambda>-2": 2.0}


def test_rewards_check_every_function(tokenizer):
    fine = RewardFunction(lambda completions: [], tokenizer)
    wants = RewardFunction(lambda completions, solution: [], tokenizer)
    with pytest.raises(RewardError, match="needs `solution`"):
        Rewards([("fine", fine, 1.0), ("wants", wants, 1.0)]).check(ROWS)
    assert Rewards([])([[5]], [[6]], [Row("x")]).tolist() == [0.0]  # an environment's are elsewhere


MODULE = """
from subprocess import getoutput

limit = 3

def brevity(completions):
    return [-float(len(c)) for c in completions]

class Brevity:
    def __call__(self, completions):
        return brevity(completions)

class Limited:
    def __init__(self, limit): ...
    def __call__(self, completions): ...

class Plain: ...
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("import surely_not_installed\n")
    (tmp_path / "faulty_rewards.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("own_rewards", "broken_rewards", "faulty_rewards"):
        sys.modules.pop(name, None)


def test_functions_and_classes_are_imported_from_here(here):
    assert import_function("own_rewards:brevity")(["abc"]) == [-3.0]
    assert import_function("own_rewards:Brevity")(["abc"]) == [-3.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("brevity", "Write module:function"),
        ("own_rewards:", "Write module:function"),
        ("own_rewards.py:brevity", "Write the module's name: own_rewards:brevity"),
        ("rewards/own_rewards.py:f", "rewards.own_rewards:f"),
        ("own_reward:brevity", "no module 'own_reward' in this folder"),
        ("broken_rewards:f", "which needs surely_not_installed"),
        ("faulty_rewards:f", "ZeroDivisionError"),
        ("own_rewards:brevty", "Did you mean brevity"),
        ("own_rewards:limit", "which is not callable"),
        ("own_rewards:Limited", "cannot be created without arguments"),
        ("own_rewards:Plain", "cannot be called. Give the class a __call__"),
        ("own_rewards:getoutput", "was not written in own_rewards"),
        ("subprocess:getoutput", "part of Python itself"),
        ("os:system", "part of Python itself"),
    ],
)
def test_what_cannot_be_imported_is_explained(here, name, said):
    with pytest.raises(RewardError) as caught:
        import_function(name)
    assert said in str(caught.value)


def test_functions_of_installed_packages_are_no_rewards(here):
    """`torch.utils.collect_env:run` runs the program that a column `command` names."""
    for code in ((), ["torch.utils.collect_env"], ["torch"]):
        with pytest.raises(RewardError, match="is a function of an installed package"):
            import_function("torch.utils.collect_env:run", code)
    with pytest.raises(RewardError, match="is a function of an installed package"):
        import_function("marlhf.reward.answers:extract_code", ["marlhf.reward.answers"])


def test_a_recipe_declares_its_own_code(here):
    assert import_function("own_rewards:brevity", ["own_rewards"])(["abc"]) == [-3.0]
    assert import_function("own_rewards:Brevity", ["other", "own_rewards"])(["abc"]) == [-3.0]
    for code in ((), ["own"], ["own_rewards.other"]):
        with pytest.raises(RewardError, match=r"Add `code: \[own_rewards\]` to it"):
            import_function("own_rewards:brevity", code)


def test_marked_functions_need_no_declaration(here):
    marked = "from marlhf.reward import reward_function\n" + MODULE
    marked = marked.replace("def brevity", "@reward_function\ndef brevity")
    (here / "own_rewards.py").write_text(marked)
    assert import_function("own_rewards:brevity", ())(["abc"]) == [-3.0]
    for name in ("code:unit_tests", "gsm8k:right_answer", "sums:solved", "sums:share_right"):
        assert callable(import_function(f"marlhf.reward.{name}", ()))
