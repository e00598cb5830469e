"""What macro actions cost: `macro_gae` and the PPO losses against their token-level twins.

    python bench/core.py                    # [512, 1024] on a GPU, [64, 256] on a CPU
    python bench/core.py --rows 512 --tokens 1024

Both versions run alternately in one process; the table shows the best and the median of many
rounds, eager and, on a GPU, replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from marlhf.core import (
    NGram,
    Perplexity,
    RandomNGram,
    Responses,
    gae,
    macro_gae,
    ppo_policy_loss,
    ppo_value_loss,
    segment,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--rows", type=int, default=512 if gpu else 64)
    parser.add_argument("--tokens", type=int, default=1024 if gpu else 256)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()

    device = torch.device("cuda" if gpu else "cpu")
    machine = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    print(f"{machine}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"responses [{args.rows}, {args.tokens}], lengths uniform, float32; ms\n")

    torch.manual_seed(0)
    shape = (args.rows, args.tokens)
    lengths = torch.randint(1, args.tokens + 1, (args.rows, 1), device=device)
    mask = torch.arange(args.tokens, device=device) < lengths
    rewards, values, old_values = (torch.randn(shape, device=device) for _ in range(3))
    old_logprobs = -torch.rand(shape, device=device)
    logprobs = (old_logprobs + 0.1 * torch.randn(shape, device=device)).requires_grad_()
    new_values = (old_values + 0.1 * torch.randn(shape, device=device)).requires_grad_()
    responses = Responses(mask.long(), mask, ref_logprobs=old_logprobs)

    def losses(advantages, returns, **options):
        policy = ppo_policy_loss(logprobs, old_logprobs, advantages, mask, **options)
        value = ppo_value_loss(new_values, old_values, returns, mask)
        return torch.autograd.grad(policy + value, (logprobs, new_values))

    def token():
        return losses(*gae(rewards, values, mask))

    def macro(rule, ratio="token", sigma="equal"):
        segments = segment(rule, responses)

        def run():
            return losses(
                *macro_gae(rewards, values, segments, sigma=sigma), ratio=ratio, segments=segments
            )

        return run

    cases: dict[str, Callable] = {
        "token PPO": token,
        "n = 1": macro(NGram(1)),
        "n = 5": macro(NGram(5)),
        "n = infinity": macro(NGram(float("inf"))),
        "n = 5, position sigma": macro(NGram(5), sigma="position"),
        "n = 5, macro ratio": macro(NGram(5), ratio="macro"),
        "perplexity, token": macro(Perplexity("token")),
    }
    rules = {
        "cut: n = 5": NGram(5),
        "cut: random n": RandomNGram(),
        "cut: perplexity, prefix": Perplexity("prefix"),
        "cut: perplexity, macro, at most 20": Perplexity("macro", max_length=20),
        "cut: perplexity, macro": Perplexity("macro"),
    }
    times = measure(cases, args.rounds, device)
    base = times["token PPO"]
    print(f"{'advantages and losses, forward and backward':45}{'best':>8}{'median':>8}{'ratio':>8}")
    for name, (best, median) in times.items():
        print(f"{name:45}{best:8.3f}{median:8.3f}{best / base[0]:8.2f}")
    if gpu:
        graphs = {name: capture(case) for name, case in cases.items()}
        times = measure(graphs, args.rounds, device)
        base = times["token PPO"]
        print(f"\n{'the same from a CUDA graph':45}{'best':>8}{'median':>8}{'ratio':>8}")
        for name, (best, median) in times.items():
            print(f"{name:45}{best:8.3f}{median:8.3f}{best / base[0]:8.2f}")
    print(f"\n{'segmenters':45}{'best':>8}{'median':>8}")
    cuts = {name: lambda rule=rule: segment(rule, responses) for name, rule in rules.items()}
    for name, (best, median) in measure(cuts, max(3, args.rounds // 10), device).items():
        print(f"{name:45}{best:8.3f}{median:8.3f}")


def measure(
    cases: dict[str, Callable], rounds: int, device: torch.device
) -> dict[str, tuple[float, float]]:
    """Best and median milliseconds of each case, the cases taking turns."""
    for case in cases.values():
        for _ in range(3):
            case()
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            synchronise(device)
            start = time.perf_counter()
            case()
            synchronise(device)
            taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: (min(t), statistics.median(t)) for name, t in taken.items()}


def capture(case: Callable) -> Callable:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case()
    return graph.replay


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
