"""Which pairs are worth a vote, what is said of them, and votes as rows for a reward model."""

import json

import numpy as np
import pytest
import torch
import typer

from marlhf.cli import app
from marlhf.data import read_records, rows_from_records
from marlhf.judge.annotate import export, open_votes, preferences
from marlhf.judge.annotate.pick import (
    POOL,
    describe,
    open_pool,
    pick,
    read_pool,
    reward_margins,
    write_pool,
)
from marlhf.judge.pairs import JudgeError
from marlhf.models.heads import set_heads
from marlhf.models.load import load_scalar
from marlhf.models.tiny import tiny_tokenizer

POOLED = [(f"Question {i}", f"yes {i}", f"no {i}") for i in range(6)]


def test_picks_by_hand():
    """Pairs: all sure, all sure of the same, split, even."""
    margins = np.array([[8.0, -8.0, 8.0, 0.1], [7.0, -9.0, -8.0, -0.1]])
    assert pick(margins, 2, "active", 0) == [2, 3]  # 8 against -8 deviates most, then .1 and -.1
    assert pick(margins[:1], 1, "active", 0) == [3]  # of a single reward the one nearest to even
    shuffled = pick(margins, 4, "random", 0)
    assert sorted(shuffled) == [0, 1, 2, 3]
    assert shuffled == pick(margins, 4, "random", 0)


def test_what_votes_are_worth_by_hand():
    chances = np.array([0.9, 0.6, 0.5, 0.2])  # wrong with 0.1 + 0.4 + 0.5 + 0.2 = 1.2
    margins = np.log(chances / (1 - chances))[None]
    *_, last = describe(margins, [2, 1])
    assert "wrong on 1 of 4 pairs, on 1 of the 2 picked. 2 are worth a vote" in last
    first, *_ = describe(np.vstack([margins, -margins]), [0])
    assert first == "2 rewards disagree on the winner of 3 of 4"  # 0.5 is no winner in either


def test_pairs_of_a_label_run_are_picked_where_the_reward_is_unsure(tmp_path, monkeypatch):
    write_pool(tmp_path, POOLED)
    margins = np.array([[9.0, 9.0, 0.2, 9.0, -0.1, 9.0]])
    monkeypatch.setattr(
        "marlhf.judge.annotate.pick.reward_margins", lambda *_: lambda pairs: margins
    )
    said: list[str] = []
    options = {"pool": 9, "count": 2, "seed": 0, "say": said.append}
    folder = open_pool(tmp_path, "active", ["some"], **options)
    assert read_pool(folder) == [POOLED[4], POOLED[2]]
    assert "of 6 pairs" in said[-1]
    for how, message in (("active", "Give --reward"), ("best", "no --pick 'best'")):
        with pytest.raises(JudgeError, match=message):
            open_pool(tmp_path, how, [], **options)


def test_votes_come_out_as_rows_for_a_reward_model(tmp_path):
    write_pool(tmp_path, POOLED)
    files = [tmp_path / name for name in POOL]
    store = open_votes(files, seed=1, database=tmp_path / "votes.sqlite")
    for name, wanted in (("Ann", "yes"), ("Bob", "yes"), ("Cy", "no")):
        for pair in store.shown[:4]:
            left, _ = store.sides(name, pair)
            store.vote(name, pair, "left" if left.startswith(wanted) else "right")
    store.vote("Ann", store.shown[4], "tie")
    rows, voted = preferences(store)
    assert (len(rows), voted) == (4, 5)  # a tie is a vote, and no row
    assert all(row["chosen"].startswith("yes") and row["votes"] == 3 for row in rows)
    assert rows[0]["agreement"] == pytest.approx(2 / 3)
    export(store, tmp_path)
    records = [r for r, _ in read_records(tmp_path / "pairs" / "votes.jsonl")]
    needs = ("prompt", "chosen", "rejected")
    kept, _ = rows_from_records(records, needs=needs)
    assert [row.rejected for row in kept] == [row["rejected"] for row in rows]
    store.close()
    said: list[str] = []  # votes stay: nothing else is picked under them
    assert open_pool(tmp_path, "random", [], pool=9, count=1, seed=0, say=said.append) == tmp_path
    assert "have votes, so they stay" in said[0]
    assert read_pool(tmp_path) == POOLED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pick", "active"], "Give --reward"),
        (["--retrain", "nowhere"], "There are no votes in"),
    ],
)
def test_one_run_without_what_it_takes_is_a_sentence(tmp_path, options, message, capsys):
    write_pool(tmp_path, POOLED)
    with pytest.raises((SystemExit, typer.Exit, JudgeError)) as error:
        app(["annotate", str(tmp_path), *options], standalone_mode=False)
    assert message in " ".join((str(error.value) + capsys.readouterr().err).split())


def test_several_runs_have_no_pairs_of_their_own(tmp_path):
    write_pool(tmp_path, POOLED)
    files = [str(tmp_path / name) for name in POOL]
    with pytest.raises(JudgeError, match="Give one RUN"):
        app(["annotate", *files, "--pick", "active", "--reward", "x"], standalone_mode=False)
    assert json.loads((tmp_path / POOL[0]).read_text().splitlines()[0])["response"] == "yes 0"


def test_members_of_an_ensemble_disagree_like_rewards_of_their_own(tmp_path):
    model = load_scalar("tiny")
    set_heads(model, 3, seed=0, fresh=True)
    pairs = [("Why?", "Because.", "No."), ("How?", "So.", "Like this, slowly.")]
    for name in ["whole", *"abc"]:
        tiny_tokenizer().save_pretrained(tmp_path / name)
    model.save_pretrained(tmp_path / "whole")
    heads = model.score.weight.detach().clone()
    for number, name in enumerate("abc"):
        set_heads(model, 1, seed=0, fresh=False)
        with torch.no_grad():
            model.score.weight.copy_(heads[number : number + 1])
        model.save_pretrained(tmp_path / name)
    of_members = reward_margins([tmp_path / "whole"])(pairs)
    apart = reward_margins([tmp_path / name for name in "abc"])(pairs)
    assert of_members.shape == (3, 2)
    np.testing.assert_allclose(of_members, apart, atol=1e-5)
    assert np.ptp(of_members, axis=0).min() > 1e-3
