"""`marlhf export`: plain folders that transformers loads alone."""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from marlhf import LoRA, SFTConfig
from marlhf.cli import main
from marlhf.models.load import load_policy
from marlhf.runtime import publish
from marlhf.train import sft
from small_runs import TOY


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An SFT run that kept an adapter alone."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    settings = {"batch_size": 4, "num_steps": 2, "learning_rate": 1e-2, "save_every": 0}
    lora = LoRA(r=2, merge=False)
    sft.train(SFTConfig(model="tiny", output_dir=str(folder), data=TOY, lora=lora, **settings))
    return folder


def command(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["marlhf", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_an_adapter_becomes_a_plain_model(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "deep" / "plain"
    assert command(monkeypatch, "export", str(run), "--to", "vllm", "-o", str(out)) == 0
    assert f"next: vllm serve {out}" in capsys.readouterr().err
    ids = torch.tensor([AutoTokenizer.from_pretrained(out)("Tell me")["input_ids"]])
    plain = AutoModelForCausalLM.from_pretrained(out)
    assert not list(out.glob("adapter*"))
    torch.testing.assert_close(plain(ids).logits, load_policy(str(run / "model"))(ids).logits)
    assert command(monkeypatch, "export", str(run), "--to", "vllm", "-o", str(out)) == 1
    assert f"{out} exists" in capsys.readouterr().err


def test_gguf_says_which_command_makes_it(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "export", str(run), "--to", "gguf", "-o", "plain") == 1
    assert (tmp_path / "plain/model.safetensors").is_file()
    said = capsys.readouterr().err
    assert "python llama.cpp/convert_hf_to_gguf.py plain --outfile plain.gguf" in said


def test_a_folder_that_computes_something_else_is_not_kept(run, tmp_path, monkeypatch):
    real = publish.load_policy

    def other(*args, **options):
        model = real(*args, **options)
        save = model.save_pretrained

        def save_changed(folder):
            with torch.no_grad():
                model.lm_head.weight.mul_(2)
            save(folder)
            with torch.no_grad():
                model.lm_head.weight.div_(4)

        model.save_pretrained = save_changed
        return model

    monkeypatch.setattr(publish, "load_policy", other)
    with pytest.raises(RuntimeError, match="computes something else"):
        publish.export_plain(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_policy_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"stage": "reward"}')
    with pytest.raises(RuntimeError, match="is a reward model, which cannot write text"):
        publish.export_plain(tmp_path, tmp_path / "out")
    (tmp_path / "run.json").write_text('{"stage": "ppo"}')
    with pytest.raises(RuntimeError, match="has no model yet"):
        publish.export_plain(tmp_path, tmp_path / "out")
