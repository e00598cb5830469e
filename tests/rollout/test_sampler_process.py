"""Sampling in a second process: the weights of when it began, and what happens when it dies."""

import os
import signal
from contextlib import contextmanager

import pytest
import torch
from torch import multiprocessing

from forked import fork_samplers
from marlhf.config.stage import LoRA
from marlhf.models.adapters import FrozenBaseModel
from marlhf.models.tiny import tiny_model
from marlhf.rollout import Sampling
from marlhf.rollout.native import NativeEngine
from marlhf.rollout.sampler_process import SamplerError, SamplerProcess

pytestmark = pytest.mark.xdist_group("forked")  # one process, so that one sampler starts
PROMPTS, SEEDS, ENDS = [[5, 6, 7], [8, 9]], [3, 4], [1]
SAMPLING = Sampling(max_new_tokens=12, temperature=0.9)


@contextmanager
def sampling_from(policy):
    process = SamplerProcess(policy, ENDS, 0)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def running():
    """A policy and its sampler, for all tests that leave it as it was."""
    policy = tiny_model()
    with pytest.MonkeyPatch.context() as patched, sampling_from(policy) as process:
        patched.setattr(multiprocessing, "get_context", fork_samplers())
        process.begin(PROMPTS, SAMPLING, SEEDS)()
        patched.undo()
        yield policy, process


def assert_same(found, expected):
    assert found.responses == expected.responses
    assert torch.equal(found.logprobs, expected.logprobs)
    assert torch.equal(found.ended, expected.ended)


def move(policy):
    """Change every weight that trains, in place, as an optimiser does."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator)


def adapted():
    base = FrozenBaseModel(tiny_model(), "tiny")
    policy, _ = base.language_model(LoRA(r=4)), base.scalar_model(LoRA(r=4))
    move(policy)  # a fresh adapter changes nothing
    return policy


def assert_samples_of_when_it_began(policy, process):
    before = NativeEngine(policy, ENDS, 0).generate(PROMPTS, SAMPLING, SEEDS)
    finish = process.begin(PROMPTS, SAMPLING, SEEDS)
    move(policy)
    assert_same(finish(), before)
    after = NativeEngine(policy, ENDS, 0).generate(PROMPTS, SAMPLING, SEEDS)
    assert after.responses != before.responses
    assert_same(process.begin(PROMPTS, SAMPLING, SEEDS)(), after)


def test_responses_are_those_of_the_weights_when_it_began(running):
    assert_samples_of_when_it_began(*running)


def test_adapters_are_copied_and_their_base_is_not(forked_samplers):
    base = FrozenBaseModel(tiny_model(), "tiny")
    policy, _ = base.language_model(LoRA(r=4)), base.scalar_model(LoRA(r=4))
    open_files = len(os.listdir("/proc/self/fd"))
    with sampling_from(policy) as process:
        assert_samples_of_when_it_began(policy, process)
        assert len(os.listdir("/proc/self/fd")) < open_files + 20  # not one per weight
        ours, theirs = policy.module.lm_head.weight, process.copy.module.lm_head.weight
        assert ours.data_ptr() == theirs.data_ptr()
        for ours, theirs in zip(policy.parameters(), process.copy.parameters()):
            assert ours.data_ptr() != theirs.data_ptr()


def test_an_error_of_the_process_is_raised_here(running):
    _, process = running
    with pytest.raises(SamplerError, match=r"Sampling ahead failed: IndexError.*same command"):
        process.begin([[10**6]], SAMPLING, [0])()
    process.begin(PROMPTS, SAMPLING, SEEDS)()  # and it still samples


def test_a_signal_for_the_main_program_does_not_end_it(running):
    policy, process = running
    process.begin(PROMPTS, SAMPLING, SEEDS)()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.process.pid, number)
    expected = NativeEngine(policy, ENDS, 0).generate(PROMPTS, SAMPLING, SEEDS)
    assert_same(process.begin(PROMPTS, SAMPLING, SEEDS)(), expected)


def test_a_killed_process_is_a_sentence(forked_samplers):
    with sampling_from(tiny_model()) as process:
        finish = process.begin(PROMPTS, SAMPLING, SEEDS)
        os.kill(process.process.pid, signal.SIGKILL)
        with pytest.raises(SamplerError, match=r"was killed or failed \(status -9\).*same command"):
            finish()
        with pytest.raises(SamplerError, match="was killed"):
            process.begin(PROMPTS, SAMPLING, SEEDS)()


SCRIPT = """
import os, signal, sys
os.dup2(os.open(sys.argv[1], os.O_WRONLY), 1)
from marlhf.models.tiny import tiny_model
from marlhf.rollout import Sampling
from marlhf.rollout.sampler_process import SamplerProcess

print("script", flush=True)  # no `if __name__ == "__main__":`, as in most scripts
sampler = SamplerProcess(tiny_model(), [1], 0)
sampler.begin([[5, 6]], Sampling(max_new_tokens=4), [0])()
print("sampled", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_script_runs_once_and_its_sampler_ends_with_it(tmp_path, fork_server):
    """The sampler is a new process, which must not run the script again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "output")
    script = fork_server.start(str(tmp_path / "script.py"), str(tmp_path / "output"))
    # It ends when both processes have ended.
    assert (tmp_path / "output").read_text() == "script\nsampled\n"
    _, errors = script.communicate(timeout=60)
    assert script.returncode == -signal.SIGKILL, errors
