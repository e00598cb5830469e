import math

import pytest

from marlhf.runs.read import find_runs, number, read_run


def test_a_torn_last_line_is_left_out_and_said(make_run):
    folder = make_run("ppo", metrics=[{"kind": "train", "step": 1, "rl/score": 0.5}])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 2, "rl/sc')
    run = read_run(folder)
    assert run.curve("rl/score") == [(1, pytest.approx(math.nan, nan_ok=True), 0.5)]
    assert run.problems == ["1 broken line of metrics.jsonl left out"]


def test_nan_and_infinity_are_gaps(make_run):
    values = [0.1, math.nan, math.inf, 1e300, None, "text", True, 0.2]
    rows = [{"kind": "train", "step": i, "rl/kl": v} for i, v in enumerate(values)]
    run = read_run(make_run("ppo", metrics=rows))
    assert [(step, value) for step, _, value in run.curve("rl/kl")] == [(0, 0.1), (7, 0.2)]


def test_a_number_too_large_for_a_float_is_a_gap():
    assert math.isnan(number(10**400))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ([0.5, -2.0], [0.5, -2.0]),
        ([0.5, math.nan], [0.5, None]),
        ([0.5, math.inf, -math.inf], [0.5, None, None]),
        ([1e300, 0.5, -1e300], [None, 0.5, None]),
        ([1, 0.5, True, None, "text"], [1.0, 0.5, None, None, None]),
        ([math.nan], None),
        ([], None),
    ],
)
def test_scores_that_are_no_numbers_are_gaps(make_run, written, read):
    run = read_run(make_run("ppo", evaluations=[{"step": 0, "scores": written}]))
    found = [None if math.isnan(x) else x for e in run.evaluations for x in e.scores]
    assert found == (read or [])


def test_a_resumed_run_keeps_the_later_of_two_rows(make_run):
    rows = [{"step": s, "seconds": 1.0, "rl/kl": k} for s, k in ((1, 0.1), (2, 0.2), (2, 0.9))]
    run = read_run(make_run("ppo", metrics=rows))
    assert run.curve("rl/kl") == [(1, 1.0, 0.1), (2, 1.0, 0.9)]


def test_evaluations_fill_in_what_metrics_do_not_say(make_run):
    metrics = [{"kind": "eval", "step": 20, "seconds": 9.0, "eval/score": 0.7}]
    evaluations = [
        {"step": 0, "scores": [0.0, 1.0], "length": [10, 20]},
        {"step": 20, "scores": [5.0, 5.0], "length": [30, 30]},
    ]
    run = read_run(make_run("ppo", metrics=metrics, evaluations=evaluations))
    assert run.curve("eval/score") == [(0, 0.0, 0.5), (20, 9.0, 0.7)]
    assert run.curve("eval/length") == [(0, 0.0, 15.0), (20, 9.0, 30.0)]


def test_a_mean_that_was_logged_as_nan_is_taken_from_the_prompts(make_run):
    metrics = [{"kind": "eval", "step": 0, "seconds": 0.0, "eval/gold": math.nan}]
    evaluations = [{"step": 0, "scores": [1.0], "gold": [0.25]}]
    run = read_run(make_run("ppo", metrics=metrics, evaluations=evaluations))
    assert run.curve("eval/gold") == [(0, 0.0, 0.25)]


def test_a_run_without_run_json_still_has_a_name_and_a_stage(make_run):
    folder = make_run("mine", metrics=[{"kind": "train", "step": 1, "sft/loss": 2.0}])
    (folder / "run.json").unlink()
    run = read_run(folder)
    assert (run.name, run.stage, run.status) == ("mine", "sft", "unknown")


def test_methods_of_rl_share_their_metrics(make_run):
    for stage in ("rloo", "ppo"):
        line = {"kind": "train", "step": 1, "seconds": 1.0, "rl/score": 0.5}
        if stage == "rloo":
            line["rl/group_std"] = 0.25
        run = read_run(make_run(stage, stage=stage, metrics=[line]))
        assert run.is_policy
        assert run.final("rl/score") == 0.5
        (run.path / "run.json").unlink()
        assert read_run(run.path).stage == stage


def test_dpo_has_no_score_to_rank_it_by(make_run):
    metrics = [{"kind": "eval", "step": 2, "seconds": 1.0, "eval/accuracy": 0.75}]
    run = read_run(make_run("dpo", stage="dpo", metrics=metrics))
    assert not run.is_policy
    assert run.final("eval/accuracy") == 0.75


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("content", ["", "[1, 2]", "{", "\x00\xff", "null\n5\n"])
def test_no_damaged_file_stops_the_reader(make_run, name, content):
    folder = make_run("ppo", metrics=[{"kind": "train", "step": 1, "rl/score": 0.5}])
    (folder / name).write_bytes(content.encode("latin-1"))
    read_run(folder)


def test_runs_are_found_two_levels_down_in_order_of_stages(demo):
    (demo / "seed1" / "sft" / "checkpoints").mkdir()
    found = [f"{run.stage}:{run.name}" for run in find_runs([demo, demo / "seed1"])]
    assert found[:4] == ["sft:sft", "sft:sft", "reward:reward", "reward:reward"]
    assert sorted(found[4:]) == ["ppo:macro-ppo"] * 2 + ["ppo:ppo"] * 2


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"There is no folder .*nowhere"):
        find_runs([tmp_path / "nowhere"])


def test_a_folder_without_runs_says_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run.*run\.json"):
        find_runs([tmp_path])


def test_an_empty_run_is_an_error_only_when_alone(make_run):
    empty = make_run("empty", metrics=[])
    with pytest.raises(ValueError, match="Nothing has been recorded yet"):
        find_runs([empty])
    full = make_run("full", metrics=[{"kind": "train", "step": 1, "rl/score": 0.5}])
    assert [run.is_empty for run in find_runs([empty, full])] == [True, False]
