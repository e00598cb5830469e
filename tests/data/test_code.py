"""Programming problems: APPS, MBPP and HumanEval come out in one form."""

import json

import pytest

from marlhf.data import DataConfig, DataError, code, load_data
from marlhf.data.code import KINDS, check_tests

STDIN = {
    "problem_id": 1,
    "question": "Add two numbers.\n",
    "solutions": json.dumps(["\nprint(sum(map(int, input().split())))\n"]),
    "input_output": json.dumps({"inputs": ["1 2\n", ["3 4", "5"]], "outputs": ["3\n", ["7"]]}),
    "difficulty": "interview",
    "url": "https://example.org/1",
    "starter_code": "",
}
CALLED = STDIN | {
    "starter_code": "def add(a, b):\n\t",
    "input_output": json.dumps(
        {"fn_name": "add", "inputs": [[1, 2], [{"1": 2}, 3]], "outputs": [3, [4]]}
    ),
}
MBPP = {
    "task_id": 2,
    "text": "Write a function to swap.",
    "code": "def swap(a, b):\r\n  return b, a",
    "test_setup_code": "",
    "test_list": ["assert swap(1, 2) == (2, 1)", "assert (swap('a', 'b')) == ('b', 'a')"],
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def one():\n    """ Return 1. """\n',
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
    "entry_point": "one",
}


def test_apps_with_standard_input():
    row, remark = code.apps_row(STDIN)
    assert remark == ""
    assert row.prompt == ("QUESTION:\nAdd two numbers.\nUse Standard Input format\n\nANSWER:\n")
    assert row.chosen == "print(sum(map(int, input().split())))"
    assert row.columns["tests"] == {
        "kind": "stdin",
        "inputs": ["1 2\n", "3 4\n5"],
        "outputs": ["3\n", "7"],
    }
    assert row.columns["difficulty"] == "interview"


def test_apps_with_calls_has_the_starter_code_in_the_prompt():
    row, _ = code.apps_row(CALLED)
    assert "\ndef add(a, b):\nUse Call-Based format\n\nANSWER:\n" in row.prompt
    tests = row.columns["tests"]
    assert (tests["kind"], tests["name"]) == ("call", "add")
    assert tests["inputs"] == [[1, 2], [{1: 2}, 3]]  # keys that JSON made text are numbers again


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_output": ""}, "the problem has no tests"),
        ({"input_output": "{"}, "`input_output` or `solutions` is not JSON"),
        ({"input_output": '{"inputs": ["1"], "outputs": []}'}, "not as many outputs as inputs"),
        ({"question": None}, "`question` is not text"),
        ({"input_output": '{"inputs": [' + "1" * 5000 + "]}"}, None),
    ],
)
def test_apps_problems_that_cannot_be_used_say_why(change, reason):
    row, told = code.apps_row(STDIN | change)
    assert row is None
    assert told == reason or reason is None


def test_apps_without_solutions_serves_ppo_alone():
    row, _ = code.apps_row(STDIN | {"solutions": ""})
    assert row.chosen is None
    assert row.columns["solutions"] == []


def test_apps_folder_of_problems(tmp_path):
    for split, names in (("train", "ab"), ("test", "c")):
        for name in names:
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            (folder / "question.txt").write_text(f"Problem {name}.")
            (folder / "input_output.json").write_text(CALLED["input_output"])
            (folder / "solutions.json").write_text(STDIN["solutions"])
            (folder / "metadata.json").write_text('{"difficulty": "competition"}')
            (folder / "starter_code.py").write_text(CALLED["starter_code"])
    options = {"parts": {}, "eval_size": 0}
    train = load_data(DataConfig(path=str(tmp_path), **options)).train
    assert [row.columns["problem_id"] for row in train] == ["a", "b"]
    assert train[0].columns["difficulty"] == "competition"
    test = load_data(DataConfig(path=str(tmp_path), split="test", **options)).train
    assert [row.columns["problem_id"] for row in test] == ["c"]
    alone = load_data(DataConfig(source="apps", path=str(tmp_path / "test"), **options)).train
    assert alone == test
    with pytest.raises(DataError, match=r"has no split `valid`\. It has: test, train"):
        load_data(DataConfig(path=str(tmp_path), split="valid", **options))


def test_mbpp_shows_its_asserts_and_keeps_values_apart():
    row, _ = code.mbpp_row(MBPP)
    assert row.prompt.endswith("assert (swap('a', 'b')) == ('b', 'a')\n\nANSWER:\n")
    assert row.chosen == "def swap(a, b):\n  return b, a"
    assert row.columns["tests"] == {
        "kind": "expression",
        "setup": "",
        "inputs": ["swap(1, 2)", "swap('a', 'b')"],
        "outputs": ["(2, 1)", "('b', 'a')"],
    }


def test_mbpp_asserts_of_other_forms_are_a_check():
    tests = code.to_tests(["assert close(1) == 1.0", "assert abs(close(2) - 2) < 1e-3"])
    assert tests["kind"] == "check"
    assert tests["name"] == "close"
    assert code.to_tests(["assert True"]) is None
    assert code.mbpp_row(MBPP | {"test_list": ["assert ("]})[1] == "a test is not Python"


def test_humaneval_goes_on_with_its_prompt():
    row, _ = code.humaneval_row(HUMANEVAL)
    assert row.prompt == HUMANEVAL["prompt"]
    assert row.chosen == "    return 1"
    assert row.columns["tests"]["name"] == "one"


@pytest.mark.parametrize("record", [STDIN, MBPP, HUMANEVAL], ids=["apps", "mbpp", "humaneval"])
def test_each_is_recognised_by_its_fields(record, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(record))
    [row] = load_data(DataConfig(path=str(file), parts={}, eval_size=0)).train
    assert row.columns["tests"]["kind"] in KINDS
    assert {"tests", "difficulty", "starter_code", "solutions"} <= row.columns.keys()


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "whose `kind` is"),
        ({"kind": "stdio"}, "whose `kind` is"),
        ({"kind": "call", "inputs": [], "outputs": []}, "lacks `name`"),
        ({"kind": "stdin", "inputs": ["1"], "outputs": []}, "1 inputs but 0 outputs"),
    ],
)
def test_malformed_tests_are_explained(tests, message):
    with pytest.raises(DataError, match=message):
        check_tests(tests)


def test_toy_problems_are_the_same_for_a_seed():
    rows = code.toy_rows(200, seed=1)
    assert rows == code.toy_rows(200, seed=1)
    assert rows != code.toy_rows(200, seed=2)
    split = load_data(DataConfig(source="toy-code", parts={"sft": 0.2, "ppo": 0.8}), "ppo")
    assert split.train
    assert not {r.prompt for r in split.train} & {r.prompt for r in split.eval}


def test_the_real_files_are_read_whole(shared_data):
    options = {"parts": {}, "eval_size": 0}
    read = {
        name: load_data(DataConfig(path=str(shared_data / path), **options)).counts.kept
        for name, path in {
            "apps": "apps",
            "mbpp": "mbpp/mbpp.jsonl",
            "humaneval": "humaneval/HumanEval.jsonl.gz",
        }.items()
    }
    assert read == {"apps": 5, "mbpp": 974, "humaneval": 164}
