"""Hostile programs get nowhere, servers come and go, and nothing stays behind."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import venv
from pathlib import Path

import pytest

from marlhf.reward import sandbox as package
from marlhf.reward.sandbox import (
    Outcome,
    Program,
    Sandbox,
    SandboxUnavailable,
    SandboxWarning,
    pool,
    seccomp,
    worker,
)

HERE = Path(__file__).parent
PRELUDE = """
import os, ctypes, platform
LIBC = ctypes.CDLL(None, use_errno=True)
def breach(action):
    try:
        action()
    except Exception:
        return
    print("BREACH", action.__code__.co_firstlineno, flush=True)
def raw(x86, arm, *arguments):
    number = x86 if platform.machine() == "x86_64" else arm
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if number >= 0 and LIBC.syscall(ctypes.c_long(number), *longs) != -1:
        print("BREACH", number, flush=True)
"""
LAYERS = {
    "all": {"namespaces": True, "landlock": True, "seccomp": True},
    "landlock": {"namespaces": False, "landlock": True, "seccomp": True},
    "namespaces": {"namespaces": True, "landlock": False, "seccomp": True},
}
REQUIRED_LAYERS = {
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


def build(chosen_layers="all", **options):
    """A sandbox with these layers, or a skip that says why there is none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_LAYER_CHOICES", (LAYERS[chosen_layers],))
        try:
            return Sandbox(**{"workers": 2, "memory_mb": 192, "seconds": 20.0} | options)
        except SandboxUnavailable as error:
            pytest.skip(f"no sandbox of {chosen_layers} here: {error}")


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
    """`outcomes(chosen_layers)`: what becomes of all hostile programs behind them, run once."""
    known: dict[str, dict[str, Outcome]] = {}

    def find(chosen_layers: str) -> dict[str, Outcome]:
        if chosen_layers not in known:
            programs = []
            for source, statuses in HOSTILE.values():
                seconds = 0.4 if statuses == {"timeout"} else 2.0 if "timeout" in statuses else 20.0
                programs.append(Program(PRELUDE + host.fill(source), seconds=seconds))
            with build(chosen_layers, workers=6) as sandbox:  # many wait for their deadline
                for layer in REQUIRED_LAYERS[chosen_layers]:
                    assert sandbox.layers[layer]
                known[chosen_layers] = dict(zip(HOSTILE, sandbox.run(programs), strict=True))
                [after] = sandbox.run([Program("print('alive')")])
                assert after.stdout == "alive\n"
        return known[chosen_layers]

    return find


@pytest.mark.parametrize("title", HOSTILE)
def test_hostile_programs_get_nowhere(title, outcomes):
    outcome = outcomes("all")[title]
    assert "BREACH" not in outcome.stdout
    assert outcome.status in HOSTILE[title][1], outcome


@pytest.mark.parametrize("chosen_layers", ["landlock", "namespaces"])
def test_hostile_programs_get_nowhere_with_one_layer_less(chosen_layers, outcomes):
    for title, outcome in outcomes(chosen_layers).items():
        assert "BREACH" not in outcome.stdout, (title, outcome)
        assert outcome.status in HOSTILE[title][1] | {"runtime_error"}, (title, outcome)


def test_the_host_is_unharmed(outcomes, host):
    for chosen_layers in LAYERS:
        outcomes(chosen_layers)
    assert host.unharmed()
    for listener in (host.tcp, host.unix, host.abstract):
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has called
            listener.accept()


def test_no_call_off_the_list_is_let_through(run):
    machine = os.uname().machine
    known = seccomp.numbers(seccomp._TABLE, machine) | seccomp.numbers(seccomp._WITH_RULES, machine)
    # The kernel shows no filter its own calls at the ends of probed functions (uretprobe, uprobe);
    # from anywhere else they only raise SIGILL or fail.
    unfiltered = {335, 336} if machine == "x86_64" else set[int]()
    others = sorted(set(range(600)) - set(known.values()) - unfiltered)
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
    known = seccomp.numbers(seccomp._TABLE + "," + seccomp._WITH_RULES, machine)
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
    with pytest.raises(RuntimeError, match="Create a Sandbox here"):
        sandbox.run([Program("")])


def test_close_is_quick_though_a_fork_holds_the_socket():
    sandbox = build(workers=1, preload=())
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    began = time.monotonic()
    sandbox.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert time.monotonic() - began < 5


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


@pytest.mark.parametrize("chosen_layers", ["all", "landlock"])
def test_nothing_is_left_after_close(chosen_layers):
    with build(chosen_layers, preload=()) as sandbox:
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
pool._LAYER_CHOICES = (settings["chosen_layers"],)
sandbox = Sandbox(workers=2, preload=(), seconds=100.0)
print("up", flush=True)
sandbox.run([Program("while 1: pass")] * 2)
"""


@pytest.mark.parametrize("chosen_layers", ["all", "landlock"])
def test_nothing_is_left_when_the_host_process_is_killed(chosen_layers):
    build(chosen_layers, workers=1, preload=()).close()
    process = start_alone(FOREVER, {"chosen_layers": LAYERS[chosen_layers]})
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
        process = subprocess.run([python, "-c", look, package.__file__], cwd="/", **user)
    except OSError:
        return False
    return process.returncode == 0


def start_alone(
    code: str, settings: dict, python=sys.executable, before=(), **options
) -> subprocess.Popen:
    folder = Path(package.__file__).parent
    folders = {"marlhf": folder.parent.parent, "marlhf.reward": folder.parent}
    told = {**settings, "folders": {name: str(path) for name, path in folders.items()}}
    command = [*before, python, "-c", ALONE + code, json.dumps(told)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/", **options)


ORDINARY = """
import os, warnings
from marlhf.reward.sandbox import Program, Sandbox, pool
assert os.getuid() == 65534
warnings.simplefilter("ignore")
pool._LAYER_CHOICES = (settings["chosen_layers"],)
sandbox = Sandbox(workers=2, memory_mb=192, seconds=20.0)
programs = [Program(source, seconds=seconds) for source, seconds in settings["programs"]]
outcomes = sandbox.run([Program("print(input())", "honest"), *programs])
print(json.dumps([sandbox.layers, [[o.status, o.stdout, o.stderr] for o in outcomes]]))
"""


@pytest.mark.parametrize("chosen_layers", ["all", "landlock"])
def test_an_ordinary_user_has_the_same_layers(chosen_layers, host):
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    build(chosen_layers, workers=1, preload=()).close()
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    python = next((p for p in (sys.executable, "/usr/bin/python3") if usable(p, nobody)), None)
    if python is None:
        pytest.skip("no Python here that an ordinary user can run")
    short = {t: s for t, (s, _) in HOSTILE.items() if len(s) < 20_000}  # it travels in argv
    chosen = {t: s for t, s in short.items() if "timeout" not in HOSTILE[t][1]}
    sources = [(PRELUDE + host.fill(s), 20.0) for s in chosen.values()]
    process = start_alone(
        ORDINARY, {"programs": sources, "chosen_layers": LAYERS[chosen_layers]}, python, **nobody
    )
    told, _ = process.communicate(timeout=300)
    layers, [honest, *others] = json.loads(told)
    assert layers["seccomp"] is True
    for layer in REQUIRED_LAYERS[chosen_layers]:
        assert layers[layer]
    assert honest[:2] == ["ok", "honest\n"]
    assert len(others) > 50
    for title, (status, stdout, stderr) in zip(chosen, others, strict=True):
        assert "BREACH" not in stdout, (title, stdout)
        assert status != "sandbox_error", (title, stderr)


def test_weak_layers_are_refused(monkeypatch):
    bare = {"namespaces": False, "landlock": True, "seccomp": False}
    monkeypatch.setattr(pool, "_LAYER_CHOICES", (bare,))
    with pytest.raises(SandboxUnavailable, match=r"seccomp: .*allow_weak=True"):
        Sandbox(workers=1, preload=())
    with pytest.warns(SandboxWarning, match="ALMOST UNCONFINED"):
        sandbox = Sandbox(workers=1, preload=(), allow_weak=True)
    with sandbox:
        assert sandbox.layers["seccomp"] is False
        assert [o.stdout for o in sandbox.run([Program("print(1)")])] == ["1\n"]


def test_seccomp_alone_is_refused(monkeypatch):
    bare = {"namespaces": False, "landlock": False, "seccomp": True}
    monkeypatch.setattr(pool, "_LAYER_CHOICES", (bare,))
    with pytest.raises(SandboxUnavailable, match=r"namespaces: .*landlock: "):
        Sandbox(workers=1, preload=())


def test_a_mount_that_fails_is_reported(monkeypatch):
    """Never a quiet step down: the layers and a warning give the reason."""
    build("landlock", workers=1, preload=()).close()
    fails = [{"namespaces": True, "landlock": True, "seccomp": True, "readable": ["/dev/null"]}]
    readable = {"readable": pool._readable()}
    fails.append({"namespaces": False, "landlock": True, "seccomp": True, **readable})
    monkeypatch.setattr(pool, "_LAYER_CHOICES", tuple(fails))
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


def test_no_descriptor_of_a_busy_host_reaches_a_program():
    """The control socket above all: whoever holds it can report any end of a program."""
    look = """
import os
for number in range(20000):
    try:
        os.fstat(number)
    except OSError:
        continue
    print(number, end=" ")
"""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 6000:
        pytest.skip("this process may not open 6000 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 20000), before[1]))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(5000)]
    try:
        with build(workers=1, preload=()) as sandbox:
            [outcome] = sandbox.run([Program(look)])
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert outcome.stdout.split() == ["0", "1", "2", "5"]  # 5 carries returned values


CLONES = """
import threading
stay = threading.Event()
started = 0
try:
    for _ in range(3000):
        threading.Thread(target=stay.wait).start()
        started += 1
except RuntimeError:
    pass
stay.set()
print(started)
"""


@pytest.mark.parametrize("chosen_layers", ["all", "landlock"])
def test_threads_are_limited(chosen_layers):
    """At a time, not in all; without namespaces too, where the host's processes must not count."""
    many = "import threading\nfor _ in range(600):\n    t = threading.Thread(target=int)\n"
    many += "    t.start()\n    t.join()\nprint('done')"
    small = "import threading\nthreading.stack_size(1 << 18)\n"
    with build(chosen_layers, workers=1, memory_mb=2048, preload=()) as sandbox:
        assert sandbox.layers["threads"] == "at most 256"
        limited, sequence = sandbox.run([Program(small + CLONES), Program(many)])
    assert limited.status == "ok", limited
    assert 200 <= int(limited.stdout) <= 256
    assert sequence.stdout == "done\n"


IN_TMP = """
import warnings
from marlhf.reward.sandbox import Program, Sandbox
warnings.simplefilter("error")
program = '''
import os, inside
print(inside.__file__, sorted(os.listdir("/tmp")))
open("/tmp/mine", "w").write("x")
for path in (inside.__file__, os.path.dirname(inside.__file__) + "/new"):
    try:
        open(path, "w")
    except OSError:
        continue
    print("BREACH", path)
'''
with Sandbox(workers=1, preload=()) as sandbox:
    outcomes = sandbox.run([Program(program)] * 2)
    print(json.dumps([sandbox.layers, [[o.status, o.stdout, o.stderr] for o in outcomes]]))
"""


def test_a_virtual_environment_in_the_temporary_folder_changes_nothing():
    build(workers=1, preload=()).close()
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
        (packages / "inside.py").write_text("x = 1\n")
        process = start_alone(IN_TMP, {}, str(folder / "venv" / "bin" / "python"))
        text, _ = process.communicate(timeout=120)
        layers, outcomes = json.loads(text)
        assert layers["namespaces"]
        for status, stdout, stderr in outcomes:
            assert (status, stderr) == ("ok", "")
            seen = f"{packages}/inside.py ['.stdin', '{folder.name}']\n"
            assert stdout == seen
        assert (packages / "inside.py").read_text() == "x = 1\n"


ONE_USER = """
import os, warnings
from marlhf.reward.sandbox import Program, Sandbox
warnings.simplefilter("error")
assert os.getuid() == 0
with Sandbox(workers=1, preload=()) as sandbox:
    [outcome] = sandbox.run([Program("print(1)")])
    print(json.dumps([sandbox.layers, outcome.status]))
"""


def test_root_of_a_namespace_with_one_user_runs_programs():
    """As in a rootless container: there is no second user to become, nor a further namespace."""
    build(workers=1, preload=()).close()
    limit = "echo 0 > /proc/sys/user/max_user_namespaces"
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare on this machine")
    if subprocess.run(["unshare", "-U", "-r", "sh", "-c", limit], stderr=-1).returncode:
        pytest.skip("user namespaces are not allowed here")
    inside = ["unshare", "-U", "-r", "sh", "-c", f'{limit}; exec "$@"', "sh"]
    process = start_alone(ONE_USER, {}, before=inside)
    text, _ = process.communicate(timeout=120)
    layers, status = json.loads(text)
    assert status == "ok"
    assert layers["namespaces"]
    assert layers["threads"] == "at most 256"


NO_MEMFD = """
from marlhf.reward.sandbox import Sandbox, SandboxUnavailable, kernel, seccomp
number = kernel.MEMFD_CREATE[kernel.machine()]
denied = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
seccomp.install(seccomp.pack(denied), 1)
try:
    Sandbox(workers=1, preload=())
except SandboxUnavailable as error:
    print(error)
"""


def test_without_memory_files_the_right_thing_is_named():
    process = start_alone(NO_MEMFD, {})
    text, _ = process.communicate(timeout=120)
    assert text.startswith("The sandbox needs the system call memfd_create, which fails here (")
    assert "seccomp profile" in text
