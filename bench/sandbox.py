"""Programs a second of the sandbox, with the layers that were active.

    python bench/sandbox.py
    python bench/sandbox.py --workers 8 --programs 2000

`wall` is what a program takes of one worker's time, from being asked for to its outcome; `CPU`
is what it takes of a processor, the fork server's share and the host's included, and depends less
on what else the machine is doing.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import time

from marlhf.reward.sandbox import PRELOAD, Call, Case, Program, Sandbox, Suite

SUM = "print(sum(map(int, input().split())))"
SIEVE = """
n = int(input())
prime = bytearray([1]) * (n + 1)
for i in range(2, int(n ** 0.5) + 1):
    if prime[i]:
        prime[i * i :: i] = bytes(len(prime[i * i :: i]))
print(sum(prime) - 2)
"""
NUMPY = "import numpy as np\nprint(int(np.arange(int(input())).sum()))"
CALL = "def double(x):\n    return 2 * x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--programs", type=int, default=400)
    args = parser.parse_args()

    print(f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}")
    print(f"{args.workers} workers, load {os.getloadavg()[0]:.1f} beforehand\n")
    print("| program | programs/s | wall ms | CPU ms |")
    print("|---|---|---|---|")
    n = args.programs
    small = [Suite(SUM, [Case("1 2 3")])] * n
    measure("sum of a line", small, args.workers)
    measure(
        "the same, 20 inputs a source", [Suite(SUM, [Case("1 2 3")] * 20)] * (n // 20), args.workers
    )
    measure("function call", [Suite(CALL, [Case(calls=[Call("double", [4])])])] * n, args.workers)
    measure("primes below 100,000", [Suite(SIEVE, [Case("100000")])] * n, args.workers)
    measure("numpy, loaded beforehand", [Suite(NUMPY, [Case("1000")])] * n, args.workers)
    without = [name for name in PRELOAD if name != "numpy"]
    measure("numpy, not loaded", [Suite(NUMPY, [Case("1000")])] * (n // 10), args.workers, without)
    measure("does not compile", [Suite("x = (", [Case()])] * n, args.workers)

    with Sandbox(workers=1) as sandbox:
        print("\nlayers: " + ", ".join(f"{name}: {told}" for name, told in sandbox.layers.items()))


def measure(name: str, suites: list[Suite], workers: int, preload=PRELOAD) -> None:
    before = cpu()
    with Sandbox(workers=workers, preload=preload) as sandbox:
        sandbox.run([Program("pass")] * workers)
        began = time.perf_counter()
        outcomes = [outcome for found in sandbox.run_suites(suites) for outcome in found]
        wall = time.perf_counter() - began
    used = cpu() - before  # with the start of the servers, which the empty run below takes off
    before = cpu()
    with Sandbox(workers=workers, preload=preload) as sandbox:
        sandbox.run([Program("pass")] * workers)
    used -= cpu() - before
    count = len(outcomes)
    assert {o.status for o in outcomes} <= {"ok", "compile_error"}, outcomes[0]
    print(
        f"| {name} | {count / wall:.0f} | {1000 * wall * workers / count:.1f} | "
        f"{1000 * used / count:.1f} |",
        flush=True,
    )


def cpu() -> float:
    """Processor seconds of this process and of those that have ended below it."""
    return sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


if __name__ == "__main__":
    main()
