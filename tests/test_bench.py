"""The benchmarks' own code, where a mistake would cost an hour on a GPU."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"


def load(name: str, monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # its dataclasses look for themselves
    monkeypatch.syspath_prepend(str(BENCH))
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(file.stem for file in BENCH.glob("*.py")))
def test_every_benchmark_finds_what_it_imports(name, monkeypatch):
    assert load(name, monkeypatch).__doc__


def test_trl_gets_models_of_one_type(monkeypatch):
    """On a GPU our frozen models are cast; TRL's half of the benchmark would crash on them."""
    ppo_step = load("ppo_step", monkeypatch)
    monkeypatch.setattr(ppo_step, "frozen_dtype", lambda *_: torch.bfloat16)

    def types(**options) -> list[set[torch.dtype]]:
        four = ppo_step.build_four(ppo_step.SHAPES["tiny"], torch.device("cpu"), False, **options)
        return [{p.dtype for p in model.parameters()} for model in four]

    float32, mixed = {torch.float32}, {torch.float32, torch.bfloat16}
    assert types() == [float32, mixed, float32, mixed]
    assert types(cast=False) == [float32] * 4


def test_decoding_is_measured_to_the_end(monkeypatch, capsys):
    decode = load("decode", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["decode.py", "--repeats=1", "--only", "marlhf native"])
    monkeypatch.setitem(decode.SHAPES, "tiny", decode.Shape(32, 1, 2, 1, 32, 64, 8, 8, 4))
    monkeypatch.setattr(decode, "LONGEST", 12)
    decode.main()
    assert "ms a step" in capsys.readouterr().out


def test_kernels_are_compared_with_what_they_replaced(monkeypatch):
    kernels = load("llama_kernels", monkeypatch)
    monkeypatch.setattr(kernels, "TOKENS", 128)
    called = []
    monkeypatch.setattr(kernels, "microseconds", lambda work: called.append(work()) or 1.0)
    assert kernels.attention(32, "cpu") == [1.0] * 4
    ours, theirs = called[1][0], called[0].transpose(1, 2)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    monkeypatch.setattr(kernels.layer_kernels, "attention", lambda *_: (ours + 1, called[1][1]))
    with pytest.raises(SystemExit, match="other numbers"):
        kernels.attention(32, "cpu")
