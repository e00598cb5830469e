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


def test_credit_without_sampling_is_what_samples_show(monkeypatch):
    """Cosines from all episodes of a small game, against batches that are drawn."""
    exact = load("exact_credit", monkeypatch)
    monkeypatch.setattr(exact, "NUMBERS", range(1, 4))
    monkeypatch.setattr(exact.game, "TURNS", 2)
    episodes = list(exact.episodes())
    assert len(episodes) == 3 * (1 + 2 * 3)
    contexts = {e.history(k): 0 for e in episodes for k in range(len(e.guesses))}
    contexts = {history: i for i, history in enumerate(contexts)}
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(len(contexts), 3, generator=generator).double() + 0.2
    chances /= chances.sum(dim=1, keepdim=True)
    slope = torch.eye(3).double() - chances[:, None]
    scores = (slope @ torch.randn(len(contexts), 3, 5, generator=generator).double()).flatten(0, 1)
    probability = torch.full((len(episodes),), 1 / 3).double()
    real, pairs = torch.zeros(len(episodes), 2).bool(), torch.zeros(len(episodes), 2).long()
    mask, rewards = torch.zeros(len(episodes), 4).bool(), torch.zeros(len(episodes), 4).double()
    for i, episode in enumerate(episodes):
        mask[i, : 2 * len(episode.guesses)] = True
        rewards[i, 2 * len(episode.guesses) - 1] = episode.guesses[-1] == episode.number
        for k, guess in enumerate(episode.guesses):
            context = contexts[episode.history(k)]
            probability[i] *= chances[context, guess - 1]
            pairs[i, k], real[i, k] = 3 * context + guess - 1, True
    assert float(probability.sum()) == pytest.approx(1)
    earned = rewards.sum(dim=1)
    before, after = exact.expected(pairs, real, probability, earned, chances.numel())
    values = torch.stack((before[pairs], after[pairs]), dim=2).flatten(1) * mask
    turns = torch.tensor([True, False, True, False]).expand_as(mask) & mask
    at = torch.tensor([0, 2]).expand(len(episodes), -1)
    products = (scores @ scores.T)[pairs[:, :, None], pairs[:, None, :]]
    number = torch.tensor([episode.number for episode in episodes])
    error = torch.randn(2, chances.numel(), generator=generator) / 2
    noisy = torch.stack((error[0][pairs - pairs % 3], error[1][pairs]), dim=2).flatten(1) * mask
    noisy = noisy + values  # a critic errs by state
    played = exact.Game(
        probability, number, rewards, mask, turns, at, real, pairs, scores.float(), products,
        noisy, values, 1.0, 1.0,
    )  # fmt: skip
    rows = {row["name"]: row for row in exact.measure([played], 8)["rows"]}
    assert all(
        rows[name]["without_noise"] == pytest.approx(1, abs=1e-4)
        for name in rows
        if name.startswith(("exact", "rloo")) or name.endswith("lam=1")
    )
    # Batches of eight: two groups of four for RLOO, eight of any number for the others.
    draws, size = 20_000, 4
    of_episode = torch.zeros(len(episodes), 5).double()
    for k in range(2):
        of_episode += scores[pairs[:, k]] * real[:, k, None]
    true = (probability * earned) @ of_episode
    weights = exact.ways(played)["turns lam=0.5"]
    by_way = sum(weights[:, k, None] * scores[pairs[:, k]] for k in range(2))
    drawn = torch.multinomial(probability, 8 * draws, replacement=True, generator=generator)
    batches = by_way[drawn].view(draws, 8, 5).mean(dim=1)
    cosine = (batches @ true).mean() / batches.square().sum(dim=1).mean().sqrt() / true.norm()
    assert rows["turns lam=0.5"]["cosine"] == pytest.approx(float(cosine), rel=0.03)
    groups = []
    for _ in range(2):
        which = torch.randint(3, (draws,), generator=generator) + 1
        by_number = (number == which[:, None]) * probability
        drawn = torch.multinomial(by_number, size, replacement=True, generator=generator)
        others = (earned[drawn].sum(dim=1, keepdim=True) - earned[drawn]) / (size - 1)
        groups.append(((earned[drawn] - others)[:, :, None] * of_episode[drawn]).mean(dim=1))
    batches = torch.stack(groups).mean(dim=0)
    cosine = (batches @ true).mean() / batches.square().sum(dim=1).mean().sqrt() / true.norm()
    assert rows["rloo 4"]["cosine"] == pytest.approx(float(cosine), rel=0.03)
