"""The rows of the guessing game: clumsy, legible, and the same everywhere."""

import hashlib
import json

from marlhf.data import DataConfig, load_data
from marlhf.data.guess import NUMBERS, TURNS, answer, narrow, read_guess, rows


def test_every_process_and_python_writes_the_same_rows():
    text = json.dumps([[row.prompt, row.chosen, row.columns] for row in rows(256)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "ca08d2044e461d7c61c98ba559e7eac8e71888a1f6ee2cd2677d2ed1c9774e40"
    assert rows(16) == rows(64)[:16]
    assert rows(16, seed=1) != rows(16)


def test_games_follow_the_rules_and_the_player_mostly_heeds_them():
    heeded = total = 0
    for row in rows(3000):
        number, low, high = row.columns["number"], 1, NUMBERS
        said = [message["content"] for message in row.prompt[1:]]
        for guess, told in zip(said[::2], said[1::2], strict=True):
            assert told == answer(int(guess), number)
            low, high = narrow(low, high, int(guess), told)
        guess = read_guess(row.chosen[0]["content"])
        assert 1 <= guess <= NUMBERS
        assert len(said) // 2 < TURNS
        if said:
            heeded, total = heeded + (low <= guess <= high), total + 1
    assert 0.8 < heeded / total < 0.9


def test_no_game_is_in_two_stages():
    config = DataConfig(source="guess", parts={"sft": 0.5, "ppo": 0.5}, eval_size=50, limit=500)
    loaded = [load_data(config, part) for part in ("sft", "ppo")]
    games = [{row.columns["game"] for row in part.train} for part in loaded]
    assert not games[0] & games[1]
    held = {row.columns["game"] for row in loaded[0].eval}
    assert not held & (games[0] | games[1])
    assert len(held) == 50


def test_a_guess_is_read_in_time_and_size():
    assert read_guess("I say 16.") == 16
    assert read_guess("9" * 10**6) == 999_999_999
    assert read_guess("\u0663") is None  # a digit, but not one of ours
