"""How well estimators of credit agree with the true gradient in `guess`, without sampling.

    python bench/exact_credit.py runs/evidence/turn-length-sweep --steps 5 20

`marlhf credit` samples batches, and in this game would need thousands of them. The game is small:
three guesses among nine numbers are 5,265 episodes. So each is scored by the model and its critic,
and means over batches are sums over episodes, weighted by their probabilities. It writes JSON into
SWEEP/measured: expected cosines of one batch's gradient with the true one, as `marlhf credit` has,

    cos(e) = E g_e . g / sqrt((|E g_e|^2 + (E |g_e|^2 - |E g_e|^2) / B) |g|^2)

with g_e of one episode, for B independent ones. The policy is taken to write its thinking and a
number from 1 to 9: the letters and the end of a turn have no choice (`mass` is the least
probability of a digit, `sure` that of the other tokens). The KL penalty is left out.

Axes: C contexts of a guess, A numbers, P episodes, K turns, T tokens of an episode, E ways, H
hidden size.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from evidence.data import thinking
from torch import Tensor

from marlhf.core import Segments, macro_gae
from marlhf.credit.state import RunState, open_state
from marlhf.data import guess as game
from marlhf.data.rows import Message
from marlhf.models.heads import backbone

TURN_LAMBDAS = (0.0, 0.5, 0.8, 0.95, 1.0)
TOKEN_LAMBDAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.997, 1.0)
GROUPS = (4, 8)
BATCH = 64
NUMBERS = range(1, game.NUMBERS + 1)
ROWS = 256  # sequences in a pass

History = tuple[tuple[int, str], ...]
"""Guesses and what the game said to them."""


class Episode(NamedTuple):
    number: int
    guesses: tuple[int, ...]

    def history(self, turn: int) -> History:
        return tuple((g, game.answer(g, self.number)) for g in self.guesses[:turn])


def episodes() -> Iterator[Episode]:
    """All of them, whatever their probability."""

    def play(number: int, guesses: tuple[int, ...]) -> Iterator[Episode]:
        for guess in NUMBERS:
            after = (*guesses, guess)
            if guess == number or len(after) == game.TURNS:
                yield Episode(number, after)
            else:
                yield from play(number, after)

    for number in NUMBERS:
        yield from play(number, ())


class Model:
    """What the policy and the critic say in all contexts of one game."""

    def __init__(self, state: RunState, name: int, letters: int) -> None:
        self.tokenizer = state.models.tokenizer
        self.thinking = thinking(letters)
        self.opening = game.opening(name)
        self.letters = letters
        self.policy: Any = state.models.policy
        self.critic: Any = state.models.critic
        self.digits = [self._ids(str(number))[0] for number in NUMBERS]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def tokens(self, history: History, guess: int) -> tuple[list[int], list[int]]:
        """A conversation that ends with a guess, and where its turns start."""
        messages: list[Message] = [{"role": "user", "content": self.opening}]
        starts: list[int] = []
        for number, said in (*history, (guess, "")):
            before = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
            starts.append(len(before))
            messages.append({"role": "assistant", "content": f"{self.thinking}{number}"})
            messages.append({"role": "user", "content": said})
        whole = self.tokenizer.apply_chat_template(messages[:-1], return_dict=True)["input_ids"]
        assert len(whole) == starts[-1] + self.letters + 2, "a turn has other tokens than it should"
        return whole, starts

    @torch.no_grad()
    def hidden(self, model: Any, rows: list[list[int]]) -> Tensor:
        """[rows, longest, H]; what comes after a row's end changes nothing before it."""
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        return backbone(model)(input_ids=ids, use_cache=False).last_hidden_state


class Game(NamedTuple):
    """Everything that estimators need of one game, by episode."""

    probability: Tensor  # [P]
    group: Tensor  # [P], the number
    rewards: Tensor  # [P, T]
    mask: Tensor  # [P, T]
    turns: Tensor  # [P, T] bool, the start of each turn
    at: Tensor  # [P, K], where the numbers stand
    real: Tensor  # [P, K] bool, turns that were played
    pairs: Tensor  # [P, K], which context and number, of C * A
    scores: Tensor  # [C * A, H * H], d log pi / d weights
    products: Tensor  # [P, K, K], inner products of the scores of an episode's turns
    values: Tensor  # [P, T], by the critic
    exact: Tensor  # [P, T], what the return really is on average
    mass: float
    sure: float


def play(model: Model) -> Game:
    all_episodes = list(episodes())
    contexts = {e.history(k): 0 for e in all_episodes for k in range(len(e.guesses))}
    contexts = {history: i for i, history in enumerate(contexts)}
    ends = {(e.history(len(e.guesses) - 1), e.guesses[-1]): 0 for e in all_episodes}
    ends = {key: i for i, key in enumerate(ends)}

    choice, scores, mass, sure = policy_at(model, list(contexts))
    rows = [model.tokens(*end) for end in ends]
    values = critic_at(model, [tokens for tokens, _ in rows])

    width, turns = model.letters + 2, game.TURNS
    shape = (len(all_episodes), turns * width)
    found = {
        name: torch.zeros(shape, dtype=torch.double) for name in ("rewards", "values", "exact")
    }
    mask, starts = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
    probability = torch.full((len(all_episodes),), 1 / len(NUMBERS), dtype=torch.double)
    real = torch.zeros(len(all_episodes), turns, dtype=torch.bool)
    pairs = torch.zeros(len(all_episodes), turns, dtype=torch.long)
    for p, episode in enumerate(all_episodes):
        played = len(episode.guesses)
        end = ends[episode.history(played - 1), episode.guesses[-1]]
        for k, guess in enumerate(episode.guesses):
            context = contexts[episode.history(k)]
            probability[p] *= choice[context, guess - 1]
            pairs[p, k], real[p, k] = context * len(NUMBERS) + guess - 1, True
            begin, there = k * width, rows[end][1][k]
            mask[p, begin : begin + width], starts[p, begin] = True, True
            found["values"][p, begin : begin + width] = values[
                end, there - 1 : there - 1 + width
            ].double()
        if episode.guesses[-1] == episode.number:
            found["rewards"][p, played * width - 1] = 1.0
    earned = found["rewards"].sum(dim=1)
    before, after = expected(pairs, real, probability, earned, choice.numel())
    for k in range(turns):
        begin = k * width
        found["exact"][:, begin : begin + width - 1] = before[pairs[:, k], None]
        found["exact"][:, begin + width - 1] = after[pairs[:, k]]
    at = torch.arange(turns) * width + model.letters
    products = (scores @ scores.T).double()[pairs[:, :, None], pairs[:, None, :]]
    return Game(
        probability,
        torch.tensor([e.number for e in all_episodes]),
        found["rewards"],
        mask,
        starts,
        at.expand(len(all_episodes), -1),
        real,
        pairs,
        scores,
        products,
        found["values"] * mask,
        found["exact"] * mask,
        mass,
        sure,
    )


def policy_at(model: Model, contexts: list[History]) -> tuple[Tensor, Tensor, float, float]:
    """Probabilities of numbers [C, A], their scores [C * A, H * H], and what they leave out."""
    probabilities, scores, mass, sure = [], [], 1.0, 1.0
    head = model.policy.get_output_embeddings().weight.detach()
    for begin in range(0, len(contexts), ROWS):
        rows = [model.tokens(history, 1) for history in contexts[begin : begin + ROWS]]
        hidden = model.hidden(model.policy, [tokens for tokens, _ in rows])
        for row, (tokens, starts) in enumerate(rows):
            last = starts[-1] + model.letters - 1  # it predicts the number
            state = hidden[row, last]
            whole = torch.softmax(head @ state, dim=0)
            mass = min(mass, float(whole[model.digits].sum()))
            chances = whole[model.digits] / whole[model.digits].sum()
            probabilities.append(chances)
            slope = (torch.eye(len(chances)) - chances) @ head[model.digits]  # [A, H]
            scores.append((slope[:, :, None] * state).flatten(1))
            others = [*range(starts[-1] - 1, last), last + 1]  # letters, and the end of the turn
            logprobs = torch.log_softmax(hidden[row, others] @ head.T, dim=1)
            there = torch.tensor(tokens)[[x + 1 for x in others]]
            sure = min(sure, float(logprobs.gather(1, there[:, None]).min().exp()))
    return torch.stack(probabilities).double(), torch.cat(scores), mass, sure


@torch.no_grad()
def critic_at(model: Model, rows: list[list[int]]) -> Tensor:
    """What the critic says after each token, [rows, longest]."""
    longest = max(map(len, rows))
    values = torch.zeros(len(rows), longest)
    for begin in range(0, len(rows), ROWS):
        part = rows[begin : begin + ROWS]
        scored = model.critic.score(model.hidden(model.critic, part))[..., 0]
        values[begin : begin + len(part), : scored.shape[1]] = scored
    return values


def expected(
    pairs: Tensor, real: Tensor, probability: Tensor, earned: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """The mean return before and after each guess, both by context and number: [C * A]."""

    def means(keys: Tensor) -> Tensor:
        weight, total = torch.zeros(2, size, dtype=torch.double)
        for k in range(keys.shape[1]):
            chance = probability * real[:, k]
            weight.index_add_(0, keys[:, k], chance)
            total.index_add_(0, keys[:, k], chance * earned)
        return total / weight.clamp(min=1e-300)

    contexts = pairs // len(NUMBERS)
    of_context = means(contexts)
    return of_context[torch.arange(size) // len(NUMBERS)], means(pairs)


def ways(played: Game) -> dict[str, Tensor]:
    """Advantages of the numbers by every way, less the mean of all tokens: [P, K]."""
    by_turn = Segments.from_starts(played.turns, played.mask)
    by_token = Segments.from_starts(played.mask, played.mask)
    found: dict[str, Tensor] = {}
    for critic, values in (("", played.values), ("exact ", played.exact)):
        for rule, cut, lambdas in (
            ("turns", by_turn, TURN_LAMBDAS),
            ("token", by_token, TOKEN_LAMBDAS),
        ):
            for lam in lambdas:
                advantages, _ = macro_gae(played.rewards, values, cut, lam=lam, sigma="start")
                weight = played.probability[:, None] * played.mask
                centre = (weight * advantages).sum() / weight.sum()
                at = (advantages - centre).gather(1, played.at)
                found[f"{critic}{rule} lam={lam:g}"] = at * played.real
    return found


class Moments(NamedTuple):
    """Of one episode's gradient."""

    mean: Tensor  # [H * H]
    square: float  # of its norm


def moments(played: Game, weights: Tensor) -> Moments:
    """Of gradients that weigh each number's score so: [P, K]."""
    coefficients = torch.zeros(len(played.scores), dtype=torch.double)
    by_episode = played.probability[:, None] * weights
    coefficients.index_add_(0, played.pairs.flatten(), by_episode.flatten())
    squares = torch.einsum("pk,pkj,pj->p", weights, played.products, weights)
    mean = coefficients.float() @ played.scores
    return Moments(mean.double(), float(played.probability @ squares))


def rloo(played: Game, size: int) -> float:
    """E |g|^2 of the gradient of a group of `size` episodes of one number, over their number."""
    scores, earned = played.real.double(), played.rewards.sum(dim=1)
    squares = torch.einsum("pk,pkj,pj->p", scores, played.products, scores)
    total = 0.0
    for number in NUMBERS:
        of_number = (played.group == number).double() * played.probability
        chance = of_number / of_number.sum()
        rho, all_squares = float(chance @ earned), float(chance @ squares)
        found_squares = float(chance @ (earned * squares))
        of_one = played._replace(probability=chance)
        mean = moments(of_one, earned[:, None] * scores).mean
        norm = float(mean @ mean)
        first = found_squares / size + (1 - 1 / size) * norm
        cross = rho * found_squares / size
        pairs = rho * all_squares + (size - 2) * rho**2 * all_squares + norm
        total += (first - 2 * cross + pairs / (size * (size - 1))) / len(NUMBERS)
    return total


def explained(played: Game, values: Tensor) -> float:
    """The share of the variance of returns that values explain, over tokens."""
    weight = played.probability[:, None] * played.mask
    weight = weight / weight.sum()
    error = played.rewards.sum(dim=1, keepdim=True) - values
    returns = played.rewards.sum(dim=1, keepdim=True).expand_as(values)

    def variance(x: Tensor) -> Tensor:
        return (weight * x.square()).sum() - (weight * x).sum().square()

    return float(1 - variance(error) / variance(returns))


def measure(games: list[Game], batch: int) -> dict[str, Any]:
    """Cosines of every way, over games that each are as likely."""
    true = torch.stack(
        [moments(g, g.rewards.sum(dim=1, keepdim=True) * g.real).mean for g in games]
    ).mean(dim=0)
    norm = float(true @ true)
    found = [{name: moments(g, w) for name, w in ways(g).items()} for g in games]
    rows: list[dict[str, Any]] = []
    for name in found[0]:
        mean = torch.stack([each[name].mean for each in found]).mean(dim=0)
        square = sum(each[name].square for each in found) / len(found)
        rows.append({"name": name, **cosine(mean, square, batch, true)})
    for size in GROUPS:
        square = sum(rloo(g, size) for g in games) / len(games)
        rows.append({"name": f"rloo {size}", **cosine(true, square, batch // size, true)})
    return {
        "solved": mean_of([float(g.probability @ g.rewards.sum(dim=1)) for g in games]),
        "mass": min(g.mass for g in games),
        "sure": min(g.sure for g in games),
        "explained": mean_of([explained(g, g.values) for g in games]),
        "explainable": mean_of([explained(g, g.exact) for g in games]),
        "true_norm": math.sqrt(norm),
        "rows": rows,
    }


def cosine(mean: Tensor, square: float, count: int, true: Tensor) -> dict[str, float]:
    along, norm, own = float(mean @ true), float(true.norm()), float(mean @ mean)
    expected_square = own + (square - own) / count
    return {
        "cosine": along / math.sqrt(expected_square) / norm,
        "without_noise": along / math.sqrt(own) / norm,
    }


def mean_of(values: list[float]) -> float:
    return sum(values) / len(values)


def result(run: Path, step: int, games: int) -> dict[str, Any]:
    state = open_state(run, step=step, device="cpu")
    letters = state.config.sampling.max_new_tokens - 4
    names = [int(example.row.columns["game"]) for example in state.examples[:games]]
    played = [play(Model(state, name, letters)) for name in names]
    return {"step": state.step, "letters": letters, **measure(played, BATCH)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path, help="a folder of PPO runs in `guess`, seed by seed")
    parser.add_argument("--steps", type=int, nargs="+", required=True, help="checkpoints")
    parser.add_argument("--only", default="*", help="starts to measure, as in think-40")
    parser.add_argument("--games", type=int, default=1, help="games to average over")
    args = parser.parse_args()
    folder = args.sweep / "measured"
    folder.mkdir(exist_ok=True)
    for run in sorted(args.sweep.glob(f"seed=*/{args.only}-turns-*")):
        seed = run.parent.name.partition("=")[2]
        for step in args.steps:
            out = folder / f"{run.name.partition('-turns-')[0]}-{seed}-step{step}.json"
            if (run / "model").is_dir() and not out.exists():
                found = result(run, step, args.games)
                out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                print(out, flush=True)


if __name__ == "__main__":
    main()
