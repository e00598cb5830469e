"""The benchmarks' own code, where a mistake would cost an hour on a GPU."""

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

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
    shape = decode.Shape(32, 1, 2, 1, 32, 64, 8, 8, 4, longest=12)
    monkeypatch.setitem(decode.SHAPES, "tiny", shape)
    decode.main()
    assert "ms a step" in capsys.readouterr().out


def test_conversations_are_measured_beside_one_response(monkeypatch, capsys):
    turns = load("turns", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["turns.py", "--shape=tiny", "--repeats=1", "--rows=3"])
    monkeypatch.setitem(turns.SHAPES, "tiny", turns.Shape(32, 1, 2, 1, 32, 64, 8, 8, 4))
    turns.main()
    found = capsys.readouterr().out
    assert "4 turns of 4, replies of 2" in found
    assert "one response of 22" in found  # 16 sampled, and six of the world's


def test_steps_without_a_critic_are_measured_beside_rloo(monkeypatch, capsys):
    bench = load("monte_carlo_step", monkeypatch)
    small = bench.ppo_step.Shape("LlamaConfig", 32, 1, 2, 1, 16, 32, 512, 4, 4, 8, 512)
    monkeypatch.setattr(sys, "argv", ["monte_carlo_step.py", "--tiny", "--rounds=1"])
    monkeypatch.setitem(bench.ppo_step.SHAPES, "tiny", small)
    bench.main()
    found = capsys.readouterr().out
    assert "the best of each" in found
    assert found.count("continuation_kl: false") == 2


def test_agreement_with_continuations_is_by_thirds(monkeypatch, capsys):
    bench = load("answer_values", monkeypatch)
    values = torch.tensor([0.0, 1.0, 0.25, 0.75, 1.0, 0.0])
    drawn = torch.rand(6, 1000, generator=torch.Generator().manual_seed(0))
    third = torch.tensor([0, 0, 1, 1, 2, 2])
    bench.print_agreement(
        (drawn < values[:, None]).float(), third, {"same": values, "not": -values}
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [line[-4] for line in lines] == ["1.00"] * 4
    assert [line[-2] for line in lines] == ["-1.00"] * 4


def test_a_profile_tells_kernels_and_idle_time(monkeypatch, capsys):
    """Two kernels overlap by 10 us; before the first of them the GPU does nothing for 50."""
    ppo_step = load("ppo_step", monkeypatch)
    times = [("void fill<int>(float)", 0, 100), ("_add", 150, 300), ("_add", 290, 310)]
    events = [
        SimpleNamespace(
            name=name,
            time_range=SimpleNamespace(start=start, end=end),
            device_type="DeviceType.CUDA",
        )
        for name, start, end in times
    ]
    found = SimpleNamespace(events=lambda: [*events, SimpleNamespace(device_type="CPU")])
    monkeypatch.setattr(ppo_step, "profile", lambda **_: nullcontext(found))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ppo_step.print_profile(SimpleNamespace(step=lambda _: None))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines[0][-2:] == ["0.3", "ms"]
    assert lines[1:4] == [
        ["0.16", "2", "_add"],
        ["0.10", "1", "fill"],
        ["0.26", "3", "all", "kernels"],
    ]
    assert lines[4][:2] == ["0.05", "1"]
    assert lines[5] == ["0.05", "at", "0.1,", "fill", "->", "_add"]
