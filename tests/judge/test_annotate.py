"""Votes of people: what is asked where, what is stored, what comes out, and who is let in."""

import asyncio
import csv
import http.client
import json
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import typer

from marlhf.cli import app
from marlhf.judge.annotate import describe, export, export_votes, open_votes
from marlhf.judge.annotate.store import Remarks, Store, VoteError, clean_name
from marlhf.judge.annotate.tasks import GUIDES, RunPair, a_is_left
from marlhf.judge.compare import judge
from marlhf.judge.criteria import TASKS
from marlhf.judge.pairs import JudgeError
from marlhf.judge.verdicts import agreement
from marlhf.report.sections.judged import judged
from marlhf.runs.read import read_run

ROOT = Path(__file__).parents[2]


def write(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def rows_of(name, count, same=()):
    """Longer responses have more of the letter; those of `same` are alike everywhere."""
    return [
        {"prompt": f"Question {i}", "response": "same" if i in same else f"{name} says {i}"}
        | {"scores": {"rm": float(ord(name[0]))}}
        for i in range(count)
    ]


@pytest.fixture
def files(tmp_path):
    """Two files of ten pairs, two of them the same text twice."""
    return [write(tmp_path / f"{n}.jsonl", rows_of(n, 10, same=(3, 7))) for n in ("new", "old")]


@pytest.fixture
def votes(files):
    store = open_votes(files, task="hh", seed=1)
    yield store
    store.close()


def text_on(store, name, side):
    """What this annotator sees on a side of the pair that comes next."""
    left, right = store.sides(name, store.state(name).pair)
    return left if side == "left" else right


def prefer(store, name, word, count=99):
    """Vote for the response that begins so, until all is done."""
    while (state := store.state(name)).pair and count:
        side = "left" if text_on(store, name, "left").startswith(word) else "right"
        store.vote(name, state.pair, side)
        count -= 1


def test_each_annotator_sees_each_run_left_in_half_of_the_pairs():
    runs = RunPair("new", "old")
    seen = {}
    for name in ("Ann", "Bob", "Cleo", "Dora"):
        sides = [a_is_left(5, name, runs, place) for place in range(41)]
        assert abs(2 * sum(sides) - 41) == 1
        assert a_is_left(5, name.upper(), runs, 0) == sides[0]
        seen[name] = sides
    assert len({tuple(sides) for sides in seen.values()}) == 4
    assert seen["Ann"] != [a_is_left(6, "Ann", runs, place) for place in range(41)]


def test_sides_are_no_pattern_and_even_out_over_annotators():
    runs = RunPair("a", "b")
    firsts = [a_is_left(0, f"person {i}", runs, 0) for i in range(400)]
    assert 150 < sum(firsts) < 250


def test_a_vote_means_the_same_run_on_either_side(votes, tmp_path):
    prefer(votes, "Ann", "new")
    [summary] = export(votes)
    assert [summary[k]["count"] for k in ("win", "tie", "loss")] == [8, 2, 0]
    assert votes.state("Ann").left == votes.state("Ann").right == 4  # half on each side
    lines = [json.loads(x) for x in Path(summary["path"]).read_text("utf-8").splitlines()]
    assert {line["judge"] for line in lines} == {"person:Ann"}
    assert lines[0]["orders"] == ["a"]
    assert summary["without_verdict"] == 0


def test_verdicts_flow_into_agreement_and_report_as_a_judge_s_do(make_run, tmp_path):
    sample = [{"step": 1, **row} for row in rows_of("new", 10, same=(3,))]
    run = make_run("new", samples=sample)
    old = write(tmp_path / "old.jsonl", rows_of("old", 10, same=(3,)))
    by_score = judge(run, old, "scores:rm")  # old has the higher letter
    store = open_votes([run, old])
    prefer(store, "Ann", "old")
    prefer(store, "Bob", "new")
    found = export(store)
    store.close()
    assert {Path(s["path"]).parent for s in found} == {run / "judged"}
    table = {(b.one, b.other): b for b in agreement([run]).between}
    assert table["person:Ann", "scores:rm"].kappa.mean == 1.0
    assert table["person:Ann", "scores:rm"].pairs == 10
    assert table["person:Bob", "scores:rm"].agreement.mean == 0.1  # the tie
    assert found[0]["loss"] == by_score["loss"]
    html = judged([read_run(run)])
    assert "new against old, by person:Ann (hh)" in html
    assert "How much the judges agree" in html


def test_the_other_way_round_is_the_same_pair(files, tmp_path):
    for order, name in ((files, "Ann"), (files[::-1], "Bob")):
        store = open_votes(order)
        prefer(store, name, "old")
        export(store, tmp_path / "out")
        store.close()
    [between] = agreement([tmp_path / "out"]).between
    assert (between.pairs, between.kappa.mean) == (10, 1.0)


def test_the_same_text_twice_is_a_tie_as_far_as_the_annotator_has_come(votes):
    assert len(votes.shown) == 8
    assert all("same" not in votes.sides("Ann", pair) for pair in votes.shown)
    order = sorted(votes.items)
    for count in range(1, 9):
        prefer(votes, "Ann", "new", count=1)
        [summary] = export(votes)
        last = list(votes.shown)[count - 1]
        met = [name for name in order if votes.items[name].same and (name < last or count == 8)]
        assert summary["tie"]["count"] == len(met)
        assert summary["win"]["count"] == count


def test_everyone_goes_through_the_pairs_in_the_same_shuffled_order(files, tmp_path):
    store = open_votes(files, seed=1, database=tmp_path / "one.sqlite")
    prompts = [store.items[pair].prompt for pair in store.shown]
    assert prompts != sorted(prompts)
    seen = {name: [] for name in ("Ann", "Bob")}
    for name, pairs in seen.items():
        while pair := store.state(name).pair:
            pairs.append(pair)
            store.vote(name, pair, "tie")
    assert seen["Ann"] == seen["Bob"] == list(store.shown)
    other = open_votes(files, seed=2, database=tmp_path / "two.sqlite")
    assert [other.items[pair].prompt for pair in other.shown] != prompts
    assert not set(other.items) & set(store.items)  # ids say nothing without the seed


def test_three_runs_are_compared_two_by_two(tmp_path):
    three = [write(tmp_path / f"{n}.jsonl", rows_of(n, 4)) for n in ("axe", "bow", "cup")]
    store = open_votes(three)
    pairs = Counter(store.items[pair].runs for pair in store.shown)
    assert pairs == {("axe", "bow"): 4, ("axe", "cup"): 4, ("bow", "cup"): 4}
    for name in ("Ann", "Bob"):
        prefer(store, name, "a")
    assert [(s["a"], s["b"], s["pairs"]) for s in export(store)][:3] == [
        ("axe", "bow", 4), ("axe", "cup", 4), ("bow", "cup", 4)
    ]  # fmt: skip
    sides = [store.sides("Ann", p)[0][:3] for p in store.shown]
    assert Counter(sides) == {"axe": 4, "bow": 4, "cup": 4}


def test_runs_of_one_name_are_told_apart(tmp_path):
    files = [
        write(tmp_path / f"{n}.jsonl", rows_of(n[-3:], 2)) for n in ("x/ppo", "y/ppo", "y/sft")
    ]
    store = open_votes(files)
    runs = list(dict.fromkeys(item.runs for item in store.items.values()))
    assert runs == [("x/ppo", "y/ppo"), ("x/ppo", "y/sft"), ("y/ppo", "y/sft")]


def test_skipped_pairs_come_again_at_the_end(votes):
    order = list(votes.shown)
    votes.vote("Ann", order[0], "skip")
    votes.vote("Ann", order[1], "skip")
    assert votes.state("Ann").skipped == 2
    for pair in order[2:]:
        assert votes.state("Ann").pair == pair
        votes.vote("Ann", pair, "tie")
    assert votes.state("Ann").pair == order[0]
    assert votes.vote("Ann", order[0], "skip").pair == order[1]
    assert votes.vote("Ann", order[1], "left").pair == order[0]
    state = votes.vote("Ann", order[0], "right")
    assert (state.pair, state.done, state.skipped, state.left, state.right) == (None, 8, 0, 1, 1)


def test_undo_takes_back_the_last_and_keeps_the_history(votes, tmp_path):
    first, second, *_ = votes.shown
    votes.vote("Ann", first, "left")
    votes.vote("Ann", second, "skip")
    assert votes.undo("Ann").pair == second
    state = votes.undo("Ann")
    assert (state.pair, state.done, state.can_undo) == (first, 0, False)
    with pytest.raises(VoteError, match="nothing to undo"):
        votes.undo("Ann")
    assert votes.vote("Ann", first, "right").pair == second
    assert [event.kind for event in votes.events()] == ["left", "skip", "undo", "undo", "right"]
    export(votes)
    [file] = (tmp_path / "judged").glob("*.csv")
    log = list(csv.DictReader(file.open(encoding="utf-8")))
    assert [row["counts"] for row in log] == ["no", "no", "no", "no", "yes"]
    assert {log[0]["verdict"], log[4]["verdict"]} == {"a", "b"}
    assert log[0]["left"] in ("new", "old")


def test_undo_of_a_pair_that_was_skipped_before_asks_it_at_once(votes):
    first, *rest = votes.shown
    votes.vote("Ann", first, "skip")
    for pair in rest:
        votes.vote("Ann", pair, "tie")
    assert votes.vote("Ann", first, "left").pair is None
    assert votes.undo("Ann").pair == first
    assert votes.state("Ann").pair == first
    assert votes.state("Ann").skipped == 1


def test_undoing_everything_takes_the_old_export_away(votes, tmp_path):
    votes.vote("Ann", next(iter(votes.shown)), "left")
    [summary] = export(votes)
    assert Path(summary["path"]).is_file()
    votes.undo("Ann")
    assert export(votes) == []
    assert {f.suffix for f in (tmp_path / "judged").iterdir()} == {".sqlite", ".csv"}


def test_a_changed_mind_counts_once(votes):
    pair = next(iter(votes.shown))
    votes.vote("Ann", pair, "left")
    votes.vote("Ann", pair, "tie")
    assert votes.state("Ann").done == 1
    [summary] = export(votes)
    assert summary["win"]["count"] == summary["loss"]["count"] == 0


def test_the_same_action_sent_twice_counts_once(votes):
    first, second, *_ = votes.shown
    votes.vote("Ann", first, "left", action="one")
    again = votes.vote("Ann", first, "left", action="one")
    assert (again.done, again.pair, len(votes.events())) == (1, second, 1)
    votes.vote("Ann", second, "left", action="two")
    votes.undo("Ann", action="three")
    assert votes.undo("Ann", action="three").done == 1


def test_a_name_is_one_person_however_it_is_written(votes):
    first, second, *_ = votes.shown
    votes.vote(" Ann  Smith", first, "left")
    assert votes.vote("ANN SMITH", second, "left").done == 2
    assert votes.annotators() == ["Ann Smith"]
    assert votes.sides("Ann Smith", first) == votes.sides("ann smith", first)


@pytest.mark.parametrize("name", ["", "  ", "=1+1", "a\x00b", "x" * 41, "<b>", "-a", "_", "a/b"])
def test_names_that_no_table_could_hold_are_refused(name, votes):
    with pytest.raises(VoteError):
        votes.vote(name, next(iter(votes.shown)), "left")
    assert votes.events() == []


def test_names_of_all_the_world_are_taken_and_have_files_of_their_own(votes):
    names = ["Änn", "Ünn", "नीना", "O'Neil", "ann@x", "张伟", "Ann-B", "Ann B"]
    assert [clean_name(name) for name in names] == names
    for name in names:
        prefer(votes, name, "new", count=1)
    paths = [summary["path"] for summary in export(votes)]
    assert len({path.lower() for path in paths}) == len(names)


def test_the_same_command_goes_on(files):
    store = open_votes(files)
    store.vote("Ann", next(iter(store.shown)), "left")
    order, seed, token = list(store.shown), store.seed, store.token
    sides = [store.sides("Ann", pair) for pair in order]
    store.close()
    again = open_votes(files)
    assert (list(again.shown), again.seed, again.token) == (order, seed, token)
    assert [again.sides("Ann", pair) for pair in order] == sides
    assert again.state("Ann").done == 1


def test_more_prompts_change_neither_votes_nor_sides(files, tmp_path):
    store = open_votes(files, limit=5)
    assert len(store.shown) == 4
    prefer(store, "Ann", "new")
    sides = {pair: store.sides("Ann", pair) for pair in store.shown}
    [summary] = export(store)
    assert summary["pairs"] == 5  # of the two that are alike, one is within the limit
    store.close()
    for file, name in zip(files, ("new", "old")):
        write(file, rows_of(name, 20, same=(3, 7)))
    more = open_votes(files)
    assert len(more.shown) == 18
    assert more.state("Ann").done == 4
    assert {pair: more.sides("Ann", pair) for pair in sides} == sides
    left = sum(more.sides("Ann", pair)[0].startswith("new") for pair in more.shown)
    assert left == 9


def test_votes_on_other_responses_are_refused_and_can_still_be_exported(files, tmp_path):
    store = open_votes(files)
    prefer(store, "Ann", "new", count=3)
    store.close()
    write(files[1], rows_of("older", 10))
    with pytest.raises(JudgeError, match="has votes on other responses: 10 of its 10 pairs"):
        open_votes(files)
    [summary] = export_votes(files, output=tmp_path / "out")
    assert summary["win"]["count"] == 3


def test_another_task_or_seed_is_refused(files, tmp_path):
    kept = tmp_path / "votes.sqlite"
    open_votes(files, task="tldr", seed=1, database=kept).close()
    with pytest.raises(JudgeError, match="criteria of tldr"):
        open_votes(files, task="hh", database=kept)
    with pytest.raises(JudgeError, match="another seed"):
        open_votes(files, task="tldr", seed=2, database=kept)


def test_a_question_of_your_own_is_kept_with_the_votes(files, tmp_path):
    guide = tmp_path / "tone.yaml"
    guide.write_text(
        "question: Which is kinder?\ncriteria: {Kind: hurts nobody}\nguidelines: Read 'both'.\n"
    )
    votes = open_votes(files, task=str(guide), seed=1)
    name = votes.path
    votes.vote("Ann", next(iter(votes.shown)), "left")
    assert (votes.task, votes.guide.guidelines) == ("tone", "Read 'both'.")
    assert export(votes)[0]["task"] == "tone"
    votes.close()
    again = Store(name)
    assert again.guide.criteria == {"Kind": "hurts nobody"}
    again.close()
    guide.write_text("question: Which is shorter?\n")
    with pytest.raises(JudgeError, match="has votes on another question"):
        open_votes(files, task=str(guide))
    said = {"question": "Which is funnier?", "criteria": ["Witty: a play on words", "Short"]}
    alone = open_votes(files, **said)
    assert (alone.task, alone.guide.question) == ("own", "Which is funnier?")
    assert alone.guide.criteria == {"Witty": "a play on words", "Short": ""}
    alone.close()
    with pytest.raises(JudgeError, match="give --question as well"):
        open_votes(files, criteria=["Witty"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question: [1]", "question"),
        ("criteria: {A: b}", "question"),
        ("question: Why?\ncriterion: {}", "must have the keys"),
        ("- Why?", "must have the keys"),
        ("question: 'Why", "Cannot read"),
        (None, "No such file"),
    ],
)
def test_a_guide_that_cannot_be_read_is_explained(files, tmp_path, text, message):
    file = tmp_path / "guide.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(JudgeError, match=message):
        open_votes(files, task=str(file))


def test_mistakes_are_sentences(files, tmp_path, make_run):
    with pytest.raises(JudgeError, match="Give two or more runs"):
        open_votes(files[:1])
    with pytest.raises(JudgeError, match="compared with itself"):
        open_votes([files[0], files[0]])
    with pytest.raises(JudgeError, match="There is no task 'chat'"):
        open_votes(files, task="chat")
    empty = make_run("empty")
    (empty / "samples.jsonl").unlink(missing_ok=True)
    with pytest.raises(JudgeError, match="Run `marlhf evaluate` on it first"):
        open_votes([empty, files[0]])
    alike = write(tmp_path / "alike.jsonl", rows_of("new", 10))
    with pytest.raises(JudgeError, match="share no prompt"):
        open_votes([files[0], write(tmp_path / "z.jsonl", [{"prompt": "z", "response": "z"}])])
    twin = write(tmp_path / "twin.jsonl", rows_of("new", 10))
    with pytest.raises(JudgeError, match="nothing to compare"):
        open_votes([alike, twin])
    (tmp_path / "no.sqlite").write_text("not a database, but rather a longer text than that" * 9)
    with pytest.raises(JudgeError, match="Cannot store votes in"):
        open_votes(files, database=tmp_path / "no.sqlite")
    with pytest.raises(JudgeError, match="Cannot store votes in"):
        open_votes(files, database=files[0] / "votes.sqlite")
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE x (y)")
    with pytest.raises(JudgeError, match="not a database of votes of this version"):
        open_votes(files, database=tmp_path / "other.sqlite")
    with pytest.raises(JudgeError, match="There are no votes"):
        export_votes(files, database=tmp_path / "none.sqlite")


def test_every_task_has_a_guide_with_the_criteria_of_its_judge():
    assert GUIDES.keys() == TASKS.keys()
    for task in ("tldr", "webgpt"):
        graded = set(TASKS[task].form.model_fields) - {"choice"}
        told = {name.lower().replace(" ", "_") for name in GUIDES[task].criteria}
        assert told == graded


def test_two_stores_on_one_file_see_each_other(votes):
    other = Store(votes.path)
    first, second, *_ = votes.shown
    votes.vote("Ann", first, "left")
    other.vote("Ann", second, "right")
    assert votes.state("Ann") == other.state("Ann")
    assert votes.state("Ann").done == 2
    other.close()


def test_pairs_that_another_process_added_are_exported_too(files):
    few = open_votes(files, limit=2)
    more = open_votes(files)
    prefer(more, "Ann", "new")
    [summary] = export(few)
    assert summary["pairs"] == 10


def test_a_vote_that_fails_leaves_the_store_usable(votes):
    first, second, *_ = votes.shown
    votes._db.execute("PRAGMA query_only = ON")
    with pytest.raises(sqlite3.OperationalError):
        votes.vote("Ann", first, "left")
    votes._db.execute("PRAGMA query_only = OFF")
    assert votes.vote("Ann", first, "left").pair == second


def test_votes_of_many_at_once_are_all_stored(votes):
    def work(name):
        while pair := votes.state(name).pair:
            votes.vote(name, pair, "tie")

    workers = [threading.Thread(target=work, args=(f"person {i}",)) for i in range(6)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    assert len(votes.events()) == 6 * 8
    assert describe(votes) == [f"{name}: 8 of 8 pairs" for name in votes.annotators()]


# The server.


class Site:
    """A server in this process, and plain requests to it."""

    def __init__(self, store, token=None):
        import uvicorn

        from marlhf.judge.annotate.server import listen, make_app

        self.listener = listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        config = uvicorn.Config(
            make_app(store, token), log_level="error", lifespan="off", ws="none"
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True
        )
        self.thread.start()

    def stop(self):
        self.server.should_exit = True
        self.thread.join(30)
        self.listener.close()

    def ask(self, method, path, body=None, **headers):
        """(status, what the JSON says or the text, headers)."""
        told = {"Host": f"127.0.0.1:{self.port}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        if isinstance(body, dict):
            told.setdefault("Content-Type", "application/json")
            body = json.dumps(body)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, told)
        reply = connection.getresponse()
        content = reply.read().decode()
        connection.close()
        is_json = "json" in (reply.headers["content-type"] or "")
        return reply.status, json.loads(content) if is_json else content, reply.headers

    def vote(self, **fields):
        return self.ask("POST", "/api/vote", {"annotator": "Ann", "action": "a" * 16} | fields)


@pytest.fixture
def site(votes):
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    site = Site(votes)
    yield site
    site.stop()


@pytest.fixture
def guarded(votes):
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    site = Site(votes, votes.token)
    yield site
    site.stop()


def test_a_vote_over_the_wire(site, votes):
    status, state, _ = site.ask("GET", "/api/next?annotator=Ann")
    assert (status, state["done"], state["total"]) == (200, 0, 8)
    pair = state["pair"]
    assert {pair["left"][:3], pair["right"][:3]} == {"new", "old"}
    assert pair["prompt"] == [{"role": "", "content": votes.items[pair["id"]].prompt}]
    status, state, _ = site.vote(pair=pair["id"], vote="left")
    assert (status, state["done"]) == (200, 1)
    assert state["pair"]["id"] != pair["id"]
    status, state, _ = site.ask("POST", "/api/undo", {"annotator": "Ann", "action": "b" * 16})
    assert (status, state["done"], state["pair"]) == (200, 0, pair)
    assert [event.kind for event in votes.events()] == ["left", "undo"]


def test_nothing_that_is_sent_names_a_run(tmp_path):
    pytest.importorskip("fastapi")
    files = [
        write(tmp_path / f"{n}.jsonl", [{"prompt": "p", "response": r}, {"prompt": "q", **x}])
        for n, r, x in (
            ("quince", "one", {"response": "three"}), ("medlar", "two", {"response": "four"})
        )
    ]  # fmt: skip
    store = open_votes(files)
    site = Site(store)
    told = []
    for path in ("/", "/page.js", "/page.css", "/icon.svg", "/api/guide", "/api/next?annotator=A"):
        told.append(site.ask("GET", path))
    for _ in range(2):
        pair = told[-1][1]["pair"]["id"]
        told.append(site.vote(pair=pair, vote="left", annotator="A", action=pair))
    told.append(site.ask("POST", "/api/undo", {"annotator": "A", "action": "c" * 16}))
    assert told[-2][1]["pair"] is None
    told.append(site.vote(pair="x", vote="left"))
    site.stop()
    store.close()
    assert all(status == 200 for status, *_ in told[:-1])
    sent = "".join(f"{content}{headers}" for _, content, headers in told)
    assert "quince" not in sent
    assert "medlar" not in sent
    assert str(store.seed) not in sent
    assert store.token not in sent


def test_pages_come_with_a_strict_policy(site):
    for path in ("/", "/page.js", "/markdown.js", "/api/guide", "/nowhere"):
        _, content, headers = site.ask("GET", path)
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "//" not in re.sub(r"^\s*//.*$| // .*$", "", str(content), flags=re.M)  # no address
    html = site.ask("GET", "/")[1]
    assert not re.search(r"<script(?! src=\"/page.js\" defer)|<style| style=| on\w+=", html)
    for path in ("/page.js", "/markdown.js"):
        assert "innerHTML" not in site.ask("GET", path)[1]
        assert "href" not in site.ask("GET", path)[1]


def test_remarks_are_kept_with_the_vote_and_exported(votes, tmp_path):
    first = votes.state("Ann").pair
    votes.vote("Ann", first, "left", remarks=Remarks(3, True, "=1+1 is odd"))
    votes.vote("Ann", votes.state("Ann").pair, "tie", remarks=Remarks(2, False, ""))
    votes.vote("Ann", votes.state("Ann").pair, "right")
    export(votes, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / f"{votes.path.stem}.csv").open()))
    found = [(row["strength"], row["flag"], row["note"]) for row in rows]
    # A tie has no strength, and no note is a formula.
    assert found == [("3", "yes", "'=1+1 is odd"), ("", "", ""), ("", "", "")]
    votes.undo("Ann")
    assert [event.note for event in votes.standing("Ann").values()] == ["=1+1 is odd", ""]


def test_pairs_are_shared_out_until_each_has_its_votes(files, tmp_path):
    store = open_votes(files, seed=1, votes=2, database=tmp_path / "v.sqlite")
    total = len(store.shown)
    orders = [
        sorted(store.shown, key=lambda p, n=name: store.place(n, p)) for name in ("Ann", "Bob")
    ]
    assert orders[0] != orders[1]  # they begin apart
    for name in ("Ann", "Bob"):
        prefer(store, name, "new", count=total)
    assert store.state("Cy").total == 0
    store.undo("Ann")
    assert store.state("Cy").total == 1
    assert {*store.standing("Ann")} | {store.state("Cy").pair} == {*store.shown}
    store.close()
    again = open_votes(files, seed=1, database=tmp_path / "v.sqlite")
    assert again.votes_each == 2
    again.close()


def test_without_sharing_everyone_votes_on_all(votes):
    prefer(votes, "Ann", "new")
    assert votes.state("Bob").total == len(votes.shown)


PAIR = "known"  # stands for a pair that is asked


@pytest.mark.parametrize(
    ("status", "fields", "message"),
    [
        (404, {"pair": "0" * 24, "vote": "left"}, "not among those"),
        (400, {"pair": PAIR, "vote": "first"}, "Cannot read `vote`"),
        (400, {"pair": PAIR, "vote": None}, "Cannot read `vote`"),
        (400, {"pair": PAIR}, "Cannot read `vote`"),
        (400, {"vote": "left"}, "Cannot read `pair`"),
        (400, {"pair": 5, "vote": "left"}, "Cannot read `pair`"),
        (400, {"pair": PAIR, "vote": "left", "annotator": ""}, "no name"),
        (400, {"pair": PAIR, "vote": "left", "annotator": None}, "Cannot read `annotator`"),
        (400, {"pair": PAIR, "vote": "left", "annotator": "<script>"}, "letters, digits"),
        (400, {"pair": PAIR, "vote": "left", "annotator": "x" * 201}, "Cannot read `annotator`"),
        (400, {"pair": PAIR, "vote": "left", "action": "x"}, "Cannot read `action`"),
        (400, {"pair": PAIR, "vote": "left", "verdict": "a"}, "Cannot read `verdict`"),
        (413, {"pair": PAIR, "vote": "left", "annotator": "x" * 5000}, "4096 bytes"),
    ],
)  # fmt: skip
def test_bad_votes_are_sentences_and_store_nothing(site, votes, status, fields, message):
    pair = next(iter(votes.shown))
    found = site.vote(**{k: pair if v == PAIR else v for k, v in fields.items()})
    assert found[0] == status
    assert message in found[1]["error"]
    assert votes.events() == []


def test_other_bad_requests_are_sentences_and_store_nothing(site, votes):
    good = {"annotator": "Ann", "action": "a" * 16, "pair": next(iter(votes.shown)), "vote": "tie"}
    endless = iter([b"x" * 999] * 99)
    asked = [
        (400, site.ask("POST", "/api/vote", b"{", Content_Type="application/json")),
        (400, site.ask("POST", "/api/vote", b"[" * 4000, Content_Type="application/json")),
        (400, site.ask("POST", "/api/vote", b"\xff\xfe", Content_Type="application/json")),
        (400, site.ask("POST", "/api/vote", b"[]", Content_Type="application/json")),
        (415, site.ask("POST", "/api/vote", json.dumps(good), Content_Type="text/plain")),
        (413, site.ask("POST", "/api/vote", endless, Content_Type="application/json")),
        (400, site.ask("POST", "/api/undo", {"annotator": "Ann", "action": "a" * 16})),
        (400, site.ask("GET", "/api/next")),
        (400, site.ask("GET", "/api/next?annotator=")),
        (400, site.ask("GET", f"/api/next?annotator={'x' * 300}")),
        (404, site.ask("GET", "/judged/votes.sqlite")),
        (404, site.ask("GET", "/../store.py")),
        (404, site.ask("GET", "/docs")),
        (405, site.ask("GET", "/api/vote")),
    ]  # fmt: skip
    for status, (found, content, _) in asked:
        assert found == status
        assert content["error"].endswith(".")
    assert votes.events() == []


def test_other_sites_can_neither_vote_nor_pose_as_this_one(site, votes):
    good = {"annotator": "Ann", "action": "a" * 16, "pair": next(iter(votes.shown)), "vote": "tie"}
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://127.0.0.1:{site.port + 1}"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Host": "evil.example"},
        {"Host": f"evil.example:{site.port}"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "["},
    ):
        status, content, _ = site.ask("POST", "/api/vote", good, **headers)
        assert (status, "error" in content) == (403, True)
    assert site.ask("GET", "/api/next?annotator=A", Host="evil.example")[0] == 403  # rebinding
    assert votes.events() == []
    own = {"Origin": f"http://localhost:{site.port}", "Host": f"localhost:{site.port}"}
    assert site.ask("POST", "/api/vote", good, **own)[0] == 200


def test_without_the_token_nobody_gets_in(guarded, votes):
    site, token = guarded, votes.token
    good = {"annotator": "Ann", "action": "a" * 16, "pair": next(iter(votes.shown)), "vote": "tie"}
    for path in ("/", "/page.js", "/api/guide", "/api/next?annotator=Ann", "/?token=", "/?token=x"):
        status, content, _ = site.ask("GET", path)
        assert (status, "token" in content["error"]) == (401, True)
    for cookie in ("", f"marlhf_{site.port}=", f"marlhf_{site.port}={token}x", f"other={token}"):
        assert site.ask("POST", "/api/vote", good, Cookie=cookie)[0] == 401
    assert site.ask("POST", f"/api/vote?token={token}", good)[0] == 401
    assert votes.events() == []

    status, _, headers = site.ask("GET", f"/?token={token}", Host="192.0.2.7:80")
    assert (status, headers["location"]) == (303, "/")  # the address is clean from now on
    assert headers["referrer-policy"] == "no-referrer"
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    given = cookie.split(";")[0]
    assert "Compare responses" in site.ask("GET", "/", Cookie=given, Host="192.0.2.7:80")[1]
    assert site.ask("POST", "/api/vote", good, Cookie=given, Origin="http://evil.example")[0] == 403
    assert site.ask("POST", "/api/vote", good, Cookie=given)[0] == 200


def test_the_address_holds_the_token_only_where_it_is_not_local(votes, monkeypatch):
    pytest.importorskip("fastapi")
    from marlhf.judge.annotate import annotate, server

    asked = []
    monkeypatch.setattr(
        server, "serve", lambda store, host, port, token, say: asked.append((host, token))
    )
    files = [votes.path.parent.parent / f"{name}.jsonl" for name in ("new", "old")]
    for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "192.0.2.7"):
        annotate(files, host=host)
    assert asked == [
        ("127.0.0.1", None), ("localhost", None), ("::1", None),
        ("0.0.0.0", votes.token), ("::", votes.token), ("192.0.2.7", votes.token),
    ]  # fmt: skip
    assert len(votes.token) >= 20
    shown = server.address(Bound("0.0.0.0"), "secret")
    assert re.fullmatch(r"http://[^/]+:9/\?token=secret", shown)
    assert "0.0.0.0" not in shown
    assert server.address(Bound("::1"), None) == "http://[::1]:9/"


class Bound:
    """Stands for a socket on an interface that no test should open."""

    def __init__(self, host):
        self.host = host

    def getsockname(self):
        return self.host, 9


def test_a_taken_port_is_a_sentence(files):
    pytest.importorskip("fastapi")
    from marlhf.judge.annotate import annotate

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(JudgeError, match=rf"port {port}: address already in use. Give another"):
            annotate(files, port=port)


def test_without_the_extra_the_remedy_is_told(files, monkeypatch):
    from marlhf.judge.annotate import annotate

    monkeypatch.delitem(sys.modules, "marlhf.judge.annotate.server", raising=False)
    monkeypatch.setattr(sys.modules["marlhf.judge.annotate"], "server", None, raising=False)
    monkeypatch.delattr(sys.modules["marlhf.judge.annotate"], "server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(JudgeError, match=r"pip install 'marlhf\[annotate\]'"):
        annotate(files)


def test_a_store_that_cannot_be_written_says_so(site, votes):
    pair = next(iter(votes.shown))
    votes._db.execute("PRAGMA query_only = ON")
    status, content, _ = site.vote(pair=pair, vote="left")
    assert (status, "Nothing was stored" in content["error"]) == (503, True)
    votes._db.execute("PRAGMA query_only = OFF")
    assert site.vote(pair=pair, vote="left")[0] == 200


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped_and_exports(files, tmp_path, end):
    pytest.importorskip("fastapi")
    command = [sys.executable, "-m", "marlhf", "annotate", *map(str, files), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    while "Open" not in (line := process.stderr.readline()):
        assert line, said
        said.append(line)
    assert said[0] == "Pairs to compare: 8; 2 with equal texts are ties and not shown\n"
    port = int(re.search(r"http://127.0.0.1:(\d+)/ ", line)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/api/next?annotator=Ann")
    pair = json.loads(connection.getresponse().read())["pair"]["id"]
    body = {"annotator": "Ann", "action": "a" * 16, "pair": pair, "vote": "tie"}
    connection.request("POST", "/api/vote", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200
    process.send_signal(end)  # with a connection still open
    rest = process.stderr.read()
    assert process.wait(60) == 0
    assert rest.startswith("Ann: 1 of 8 pairs\nVerdicts are in ")
    assert "Traceback" not in rest
    assert "win" not in rest  # annotators stay blind
    done = subprocess.run([*command[:-2], "--export"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "person:Ann: new against old: win 0.0%" in done.stdout


def test_it_serves_where_a_loop_runs_already(files, monkeypatch):
    pytest.importorskip("fastapi")
    from marlhf.judge.annotate import annotate, server

    seen = []

    class Stopping(server.uvicorn.Server):
        async def main_loop(self):
            seen.append(self.started)  # and then it ends

    async def notebook():
        monkeypatch.setattr(server.uvicorn, "Server", Stopping)
        return annotate(files, port=0)

    assert asyncio.run(notebook()) == []
    assert seen == [True]


def test_the_commands_of_the_page_parse():
    page = ROOT / "docs" / "annotate.md"
    lines = re.findall(r"^marlhf (\w+) (.+)$", page.read_text(encoding="utf-8"), re.M)
    assert {name for name, _ in lines} >= {"annotate", "agreement", "report"}
    commands = typer.main.get_command(app).commands
    for name, words in lines:
        commands[name].make_context(name, shlex.split(words))
