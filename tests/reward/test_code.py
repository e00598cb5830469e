"""Unit tests as a reward: the paper's numbers, honest verdicts, and nothing given away."""

import json
import logging
import random
from pathlib import Path

import pytest
import torch

from marlhf.data import DataConfig, Row, code, load_data
from marlhf.models.tiny import tiny_tokenizer
from marlhf.reward import RewardFunction, import_function
from marlhf.reward import code as module
from marlhf.reward.answers import complete, extract_code, same_output, same_value
from marlhf.reward.code import UnitTests, Verdict
from marlhf.reward.sandbox import Outcome
from marlhf.train.recipe import load_recipe

DOUBLE = {"kind": "stdin", "inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
CALLED = {"kind": "call", "name": "double", "inputs": [[1], [2]], "outputs": [2, [4]]}
CHECKED = {
    "kind": "check",
    "name": "double",
    "prompt": "def helper(x):\n    return x + x\n\ndef double(x):\n    ''' Twice x. '''\n",
    "check": (
        "def check(candidate):\n"
        "    assert True\n"
        "    for x in range(3):\n"
        "        assert candidate(x) == helper(x)\n"
        "    answer = candidate(10)\n"
        "    assert abs(answer - 20) < 1e-6\n"
    ),
}


@pytest.fixture(scope="module")
def judge():
    found = UnitTests(workers=2, seconds=3)
    yield found
    found.close()


@pytest.fixture
def shared_data():
    folder = Path(__file__).parents[2].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real data is not on this machine")
    return folder


@pytest.mark.parametrize(
    ("program", "result", "reward"),
    [
        ("print(2 * int(input()))", "passed", 1.0),
        ("print(2)", "failed", -0.3 + 1.3 / 2),
        ("print(0)", "failed", -0.3),
        ("", "failed", -0.3),
        ("print(2 * int(input())", "compile_error", -1.0),
        ("Sure! Here is the program.", "compile_error", -1.0),
        ("print(1 / 0)", "runtime_error", -0.6),
        ("print(2 * int(input()))\nexit(3)", "runtime_error", -0.6),
        ("x = int(input())\nprint(2 * x) if x < 2 else None.x", "runtime_error", -0.6),
        ("x = 'a' * 10**10", "runtime_error", -0.6),
        ("while True: pass", "timeout", -0.6),
        ("x = int(input())\nprint(2 * x)\nreturn", "passed", 1.0),  # as some of APPS end
    ],
)
def test_the_papers_reward(judge, program, result, reward):
    quick = UnitTests(workers=1, seconds=0.7) if result == "timeout" else judge
    [verdict] = quick.judge([program], [DOUBLE])
    assert verdict.result == result
    assert verdict.reward == pytest.approx(reward)
    if quick is not judge:
        quick.close()


@pytest.mark.parametrize(
    ("program", "result", "passed"),
    [
        ("def double(x): return 2 * x", "passed", 2),
        ("class Solution:\n    def double(self, x: int) -> List[int]: return 2 * x", "passed", 2),
        ("def double(x): return 2.0", "failed", 1),
        ("def double(x): return str(2 * x)", "failed", 0),
        ("def twice(x): return 2 * x", "runtime_error", 0),
        ("def double(x): raise ValueError", "runtime_error", 0),
    ],
)
def test_functions_and_methods_are_called(judge, program, result, passed):
    [verdict] = judge.judge([program], [CALLED])
    assert (verdict.result, verdict.passed) == (result, passed)


@pytest.mark.parametrize(
    ("response", "result", "passed"),
    [
        ("    return 2 * x\n", "passed", 4),
        ("return 2 * x", "passed", 4),
        ("    return helper(x)\n\nprint(double(", "passed", 4),  # continues where it should not
        ("def double(x):\n    return x + x\n", "passed", 4),
        ("Here:\n```python\ndef double(x):\n    return 2 * x\n```\n", "passed", 4),
        ("    return 2", "failed", 1),
        ("    return 'no'", "failed", 0),
        ("    return object()", "failed", 0),
        ("    y = []\n    for _ in range(150): y = [y]\n    return y", "failed", 0),
        ("    return x / 0", "runtime_error", 0),
        ("    return (", "compile_error", 0),
    ],
)
def test_a_check_counts_its_asserts(judge, response, result, passed):
    [verdict] = judge.judge([response], [CHECKED])
    assert (verdict.result, verdict.passed) == (result, passed)


def test_a_check_that_cannot_run_is_no_verdict(judge, caplog):
    for broken in ("def check(candidate):\n    assert (", "nothing = 1"):
        assert judge(["    return 1"], [CHECKED | {"check": broken}]) == [None]
    assert "The check of `double` cannot be run" in caplog.text
    begun = CHECKED | {"prompt": "def helper(x): return x + x\ndef double(x):\n"}
    assert judge(["    return 2 * x"], [begun]) == [pytest.approx(1.0)]


def test_max_tests_takes_the_first():
    with_one = UnitTests(workers=1, max_tests=1)
    assert with_one(["print(2)"], [DOUBLE]) == [pytest.approx(1.0)]
    with_one.close()


def test_expected_answers_never_go_into_the_sandbox(monkeypatch):
    """Whatever is sent with the program in hand holds no secret number."""
    judge, sent = UnitTests(workers=1), []
    sandbox = judge._open()
    run_suites = sandbox.run_suites
    monkeypatch.setattr(sandbox, "run_suites", lambda s: sent.append(s) or run_suites(s))
    check = "def check(candidate):\n    assert candidate(1) == 8675309\n"
    row, _ = code.mbpp_row({"text": "t", "code": "c", "test_list": ["assert f(1) == 8675309"]})
    tests = [
        {"kind": "stdin", "inputs": ["1"], "outputs": ["8675309"]},
        {"kind": "call", "name": "f", "inputs": [[1]], "outputs": [8675309]},
        {"kind": "check", "name": "f", "prompt": "", "check": check},
        row.columns["tests"],
    ]
    judge.judge(["MARK = 1\ndef f(x): return 8"] * 4, tests)
    judge.close()
    programs = [suite for suites in sent for suite in suites if "MARK" in suite.source]
    assert len(programs) == 4
    assert "8675309" not in repr(programs)


def test_a_program_cannot_find_a_checks_answers(judge):
    """It looks through every object and frame that it can reach."""
    spy = (
        "    import gc, sys\n"
        "    found = [o for o in gc.get_objects() if isinstance(o, dict) and 'candidate' in o]\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        found += [frame] if 'check' in frame.f_globals else []\n"
        "        frame = frame.f_back\n"
        "    return 2 * x if not found and 'check' not in globals() else -1\n"
    )
    assert judge([spy], [CHECKED]) == [pytest.approx(1.0)]


def test_a_failing_sandbox_is_no_reward_and_a_logged_error(judge, monkeypatch, caplog):
    broken = [Outcome("sandbox_error", stderr="no memory")]
    monkeypatch.setattr(judge._open(), "run_suites", lambda suites: [broken for _ in suites])
    with caplog.at_level(logging.ERROR, module.__name__):
        assert judge(["print(1)"], [DOUBLE]) == [None]
    assert "no memory" in caplog.text
    assert Verdict("sandbox_error").reward is None


def test_it_is_a_reward_function_by_name():
    function = import_function("marlhf.reward.code:unit_tests")
    tokenizer = tiny_tokenizer()
    reward = RewardFunction(function, tokenizer)
    assert reward.name == "unit_tests"
    rows = [Row("Double it.", columns={"tests": DOUBLE, "other": 1})] * 2
    programs = ["print(2 * int(input()))", "print("]
    ids = [[*tokenizer.encode(program), tokenizer.eos_token_id] for program in programs]
    for _ in range(2):  # each call has a thread of its own, and the sandbox outlives it
        torch.testing.assert_close(reward([[1]] * 2, ids, rows), torch.tensor([1.0, -1.0]))
    chats = [[{"role": "assistant", "content": program}] for program in programs]
    assert function(chats, [DOUBLE] * 2) == [pytest.approx(1.0), -1.0]


def test_code_is_found_in_a_response():
    assert extract_code("x = 1") == "x = 1"
    assert extract_code("A:\n```\nx = 1\n```\nB:\n```py\ny = 2\n```") == "x = 1\n"
    assert extract_code("```bash\nls\n```\n```python\nx = 1\n```") == "x = 1\n"
    assert extract_code("```python\nx = 1\n") == "x = 1\n"  # cut off
    assert extract_code("  ```python\n  x = 1\n  ```") == "x = 1\n"
    two = "```python\nx = 1\n```\n```python\ndef f(): pass\n```"
    assert extract_code(two, "f") == "def f(): pass\n"
    assert complete("def f():\n", "    return 1\nprint(2)", "f") == "def f():\n    return 1\n"


def test_printed_answers_are_compared_as_apps_does():
    assert same_output("1 2\n3\n\n", "1  2 \n3")
    assert same_output("0.333333333", "0.33333333333")
    assert same_output("2.0", "2")
    assert same_output("YES", "YES\n")
    assert not same_output("yes", "YES")
    assert not same_output("1 2 3", "1 2\n3")
    assert not same_output("1000000", "1000001")  # whole numbers are not merely close
    assert not same_output("0.34", "0.33")
    assert not same_output("nan", "1")
    assert not same_output("1" * 400, "1.5")
    assert not same_output("", "1")


def test_returned_answers_are_compared_as_apps_does():
    assert same_value((1, (2, 3)), [1, [2, 3]])
    assert same_value([1], [1])
    assert same_value(5, [5])
    assert same_value({1: 0.1 + 0.2}, {"1": 0.3})
    assert same_value({"b", "a"}, ["a", "b"])
    assert not same_value(1, True)
    assert not same_value([1, 2], [2, 1])
    assert not same_value("5", 5)
    assert not same_value(None, 0)


def reference(shared_data, path, count):
    config = DataConfig(path=str(shared_data / path), parts={}, eval_size=0)
    rows = load_data(config, needs=("prompt", "chosen")).train
    return random.Random(0).sample(rows, min(count, len(rows)))


@pytest.mark.parametrize(
    ("path", "count"),
    [("apps", 5), ("mbpp/mbpp.jsonl", 50), ("humaneval/HumanEval.jsonl.gz", 50)],
    ids=["apps", "mbpp", "humaneval"],
)
def test_reference_solutions_are_right_and_broken_ones_wrong(shared_data, path, count):
    rows = reference(shared_data, path, count)
    judge = UnitTests(seconds=10)
    tests = [row.columns["tests"] for row in rows]
    right = [str(row.chosen) for row in rows]
    assert {v.result for v in judge.judge(right, tests)} == {"passed"}
    fenced = [f"```python\n{program}\n```" for program in right]
    assert {v.result for v in judge.judge(fenced, tests)} == {"passed"}
    bodies = path.startswith("humaneval")
    broken = ["    (" if bodies else "(" for _ in rows]
    assert {v.result for v in judge.judge(broken, tests)} == {"compile_error"}
    raising = ["    raise ValueError" if bodies else "raise ValueError" for _ in rows]
    assert {v.result for v in judge.judge(raising, tests)} == {"runtime_error"}
    # another problem's solution defines other names, or prints other things
    others = [v.result for v in judge.judge([*right[1:], right[0]], tests)]
    assert "passed" not in others
    judge.close()


def test_every_assert_of_a_real_check_can_fail(shared_data):
    """A solution that answers nothing passes no check of HumanEval."""
    rows = reference(shared_data, "humaneval/HumanEval.jsonl.gz", 20)
    judge = UnitTests()
    verdicts = judge.judge(["    return object()"] * 20, [r.columns["tests"] for r in rows])
    judge.close()
    assert {v.result for v in verdicts} == {"failed"}


@pytest.mark.slow
@pytest.mark.xdist_group("toy-code")  # one process, so that SFT is trained once
@pytest.mark.parametrize("method", ["macro-ppo", "rloo"])
def test_unit_tests_teach_a_tiny_model(method, tmp_path_factory):
    """From two in five to most: the reward on held-out tasks rises."""
    from marlhf.train import ppo, rloo, sft

    root = tmp_path_factory.getbasetemp() / "toy-code"
    # Stage by stage: a setting without a stage's name would win over those with one.
    steps = ["sft.num_steps=120", "ppo.num_steps=10", "rloo.num_steps=12"]
    short = [*steps, "eval_every=0", "save_every=0", f"output_dir={root}"]
    stages = load_recipe("toy-code", short)
    configs = {stage.name: stage.config for stage in stages}
    sft.train(configs["sft"])  # once for all: it is skipped when finished
    (rloo if method == "rloo" else ppo).train(configs[method])
    lines = (root / method / "metrics.jsonl").read_text().splitlines()
    evals = [x["eval/score"] for x in map(json.loads, lines) if x["kind"] == "eval"]
    about = json.loads((root / method / "run.json").read_text())
    assert about["sandbox"]["seccomp"] is True  # the layers are recorded
    assert evals[0] < 0.6
    assert evals[-1] > evals[0] + 0.25
