"""TextArena's games, with the real package where it is installed, else with a fake of its form."""

import random
import sys
import time
import types

import pytest

from conversations import play
from marlhf.environments import ConversationError, find_environment, games
from marlhf.models.tiny import tiny_tokenizer

TINY = tiny_tokenizer()


class FakeGame:
    """A number to guess, drawn from Python's own random numbers as TextArena's games do."""

    def reset(self, num_players, seed=None):
        assert num_players == 1
        random.seed(seed)
        self.number, self.turn = random.randint(1, 9), 0
        self.seen = [(-1, "Guess [1] to [9].", None)]

    def get_observation(self):
        seen, self.seen = self.seen, []
        return 0, seen

    def step(self, action):
        self.turn += 1
        self.right = action == f"[{self.number}]"
        noise = random.random()
        self.seen = [(0, action, None), (-1, f"no {noise:.3f}" if not self.right else "yes", None)]
        return self.right or self.turn == 3, {}

    def close(self):
        return {0: 1.0 if self.right else 0.25}, {}


class ForTwo(FakeGame):
    def reset(self, num_players, seed=None):
        assert num_players == 2, "two players, please"


def needs_words():
    raise LookupError("words are not downloaded")


@pytest.fixture
def fake(monkeypatch):
    games = {"Nine-v0-raw": FakeGame, "Two-v0-raw": ForTwo, "Words-v0-raw": needs_words}
    games |= {"Stuck-v0-raw": Stuck, "Worded-v0-raw": Worded}
    module = types.ModuleType("textarena")
    registration = types.SimpleNamespace(ENV_REGISTRY=games)
    module.envs = types.SimpleNamespace(registration=registration)
    module.make = lambda name: games[name]()
    monkeypatch.setitem(sys.modules, "textarena", module)


class Stuck(FakeGame):
    """Hangs, as one of TextArena's games does with a single player."""

    def step(self, action):
        time.sleep(3)
        return True, {}


class Worded(FakeGame):
    """Says after an invalid move why, where its reward should be, as TextArena's Countdown does."""

    def close(self):
        return {0: "Invalid action format."}, {}


def test_a_game_that_hangs_holds_up_no_other(fake, monkeypatch):
    monkeypatch.setattr(games, "HANGS", 0.2)
    make = find_environment("textarena:Stuck-v0")
    [record] = play(make, guesses("[1]"), TINY, timeout=0.1).records
    assert record.reason == "timeout"
    played = play(find_environment("textarena:Nine-v0"), guesses("[1]"), TINY, timeout=2.0)
    assert played.records[0].reason == "done"


def test_a_reward_that_is_no_number_is_none(fake):
    [record] = play(find_environment("textarena:Worded-v0"), guesses("[0]"), TINY).records
    assert (record.reason, record.turns[-1].reward, record.success) == ("done", 0.0, False)


def guesses(*texts):
    return lambda row, turn, ids: texts[turn % len(texts)] + TINY.eos_token


def test_a_game_is_played_to_its_end_with_the_games_reward(fake):
    make = find_environment("textarena:Nine-v0")
    played = play(make, guesses("[1]", "[2]", "[3]"), TINY, seeds=[3])
    [record] = played.records
    random.seed(3)
    number = random.randint(1, 9)
    assert record.messages[0]["content"] == "Guess [1] to [9]."
    assert "[1]" not in record.messages[2]["content"]  # only what the game said
    assert (record.turns[-1].reward, record.success) == (
        (1.0, True) if number < 4 else (0.25, False)
    )
    right = play(make, guesses(f"[{number}]"), TINY, seeds=[3]).records[0]
    assert (right.turns[0].reward, right.success, right.reason) == (1.0, True, "done")


def test_games_draw_their_own_random_numbers(fake):
    from marlhf.data import Row

    make, rows = find_environment("textarena:Nine-v0"), [Row("")] * 6
    random.seed(11)
    expected = random.random()
    random.seed(11)
    whole = play(make, guesses("[0]"), TINY, rows).records
    assert random.random() == expected  # nobody else's numbers were touched
    alone = [play(make, guesses("[0]"), TINY, seeds=[seed]).records[0] for seed in range(6)]
    assert alone == whole
    assert whole[0] != whole[1]


def test_what_cannot_be_played_gets_a_sentence(fake, monkeypatch):
    with pytest.raises(ConversationError, match="no game 'Ten-v0'"):
        find_environment("textarena:Ten-v0")
    with pytest.raises(ConversationError, match="LookupError: words are not downloaded"):
        find_environment("textarena:Words-v0")
    [record] = play(find_environment("textarena:Two-v0"), guesses("x"), TINY).records
    assert "cannot be played by one player" in record.reason
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConversationError, match=r"pip install 'marlhf\[textarena\]'"):
        find_environment("textarena:Nine-v0")


def test_the_real_package_plays():
    pytest.importorskip("textarena")
    make = find_environment("textarena:GuessTheNumber-v0")
    halving = guesses("[10]", "[5]", "[15]", "[3]", "[8]", "[12]", "[18]")
    first, again = (play(make, halving, TINY, max_turns=7).records for _ in range(2))
    assert first == again
    [record] = first
    assert "number" in record.messages[0]["content"].lower()
    assert not record.reason.startswith("error")
