"""The jobs of each task, in the order in which they matter, and what each has to wait for."""

from __future__ import annotations

import importlib
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evidence import methods
from evidence.methods import FAMILIES, KINDS, SEEDED, Config
from evidence.settings import Settings

TEST_SEED, VALIDATION_SEED = 0, 1
BEST = "tldr/best-of-8"


@dataclass(frozen=True)
class Job:
    """Something to do in a process of its own."""

    name: str
    """Also its folder under --out."""
    work: Callable[[], None]
    needs: tuple[str, ...] = ()
    alone: bool = False
    """Whether it is timed, so that nothing else may run."""


def all_jobs(settings: Settings) -> list[Job]:
    made = {"tldr": _tldr, "hh": partial(_small, task="hh"), "mbpp": partial(_small, task="mbpp")}
    jobs = [job for task in settings.tasks for job in made[task](settings)]
    models = [job for job in jobs if job.name.endswith("/sft")]
    models += [job for job in jobs if "/reward" in job.name or job.name.endswith("/gold")]
    extra = sorted((job for job in jobs if job.name.startswith("extra/")), key=_extra_order)
    middle = [job for job in jobs if job not in models and job not in extra]
    # Those that are timed come last: alone they would hold back all others.
    named = sorted([*models, *middle, *extra], key=lambda job: job.alone)
    return [replace(job, name=job.name.removeprefix("extra/")) for job in named]


def _extra_order(job: Job) -> tuple[str, int]:
    """The second seed of all before the third of any."""
    method, _, seed = job.name.removeprefix("extra/tldr/").rpartition("-s")
    return seed, methods.EXTRA.index(method)


def _tldr(settings: Settings) -> list[Job]:
    sft, reward, gold = "tldr/sft", "tldr/reward", "tldr/gold"
    jobs = [
        Job(sft, partial(_train, settings, lambda: methods.sft(settings, "tldr"))),
        *(Job(f"tldr/{n}", partial(_reward, settings, n), (sft,)) for n in methods.REWARDS),
        Job(gold, partial(_train, settings, lambda: methods.gold(settings)), (sft,)),
        Job("tldr/judged", partial(_judge_sft, settings), (sft, reward, gold)),
        Job(BEST, partial(_best_of, settings), (sft, reward, gold)),
    ]
    tried = methods.tries(settings)
    for name, (method, rate) in tried.items():
        work = partial(_try, settings, f"tldr/{name}", method, rate)
        jobs.append(Job(f"tldr/{name}", work, (sft, reward)))
    for method, family in FAMILIES.items():
        again = tuple(f"tldr/{n}" for n, (m, _) in tried.items() if FAMILIES[m] == family)
        for seed in range(settings.seeds if method in (*SEEDED, *methods.EXTRA) else 1):
            later = method in methods.OPTIONAL or (seed > 0 and method in methods.EXTRA)
            if later and not settings.extras:
                continue
            name = f"tldr/{method}-s{seed}"
            # What is chosen by tries is measured against the SFT model's own scores.
            needs = (sft, reward, gold, *(("tldr/judged",) if again else ()), *again)
            work = partial(_main, settings, name, method, seed)
            jobs.append(Job(f"extra/{name}" if later else name, work, needs))
    jobs.append(Job("timing/tldr", partial(_time, settings), (reward,), alone=True))
    return jobs


def _small(settings: Settings, task: str) -> list[Job]:
    models = ["sft"] if task == "mbpp" else ["sft", "reward"]
    jobs = [Job(f"{task}/sft", partial(_train, settings, lambda: methods.sft(settings, task)))]
    if task == "hh":
        work = partial(_train, settings, lambda: methods.reward(settings, task))
        jobs.append(Job(f"{task}/reward", work, (f"{task}/sft",)))
    needs = tuple(f"{task}/{name}" for name in models)
    jobs.append(Job(f"{task}/judged", partial(_judge, settings, task, f"{task}/sft"), needs))
    for method in methods.SMALL[task]:
        name = f"{task}/{method}-s0"
        jobs.append(Job(name, partial(_main_small, settings, task, method, name), needs))
    return jobs


def _train(settings: Settings, make: Callable[[], Config]) -> None:
    config = make()
    importlib.import_module(f"marlhf.train.{KINDS[type(config)]}").train(config)


def _main(settings: Settings, name: str, method: str, seed: int) -> None:
    rate = chosen_rate(settings, FAMILIES[method])
    make = partial(methods.method, settings, method, rate, seed, name, settings.steps)
    _train(settings, make)
    _judge(settings, "tldr", name)


def _main_small(settings: Settings, task: str, method: str, name: str) -> None:
    _train(settings, partial(methods.small, settings, task, method, name))
    _judge(settings, task, name)


def _try(settings: Settings, name: str, method: str, rate: float) -> None:
    make = partial(methods.method, settings, method, rate, 0, name, settings.try_steps)
    _train(settings, make)
    _validate(settings, name)


def _reward(settings: Settings, name: str) -> None:
    _train(settings, lambda: methods.reward(settings, "tldr", name))


def _judge_sft(settings: Settings) -> None:
    from evidence.judges import judge_test_pairs

    judge_test_pairs(settings)
    _validate(settings, "tldr/sft")
    _judge(settings, "tldr", "tldr/sft")


def _validate(settings: Settings, name: str) -> None:
    """Held-out prompts by the reward model that teaches: what learning rates are chosen by."""
    from marlhf.evaluate.eval_plan import EvaluationOptions
    from marlhf.evaluate.score import evaluate

    question = EvaluationOptions(
        prompts=settings.eval_prompts,
        temperature=1.0,
        max_new_tokens=settings.response_tokens,
        seed=VALIDATION_SEED,
        rewards=(settings.model_of("tldr/reward"),),
        reference=settings.model_of("tldr/sft"),
        device=settings.device,
    )
    evaluate([settings.folder(name)], question, print)


def _judge(settings: Settings, task: str, name: str) -> None:
    """Test prompts by all reward models, or test problems by their unit tests."""
    from marlhf.evaluate.eval_plan import EvaluationOptions
    from marlhf.evaluate.score import evaluate

    test: dict[str, Any] = {"source": task, "path": str(settings.data(task, "test"))}
    test["device"] = settings.device
    folder = settings.folder(name)
    if task == "mbpp":
        from marlhf.evaluate import pass_at_k
        from marlhf.reward.code import unit_tests

        tokens = settings.response_tokens * 4
        asked = pass_at_k.PassAtKOptions(
            prompts=settings.test_prompts // 2, samples=5, max_new_tokens=tokens, **test
        )
        pass_at_k.measure(folder, asked, unit_tests)
        return
    rewards = ["reward", "gold"] if task == "tldr" else ["reward"]
    question = EvaluationOptions(
        prompts=settings.test_prompts,
        temperature=1.0,
        max_new_tokens=settings.response_tokens * (4 if task == "hh" else 3) // 3,
        seed=TEST_SEED,
        rewards=tuple(settings.model_of(f"{task}/{name}") for name in rewards),
        reference=settings.model_of(f"{task}/sft"),
        **test,
    )
    evaluate([folder], question, print)


def _best_of(settings: Settings) -> None:
    from evidence.best import best_of_eight

    best_of_eight(settings, settings.folder(BEST), TEST_SEED)


def _time(settings: Settings) -> None:
    from evidence.timing import time_alone

    time_alone(settings)


def chosen_rate(settings: Settings, family: str) -> float:
    """The rate whose try has the highest objective on held-out prompts: score - beta * KL."""
    found = {rate: value for (name, rate), value in objectives(settings).items() if name == family}
    if not found:
        return settings.rates[0]
    return max(found, key=lambda rate: found[rate])


def objectives(settings: Settings) -> dict[tuple[str, float], float]:
    """What each try came to, by family and learning rate."""
    found: dict[tuple[str, float], float] = {}
    tried = methods.tries(settings)
    mean, deviation = normaliser(settings) if tried else (0.0, 1.0)
    for name, (method, rate) in tried.items():
        lines = validation_lines(settings, f"tldr/{name}")
        if lines:
            score = statistics.fmean((x["scores"]["reward"] - mean) / deviation for x in lines)
            kl = statistics.fmean(x["kl"] for x in lines)
            found[FAMILIES[method], rate] = score - settings.beta * kl
    return {key: value for key, value in found.items() if math.isfinite(value)}


def normaliser(settings: Settings) -> tuple[float, float]:
    """Mean and deviation of the SFT model's scores on validation prompts."""
    lines = validation_lines(settings, "tldr/sft")
    scores = [line["scores"]["reward"] for line in lines]
    return statistics.fmean(scores), statistics.stdev(scores)


def validation_lines(settings: Settings, name: str) -> list[dict[str, Any]]:
    """The answers to validation prompts that a run gave; none where it was not asked."""
    file = f"t1-m{settings.response_tokens}-s{VALIDATION_SEED}.jsonl"
    return read_jsonl(settings.folder(name) / "evaluation" / file)


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
