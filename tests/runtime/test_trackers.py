import math
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from marlhf.config.settings import to_raw
from marlhf.runs.layout import RunError
from marlhf.runtime.trackers import Trackers, tracker_names


class FakeRun:
    def __init__(self, **given):
        self.given, self.logged, self.ended = given, [], None

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def finish(self, **given):
        self.ended = given


@pytest.fixture
def dashboards(monkeypatch):
    """Stand-ins for wandb and trackio; each `init` adds to the list of that name."""
    runs = {"wandb": [], "trackio": []}
    for name, made in runs.items():
        module = types.ModuleType(name)

        def init(made=made, **given):
            made.append(FakeRun(**given))
            return made[-1]

        module.init = init
        module.Table = lambda columns, data: (columns, data)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
    return runs


def events(path):
    found = EventAccumulator(str(path / "tensorboard")).Reload()
    scalars = {
        name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]
    }
    text = "".join(
        e.tensor_proto.string_val[0].decode()
        for name in found.Tags()["tensors"]
        for e in found.Tensors(name)
    )
    return scalars, text


def test_tensorboard_has_every_number_and_the_settings(tmp_path):
    trackers = Trackers("tensorboard", tmp_path, name="run", config_raw={"seed": 7})
    trackers.log(0, {"eval/score": 0.25})
    trackers.log(1, {"rl/score": 0.5, "rl/kl": 2, "kind": "train", "none": None})
    trackers.log(2, {"rl/score": 1.5})
    trackers.finish("finished")
    scalars, text = events(tmp_path)
    assert scalars == {
        "eval/score": [(0, 0.25)],
        "rl/score": [(1, 0.5), (2, 1.5)],
        "rl/kl": [(1, 2.0)],
    }
    assert '"seed": 7' in text
    assert [p.name for p in tmp_path.iterdir()] == ["tensorboard"]


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        (2, [(0, 0.0), (1, 1.0), (2, 2.0), (3, 103.0)]),
        (0, [(0, 100.0), (1, 101.0), (2, 102.0), (3, 103.0)]),  # nothing was saved
    ],
)
def test_tensorboard_forgets_steps_that_are_taken_again(tmp_path, done, expected):
    first = Trackers(["tensorboard"], tmp_path, name="run", config_raw={})
    for step in range(5):
        first.log(step, {"x": float(step)})
    first.finish("failed")
    second = Trackers(["tensorboard"], tmp_path, name="run", config_raw={}, done=done)
    for step in range(done + 1 if done else 0, 4):
        second.log(step, {"x": 100.0 + step})
    second.finish("finished")
    assert events(tmp_path)[0]["x"] == expected


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_dashboards_get_the_run_its_settings_and_its_numbers(dashboards, tmp_path, name):
    trackers = Trackers([name], tmp_path, name="my ppo", config_raw={"seed": 7})
    trackers.log(1, {"rl/score": 0.5})
    trackers.log(1, {"eval/score": math.nan, "kind": "eval"})
    trackers.finish("finished")
    [run] = dashboards[name]
    assert run.given["project"] == "marlhf"
    assert run.given["resume"] == "allow"
    assert run.given["config"] == {"seed": 7}
    assert run.logged[0] == (1, {"rl/score": 0.5})
    assert run.logged[1][1].keys() == {"eval/score"}
    assert run.ended is not None
    if name == "wandb":
        assert run.given["name"] == "my ppo"
        assert run.given["dir"] == str(tmp_path)
        assert run.ended == {"exit_code": 0}


SAMPLES = [
    {"prompt": "Why|so?", "response": "One\ntwo", "score": 0.5, "gold": None},
    {"prompt": "Who?", "response": "Me", "score": 1.0, "gold": None},
]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_dashboards_get_samples_as_tables(dashboards, tmp_path, name):
    trackers = Trackers([name], tmp_path, name="run", config_raw={})
    trackers.table(3, "samples", SAMPLES)
    trackers.table(3, "samples", [])
    trackers.finish("finished")
    columns, data = (
        ["prompt", "response", "score"],
        [["Why|so?", "One\ntwo", 0.5], ["Who?", "Me", 1]],
    )
    assert dashboards[name][0].logged == [(3, {"samples": (columns, data)})]


def test_tensorboard_gets_samples_as_text(tmp_path):
    trackers = Trackers("tensorboard", tmp_path, name="run", config_raw={})
    trackers.table(3, "samples", SAMPLES)
    trackers.finish("finished")
    _, text = events(tmp_path)
    assert "| prompt | response | score |\n| --- | --- | --- |" in text
    assert "| Why\\|so? | One<br>two | 0.5 |" in text


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("trackio", "name")])
def test_a_run_keeps_its_identity_until_it_starts_anew(dashboards, tmp_path, name, key):
    for done in (0, 10, 20, 0):
        Trackers([name], tmp_path, name="my ppo!", config_raw={}, done=done).finish("stopped")
    first, second, third, anew = (run.given[key] for run in dashboards[name])
    assert first == second == third
    assert first.startswith("my-ppo-")
    assert anew != first


def test_a_stopped_run_is_no_success(dashboards, tmp_path):
    Trackers("wandb", tmp_path, name="run", config_raw={}).finish("stopped")
    assert dashboards["wandb"][0].ended == {"exit_code": 1}


def test_projects_come_from_the_environment(dashboards, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("TRACKIO_PROJECT", "ours")
    Trackers(["wandb", "trackio"], tmp_path, name="run", config_raw={})
    assert dashboards["wandb"][0].given["project"] == "mine"
    assert dashboards["trackio"][0].given["project"] == "ours"


def test_a_tracker_that_fails_warns_once_and_the_others_go_on(dashboards, tmp_path, capsys):
    trackers = Trackers(["wandb", "trackio"], tmp_path, name="run", config_raw={})
    [wandb], [trackio] = dashboards["wandb"], dashboards["trackio"]

    def fail(metrics, step):
        raise ConnectionError("no route")

    wandb.log = fail
    for step in (1, 2):
        trackers.log(step, {"x": 1.0})
    trackers.finish("finished")
    said = capsys.readouterr().err
    assert said.count("wandb failed (ConnectionError: no route)") == 1
    assert [step for step, _ in trackio.logged] == [1, 2]


def test_an_end_that_fails_is_only_a_warning(dashboards, tmp_path, capsys):
    trackers = Trackers(["trackio"], tmp_path, name="run", config_raw={})
    dashboards["trackio"][0].finish = lambda: 1 / 0
    trackers.finish("finished")
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_tracker_that_cannot_start_is_an_error_before_training(dashboards, tmp_path):
    def refuse(**given):
        raise RuntimeError("api_key not configured")

    sys.modules["wandb"].init = refuse
    with pytest.raises(RunError) as caught:
        Trackers(["trackio", "wandb"], tmp_path, name="run", config_raw={})
    assert "wandb cannot start: RuntimeError: api_key not configured" in str(caught.value)
    assert "wandb login" in str(caught.value)
    assert dashboards["trackio"][0].ended is not None


@pytest.mark.parametrize("folder_of_logs", [False, True])
def test_a_missing_package_is_a_sentence(tmp_path, monkeypatch, folder_of_logs):
    # None makes the import fail; an empty module is what Python makes of a folder `wandb`
    stand_in = types.ModuleType("wandb") if folder_of_logs else None
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    with pytest.raises(RunError, match=r"pip install .marlhf\[wandb\]"):
        Trackers(["tensorboard", "wandb"], tmp_path, name="run", config_raw={})
    assert not list(tmp_path.iterdir())
    assert "wandb" not in tracker_names("all")
    assert "tensorboard" in tracker_names("all")


def test_names_are_read_as_transformers_reads_them(dashboards):
    assert tracker_names("all") == ["tensorboard", "wandb", "trackio"]
    for none in ("none", ["none"], [], (), None):
        assert tracker_names(none) == []
    assert tracker_names(("wandb", "wandb")) == ["wandb"]
    with pytest.raises(ValueError, match=r"unknown name .tensorbord.\. Did you mean tensorboard"):
        tracker_names("tensorbord")
    with pytest.raises(ValueError, match="Known: tensorboard, wandb, trackio, all, none"):
        tracker_names(["mlflow"])


def test_no_trackers_do_nothing(tmp_path):
    trackers = Trackers("none", tmp_path / "run", name="run", config_raw={})
    trackers.log(1, {"x": 1.0})
    trackers.finish("finished")
    assert not (tmp_path / "run").exists()


def test_secrets_do_not_leave(dashboards, tmp_path):
    raw = to_raw({"data": {"hub_token": "hf_abcdef"}, "seed": 1})
    Trackers(["wandb", "tensorboard"], tmp_path, name="run", config_raw=raw).finish("finished")
    assert dashboards["wandb"][0].given["config"]["data"] == {"hub_token": "(hidden)"}
    assert "hf_abcdef" not in events(tmp_path)[1]
