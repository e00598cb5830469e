"""Files of sampled responses in a run folder, and the settings they were sampled with.

Every line says its settings under `sampling`. The file's name repeats them for people.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from marlhf.runs.jsonl import Line, read_keyed


@dataclass(frozen=True)
class SamplingSettings:
    """All that two evaluations must share to be compared."""

    temperature: float
    max_new_tokens: int
    seed: int
    data: str = ""
    """Which prompts, where they are not the run's own held-out ones."""
    rewards: str = ""
    """What scored the samples, where the best of them was kept."""
    environment: str = ""
    """What prompts were played in as conversations."""

    @property
    def file_name(self) -> str:
        words = [f"t{self.temperature:g}", f"m{self.max_new_tokens}", f"s{self.seed}"]
        more = (self.data, self.environment, self.rewards)
        return "-".join([*words, *filter(None, more)]) + ".jsonl"

    @property
    def label(self) -> str:
        return f"temperature {self.temperature:g}, {self.label_without_temperature}"

    @property
    def label_without_temperature(self) -> str:
        """What is the same for all temperatures of a sweep.

        >>> SamplingSettings(0.8, 64, seed=1, data="test").label_without_temperature
        '64 tokens, seed 1, test'
        """
        seed = f"seed {self.seed}" if self.seed else ""
        length = f"{self.max_new_tokens} tokens" + (" per turn" if self.environment else "")
        words = (length, seed, self.data, self.environment, self.rewards)
        return ", ".join(filter(None, words))


@dataclass(frozen=True)
class EvaluationFile:
    """The last line of each prompt; no settings where the lines have none."""

    name: str
    settings: SamplingSettings | None
    lines: list[Line]

    @property
    def label(self) -> str:
        return self.name if self.settings is None else self.settings.label


def read_evaluations(folder: Path) -> list[EvaluationFile]:
    """Every file in `evaluation/` or `best_of_n/` of a run that has lines."""
    files: list[EvaluationFile] = []
    for file in sorted(folder.glob("*.jsonl")):
        lines = list(read_keyed(file).values())
        if lines:
            files.append(EvaluationFile(file.stem, _settings_of(lines[-1]), lines))
    return files


def _settings_of(line: Line) -> SamplingSettings | None:
    written = line.get("sampling")
    if not isinstance(written, dict):
        return None
    names = {field.name for field in fields(SamplingSettings)}
    try:
        return SamplingSettings(**{k: v for k, v in written.items() if k in names})
    except TypeError:  # edited by hand
        return None
