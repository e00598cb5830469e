"""Samples a second of verl's PPO step on one GPU: its own `gae` beside `macro_gae` over 5-grams.

    python bench/verl_step.py MODEL GSM8K.jsonl             # on a GPU: two runs of 20 steps
    python bench/verl_step.py MODEL GSM8K.jsonl --single    # a third: single tokens equal gae
    python bench/verl_step.py MODEL GSM8K.jsonl --cpu --steps 4 --batch 8 --response 16

MODEL is a folder with a chat template, such as bench/smollm2_from_gguf.py writes; the critic starts
from it, too. The data has a question and an answer on each line, as GSM8K is published. Needs
`pip install 'marlhf[verl]'`, but neither vLLM nor flash attention: responses are sampled by
transformers (tests/engines/verl_hf.py), one batch at a time, which is slower than vLLM and the same
for every estimator.

Both runs are `marlhf verl` with FSDP2 in bfloat16, a reference for the KL penalty, two mini-batches
per step, no validation and no checkpoints. The first two steps, which warm up, are not counted.
verl looks for finished responses every two seconds, so the time of `gen` is a multiple of that. Ray
listens on 127.0.0.1 alone.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path
from statistics import mean

import pandas
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

ENGINES = Path(__file__).resolve().parents[1] / "tests" / "engines"
sys.path.insert(0, str(ENGINES))

from verl_toy import plain_verl, start_verl  # noqa: E402

REWARD = """
from verl.utils.reward_score.gsm8k import compute_score as gsm8k_score


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return gsm8k_score(solution_str, ground_truth, format_score=0.1)
"""
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ESTIMATORS = {
    "gae": ["algorithm.adv_estimator=gae"],
    "macro_gae": [
        "algorithm.adv_estimator=macro_gae",
        "algorithm.macro.segmenter.n=5",
        "algorithm.macro.sigma=start",
    ],
}
SINGLE = ["algorithm.adv_estimator=macro_gae", "algorithm.macro.segmenter.n=1"]
WARM_UP = 2
"""Steps that are not counted."""
PARTS = ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
SHOWN = ("actor/perf/max_memory_allocated_gb", "perf/throughput", "response_length/mean")
MACRO = ("actions_per_response", "tokens_per_action", "longest_action")
COMPARED = (
    "critic/score/mean",
    "response_length/mean",
    "critic/values/mean",
    "critic/advantages/max",
    "critic/advantages/min",
    "critic/returns/mean",
    "critic/vf_loss",
    "actor/pg_loss",
    "critic/grad_norm",
    "actor/grad_norm",
)


def write_inputs(model: str, data: Path, folder: Path) -> None:
    """Prompts in verl's format, the reward, and a critic whose new head is the same in each run."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index, line in enumerate(data.read_text().splitlines()):
        row = json.loads(line)
        answer = row["answer"].split("####")[-1].strip().replace(",", "")
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"index": index},
            }
        )
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    torch.manual_seed(0)
    critic = AutoModelForTokenClassification.from_pretrained(model, num_labels=1)
    critic.save_pretrained(folder / "critic")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "critic")


def overrides(args: argparse.Namespace) -> list[str]:
    dtype = "fp32" if args.cpu else "bf16"
    words = plain_verl(args.out, args.model, args.out, dtype=dtype)
    for role in ("actor_rollout_ref.actor", "critic"):
        words += [f"{role}.optim.lr=1e-5", f"{role}.ppo_mini_batch_size={args.batch // 2}"]
        words += [f"{role}.ppo_micro_batch_size_per_gpu={min(args.micro, args.batch // 2)}"]
    for role in ("rollout", "ref"):
        micro = min(2 * args.micro, args.batch)
        words += [f"actor_rollout_ref.{role}.log_prob_micro_batch_size_per_gpu={micro}"]
    if args.cpu:
        words += ["trainer.device=cpu", "actor_rollout_ref.rollout.dtype=float32"]
    return [
        *words,
        f"data.val_files={args.out}/train.parquet",
        f"data.train_batch_size={args.batch}",
        f"data.max_prompt_length={args.prompt}",
        f"data.max_response_length={args.response}",
        "data.filter_overlong_prompts=True",
        f"actor_rollout_ref.rollout.max_num_seqs={args.batch}",
        f"actor_rollout_ref.rollout.agent.num_workers={args.workers}",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.kl_coef=0.001",
        f"reward.num_workers={args.workers}",
        "+ray_kwargs.ray_init.object_store_memory=4000000000",
    ]


def run(name: str, words: list[str], steps: int, args: argparse.Namespace) -> dict[int, dict]:
    environment = {
        "VERL_USE_EXTERNAL_MODULES": "verl_hf",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # Ray's guard kills workers by the memory that the machine shows, which may still grow.
        "RAY_memory_monitor_refresh_ms": "0",
    }
    if args.cpu:
        environment |= {"VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_PLATFORM": "cpu"}
        environment |= {"VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    words = [*overrides(args), *words, f"trainer.total_training_steps={steps}"]
    metrics = start_verl(words, args.out / name, environment, seconds=args.seconds)
    if len(metrics) <= WARM_UP:
        sys.exit(f"{name}: {len(metrics)} steps in {args.seconds:.0f} s. Raise --seconds.")
    if len(metrics) < steps:
        print(f"{name}: cut off after {args.seconds:.0f} s and {len(metrics)} of {steps} steps")
    training = sum(metrics[step]["timing_s/step"] for step in metrics)
    seconds = time.perf_counter() - started
    print(f"{name}: {seconds:.0f} s, of which {training:.0f} s are steps", flush=True)
    return metrics


def print_table(runs: dict[str, dict[int, dict]], batch: int) -> None:
    rows: dict[str, list[str]] = {"steps counted": []}

    def add(row: str, value: float) -> None:
        rows.setdefault(row, []).append(f"{value:.4g}" if math.isfinite(value) else "")

    for metrics in runs.values():
        counted = [metrics[step] for step in sorted(metrics) if step > WARM_UP]
        seconds = [step["timing_s/step"] for step in counted]
        first, last = metrics[1], metrics[max(metrics)]
        rows["steps counted"].append(f"{WARM_UP + 1} to {max(metrics)}")
        add("samples/s", batch / mean(seconds))
        add("seconds per step", mean(seconds))
        add("fastest step", min(seconds))
        add(
            "mean without gen",
            mean(step["timing_s/step"] - step["timing_s/gen"] for step in counted),
        )
        for part in (*PARTS, "update_weights"):
            add(f"- {part}", mean(step.get(f"timing_s/{part}", math.nan) for step in counted))
        for name in SHOWN:
            add(name, mean(step.get(name, math.nan) for step in counted))
        add("score, first step", first["critic/score/mean"])
        add("score, last step", last["critic/score/mean"])
        for name in MACRO:
            add(f"macro/{name}, last step", last.get(f"macro/{name}", math.nan))
    print("| | " + " | ".join(runs) + " |")
    print("|---" * (len(runs) + 1) + "|")
    for row, values in rows.items():
        print(f"| {row} | " + " | ".join(values) + " |")


def print_comparison(single: dict[int, dict], gae: dict[int, dict]) -> None:
    """Single tokens against gae. Later steps drift apart by rounding, and sample differently."""
    print("macro_gae with n = 1 beside gae, relative differences:")
    for step in single:
        shown = []
        for name in COMPARED:
            ours, verls = single[step][name], gae[step][name]
            shown.append(f"{name} {abs(ours - verls) / max(abs(verls), 1e-8):.1e}")
        print(f"step {step}: " + ", ".join(shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/verl_step"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128, help="prompts per step")
    parser.add_argument("--micro", type=int, default=32, help="responses per backward pass")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--response", type=int, default=128, help="tokens of the longest response")
    parser.add_argument("--workers", type=int, default=4, help="processes that send prompts")
    parser.add_argument("--seconds", type=float, default=1800, help="after which a run is cut off")
    parser.add_argument("--only", choices=ESTIMATORS, help="one of the two runs")
    parser.add_argument("--single", action="store_true", help="also compare n = 1 with gae")
    parser.add_argument("--cpu", action="store_true", help="on a CPU, to try this script")
    args = parser.parse_args()
    if args.single and args.only == "macro_gae":
        parser.error("--single compares with gae, which --only leaves out")
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}, which are not counted")
    # Without this the run, in a session of its own, would outlive a `timeout` around this script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    args.model, args.out = args.model.resolve(), args.out.resolve()
    write_inputs(str(args.model), args.data, args.out)
    if not args.cpu:
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    runs = {}
    for name in [args.only] if args.only else ESTIMATORS:
        runs[name] = run(name, ESTIMATORS[name], args.steps, args)
    print_table(runs, args.batch)
    if args.single:
        single = run("single", SINGLE, WARM_UP + 1, args)
        print_comparison(single, runs["gae"])


if __name__ == "__main__":
    main()
