"""Parsing on other processes, while this one has the GPU score.

Workers are separate programs, `python -m marlhf.spans.workers english`, that read texts and write
spans as lines of JSON. So they never import the main program, share none of its memory, see no GPU,
and end by themselves when the main program is gone.
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
"""Fewer characters than this are parsed faster here than by workers."""
MOST = 4
"""The most workers per process. More would not help: scoring takes longer than parsing."""


def parse_flat(parser: Parser, texts: Sequence[str]) -> Flat:
    """Phrases without their labels."""
    return [[x for p in phrases for x in (p.begin, p.end)] for phrases in parser(texts)]


class ParserPool:
    """A parser, and worker processes with the same one that start when there is enough to do."""

    def __init__(self, name: str, workers: int | None = None) -> None:
        self.name = name
        self.parser = build_parser(name)  # a missing package or model is an error now
        self.count = spare_processors() if workers is None else workers
        self._workers: list[subprocess.Popen[str]] = []
        self._threads: list[ThreadPoolExecutor] = []  # one per worker
        self._close = weakref.finalize(self, _close, self._workers)

    def submit(self, texts: Sequence[str]) -> Callable[[], Flat]:
        """Start to parse. The function that is returned waits for the spans."""
        if not self.count or sum(map(len, texts)) < SMALL:
            return lambda: parse_flat(self.parser, texts)
        self._start()
        # Texts are dealt out in turn, so that all workers have about as much to do.
        parts = [
            thread.submit(_request, worker, texts[i :: self.count])
            for i, (worker, thread) in enumerate(zip(self._workers, self._threads))
        ]
        return lambda: _collect(parts, len(texts))

    def close(self) -> None:
        """End the workers. They also end when the pool is forgotten or the program ends."""
        self._close()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        self._threads.clear()
        self.count = 0  # later texts are parsed here

    def _start(self) -> None:
        if self._workers:
            return
        quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # The same modules as here: `-m` alone would import those of the current folder first.
        serve_here = f"import sys; sys.path[:] = {sys.path}; from {__name__} import serve; "
        for _ in range(self.count):
            worker = subprocess.Popen(
                [sys.executable, "-c", f"{serve_here}serve({self.name!r})"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env={**os.environ, **quiet},
                start_new_session=True,  # Ctrl-C is for the main program, which then closes them
            )
            self._workers.append(worker)
            self._threads.append(ThreadPoolExecutor(1, thread_name_prefix="parsing"))


def spare_processors() -> int:
    """Processors of this process's share that can parse while it works, at most `MOST`."""
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST, share - 1))


def serve(name: str) -> None:
    """Read lines of texts and write a line of spans for each, until the input ends."""
    parser = build_parser(name)
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            answer = {"spans": parse_flat(parser, json.loads(line))}
        except Exception as error:  # the main program raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _request(worker: subprocess.Popen[str], texts: Sequence[str]) -> Flat:
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
    spans: Flat = [[]] * count
    for i, part in enumerate(parts):
        spans[i :: len(parts)] = part.result()
    return spans


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
