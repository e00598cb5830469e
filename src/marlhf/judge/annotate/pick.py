"""Which pairs people should vote on: those where a vote is likeliest to correct the reward model.

Where several reward models, or the members of an ensemble, score a pair, they vote with the
probabilities that they give; where they disagree, a person's vote says most. A single model leaves
only how near it is to even.

Axes: M members, N pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from marlhf.data.rows import Text, is_blank
from marlhf.judge.annotate.session import export_pairs
from marlhf.judge.annotate.store import Store
from marlhf.judge.pairs import JudgeError, Pair, Response
from marlhf.runs.atomic import read_jsonl, write_jsonl

if TYPE_CHECKING:
    from marlhf.intervals import Floats

POOL = ("first.jsonl", "second.jsonl")
"""Files of two responses to each prompt, one in each, as `marlhf annotate` reads them."""
VOTES = "votes.sqlite"
"""Where a folder with such files has its votes."""
FOLDER = "votes"
"""The folder in a run for pairs that it was asked for."""
LIKELY = 0.25
"""A vote that corrects the reward model less often than this is hardly worth asking for."""

Texts = tuple[Text, str, str]
"""A prompt with two responses."""


def write_pool(folder: Path, pairs: Sequence[Texts]) -> None:
    """Pairs as two files of responses."""
    folder.mkdir(parents=True, exist_ok=True)
    for side, name in enumerate(POOL, start=1):
        write_jsonl(folder / name, [{"prompt": p[0], "response": p[side]} for p in pairs])


def read_pool(folder: Path) -> list[Texts]:
    first, second = (read_jsonl(folder / name).rows for name in POOL)
    return [(a["prompt"], a["response"], b["response"]) for a, b in zip(first, second)]


def sample_pool(run: Path | str, count: int, seed: int) -> list[Texts]:
    """Two responses of a run's policy as it is now to each of some training prompts."""
    from marlhf.data import decode
    from marlhf.evaluate.best_of_n import find_task
    from marlhf.evaluate.eval_plan import EvaluationOptions

    options = EvaluationOptions(prompts=count, train=True, seed=seed)
    task = find_task(run, options)
    prompts = [p for p in task.prompts for _ in range(2)]
    rollout = task.sample(prompts, [0, 1] * len(task.prompts))
    texts = [decode(task.tokenizer, ids) for ids in rollout.responses]
    whole = [bool(end) and not is_blank(text) for end, text in zip(rollout.ended, texts)]
    pairs = [
        (prompts[i].row.prompt, texts[i], texts[i + 1])
        for i in range(0, len(texts), 2)
        if whole[i] and whole[i + 1] and texts[i] != texts[i + 1]
    ]
    if not pairs:
        raise JudgeError(
            f"{run} wrote no two different, finished responses to any of {len(task.prompts)} "
            "prompts. Raise --pool, or the run's max_new_tokens."
        )
    return pairs


def reward_margins(rewards: Sequence[Path | str]) -> Callable[..., Floats]:
    """A function from pairs to what each model, or member of an ensemble, gives the first more."""
    from marlhf.judge.local import RewardJudge

    def margins(pairs: Sequence[Texts]) -> Floats:  # [M, N]
        asked = [Pair(prompt, Response(a), Response(b)) for prompt, a, b in pairs]
        judges = (RewardJudge(str(path)) for path in rewards)
        return np.concatenate([judge.member_margins(asked) for judge in judges])

    return margins


def uncertainty(margins: Floats) -> Floats:
    """How much a vote on each pair would tell: [M, N] -> [N].

    The deviation of the members' probabilities; of one member how near it is to even.

    >>> uncertainty(np.array([[0.0, 2.0, -9.0]])).argmax(), uncertainty(np.eye(2) * 4).round(2)
    (np.int64(0), array([0.24, 0.24]))
    """
    chances = probabilities(margins)
    if len(chances) == 1:
        return 0.5 - np.abs(chances[0] - 0.5)
    return chances.std(axis=0)


def probabilities(margins: Floats) -> Floats:
    """The Bradley-Terry probability that the first response is better."""
    return 1 / (1 + np.exp(-np.clip(margins, -60, 60)))


def pick(margins: Floats, count: int, how: str, seed: int) -> list[int]:
    """The pairs to ask for, the most telling first; or at random."""
    if how == "random":
        return np.random.default_rng(seed).permutation(margins.shape[1])[:count].tolist()
    return np.argsort(-uncertainty(margins), kind="stable")[:count].tolist()


def describe(margins: Floats, order: Sequence[int]) -> list[str]:
    """What the rewards make of the pool, and how many votes are worth asking for.

    The last line takes the mean of the members' probabilities at its word: a pair that the rewards
    give a chance of p is decided wrongly with chance min(p, 1 - p).
    """
    chances = probabilities(margins)
    mean = chances.mean(axis=0)
    wrong = np.minimum(mean, 1 - mean)
    lines: list[str] = []
    if len(chances) > 1:
        split = ((chances > 0.5).mean(axis=0) % 1 > 0).sum()
        lines.append(f"{len(chances)} rewards disagree on the winner of {split} of {len(mean)}")
    low, half, high = np.quantile(uncertainty(margins), [0.1, 0.5, 0.9])
    name = (
        "deviation of their probabilities" if len(chances) > 1 else "nearness to even, at most .5"
    )
    lines.append(f"{name}: {half:.2f} in the middle, {low:.2f} and {high:.2f} at a tenth each end")
    worth, asked = int((wrong > LIKELY).sum()), wrong[list(order)].sum()
    lines.append(
        f"By their own probabilities they are wrong on {wrong.sum():.0f} of {len(mean)} pairs, on "
        f"{asked:.0f} of the {len(order)} picked. {worth} are worth a vote: elsewhere fewer than "
        "one vote in four would correct them."
    )
    return lines


def open_pool(
    run: Path,
    how: str,
    rewards: Sequence[Path | str],
    *,
    pool: int,
    count: int,
    seed: int,
    say: Callable[[str], Any],
) -> Path:
    """The folder with the pairs of one run that people are asked for, picked if they are not yet.

    A `label` run has sampled its pairs already. Those of another run are sampled now, from the
    policy as it is, and lie in `votes/` of its folder.
    """
    if how not in ("random", "active"):
        raise JudgeError(f"There is no --pick {how!r}. Choose random or active.")
    if how == "active" and not rewards:
        raise JudgeError("--pick active asks a reward model where it is unsure. Give --reward.")
    labels = all((run / name).is_file() for name in POOL)
    folder = run if labels else run / FOLDER
    if (folder / VOTES).is_file():
        say(f"The pairs in {folder} have votes, so they stay. Delete that folder to pick others.")
        return folder
    pairs = read_pool(folder) if labels else sample_pool(run, pool, seed)
    if how == "active":
        margins = reward_margins(rewards)(pairs)
        order = pick(margins, count, how, seed)
        for line in describe(margins, order):
            say(line)
        pairs = [pairs[i] for i in order]
    elif not labels:
        pairs = pairs[:count]
    write_pool(folder, pairs)
    return folder


def pairs_of(run: Path, database: Path | None) -> Path:
    """The rows of the votes on one run, written anew from its database."""
    folder = run if (run / VOTES).is_file() else run / FOLDER
    with closing(Store(database or folder / VOTES)) as store:
        return export_pairs(store, folder)
