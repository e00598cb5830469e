"""Extracts programs from responses, and compares answers with the expected ones.

White space and numbers are compared as the authors of APPS do, but stricter in two points: lines
and words in another order are wrong, and so are integers that are merely close.

Responses and outputs may be chosen to be slow to read, and a regular expression holds the GIL, so
that no timeout can end it. Everything here takes time linear in its input: no pattern has parts
that match the same characters, and long words are not read as numbers.
"""

from __future__ import annotations

import ast
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

FENCE = "```"
LANGUAGE = re.compile(r"[ \t]*([\w+-]*)")
PYTHON = ("", "python", "python3", "py")
RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""Tolerances for numbers with a decimal point: numpy's allclose, as in APPS."""
INTEGER = re.compile(r"[+-]?\d+", re.A)
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.A)
MAX_NUMBER = 4000
"""Longer words are compared as text: converting digits takes quadratic time."""
MAX_SET = 1000
"""Larger sets must be equal exactly: comparing every two elements takes quadratic time."""


def extract_code(response: str, name: str | None = None) -> str:
    """The program in a response: its first fenced block of Python, else all of it.

    With `name`, the first block that defines it. A block without a closing fence extends to the
    end of the response.

    >>> extract_code("Here it is:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    blocks = [(language, textwrap.dedent(code)) for language, code in _fenced(response)]
    if not blocks:
        return response
    programs = [code for language, code in blocks if language in PYTHON]
    programs = programs or [code for _, code in blocks]
    fitting = [code for code in programs if name and defines(code, name)]
    return (fitting or programs)[0]


def _fenced(response: str) -> Iterator[tuple[str, str]]:
    """The language and content of each fenced block."""
    *lines, last = response.split("\n")
    language, begin = None, 0
    for number, line in enumerate(lines):
        marked = line.lstrip(" \t")
        if not marked.startswith(FENCE):
            continue
        if language is None:
            match = LANGUAGE.match(marked, len(FENCE))
            language, begin = match[1].lower() if match else "", number + 1
        else:
            yield language, "".join(f"{line}\n" for line in lines[begin:number])
            language = None
    if language is not None:
        closed = last.lstrip(" \t").startswith(FENCE)
        yield language, "\n".join([*lines[begin:], "" if closed else last])


def defines(code: str, name: str) -> bool:
    return re.search(rf"^(async\s+)?def\s+{re.escape(name)}\b", code, re.M) is not None


def complete(prompt: str, code: str, name: str) -> str:
    """Join the beginning of a program with the continuation that a model wrote.

    If the code defines the function again, that definition replaces the begun one. Otherwise the
    code is the function's body, up to the first line that is not indented: what models write
    after that is not part of the answer.
    """
    if defines(code, name):
        return f"{with_body(prompt).rstrip()}\n\n{code}"
    lines = code.strip("\n").splitlines()
    if lines and not lines[0][:1].isspace():
        return f"{prompt.rstrip()}\n{textwrap.indent(chr(10).join(lines), '    ')}\n"
    ends = (i for i, line in enumerate(lines) if line.strip() and not line[0].isspace())
    body = lines[: next(ends, None)]
    return prompt.rstrip() + "\n" + "\n".join(body) + "\n"


def with_body(prompt: str) -> str:
    """The beginning of a program as one that compiles: a function without a body gets `pass`."""
    try:
        ast.parse(prompt)
    except SyntaxError:
        return f"{prompt.rstrip()}\n    pass\n"
    return prompt


def within_function(code: str) -> str:
    """Wrap a program into a function, as APPS does; imports stay outside.

    >>> print(within_function("import sys\\nreturn"))
    def _program():
        return
    import sys
    _program()
    """
    lines = code.splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    body = [f"    {line}" for line in lines if not line.startswith(("import ", "from "))]
    return "\n".join(["def _program():", *body, *imports, "_program()"])


def same_output(printed: str, expected: str) -> bool:
    """Compare line by line and word by word, ignoring blank lines and spaces; numbers by value.

    >>> same_output("1.50  yes\\n\\n", "1.5 yes")
    True
    >>> same_output("1000001", "1000000")
    False
    """
    # Line by line, so that a difference ends it: a million lines of output cost seconds to split.
    return all(
        len(ours) == len(theirs) and all(map(_same_word, ours, theirs))
        for ours, theirs in zip_longest(_lines(printed), _lines(expected), fillvalue=())
    )


def _lines(text: str) -> Iterator[list[str]]:
    """The words of each line that has any."""
    return (line.split() for line in text.splitlines() if line and not line.isspace())


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    x, y = _number(a), _number(b)
    return x is not None and y is not None and _close(x, y)


def _number(word: str) -> int | float | None:
    if len(word) > MAX_NUMBER:
        return None
    if INTEGER.fullmatch(word):
        return int(word)
    return float(word) if NUMBER.fullmatch(word) else None


def _close(a: int | float, b: int | float) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    try:
        return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:  # an integer too large for a float
        return False


def same_value(returned: Any, expected: Any) -> bool:
    """Compare a returned value with an expected one from JSON: tuples are lists, keys are text.

    As in APPS, the expected value may also be wrapped in a list of one.

    >>> same_value((1, 2), [1, 2]), same_value(True, [True]), same_value("1", 1)
    (True, True, False)
    """
    alone = isinstance(expected, list) and len(expected) == 1
    return _same(returned, expected) or (alone and _same(returned, expected[0]))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return _close(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        ours, theirs = ({_key_text(key): value for key, value in x.items()} for x in (a, b))
        return ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k]) for k in ours)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
    if isinstance(a, set | frozenset) and isinstance(b, Sequence):
        if len(a) != len(b):
            return False
        if len(a) > MAX_SET:
            try:
                return {_hashable(x) for x in a} == {_hashable(y) for y in b}
            except TypeError:  # a mapping among the expected values, which no set can hold
                return False
        return all(any(_same(x, y) for y in b) for x in a)
    return type(a) is type(b) and a == b


def _key_text(key: Any) -> str:
    try:
        return str(key)
    except ValueError:  # an integer with more digits than Python converts
        return "(too many digits)"


def _hashable(value: Any) -> Any:
    """A value of a set in a form that is equal where `_same` is, tolerances aside."""
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return ("bool", value) if isinstance(value, bool) else value
