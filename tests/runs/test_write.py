"""What a run folder records about the code that made it."""

import re
import subprocess

from marlhf._version import __version__
from marlhf.runs import write
from marlhf.runs.layout import read_state
from marlhf.train.supervised_config import SFTConfig


def test_a_run_records_the_version_and_the_commit(tmp_path):
    write.RunFolder(tmp_path / "run", "sft", SFTConfig(output_dir=str(tmp_path / "run"))).release()
    state = read_state(tmp_path / "run")
    assert state["marlhf"] == __version__
    assert state["commit"] == write.commit()


def test_the_commit_is_that_of_the_checkout_and_none_elsewhere(tmp_path, monkeypatch):
    package = tmp_path / "src" / "marlhf"
    (package / "runs").mkdir(parents=True)
    monkeypatch.setattr(write, "__file__", str(package / "runs" / "write.py"))
    write.commit.cache_clear()
    assert write.commit() is None

    def git(*words: str) -> None:
        user = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *user, *words], cwd=tmp_path, check=True, capture_output=True)

    (package / "runs" / "write.py").write_text("one")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    write.commit.cache_clear()
    clean = write.commit() or ""
    assert re.fullmatch("[0-9a-f]{40}", clean)
    (package / "runs" / "write.py").write_text("two")
    write.commit.cache_clear()
    assert write.commit() == f"{clean}-dirty"
    write.commit.cache_clear()
