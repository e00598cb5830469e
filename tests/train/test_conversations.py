"""Training on conversations: what is sampled, what is credited, and that nothing else matters."""

import signal
import time
from dataclasses import replace
from itertools import count

import pytest
import torch

from marlhf.config.rl import Guards
from marlhf.core import NGram, Segments, Turns
from marlhf.data import DataConfig, Row
from marlhf.environments import (
    ConversationError,
    EpisodeRecord,
    Step,
    Turn,
    opening,
    scored_row,
    turn_rewards,
)
from marlhf.environments.games import Guess
from marlhf.rollout import Sampling
from marlhf.runs.layout import RunError
from marlhf.runtime.distributed import start as start_world
from marlhf.runtime.stage import NO_OBJECTS, GivenObjects
from marlhf.train import ppo, rloo
from marlhf.train.experience import RolloutScorer
from marlhf.train.preflight import check_stages
from marlhf.train.recipe import load_recipe
from marlhf.train.rl_models import load_models, load_prompts
from marlhf.train.rloo import turn_states
from marlhf.train.sampling import sample_examples
from marlhf.train.state_values import continuation_returns, states_of
from small_runs import everything, read_lines, wait_for_step, weights

pytestmark = pytest.mark.xdist_group("forked")  # one process, so that one server forks
GUESS = DataConfig(source="guess", limit=400, eval_size=8, parts={"ppo": 1.0})
PLAY = {
    "data": GUESS,
    "environment": "guess",
    "max_turns": 4,
    "episode_tokens": 96,
    "segmenter": Turns(),
    "sampling": Sampling(max_new_tokens=4),
    "batch_size": 8,
    "eval_prompts": 4,
    "guards": Guards(warn_kl=1e9),
}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ASK = [{"role": "user", "content": "Tell me"}]


class Counting:
    """Rewards a turn by its number; says as little as it can."""

    def __init__(self, said: str = "go on", wait: float = 0.0, end: int = 3) -> None:
        self.said, self.wait, self.end, self.turns = said, wait, end, 0

    def reset(self, row: Row, seed: int):
        return ASK

    def step(self, reply: str) -> Step:
        time.sleep(self.wait)
        self.turns += 1
        messages = [{"role": "user", "content": self.said}]
        return Step(messages, float(self.turns), done=self.turns == self.end, state=str(self.turns))


@pytest.fixture
def play(ppo_config):
    """`play(**changes)`: examples, experience and models of a batch of conversations."""

    def play(environment=Counting, rows=8, device="cpu", **changes):
        config = ppo_config("play", reward_model="", **(PLAY | changes))
        objects = replace(NO_OBJECTS, environment=environment)
        models = load_models(config, objects, start_world(device), critic=True)
        examples, _ = load_prompts(config, models, objects)
        seeds = list(range(rows))
        batch, rollout = sample_examples(examples[:rows], models, seeds)
        return batch, RolloutScorer(models, config)(batch, rollout), models, config

    return play


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_rewards_of_turns_are_earned_at_their_last_tokens(play, device):
    """Without a reward beside the environment's."""
    batch, experience, *_ = play(device=device)
    for row, example in enumerate(batch):
        assert [turn.reward for turn in example.episode.turns] == [1.0, 2.0, 3.0]
        for turn in example.episode.turns:
            assert experience.token_scores[row, turn.stop - 1] == turn.reward
            assert experience.mask[row, turn.start : turn.stop].all()
        own = sum(turn.stop - turn.start for turn in example.episode.turns)
        assert experience.mask[row].sum() == own < experience.sequences.lengths[row]
    assert experience.scores.tolist() == [6.0] * len(batch)
    assert experience.token_scores.sum(dim=1).tolist() == [6.0] * len(batch)


def continued(batch, experience, models, config, each=2):
    """The returns of continuations from every turn, which has its row's place as its seed."""
    segments = Segments.from_starts(experience.mask & ~experience.mask, experience.mask)
    states = states_of(batch, segments, experience)
    seeds = list(range(100, 100 + len(states) * each))
    score, starts = RolloutScorer(models, config), [state.row for state in states]
    return states, continuation_returns(states, score, each, seeds, 0.0, "k1", starts)


def test_a_replayed_episode_goes_on_where_it_was(play):
    """Of rewards 1, 2, 3 those count that come after the turn from which it is continued."""
    states, returns = continued(*play())
    turns = [len(state.turns) for state in states]
    assert turns == [0, 1, 2] * 8
    to_come = torch.tensor([6.0, 5.0, 3.0])[turns]
    torch.testing.assert_close(returns, to_come[:, None].expand(-1, 2))


def test_a_replayed_game_has_the_same_number(play):
    batch, experience, models, config = play(environment=Guess)
    states, returns = continued(batch, experience, models, config, each=20)
    assert max(len(state.turns) for state in states) == config.max_turns - 1
    assert set(returns.unique().tolist()) <= {0.0, 1.0}


def test_an_environment_that_cannot_be_replayed_is_refused(play):
    said = count()

    class Drifting(Counting):
        def step(self, reply):
            self.said = f"go on {next(said)}"
            return super().step(reply)

    batch, experience, models, config = play(environment=Drifting)
    with pytest.raises(ConversationError, match="does not say the same when an episode is replay"):
        continued(batch, experience, models, config)


def test_logprobs_of_training_are_those_of_sampling(play):
    _, experience, models, _ = play()
    trained = models.logprobs(models.policy, experience.sequences)
    torch.testing.assert_close(trained, experience.logprobs, rtol=1e-5, atol=1e-5)
    assert (experience.logprobs[~experience.mask] == 0).all()
    assert (experience.logprobs[experience.mask] < 0).all()


def test_turns_are_macro_actions_and_ngrams_span_no_hole(play):
    batch, experience, models, config = play()
    for rule in (Turns(), NGram(1000)):
        _, segments = ppo.shape_and_segment(
            experience, models, replace(config, segmenter=rule), 0.1, torch.Generator()
        )
        for row, example in enumerate(batch):
            for number, turn in enumerate(example.episode.turns):
                assert (segments.ids[row, turn.start : turn.stop] == number).all()


def test_how_long_the_world_takes_changes_nothing(play):
    at_once, patient = play(), play(lambda: Counting(wait=0.02))
    few = play(rows=3)
    assert at_once[1].sequences.responses.tolist() == patient[1].sequences.responses.tolist()
    assert torch.equal(at_once[1].logprobs, patient[1].logprobs)
    for row, response in enumerate(few[1].response_tokens()):
        assert response == at_once[1].response_tokens()[row]


def test_a_world_that_says_nothing_cuts_a_response_in_two(play, monkeypatch):
    """The same tokens as one response whose end token does not end it; rewards and credit too."""

    class Silent(Counting):
        def step(self, reply: str) -> Step:
            return replace(super().step(reply), messages=[])

    _, cut, models, config = play(lambda: Silent(end=2))
    whole = replace(
        cut, sequences=replace(cut.sequences, mask=cut.sequences.present), episodes=None
    )
    assert torch.equal(cut.mask, whole.mask)
    rewards, segments = ppo.shape_and_segment(cut, models, config, 0.1, torch.Generator())
    starts = torch.zeros_like(cut.mask)
    for row, record in enumerate(cut.episodes):
        starts[row, [turn.start for turn in record.turns]] = True
    by_hand = replace(config, segmenter=lambda responses: starts)
    wanted, cuts = ppo.shape_and_segment(whole, models, by_hand, 0.1, torch.Generator())
    assert torch.equal(rewards, wanted)
    values = cut.critic_values(models)
    credit = ppo.assign_credit(rewards, values, segments, config)
    expected = ppo.assign_credit(wanted, values, cuts, config)
    # Without words between them two turns are one unbroken run of tokens, and one action.
    joined = torch.tensor([len(record.turns) == 1 for record in cut.episodes])
    assert torch.equal(credit.rewards, expected.rewards)
    assert torch.equal(credit.advantages[joined], expected.advantages[joined])


def test_credit_over_turns_is_the_obvious_loop(play):
    batch, experience, models, config = play(lam=0.5, kl_coef=0.1)
    rewards, segments = ppo.shape_and_segment(experience, models, config, 0.1, torch.Generator())
    values = experience.critic_values(models)
    credit = ppo.assign_credit(rewards, values, segments, config)
    for row, example in enumerate(batch):
        carried, following = 0.0, 0.0
        for turn in reversed(example.episode.turns):
            here = float(values[row, turn.start])
            earned = float(rewards[row, turn.start : turn.stop].sum())
            carried = earned + following - here + 0.5 * carried
            following = here
            got = credit.advantages[row, turn.start : turn.stop]
            torch.testing.assert_close(got, torch.full_like(got, carried), rtol=1e-4, atol=1e-5)
    assert (credit.advantages[~experience.mask] == 0).all()


def test_states_are_compared_within_a_prompts_episodes():
    def record(*states):
        turns = [Turn(2 * i, 2 * i + 1, 0.0, state) for i, state in enumerate(states)]
        return EpisodeRecord([], turns, "done")

    records = [record("a", "b"), record("a", "c"), record("a", "b"), record("b", "b")]
    states = turn_states(records, 2, torch.zeros(4, 4))[:, [0, 2]]
    assert states[0, 0] == states[1, 0] != states[2, 0]  # another prompt's "a" is another state
    assert states[3, 0] == states[3, 1] == states[2, 1] != states[0, 1]


def test_reward_functions_see_messages_and_may_reward_turns(play):
    seen = {}

    def by_turn(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [[10.0] * sum(m["role"] == "assistant" for m in said) for said in completions]

    objects = GivenObjects(environment=Counting, reward_funcs=[by_turn])
    batch, _, _, config = play(rows=2)
    models = load_models(config, objects, start_world("cpu"), critic=True)
    batch, rollout = sample_examples(batch, models, [0, 1])
    experience = RolloutScorer(models, config)(batch, rollout)
    assert seen["prompts"] == [ASK, ASK]
    roles = [message["role"] for message in seen["completions"][0]]
    assert roles[:3] == ["assistant", "user", "assistant"]
    assert experience.scores.tolist() == [36.0, 36.0]
    last = batch[0].episode.turns[1].stop - 1
    assert experience.token_scores[0, last] == 12.0


def test_the_first_messages_are_the_prompt():
    said = [*ASK, {"role": "assistant", "content": "example"}, *ASK]
    said += [{"role": "assistant", "content": "x"}, *ASK, {"role": "assistant", "content": "y"}]
    turns = [Turn(0, 2, 0.0, ""), Turn(4, 6, 0.0, "")]
    assert opening(EpisodeRecord(said, turns, "done")) == 3
    assert turn_rewards([EpisodeRecord(said, turns, "done")], torch.zeros(1, 6)).sum() == 0


def test_a_killed_run_resumes_identically(ppo_config, start):
    options = PLAY | {"num_steps": 8, "save_every": 2, "reward_model": "", "eval_every": 4}
    unbroken, broken = (ppo_config(name, **options) for name in ("unbroken", "broken"))
    ppo.train(unbroken)
    process = start(broken)
    wait_for_step(broken.output_dir, 3, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    process = start(broken)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert everything(unbroken.output_dir) == everything(broken.output_dir)
    assert weights(unbroken.output_dir) == weights(broken.output_dir)


@pytest.mark.distributed
def test_two_processes_play_as_one(ppo_config, start):
    options = PLAY | {"num_steps": 3, "save_every": 0, "reward_model": ""}
    # Nobody guesses right here. With a fresh critic rounding would be all there is to learn from.
    options["critic_model"] = ppo_config("unused").reward_model
    one, two = (ppo_config(name, **options) for name in ("one", "two"))
    ppo.train(one)
    process = start(two, ranks=True)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    for a, b in zip(read_lines(one.output_dir), read_lines(two.output_dir)):
        for key in ("rl/score", "rl/turns", "rl/length", "rl/kl", "rl/value_loss", "eval/score"):
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key


def test_rloo_over_states(ppo_config, tmp_path):
    base = ppo_config("unused")
    config = rloo.RLOOConfig(
        model=base.model,
        output_dir=str(tmp_path / "states"),
        group="state",
        num_samples=2,
        **{**PLAY, "batch_size": 4, "num_steps": 2, "save_every": 0},
    )
    rloo.train(config)
    plain = replace(config, group="prompt", output_dir=str(tmp_path / "prompt"))
    rloo.train(plain)
    a, b = (read_lines(c.output_dir) for c in (config, plain))
    steps = [i for i, line in enumerate(a) if "rl/score" in line]
    assert a[steps[0]]["rl/score"] == b[steps[0]]["rl/score"]
    assert a[steps[0]]["rl/advantage_norm"] != b[steps[0]]["rl/advantage_norm"]
    assert {"rl/turns", "rl/world_tokens", "rl/cut_episodes"} <= a[steps[0]].keys()


def test_states_need_an_environment(tmp_path):
    config = rloo.RLOOConfig(model="tiny", reward_model="tiny", data=GUESS, group="state")
    with pytest.raises(ValueError, match="there is none"):
        rloo.train(replace(config, output_dir=str(tmp_path / "run")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"async_steps": 1}, "not ahead of training"),
        ({"max_turns": 0}, "max_turns must be positive"),
        ({"values": "monte_carlo"}, "no environment can be put back"),
        ({"environment": "gues"}, "Did you mean guess"),
        ({"environment": "my_module:Game"}, "my_module"),
        ({"episode_tokens": 4}, "episode_tokens"),
    ],
    ids=str,
)
def test_nonsense_gets_a_sentence_before_the_first_step(ppo_config, change, said):
    with pytest.raises((ConversationError, ValueError, RunError), match=said):
        ppo.train(ppo_config("nonsense", reward_model="", **(PLAY | change)))


def test_the_row_of_a_single_turn_stays_as_it_is(play):
    batch, *_ = play(rows=1)
    assert scored_row(batch[0].row, None) is batch[0].row


@pytest.mark.parametrize(
    ("environment", "said"),
    [("gues", "Did you mean guess"), ("no_such_module:Game", "no module 'no_such_module'")],
)
def test_a_recipe_names_its_environment_before_the_first_stage_trains(environment, said, tmp_path):
    stages = load_recipe("guess", [f"ppo.environment={environment}", f"output_dir={tmp_path}"])
    with pytest.raises(ValueError, match=said):
        check_stages(stages)
