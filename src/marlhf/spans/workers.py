"""Parsing on other processes, while this one has the GPU score.

Workers are programs of their own, `python -m marlhf.spans.workers english`, that read texts and
write spans as lines of JSON. So they never import what the main program is, hold no part of its
memory, see no GPU, and end by themselves when whoever started them is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from marlhf.spans.parser import build_parser
from marlhf.spans.phrases import Parser, ParserError

Flat = list[list[int]]
"""For each text begin, end, begin, end, ... of its phrases, as a tree is walked."""
SMALL = 20_000
"""Characters that are sooner parsed here than sent away."""
MOST = 4
"""Workers of one process. Parsing is to be done before scoring is, and no sooner."""


def parse_flat(parser: Parser, texts: Sequence[str]) -> Flat:
    """Phrases without their labels, as they travel."""
    return [[x for p in phrases for x in (p.begin, p.end)] for phrases in parser(texts)]


class ParserPool:
    """A parser, and worker processes with the same one that start when there is enough to do."""

    def __init__(self, name: str, workers: int | None = None) -> None:
        self.name = name
        self.parser = build_parser(name)  # a missing package or model is known at once
        self.count = spare_processors() if workers is None else workers
        self._workers: list[subprocess.Popen[str]] = []
        self._threads: list[ThreadPoolExecutor] = []  # one a worker, which does one thing at a time
        self._close = weakref.finalize(self, _close, self._workers)

    def submit(self, texts: Sequence[str]) -> Callable[[], Flat]:
        """Begin to parse; call what comes back for the spans."""
        if not self.count or sum(map(len, texts)) < SMALL:
            return lambda: parse_flat(self.parser, texts)
        self._start()
        # Every third of the texts to each of three: all have as much to do.
        parts = [
            thread.submit(_ask, worker, texts[i :: self.count])
            for i, (worker, thread) in enumerate(zip(self._workers, self._threads))
        ]
        return lambda: _collect(parts, len(texts))

    def close(self) -> None:
        """End the workers. They also end when the pool is forgotten or the program ends."""
        self._close()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        self._threads.clear()
        self.count = 0  # what comes after is parsed here

    def _start(self) -> None:
        if self._workers:
            return
        quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        for _ in range(self.count):
            worker = subprocess.Popen(
                [sys.executable, "-m", "marlhf.spans.workers", self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env={**os.environ, **quiet, "PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C is for the main program, which then closes them
            )
            self._workers.append(worker)
            self._threads.append(ThreadPoolExecutor(1, thread_name_prefix="parsing"))


def spare_processors() -> int:
    """Processors of this process's share that can parse while it works, at most `MOST`."""
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST, share - 1))


def serve(name: str) -> None:
    """Answer each line of texts by a line of spans, until there are no more."""
    parser = build_parser(name)
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            answer = {"spans": parse_flat(parser, json.loads(line))}
        except Exception as error:  # told to whoever asked, who stops
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _ask(worker: subprocess.Popen[str], texts: Sequence[str]) -> Flat:
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(list(texts)) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except (OSError, ValueError):  # closed on one side
        line = ""
    if not line:
        raise ParserError(
            "A parsing process has ended before it answered. Its message, if it left one, is "
            "above; it may have been out of memory."
        )
    answer = json.loads(line)
    if "error" in answer:
        raise ParserError(f"A text could not be parsed: {answer['error']}")
    return answer["spans"]


def _collect(parts: Sequence[Future[Flat]], count: int) -> Flat:
    found: Flat = [[]] * count
    for i, part in enumerate(parts):
        found[i :: len(parts)] = part.result()
    return found


def _close(workers: list[subprocess.Popen[str]]) -> None:
    for worker in workers:
        assert worker.stdin is not None
        with contextlib.suppress(OSError):  # it is gone already
            worker.stdin.close()
    for worker in workers:
        try:
            worker.wait(timeout=2)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    workers.clear()


if __name__ == "__main__":
    serve(sys.argv[1])
