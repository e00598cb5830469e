import importlib
import itertools
import time

from marlhf.runtime import progress
from marlhf.runtime.progress import Steps
from marlhf.train import dpo, sft
from marlhf.train.dpo_config import DPOConfig
from marlhf.train.supervised_config import SFTConfig
from small_runs import TOY


def test_logs_have_a_line_every_tenth_of_the_run(capfd):
    with Steps("sft", 1000) as steps:
        for step in range(1, 1001):
            steps.advance(step, {"sft/loss": 2.0})
    lines = capfd.readouterr().err.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, *range(100, 1001, 100)]
    assert lines[0].endswith("loss 2")


def test_slow_steps_have_a_line_every_half_minute(capfd, monkeypatch):
    clock = itertools.count(step=4.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with Steps("ppo", 1000) as steps:
        for step in range(1, 31):
            steps.advance(step, {})
    assert 3 <= len(capfd.readouterr().err.splitlines()) <= 6


def test_the_eta_is_by_recent_steps(capfd, monkeypatch):
    """Ten slow steps, as of compiling, are forgotten after twenty fast ones."""
    clock = itertools.chain([0.0], range(100, 1001, 100), range(1001, 1091))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    with Steps("ppo", 100) as steps:
        for step in range(1, 101):
            steps.advance(step, {})
    lines = dict(line.split("  ") for line in capfd.readouterr().err.splitlines())
    assert lines["ppo 1/100"] == "eta 2:45:00"
    assert lines["ppo 40/100"] == "eta 0:01:00"
    assert lines["ppo 100/100"] == "done"


def test_one_eta_is_that_of_all_stages(capfd, monkeypatch):
    """A later stage of the same method is expected to take as long a step."""
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    ahead = progress.StagesAhead()
    monkeypatch.setattr(progress, "stages_ahead", ahead)
    ahead.begin("ppo", [("ppo", 30)])
    with Steps("ppo", 10) as steps:
        steps.advance(1, {})
    ahead.begin("ppo", [("dpo", 30)])
    with Steps("ppo", 10) as steps:
        steps.advance(1, {})
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["ppo 1/10  eta 0:00:18, all stages 0:01:18", "ppo 1/10  eta 0:00:18"]


def test_evaluations_and_checkpoints_are_in_the_log(tmp_path, capfd):
    config = SFTConfig(
        model="tiny",
        output_dir=str(tmp_path / "mine"),
        data=TOY,
        device="cpu",
        batch_size=4,
        num_steps=2,
        eval_every=1,
        save_every=1,
    )
    sft.train(config)
    errors = capfd.readouterr().err.replace("\n", " ")
    assert "mine 1/2  held out: loss " in errors
    assert "mine 1/2  saved " in errors


def test_a_method_calls_itself_by_its_own_name(tmp_path, capfd):
    """DPO reads the reward model's part of the data, and is not the reward stage."""
    config = DPOConfig(
        model="tiny", output_dir=str(tmp_path / "dpo"), data=TOY, device="cpu", num_steps=1
    )
    dpo.train(config)
    errors = capfd.readouterr().err
    assert "\ndpo: " in f"\n{errors}"
    assert "\nreward: " not in f"\n{errors}"


def test_of_several_processes_one_prints(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert not importlib.reload(progress).console.quiet  # alone, whatever its rank
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert importlib.reload(progress).console.quiet
    monkeypatch.delenv("RANK")
    assert not importlib.reload(progress).console.quiet
