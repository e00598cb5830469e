"""Sweeps: which trainings they need, that they resume after anything, and what they print."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from marlhf import __version__, cli
from marlhf.report.groups import group_runs
from marlhf.runs.layout import RunError
from marlhf.runs.read import find_runs
from marlhf.sweep import describe, describe_plan, make_plan, sweep, sweep_state
from marlhf.sweep import run as jobs
from marlhf.sweep import run as scheduling
from marlhf.sweep.plan import split_values
from marlhf.train import recipe as recipes
from marlhf.train import sft
from marlhf.train.recipe import ConfigError

SMALL = {
    "defaults": {
        "data": {"source": "toy", "limit": 120, "eval_size": 8},
        "batch_size": 4,
        "num_steps": 1,
        "eval_every": 0,
        "save_every": 0,
    },
    "stages": {
        "sft": {"model": "tiny"},
        "reward": {"model": "@sft"},
        "ppo": {
            "model": "@sft",
            "reward_model": "@reward",
            "eval_prompts": 4,
            "sampling": {"max_new_tokens": 8},
        },
    },
}
LONE = {**SMALL, "stages": {"sft": {"model": "tiny"}}}


class Forked:
    """A training in a copy of this process: as the real thing, without seconds of imports."""

    started: list[str]

    def __init__(self, words, log: Path, environment, lock) -> None:
        self.status = None
        self.started.append(words[1].removesuffix(".yaml"))
        self.pid = os.fork()
        if self.pid == 0:
            try:
                output = os.open(log, os.O_WRONLY | os.O_APPEND)
                for number in (1, 2):
                    os.dup2(output, number)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                sys.argv = ["marlhf", *words]
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.setsid()
                cli.main()
                os._exit(0)
            except SystemExit as end:
                sys.stderr.flush()
                os._exit(int(end.code or 0))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)

    def poll(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)
        return self.status

    def send_signal(self, number, /):
        os.kill(self.pid, number)


def can_fork() -> bool:
    """Whether a copy of this process may train: not once it has threads or memory for a GPU."""
    if torch.cuda.is_initialized():
        return False
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """Which trainings were begun, in order; they are forks of this process where that can be."""
    Forked.started = begun = []
    monkeypatch.setattr(scheduling, "POLL", 0.01)
    if can_fork():
        monkeypatch.setattr(jobs, "start", Forked)
        return begun
    start = jobs.start

    def recorded(words, *rest):
        begun.append(words[1].removesuffix(".yaml"))
        return start(words, *rest)

    monkeypatch.setattr(jobs, "start", recorded)
    return begun


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """`recipe(raw)`: a recipe in the current folder, whose sweep goes to `runs/my-sweep`."""
    monkeypatch.chdir(tmp_path)

    def write(raw: dict = SMALL) -> str:
        Path("mine.yaml").write_text(
            yaml.safe_dump({"output_dir": "runs/my", **raw}, sort_keys=False)
        )
        return "mine.yaml"

    return write


def folders(plan) -> list[str]:
    return [str(run.folder.relative_to(plan.root)) for run in plan.runs]


def states(root: str = "runs/my-sweep") -> dict[str, str]:
    whole = json.loads((Path(root) / "sweep.json").read_text())
    return {point["name"]: point["state"] for point in whole["points"]}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0,1, 2", ["0", "1", "2"]),
        ("5", ["5"]),
        ("{type: ngram, n: 5},{type: words}", ["{type: ngram, n: 5}", "{type: words}"]),
        ("[2, 3],[5, 10]", ["[2, 3]", "[5, 10]"]),
        ('\'a,b\',"c,\\"d"', ["'a,b'", '"c,\\"d"']),
        ("it's,so", ["it's", "so"]),
        ("{a: 'x}, y'},2", ["{a: 'x}, y'}", "2"]),
    ],
)
def test_only_outer_commas_part_values(text, parts):
    assert split_values(text) == parts


def test_stages_that_no_axis_reaches_are_trained_once(recipe):
    plan = make_plan(recipe(), ["segmenter.n=1,3,.inf", "ppo.seed=0,1", "batch_size=8"])
    assert [p.name for p in plan.points][:3] == ["n=1,seed=0", "n=1,seed=1", "n=3,seed=0"]
    policies = [f"seed={s}/ppo,n={n}" for n in ("1", "3", "inf") for s in (0, 1)]
    assert sorted(folders(plan)) == sorted(["sft", "reward", *policies])
    [run] = [run for run in plan.runs if run.folder.name == "ppo,n=inf" and run.config.seed == 1]
    assert run.settings["segmenter"] == {"type": "ngram", "n": float("inf")}
    assert run.config.batch_size == 8
    assert run.config.model == "runs/my-sweep/sft/model"
    assert run.config.reward_model == "runs/my-sweep/reward/model"
    assert run.config.output_dir == "runs/my-sweep/seed=1/ppo,n=inf"


def test_an_axis_of_every_stage_retrains_them_all_for_each_value(recipe):
    plan = make_plan(recipe(), ["seed=0,1", "kl_coef=0.1,0.2"])
    assert len(plan.runs) == 2 + 2 + 4
    [run] = [run for run in plan.runs if str(run.folder).endswith("seed=1/ppo,kl_coef=0.2")]
    assert run.config.model == "runs/my-sweep/seed=1/sft/model"


def test_an_axis_reaches_what_starts_from_its_models(recipe):
    plan = make_plan(recipe(), ["reward.learning_rate=1.0e-3,1.0e-4"])
    rates = ["learning_rate=0.001", "learning_rate=0.0001"]
    expected = ["sft", *(f"{stage},{rate}" for rate in rates for stage in ("reward", "ppo"))]
    assert folders(plan) == expected
    assert plan.runs[-1].config.reward_model.endswith("reward,learning_rate=0.0001/model")


def test_stages_that_come_out_the_same_are_one_training():
    plan = make_plan("toy", ["ppo.segmenter.n=1,5,10"])
    assert [name for name in folders(plan) if "ppo" in name] == ["ppo,n=1", "ppo,n=5", "ppo,n=10"]
    assert "macro-ppo" in folders(make_plan("toy", ["ppo.segmenter.n=1,3"]))


def test_whole_rules_and_model_paths_make_readable_safe_names(recipe):
    rules = "segmenter={type: ngram, n: 5},words,{type: random, lengths: [2, 3]}"
    names = [Path(name).name for name in folders(make_plan(recipe(), [rules]))]
    assert names[2:] == [
        "ppo,segmenter=ngram-n=5",
        "ppo,segmenter=words",
        "ppo,segmenter=random-lengths=2-3",
    ]
    odd = "ppo.critic_model=a/x,b/x,../../etc,'sp ace;$(rm)',null," + "y" * 200
    names = [str(name) for name in folders(make_plan(recipe(), [odd]))][2:]
    assert len(set(names)) == 6
    for name in names:
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.,=-")
        assert len(name) < 120
        assert "/" not in name


def test_a_thousand_points_read_the_recipe_once_and_build_what_differs(recipe, monkeypatch):
    """Reading and building for every point took minutes."""
    counts = Counter()

    def counted(module, name):
        real = getattr(module, name)

        def call(*words, **settings):
            counts[name] += 1
            return real(*words, **settings)

        monkeypatch.setattr(module, name, call)

    counted(recipes, "read_recipe")
    counted(recipes, "_build_stage")
    many = ",".join(map(str, range(1, 101)))
    found = make_plan(recipe(), [f"ppo.segmenter.n={many}", "ppo.seed=0,1,2,3,4,5,6,7,8,9"])
    assert len(found.points) == 1000
    assert len(found.runs) == 1000 + len({"sft", "reward"})
    assert counts["read_recipe"] == 2  # once more to know where the sweep's folder is
    others = len(found.points[0].runs) - 1
    assert counts["_build_stage"] <= 1000 + 2 * others + 1


def test_a_data_seed_is_a_setting_and_no_seed(recipe):
    plan = make_plan(recipe(LONE), ["data.seed=0,1", "seed=3,4"])
    assert folders(plan)[:2] == ["seed=3/sft,data.seed=0", "seed=4/sft,data.seed=0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=0,1", "seed=2"], "seed is given twice"),
        (["seed=0,1,0"], "seed has the value 0 twice"),
        (["seed=0,"], "a value that is empty"),
        (["output_dir=a,b"], "give it one value"),
        (["sede=0,1"], "Did you mean seed"),
        (["segmenter.n=3,0"], "ppo,n=0.segmenter: n must be a whole number from 1"),
        (["ppo.lam=0.9,2"], "At the point lam=2"),
        (["kl_coef"], "Write key=value"),
        (["push_to_hub=true", "seed=0,1"], "push_to_hub"),
    ],
)
def test_mistakes_are_sentences_before_anything_is_trained(recipe, words, message):
    with pytest.raises(ConfigError, match=message):
        sweep(recipe(), words)
    assert not Path("runs").exists()


def test_a_sweep_trains_shares_skips_and_tells(recipe, started, capfd):
    words = ["segmenter.n=1,3", "ppo.seed=0,1"]
    found = sweep(recipe(), words, jobs=2)
    root = Path("runs/my-sweep")
    assert not found.failed
    assert len(started) == 2 + 4 == len(set(started))
    assert set(states().values()) == {"finished"}
    assert "finished in" in (root / "seed=1" / "ppo,n=3.log").read_text()
    table = describe(found)
    assert table[0].split() == ["run", "state", "score", "KL", "length", "s"]
    assert [line.split()[0] for line in table[1:5]] == [
        f"seed={s}/ppo,n={n}" for n in (1, 3) for s in (0, 1)
    ]
    assert table[5] == ""
    header = ["mean over seeds", "seeds", "score [min, max]", "KL", "length", "s"]
    assert re.split("  +", table[6]) == header
    for n, line in zip((1, 3), table[7:], strict=True):
        scores = [each.score for each in found.outcomes if each.folder.name == f"ppo,n={n}"]
        low, high = min(scores), max(scores)
        assert line.startswith(f"ppo,n={n} ")
        assert f"2  {sum(scores) / 2:.3f} [{low:.3f}, {high:.3f}]" in line
    assert found.report is not None
    assert found.report.is_file()
    policies = [g for g in group_runs(find_runs([root])) if g.runs[0].is_policy]
    assert [(g.label, g.num_seeds) for g in policies] == [("ppo,n=1", 2), ("ppo,n=3", 2)]

    started.clear()
    again = sweep(recipe(), words)
    assert started == []
    assert [each.score for each in again.outcomes][2:] == [o.score for o in found.outcomes][2:]
    assert "6 of 6 trainings are finished already" in capfd.readouterr().err


def test_seeds_of_every_stage_are_taken_together(recipe, started):
    sweep(recipe(), ["seed=0,1", "num_steps=1"], jobs=2)
    groups = group_runs(find_runs(["runs/my-sweep"]))
    assert sorted((g.label, g.num_seeds) for g in groups) == [
        ("ppo", 2),
        ("reward", 2),
        ("sft", 2),
    ]


def test_points_and_axes_are_added_and_other_settings_refused(recipe, started):
    file = recipe(LONE)
    sweep(file, ["learning_rate=1.0e-3,2.0e-3"])
    started.clear()
    sweep(file, ["learning_rate=2.0e-3,3.0e-3"])
    assert started == ["runs/my-sweep/sft,learning_rate=0.003"]
    assert len(states()) == 3
    started.clear()
    found = sweep(file, ["learning_rate=1.0e-3,3.0e-3", "seed=0,1"])  # seed was 0 all along
    assert sorted(started) == [
        "runs/my-sweep/seed=1/sft,learning_rate=0.001",
        "runs/my-sweep/seed=1/sft,learning_rate=0.003",
    ]
    assert len(found.outcomes) == 5
    with pytest.raises(RunError, match=r"sft.batch_size: 4 there, 8 now") as refused:
        sweep(file, ["learning_rate=4.0e-3,5.0e-3", "batch_size=8"])
    assert "choose another output_dir" in str(refused.value)
    with pytest.raises(RunError, match="not empty and holds no sweep"):
        sweep(file, ["seed=0,1", "output_dir=."])


def test_a_sweep_of_an_earlier_version_lacks_settings_that_came_since(recipe, started):
    file = recipe(LONE)
    sweep(file, ["learning_rate=1.0e-3,2.0e-3"])
    kept = Path("runs/my-sweep/sweep.json")
    state = json.loads(kept.read_text())
    for name in ("weight_decay", "schedule"):
        del state["settings"]["sft"][name]
    kept.write_text(json.dumps(state))
    started.clear()
    sweep(file, ["learning_rate=1.0e-3,2.0e-3"])
    assert not started
    kept.write_text(json.dumps(state))
    with pytest.raises(RunError, match=r"sft.weight_decay: '\(not there\)' there, 0.1 now"):
        sweep(file, ["learning_rate=3.0e-3,4.0e-3", "weight_decay=0.1"])


def test_a_failed_point_stops_no_other_and_is_tried_again(recipe, started):
    words = ["sft.model=tiny,./nowhere", "num_steps=1"]
    Path("nowhere").mkdir()  # a folder that is no model, which only loading it finds out
    found = sweep(recipe(), words)
    assert [each.name for each in found.failed] == [
        f"{stage},model=nowhere" for stage in ("sft", "reward", "ppo")
    ]
    first, second, _ = found.failed
    assert "Cannot load the tokenizer ./nowhere" in first.note
    assert second.note == "sft,model=nowhere failed, whose model it starts from."
    assert states() == {"model=tiny": "finished", "model=nowhere": "failed"}
    assert any("Cannot load the tokenizer ./nowhere" in line for line in describe(found))
    started.clear()
    assert len(sweep(recipe(), words).failed) == 3
    assert started == ["runs/my-sweep/sft,model=nowhere"]


def test_mistakes_of_any_point_are_reported_before_the_first_training(recipe, started):
    words = ["ppo.reward_funcs=[],[nowhere:score]", "ppo.batch_size=4,4000", "sft.device=cuda:99"]
    with pytest.raises(ConfigError) as refused:
        sweep(recipe(), words)
    message = str(refused.value)
    assert "sft: " in message
    assert "ppo,reward_funcs=none,batch_size=4000: There are " in message
    # Code is imported once all else is found right.
    with pytest.raises(ConfigError) as refused:
        sweep(recipe(), words[:1])
    message = str(refused.value)
    assert "ppo,reward_funcs=nowhere-score: There is no module 'nowhere'" in message
    assert not started
    assert not Path("runs").exists()


def test_a_process_that_is_killed_or_breaks_is_told_of(recipe, started, monkeypatch):
    if jobs.start is not Forked:
        pytest.skip("only a fork of this process has its broken training")
    real = sft.train

    def train(config, *rest):
        if config.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if config.seed == 2:
            raise KeyError("a bug")
        return real(config, *rest)

    monkeypatch.setattr(sft, "train", train)
    found = sweep(recipe(LONE), ["seed=0,1,2", "num_steps=1"])
    killed, broken = found.failed
    assert "ended by SIGKILL, as the system does when memory runs out" in killed.note
    assert "KeyError: 'a bug'" in broken.note
    assert states()["seed=0"] == "finished"


def interrupt_once(words: str, *files: str) -> threading.Thread:
    """Send this process Ctrl-C once all files hold the words."""

    def watch() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not all(
            Path(file).is_file() and words in Path(file).read_text() for file in files
        ):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_ctrl_c_saves_every_training_and_the_same_command_goes_on(recipe, started):
    file = recipe(LONE)
    words = ["seed=0,1", "num_steps=400", "num_epochs=400", "data.parts={}"]
    folders = [f"runs/my-sweep/seed={seed}/sft" for seed in (0, 1)]
    thread = interrupt_once("train", *(f"{folder}/metrics.jsonl" for folder in folders))
    with pytest.raises(KeyboardInterrupt):
        sweep(file, words, jobs=2)
    thread.join()
    assert set(states().values()) == {"stopped"}
    for folder in folders:
        assert json.loads(Path(folder, "run.json").read_text())["status"] == "stopped"
        assert "saved at step" in Path(f"{folder}.log").read_text()
    # To the end would take long: it is enough to see them go on.
    thread = interrupt_once("resuming from step", *(f"{folder}.log" for folder in folders))
    with pytest.raises(KeyboardInterrupt):
        sweep(file, words, jobs=2)
    thread.join()
    assert set(states().values()) == {"stopped"}


def test_a_sweep_killed_with_9_goes_on_to_the_same_weights(recipe, request, tmp_path):
    """Its training, a real process here, must end with it, and what that saved be used."""
    file = recipe(LONE)
    words = ["seed=0,1", "num_steps=60", "num_epochs=60", "data.limit=60", "batch_size=4"]
    sweeping = os.fork()
    if sweeping == 0:
        try:
            sweep(file, words, notice=lambda words: None)
        finally:
            os._exit(1)
    metrics, end = Path("runs/my-sweep/seed=0/sft/metrics.jsonl"), time.monotonic() + 120
    while time.monotonic() < end and not (metrics.is_file() and metrics.read_text()):
        time.sleep(0.02)
    os.kill(sweeping, signal.SIGKILL)
    os.waitpid(sweeping, 0)
    assert states()["seed=0"] == "running"
    started = request.getfixturevalue("started")
    found = sweep(file, words, jobs=2)  # waits until the process left over has saved
    assert not found.failed
    assert len(started) == 2
    assert set(states().values()) == {"finished"}
    log = Path("runs/my-sweep/seed=0/sft.log").read_text()
    assert "Stopped by SIGTERM" in log
    assert "resuming from step" in log
    [config] = [run.config for run in found.plan.runs if run.config.seed == 0]
    whole = sft.train(replace(config, output_dir=str(tmp_path / "whole")))
    weights = [Path(p) / "model.safetensors" for p in (whole, "runs/my-sweep/seed=0/sft/model")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_two_sweeps_in_one_folder_are_one_too_many(recipe, started, monkeypatch):
    monkeypatch.setattr(sweep_state, "PATIENCE", 0.0)
    plan = make_plan(recipe(LONE), ["seed=0,1"])
    with sweep_state.locked(plan.root, print), pytest.raises(RunError, match="Another process"):
        sweep("mine.yaml", ["seed=0,1"])


def test_a_damaged_sweep_file_is_a_sentence(recipe, started):
    Path("runs/my-sweep").mkdir(parents=True)
    Path("runs/my-sweep/sweep.json").write_text('{"axes": {}, "poi')
    with pytest.raises(RunError, match="is damaged"):
        sweep(recipe(LONE), ["seed=0,1"])


def test_torchrun_is_refused(recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        sweep(recipe(LONE), ["seed=0,1"])


def test_jobs_divide_cores_and_gpus(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    shared = [jobs.job_environment(slot, 3, "auto") for slot in range(3)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shared] == ["2", "5", "2"]
    assert {each["OMP_NUM_THREADS"] for each in shared} == {"2"}
    assert jobs.job_environment(0, 1, "auto") == {}
    assert "CUDA_VISIBLE_DEVICES" not in jobs.job_environment(0, 2, "cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES" not in jobs.job_environment(1, 2, "auto")


def test_the_command_lists_trains_and_fails_by_its_status(recipe, started, monkeypatch, capfd):
    def marlhf(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["marlhf", "sweep", *words])
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capfd.readouterr()

    file = recipe(LONE)
    words = [file, "model=tiny,./nowhere", "num_steps=1"]
    status, _, err = marlhf(*words)
    assert status == 1
    assert "sft,model=nowhere: `model`: There is no folder ./nowhere." in err
    Path("nowhere").mkdir()
    status, out, _ = marlhf(*words, "--dry-run")
    assert status == 0
    assert out.splitlines()[0] == "2 points in runs/my-sweep: 2 runs, 2 left"
    assert not Path("runs").exists()
    status, out, err = marlhf(*words)
    assert status == 1
    assert "1 failed. Run the same command to try again." in err
    assert "sft,model=tiny     finished" in out
    assert "Cannot load the tokenizer ./nowhere" in out
    assert "report: runs/my-sweep/report.html" in err
    assert "sft,model=tiny (finished)" in describe_plan(make_plan(file, words[1:]))[1]
    assert marlhf(file, "seed=0,1", "--jobs", "0")[0] == 1


def test_sweeps_of_the_documentation_can_be_planned(tmp_path, monkeypatch):
    page = Path(__file__).resolve().parents[2] / "docs" / "sweep.md"
    lines = [line for line in page.read_text("utf-8").splitlines() if "marlhf sweep toy" in line]
    assert len(lines) >= 6
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = [word for word in shlex.split(line)[3:] if "=" in word]
        plan = make_plan("toy", words)
        assert len(plan.points) > 1
        assert sum(run.stage == "sft" for run in plan.runs) == 1


def test_stages_of_one_recipe_are_a_sweep_too(recipe):
    more = {"n3": {"like": "ppo", "segmenter": {"type": "ngram", "n": 3}}}
    more["seed1"] = {"like": "ppo", "seed": 1}
    more["other-reward"] = {"like": "reward", "seed": 1}
    more["other"] = {"like": "ppo", "reward_model": "@other-reward"}
    file = recipe({**SMALL, "stages": SMALL["stages"] | more})
    plan = make_plan(file)
    assert folders(plan) == ["sft", "reward", "ppo", "n3", "seed1", "other-reward", "other"]
    assert [point.name for point in plan.points] == ["the recipe as it is"]
    assert folders(make_plan(file, only=["n*"])) == ["sft", "reward", "n3"]
    with pytest.raises(ConfigError, match=r"No stage is called dpo\. There are: sft"):
        make_plan(file, only=["n3", "dpo"])


def test_at_the_deadline_trainings_save_and_the_same_command_resumes(
    recipe, started, capfd, monkeypatch
):
    file, metrics = recipe(LONE), Path("runs/my-sweep/seed=0/sft/metrics.jsonl")
    words = ["seed=0,1", "num_steps=60", "num_epochs=60", "data.limit=60"]

    def end_in_the_first(self, live) -> None:
        if metrics.is_file() and "train" in metrics.read_text():
            self.deadline = 0.0

    with monkeypatch.context() as patched:
        patched.setattr(scheduling.Scheduler, "_show", end_in_the_first)
        found = sweep(file, words, deadline=10)
    assert not found.failed
    assert sorted(each.state for each in found.left) == ["stopped", "waiting"]
    assert "saved at step" in Path("runs/my-sweep/seed=0/sft.log").read_text()
    assert "the deadline has come" in capfd.readouterr().err
    found = sweep(file, words, jobs=2, deadline=10)
    assert not found.left
    assert "resuming from step" in Path("runs/my-sweep/seed=0/sft.log").read_text()


def test_planning_imports_neither_torch_nor_code_of_the_user(recipe):
    Path("rules.py").write_text("raise SystemExit('imported')")
    stages = SMALL["stages"] | {
        "own": {"like": "ppo", "segmenter": {"type": "rules:Mine", "size": 3}}
    }
    file = recipe({**SMALL, "stages": stages})
    script = (
        "import sys; from marlhf.sweep import describe_plan, make_plan\n"
        f"plan = make_plan({file!r}, ['own.segmenter.size=1,2', 'ppo.segmenter.n=1,2'])\n"
        "print(len(describe_plan(plan)), 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.stdout == "5 False\n", shown.stderr


def test_children_do_not_import_modules_of_the_current_folder(tmp_path, monkeypatch):
    """`python -c` puts the current folder first: a typer.py there was run by every training."""
    monkeypatch.chdir(tmp_path)
    Path("typer.py").write_text("open('planted', 'w').close()")
    log = Path("log")
    log.touch()
    process = jobs.start(["version"], log, dict(os.environ), None)
    while process.poll() is None:
        time.sleep(0.05)
    assert not Path("planted").exists()
    assert log.read_text().strip() == __version__


def test_ten_thousand_points_are_planned_in_linear_time(recipe):
    def seconds(count: int) -> float:
        values = ",".join(f"{i}e-6" for i in range(1, count + 1))
        begin = time.perf_counter()
        make_plan(recipe(), [f"ppo.learning_rate={values}", "ppo.seed=0,1"])
        return time.perf_counter() - begin

    few = min(seconds(50) for _ in range(3))
    assert seconds(500) < 40 * few
