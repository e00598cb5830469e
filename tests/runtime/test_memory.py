"""A GPU that runs out of memory: smaller passes with the same results, or a sentence."""

import pytest
import torch

from marlhf.models.load import load_policy
from marlhf.runs.write import RunFolder
from marlhf.runtime.distributed import World
from marlhf.runtime.loop import Loop
from marlhf.runtime.memory import (
    OutOfMemory,
    fit_memory,
    seek_token_budget,
    settle_token_budget,
)
from marlhf.runtime.stage import NO_OBJECTS
from marlhf.train import dpo, ppo, reward, rl_models, sft
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.stages import METHODS
from small_runs import TOY, assert_close, read_lines

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
PASSES = {
    "token_stats": (sft, dpo, rl_models),
    "token_values": (rl_models,),
    "final_scores": (reward,),
}
"""The forward passes of training, and the modules that call them."""


@pytest.fixture
def limit_passes(monkeypatch):
    """`limit_passes(n)`: a pass over more than n padded tokens meets the end of memory."""
    failures: list[int] = []

    def limit(tokens: int) -> list[int]:
        def limited(forward):
            def call(model, sequences, *rest, **more):
                size = len(sequences.total_lengths) * max(sequences.total_lengths)
                if size > tokens:
                    failures.append(size)
                    raise torch.OutOfMemoryError(MESSAGE)
                return forward(model, sequences, *rest, **more)

            return call

        for name, modules in PASSES.items():
            for module in modules:
                monkeypatch.setattr(module, name, limited(getattr(module, name)))
        return failures

    return limit


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_ppo_epochs": 2, "num_mini_batches": 2},
        {"credit": "auto", "num_mini_batches": 2},
    ],
)
def test_ppo_halves_its_passes_and_learns_the_same(ppo_config, limit_passes, capfd, change):
    settings = {"num_steps": 2, "eval_every": 0, "save_every": 0, **change}
    ppo.train(ppo_config("whole", **settings))
    failures = limit_passes(150)
    ppo.train(ppo_config("limited", **settings))
    assert failures
    whole, limited = (read_lines(ppo_config(name).output_dir) for name in ("whole", "limited"))
    assert_close(whole, limited, 1e-4)
    words = " ".join(capfd.readouterr().err.split())
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB. For now" in words
    assert "changes no result. Where no other program takes memory, set token_budget so." in words


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo", "rloo"])
def test_other_methods_halve_their_passes_too(kind, ppo_config, parents, tmp_path, limit_passes):
    common = {"data": TOY, "batch_size": 8, "num_steps": 2, "eval_every": 0, "save_every": 0}
    common["model"] = str(parents / "sft" / "model")
    if kind == "rloo":
        like = ppo_config()
        common |= {"reward_model": like.reward_model, "sampling": like.sampling, "num_samples": 2}

    def train(name: str) -> list[dict]:
        folder = str(tmp_path / name)
        METHODS[kind].train(METHODS[kind].config(**common, output_dir=folder))
        return read_lines(folder)

    whole = train("whole")
    # A pass over pairs holds both responses, and is cut by the longer of them.
    failures = limit_passes(300 if kind in ("reward", "dpo") else 150)
    assert_close(whole, train("limited"), 1e-4)
    assert failures


def test_one_row_that_does_not_fit_is_a_sentence(ppo_config, limit_passes):
    limit_passes(10)
    config = ppo_config(token_budget=512, eval_every=0, eval_prompts=2)
    with pytest.raises(OutOfMemory, match=r"Out of memory: Tried to allocate 2.00 GiB") as refused:
        METHODS["ppo"].train(config)
    for setting in ("token_budget (512)", "rollout_tokens", "gradient_checkpointing", "lora"):
        assert setting in str(refused.value)


def test_with_several_processes_the_error_is_raised_as_it_is():
    def fail() -> None:
        raise torch.OutOfMemoryError(MESSAGE)

    world = World(torch.device("cpu"), size=2)
    world.batches([5] * 8, 100)
    with pytest.raises(torch.OutOfMemoryError):
        fit_memory(world, fail)
    assert world.pass_limit.tokens is None


def test_gradients_of_a_failed_pass_are_dropped():
    world, layer = World(torch.device("cpu")), torch.nn.Linear(1, 1)
    tries: list[int] = []

    def compute() -> int:
        [*micros] = world.batches([5] * 8, 40)
        tries.append(len(micros))
        layer(torch.ones(1)).backward()
        if len(tries) < 3:
            raise torch.OutOfMemoryError("")
        return len(micros)

    assert fit_memory(world, compute, layer) == 4
    assert tries == [1, 2, 4]
    assert layer.weight.grad is not None
    assert float(layer.weight.grad) == 1.0


def test_passes_grow_again_once_another_program_has_left():
    """Eight rows fit, but while somebody else has the memory only two do."""
    world = World(torch.device("cpu"))
    fits, sizes = 8, []

    def compute() -> None:
        sizes.append(max(len(micro.rows) for micro in world.batches([5] * 8, 40)))
        if sizes[-1] > fits:
            raise torch.OutOfMemoryError("")

    fits = 2
    fit_memory(world, compute)
    assert sizes == [8, 4, 2]
    fits = 8
    for _ in range(3 * 32):
        fit_memory(world, compute)
    assert sizes[3:36] == [2] * 31 + [4] * 2
    assert sizes[-1] == 8
    assert world.pass_limit.tokens is None


def test_a_small_gpu_is_asked_for_larger_passes_less_and_less_often():
    world, sizes = World(torch.device("cpu")), []

    def compute() -> None:
        sizes.append(max(len(micro.rows) for micro in world.batches([5] * 8, 40)))
        if sizes[-1] > 4:
            raise torch.OutOfMemoryError("")

    for _ in range(1000):
        fit_memory(world, compute)
    tries = [i for i, size in enumerate(sizes) if size == 8]
    assert len(tries) == 6  # the first, and after 32, 64, 128, 256 and 512 computations


class FakeGPU:
    """The memory of a GPU as torch would report it: bytes in use, their peak, and what is free."""

    def __init__(self, monkeypatch, free: int) -> None:
        self.used = self.peak = 0
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.used)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.used)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - self.used, free))

    def reset(self, device) -> None:
        self.peak = self.used

    def take(self, count: int, keep: int = 0) -> None:
        """Use so many bytes for a while, and keep some of them."""
        self.peak = max(self.peak, self.used + count)
        self.used += keep


def auto_run(world: World, tmp_path) -> tuple[PPOConfig, RunFolder]:
    config = PPOConfig(model="tiny", reward_model="x", output_dir=str(tmp_path))
    run = RunFolder(config.output_dir, "ppo", config)
    seek_token_budget(world, run, load_policy("tiny"))
    return config, run


def test_the_token_budget_grows_to_what_memory_holds(monkeypatch, tmp_path):
    world, gpu = World(torch.device("cuda")), FakeGPU(monkeypatch, free=1 << 40)
    config, run = auto_run(world, tmp_path)
    lengths = [96] * 400

    def compute() -> int:
        micros = world.batches(lengths, config.pass_tokens)
        for number, micro in enumerate(micros):  # 1 MiB a token, and gradients of 5 GiB
            gpu.take(len(micro.rows) * 96 << 20, keep=0 if number else 5 << 30)
        gpu.used -= 5 << 30
        return len(micros)

    assert fit_memory(world, compute) == 3  # of 16384 tokens
    settle_token_budget(config.pass_tokens, world, run)
    # Half of the memory at 1 MiB a token, give or take the gradients, as a power of two.
    assert world.pass_limit.auto_tokens == 1 << 18
    assert fit_memory(world, compute) == 1
    run.log("train", 2, {})
    run.finish("stopped")

    again = World(torch.device("cuda"))
    auto_run(again, tmp_path)
    assert again.pass_limit.auto_tokens == 1 << 18
    assert not again.pass_limit.watching


def test_passes_of_a_large_model_are_small_however_much_memory_there_is(tmp_path):
    world, large = World(torch.device("cuda")), load_policy("tiny")
    large.config.hidden_size = 1536
    run = RunFolder(str(tmp_path), "ppo", PPOConfig(model="tiny", output_dir=str(tmp_path)))
    seek_token_budget(world, run, large)
    world.pass_limit.auto_tokens = 1 << 18
    assert [len(micro.rows) for micro in world.batches([512] * 20, 16384)] == [8, 8, 4]


def test_a_model_that_leaves_little_room_keeps_its_passes(monkeypatch, tmp_path):
    world, gpu = World(torch.device("cuda")), FakeGPU(monkeypatch, free=1 << 33)
    config, run = auto_run(world, tmp_path)

    def compute() -> None:
        world.batches([100] * 400, config.pass_tokens)
        gpu.take(1 << 33)

    fit_memory(world, compute)
    settle_token_budget(config.pass_tokens, world, run)
    assert world.pass_limit.auto_tokens == config.pass_tokens


@pytest.mark.parametrize(
    ("device", "size", "change"),
    [
        ("cpu", 1, {}),
        ("cuda", 2, {}),
        ("cuda", 1, {"token_budget": 4096}),
        ("cuda", 1, {"deterministic": True}),
    ],
)
def test_nothing_is_measured_on_a_cpu_by_several_or_with_a_number(device, size, change, tmp_path):
    world, model = World(torch.device(device), size=size), load_policy("tiny")
    config = PPOConfig(model="tiny", reward_model="x", output_dir=str(tmp_path), **change)
    Loop(
        RunFolder(config.output_dir, "ppo", config),
        config,
        world,
        total=10,
        models={"policy": model},
        optimizers={"policy": torch.optim.AdamW(model.parameters())},
        tokenizer=None,
        objects=NO_OBJECTS,
        rows=(64, 0),
        metric="score",
    )
    assert not world.pass_limit.watching
    assert world.pass_limit.auto_tokens is None
