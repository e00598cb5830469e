"""Reading what a model wrote: no text is slow to read, and no returned value raises in the host."""

import itertools
import math
import random
import re
import textwrap
import time
from collections.abc import Callable

import pytest

from marlhf.reward.answers import (
    complete,
    defines,
    extract_code,
    same_output,
    same_value,
    within_function,
)
from marlhf.reward.code import UnitTests

SIZE = 10_000
SECONDS = 2.0
"""Each takes milliseconds; at this size a quadratic pattern takes far longer."""
PIECES = ("1", ".", "e", "+", "x", " ", "\t", "\n", "```", "```python", "def ", "async ", '"', "\\")
PARSERS: dict[str, Callable[[str], object]] = {
    "extract_code": extract_code,
    "extract_code, by name": lambda text: extract_code(text, "solve"),
    "defines": lambda text: defines(text, "solve"),
    "complete": lambda text: complete("def solve(x):\n", text, "solve"),
    "within_function": within_function,
    "same_output": lambda text: same_output(text, text + "0"),
    "same_output, one word": lambda text: same_output(text.replace("\n", ""), "1" * SIZE + "y"),
    "same_value": lambda text: same_value([text], [text + "0"]),
}


@pytest.mark.parametrize("parser", PARSERS)
def test_no_text_is_slow_to_read(parser):
    """Every repetition of one or two pieces, alone and after the beginning of a block."""
    repeated = {first + second for first, second in itertools.product(PIECES, ("", *PIECES))}
    for unit in sorted(repeated):
        for start in ("", "```python\n"):
            text = start + unit * (SIZE // len(unit)) + "!"
            began = time.process_time()
            PARSERS[parser](text)
            assert time.process_time() - began < SECONDS, (start, unit)


def test_the_line_parser_finds_the_blocks_of_the_old_pattern():
    """The grammar of blocks as one regular expression, which is too slow for long lines."""
    fence = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.M | re.S)
    draw = random.Random(0)
    pieces = ("```", "```python", "``` py x", "\n", "\n", "\n", " ", "\t", "a = 1", "def f():", "r")
    for _ in range(20_000):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 12)))
        blocks = [(m[1].lower(), textwrap.dedent(m[2])) for m in fence.finditer(text)]
        python = [code for language, code in blocks if language in ("", "python", "python3", "py")]
        expected = (python or [code for _, code in blocks] or [text])[0]
        assert extract_code(text) == expected, text


def test_long_words_are_text_and_short_ones_numbers():
    assert same_output("1" * 4000, "+" + "1" * 3999) is False
    assert same_output("+" + "1" * 3999, "1" * 3999)
    assert same_output("1" * 50_000, "1" * 50_000)
    assert not same_output("0" + "1" * 50_000, "1" * 50_000)
    assert same_output("1e5 .5 -2. +3", "100000.0 0.5 -2.0 3")
    assert not same_output("1.e 1..2 --1 .", "1 1.2 1 0")


def test_large_sets_are_compared_in_linear_time():
    began = time.process_time()
    numbers = range(100_000)
    assert same_value(set(numbers), list(reversed(numbers)))
    assert not same_value(set(numbers), [*numbers[:-1], -1])
    assert not same_value({*numbers[2:], True, False}, list(numbers))
    assert same_value({(n, "a") for n in numbers}, [[n, "a"] for n in numbers])
    assert time.process_time() - began < SECONDS


def test_a_large_set_is_never_a_list_of_mappings():
    mappings = [{"n": n} for n in range(1001)]
    assert not same_value(set(range(1001)), mappings)
    assert not same_value(set(range(1001)), [[each] for each in mappings])


def test_long_output_is_read_only_as_far_as_it_is_right():
    began = time.process_time()
    assert not same_output("1\n" * 500_000, "1\n2")
    assert not same_output("\n" * 1_000_000, "1")
    assert not same_output("1\n2", "1\n" * 500_000)
    assert same_output("\n \n1\n\n2 \n" + "\n" * 1_000_000, "1\n2")
    assert time.process_time() - began < SECONDS


HUGE = 10**5000
ODD = {
    "a huge key": "{10**5000: 1}",
    "a huge key in a tuple": "{(1, 10**5000): 1}",
    "a huge number": "10**5000",
    "a huge number in a set": "{10**5000}",
    "a huge negative number": "-(10**5000)",
    "not a number": "{float('nan'): float('nan')}",
    "infinity": "[float('inf'), -float('inf')]",
    "a lone surrogate": "'\\ud800'",
    "a lone surrogate as key": "{'\\ud800': 1}",
    "keys of every kind": "{None: 1, True: 2, 2.5: 3, b'x': 4, (1,): 5, frozenset({1}): 6, 1j: 7}",
    "keys that are equal as text": "{1: 1, '1': 1}",
    "a cycle": "(lambda x: x.append(x) or x)([])",
    "a nested list": "__import__('functools').reduce(lambda x, _: [x], range(190), 1)",
    "a list nested too deep": "__import__('functools').reduce(lambda x, _: [x], range(5000), 1)",
    "an object": "object()",
    "a class": "int",
    "a function in a set": "{print}",
    "an iterator": "iter([1])",
    "a complex number": "complex('nan')",
    "bytes": "b'\\xff'",
    "an object that lies": "type('L', (int,), {'__eq__': lambda s, o: True, '__hash__': hash})()",
    "a repr that raises": "type('R', (), {'__repr__': lambda s: 1 / 0})()",
    "a long text": "'x' * 900_000",
    "many numbers": "list(range(100_000))",
}
FORGED = {
    "nested": "b'{\"value\": ' + b'[' * 900 + b']' * 900 + b'}'",
    "digits": "b'{\"value\": ' + b'1' * 100_000 + b'}'",
    "a float": "b'{\"value\": 1e999999}'",
    "a wrong tag": 'b\'{"value": {"$": [], "v": 1}}\'',
    "an unhashable key": 'b\'{"value": {"$": "dict", "v": [[[], 1]]}}\'',
    "another encoding": "'{\"value\": 1}'.encode('utf-16')",
    "no text": "bytes(range(256))",
}
EXPECTED = [None, 1, 0.5, "x", [1], {"1": 1}, [[1]], True, [], HUGE]


@pytest.fixture(scope="module")
def judge():
    judge = UnitTests(workers=2, seconds=5)
    yield judge
    judge.close()


def unit_tests_of(kind: str) -> dict:
    if kind == "call":
        return {"kind": kind, "name": "f", "inputs": [[]] * len(EXPECTED), "outputs": EXPECTED}
    if kind == "expression":
        literals = ["{1: 2}", "[1]", "{1}", "(1,)", "'x'", "1j"]
        return {"kind": kind, "inputs": ["f()"] * len(literals), "outputs": literals}
    check = "def check(g):\n    assert g() == {1: 2}\n    assert sorted(g()) == [1]\n"
    return {"kind": kind, "name": "f", "prompt": "def f():\n", "check": check}


@pytest.mark.parametrize("kind", ["call", "expression", "check"])
def test_whatever_is_returned_is_a_verdict(kind, judge):
    forged = {
        name: f"(__import__('os').write(5, {data} + b'\\n'), __import__('os')._exit(0))"
        for name, data in FORGED.items()
    }
    programs = [f"def f():\n    return {value}\n" for value in (ODD | forged).values()]
    verdicts = judge.judge(programs, [unit_tests_of(kind)] * len(programs))
    for name, verdict in zip(ODD | forged, verdicts, strict=True):
        assert verdict.result in ("failed", "runtime_error"), (name, verdict)
        assert math.isfinite(verdict.reward or math.nan), name


@pytest.mark.parametrize(
    "data",
    [
        "b'\\xff\\xfe'",
        "b'\\x00' * 1000",
        "'\\ud800'.encode('utf-8', 'surrogatepass')",
        "b'1' * 900_000",
        "b'\\n' * 900_000",
        "b'\\x1b[2J\\r'",
    ],
)
def test_whatever_is_printed_is_a_verdict(data, judge):
    program = f"import os\nfor fd in (1, 2): os.write(fd, {data})\n"
    tests = {"kind": "stdin", "inputs": [""], "outputs": ["1" * 4000]}
    [verdict] = judge.judge([program], [tests])
    assert verdict.result == "failed"
