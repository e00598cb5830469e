"""Honest programs run as they would anywhere, and what they return comes back as it was."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from marlhf.reward.sandbox import (
    Call,
    Case,
    Opaque,
    Outcome,
    Program,
    Sandbox,
    SandboxUnavailable,
    Suite,
)
from marlhf.reward.sandbox.protocol import decode, encode


@pytest.fixture(scope="module")
def sandbox():
    try:
        sandbox = Sandbox(workers=2, memory_mb=192, seconds=20.0)
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox here: {error}")
    with sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def run(sandbox):
    def run(source, stdin="", **options) -> Outcome:
        [outcome] = sandbox.run([Program(source, stdin, **options)])
        return outcome

    return run


HONEST = {
    "input": ("print(int(input()) + int(input()))", "1\n2\n", "3\n"),
    "no input": ("print('hello')", "", "hello\n"),
    "lines": ("import sys\nprint([line.rstrip() for line in sys.stdin])", "a\nb", "['a', 'b']\n"),
    "bytes": ("import sys\nprint(sys.stdin.buffer.read())", b"\xff\x00\n", "b'\\xff\\x00\\n'\n"),
    "open(0)": ("print(open(0).read().split())", "1 2\n3", "['1', '2', '3']\n"),
    "os.read": ("import os\nprint(os.read(0, 99))", "abc", "b'abc'\n"),
    "dev stdin": ("print(open('/dev/stdin').read())", "abc", "abc\n"),
    "carriage returns": ("print(repr(input()))", "a\r\n", "'a'\n"),
    "end of input": ("try:\n    input()\nexcept EOFError:\n    print('end')", "", "end\n"),
    "much input": ("print(len(input()))", "x" * 3_000_000, "3000000\n"),
    "prompt": ("print(input('? '))", "x", "? x\n"),
    "unicode": ("print(input()[::-1], '\u2603')", "äö😀", "😀öä \u2603\n"),
    "no newline": ("import sys\nsys.stdout.write('x')", "", "x"),
    "print to fd": ("import os\nos.write(1, b'x')", "", "x"),
    "exit": ("import sys\nprint(1)\nsys.exit()", "", "1\n"),
    "exit 0": ("print(1)\nraise SystemExit(0)", "", "1\n"),
    "main": ("def main(): print('in')\nif __name__ == '__main__': main()", "", "in\n"),
    "atexit": ("import atexit\natexit.register(print, 'bye')\nprint('hi')", "", "hi\nbye\n"),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10**6)\n"
        "def f(n): return n and 1 + f(n - 1)\nprint(f(20000))",
        "",
        "20000\n",
    ),
    "thread with a large stack": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def main(): print('in a thread')\nt = threading.Thread(target=main)\nt.start()\nt.join()",
        "",
        "in a thread\n",
    ),
    "thread not waited for": (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()",
        "",
        "late\n",
    ),
    "thread pool": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool: print(sum(pool.map(abs, range(-9, 1))))",
        "",
        "45\n",
    ),
    "asyncio": (
        "import asyncio\nasync def main():\n    await asyncio.sleep(0.01)\n    print('awaited')\n"
        "asyncio.run(main())",
        "",
        "awaited\n",
    ),
    "tempfile": (
        "import tempfile, os\nwith tempfile.TemporaryDirectory() as folder:\n"
        "    path = os.path.join(folder, 'x')\n    open(path, 'w').write('kept')\n"
        "    print(open(path).read())\n"
        "with tempfile.TemporaryFile() as f: print(f.write(b'12'))",
        "",
        "kept\n2\n",
    ),
    "file in the folder": ("open('a', 'w').write('x')\nprint(open('a').read())", "", "x\n"),
    "stack limit": (
        "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 29, -1))\nprint('up')",
        "",
        "up\n",
    ),
    "alarm": (
        "import signal\ndef ring(*_): print('rang')\nsignal.signal(signal.SIGALRM, ring)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()",
        "",
        "rang\n",
    ),
    "libraries": (
        "import collections, heapq, itertools, functools, bisect, re, decimal, fractions, string\n"
        "import datetime, random, json, csv, statistics, dataclasses, enum, typing, uuid, zlib\n"
        "import math, unittest, inspect, pprint, textwrap, difflib, bz2, sqlite3\nprint('all')",
        "",
        "all\n",
    ),
    "subclass": (
        "class A(list):\n    def __repr__(self): return 'A' + super().__repr__()\n"
        "class B(A): pass\nprint(B([1]), B.__module__)",
        "",
        "A[1] __main__\n",
    ),
    "pickle of its own": (
        "import pickle\nclass A: x = 1\nprint(pickle.loads(pickle.dumps(A())).x)",
        "",
        "1\n",
    ),
    "large numbers": ("print(len(str(2 ** 10000)))", "", "3011\n"),
    "future": ("from __future__ import annotations\ndef f(x: Y): pass\nprint(1)", "", "1\n"),
    "eager annotations": (
        "def f(x: print('now')): pass" if sys.version_info < (3, 14) else "print('now')",
        "",
        "now\n",
    ),
    "hash seed": ("print(hash('a') == hash('a'), sorted({'b', 'a'}))", "", "True ['a', 'b']\n"),
    "files": ("import os\nprint(os.listdir(), os.getcwd())", "", None),
}


WRITERS = ("tempfile", "file in the folder", "files")


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_run(name, run, sandbox):
    if name in WRITERS and not sandbox.layers["tmpfs"]:
        pytest.skip("without namespaces there is no folder to write to")
    source, stdin, expected = HONEST[name]
    outcome = run(source, stdin)
    assert outcome.status == "ok", outcome
    assert expected is None or outcome.stdout == expected


def test_numpy_runs(run):
    pytest.importorskip("numpy")
    outcome = run("import numpy as np\nprint(np.linalg.inv(np.eye(3) * 2).trace())")
    assert (outcome.status, outcome.stdout) == ("ok", "1.5\n")


def test_calls_return_plain_values(run):
    source = """
from collections import Counter, namedtuple
class Solution:
    def add(self, a, b=1): return a + b
class Num(int): pass
class Odd: pass
P = namedtuple("P", "x y")
def kinds():
    return [(1, 2), {3}, {"k": 1.5, 2: None}, Num(7), 2 ** 100, b"x", 1j, True, Counter("aa")]
def odd(): return Odd(), P(1, 2)
"""
    calls = [Call("add", [1]), Call("Solution.add", [1], {"b": 5}), Call("kinds"), Call("odd")]
    outcome = run(source, calls=[*calls, Call("{1, 2} | set([3])", None)])
    assert outcome.status == "ok", outcome
    assert outcome.returned is not None
    added, more, kinds, odd, union = outcome.returned
    assert (added, more, union) == (2, 6, {1, 2, 3})
    wanted = [(1, 2), {3}, {"k": 1.5, 2: None}, 7, 2**100, b"x", 1j, True, {"a": 2}]
    assert kinds == wanted
    assert [type(k) for k in kinds] == [type(w) for w in wanted]
    assert isinstance(odd[0], Opaque)
    assert odd[1] == (1, 2)


def test_numpy_values_come_back_as_lists_and_numbers(run):
    pytest.importorskip("numpy")
    source = "import numpy as np\ndef f(): return np.arange(3), np.int64(4), np.float32(0.5)"
    assert run(source, calls=[Call("f")]).returned == [([0, 1, 2], 4, 0.5)]


def test_values_survive_the_journey():
    for value in [
        None,
        -1.5,
        float("inf"),
        "\ud800",
        [],
        (),
        {},
        {(1, "a"): {2}},
        frozenset({b""}),
    ]:
        assert decode(json.loads(json.dumps(encode(value)))) == value


def test_arguments_of_every_plain_kind_go_in(run):
    given = [(1, 2), {3}, {4: "x"}, b"y", 1j, [None, True], 10**30]
    outcome = run("def same(*args): return list(args)", calls=[Call("same", given)])
    assert outcome.returned == [given]
    with pytest.raises(TypeError, match="a Opaque cannot be sent into the sandbox"):
        run("", calls=[Call("f", [Opaque("x")])])


def test_keys_chosen_to_collide_do_not_hold_up_the_host(run):
    began = time.monotonic()
    forge = """
import json, os
pairs = [[{"$": "int", "v": hex(n * (2**61 - 1))}, 0] for n in range(20000)]
data = json.dumps({"value": {"$": "dict", "v": pairs}}).encode() + b"\\n"
while data:
    data = data[os.write(5, data):]
def f(): return 1
"""
    assert run(forge, calls=[Call("f")]).status == "runtime_error"
    assert time.monotonic() - began < 20


FORGERIES = {
    "leaves early": "import os\nos._exit(0)",
    "exits early": "raise SystemExit(0)",
    "exits in the call": "import sys\ndef f(): sys.exit(0)",
    "leaves in the call": "import os\ndef f(): os._exit(0)",
    "prints a result": "import os\nprint('{\"value\": 3}')\nos._exit(0)",
    "spoils the report": 'import os\nos.write(5, b\'{"value": {"$": 1}}\\n\')\ndef f(): return 3',
    "nests the report": "import os\nos.write(5, b'[' * 100000 + b'\\n')\ndef f(): return 3",
    "reports half a line": "import os\nos.write(5, b'{\"value\": ')\nos._exit(0)",
    "defines nothing": "",
    "raises": "def f(): raise ValueError('no')",
    "raises SystemExit's child": "class E(SystemExit): pass\ndef f(): raise E(0)",
    "returns itself": "def f():\n    x = []\n    x.append(x)\n    return x",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_calls_that_did_not_return_are_no_success(name, run):
    outcome = run(FORGERIES[name], calls=[Call("f")])
    assert outcome.status == "runtime_error", outcome
    assert not outcome.returned or outcome.returned == [3]


def test_equality_cannot_be_bribed(run):
    source = (
        "class Yes(int):\n    def __eq__(self, other): return True\ndef f(): return Yes(1), Yes"
    )
    outcome = run(source, calls=[Call("f")])
    assert outcome.returned is not None
    one, yes = outcome.returned[0]
    assert one != 2
    assert yes != 2


def test_values_before_a_failure_are_kept(run):
    outcome = run("def f(n): return 1 // n", calls=[Call("f", [1]), Call("f", [0]), Call("f", [1])])
    assert outcome.status == "runtime_error"
    assert outcome.returned == [1]
    assert "ZeroDivisionError" in outcome.stderr
    assert "sandbox" not in outcome.stderr  # the traceback begins in the program


def test_a_suite_compiles_once_and_starts_afresh(sandbox):
    source = "import math\nn = int(input())\nprint(n, math.pi > 3)\nmath.pi = 0\n1 is n\n1 // n"
    cases = [Case(str(n)) for n in (1, 2, 4, 0, 3)]
    [four, none] = sandbox.run_suites([Suite(source, cases), Suite(source, [])])
    assert [o.stdout for o in four] == ["1 True\n", "2 True\n", "4 True\n", "0 True\n"]
    assert [o.status for o in four] == ["ok", "ok", "ok", "runtime_error"]  # 3 is not run
    warned = ["SyntaxWarning" in o.stderr for o in four]  # by the compiler, at `1 is n`
    assert warned == [True, False, False, False]
    assert none == []
    [broken] = sandbox.run_suites([Suite("x = (", cases)])
    assert [o.status for o in broken] == ["compile_error"]


def test_one_program_leaves_nothing_for_the_next(sandbox):
    if not sandbox.layers["tmpfs"]:
        pytest.skip("without namespaces there is no folder to write to")
    # Python's own folders are shown, read-only, where it is installed in /tmp, as in a clone there.
    parts = [Path(os.path.realpath(path)).parts for path in sandbox._settings["readable"]]
    python = {names[2] for names in parts if names[:2] == ("/", "tmp")}
    spoil = (
        "import os, math, builtins\nmath.pi = 3\nbuiltins.x = 1\nopen('left', 'w')\nos.umask(0)\n"
        f"for folder in {sorted(python)}:\n"
        "    try:\n"
        "        open(f'/tmp/{folder}/left', 'w')\n"
        "    except OSError:\n"
        "        continue\n"
        "    raise SystemExit('a folder of Python can be written')"
    )
    look = (
        "import os, math\n"
        "print(math.pi > 3.1, 'x' in dir(__builtins__), sorted(os.listdir('/tmp')))"
    )
    outcomes = sandbox.run([Program(p) for p in [spoil, look] * 4])
    assert {o.status for o in outcomes} == {"ok"}
    left = sorted({".stdin", *python})
    assert {o.stdout for o in outcomes[1::2]} == {f"True False {left}\n"}


def test_order_is_kept_and_the_clock_is_each_programs_own(sandbox):
    programs = [
        Program("import time\nn = input()\ntime.sleep(float(n))\nprint(n)", str(n / 50))
        for n in (9, 1, 5, 0, 3)
    ]
    assert [float(o.stdout) for o in sandbox.run(programs)] == [0.18, 0.02, 0.1, 0.0, 0.06]
    began = time.monotonic()
    assert [o.status for o in sandbox.run([Program("while 1: pass", seconds=0.2)] * 4)] == [
        "timeout"
    ] * 4
    assert time.monotonic() - began < 10


def test_a_large_batch_holds_few_descriptors(sandbox):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 50, hard))
    try:
        outcomes = sandbox.run([Program(f"print({n})") for n in range(100)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [o.stdout for o in outcomes] == [f"{n}\n" for n in range(100)]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("exit()", "ok"),
        ("quit()", "ok"),
        ("exit(0)", "ok"),
        ("exit(3)", "runtime_error"),
        ("quit('no')", "runtime_error"),
        ("help(exit)", "ok"),
        ("str(copyright) + str(credits) + repr(license)", "ok"),
    ],
)
def test_what_site_adds_to_python_is_there(run, end, status):
    """Programs end in `exit()` on contest sites, and score there what they score here."""
    outcome = run(f"print(1)\n{end}")
    assert outcome.status == status, outcome
    assert outcome.stdout.startswith("1\n")
    assert "NameError" not in outcome.stderr


def test_builtins_are_those_of_plain_python(run):
    source = "import builtins\nprint(sorted(dir(builtins)))"
    plain = subprocess.run([sys.executable, "-I", "-c", source], capture_output=True, text=True)
    assert run(source).stdout == plain.stdout
