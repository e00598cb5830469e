"""A GPU that runs out of memory: smaller passes with the same results, or a sentence."""

import pytest
import torch

from conftest import TOY, assert_close, read_lines
from marlhf.train import dpo, experience, ppo, reward, rloo, sft
from marlhf.train.distributed import World
from marlhf.train.memory import OutOfMemory, fit_memory
from marlhf.train.stages import METHODS

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
PASSES = {
    "token_stats": (ppo, rloo, sft, dpo, experience),
    "token_values": (ppo,),
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
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB. From here" in words
    assert "changes no result. Set token_budget so for the next run." in words


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
