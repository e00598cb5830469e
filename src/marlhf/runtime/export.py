"""Trained models as other programs load them: one plain folder, adapters merged in."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from marlhf.models.base import Model, quiet_transformers
from marlhf.models.load import load_policy, load_tokenizer
from marlhf.runs.atomic import replacing_folder
from marlhf.runs.layout import RunError, facts_of, is_run, model_folder, read_state

PROMPT = "The quick brown fox"


def export_plain(run: Path, output: Path, *, trust_code: bool = False) -> Path:
    """Save a run's model, or a model folder, as a plain folder, and check that it loads."""
    if is_run(run) and not facts_of(str(read_state(run).get("stage", ""))).writes_text:
        raise RunError(f"{run} is a reward model, which cannot write text. Give a policy's run.")
    if is_run(run) and model_folder(str(run)) == str(run):
        raise RunError(f"{run} has no model yet. Train it to the end, and export it then.")
    if output.exists():
        raise RunError(f"{output} exists. Choose another folder with -o, or remove it.")
    source = model_folder(str(run))
    model = load_policy(source, trust_remote_code=trust_code).eval()
    tokenizer = load_tokenizer(source, trust_remote_code=trust_code)
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(output) as folder:
        with quiet_transformers():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        _check_loads(folder, model, trust_code)
    return output


def _check_loads(folder: Path, model: Model, trust_code: bool) -> None:
    """Refuse a folder that transformers alone does not load as the same model."""
    with quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=trust_code
        ).eval()
        tokens = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_code)
    ids = torch.tensor([tokens(PROMPT)["input_ids"]])
    with torch.no_grad():
        same = torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-4)
    if not same:
        raise RunError(f"The model saved in {folder} computes something else when it is loaded.")


def gguf_advice(folder: Path) -> str:
    """How to make a GGUF file of a plain folder: by llama.cpp, which is no Python package."""
    return (
        f"{folder} holds the plain model. Only llama.cpp converts it to GGUF, and its converter is "
        "not on PyPI. Run\n"
        "  git clone https://github.com/ggml-org/llama.cpp\n"
        "  pip install -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt\n"
        f"  python llama.cpp/convert_hf_to_gguf.py {folder} --outfile {folder}.gguf"
    )
