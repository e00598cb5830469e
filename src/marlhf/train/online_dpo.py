"""Online DPO: the policy samples the pairs that it learns from.

Each step: sample `num_samples` responses to each prompt, score them by rewards or by a judge, take
the best and the worst of each prompt as a pair, and take a step of DPO on the pairs. Responses to
a prompt that all score alike are no pair.

Axes: B rows, P pairs, T response tokens. Rows come prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlhf.data import Row, decode, prompt_key
from marlhf.data.collate import TokenRows
from marlhf.judge.compare import PairJudge
from marlhf.judge.pairs import JudgeError, Pair, Response
from marlhf.judge.verdicts import WINS, Verdict
from marlhf.models.base import Tokenizer
from marlhf.runtime.distributed import World
from marlhf.runtime.loop import OpenRun, in_run_folder
from marlhf.runtime.optim import check_finite
from marlhf.runtime.stage import GivenObjects
from marlhf.train.dpo import implicit_rewards, preference_loss
from marlhf.train.dpo_config import OnlineDPOConfig, PairsConfig
from marlhf.train.experience import Credit, Experience
from marlhf.train.ppo import shape_and_segment
from marlhf.train.rl_models import Models
from marlhf.train.rl_run import RLRun

REPLIES = "replies.sqlite"
"""A judge's replies, in the run folder: a resumed run asks for none of them again."""


@in_run_folder("online-dpo")
def train(config: OnlineDPOConfig, run: OpenRun) -> Path:
    """Train, or resume training; returns the folder of the policy."""
    judge = open_judge(config, run.objects, run.world, run.folder.path)
    rates = {"policy": config.learning_rate}
    held_out_credit = partial(scores_as_credit, config)
    own_state = {"judge": judge} if judge else None
    rl = RLRun(config, run, held_out_credit, rates, own_state)
    if judge is not None:
        judge.tokenizer = rl.models.tokenizer
        rl.models.reward.parts.append(("judge", judge, 1.0))

    with rl.loop:
        for step in rl.steps():
            batch, rollout = rl.sample(step)
            rl.clock.mark("rollout")
            experience = rl.score(batch, rollout)
            rl.clock.mark("score")
            pairs = best_and_worst(experience.clipped_scores, config.num_samples)
            credit = scores_as_credit(
                config, experience, rl.models, rl.kl.coef, rl.shuffler, config.num_samples
            )
            metrics = {"rl/logprob_gap": torch.zeros(())}
            if pairs:
                compute = partial(backward, experience, pairs, rl.models, config)
                numbers = list(range(len(pairs)))
                metrics = rl.learner.update([compute], experience, credit, rl.rates(step), numbers)
            rl.clock.mark("update")
            metrics["dpo/pairs"] = torch.tensor(float(len(pairs)))
            metrics["dpo/ties"] = torch.tensor(float(config.batch_size - len(pairs)))
            by_prompt = experience.scores.view(-1, config.num_samples)
            metrics["rl/group_std"] = by_prompt.std(dim=1).mean()
            metrics["rl/zero_std_groups"] = metrics["dpo/ties"] / config.batch_size
            rl.log(experience, credit, metrics)
        return rl.close()


def best_and_worst(scores: Tensor, num_samples: int) -> list[tuple[int, int]]:
    """The rows of the best and the worst response to each prompt; none where all are alike.

    >>> best_and_worst(torch.tensor([1.0, 3.0, 2.0, 5.0, 5.0, 5.0]), 3)
    [(1, 0)]
    """
    check_finite([("the scores", scores)])
    pairs: list[tuple[int, int]] = []
    for number, group in enumerate(scores.view(-1, num_samples).tolist()):
        best, worst = group.index(max(group)), group.index(min(group))
        if best != worst:
            pairs.append((number * num_samples + best, number * num_samples + worst))
    return pairs


def backward(
    experience: Experience,
    pairs: list[tuple[int, int]],
    models: Models,
    config: OnlineDPOConfig,
    numbers: list[int],
) -> dict[str, Tensor]:
    """Gradients of the mean loss of some pairs, by micro-batches that hold both sides of a pair."""
    world, sequences = models.world, experience.sequences
    chosen, rejected = zip(*(pairs[i] for i in numbers))
    rows = torch.tensor([chosen, rejected], device=world.device)  # [2, P]
    mask = experience.mask[rows]  # [2, P, T]
    ref_logprobs = torch.where(mask, experience.ref_logprobs[rows], 0.0).sum(dim=2)  # [2, P]
    logprobs = torch.zeros_like(ref_logprobs)
    loss, gap = torch.zeros(2, device=world.device)
    lengths = sequences.total_lengths
    longest = [max(lengths[c], lengths[r]) for c, r in zip(chosen, rejected)]
    options: Any = {"beta": config.beta, "loss_type": config.loss_type}
    for micro in world.batches(longest, max(1, models.pass_tokens // 2)):
        index = [side[i] for side in (chosen, rejected) for i in micro.rows]
        part = sequences.rows(index)
        by_token = torch.where(part.mask, models.logprobs(models.policy, part), 0.0)
        both = by_token.sum(dim=1).view(2, -1)
        part_loss = preference_loss(both, ref_logprobs[:, micro.rows], len(numbers), **options)
        (part_loss * micro.weight).backward()
        loss += part_loss.detach() * micro.weight
        logprobs[:, micro.rows] += both.detach() * micro.weight
        sampled = torch.where(part.mask, experience.logprobs[index, : part.mask.shape[1]], 0.0)
        gap += (by_token.detach() - sampled).abs().sum() / mask.sum() * micro.weight
    loss, gap = world.sum(torch.stack([loss, gap])).unbind()
    logprobs = world.sum(logprobs)
    found = implicit_rewards(logprobs, ref_logprobs, config.beta)
    metrics = {f"dpo/{k}": x for k, x in found.items()}
    return {"rl/policy_loss": loss, "rl/logprob_gap": gap} | metrics


@torch.no_grad()
def scores_as_credit(
    config: OnlineDPOConfig,
    experience: Experience,
    models: Models,
    kl_coef: float,
    shuffler: torch.Generator,
    num_samples: int | None = None,
) -> Credit:
    """Scores of whole responses above the mean of their prompt, or of all, as logs show them."""
    rewards, segments = shape_and_segment(experience, models, config, kl_coef, shuffler)
    scores = rewards.sum(dim=1)
    mean = scores.view(-1, num_samples or len(scores)).mean(dim=1)
    advantages = scores - mean.repeat_interleave(len(scores) // len(mean))
    returns, advantages = (
        torch.where(segments.mask, x[:, None], 0.0) for x in (scores, advantages)
    )
    return Credit(rewards, segments, torch.zeros_like(rewards), advantages, returns)


def open_judge(
    config: PairsConfig, objects: GivenObjects, world: World, folder: Path
) -> JudgeScores | None:
    """The judge, on the process that asks it; None where rewards alone score."""
    if objects.judge is not None:  # in TRL's form: the number of the better one, -1 for neither
        return JudgeScores(partial(_ask_object, objects.judge), world)
    if not config.judge:
        return None
    with world.raise_on_all_ranks():
        compare = None
        if world.main:
            compare = PairJudge(
                config.judge,
                task=config.judge_task,
                cache=folder / REPLIES,
                base_url=config.judge_url or None,
                device=str(world.device),
            )
    return JudgeScores(compare, world)


def _ask_object(judge: Any, pairs: Sequence[Pair]) -> list[Verdict | None]:
    """Its verdicts; none where it gave None."""
    better = list(judge.judge([p.prompt for p in pairs], [[p.a.text, p.b.text] for p in pairs]))
    names: dict[float | None, Verdict | None] = {0: "a", 1: "b", -1: "tie", None: None}
    numbers = [None if number is None else float(number) for number in better]
    if len(numbers) != len(pairs) or not names.keys() >= set(numbers):
        raise JudgeError(
            f"{type(judge).__name__}.judge must return 0, 1 or -1 for each of {len(pairs)} pairs: "
            f"the number of the better response, or neither. It returned {better!r:.100}."
        )
    return [names[number] for number in numbers]


class JudgeScores:
    """Scores by a judge of pairs: the share of its comparisons that a response wins.

    Each is compared with the other responses to its prompt. A held-out prompt has one response at a
    time: it is compared with the first that was seen, the starting policy's.
    """

    def __init__(self, compare: Any, world: World) -> None:
        self.compare, self.world = compare, world
        self.tokenizer: Tokenizer | None = None
        self.first: dict[str, tuple[str, bool]] = {}

    def __call__(self, prompts: TokenRows, responses: TokenRows, rows: Sequence[Row]) -> Tensor:
        assert self.tokenizer is not None
        eos = self.tokenizer.eos_token_id
        said = [
            Response(decode(self.tokenizer, list(ids)), ended=list(ids[-1:]) == [eos])
            for ids in responses
        ]
        sides: list[tuple[int, int | None]] = []  # rows; None for the starting policy's response
        pairs: list[Pair] = []
        for key, group in groupby(range(len(rows)), key=lambda i: prompt_key(rows[i])):
            members = list(group)
            for a, b in combinations(members, 2):
                sides.append((a, b))
                pairs.append(Pair(rows[a].prompt, said[a], said[b]))
            if len(members) == 1:
                [a] = members
                first = self.first.setdefault(key, (said[a].text, said[a].ended))
                sides.append((a, None))
                pairs.append(Pair(rows[a].prompt, said[a], Response(first[0], ended=first[1])))
        verdicts: Any = None
        with self.world.raise_on_all_ranks():
            if self.world.main:
                verdicts = self.compare(pairs)
        wins, counts = torch.zeros(2, len(rows))
        for (a, b), verdict in zip(sides, self.world.broadcast(verdicts)):
            if verdict is None:
                continue
            for row, won in ((a, WINS[verdict]), (b, 1 - WINS[verdict])):
                if row is not None:
                    wins[row] += won
                    counts[row] += 1
        scores = torch.where(counts > 0, wins / counts.clamp(min=1), 0.5)
        return scores.to(self.world.device)

    def state(self) -> dict[str, tuple[str, bool]]:
        return self.first

    def load_state(self, state: dict[str, tuple[str, bool]]) -> None:
        self.first = state
