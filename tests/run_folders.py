"""Run folders made up for the tests, in the form that training writes them."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Row = dict[str, Any]
MakeRun = Callable[..., Path]

PROMPTS = [
    "SUBREDDIT: r/tea\nPOST: My flatmate reuses tea bags three times and says it is about taste. "
    "I think it is about money. Last week there were visitors.\nTL;DR:",
    "SUBREDDIT: r/cycling\nPOST: The rear wheel clicks once a turn, only uphill, only when warm. "
    "Two shops found nothing.\nTL;DR:",
    "SUBREDDIT: r/relationships\nPOST: We have moved cities twice for his work. Now I was offered "
    "a post in the first one again.\nTL;DR:",
    "SUBREDDIT: r/cooking\nPOST: Every loaf rises well and then sinks in the oven.\nTL;DR:",
]
ANSWERS = {
    "before": " Flatmate reuses tea bags and I do not know what to do about it or about the"
    " visitors or the tea.",
    "ppo": " Flatmate reuses tea bags and calls it taste; with visitors coming I need a way to say"
    " that it is about money.",
    "macro-ppo": " Flatmate serves thrice-used tea bags, even to visitors. How do I say it is about"
    " money without a quarrel?",
}


def write_run(
    folder: Path,
    *,
    stage: str = "ppo",
    status: str = "finished",
    seed: int = 0,
    config: Row | None = None,
    metrics: list[Row] | None = None,
    evaluations: list[Row] | None = None,
    samples: list[Row] | None = None,
    **about: Any,
) -> Path:
    """Write a run folder; whatever is None has no file."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {"name": folder.name, "stage": stage, "status": status, "seed": seed, "seconds": 90.0}
    (folder / "run.json").write_text(json.dumps(words | about), encoding="utf-8")
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    for name, rows in (("metrics", metrics), ("eval", evaluations), ("samples", samples)):
        if rows is not None:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run("name", ...)` writes a run folder of that name and returns it."""
    return lambda name, /, **parts: write_run(tmp_path / name, **parts)


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A whole comparison: SFT, reward model, PPO and macro PPO, two seeds of each."""
    return write_demo(tmp_path / "tldr")


def write_demo(folder: Path, steps: int = 200, prompts: int = 240) -> Path:
    for seed in (1, 2):
        root = folder / f"seed{seed}"
        _write_sft(root / "sft", seed)
        _write_reward(root / "reward", seed)
        for name, n in (("ppo", 1), ("macro-ppo", 5)):
            _write_policy(root / name, n, seed, steps, prompts)
    return folder


def _config(folder: Path, seed: int, **chosen: Any) -> Row:
    return {"output_dir": str(folder), "seed": seed, **chosen}


def _about(seconds: float) -> Row:
    return {"marlhf": "0.1.0", "started": "2025-06-01T12:00:00", "seconds": seconds}


def _write_sft(folder: Path, seed: int) -> None:
    draw = random.Random(f"sft {seed}")
    rows: list[Row] = []
    for step in range(1, 121):
        loss = 2.1 + 1.4 * math.exp(-step / 25) + draw.gauss(0, 0.03)
        rate = 5e-5 * min(1, step / 12) * 0.5 * (1 + math.cos(math.pi * step / 120))
        rows.append(
            {"kind": "train", "step": step, "seconds": step * 0.8, "sft/loss": loss}
            | {"sft/learning_rate": rate}
        )
        if step % 20 == 0:
            held = 2.18 + 1.3 * math.exp(-step / 25)
            rows.append({"kind": "eval", "step": step, "seconds": step * 0.8, "eval/loss": held})
    config = _config(folder, seed, model="tiny", learning_rate=5e-5, batch_size=64)
    write_run(folder, stage="sft", seed=seed, config=config, metrics=rows, **_about(97))


def _write_reward(folder: Path, seed: int) -> None:
    draw = random.Random(f"reward {seed}")
    rows: list[Row] = []
    for step in range(1, 101):
        accuracy = 0.5 + 0.24 * (1 - math.exp(-step / 22))
        train = {"reward/loss": 0.69 - 0.7 * (accuracy - 0.5) + draw.gauss(0, 0.02)}
        train["reward/accuracy"] = accuracy + draw.gauss(0, 0.03)
        train["reward/margin"] = 3 * (accuracy - 0.5) + draw.gauss(0, 0.05)
        rows.append({"kind": "train", "step": step, "seconds": step * 1.1, **train})
        if step % 20 == 0:
            held = {"eval/accuracy": accuracy - 0.015, "eval/loss": 0.7 - 0.65 * (accuracy - 0.5)}
            rows.append({"kind": "eval", "step": step, "seconds": step * 1.1, **held})
    model = str(folder.parent / "sft" / "model")
    config = _config(folder, seed, model=model, learning_rate=1e-5, batch_size=32)
    write_run(folder, stage="reward", seed=seed, config=config, metrics=rows, **_about(112))


def _write_policy(folder: Path, n: int, seed: int, steps: int, prompts: int) -> None:
    draw = random.Random(f"{n} {seed}")
    hard = random.Random("prompts")
    base = [hard.gauss(-0.64, 0.7) for _ in range(prompts)]
    speed, top, spent = (0.011, 1.75, 9.0) if n == 1 else (0.019, 2.2, 10.4)
    lift = draw.gauss(0, 0.04)
    seconds_a_step = 6.1 if n == 1 else 5.9
    metrics: list[Row] = []
    evaluations: list[Row] = []
    for step in range(steps + 1):
        learnt = 1 - math.exp(-speed * step)
        score, kl = -0.64 + (top + lift) * learnt, spent * (step / steps) ** 0.6
        length = 33 + 6 * learnt
        seconds = step * seconds_a_step
        if step:
            train = {
                "rl/score": score + draw.gauss(0, 0.12),
                "rl/reward": score - 0.05 * kl + draw.gauss(0, 0.12),
                "rl/kl": kl + abs(draw.gauss(0, 0.3)),
                "rl/length": length + draw.gauss(0, 1.2),
                "rl/policy_loss": -0.02 + draw.gauss(0, 0.006),
                "rl/value_loss": 0.4 * math.exp(-step / 40) + 0.05 + abs(draw.gauss(0, 0.01)),
                "rl/entropy": 2.2 - 0.7 * learnt + draw.gauss(0, 0.02),
                "rl/clip_fraction": 0.04 + 0.03 * learnt + abs(draw.gauss(0, 0.006)),
                "rl/advantage_norm": (9 if n == 1 else 6.5) + draw.gauss(0, 0.4),
                "rl/q_norm": (6 if n == 1 else 7.5) + 2 * learnt + draw.gauss(0, 0.2),
                "rl/ended": 0.97 + draw.gauss(0, 0.01),
                "rl/macro_length": float(n) * (1 if n == 1 else 0.97),
                "time/rollout": 3.1 + abs(draw.gauss(0, 0.1)),
                "time/score": 0.55,
                "time/update": 2.2 - 0.1 * (n > 1),
                "time/step": seconds_a_step,
            }
            metrics.append({"kind": "train", "step": step, "seconds": seconds, **train})
        if step % 20 == 0:
            noise = 0.6 if step else 0.0
            gain = score + 0.64
            scores = [b + gain * draw.gauss(1, 0.35) + draw.gauss(0, noise) for b in base]
            gold = [0.7 * s + draw.gauss(0, 0.3) for s in scores]
            held = {
                "eval/repetition": 0.02 + 0.012 * learnt,
                "eval/win_rate": sum(s > b for s, b in zip(scores, base)) / prompts,
                "eval/ended": 0.97,
                "eval/score": sum(scores) / prompts,
                "eval/gold": sum(gold) / prompts,
                "eval/kl": kl,
                "eval/length": length,
            }
            metrics.append({"kind": "eval", "step": step, "seconds": seconds, **held})
            lengths = [float(round(draw.gauss(length, 5))) for _ in base]
            kls = [max(0.0, draw.gauss(kl, 1 + kl / 5)) for _ in base]
            evaluations.append(
                {"step": step, "scores": scores, "gold": gold, "kl": kls, "length": lengths}
                | {"sft_scores": base}
            )
    config = _config(
        folder,
        seed,
        model=str(folder.parent / "sft" / "model"),
        reward_model=str(folder.parent / "reward" / "model"),
        segmenter={"type": "ngram", "n": n},
        kl_coef=0.05,
        batch_size=64,
    )
    write_run(
        folder,
        seed=seed,
        config=config,
        metrics=metrics,
        evaluations=evaluations,
        samples=list(_samples(folder.name, n, steps, draw)),
        summary={"eval/score": evaluations[-1]["scores"][0]},
        peak_memory_gib=11.2,
        **_about(steps * seconds_a_step + 30),
    )


def _samples(name: str, n: int, steps: int, draw: random.Random):
    for step, key in ((0, "before"), (steps, name)):
        for index, prompt in enumerate(PROMPTS):
            words = ANSWERS[key].split(" ")[1:]
            pieces = [f" {word}" for word in words]
            advantages = [draw.gauss(0.1, 0.6) for _ in pieces]
            yield {
                "step": step,
                "index": index,
                "prompt": prompt,
                "response": "".join(pieces),
                "score": draw.gauss(-0.6 if step == 0 else 1.0, 0.3),
                "gold": draw.gauss(-0.4 if step == 0 else 0.7, 0.3),
                "kl": 0.0 if step == 0 else draw.gauss(9, 1),
                "length": len(pieces),
                "pieces": pieces,
                "starts": [i % n == 0 for i in range(len(pieces))],
                "advantages": [advantages[i - i % n] for i in range(len(pieces))],
            }


ASKED = {"source": "toy", "limit": 200, "eval_size": 12}


def save_tiny(folder: Path, *, scalar: bool = False, seed: int = 0, noise: float = 0.0) -> str:
    """A tiny model in a folder, moved off its start by some noise."""
    import torch

    from marlhf.models.load import load_policy, load_scalar, load_tokenizer

    model = load_scalar("tiny", seed=seed) if scalar else load_policy("tiny", seed=seed)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn_like(weight)
    model.save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def save_model():
    """`save_model(folder, scalar=True, seed=1)` saves a tiny model: see `save_tiny`."""
    return save_tiny


def write_finished(folder: Path, stage: str, config: Row, **model: Any) -> Path:
    """A run whose model is there, as if it had been trained."""
    folder.mkdir(parents=True)
    about = {"name": folder.name, "stage": stage, "status": "finished", "seed": 0}
    (folder / "run.json").write_text(json.dumps(about))
    whole = {"output_dir": f"/gone/{folder.name}", "seed": 0, "data": ASKED, **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(whole))
    line = {"kind": "train", "step": 1, "seconds": 1.0, f"{stage}/loss": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    save_tiny(folder / "model", **model)
    return folder


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory) -> Path:
    """A finished run of every method, of models that hardly differ; see `finished`."""
    root = tmp_path_factory.mktemp("made")
    tied = {"model": "/gone/sft/model", "ref_model": None}
    scored = {**tied, "reward_model": "/gone/reward/model"}
    scored["sampling"] = {"max_new_tokens": 8, "temperature": 1.0}
    write_finished(root / "sft", "sft", {"model": "tiny"})
    write_finished(root / "reward", "reward", tied, scalar=True)
    write_finished(root / "dpo", "dpo", tied, noise=0.05)
    write_finished(root / "ppo", "ppo", scored, noise=0.02)
    write_finished(root / "rloo", "rloo", scored, noise=0.03)
    save_tiny(root / "other", scalar=True, seed=7)
    return root


@pytest.fixture
def finished(finished_once, tmp_path) -> Path:
    """A copy of all runs, which are not where their settings say they were."""
    shutil.copytree(finished_once, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def browser():
    """A real Chromium, where there is one; one without windows starts and draws sooner."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Pages:
    """Pages in browser profiles of their own, lent to one test after another.

    A profile is emptied before it is lent again: a new one, whose processes start cold, takes
    longer than most of what a test does in it.
    """

    def __init__(self, browser) -> None:
        self._browser = browser
        self._free = defaultdict(list)

    @contextlib.contextmanager
    def lend(self, listeners, *, width=1280, height=720, color_scheme="light", **profile):
        free = self._free[str(profile)]
        if free:
            page = free.pop()
            page.context.clear_cookies()
            page.mouse.move(0, 0)
            if profile.get("java_script_enabled", True):
                page.evaluate("localStorage.clear(); sessionStorage.clear()")
        else:
            page = self._browser.new_context(**profile).new_page()
            page.set_default_timeout(60_000)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(media="null", color_scheme=color_scheme)
        for event, listener in listeners.items():
            page.on(event, listener)
        yield page
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        free.append(page)


@pytest.fixture(scope="module")
def pages(browser):
    """`pages.lend(listeners, width=390, ...)`: a page as in a browser that was just started."""
    return Pages(browser)
