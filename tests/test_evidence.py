"""The evidence script: its settings are the recipes', it stops and goes on, and makes a page."""
# ruff: noqa: E402  (the scripts' folder has to be found first)

from __future__ import annotations

import dataclasses
import json
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from marlhf.config import load_recipe
from marlhf.intervals import Curve, score_at_kl
from marlhf.runs.read import Evaluation, Run
from marlhf.train.sft import SFTConfig

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

import evidence_report
import evidence_tldr
from evidence import methods
from evidence import schedule as schedule_module
from evidence.claims import _pooled
from evidence.data import prepare
from evidence.jobs import Job, all_jobs, chosen_rate
from evidence.pack import pack, unpack
from evidence.results import Method, ahead_at, first_step, speed, steps_to, win_rate
from evidence.schedule import Schedule, is_done, mark_done
from evidence.settings import Settings, keep

PLACES = {"output_dir", "model", "reward_model", "critic_model", "device"}
"""Settings that say where things are, and how much memory and disk there is."""
ROOM = {"token_budget", "compile", "save_every", "keep_checkpoints", "log_samples", "keep_best"}
SIZES = """
--steps 2 --seeds 1 --rates 2e-5 --batch 2 --model-batch 2 --prompt-tokens 24
--reward-prompt-tokens 24 --response-tokens 4 --eval-every 1 --eval-prompts 3 --test-prompts 3
--token-budget 2048 --eager --device cpu
"""
WORDS = "the fox saw a red hat and ran home to tell her friend about it"


@pytest.fixture
def settings(tmp_path) -> Settings:
    settings = Settings(model="HuggingFaceTB/SmolLM2-135M-Instruct", out=str(tmp_path / "out"))
    for task in ("tldr", "hh", "mbpp"):
        split = settings.data(task, "train").with_name("split.json")
        split.parent.mkdir(parents=True)
        counts = {part: {"rows": 10**6} for part in ("train", "gold", "test")}
        split.write_text(json.dumps(counts))
    return settings


def plain(config) -> dict:
    """A config without where its rows lie and what fits into memory."""
    raw = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    raw["data"] = dataclasses.replace(config.data, path="", split="", parts={}, eval_size=0)
    return {name: value for name, value in raw.items() if name not in PLACES | ROOM}


def test_settings_are_those_of_the_recipes(settings):
    taken = {"bandit": 2e-5, "dpo": 2e-5}  # as docs/results.md says; the others took the first
    made = {"sft": methods.sft(settings, "tldr"), "reward": methods.reward(settings, "tldr")}
    made["gold"] = methods.gold(settings)
    for name, family in methods.FAMILIES.items():
        rate = taken.get(family, settings.rates[0])
        made[name] = methods.method(settings, name, rate, 0, f"tldr/{name}", settings.steps)
    recipe = {stage.name: stage.config for stage in load_recipe("smollm2-tldr/methods")}
    assert set(made) == set(recipe)
    for name, config in made.items():
        assert type(config) is type(recipe[name])
        assert plain(config) == plain(recipe[name]), name
        if name != "gold":
            assert config.data.parts == recipe[name].data.parts


@pytest.mark.parametrize(("task", "macro"), [("hh", "n5-sum"), ("mbpp", "n10-sum")])
def test_small_settings_are_those_of_the_recipes(settings, task, macro):
    recipe = {stage.name: stage.config for stage in load_recipe(f"smollm2/{task}")}
    made = {"sft": methods.sft(settings, task)}
    made |= {"reward": methods.reward(settings, task)} if task == "hh" else {}
    made["ppo"] = methods.small(settings, task, "ppo", f"{task}/ppo-s0")
    made["macro-ppo"] = methods.small(settings, task, macro, f"{task}/{macro}-s0")
    assert set(made) == set(recipe)
    # The recipe of MBPP trains for longer, and evaluates as the defaults say.
    longer = {"num_steps", "num_epochs", "eval_every"} if task == "mbpp" else set()
    for name, config in made.items():
        ours, theirs = (
            {k: v for k, v in plain(x).items() if k not in longer} for x in (config, recipe[name])
        )
        if task == "mbpp":
            ours["data"] = theirs["data"] = None  # prompts that are too long are dropped there
        assert ours == theirs, name


def test_every_method_waits_for_its_tries_and_the_models(settings):
    jobs = {job.name: job for job in all_jobs(settings)}
    assert {"tldr/try-n5-sum-2e-05", "tldr/try-n5-sum-4e-05"} <= set(jobs["tldr/parsing-s0"].needs)
    assert all(name in jobs for job in jobs.values() for name in job.needs)
    assert [name for name in jobs if name.startswith("tldr/n5-sum")] == [
        f"tldr/n5-sum-s{seed}" for seed in range(3)
    ]
    assert "tldr/n5-mean-s1" not in jobs
    more = [job.name for job in all_jobs(dataclasses.replace(settings, extras=True))]
    later = [f"tldr/{name}-s{seed}" for seed in (1, 2) for name in methods.EXTRA]
    later = [*(f"tldr/{name}-s0" for name in methods.OPTIONAL), *later, "timing/tldr"]
    assert more[-len(later) :] == later


def test_the_rate_with_the_best_objective_is_taken(settings):
    def answer(name, *pairs):
        folder = settings.folder(f"tldr/{name}") / "evaluation"
        folder.mkdir(parents=True)
        lines = [{"scores": {"reward": score}, "kl": kl} for score, kl in pairs]
        file = folder / f"t1-m{settings.response_tokens}-s1.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    one = dataclasses.replace(settings, rates=(3e-5,))
    assert chosen_rate(one, "ppo") == 3e-5  # nothing to choose, and nobody to ask
    answer("sft", (0.0, 0.0), (2.0, 0.0))  # mean 1, deviation 1.41
    answer("try-ppo-2e-05", (1.0 + 2**0.5, 10.0))  # 1 - 0.05 * 10
    answer("try-ppo-4e-05", (1.0 + 2 * 2**0.5, 40.0))  # 2 - 0.05 * 40
    assert chosen_rate(settings, "ppo") == 2e-5
    assert chosen_rate(settings, "macro") == settings.rates[0]  # nothing was tried yet


def test_a_failed_job_is_tried_once_more_and_holds_back_who_needs_it(settings):
    jobs = [Job("a/fails", print), Job("b/needs", print, ("a/fails",)), Job("c/free", print)]
    command = [sys.executable, "-c", "import sys; sys.exit('fails' in sys.argv[2])"]
    schedule = Schedule(settings, jobs, 2, time.monotonic() + 600, command)
    assert not schedule.run()
    assert schedule.failures == {"a/fails": 2}
    assert [is_done(settings, job.name) for job in jobs] == [False, False, True]


def test_a_job_that_is_timed_runs_alone(settings):
    jobs = [Job("first", print), Job("timed", print, alone=True), Job("last", print)]
    schedule = Schedule(settings, jobs, 3, time.monotonic() + 600, [])
    running = []
    schedule._start = lambda job: (running.append(job.name), mark_done(settings, job.name, 0.0))
    schedule.running = [type("Busy", (), {"job": Job("busy", print)})()]
    assert schedule._next().name == "first"
    mark_done(settings, "first", 0.0)
    assert schedule._next() is None  # `timed` waits, and `last` behind it
    schedule.running = []
    assert schedule._next().name == "timed"


def test_other_settings_in_the_same_folder_are_refused(settings):
    keep(settings)
    keep(dataclasses.replace(settings, token_budget=1024))
    with pytest.raises(SystemExit, match=r"other settings .steps."):
        keep(dataclasses.replace(settings, steps=7))


def test_numbers_by_hand():
    columns = [0.0, 10.0, 20.0], [0.0, 5.0, 9.0], [0.0, 0.5, 1.0], [0.0, 2.0, 6.0]
    whole = Curve(*(np.array([column]) for column in columns))
    assert first_step(whole, 0.5) == 10
    assert first_step(whole, 1.5) == float("inf")
    assert score_at_kl(whole.scores, whole.kls, 4.0) == pytest.approx(0.75)
    ours = [{"key": str(i), "scores": {"gold": g}} for i, g in enumerate((1, 2, 3, 4))]
    theirs = [{"key": str(i), "scores": {"gold": g}} for i, g in enumerate((0, 1, 3, 3))]
    assert win_rate([ours], theirs, "gold").mean == 1.0  # 3.5 of 4, as Wilson counts whole ones


def curve(name: str, pace: float, kl_pace: float) -> Method:
    """Two seeds whose score is the step times a pace, up to 1, a little apart by prompt."""
    draw, runs = random.Random(name), []
    for seed in range(2):
        evaluations = [
            Evaluation(
                step,
                [min(1.0, pace * step) + draw.gauss(0, 0.001) for _ in range(20)],
                kl=[kl_pace * step + draw.gauss(0, 0.001) for _ in range(20)],
            )
            for step in range(0, 101, 10)
        ]
        evals = [{"step": e.step, "eval/score": e.scores[0]} for e in evaluations]
        about = {"seed": seed, "evals": evals, "evaluations": evaluations}
        runs.append(Run(Path(name), f"{name}-s{seed}", "ppo", **about))
    return Method(name, runs, [])


def test_speed_and_equal_kl_are_told_apart():
    base, fast = curve("ppo", 0.0125, 0.1), curve("n5-mean", 0.025, 0.2)
    middle, low, high, _ = speed(base, fast)
    assert low >= 1.5  # at 80 and at 40, read every 10 steps
    assert high <= 2.5
    assert low <= middle <= high
    assert steps_to(base, curve("n5-sum", 0.001, 0.1))[0] == float("inf")
    # Twice the score at twice the KL is no gain at equal KL; twice the score alone is.
    assert abs(ahead_at(base, fast, 4.0)[0]) < 0.01
    assert ahead_at(base, curve("n5-sum", 0.025, 0.1), 4.0)[1] > 0.4


def test_each_pooling_has_its_verdict():
    base, ours, alone = (curve(name, 0.01, 0.1) for name in ("ppo", "n5-sum", "n5-mean"))
    alone = dataclasses.replace(alone, runs=alone.runs[:1])
    have = {"n5-sum": ours, "n5-mean": ours}
    assert _pooled({"n5-sum": True, "n5-mean": True}, have, base) == "holds"
    assert _pooled({"n5-sum": None, "n5-mean": None}, have, base) == "cannot be told"
    apart = _pooled({"n5-sum": False, "n5-mean": True}, have, base)
    assert apart == "sum: does not hold<br>mean: holds"
    have["n5-mean"] = alone
    apart = _pooled({"n5-sum": False, "n5-mean": False}, have, base)
    assert apart == "sum: does not hold<br>mean: does not hold, in one seed"
    assert _pooled({"n5-sum": False}, have, base) == "sum: does not hold"


@pytest.fixture(scope="module")
def material(tmp_path_factory, trained) -> Path:
    """A random Llama with a tokenizer of its own, and pairs in both forms of TL;DR."""
    folder = tmp_path_factory.mktemp("material")
    draw = random.Random(0)
    words = shlex.split(WORDS)

    def text(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    for name, extra in (("a", {}), ("b", {"subreddit": "pets", "title": "Foxes"})):
        rows = []
        for i in range(70):
            pair = {"chosen": text(3), "rejected": text(4)}
            rows.append({**extra, "post": f"Post {name} {i}: {text(12)}", **pair})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tokenizer = trained("byte-level", [text(50), "Post TL;DR: Subreddit"])
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, **shape, **heads, **ends)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def sized(material: Path, out: Path, *more: str) -> list[str]:
    pairs = [str(material / f"{name}.jsonl") for name in "ab"]
    begin = ["--model", str(material / "model"), "--out", str(out), "--pairs", *pairs]
    return [*begin, *shlex.split(SIZES), *more]


def test_every_job_leaves_what_the_page_is_made_of(material, tmp_path, monkeypatch):
    out, docs, html = tmp_path / "out", tmp_path / "docs", tmp_path / "html"
    wanted = ["sft", "reward", "gold", "judged", "ppo-s0", "n5-sum-s0", "best-of-8"]
    monkeypatch.setattr(sys, "argv", ["evidence_tldr.py", *sized(material, out)])
    settings = keep(evidence_tldr.settings_of(evidence_tldr.parse()))
    prepare("tldr", settings.tldr, out / "data" / "tldr", settings.limit)
    jobs = {job.name: job for job in all_jobs(settings)}
    for name in wanted:
        jobs[f"tldr/{name}"].work()
    archive = pack(out, out / "evidence.tar.xz")
    words = ["evidence_report.py", str(archive), "--docs", str(docs), "--html", str(html)]
    monkeypatch.setattr(sys, "argv", words)
    evidence_report.main()
    text = (docs / "results.md").read_text("utf-8")
    assert "| n = 5, sum | 1 |" in text
    assert "| best of 8 | 1 |" in text
    assert "Macro actions end at a higher score than PPO" in text
    assert {f.name for f in (docs / "results").iterdir()} >= {"frontier.svg", "score-steps.svg"}
    assert "Judged in pairs" in (html / "tldr.html").read_text("utf-8")


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on(material, tmp_path):
    out = tmp_path / "out"
    script = [sys.executable, str(BENCH / "evidence_tldr.py")]
    words = [*script, *sized(material, out, "--only", "tldr/sft", "--model-batch", "1")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    first = subprocess.Popen(words, env=environment)
    metrics = out / "tldr" / "sft" / "metrics.jsonl"
    while not (metrics.is_file() and '"kind": "train"' in metrics.read_text("utf-8")):
        assert first.poll() is None
        time.sleep(0.01)
    first.kill()
    first.wait()
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    inside = unpack(out / "evidence.tar.xz", tmp_path / "unpacked")
    assert (inside / "tldr" / "sft" / "metrics.jsonl").is_file()
    assert not list(inside.rglob("*.safetensors"))


def test_the_deadline_asks_jobs_to_stop_and_they_go_on(settings, monkeypatch):
    """A job that is asked to stop saves, and is done when it is started once more."""
    monkeypatch.setattr(schedule_module, "SAVING", 20.0)
    saved = settings.folder("saved")
    child = f"""
import pathlib, signal, sys, time
saved = pathlib.Path({str(saved)!r})
def stop(*_):
    saved.mkdir(parents=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while not saved.is_dir():
    time.sleep(0.01)
"""
    jobs = [Job("long", print)]
    command = [sys.executable, "-c", child]
    first = Schedule(settings, jobs, 1, time.monotonic() + 600, command)
    log = Path(settings.out) / "logs" / "long.log"

    def asked(number: float) -> None:
        if log.is_file() and "ready" in log.read_text("utf-8"):
            first.deadline = 0.0

    monkeypatch.setattr(schedule_module.time, "sleep", asked)
    assert not first.run()
    assert saved.is_dir()
    assert not first.failures
    assert Schedule(settings, jobs, 1, time.monotonic() + 600, command).run()


def test_the_archive_has_no_weights_and_no_rows(settings, tmp_path):
    keep(settings)
    for name in ("tldr/ppo-s0/metrics.jsonl", "tldr/ppo-s0/model/config.json", "cache/a.json"):
        file = settings.folder(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    settings.data("tldr", "train").write_text("{}")
    inside = unpack(pack(Path(settings.out), tmp_path / "evidence.tar.xz"), tmp_path / "unpacked")
    found = {str(file.relative_to(inside)) for file in inside.rglob("*") if file.is_file()}
    assert "tldr/ppo-s0/metrics.jsonl" in found
    assert not found & {"tldr/ppo-s0/model/config.json", "cache/a.json", "data/tldr/train.jsonl"}
    assert isinstance(methods.sft(settings, "tldr"), SFTConfig)
