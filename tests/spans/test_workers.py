import json
import os
import signal
import subprocess
import sys
import time

import pytest

from marlhf.spans import workers
from marlhf.spans.parser import build_parser
from marlhf.spans.phrases import ParserError
from marlhf.spans.workers import ParserPool, parse_flat

TEXTS = ["The fox met an owl. 🍎 It ran!", "", "a\u2028b \ud800 c", "no way\n1. list"] * 5


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(workers, "SMALL", 0)
    pool = ParserPool("english", workers=3)
    yield pool
    pool.close()


def test_workers_parse_as_this_process_does(pool):
    expected = parse_flat(build_parser("english"), TEXTS)
    first, second = pool.submit(TEXTS), pool.submit(TEXTS[:2])  # both under way at once
    assert second() == expected[:2]
    assert first() == expected


def test_little_is_parsed_here():
    pool = ParserPool("english", workers=2)
    assert pool.submit(TEXTS)() == parse_flat(build_parser("english"), TEXTS)
    assert not pool._workers


def test_workers_end_with_their_pool(pool):
    pool.submit(TEXTS)()
    started = list(pool._workers)
    pool.close()
    assert all(worker.poll() == 0 for worker in started)


def test_workers_end_when_whoever_started_them_is_killed():
    program = (
        "import time; from marlhf.spans import workers; workers.SMALL = 0\n"
        "pool = workers.ParserPool('english', workers=1); pool.submit(['a b'])()\n"
        "print(pool._workers[0].pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_that_dies_is_an_error_and_no_wait(pool):
    pool.submit(TEXTS)()
    pool._workers[0].kill()
    with pytest.raises(ParserError, match="ended before it answered"):
        pool.submit(TEXTS)()


def test_an_error_in_a_worker_is_told():
    process = subprocess.run(
        [sys.executable, "-m", "marlhf.spans.workers", "english"],
        input='[3]\n["fine"]\n',
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = map(json.loads, process.stdout.splitlines())
    assert "error" in first
    assert second == {"spans": [[0, 4]]}


def test_workers_import_nothing_from_the_current_folder(tmp_path):
    """Unless the main program does."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "json.py").write_text("open('imported', 'w').close()\nloads = dumps = None\n")
    script = tmp_path / "main.py"
    script.write_text(
        "from marlhf.spans import workers; workers.SMALL = 0\n"
        "pool = workers.ParserPool('english', workers=1); print(pool.submit(['a b'])())\n"
    )
    done = subprocess.run([sys.executable, script], cwd=here, capture_output=True, text=True)
    assert done.stdout.strip() == "[[0, 3, 0, 1, 2, 3]]", done.stderr
    assert not (here / "imported").exists()


def test_workers_load_no_torch():
    program = (
        "import sys; from marlhf.spans import workers; workers.build_parser('english')(['a b'])\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_processes_share_the_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    assert workers.spare_processors() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert workers.spare_processors() == 1


def test_workers_do_not_import_modules_of_the_current_folder(tmp_path, monkeypatch):
    """`python -m` puts the current folder first: a json.py there was run by every worker."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("open('planted', 'w').close()")
    pool = ParserPool("english", workers=1)
    assert pool.submit(["A dog barks at the cat. " * 1000])()
    pool.close()
    assert not (tmp_path / "planted").exists()
