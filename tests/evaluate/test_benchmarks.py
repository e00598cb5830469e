"""`marlhf evaluate --lm-eval`: the command line that it starts, and what it says without it."""

import importlib.util
import json
import sys

import pytest

from marlhf.cli import main
from marlhf.evaluate.benchmarks import lm_eval_command, run_lm_eval


@pytest.fixture
def run(tmp_path):
    """A run folder with a model in it, as far as its files say."""
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "run.json").write_text('{"stage": "ppo", "status": "finished"}')
    return folder


@pytest.fixture
def lm_eval(tmp_path, monkeypatch):
    """A module of that name, which writes down its arguments."""
    (tmp_path / "lm_eval.py").write_text(
        "import json, os, sys\n"
        "open(os.environ['HEARD'], 'w').write(json.dumps(sys.argv[1:]))\n"
        "sys.exit(3 if 'broken' in sys.argv else 0)\n"
    )
    monkeypatch.setenv("HEARD", str(tmp_path / "heard.json"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "heard.json"


def test_the_command_names_the_model_the_tasks_and_where_results_go(run, lm_eval, monkeypatch):
    command = ["marlhf", "evaluate", str(run), "--lm-eval", "gsm8k,ifeval", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    heard = json.loads(lm_eval.read_text())
    options = dict(zip(heard[::2], heard[1::2], strict=True))
    assert options == {
        "--model": "hf",
        "--model_args": f"pretrained={run / 'model'}",
        "--tasks": "gsm8k,ifeval",
        "--seed": "0",
        "--batch_size": "8",
        "--device": "cpu",
        "--output_path": str(run / "evaluation/lm_eval"),
    }


def test_an_adapter_is_put_on_its_base(run):
    (run / "model/adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    command = lm_eval_command(run, "gsm8k")
    assert f"pretrained=owner/base,peft={run / 'model'}" in command


def test_a_model_folder_needs_no_run(tmp_path):
    command = lm_eval_command(tmp_path, "gsm8k", trust_code=True)
    assert f"pretrained={tmp_path}" in command
    assert "--trust_remote_code" in command
    assert "--output_path" not in command


def test_its_failure_and_its_absence_are_sentences(run, lm_eval, monkeypatch):
    with pytest.raises(ValueError, match=r"lm-eval failed \(exit status 3\)"):
        run_lm_eval([*lm_eval_command(run, "gsm8k"), "broken"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'marlhf\[lm-eval\]'"):
        run_lm_eval(lm_eval_command(run, "gsm8k"))
