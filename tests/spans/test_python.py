import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf.spans.parser import MixedParser, PythonParser, looks_like_code
from marlhf.spans.phrases import nested

pytest.importorskip("tree_sitter_python")
PROGRAM = """\
import os

def f(x):
    # sum ünïcode 🍎 of all
    return [y + "é" for y in x if y > 1]

print(f([1, 2]))
"""
BROKEN = (
    "def f(:\n  return",
    "for i in range(10)\n    print(i",
    'x = """never closed',
    "\tif True:\n  else:\n",
    "print 'python 2'",
    ")))",
    "class A:\n",
    "\ufffd = \u2028 3",
    "",
)


@pytest.mark.parametrize("text", [PROGRAM, *BROKEN])
def test_programs_are_parsed_however_broken(text):
    [phrases] = PythonParser()([text])
    assert nested(phrases) == phrases
    covered = {i for p in phrases for i in range(p.begin, p.end)}
    assert covered >= {i for i, c in enumerate(text) if c.isalnum()}


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_any_text_is_parsed_as_any_kind(text):
    for parser in (PythonParser(), MixedParser()):
        [phrases] = parser([text])
        assert nested(phrases) == phrases
        assert all(0 <= p.begin < p.end <= len(text) for p in phrases)


def test_bytes_become_the_right_characters():
    [phrases] = PythonParser()([PROGRAM])
    found = {(p.label, PROGRAM[p.begin : p.end]) for p in phrases}
    assert ("binary_operator", 'y + "é"') in found
    assert ("call", "print(f([1, 2]))") in found or (
        "expression_statement",
        "print(f([1, 2]))",
    ) in found
    assert ("comment", "# sum ünïcode 🍎 of all") in found
    assert ("PP", "of all") in found  # a comment is prose


def test_statements_are_what_sentences_are():
    [phrases] = PythonParser()(["x = 1\nif x:\n    y = 2\n"])
    roots = [
        p
        for p in phrases
        if not any(q.begin <= p.begin and p.end <= q.end for q in phrases if q != p)
    ]
    assert [p.label for p in roots] == ["expression_statement", "if_statement"]


def test_fenced_code_in_prose():
    text = "Here it is:\n```python\nx = [1]\n```\nIt is a list.\n```\ny = x"
    [phrases] = MixedParser()([text])
    found = [(p.label, text[p.begin : p.end]) for p in phrases]
    assert ("S", "Here it is:") in found
    assert ("expression_statement", "x = [1]") in found
    assert ("list", "[1]") in found
    assert ("NP", "a list") in found
    assert ("expression_statement", "y = x") in found  # a fence that nothing closed


def test_other_languages_in_fences_are_read_as_text():
    text = "```sql\nselect the names\n```"
    labels = {p.label for p in MixedParser()([text])[0]}
    assert labels <= {"S", "NP", "VP", "PP", "ADJP", "SBAR", ""}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (PROGRAM, True),
        ("n = int(input())\nprint(n * 2)", True),
        ("Return the book to me. Then go.", False),
        ("If you like it, take it:\nall of it.", False),
        ("", False),
    ],
)
def test_programs_are_told_from_prose(text, code):
    assert looks_like_code(text) is code
