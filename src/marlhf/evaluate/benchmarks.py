"""Published benchmarks by EleutherAI's lm-eval: the real package, run on a model folder."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from marlhf.evaluate.eval_plan import EvaluationError
from marlhf.models.adapter_files import adapter_base
from marlhf.runs.layout import EVALUATION, is_run, model_folder


def lm_eval_command(
    run: Path, tasks: str, *, device: str = "auto", seed: int = 0, trust_code: bool = False
) -> list[str]:
    """The command line of lm-eval for a run, a model folder or a name on the hub."""
    model = model_folder(str(run))
    base = adapter_base(model)
    args = f"pretrained={model}" if base is None else f"pretrained={base},peft={model}"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", args]
    command += ["--tasks", tasks, "--seed", str(seed), "--batch_size", "8"]
    command += [] if device == "auto" else ["--device", device]
    command += ["--trust_remote_code"] if trust_code else []
    if is_run(run):
        command += ["--output_path", str(run / EVALUATION / "lm_eval")]
    return command


def run_lm_eval(command: list[str]) -> None:
    """Run lm-eval, which prints its table; an error where it is missing or fails."""
    if importlib.util.find_spec("lm_eval") is None:
        raise EvaluationError(
            "--lm-eval needs lm-eval, which is not installed. Run `pip install 'marlhf[lm-eval]'`."
        )
    status = subprocess.run(command, check=False).returncode
    if status:
        raise EvaluationError(f"lm-eval failed (exit status {status}): see its message above.")
