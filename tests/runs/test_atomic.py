"""Files are complete or not there, on disk before their names, and never written through links."""

import errno
import os
import stat
from pathlib import Path

import pytest

from marlhf.runs.atomic import (
    append_jsonl,
    read_jsonl,
    replace_folder,
    replacing,
    replacing_folder,
    write_json,
    write_jsonl,
    write_text,
)
from marlhf.runs.layout import RunError, read_config, read_state
from marlhf.runs.read import read_run
from marlhf.runs.write import RunFolder
from marlhf.train.supervised_config import SFTConfig


def test_weights_are_as_readable_as_other_files(tmp_path):
    """safetensors makes files that nobody else can read, whatever the umask says."""
    umask = os.umask(0o022)
    try:
        with replacing_folder(tmp_path / "model") as temporary:
            file = temporary / "inner" / "model.safetensors"
            file.parent.mkdir()
            file.touch(mode=0o600)
        write_text(tmp_path / "config.yaml", "seed: 0")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "model/inner/model.safetensors").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "model/inner").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o644


def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_end(tmp_path, disk_events):
    file = tmp_path / "run.json"
    write_json(file, {"status": "running"})
    (first, temporary), *rest = disk_events
    assert first == "sync"
    assert Path(temporary).name.startswith(".run.json.")
    assert rest == [("rename", str(file)), ("sync", str(tmp_path))]


def test_a_folder_is_on_disk_with_all_in_it_before_its_name_is(tmp_path, disk_events):
    for content in ("old", "new"):
        disk_events.clear()
        temporary = tmp_path / "temporary"
        (temporary / "inner").mkdir(parents=True)
        (temporary / "inner" / "weights").write_text(content)
        final = tmp_path / "model"
        replace_folder(temporary, final)
        last_rename = max(i for i, (kind, _) in enumerate(disk_events) if kind == "rename")
        assert disk_events[last_rename] == ("rename", str(final))
        synced = {path for kind, path in disk_events[:last_rename] if kind == "sync"}
        assert synced == {
            str(path) for path in (temporary, temporary / "inner", temporary / "inner/weights")
        }
        assert disk_events[last_rename + 1 :] == [("sync", str(tmp_path))]
        assert (final / "inner/weights").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_disk_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "run.json"
    write_json(file, {"status": "running"})

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError, match="Cannot write to"):
        write_json(file, {"status": "finished"})
    assert read_state(tmp_path) == {"status": "running"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.fixture
def foreign(tmp_path):
    """A run folder from elsewhere, and a file of the user's beside it."""
    private = tmp_path / "private"
    private.write_text('{"password": 1}\n')
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"stage": "sft", "marlhf": "1", "status": "stopped"}')
    return run, private


def test_lines_are_not_added_through_a_link(foreign):
    run, private = foreign
    (run / "evaluation").mkdir()
    (run / "evaluation/t1.jsonl").symlink_to(private)
    (run / "linked").symlink_to(private.parent)
    for file in (run / "evaluation/t1.jsonl", run / "linked/private", run / "linked/new.jsonl"):
        with pytest.raises(RunError, match="symbolic link"):
            append_jsonl(file, [{"prompt": "$(touch x)"}])
        assert read_jsonl(file).rows == []
    with pytest.raises(RunError, match="symbolic link"):
        write_jsonl(run / "linked/new.jsonl", [{}])
    write_jsonl(run / "evaluation/t1.jsonl", [{"a": 1}])  # takes the link's place
    assert private.read_text() == '{"password": 1}\n'
    assert sorted(path.name for path in private.parent.iterdir()) == ["private", "run"]


def test_lines_are_not_added_through_a_link_in_a_model_folder(tmp_path):
    model, outside = tmp_path / "model", tmp_path / "outside"
    model.mkdir()
    outside.mkdir()
    (model / "config.json").write_text("{}")
    (model / "evaluation").symlink_to(outside)
    with pytest.raises(RunError, match="symbolic link"):
        append_jsonl(model / "evaluation/t1.jsonl", [{}])
    assert not list(outside.iterdir())


def test_a_pipe_is_not_waited_for(foreign):
    run, _ = foreign
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(RunError, match="is not a file"):
        append_jsonl(run / "metrics.jsonl", [{}])


def test_temporary_names_cannot_be_guessed(foreign):
    run, private = foreign
    names = set()
    for _ in range(2):
        with replacing(run / "credit.json") as temporary:
            names.add(temporary.name)
            temporary.write_text("{}")
    assert len(names) == 2
    (run / f".config.yaml.{os.getpid()}.new").symlink_to(private)
    write_text(run / "config.yaml", "seed: 0")
    assert private.read_text() == '{"password": 1}\n'


def test_nothing_is_read_through_a_link_out_of_a_run(foreign):
    run, private = foreign
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl"):
        (run / name).symlink_to(private)
    read = read_run(run)
    assert (read.config, read.train, read.samples) == ({}, [], [])
    assert "samples.jsonl is a link out of the folder and was left out" in read.problems
    assert read_config(run) == {}


def test_a_run_folder_may_be_a_link_and_have_links_inside(foreign, tmp_path):
    run, _ = foreign
    (run / "metrics-1.jsonl").write_text('{"step": 1}\n')
    (run / "metrics.jsonl").symlink_to("metrics-1.jsonl")
    (tmp_path / "mine").symlink_to(run)
    assert read_jsonl(tmp_path / "mine/metrics.jsonl").rows == [{"step": 1}]
    append_jsonl(tmp_path / "mine/eval.jsonl", [{}])


def test_training_does_not_resume_through_links(tmp_path):
    config = SFTConfig(model="tiny", output_dir=str(tmp_path / "run"))
    folder = RunFolder(tmp_path / "run", "sft", config)
    folder.log("train", 1, {})
    folder.release()
    (tmp_path / "outside").mkdir()
    folder.checkpoints.symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match="checkpoints leads out of its run folder"):
        RunFolder(tmp_path / "run", "sft", config)


def test_a_line_nested_too_deeply_is_a_sentence(tmp_path):
    nested = 1
    for _ in range(100_000):  # beyond the limit of every version of Python
        nested = {"a": nested}
    with pytest.raises(RunError, match="nested too deeply"):
        write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "x": nested}])
    (tmp_path / "metrics.jsonl").write_text("[" * 100_000 + "\n")
    assert read_jsonl(tmp_path / "metrics.jsonl").broken
