import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlhf.core import Lines
from marlhf.data import DataConfig, DataError, load_data, sums
from marlhf.models.tiny import tiny_tokenizer
from marlhf.reward.sums import share_right, solved
from marlhf.spans.show import cut_text
from marlhf.train.recipe import load_recipe

PROMPT = "7+2413\n"
BEGINNING = ["a7+2=9", "b9+4=3", "c3+1=4", "d4+3=7", "e7+2=9"]  # the four steps, then the first
prompts = st.sampled_from([str(row.prompt) for row in sums.rows(200)])


def changed(line: int, text: str) -> str:
    lines = sums.solution(PROMPT).split("\n")
    return "\n".join([*lines[:line], text, *lines[line + 1 :]])


def test_a_solution_by_hand():
    lines = sums.solution(PROMPT).split("\n")
    assert lines[:5] == BEGINNING
    assert len(lines) == sums.NUM_LINES
    assert lines[-1].startswith("x")


def test_every_process_and_python_writes_the_same_rows():
    text = "\n".join(f"{row.prompt}|{row.chosen}" for row in sums.rows(256))
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "81f6597d77c2d72e2aff15cf7945a9f12bf344d089e27a51d756376a509763cf"


def test_prompts_differ_and_fewer_rows_are_the_first_of_more():
    rows = sums.rows(2000)
    assert len({str(row.prompt) for row in rows}) == 2000
    assert sums.rows(16) == rows[:16]
    assert sums.rows(16, seed=1) != rows[:16]
    assert len(sums.rows(20_000)) == 6250


def test_slips_are_as_frequent_as_they_say_and_fewer_than_half_are_right():
    rows = sums.rows(2000)
    given, written = [str(row.prompt) for row in rows], [str(row.chosen) for row in rows]
    wrong = 1 - sum(share_right(given, written)) / len(rows)
    assert 0.9 * sums.SLIP < wrong < 1.1 * sums.SLIP
    assert 0.40 < sum(solved(given, written)) / len(rows) < 0.49
    right = [sums.solution(prompt)[-1] for prompt in given]
    assert [row.columns["answer"] for row in rows] == right


def test_held_out_prompts_are_not_trained_on():
    config = DataConfig(source="sums", parts={"sft": 0.4, "ppo": 0.6}, eval_size=128, limit=1000)
    parts = [load_data(config, part) for part in ("sft", "ppo")]
    sets = [{str(row.prompt) for row in part.train} for part in parts]
    held = [{str(row.prompt) for row in part.eval} for part in parts]
    assert held[0] == held[1]
    assert len(held[0]) == 128
    assert not sets[0] & sets[1]
    assert not held[0] & (sets[0] | sets[1])


def test_the_source_reads_no_file():
    with pytest.raises(DataError, match="`source: sums` makes its own rows"):
        DataConfig(source="sums", path="mine.jsonl")


@pytest.mark.parametrize(
    ("response", "line", "right"),
    [
        (sums.solution(PROMPT), None, 24),
        (changed(2, "c3+1=5"), 2, 22),  # line d begins with a 4 that is not there any more
        (changed(2, "c3+2=5"), 2, 22),
        (changed(23, "x0+0=0"), 23, 23),
        (changed(23, "x"), 23, 23),
        (changed(0, ""), 0, 0),  # nothing to build on
        ("\n".join(BEGINNING), 5, 5),  # cut off
        ("", 0, 0),
        (sums.solution(PROMPT) + "\n", 24, 24),
        (sums.solution(PROMPT) + "\ny1+1=2", 24, 24),
        (" " + sums.solution(PROMPT), 0, 0),
        ("The fox ran.", 0, 0),
    ],
)
def test_the_first_wrong_line_by_hand(response, line, right):
    assert sums.first_wrong_line(PROMPT, response) == line
    assert sum(sums.right_lines(PROMPT, response)) == right
    assert solved([PROMPT], [response]) == [float(line is None)]
    assert share_right([PROMPT], [response]) == [right / 24]


def test_lines_after_a_slip_may_be_right():
    slip = [*BEGINNING[:2], "c3+1=5", "d5+3=8", "e8+2=0"]
    assert sums.right_lines(PROMPT, "\n".join(slip))[:6] == [True, True, False, True, True, False]


@given(prompts, st.integers(0, sums.NUM_LINES - 1), st.integers(1, 9))
def test_a_changed_sum_is_the_first_wrong_line(prompt, line, off):
    lines = sums.solution(prompt).split("\n")
    lines[line] = lines[line][:-1] + str((int(lines[line][-1]) + off) % 10)
    response = "\n".join(lines)
    assert sums.first_wrong_line(prompt, response) == line
    assert sums.right_lines(prompt, response).index(False) == line


def test_labels_of_lines_are_arithmetic():
    """Each line is read alone: its letter, the result above it, the digit to add, and the sum."""
    rows, shares = sums.step_rows(400), []
    for row in rows:
        start, steps = str(row.prompt).strip().split("+")
        above, right = start, []
        for number, line in enumerate(row.columns["completions"]):
            letter, a, plus, b, equals, total = line
            wanted = ("abcdefghijklmnopqrstuvwx"[number], above, "+", steps[number % 4], "=")
            right.append(
                (letter, a, plus, b, equals) == wanted and (int(a) + int(b)) % 10 == int(total)
            )
            above = total
        assert row.columns["labels"] == right
        assert len(right) == sums.NUM_LINES
        shares.append(right.count(False) / len(right))
    assert 0.45 < sum(shares) / len(shares) < 0.55
    assert min(shares) == 0
    assert max(shares) > 0.95


def test_rows_with_labels_have_the_same_prompts_and_may_be_more():
    rows = sums.step_rows(7000)
    assert sums.step_rows(40) == rows[:40]
    assert {str(row.prompt) for row in rows} == {str(row.prompt) for row in sums.rows(7000)}
    assert rows[6250].prompt == rows[0].prompt
    assert rows[6250].columns != rows[0].columns
    text = "|".join(line for row in rows[:64] for line in row.columns["completions"])
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "6b525f7828fad1dc179ee5684766108bfc3b1f1c458315f82cdf6aa8623055eb"
    )
    config = {"parts": {}, "eval_size": 64, "limit": 600}
    plain, steps = (
        load_data(DataConfig(source=name, **config), part, needs=needs)
        for name, part, needs in (
            ("sums", "ppo", ["prompt"]),
            ("sums-steps", "reward", ["prompt", "completions", "labels"]),
        )
    )
    assert {str(row.prompt) for row in plain.eval} == {str(row.prompt) for row in steps.eval}


def test_tokens_are_characters_and_lines_are_macro_actions():
    tokenizer = tiny_tokenizer()
    text = sums.solution(PROMPT)
    assert len(tokenizer.encode(text)) == len(text) == 7 * sums.NUM_LINES - 1
    actions = cut_text(text, Lines(), tokenizer="tiny", model=None, seed=0)
    assert ["".join(action) for action in actions][:2] == ["a7+2=9\n", "b9+4=3\n"]
    assert len(actions) == sums.NUM_LINES


def test_the_recipe_trains_and_scores(tmp_path):
    """Two steps of each stage: what it learns is measured in docs/code.md."""
    from marlhf.train import ppo, rloo, sft

    short = ["num_steps=2", "batch_size=4", "eval_every=0", "save_every=0", "data.limit=60"]
    short += ["data.eval_size=4", "sampling.max_new_tokens=16", f"output_dir={tmp_path}"]
    for stage in load_recipe("sums", short):
        {"sft": sft, "ppo": ppo, "rloo": rloo}[stage.name].train(stage.config)
    for name in ("ppo", "rloo"):
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        assert [x["eval/score"] for x in lines if x["kind"] == "eval"] == [0.0, 0.0]


def test_the_recipe_of_process_rewards_runs(tmp_path):
    """Two steps of each kind of stage: what it learns is measured in docs/results/process.md."""
    from marlhf.train import ppo, prm, sft

    short = ["num_steps=2", "batch_size=4", "eval_every=0", "data.limit=60", "data.eval_size=4"]
    short += ["sampling.max_new_tokens=16", "prm.labels_from.responses=8", f"output_dir={tmp_path}"]
    stages = {stage.name: stage for stage in load_recipe("evidence/prm", short)}
    assert stages["steps"].config.data.source == "sums-steps"
    for name in ("sft", "steps", "prm", "process-min"):
        {"sft": sft, "prm": prm, "ppo": ppo}[stages[name].kind].train(stages[name].config)
    lines = map(json.loads, (tmp_path / "process-min" / "metrics.jsonl").read_text().splitlines())
    assert all(-1 <= x["rewards/process"] <= 1 for x in lines if x["kind"] == "train")
