"""What votes change: a reward model trained again with them, and compared with the one before.

Both score the same held-out pairs, so the difference is taken pair by pair, and its interval over
prompts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from marlhf.config.build import build, raise_problems
from marlhf.data import Text, load_data, prompt_key
from marlhf.data.rows import response_text
from marlhf.errors import SettingError
from marlhf.intervals import Interval, interval, mean
from marlhf.judge.local import RewardJudge
from marlhf.judge.pairs import Pair, Response
from marlhf.runs.layout import read_config, read_state
from marlhf.train.stages import METHODS
from marlhf.train.supervised_config import RewardConfig


def retrain(run: Path, pairs: Path) -> Path:
    """Train a finished reward run again, from where it began, with more pairs: the new run."""
    if read_state(run).get("stage") != "reward":
        raise SettingError(f"{run} is no run of `marlhf reward`. Give the folder of one.")
    if not pairs.is_file() or not pairs.stat().st_size:
        raise SettingError(
            f"There are no pairs in {pairs}: nobody has voted for one side yet. Run "
            "`marlhf annotate` on it first."
        )
    config = _config(run)
    data = replace(config.data, more=(*config.data.more, str(pairs)))
    folder = run.with_name(f"{run.name}-voted")
    METHODS["reward"].train(replace(config, data=data, output_dir=str(folder)))
    return folder


def _config(run: Path) -> RewardConfig:
    problems: list[str] = []
    config = build(RewardConfig, read_config(run), str(run), problems)
    raise_problems(problems)
    return config


def compare(before: Path, after: Path, device: str = "auto") -> tuple[float, float, Interval]:
    """Accuracy of two reward runs on the held-out pairs of the first, and the difference.

    Each prompt counts once, however many pairs it has.
    """
    config = _config(before)
    rows = load_data(config.data, "reward", needs=config.columns).eval
    if not rows:
        raise SettingError(f"{before} holds out no pairs (data.eval_size), so nothing is compared.")
    asked = [Pair(row.prompt, _response(row.chosen), _response(row.rejected)) for row in rows]
    right = [
        [(m > 0) + (m == 0) / 2 for m in RewardJudge(str(run), device).margins(asked)]
        for run in (before, after)
    ]
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    for row, *both in zip(rows, *right):
        by_prompt.setdefault(prompt_key(row), []).append((both[0], both[1]))
    old, new = ([mean([x[i] for x in pairs]) for pairs in by_prompt.values()] for i in (0, 1))
    return mean(old), mean(new), interval([b - a for a, b in zip(old, new)])


def _response(given: Text | None) -> Response:
    assert given is not None, "rows without are left out"
    return Response(response_text(given))
