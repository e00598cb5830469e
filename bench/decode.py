"""Tokens a second of sampling, beside transformers' generate, and vLLM where it is installed.

    python bench/decode.py                    # SmolLM2-135M's shape on a GPU
    python bench/decode.py --shape tiny       # a CPU
    python bench/decode.py --shared 8         # eight samples of each prompt
    python bench/decode.py --prompt 768       # longer ones
    python bench/decode.py --family gemma2    # through the modules of another family
    python bench/decode.py --shape qwen2-1.5b --mean 600 --longest 4096 --only "marlhf native"
    python bench/decode.py --vllm-url http://127.0.0.1:8000    # a vLLM server, too

`marlhf native` is what a training run takes, with its layers compiled on a GPU; families other than
Llama and its like are computed by transformers' own modules, which `--modules` measures for every
family, compiled and not.
With `--shared k` each prompt is sampled k times, as RLOO and best-of-n do, and the native engine is
measured with and without sharing the prefill among them.
Random weights and prompts of one length. `fixed`: every response is as long as may be. `real`:
lengths as people's prompts give them, most short and a few very long, by calling many tokens an
end. Each line is the best of a few runs after one that warms up, prefill, sampling and log-probs
included; generate gives no log-probs.

vLLM is measured as `engine: vllm` runs it, with the first update of its weights in the first run. A
server has to be started from a model of this shape, as docs/vllm.md says, with
`--no-enable-prefix-caching`, so that repeated prompts are computed again.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from marlhf.models.base import pick_device
from marlhf.models.compile import compile_blocks
from marlhf.rollout.engine import Engine, Rollout, Sampling
from marlhf.rollout.native import DecoderClass, NativeEngine
from marlhf.rollout.plain import PlainEngine
from marlhf.rollout.slots import CompiledDecoder, ModuleDecoder
from marlhf.rollout.vllm import VLLM, VLLMEngine
from marlhf.rollout.vllm_server import VLLMServer


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    groups: int
    mlp: int
    vocabulary: int
    rows: int
    prompt: int
    response: int
    mean: int = 35
    """Of real lengths, which end at `longest`."""
    longest: int = 512

    def config(self, family: str) -> PretrainedConfig:
        return AutoConfig.for_model(
            family,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            head_dim=self.hidden // self.heads,
            intermediate_size=self.mlp,
            vocab_size=self.vocabulary,
            max_position_embeddings=max(1024, self.prompt + self.longest),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )


SHAPES = {
    "smollm2": Shape(576, 30, 9, 3, 1536, 49152, 256, 256, 64),
    "qwen2-1.5b": Shape(1536, 28, 12, 2, 8960, 151936, 256, 256, 1024),
    "llama-8b": Shape(4096, 32, 32, 8, 14336, 128256, 128, 256, 512),
    "tiny": Shape(64, 2, 4, 2, 128, 512, 32, 32, 32),
}
FAMILIES = ["llama", "gemma2", "gpt_neox", "qwen3"]


@dataclass(frozen=True)
class Task:
    """What is sampled: the prompts, and when a response ends."""

    name: str
    prompts: list[list[int]]
    sampling: Sampling
    ends: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="smollm2" if gpu else "tiny")
    parser.add_argument("--family", choices=FAMILIES, default="llama", help="of these sizes")
    parser.add_argument("--modules", action="store_true", help="transformers' modules, too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--rows", type=int, help="prompts of the fixed task; real has four times")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt")
    parser.add_argument("--mean", type=int, help="mean of real lengths")
    parser.add_argument("--longest", type=int, help="the most tokens of a response, real lengths")
    parser.add_argument("--lengths", choices=["fixed", "real"], help="only one of both")
    parser.add_argument("--bfloat16", action="store_true", help="weights, not only products")
    parser.add_argument("--shared", type=int, default=1, help="samples of each prompt")
    parser.add_argument("--budget", type=int, help="rollout_tokens; auto unless given")
    parser.add_argument("--vllm-url", default="", help="address of a vLLM server")
    parser.add_argument("--only", nargs="+", help="systems to measure, by the start of their name")
    args = parser.parse_args()
    shape, device = SHAPES[args.shape], pick_device("cuda" if gpu else "cpu")
    given = {name: getattr(args, name) for name in ("rows", "prompt", "mean", "longest")}
    shape = replace(shape, **{name: value for name, value in given.items() if value})
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            shape.config(args.family), dtype=torch.bfloat16 if args.bfloat16 else torch.float32
        )
    model.eval()
    if gpu:
        compile_blocks(model)
    if args.shared < 1 or shape.rows % args.shared:
        parser.error(f"--shared must divide the {shape.rows} rows")
    tasks = make_tasks(shape, args.top_k, args.top_p, args.shared)
    tasks = [task for task in tasks if args.lengths in (None, task.name)]
    engines: dict[str, NativeEngine] = {}
    known = systems(model, engines, args)
    wanted = tuple(args.only or [""])
    chosen = {system: make for system, make in known.items() if system.startswith(wanted)}
    if not chosen:
        parser.error(f"--only names none of: {', '.join(known)}")
    name = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    count = sum(p.numel() for p in model.parameters()) / 1e6
    print(
        f"{args.shape}, {args.family}: {count:.1f}M parameters, prompts of {shape.prompt} tokens\n"
    )
    columns = f"{'rows':>6}{'tokens':>9}{'mean':>6}{'first s':>9}{'best s':>9}{'tokens/s':>11}"
    print(f"{'system':24}{'lengths':9}{columns}")
    for system, make in chosen.items():
        for task in tasks:
            sample = make(task)
            times, lengths = [], [0]
            for _ in range(args.repeats + 1):
                start = time.perf_counter()
                lengths = sample(task)
                times.append(time.perf_counter() - start)
            tokens, best = sum(lengths), min(times[1:])
            numbers = f"{len(lengths):6}{tokens:9}{tokens / len(lengths):6.1f}"
            rates = f"{times[0]:9.3f}{best:9.3f}{tokens / best:11.0f}"
            print(f"{system:24}{task.name:9}{numbers}{rates}", flush=True)
    for system, engine in engines.items() if tasks[0].name == "fixed" else ():
        print_phases(system, engine, tasks[0])
    if gpu:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


def make_tasks(shape: Shape, top_k: int, top_p: float, shared: int) -> list[Task]:
    def prompts(rows: int) -> list[list[int]]:
        distinct = torch.randint(1, shape.vocabulary, (rows // shared, shape.prompt))
        return distinct.repeat_interleave(shared, dim=0).tolist()

    fixed = Sampling(shape.response, top_k=top_k, top_p=top_p)
    real = Sampling(shape.longest, top_k=top_k, top_p=top_p)
    ends = list(range(shape.vocabulary // shape.mean))  # each is as likely as any other
    return [
        Task("fixed", prompts(shape.rows), fixed, [-1]),
        Task("real", prompts(shape.rows * (4 if shape.mean < 100 else 1)), real, ends),
    ]


Sample = Callable[[Task], list[int]]


def systems(
    model: PreTrainedModel, engines: dict[str, NativeEngine], args: argparse.Namespace
) -> dict[str, Callable[[Task], Sample]]:
    """Each makes, for a task, a function that samples it and gives the lengths of responses.

    The native engines of the fixed task are kept in `engines`.
    """

    def native(
        name: str, decoder: DecoderClass | None = None, **options: Any
    ) -> Callable[[Task], Sample]:
        def make(task: Task) -> Sample:
            engine = NativeEngine(
                model, task.ends, 0, token_budget=args.budget or "auto", **options
            )
            if decoder is not None:
                vars(engine)["_choose"] = lambda _: decoder
            engines.setdefault(name, engine)
            return lambda task: lengths_of(run_engine(engine, task))

        return make

    def plain(task: Task) -> Sample:
        engine = PlainEngine(model, task.ends, 0)
        return lambda task: lengths_of(run_engine(engine, task))

    found = {"marlhf native": native("marlhf native")}
    if args.modules:
        if model.device.type == "cuda":
            found["marlhf compiled modules"] = native("compiled modules", CompiledDecoder)
        found["marlhf modules"] = native("modules", ModuleDecoder)
    if args.shared > 1:
        found["marlhf native, unshared"] = native("unshared", share_prefixes=False)
    found["marlhf plain loop"] = plain
    found["transformers generate"] = lambda task: generate_sampler(model, task)
    if importlib.util.find_spec("vllm"):
        found["vLLM"] = vllm_sampler(
            lambda: VLLMEngine(model, [], 0, enable_prefix_caching=False)  # prompts are repeated
        )
    if args.vllm_url:
        found["vLLM server"] = vllm_sampler(lambda: VLLMServer(args.vllm_url, model, [], 0))
    return found


def vllm_sampler(start: Callable[[], VLLM]) -> Callable[[Task], Sample]:
    """One vLLM for all tasks: it starts with the first, and keeps its memory."""
    started = functools.cache(start)

    def make(task: Task) -> Sample:
        engine = started()
        engine.end_tokens = [token for token in task.ends if token >= 0]
        return lambda task: lengths_of(run_engine(engine, task))

    return make


def run_engine(engine: Engine, task: Task) -> Rollout:
    return engine.generate(task.prompts, task.sampling, range(len(task.prompts)))


def lengths_of(rollout: Rollout) -> list[int]:
    return [len(response) for response in rollout.responses]


def generate_sampler(model: PreTrainedModel, task: Task) -> Sample:
    """Over transformers' default cache, in bfloat16 on a GPU, as one batch."""
    whole: Any = AutoModelForCausalLM.from_config(model.config)
    whole.load_state_dict(model.state_dict())
    whole = whole.to(model.device).eval()
    if model.device.type == "cuda":
        whole = whole.bfloat16()
    ids = torch.tensor(task.prompts, device=model.device)

    def sample(task: Task) -> list[int]:
        out = whole.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=task.sampling.top_k,
            top_p=task.sampling.top_p,
            max_new_tokens=task.sampling.max_new_tokens,
            eos_token_id=task.ends if task.ends != [-1] else None,
            pad_token_id=0,
        )[:, ids.shape[1] :]
        ended = torch.isin(out, torch.tensor(task.ends, device=out.device))
        first = torch.where(ended.any(dim=1), ended.int().argmax(dim=1) + 1, out.shape[1])
        return first.tolist()

    return sample


@torch.no_grad()
def print_phases(system: str, engine: NativeEngine, task: Task) -> None:
    """Prefill and decode alone, over the slots of the fixed task."""
    rows, length = len(task.prompts), len(task.prompts[0])
    run_engine(engine, task)
    session = engine.session
    assert session is not None
    reach = length + task.sampling.max_new_tokens
    with engine._sampling(reach), session.decoder.ready():
        ids = torch.tensor(task.prompts, device=engine.model.device)[:, :-1]
        slots = torch.arange(rows, device=ids.device)
        prefill = timed(lambda: session.decoder.prefill(ids, slots), 3)
        step = session.step(task.sampling)
        step.state.positions[:] = length
        step.state.running[:] = True
        step.state.steps[:] = 0
        seconds = timed(lambda: step(rows, reach), max(1, task.sampling.max_new_tokens - 4))
    kind = type(session.decoder).__name__
    print(f"\n{system} alone, {rows} slots ({kind}):")
    print(f"prefill {prefill:.4f} s, {rows * length / prefill:.0f} prompt tokens/s")
    print(f"decode {seconds * 1e3:.3f} ms a step, {rows / seconds:.0f} tokens/s")


def timed(work: Callable[[], None], repeats: int) -> float:
    """Seconds of one, once warm and recorded."""
    gpu = torch.cuda.is_available()
    for _ in range(3):
        work()
    if gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    if gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


if __name__ == "__main__":
    main()
