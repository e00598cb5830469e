"""The evidence: SFT, reward models and every method on real preferences, on one GPU.

    python bench/evidence_tldr.py --model HuggingFaceTB/SmolLM2-135M-Instruct --out runs/evidence \\
        --task tldr hh mbpp --jobs 8
    python bench/evidence_report.py runs/evidence/evidence.tar.xz --docs docs

Data comes from the hub, or from files: --pairs (TL;DR), --hh, --mbpp. Who learns from which rows is
in bench/evidence/data.py, all settings in bench/evidence/methods.py. The same command goes on where
the last one stopped, was stopped or was killed. `evidence.tar.xz` in --out holds all but weights,
and the results page is made from it without a GPU.

Every method has the same tries: each learning rate of --rates (an eighth of it for DPO) for
--try-steps steps, and the best by score - beta * KL on validation prompts is taken. Test prompts
are asked once, at the end.

What it costs on one H200 (torch 2.11) with the default settings: a PPO step of 128 prompts of up
to 240 tokens with 48 new ones takes 0.275 s of the GPU where four runs share it, 0.253 s where
eight do; a run takes another half minute to start and to compile, in which others have it. SFT is
half a minute, a reward model one to three minutes. With --jobs 8 all of TL;DR without --extras took
23 minutes and the times of steps alone 2.5 more; HH and MBPP took six minutes, beside others.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

from evidence.data import prepare
from evidence.jobs import all_jobs
from evidence.pack import ARCHIVE, pack
from evidence.schedule import STOPPED, Schedule, is_done
from evidence.settings import HUB, Settings, keep, read


def main() -> None:
    began = time.monotonic()
    args = parse()
    if args.job:
        sys.exit(work(args))
    settings = keep(settings_of(args))
    for task in settings.tasks:
        prepare(task, getattr(settings, task), Path(settings.out) / "data" / task, settings.limit)
    jobs = all_jobs(settings)
    if args.only:
        jobs = [job for job in jobs if any(fnmatch.fnmatch(job.name, p) for p in args.only)]
    if args.list:
        for job in jobs:
            print(f"{'done ' if is_done(settings, job.name) else '     '}{job.name}")
        return
    deadline = began + 60 * args.minutes if args.minutes else math.inf
    command = [sys.executable, __file__, "--out", settings.out]
    whole = Schedule(settings, jobs, args.jobs, deadline, command).run()
    file = pack(Path(settings.out), Path(args.archive or Path(settings.out) / ARCHIVE))
    left = [job.name for job in jobs if not is_done(settings, job.name)]
    print(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done; {file}")
    if not whole:
        print(f"Left: {', '.join(left)}. The same command goes on.")
        sys.exit(1)


def work(args: argparse.Namespace) -> int:
    """One job, in this process."""
    from marlhf.train.interrupts import Stopped

    settings = replace(read(args.out), token_budget=args.token_budget)
    [job] = [job for job in all_jobs(settings) if job.name == args.job]
    try:
        job.work()
    except (Stopped, KeyboardInterrupt) as stop:
        print(stop)
        return STOPPED
    return 0


def settings_of(args: argparse.Namespace) -> Settings:
    names = Settings.__dataclass_fields__
    given = {name: value for name, value in vars(args).items() if name in names}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}
    if "model" not in given:
        raise SystemExit("Say which model to start from: --model FOLDER_OR_NAME.")
    return Settings(**given)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", help="a folder or a hub name")
    add("--out", required=True, help="a folder; the same one goes on")
    add("--task", dest="tasks", nargs="+", choices=list(HUB), help="tldr, hh, mbpp")
    add("--pairs", dest="tldr", nargs="+", help="TL;DR comparisons, in any form marlhf reads")
    add("--hh", nargs="+", help="HH dialogues")
    add("--mbpp", nargs="+", help="MBPP problems")
    add("--limit", type=int, help="records to read of each")
    for name in ("steps", "small-steps", "seeds", "try-steps", "batch", "prompt-tokens"):
        add(f"--{name}", type=int)
    for name in ("response-tokens", "reward-prompt-tokens", "eval-every", "eval-prompts"):
        add(f"--{name}", type=int)
    for name in ("model-batch", "test-prompts", "time-steps", "token-budget", "save-every"):
        add(f"--{name}", type=int)
    add("--rates", type=float, nargs="+", help="learning rates to try; one for none")
    add("--beta", type=float)
    add("--extras", action="store_const", const=True, help="more seeds, after all else")
    add("--eager", dest="compile", action="store_const", const=False, help="do not compile")
    add("--device")
    add("--jobs", type=int, default=1, help="runs side by side")
    add("--minutes", type=float, help="stop in good order before so many minutes are over")
    add("--only", nargs="+", metavar="PATTERN", help="only jobs of such names, as in 'tldr/ppo-*'")
    add("--list", action="store_true", help="say what there is to do, and do nothing")
    add("--archive", help=f"where the archive goes; {ARCHIVE} in --out unless given")
    add("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
