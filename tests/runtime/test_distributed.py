"""Two processes are one: the same numbers, whichever way the weights lie, and no one left waiting.

Started by torchrun, this file is one of the processes: starting them takes most of the
time, so one launch does everything that two processes have to do.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from marlhf import trainers
from marlhf.config.stage import LoRA
from marlhf.core import Constituents, Entropy, NGram, RandomNGram, ValueChange
from marlhf.data import DataConfig
from marlhf.reward.code import unit_tests
from marlhf.rollout import Sampling
from marlhf.train.ppo_config import CriticPretraining
from marlhf.train.stages import METHODS

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.xdist_group("forked"),  # one process, so that runs are launched once
]
TRAINERS = {
    kind.stage: kind
    for kind in (
        *(trainers.SFTTrainer, trainers.RewardTrainer, trainers.DPOTrainer),
        *(trainers.MacroPPOTrainer, trainers.RLOOTrainer, trainers.GRPOTrainer),
        trainers.OnlineDPOTrainer,
    )
}
WAYS = ("data", "fsdp")
COMMON = {
    "data": DataConfig(source="toy", limit=200, eval_size=7),
    "batch_size": 6,
    "num_steps": 3,
    "eval_every": 2,
    "save_every": 2,
    "schedule": "constant",
    "warmup_ratio": 0.0,
    "learning_rate": 1e-3,
    "token_budget": 300,
    "device": "cpu",
}
RL = {"eval_prompts": 5, "log_samples": 1, "sampling": Sampling(max_new_tokens=8)}
OWN = {
    "ppo": RL | {"critic_learning_rate": 1e-3, "num_mini_batches": 2, "segmenter": RandomNGram()},
    "rloo": RL | {"num_samples": 2},
    "grpo": RL | {"num_samples": 2},
    "online-dpo": RL | {"num_mini_batches": 2},
}
BRIEF = {"num_steps": 2, "eval_every": 0, "save_every": 0}  # the last step begins after an update
# A process reward model has rows of its own, in tests/train/test_prm.py.
RUNS = {kind: (kind, {}) for kind in METHODS if kind != "prm"} | {
    "uneven": ("ppo", BRIEF | {"batch_size": 3, "num_mini_batches": 1}),
    "few": ("ppo", BRIEF | {"batch_size": 1, "num_mini_batches": 1, "eval_prompts": 1}),
    "few-pairs": ("reward", BRIEF | {"batch_size": 1}),
    "tree": ("rloo", BRIEF | {"num_samples": 4, "tree": (2, 2), "segmenter": NGram(2)}),
    "constituents": ("ppo", BRIEF | {"segmenter": Constituents(max_length=6)}),
    "entropy": (
        "ppo",
        BRIEF
        | {"segmenter": Entropy(0.7), "lam": "adaptive", "lam_alpha": 0.5}
        # Each response is an example: the reward is minus its length.
        | {"positive_lm_coef": 0.1, "positive_score": -9.0},
    ),
    "values": ("ppo", BRIEF | {"segmenter": ValueChange(0.7)}),
    "dynamic": ("rloo", BRIEF | {"num_samples": 2, "dynamic_sampling": 2, "update_share": 0.5}),
    "lora": ("ppo", {"lora": LoRA(r=2)}),
    "pretrained": (
        "ppo",
        BRIEF
        | {
            "critic_pretraining": CriticPretraining(responses=40, epochs=2, until=1.0),
            "critic_replay": 1,
        },
    ),
    "lora-reward": ("reward", BRIEF | {"lora": LoRA(r=2, merge=False)}),
    "lora-members": ("reward", BRIEF | {"lora": LoRA(r=2, merge=False), "members": 2}),
    "sandbox": ("rloo", BRIEF | {"num_steps": 1, "eval_prompts": 1}),
}
"""What one process and two must do alike: each kind of stage, odd batches, a parser, adapters,
programs in a sandbox."""
RESUMED = ("sft", "ppo", "lora")
"""These train the two layers of `tiny`, the others a model of one layer beside their folders."""
SCORED: list[int] = []
"""The number of completions in each call of the reward function in this process."""


def brevity(completions, **_):
    SCORED.append(len(completions))
    return [-len(completion) / 100 for completion in completions]


def by_unit_tests(completions, **_):
    """Runs a program for each completion in the sandbox of this process."""
    SCORED.append(len(completions))
    tests = {"kind": "stdin", "inputs": ["0\n", "1\n"], "outputs": ["0\n", "1\n"]}
    programs = [f"print({len(completion) % 3})" for completion in completions]
    return unit_tests(programs, [tests] * len(programs))


def one_sided(completions, **_):
    """Fails in one process alone."""
    if os.environ.get("RANK") == "1":
        raise KeyError("a word that only one process meets")
    return brevity(completions)


class Witness(TrainerCallback):
    """Writes down how the weights lie; fails at a step if it is told to."""

    def __init__(self, fails_at=0):
        self.seen, self.fails_at = {}, fails_at

    def on_step_end(self, args, state, control, model, **kwargs):
        parameters = [p for p in model.parameters() if p.requires_grad]
        mine = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        self.seen = {
            "processes": args.world_size,
            "sharded": all(isinstance(p, DTensor) for p in parameters),
            "shapes": sorted({str(list(p.shape)) for p in parameters}),
            "share": sum(p.numel() for p in mine) / sum(p.numel() for p in parameters),
        }
        if state.global_step == self.fails_at:
            raise ZeroDivisionError


def make(root, name, kind, changes, parallel="data", reward=brevity, callbacks=()):
    reward = by_unit_tests if name == "sandbox" else reward
    settings = COMMON | OWN.get(kind, {}) | changes
    config = METHODS[kind].config(output_dir=str(Path(root) / name), parallel=parallel, **settings)
    rewards = {"reward_funcs": reward} if kind in OWN else {}
    model = "tiny" if name.startswith(RESUMED) else Path(root).parent / "one-layer"
    return TRAINERS[kind](model=model, args=config, callbacks=list(callbacks), **rewards)


def main(root: str) -> None:
    """What each of two processes does."""
    for parallel in WAYS:
        found = work(Path(root, parallel), parallel)
        Path(root, parallel, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def work(root: Path, parallel: str) -> dict:
    found = {}
    for name, (kind, changes) in RUNS.items():
        witness = Witness()
        SCORED.clear()
        make(root, name, kind, changes, parallel, callbacks=[witness]).train()
        found[name] = witness.seen | {"scored": sum(SCORED)}
    for name in RESUMED:  # stopped here, to resume with one process; and the reverse
        kind, changes = RUNS[name]
        try:
            make(root, f"{name}-begun", kind, changes, parallel, callbacks=[Witness(3)]).train()
        except Exception as error:
            found[f"{name}-begun"] = str(error)
        make(root, f"{name}-left", kind, changes, parallel).train(resume_from_checkpoint=True)
    try:
        make(root, "one-sided", "ppo", {}, parallel, reward=one_sided).train()
    except Exception as error:
        found["one-sided"] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of what one process did."""
    from small_runs import save_one_layer

    root = tmp_path_factory.mktemp("alone") / "runs"
    save_one_layer(root.parent / "one-layer")
    for name, (kind, changes) in RUNS.items():
        make(root, name, kind, changes).train()
    return root


@pytest.fixture(scope="module")
def launched(tmp_path_factory, fork_server):
    """The folder of what two processes did."""
    from small_runs import save_one_layer

    root = tmp_path_factory.mktemp("launched")
    save_one_layer(root / "one-layer")
    for way in WAYS:
        for name in RESUMED:
            kind, changes = RUNS[name]
            with pytest.raises(RuntimeError, match="Witness failed"):
                make(root / way, f"{name}-left", kind, changes, callbacks=[Witness(3)]).train()
    process = fork_server.start_ranks(__file__, str(root))
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-4000:]
    return root


@pytest.fixture(params=WAYS)
def pair(request, launched):
    """A folder, how the weights lay, and each process's account."""
    root = launched / request.param
    accounts = [json.loads((root / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    return root, request.param, accounts


def check_alike(ours: Path, theirs: Path) -> None:
    from small_runs import assert_close, read_lines

    assert_close(read_lines(ours), read_lines(theirs), 1e-4)
    for one, other in zip(saved(ours), saved(theirs), strict=True):
        assert (one - other).abs().mean() < 1e-5
        # AdamW moves a weight by the whole rate, whichever sign rounding gives its gradient
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)


def saved(run: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted((run / "model").rglob("*.safetensors"))  # the model, an adapter, or both
    return [x for file in files for _, x in sorted(load_file(file).items())]


def test_two_processes_are_one(alone, pair):
    root, _, _ = pair
    for name in RUNS:
        check_alike(root / name, alone / name)


def test_there_are_two_and_weights_are_really_sharded(pair):
    _, parallel, accounts = pair
    for account in accounts:
        for name in RUNS:
            assert account[name]["processes"] == 2
            assert account[name]["sharded"] == (parallel == "fsdp")
    shares = [sum(account[name]["share"] for account in accounts) for name in RUNS]
    assert shares == pytest.approx([1.0 if parallel == "fsdp" else 2.0] * len(RUNS))


def test_each_process_scores_its_share(pair):
    _, _, accounts = pair
    for name in ("ppo", "lora"):  # 3 steps of 6 responses, 3 evaluations of 5
        scored = [account[name]["scored"] for account in accounts]
        assert sum(scored) == 3 * 6 + 3 * 5
        assert min(scored) >= 3 * 3 + 3 * 2
    # One step of 6 prompts with 2 responses each, 2 evaluations of a response.
    scored = [account["sandbox"]["scored"] for account in accounts]
    assert sorted(scored) == [6, 8]


def test_adapters_keep_their_shapes(pair):
    _, _, accounts = pair
    for account in accounts:  # rank 2, width 96, of the feed-forward 192, of keys and values 48
        widths = (48, 96, 192)
        assert account["lora"]["shapes"] == sorted(
            str(shape) for width in widths for shape in ([2, width], [width, 2]) if shape != [2, 48]
        )
        assert "[1, 96]" in account["lora-reward"]["shapes"]  # the scalar head


def test_a_checkpoint_of_two_goes_on_with_one(alone, pair):
    root, parallel, accounts = pair
    for name in RESUMED:
        assert all(
            "Witness failed in on_step_end at step 3" in a[f"{name}-begun"] for a in accounts
        )
        folder = root / f"{name}-begun" / "checkpoints" / "step-000002"
        shards = list((folder / "sharded").glob("*.safetensors"))
        assert len(shards) == (2 if parallel == "fsdp" else 0)
        kind, changes = RUNS[name]
        make(root, f"{name}-begun", kind, changes).train(resume_from_checkpoint=True)
        check_alike(root / f"{name}-begun", alone / name)


def test_a_checkpoint_of_one_goes_on_with_two(alone, pair):
    root, _, _ = pair
    for name in RESUMED:
        check_alike(root / f"{name}-left", alone / name)


def test_a_reward_that_fails_in_one_process_ends_both(pair):
    root, _, (main_account, other) = pair
    assert other["one-sided"].startswith("RewardError: The reward function `one_sided` raised Key")
    assert main_account["one-sided"].startswith("RunError: Process 1 of 2 failed: The reward func")
    state = json.loads((root / "one-sided" / "run.json").read_text())
    assert state["status"] == "failed"
    assert "only one process meets" in state["note"]


def test_a_signal_to_torchrun_saves(tmp_path, fork_server):
    recipe = tmp_path / "sft.yaml"
    data = "{source: toy, limit: 200, eval_size: 12}"
    recipe.write_text(
        f"model: tiny\noutput_dir: {tmp_path}/run\ndata: {data}\nbatch_size: 2\nnum_epochs: 100\n"
        "save_every: 0\neval_every: 0\nparallel: fsdp\n"
    )
    process = fork_server.start_ranks("-m", "marlhf", "sft", str(recipe))
    log = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 120
    while time.monotonic() < end and not (log.is_file() and '"train"' in log.read_text()):
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    state = json.loads((tmp_path / "run" / "run.json").read_text())
    assert state["status"] == "stopped"
    assert "The same command resumes it." in errors
    [folder] = (tmp_path / "run" / "checkpoints").iterdir()
    assert len(list((folder / "sharded").glob("*.safetensors"))) == 2


def rank_process(launcher: int, rank: int) -> int:
    """The process id of a rank: the launcher forks them one after the other."""
    ranks = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            ranks += [int(folder.name)] * (parent == launcher)
    assert len(ranks) == 2
    return sorted(ranks)[rank]


def test_a_killed_process_is_named_in_one_sentence(tmp_path, fork_server):
    recipe = tmp_path / "sft.yaml"
    data = "{source: toy, limit: 200, eval_size: 12}"
    recipe.write_text(
        f"model: tiny\noutput_dir: {tmp_path}/run\ndata: {data}\nbatch_size: 2\nnum_epochs: 100\n"
        "save_every: 1\neval_every: 0\n"
    )
    process = fork_server.start_ranks("-m", "marlhf", "sft", str(recipe))
    end = time.monotonic() + 120
    while time.monotonic() < end and not list((tmp_path / "run").glob("checkpoints/step-*")):
        time.sleep(0.2)
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    words = "Process 1 of 2 was killed, often for lack of memory. Run the same command again"
    assert errors.count(words) == 1, errors
    ours = errors.partition("torch/distributed/launcher")[0]  # which adds a report of its own
    assert "Traceback" not in ours.partition(words)[0]
    assert "was killed" in json.loads((tmp_path / "run" / "run.json").read_text())["note"]


if __name__ == "__main__":
    main(*sys.argv[1:])
