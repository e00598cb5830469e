"""Digests of metrics and weights of short runs: does a refactoring leave every bit as it was?

    python bench/digests.py record before.json      # on the old code
    python bench/digests.py compare before.json     # on the new code, same machine and versions

Covers every kind of stage through the command line: SFT, reward model, PPO with n = 1 and with
n = 5 under each value weighting, RLOO, GRPO, DPO, LoRA, a run that is killed and resumed, and two
processes (data parallel and FSDP). About four minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = """
output_dir: {root}
defaults:
  data: {{source: toy, eval_size: 16}}
  device: cpu
stages:
  sft: {{model: tiny, batch_size: 8, num_steps: 30, learning_rate: 5.0e-3, eval_every: 10}}
  reward: {{model: "@sft", batch_size: 8, num_steps: 20, learning_rate: 1.0e-3, eval_every: 10}}
  ppo:
    model: "@sft"
    reward_model: "@reward"
    batch_size: 16
    num_steps: 4
    learning_rate: 5.0e-4
    critic_learning_rate: 1.0e-3
    normalize_scores: true
    sampling: {{max_new_tokens: 32, temperature: 1.0, top_k: 0}}
    segmenter: {{type: ngram, n: 1}}
    sigma: equal
    eval_every: 2
    eval_prompts: 8
    save_every: 2
  n5-equal: {{like: ppo, segmenter: {{type: ngram, n: 5}}}}
  n5-unit: {{like: ppo, segmenter: {{type: ngram, n: 5}}, sigma: unit}}
  n5-position: {{like: ppo, segmenter: {{type: ngram, n: 5}}, sigma: position}}
  n5-start: {{like: ppo, segmenter: {{type: ngram, n: 5}}, sigma: start}}
  official: {{like: ppo, preset: official, segmenter: {{type: ngram, n: 5}}}}
  perplexity: {{like: ppo, segmenter: {{type: perplexity}}, ratio: macro, value_level: macro}}
  constituents: {{like: ppo, segmenter: {{type: constituents}}}}
  several: {{like: ppo, num_mini_batches: 2, num_ppo_epochs: 2, segmenter: {{type: random}}}}
  lora: {{like: ppo, lora: {{r: 4}}, segmenter: {{type: ngram, n: 5}}}}
  lora-apart: {{like: ppo, lora: {{r: 4, shared_base: false}}}}
  rloo:
    model: "@sft"
    reward_model: "@reward"
    batch_size: 4
    num_steps: 3
    learning_rate: 3.0e-4
    sampling: {{max_new_tokens: 32, temperature: 1.0, top_k: 0}}
    eval_every: 2
    eval_prompts: 8
  macro-rloo: {{like: rloo, segmenter: {{type: ngram, n: 5}}, num_mini_batches: 2}}
  grpo: {{like: rloo, baseline: group, kl_in: loss, ratio: macro_mean}}
  dpo: {{model: "@sft", batch_size: 8, num_steps: 6, learning_rate: 3.0e-4, eval_every: 3}}
"""
SEVERAL = {"data": "parallel=data", "fsdp": "parallel=fsdp"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--keep", type=Path, help="Folder for the runs; a temporary one if absent.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = run_everything(args.keep or Path(temporary))
    if args.mode == "record":
        args.file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} runs recorded in {args.file}")
        return 0
    return compare(json.loads(args.file.read_text()), found)


def compare(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> int:
    apart = 0
    for name in before:
        differing = [part for part in before[name] if before[name][part] != now[name].get(part)]
        apart += bool(differing)
        print(f"{name:14}{'differs: ' + ', '.join(differing) if differing else 'the same'}")
    print(f"{len(before) - apart} of {len(before)} runs are bit for bit the same")
    return int(apart > 0)


def run_everything(root: Path) -> dict[str, dict[str, str]]:
    recipe = root / "recipe.yaml"
    root.mkdir(parents=True, exist_ok=True)
    recipe.write_text(RECIPE.format(root=root / "runs"))
    command([sys.executable, "-m", "marlhf", "run", str(recipe)])
    found = {p.name: digest(p) for p in sorted((root / "runs").iterdir()) if p.is_dir()}
    found["resumed"] = digest(killed_and_resumed(root))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    for name, setting in SEVERAL.items():
        out = root / "several" / name
        flat = flat_recipe(root, out)
        command([*launcher, "-m", "marlhf", "ppo", str(flat), setting])
        found[f"two-{name}"] = digest(out)
    return found


def flat_recipe(root: Path, out: Path) -> Path:
    """The PPO stage as a recipe of its own, so that it can be run from one set of models twice."""
    text = (
        f"model: {root}/runs/sft/model\nreward_model: {root}/runs/reward/model\noutput_dir: {out}\n"
        "data: {source: toy, eval_size: 16}\ndevice: cpu\nbatch_size: 16\nnum_steps: 4\n"
        "learning_rate: 5.0e-4\ncritic_learning_rate: 1.0e-3\n"
        "sampling: {max_new_tokens: 32, temperature: 1.0, top_k: 0}\n"
        "segmenter: {type: ngram, n: 5}\nsigma: equal\n"
        "eval_every: 2\neval_prompts: 8\nsave_every: 1\n"
    )
    path = root / f"{out.name}.yaml"
    path.write_text(text)
    return path


def killed_and_resumed(root: Path) -> Path:
    """A PPO run killed after its first checkpoint and started again."""
    out = root / "resumed"
    words = [sys.executable, "-m", "marlhf", "ppo", str(flat_recipe(root, out))]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if list((out / "checkpoints").glob("step-*")):
            process.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    process.wait()
    command(words)
    return out


def command(words: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(words, env=environment, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{finished.stdout}\n{finished.stderr}")


def digest(run: Path) -> dict[str, str]:
    weights = hashlib.sha256()
    for path in sorted((run / "model").glob("*.safetensors")):
        weights.update(path.read_bytes())
    found = {"weights": weights.hexdigest()[:16]}
    for name in ("metrics", "eval", "samples"):
        path = run / f"{name}.jsonl"
        if path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            text = json.dumps([plain(line) for line in lines], sort_keys=True)
            found[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def plain(line: dict) -> dict:
    """A record without clock readings, its metrics by what follows the prefix."""
    timed = ("time/", "time", "seconds")
    return {k.rpartition("/")[2]: v for k, v in line.items() if not k.startswith(timed)}


if __name__ == "__main__":
    sys.exit(main())
