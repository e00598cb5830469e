import gc
import json
import weakref

import pytest

from marlhf.runtime.collector import collector_paused, keep_imported, resume_collector


@pytest.fixture(autouse=True)
def as_before():
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()
    gc.unfreeze()  # what conftest.py froze may be searched once more, which is only slower


class Node:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_nothing_is_collected_before_the_first_step():
    gc.enable()
    with collector_paused():
        assert not gc.isenabled()
        resume_collector()
        assert gc.isenabled()
        resume_collector()  # at every further step
    assert gc.isenabled()


def test_the_collector_is_back_when_a_command_fails_before_its_first_step():
    gc.enable()
    with pytest.raises(ValueError, match="no such file"), collector_paused():
        raise ValueError("no such file")
    assert gc.isenabled()


def test_who_switched_the_collector_off_keeps_it_off():
    gc.disable()
    with collector_paused():
        resume_collector()
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_what_a_stage_loads_is_freed_after_it():
    """Models have cycles of references, and a recipe may have several stages of large ones."""
    gc.enable()
    with collector_paused():
        imported = Node()
        keep_imported()
        model = Node()
        resume_collector()  # after the first step
        keep_imported()  # the next stage begins
        nodes = [weakref.ref(imported), weakref.ref(model)]
        del imported, model
        gc.collect()
        assert [node() is None for node in nodes] == [False, True]


def test_a_run_leaves_the_collector_on(tmp_path, monkeypatch):
    """From the command to the first step it is off, and on while the others run."""
    from typer.testing import CliRunner

    from marlhf.cli import app
    from marlhf.runtime.loop import Loop

    gc.enable()
    states = []
    log = Loop.log

    def watched(self: Loop, *args, **kwargs):
        states.append(gc.isenabled())
        log(self, *args, **kwargs)
        states.append(gc.isenabled())

    monkeypatch.setattr(Loop, "log", watched)
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {i}.", "chosen": str(i)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(
        "output_dir: runs/one\n"
        "stages:\n"
        "  sft: {model: tiny, batch_size: 2, num_steps: 2, eval_every: 0,\n"
        "        data: {path: rows.jsonl, parts: {}, eval_size: 2}}\n"
    )
    result = CliRunner().invoke(app, ["run", str(recipe)])
    assert result.exit_code == 0, result.output
    assert states == [False, True, True, True]
    assert gc.isenabled()
