"""Killed, stopped, damaged, full: a run resumes as if nothing had happened, or says what to do."""

import errno
import functools
import json
import os
import random
import shutil
import signal
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from marlhf.config.rl import Guards
from marlhf.core import RandomNGram
from marlhf.models.base import ModelError
from marlhf.reward import RewardModel
from marlhf.rollout import Sampling
from marlhf.runs.layout import RunError, read_config
from marlhf.runs.write import RunFolder
from marlhf.runtime import checkpoint
from marlhf.runtime.stage import Stopped
from marlhf.train import ppo, reward, rloo, sft
from marlhf.train.held_out import HeldOutEvaluation
from small_runs import TOY, everything, read_lines, small_ppo, stop_after, wait_for_step, weights

pytestmark = pytest.mark.xdist_group("forked")  # one process, so that one server forks
SHORT = {"data": TOY, "batch_size": 8, "num_steps": 4, "eval_every": 2, "save_every": 1}


def test_a_killed_run_resumes_identically(ppo_config, start):
    """kill -9 twice at random moments; then the same command gives the same numbers, bit by bit."""
    options = {
        "num_steps": 12,  # still running when it is killed the second time
        "segmenter": RandomNGram(lengths=(1, 2, 3)),
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "kl_target": 0.5,
        "normalize_scores": True,
        "save_every": 2,
    }
    unbroken = ppo_config("unbroken", **options)
    ppo.train(unbroken)
    broken = ppo_config("broken", **options)
    chance = random.Random(0)
    for step in (1, 4):
        process = start(broken)
        wait_for_step(broken.output_dir, step, process)
        time.sleep(chance.random() * 0.2)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    process = start(broken)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "resuming from step" in errors
    assert everything(unbroken.output_dir) == everything(broken.output_dir)
    assert weights(unbroken.output_dir) == weights(broken.output_dir)


def test_a_killed_tree_resumes_identically(parents, tmp_path, start):
    configs = [
        rloo.RLOOConfig(
            model=str(parents / "sft" / "model"),
            reward_model=str(parents / "reward" / "model"),
            output_dir=str(tmp_path / name),
            tree=(2, 2),
            segmenter=RandomNGram(lengths=(1, 2, 3)),
            sampling=Sampling(max_new_tokens=8),
            eval_prompts=2,
            **{**SHORT, "batch_size": 2},
        )
        for name in ("unbroken", "broken")
    ]
    rloo.train(configs[0])
    process = start(configs[1], "rloo")
    wait_for_step(configs[1].output_dir, 2, process)
    process.kill()
    process.communicate()
    rloo.train(configs[1])
    assert everything(configs[0].output_dir) == everything(configs[1].output_dir)
    assert weights(configs[0].output_dir) == weights(configs[1].output_dir)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_saves_first(ppo_config, number, start):
    config = ppo_config("stopped", num_steps=500, save_every=0, eval_every=0)
    process = start(config)
    wait_for_step(config.output_dir, 2, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "saved at step" in errors
    assert "Traceback" not in errors
    state = json.loads((Path(config.output_dir) / "run.json").read_text())
    assert state["status"] == "stopped"
    last = read_lines(config.output_dir)[-1]["step"]
    assert [p.name for p in checkpoint.list_checkpoints(_folder(config).checkpoints)] == [
        f"step-{last:06d}"
    ]


def _folder(config) -> RunFolder:
    return RunFolder(config.output_dir, "ppo", config)


@pytest.mark.parametrize(
    ("module", "config"), [(sft, sft.SFTConfig), (reward, reward.RewardConfig)]
)
def test_sft_and_reward_resume_identically(module, config, tmp_path, monkeypatch):
    whole = config(model="tiny", output_dir=str(tmp_path / "whole"), **SHORT)
    module.train(whole)
    parts = replace(whole, output_dir=str(tmp_path / "parts"), save_every=0)
    with monkeypatch.context() as patched:
        stop_after(2, patched, module)
        with pytest.raises(Stopped):
            module.train(parts)
    module.train(parts)
    assert read_lines(whole.output_dir) == read_lines(parts.output_dir)
    assert weights(whole.output_dir) == weights(parts.output_dir)


SAVING = {
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "bfloat16": {
        "optimizer": "adamw_8bit",
        "trained_weights": "bfloat16",
        "precision": "bfloat16",
    },
    "adafactor": {"optimizer": "adafactor"},
}


@pytest.mark.parametrize("settings", SAVING.values(), ids=SAVING)
def test_other_optimisers_resume_identically(settings, ppo_config, monkeypatch):
    if settings["optimizer"] == "adamw_8bit":
        pytest.importorskip("torchao")
    whole = ppo_config("whole", eval_every=0, **settings)
    ppo.train(whole)
    parts = ppo_config("parts", eval_every=0, **settings)
    with monkeypatch.context() as patched:
        stop_after(2, patched, ppo)
        with pytest.raises(Stopped):
            ppo.train(parts)
    ppo.train(parts)
    assert read_lines(whole.output_dir) == read_lines(parts.output_dir)
    assert weights(whole.output_dir) == weights(parts.output_dir)


@pytest.fixture(scope="module")
def stopped_once(parents, tmp_path_factory):
    """`stopped_once(step)`: the folder of a run of four steps that was stopped after some."""

    @functools.cache
    def train(step: int) -> str:
        config = small_ppo(parents, tmp_path_factory.mktemp("stopped") / "run", num_steps=4)
        with pytest.MonkeyPatch.context() as patched:
            stop_after(step, patched, ppo)
            with pytest.raises(Stopped):
                ppo.train(config)
        return config.output_dir

    return train


@pytest.fixture
def stopped(ppo_config, stopped_once):
    """`stopped(step)`: the settings of a copy of such a run."""

    def copy(step: int) -> ppo.PPOConfig:
        config = ppo_config("run", num_steps=4)
        shutil.copytree(stopped_once(step), config.output_dir)
        return config

    return copy


@pytest.fixture(scope="module")
def never_stopped(parents, tmp_path_factory) -> str:
    """The folder of the same run without a stop."""
    config = small_ppo(parents, tmp_path_factory.mktemp("whole") / "run", num_steps=4)
    ppo.train(config)
    return config.output_dir


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "garbage"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    stopped, never_stopped, damage, capfd
):
    config = stopped(3)
    saved = checkpoint.list_checkpoints(_folder(config).checkpoints)
    assert [p.name for p in saved] == ["step-000002", "step-000003"]
    victim = saved[-1] / "policy.safetensors"
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 255
        victim.write_bytes(content)
    elif damage == "truncate":
        victim.write_bytes(content[:100])
    elif damage == "delete":
        victim.unlink()
    else:
        (saved[-1] / "manifest.json").write_text("{not json")
    capfd.readouterr()
    ppo.train(config)
    errors = capfd.readouterr().err.replace("\n", "")
    assert "step-000003 is damaged" in errors
    assert "resuming from step-000002 instead." in errors
    assert "resuming from step 2" in errors
    assert everything(never_stopped) == everything(config.output_dir)


@pytest.mark.parametrize(
    "manifest", ["[]", "null", "{}", '{"state.json": 3}', '{"state.json": []}']
)
def test_a_manifest_that_lists_nothing_is_damage(stopped, manifest, capfd):
    config = stopped(3)
    newest = checkpoint.list_checkpoints(_folder(config).checkpoints)[-1]
    (newest / "manifest.json").write_text(manifest)
    resumed_from_the_one_before(config, capfd, "manifest.json does not list")


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"step": "3"}'])
def test_a_state_that_says_nothing_is_damage_whatever_its_checksum(stopped, content, capfd):
    config = stopped(3)
    newest = checkpoint.list_checkpoints(_folder(config).checkpoints)[-1]
    (newest / "state.json").write_text(content)
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["state.json"] = [len(content), zlib.crc32(content.encode())]
    (newest / "manifest.json").write_text(json.dumps(manifest))
    resumed_from_the_one_before(config, capfd, "state.json does not say step")


@pytest.mark.parametrize("name", ["", "policy.safetensors", "manifest.json"])
def test_a_checkpoint_elsewhere_is_not_followed(stopped, name, tmp_path, capfd):
    """Not even when it is old enough to be dropped."""
    config = stopped(3)
    linked = checkpoint.list_checkpoints(_folder(config).checkpoints)[-1] / name
    elsewhere = linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(elsewhere)
    resumed_from_the_one_before(config, capfd, "link")
    assert elsewhere.exists()
    assert not any(path.is_symlink() for path in _folder(config).checkpoints.rglob("*"))


def test_a_linked_checkpoint_is_dropped_without_what_it_points_to(stopped, tmp_path):
    config = stopped(3)
    oldest = checkpoint.list_checkpoints(_folder(config).checkpoints)[0]
    oldest.symlink_to(oldest.rename(tmp_path / "elsewhere"))
    ppo.train(config)
    assert not oldest.is_symlink()
    assert (tmp_path / "elsewhere" / "state.json").is_file()


def resumed_from_the_one_before(config, capfd, reason: str) -> None:
    capfd.readouterr()
    ppo.train(config)
    errors = " ".join(capfd.readouterr().err.split())
    assert "step-000003 is damaged" in errors
    assert reason in errors
    assert "resuming from step-000002 instead." in errors


def test_without_any_whole_checkpoint_the_warnings_say_that_training_starts_again(stopped, capfd):
    config = stopped(2)
    for folder in checkpoint.list_checkpoints(_folder(config).checkpoints):
        (folder / "manifest.json").unlink()
    capfd.readouterr()
    ppo.train(config)
    errors = capfd.readouterr().err.replace("\n", "")
    assert errors.count("is damaged (manifest.json is missing); training starts from the") == 2
    assert "instead" not in errors


def test_half_a_line_in_the_metrics_does_not_matter(stopped):
    config = stopped(2)
    with (Path(config.output_dir) / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    ppo.train(config)
    assert read_lines(config.output_dir)[-1]["step"] == 4


def test_a_finished_run_is_left_alone(ppo_config):
    config = ppo_config(num_steps=1)
    ppo.train(config)
    before = (Path(config.output_dir) / "metrics.jsonl").stat().st_mtime_ns
    assert ppo.train(config) == Path(config.output_dir) / "model"
    assert (Path(config.output_dir) / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_folder_with_another_run_is_refused(ppo_config, tmp_path):
    ppo.train(ppo_config(num_steps=1))
    with pytest.raises(RunError, match=r"holds another run.*\n  kl_coef: 0.05 there, 0.9 now"):
        ppo.train(ppo_config(num_steps=1, kl_coef=0.9))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("meow")
    with pytest.raises(RunError, match="holds no marlhf run"):
        ppo.train(ppo_config("photos"))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        ppo.train(ppo_config("file"))


def test_num_steps_may_be_raised(ppo_config, capsys):
    short = ppo_config(num_steps=2, save_every=1, eval_every=0, schedule="linear")
    ppo.train(short)
    longer = replace(short, num_steps=4)
    ppo.train(longer)
    said = " ".join(capsys.readouterr().err.split())
    assert "num_steps was 2" in said
    assert "follows the linear schedule of the longer run" in said
    train = [x for x in read_lines(short.output_dir) if x["kind"] == "train"]
    assert [x["step"] for x in train] == [1, 2, 3, 4]
    rates = [short.rate(1, 2), short.rate(2, 2), longer.rate(3, 4), longer.rate(4, 4)]
    assert [x["rl/learning_rate"] for x in train] == pytest.approx(rates)
    assert read_config(Path(short.output_dir))["num_steps"] == 4
    assert _folder(longer).finished
    with pytest.raises(RunError, match="num_steps: 4 there, 3 now"):
        ppo.train(replace(short, num_steps=3))


def test_without_a_checkpoint_num_steps_may_not_be_raised(ppo_config):
    ppo.train(ppo_config(num_steps=1, save_every=0, eval_every=0))
    with pytest.raises(RunError, match="num_steps: 1 there, 2 now"):
        ppo.train(ppo_config(num_steps=2, save_every=0, eval_every=0))


def test_a_folder_of_an_earlier_version_lacks_settings_that_came_since(ppo_config):
    """They had their defaults, and a run with other values is another run."""
    config = ppo_config(num_steps=1)
    ppo.train(config)
    file = Path(config.output_dir) / "config.yaml"
    old = yaml.safe_load(file.read_text())
    for name in ("lam_value", "critic_warmup_steps", "credit"):
        del old[name]
    file.write_text(yaml.safe_dump(old))
    assert ppo.train(config) == Path(config.output_dir) / "model"
    with pytest.raises(RunError, match=r"critic_warmup_steps: 0 there, 3 now"):
        ppo.train(replace(config, critic_warmup_steps=3))


def test_not_a_number_stops_with_the_last_good_checkpoint(ppo_config, monkeypatch):
    config = ppo_config(num_steps=4, eval_every=0)
    real, calls = RewardModel.__call__, []

    def broken(self, prompts, responses, rows):
        calls.append(1)
        scores = real(self, prompts, responses, rows)
        return scores * float("nan") if len(calls) == 4 else scores  # the third step's

    monkeypatch.setattr(RewardModel, "__call__", broken)
    with pytest.raises(RunError, match=r"8 of 8 values of the scores .*step-000002"):
        ppo.train(config)
    state = json.loads((Path(config.output_dir) / "run.json").read_text())
    assert state["status"] == "failed"
    assert "diverged" in state["note"]


def test_a_bad_gradient_is_named_and_not_applied(ppo_config, monkeypatch):
    config = ppo_config(num_steps=2, eval_every=0)
    real = ppo.backward

    def broken(experience, credit, models, *more):
        losses = real(experience, credit, models, *more)
        models.policy.model.norm.weight.grad.fill_(float("inf"))
        return losses

    monkeypatch.setattr(ppo, "backward", broken)
    with pytest.raises(RunError, match=r"gradient of model.norm.weight"):
        ppo.train(config)


def test_a_full_disk_is_a_sentence_and_loses_nothing(ppo_config, monkeypatch):
    config = ppo_config(num_steps=4, eval_every=0)
    real, calls = checkpoint.save_file, []

    def full(tensors, path):
        calls.append(path)
        if len(calls) > 4:  # weights and moments of policy and critic; then the second checkpoint
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        with pytest.raises(RunError, match=r"disk of .* is full.*run the same command again"):
            ppo.train(config)
    names = [p.name for p in (Path(config.output_dir) / "checkpoints").iterdir()]
    assert names == ["step-000001"]
    ppo.train(config)
    assert read_lines(config.output_dir)[-1]["step"] == 4


def test_checkpoints_hold_no_pickles_that_run_code(stopped):
    config = stopped(1)
    folder = checkpoint.list_checkpoints(_folder(config).checkpoints)[-1]
    assert {p.suffix for p in folder.iterdir()} == {".safetensors", ".json"}


def test_two_processes_do_not_share_a_folder(ppo_config, start):
    config = ppo_config("shared", num_steps=500, save_every=0, eval_every=0)
    process = start(config)
    wait_for_step(config.output_dir, 1, process)
    with pytest.raises(RunError, match="Another process is training in"):
        ppo.train(config)
    process.kill()  # a lock dies with its process
    process.communicate()
    _folder(config).release()


def test_a_stop_before_the_first_step_does_not_wait_for_it(ppo_config, monkeypatch):
    config = ppo_config(num_steps=2)
    real = RunFolder.log

    def log(self, kind, at, metrics):
        real(self, kind, at, metrics)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "log", log)
        with pytest.raises(Stopped, match="SIGTERM, before the first step"):
            ppo.train(config)
    assert [line["kind"] for line in read_lines(config.output_dir)] == ["eval"]
    ppo.train(config)


def test_a_run_that_failed_on_its_input_may_be_mended(ppo_config, tmp_path):
    with pytest.raises(ValueError, match="There is no folder"):
        ppo.train(ppo_config(model=str(tmp_path / "sft" / "model")))
    ppo.train(ppo_config(num_steps=1))


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
@pytest.mark.parametrize("damage", ["", "[1, 2]", "{a: [", "\x00\x01"])
def test_damaged_files_of_a_run(stopped, name, damage):
    config = stopped(2)
    (Path(config.output_dir) / name).write_text(damage)
    if name == "config.yaml":
        with pytest.raises(RunError, match=r"config\.yaml is damaged"):
            ppo.train(config)
    else:
        ppo.train(config)
        assert read_lines(config.output_dir)[-1]["step"] == 4


def test_a_kill_while_the_first_file_is_written_leaves_a_usable_folder(ppo_config, tmp_path):
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / ".config.yaml.new").write_text("mod")
    ppo.train(ppo_config(num_steps=1))


def test_strays_among_checkpoints_are_left_alone(stopped):
    config = stopped(1)
    folder = Path(config.output_dir) / "checkpoints"
    (folder / "step-000001-mine").mkdir()
    (folder / "step-000009.txt").write_text("")
    (folder / "step-1000000").mkdir()
    names = [p.name for p in checkpoint.list_checkpoints(_folder(config).checkpoints)]
    assert names == ["step-000001", "step-1000000"]
    (folder / "step-1000000").rmdir()
    ppo.train(config)
    found = sorted(p.name for p in folder.iterdir())
    assert found == ["step-000001-mine", "step-000003", "step-000004", "step-000009.txt"]


def test_lines_with_odd_line_breaks_survive_a_resumption(stopped):
    config = stopped(2)
    samples = Path(config.output_dir) / "samples.jsonl"
    line = json.dumps({"step": 0, "response": "a\u2028b\x85c"}, ensure_ascii=False)
    samples.write_text(line + "\n" + samples.read_text())
    ppo.train(config)
    assert samples.read_text().startswith(line + "\n")


def test_a_verdict_outlives_a_kill(ppo_config, monkeypatch):
    """Killed between the last checkpoint and the end, an early stop stays one."""
    config = ppo_config(num_steps=4, eval_every=1, guards=Guards(max_kl=1e-9), learning_rate=3e-2)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save_model", killed)
        patched.setattr(
            HeldOutEvaluation, "__call__", real_without_best(HeldOutEvaluation.__call__)
        )
        with pytest.raises(KeyboardInterrupt):
            ppo.train(config)
    ppo.train(config)
    assert read_lines(config.output_dir)[-1]["step"] == 1
    state = json.loads((Path(config.output_dir) / "run.json").read_text())
    assert "Stopped early" in state["note"]


def real_without_best(call):
    def without(self, *args):
        self.best = float("inf")
        return call(self, *args)

    return without


def test_a_full_disk_in_other_words_is_a_sentence_too(ppo_config, monkeypatch):
    def full(*_):
        raise RuntimeError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RunError, match=r"disk of .* is full"):
        ppo.train(ppo_config(num_steps=1, eval_every=0))


def test_a_folder_that_vanishes_or_cannot_be_is_a_sentence(ppo_config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"Cannot write to .*choose another folder"):
        ppo.train(ppo_config("file/inside"))
    config = ppo_config("gone", num_steps=2)
    real = RunFolder.log

    def log(self, kind, at, metrics):
        real(self, kind, at, metrics)
        shutil.rmtree(self.path)

    monkeypatch.setattr(RunFolder, "log", log)
    with pytest.raises(RunError, match=r"Cannot write to .*gone"):
        ppo.train(config)


def test_scores_that_are_no_numbers_from_the_start(ppo_config, monkeypatch):
    real = RewardModel.__call__
    monkeypatch.setattr(RewardModel, "__call__", lambda *args: real(*args) * float("nan"))
    config = ppo_config()
    problem = r"Before the first step 6 of 6 values of the held-out scores are NaN or infinite"
    with pytest.raises(RunError, match=problem):
        ppo.train(config)
    assert not (Path(config.output_dir) / "model").exists()


def test_a_model_that_starts_with_nan_is_named(ppo_config, parents, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(parents / "sft" / "model")
    model.model.norm.weight.data.fill_(float("nan"))
    shutil.copytree(parents / "sft" / "model", tmp_path / "nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ModelError, match=r"nan has weights that are infinite or not a number"):
        ppo.train(ppo_config(model=str(tmp_path / "nan")))


def test_a_last_update_that_ruins_the_model_is_not_saved(tmp_path):
    ruinous = {**SHORT, "num_steps": 1, "learning_rate": 1e30, "warmup_ratio": 0.0}
    config = reward.RewardConfig(model="tiny", output_dir=str(tmp_path / "rm"), **ruinous)
    with pytest.raises(RunError, match=r"Training diverged: .* of the held-out scores"):
        reward.train(config)
    assert not (tmp_path / "rm" / "model").exists()
    assert not (tmp_path / "rm" / "checkpoints").exists()
