"""What the evidence is made with: one object, written down beside the results."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

FILE = "evidence.json"
FREE = ("token_budget", "compile", "device", "save_every", "extras", "tasks")
"""What may differ when an unfinished --out goes on."""
HUB: dict[str, tuple[str, ...]] = {
    "tldr": ("openai/summarize_from_feedback",),
    "hh": ("Dahoas/full-hh-rlhf",),
    "mbpp": ("google-research-datasets/mbpp",),
}


@dataclass(frozen=True)
class Settings:
    """Sizes and seeds. The defaults are those of the results page."""

    model: str
    out: str
    tasks: tuple[str, ...] = ("tldr",)
    tldr: tuple[str, ...] = HUB["tldr"]
    hh: tuple[str, ...] = HUB["hh"]
    mbpp: tuple[str, ...] = HUB["mbpp"]
    limit: int | None = None
    """Read only so many records of each file."""
    steps: int = 200
    small_steps: int = 100
    """Steps of the runs on HH and MBPP."""
    seeds: int = 3
    extras: bool = False
    """More seeds of mean pooling and of the controls, after everything else."""
    rates: tuple[float, ...] = (4e-5, 2e-5)
    """Learning rates tried for every method."""
    try_steps: int = 40
    batch: int = 128
    """Prompts in a step."""
    model_batch: int = 32
    """Rows in an update of SFT, reward models and DPO."""
    beta: float = 0.05
    prompt_tokens: int = 240
    response_tokens: int = 48
    reward_prompt_tokens: int = 420
    eval_every: int = 10
    eval_prompts: int = 192
    test_prompts: int = 400
    time_steps: int = 12
    """Steps of each run that is timed alone."""
    token_budget: int = 20480
    compile: bool = True
    device: str = "auto"
    save_every: int = 0

    def folder(self, name: str) -> Path:
        """The folder of a job, such as `tldr/sft`."""
        return Path(self.out) / name

    def model_of(self, name: str) -> str:
        return str(self.folder(name) / "model")

    def data(self, task: str, part: str) -> Path:
        return Path(self.out) / "data" / task / f"{part}.jsonl"


def keep(settings: Settings) -> Settings:
    """Write the settings down, or find that they are those of the results already there."""
    file = Path(settings.out) / FILE
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")
        return settings
    before = read(settings.out)
    now = replace(settings, **{name: getattr(before, name) for name in (*FREE, "out")})
    changed = [f.name for f in fields(now) if getattr(now, f.name) != getattr(before, f.name)]
    if changed:
        raise SystemExit(
            f"{settings.out} holds results of other settings ({', '.join(changed)}). Choose "
            "another --out, or repeat the command that began it."
        )
    file.write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")
    return settings


def read(out: str | Path) -> Settings:
    """The settings that an --out was begun with, wherever it lies now."""
    raw: dict[str, Any] = json.loads((Path(out) / FILE).read_text(encoding="utf-8"))
    raw = {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()}
    raw["out"] = str(out)
    return Settings(**raw)
