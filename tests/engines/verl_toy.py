"""A tiny policy, critic, prompts and reward on disk, and verl's whole command over them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(letter == "e" for letter in solution_str) / max(len(solution_str), 1)
"""


def write_toy(folder: Path) -> Path:
    import pandas
    import torch
    from transformers import AutoModelForTokenClassification

    from marlhf.models.tiny import tiny_model, tiny_tokenizer

    torch.manual_seed(0)
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    critic = AutoModelForTokenClassification.from_pretrained(folder / "model", num_labels=1)
    torch.nn.init.normal_(critic.score.weight, std=0.02)
    torch.nn.init.zeros_(critic.score.bias)
    critic.save_pretrained(folder / "critic")
    tiny_tokenizer().save_pretrained(folder / "critic")
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"The fox number {i} ran."}],
            "ability": "toy",
            "reward_model": {"style": "rule", "ground_truth": "the"},
            "extra_info": {"index": i},
        }
        for i in range(64)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder


def plain_verl(inputs: Path, policy: Path, out: Path, *, dtype: str, slots: int = 1) -> list[str]:
    """What makes verl run on one machine without vLLM and flash attention, and save nothing.

    `inputs` has train.parquet, the critic and reward.py; `slots` are GPUs, or what stands for them.
    """
    engines = {
        "actor_rollout_ref.actor": "fsdp_config",
        "actor_rollout_ref.ref": "fsdp_config",
        "critic": "fsdp",
    }
    words = []
    for role, config in engines.items():
        words += [f"{role}.{config}.use_torch_compile=False"]
        words += [f"+{role}.{config}.mixed_precision.param_dtype={dtype}"]
    for model in ("actor_rollout_ref.model", "critic.model"):
        words += [f"{model}.use_remove_padding=False"]  # would need flash attention
        words += [f"{model}.enable_gradient_checkpointing=False"]
        words += [f"+{model}.override_config.attn_implementation=sdpa"]
    return [
        *words,
        "actor_rollout_ref.actor.strategy=fsdp2",
        "critic.strategy=fsdp2",
        f"data.train_files={inputs}/train.parquet",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={policy}",
        f"critic.model.path={inputs}/critic",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.free_cache_engine=False",
        "actor_rollout_ref.rollout.load_format=auto",
        "algorithm.lam=0.95",
        f"reward.custom_reward_function.path={inputs}/reward.py",
        f"trainer.n_gpus_per_node={slots}",
        "trainer.nnodes=1",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={out}/checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=32",  # logical slots, not cores
        f"+ray_kwargs.ray_init.num_gpus={slots}",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init._node_ip_address=127.0.0.1",
        f"hydra.run.dir={out}/hydra",
    ]


def overrides(
    toy: Path, out: Path, *, batch: int = 16, micro: int = 4, slots: int = 1
) -> list[str]:
    """What makes verl small, and run on a CPU."""
    words = plain_verl(toy, toy / "model", out, dtype="fp32", slots=slots)
    for role in ("actor_rollout_ref.actor", "critic"):
        # Two passes over one mini-batch: ratios differ from 1, and rows need no order.
        words += [f"{role}.ppo_mini_batch_size={batch}", f"{role}.ppo_epochs=2"]
        words += [f"{role}.ppo_micro_batch_size_per_gpu={micro}", f"{role}.optim.lr=1e-3"]
    return [
        *words,
        f"data.val_files={toy}/val.parquet",
        f"data.train_batch_size={batch}",
        "data.max_prompt_length=32",
        "data.max_response_length=24",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.max_num_seqs=1",  # responses that depend on their prompt alone
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        "reward.num_workers=1",
        "trainer.device=cpu",
    ]


def run_verl(
    toy: Path,
    out: Path,
    *words: str,
    slots: int = 1,
    batch: int = 16,
    micro: int = 4,
    kill_after: int | None = None,
) -> dict[int, dict[str, float]]:
    """`marlhf verl` in a namespace whose only network is its own loopback; metrics by step.

    `kill_after` ends the whole process group with SIGKILL once that step has been logged.
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
    }
    shell = 'ip link set lo up; exec "$@"'
    namespace = ["unshare", "-n", "--kill-child", "-fp", "--mount-proc", "bash", "-c", shell, "_"]
    words = (*overrides(toy, out, batch=batch, micro=micro, slots=slots), *words)
    return start_verl(words, out, environment, namespace=namespace, kill_after=kill_after)


def start_verl(
    words: Sequence[str],
    out: Path,
    environment: Mapping[str, str],
    *,
    namespace: Sequence[str] = (),
    kill_after: int | None = None,
    seconds: float | None = None,
) -> dict[int, dict[str, float]]:
    """`marlhf verl` with the modules of this folder; metrics by step, and out/log.txt.

    After that many `seconds` it is killed, and the metrics are those it had logged.
    """
    out.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_TMPDIR": tempfile.mkdtemp(prefix="ray-", dir="/tmp"),  # its sockets need a short path
        **environment,
    }
    metrics: dict[int, dict[str, float]] = {}
    with (out / "log.txt").open("a", buffering=1) as log:
        process = subprocess.Popen(
            [*namespace, sys.executable, "-m", "marlhf", "verl", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        deadline = threading.Timer(seconds or 0, end)
        if seconds is not None:
            deadline.start()
        try:
            for line in process.stdout:
                log.write(line)
                if found := re.search(r"step:(\d+) - (.*)", line):
                    metrics[int(found[1])] = read_metrics(found[2])
                    if int(found[1]) == kill_after:
                        os.killpg(process.pid, signal.SIGKILL)
        finally:
            deadline.cancel()
            if process.poll() is None and sys.exc_info()[0] is not None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1))
    if kill_after is None and process.returncode and not late.is_set():
        raise RuntimeError("".join((out / "log.txt").read_text().splitlines(True)[-60:]))
    return metrics


def read_metrics(text: str) -> dict[str, float]:
    numbers = re.findall(r"([\w/@.-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)", text)
    return {name: float(value) for name, value in numbers}
