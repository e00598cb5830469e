"""Hostile programs get nowhere, honest ones run, and nothing stays behind."""

import errno
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from marlhf.reward import sandbox as package
from marlhf.reward.sandbox import (
    Call,
    Case,
    Opaque,
    Outcome,
    Program,
    Sandbox,
    SandboxUnavailable,
    SandboxWarning,
    Suite,
    pool,
    seccomp,
    worker,
)
from marlhf.reward.sandbox.values import decode, encode

HERE = Path(__file__).parent
PRELUDE = """
import os, ctypes, platform
LIBC = ctypes.CDLL(None, use_errno=True)
def breach(deed):
    try:
        deed()
    except Exception:
        return
    print("BREACH", deed.__code__.co_firstlineno, flush=True)
def raw(x86, arm, *arguments):
    number = x86 if platform.machine() == "x86_64" else arm
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if number >= 0 and LIBC.syscall(ctypes.c_long(number), *longs) != -1:
        print("BREACH", number, flush=True)
"""
WALLS = {
    "all": {"namespaces": True, "landlock": True, "seccomp": True},
    "landlock": {"namespaces": False, "landlock": True, "seccomp": True},
    "namespaces": {"namespaces": True, "landlock": False, "seccomp": True},
}
LAYERS = {
    "all": ("namespaces", "landlock"),
    "landlock": ("landlock",),
    "namespaces": ("namespaces",),
}
# Without torch, which the package around the sandbox would load: seconds, in each process.
ALONE = "\n".join(
    line for line in worker._BOOT.splitlines() if "server" not in line and "main(" not in line
)


def hostile() -> dict[str, tuple[str, set[str]]]:
    """Source and permitted statuses by title."""
    parts = re.split(
        r"^=== (.+): ([a-z_ ]+)\n", (HERE / "hostile.txt").read_text("utf-8"), flags=re.M
    )
    special = {
        "@DEEP@": "(" * 5000 + ")" * 5000,
        "@LONG@": "x = " + " + ".join(["1"] * 50_000),
        "@NULL@": "\0",
        "@SURROGATE@": "\ud800",
    }
    found = {}
    for title, statuses, source in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        for name, text in special.items():
            source = source.replace(name, text)
        found[title] = (source, set(statuses.split()))
    return found


HOSTILE = hostile()


class Host:
    """Things of the host's that a program might go for."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.file = folder / "secret"
        self.file.write_text("secret")
        self.file.chmod(0o666)
        self.process = subprocess.Popen(["sleep", "600"])
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.name = f"marlhf-test-{os.getpid()}"
        self.path = f"/tmp/{self.name}"
        self.unix.bind(self.path)
        self.abstract.bind(f"\0{self.name}")
        for listener in (self.unix, self.abstract):
            listener.listen()
        self.before = os.stat(self.file)

    def fill(self, source: str) -> str:
        port = self.tcp.getsockname()[1]
        known = {"FILE": self.file, "FOLDER": self.file.parent, "PID": self.process.pid}
        known |= {"PORT": port, "PATH": self.path, "ABSTRACT": self.name}
        return re.sub("@([A-Z]+)@", lambda m: str(known[m[1]]), source)

    def unharmed(self) -> bool:
        now = os.stat(self.file)
        same = (now.st_mode, now.st_mtime, now.st_uid) == (
            self.before.st_mode,
            self.before.st_mtime,
            self.before.st_uid,
        )
        alone = os.listdir(self.file.parent) == ["secret"]
        return same and alone and self.file.read_text() == "secret" and self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for listener in (self.tcp, self.unix, self.abstract):
            listener.close()
        os.unlink(self.path)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = Host(tmp_path_factory.mktemp("host"))
    yield host
    host.close()


def build(walls="all", **options):
    """A sandbox with these walls, or a skip that says why there is none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_PLANS", (WALLS[walls],))
        try:
            return Sandbox(**{"workers": 2, "memory_mb": 192, "seconds": 20.0} | options)
        except SandboxUnavailable as error:
            pytest.skip(f"no sandbox of {walls} here: {error}")


@pytest.fixture(scope="module")
def sandbox():
    with build() as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def run(sandbox):
    def run(source, stdin="", **options) -> Outcome:
        [outcome] = sandbox.run([Program(source, stdin, **options)])
        return outcome

    return run


@pytest.fixture(scope="module")
def outcomes(host):
    """`outcomes(walls)`: what becomes of all hostile programs behind them, run once."""
    known: dict[str, dict[str, Outcome]] = {}

    def find(walls: str) -> dict[str, Outcome]:
        if walls not in known:
            programs = []
            for source, statuses in HOSTILE.values():
                seconds = 0.4 if statuses == {"timeout"} else 2.0 if "timeout" in statuses else 20.0
                programs.append(Program(PRELUDE + host.fill(source), seconds=seconds))
            with build(walls) as sandbox:
                for layer in LAYERS[walls]:
                    assert sandbox.layers[layer]
                known[walls] = dict(zip(HOSTILE, sandbox.run(programs), strict=True))
                [after] = sandbox.run([Program("print('alive')")])
                assert after.stdout == "alive\n"
        return known[walls]

    return find


@pytest.mark.parametrize("title", HOSTILE)
def test_hostile_programs_get_nowhere(title, outcomes):
    outcome = outcomes("all")[title]
    assert "BREACH" not in outcome.stdout
    assert outcome.status in HOSTILE[title][1], outcome


@pytest.mark.parametrize("walls", ["landlock", "namespaces"])
def test_hostile_programs_get_nowhere_with_a_wall_less(walls, outcomes):
    for title, outcome in outcomes(walls).items():
        assert "BREACH" not in outcome.stdout, (title, outcome)
        assert outcome.status in HOSTILE[title][1] | {"runtime_error"}, (title, outcome)


def test_the_host_is_unharmed(outcomes, host):
    for walls in WALLS:
        outcomes(walls)
    assert host.unharmed()
    for listener in (host.tcp, host.unix, host.abstract):
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has called
            listener.accept()


def test_no_call_off_the_list_is_let_through(run):
    machine = os.uname().machine
    known = seccomp.numbers(seccomp._TABLE, machine) | seccomp.numbers(seccomp._RULED, machine)
    others = sorted(set(range(600)) - set(known.values()))
    tell = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for number in map(int, input().split()):
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        print(number, ctypes.get_errno())
"""
    outcome = run(tell, " ".join(map(str, others)))
    assert (outcome.status, outcome.stdout) == ("ok", "")


def verdict(machine: str, name_or_number, *arguments: int, audit: int | None = None) -> str:
    """What the filter of process 7 says to a call: classic BPF, step by step."""
    known = seccomp.numbers(seccomp._TABLE + "," + seccomp._RULED, machine)
    number = known.get(name_or_number, name_or_number)
    words = [number, seccomp.AUDIT_ARCH[machine] if audit is None else audit, 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        words += [argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF]
    packed = seccomp.pack(seccomp.build(machine, 7))
    at, held = 0, 0
    while True:
        code, yes, no, operand = struct.unpack_from("<HBBI", packed, 8 * at)
        at += 1
        if code == 0x06:
            return {0x7FFF0000: "allow", 0x80000000: "kill"}.get(operand) or str(operand - 0x50000)
        if code == 0x20:
            held = words[operand // 4]
        elif code == 0x54:
            held &= operand
        else:
            at += yes if (held == operand if code == 0x15 else held >= operand) else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_by_hand(machine):
    """Both architectures, whichever this machine is."""
    execve, fork, open_ = {"x86_64": (59, 57, 2), "aarch64": (221, 1079, 1024)}[machine]
    denied, missing, pretended = str(errno.EPERM), str(errno.ENOSYS), "0"
    thread, high = 0x3D0F00, 1 << 32
    expected = [
        ("allow", "read"),
        ("allow", "getsockopt"),  # the last one of the table
        (denied, execve),
        (denied, fork),
        ("allow" if machine == "x86_64" else denied, open_),
        (denied, 10_000),
        ("allow", "clone", thread),
        (denied, "clone", 17),
        (denied, "clone", thread | 0x10000000),
        (missing, "clone3"),
        ("allow", "kill", 7, 9),
        (denied, "kill", 8, 9),
        (denied, "kill", -1, 9),
        (denied, "kill", 0, 9),
        ("allow", "tgkill", 7, 7, 6),
        (denied, "tgkill", 8, 8, 6),
        ("allow", "ioctl", 1, 0x5401),
        (denied, "ioctl", 0, 0x5412),  # TIOCSTI
        ("allow", "fcntl", 0, 1030),
        (denied, "fcntl", 0, 8),
        ("allow", "prctl", 15),
        (denied, "prctl", 1),
        ("allow", "socketpair", 1, 1),
        ("allow", "socketpair", 1, 1 | 0x80000),
        (denied, "socketpair", 1, 2),
        (denied, "socketpair", 2, 1),
        ("allow", "sendto", 3, 4096, 1),
        (denied, "sendto", 3, 4096, 1, 0, 4096),
        (denied, "sendto", 3, 4096, 1, 0, high),
        ("allow", "prlimit64", 0, 3, 0, 4096),
        (pretended, "prlimit64", 0, 3, 4096),
        (pretended, "prlimit64", 7, 3, high),
        (denied, "prlimit64", 8, 3),
        (pretended, "setrlimit"),
    ]
    for said, *call in expected:
        assert verdict(machine, *call) == said, call
    assert verdict(machine, "read", audit=0x40000003) == "kill"
    if machine == "x86_64":
        assert verdict(machine, 0x40000000) == "kill"  # x32


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


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_run(name, run):
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
    with pytest.raises(TypeError, match="a Opaque cannot go into the sandbox"):
        run("", calls=[Call("f", [Opaque("x")])])


def test_keys_chosen_to_collide_do_not_hold_up_the_host(run):
    began = time.monotonic()
    source = "def f(): return [{n * (2**61 - 1): 0} for n in range(20000)]"
    assert run(source, calls=[Call("f")]).status == "ok"
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
    source = (
        "import os\nn = int(input())\nprint(n, os.path.exists('mark'))\nopen('mark', 'x')\n1 // n"
    )
    cases = [Case(str(n)) for n in (1, 2, 0, 4)]
    [all_four] = sandbox.run_suites([Suite(source, cases)])
    assert [o.stdout for o in all_four] == ["1 False\n", "2 False\n", "0 False\n", "4 False\n"]
    assert [o.status for o in all_four] == ["ok", "ok", "runtime_error", "ok"]
    [three, none] = sandbox.run_suites([Suite(source, cases, stop_early=True), Suite(source, [])])
    assert [o.status for o in three] == ["ok", "ok", "runtime_error"]
    assert none == []
    [broken] = sandbox.run_suites([Suite("x = (", cases)])
    assert [o.status for o in broken] == ["compile_error"] * 4


def test_one_program_leaves_nothing_for_the_next(sandbox):
    spoil = "import os, math, builtins\nmath.pi = 3\nbuiltins.x = 1\nopen('left', 'w')\nos.umask(0)"
    look = "import os, math\nprint(math.pi > 3.1, 'x' in dir(__builtins__), os.listdir('/tmp'))"
    outcomes = sandbox.run([Program(p) for p in [spoil, look] * 4])
    assert {o.stdout for o in outcomes[1::2]} == {"True False ['.stdin']\n"}


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


def test_output_is_cut_at_the_limit():
    with build(output_bytes=1000, preload=()) as sandbox:
        [within, beyond] = sandbox.run([Program("print('x' * 999)"), Program("print('x' * 1000)")])
    assert (within.status, len(within.stdout)) == ("ok", 1000)
    assert (beyond.status, len(beyond.stdout)) == ("output_limit", 1000)


def test_a_dead_server_is_replaced(sandbox):
    for victim in sandbox._workers:
        os.killpg(victim.process.pid, signal.SIGKILL)
        victim.process.wait()
    assert [o.stdout for o in sandbox.run([Program("print(1)")] * 4)] == ["1\n"] * 4


def test_a_server_that_dies_under_its_program_is_replaced():
    with build(workers=1, preload=()) as sandbox:

        def shoot():
            time.sleep(0.3)
            os.killpg(sandbox._workers[0].process.pid, signal.SIGKILL)

        thread = threading.Thread(target=shoot)
        thread.start()
        [outcome] = sandbox.run([Program("import time\ntime.sleep(1)\nprint('again')")])
        thread.join()
    assert outcome.stdout == "again\n"


def test_the_pool_is_shared_by_threads(sandbox):
    found = {}

    def ask(n):
        found[n] = sandbox.run([Program(f"print({n})")] * 3)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: [o.stdout for o in os] for n, os in found.items()} == {
        n: [f"{n}\n"] * 3 for n in range(4)
    }


def test_a_fork_of_the_host_needs_its_own(sandbox, monkeypatch):
    monkeypatch.setattr(sandbox, "_owner", 1)
    with pytest.raises(RuntimeError, match="Make a Sandbox here"):
        sandbox.run([Program("")])


def test_a_closed_sandbox_says_so():
    with build(workers=1, preload=()) as sandbox:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.run([Program("")])


def family(pid: int) -> set[int]:
    """A process and all below it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def gone(pids: set[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("walls", ["all", "landlock"])
def test_nothing_is_left_after_close(walls):
    with build(walls, preload=()) as sandbox:
        thread = threading.Thread(target=sandbox.run, args=([Program("while 1: pass", seconds=1)],))
        thread.start()
        time.sleep(0.3)
        pids = {p for w in sandbox._workers for p in family(w.process.pid)}
        thread.join()
    assert len(pids) >= 3
    assert gone(pids)


FOREVER = """
import warnings
from marlhf.reward.sandbox import Program, Sandbox, pool
warnings.simplefilter("ignore")
pool._PLANS = (settings["walls"],)
sandbox = Sandbox(workers=2, preload=(), seconds=100.0)
print("up", flush=True)
sandbox.run([Program("while 1: pass")] * 2)
"""


@pytest.mark.parametrize("walls", ["all", "landlock"])
def test_nothing_is_left_when_the_host_process_is_killed(walls):
    build(walls, workers=1, preload=()).close()
    process = start_alone(FOREVER, {"walls": WALLS[walls]})
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    time.sleep(0.5)
    pids = family(process.pid)
    assert len(pids) >= 5  # the host process, two servers, two programs
    process.kill()
    process.wait()
    assert gone(pids)


def usable(python: str, user: dict) -> bool:
    """Whether it is new enough, and open to that user as our source is."""
    look = "import sys; open(sys.argv[1]); sys.exit(sys.version_info < (3, 10))"
    try:
        told = subprocess.run([python, "-c", look, package.__file__], cwd="/", **user)
    except OSError:
        return False
    return told.returncode == 0


def start_alone(code: str, settings: dict, python=sys.executable, **options) -> subprocess.Popen:
    folder = Path(package.__file__).parent
    folders = {"marlhf": folder.parent.parent, "marlhf.reward": folder.parent}
    told = {**settings, "folders": {name: str(path) for name, path in folders.items()}}
    command = [python, "-c", ALONE + code, json.dumps(told)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/", **options)


ORDINARY = """
import os
from marlhf.reward.sandbox import Program, Sandbox
assert os.getuid() == 65534
sandbox = Sandbox(workers=2, memory_mb=192, seconds=20.0)
programs = [Program(source, seconds=seconds) for source, seconds in settings["programs"]]
outcomes = sandbox.run([Program("print(input())", "honest"), *programs])
print(json.dumps([sandbox.layers, [[o.status, o.stdout, o.stderr] for o in outcomes]]))
"""


def test_an_ordinary_user_has_the_same_walls(host, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    build(workers=1, preload=()).close()
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    python = next((p for p in (sys.executable, "/usr/bin/python3") if usable(p, nobody)), None)
    if python is None:
        pytest.skip("no Python here that an ordinary user can run")
    chosen = {t: s for t, (s, _) in HOSTILE.items() if "timeout" not in HOSTILE[t][1]}
    sources = [(PRELUDE + host.fill(s), 20.0) for s in chosen.values() if len(s) < 20_000]
    process = start_alone(ORDINARY, {"programs": sources}, python, **nobody)
    told, _ = process.communicate(timeout=300)
    layers, [honest, *others] = json.loads(told)
    assert layers["namespaces"] or layers["landlock"]
    assert layers["seccomp"] is True
    assert honest[:2] == ["ok", "honest\n"]
    assert len(others) > 50
    for title, (status, stdout, stderr) in zip(chosen, others):
        assert "BREACH" not in stdout, (title, stdout)
        assert status != "sandbox_error", (title, stderr)


def test_weak_walls_are_refused(monkeypatch):
    bare = {"namespaces": False, "landlock": True, "seccomp": False}
    monkeypatch.setattr(pool, "_PLANS", (bare,))
    with pytest.raises(SandboxUnavailable, match=r"seccomp: .*allow_weak=True"):
        Sandbox(workers=1, preload=())
    with pytest.warns(SandboxWarning, match="ALMOST FREELY"):
        sandbox = Sandbox(workers=1, preload=(), allow_weak=True)
    with sandbox:
        assert sandbox.layers["seccomp"] is False
        assert [o.stdout for o in sandbox.run([Program("print(1)")])] == ["1\n"]


def test_seccomp_alone_is_refused(monkeypatch):
    bare = {"namespaces": False, "landlock": False, "seccomp": True}
    monkeypatch.setattr(pool, "_PLANS", (bare,))
    with pytest.raises(SandboxUnavailable, match=r"namespaces: .*landlock: "):
        Sandbox(workers=1, preload=())


def test_a_mount_that_fails_is_said_aloud(monkeypatch):
    """Never a quiet step down: the layers and a warning give the reason."""
    build("landlock", workers=1, preload=()).close()
    fails = [{"namespaces": True, "landlock": True, "seccomp": True, "readable": ["/dev/null"]}]
    readable = {"readable": pool._readable()}
    fails.append({"namespaces": False, "landlock": True, "seccomp": True, **readable})
    monkeypatch.setattr(pool, "_PLANS", tuple(fails))
    with pytest.warns(SandboxWarning, match="namespaces: "):
        sandbox = Sandbox(workers=1, preload=())
    with sandbox:
        assert sandbox.layers["namespaces"] is False
        assert "FileExistsError" in str(sandbox.layers["no namespaces"])


def test_a_leak_found_at_the_start_is_refused(monkeypatch):
    build(workers=1, preload=()).close()
    monkeypatch.setattr(pool, "_PROBE", "def leaks(): return ['files']")
    with pytest.raises(SandboxUnavailable, match="leaks"):
        Sandbox(workers=1, preload=())


def test_layers_are_json(sandbox):
    assert json.loads(json.dumps(sandbox.layers)) == sandbox.layers
    assert sandbox.layers["seccomp"] is True
