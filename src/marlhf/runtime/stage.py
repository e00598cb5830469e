"""What every stage shares: objects given in Python, rows in tokens, the order of batches, and how
a run ends.

There is no base trainer: a stage is a loop of its own that calls these.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._inductor.config as inductor_config

from marlhf.config.stage import StageConfig
from marlhf.data import DataConfig, DataError, Row, encode_responses, fit_prompts, load_data
from marlhf.environments import Environment, EpisodeRecord
from marlhf.errors import MarlhfError
from marlhf.models.base import Model, Tokenizer
from marlhf.models.facts import with_ends
from marlhf.runs.layout import METRICS, RunError
from marlhf.runs.write import RunFolder
from marlhf.runtime.checkpoint import list_checkpoints
from marlhf.runtime.distributed import describe_lost_rank
from marlhf.runtime.optim import Diverged
from marlhf.runtime.progress import console, say, stages_ahead, warn


@dataclass(frozen=True)
class GivenObjects:
    """An object takes precedence over the config; where it is None, the config says."""

    model: Model | None = None
    tokenizer: Tokenizer | None = None
    ref_model: Model | None = None
    critic_model: Model | None = None
    reward_funcs: Sequence[str | Model | Callable[..., Any]] | None = None
    reward_tokenizers: Sequence[Tokenizer | None] | None = None
    environment: Callable[[], Environment] | None = None
    judge: Any = None
    train_rows: list[Row] | None = None
    eval_rows: list[Row] | None = None
    peft_config: Any = None
    callbacks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for tokenizer in (self.tokenizer, *(self.reward_tokenizers or ())):
            if tokenizer is not None:
                with_ends(tokenizer, "that was given")


NO_OBJECTS = GivenObjects()
"""Everything from the config, as on the command line."""


@dataclass(frozen=True)
class Example:
    """One row in tokens."""

    row: Row
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    episode: EpisodeRecord | None = None
    """The conversation that was sampled, whose first messages are then the prompt."""

    @property
    def longest(self) -> int:
        """Tokens of its longer response."""
        return max(len(self.chosen), len(self.rejected))


def seed_run(seed: int, deterministic: bool = False) -> None:
    """Seed torch; if `deterministic`, keep to kernels that give the same bits every time.

    On a GPU sums are added up in whatever order threads finish: in the backward pass of attention,
    in products that are split up, in scatters. The compiler times several kernels and takes the
    fastest, which may be another one the next day. Both stay off for the rest of the process.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it as it starts
        torch.use_deterministic_algorithms(True)
        # Guards against reading what was never written, at three times the cost of a step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        if hasattr(inductor_config, "deterministic"):  # not before torch 2.9
            inductor_config.deterministic = True
    torch.manual_seed(seed)


def load_examples(
    data: DataConfig,
    part: str,
    tokenizer: Tokenizer,
    objects: GivenObjects = NO_OBJECTS,
    *,
    name: str = "",
    needs: Sequence[str],
    max_response_tokens: int | None = None,
) -> tuple[list[Example], list[Example]]:
    """Training and held-out rows of a run, in tokens. Prints how many are left out, and why."""
    given = objects.train_rows is not None
    if objects.train_rows is not None:
        train_rows, eval_rows = objects.train_rows, objects.eval_rows or []
    else:
        loaded = load_data(data, part, needs=needs)
        say(f"data: {loaded.counts}")
        train_rows, eval_rows = loaded.train, loaded.eval
    encode = partial(_encode, data, tokenizer, needs, max_response_tokens)
    train = encode("train", train_rows)
    try:
        held_out = encode("eval", eval_rows)
    except DataError as error:  # no prompt fits
        warn(f"held-out rows: {error}")
        held_out = []
    shares = {} if given else data.parts
    share = f" (the part for {part}, {shares[part]:.0%} of the data)" if shares else ""
    say(f"{name}: {len(train)} training rows{share}, {len(held_out)} held out")
    if not train:
        raise RunError(
            "No training row is left. Raise data.max_prompt_tokens or max_response_tokens, "
            "or set data.too_long: truncate."
        )
    return train, held_out


def _encode(
    data: DataConfig,
    tokenizer: Tokenizer,
    needs: Sequence[str],
    max_response_tokens: int | None,
    name: str,
    rows: list[Row],
) -> list[Example]:
    if not rows:
        return []
    prompts, counts = fit_prompts(rows, tokenizer, data.max_prompt_tokens, data.too_long)
    rows = [encoded.row for encoded in prompts]
    eos = tokenizer.eos_token_id
    responses: dict[str, list[list[int]]] = {}
    for side in ("chosen", "rejected"):
        texts = [getattr(row, side) if side in needs else None for row in rows]
        given = [(row.prompt, text) for row, text in zip(rows, texts) if text is not None]
        ids = iter(encode_responses(tokenizer, given, eos, max_response_tokens))
        responses[side] = [[] if text is None else next(ids) for text in texts]
    examples = [
        Example(e.row, e.prompt_ids, *both) for e, *both in zip(prompts, *responses.values())
    ]
    limit = math.inf if max_response_tokens is None else max_response_tokens
    for number, example in enumerate(examples, start=1):
        if example.longest > limit:
            position = example.row.position or f"row {number}"
            counts.drop(f"a response is longer than {limit} tokens", position)
    if counts.dropped or counts.noted:
        say(f"{name}: {counts}")
    return [example for example in examples if example.longest <= limit]


def each_prompt_once(examples: list[Example]) -> list[Example]:
    """Preference data often has several pairs per prompt; a policy needs each prompt once."""
    unique = list({tuple(e.prompt): e for e in reversed(examples)}.values())[::-1]
    if len(unique) < len(examples):
        say(f"{len(examples)} rows have {len(unique)} different prompts; each is used once")
    return unique


def check_positions(
    model: Model, examples: Sequence[Example], new_tokens: int = 0, name: str = "model"
) -> None:
    """Refuse sequences longer than the model has positions, before it fails inside."""
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max(len(e.prompt) + max(e.longest, new_tokens) for e in examples)
    if limit is not None and longest > limit:
        raise RunError(
            f"Prompt and response take up to {longest} tokens, but the {name} has {limit} "
            "positions. Lower data.max_prompt_tokens, or the length of responses "
            "(max_response_tokens, sampling.max_new_tokens)."
        )


def count_steps(config: StageConfig, num_rows: int) -> int:
    """Steps of the run. An epoch leaves out the rows that do not fill its last batch."""
    steps_per_epoch = num_rows // config.batch_size
    if not steps_per_epoch:
        raise RunError(
            f"There are {num_rows} rows for a batch of {config.batch_size}."
            f"{config.data.explain_shares()} Lower batch_size, or give more data."
        )
    steps = steps_per_epoch * config.num_epochs
    if config.num_steps is not None and config.num_steps > steps:
        warn(
            f"the data gives {steps} steps, not the {config.num_steps} of num_steps: {num_rows} "
            f"rows in batches of {config.batch_size}, num_epochs {config.num_epochs}. "
            "Raise num_epochs for more."
        )
    return steps if config.num_steps is None else min(steps, config.num_steps)


def batch_rows(step: int, num_rows: int, batch_size: int, seed: int) -> list[int]:
    """The rows of step number `step`, from 0, in an order that is shuffled every epoch.

    It depends on the seed alone, so a resumed run needs no state to continue with the same rows.
    """
    epoch, batch = divmod(step, num_rows // batch_size)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(num_rows, generator=generator)
    return order[batch * batch_size : (batch + 1) * batch_size].tolist()


def due(step: int, every: int, total: int) -> bool:
    """Whether something that happens every `every` steps, and at the end, happens now."""
    return step == total or (every > 0 and step % every == 0)


SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
"""Windows has no SIGHUP, which a terminal sends when it is closed."""


class Stopped(MarlhfError):
    """A signal asked the run to stop, and it has been saved."""

    exit_status = 130


class Interrupts:
    """Notes the first signal, to be checked between steps; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:  # nohup, or a shell's background job
                continue
            with contextlib.suppress(ValueError):  # not in the main thread: leave signals alone
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self, where: str) -> None:
        """End here, where it is safe to, if a signal came."""
        if self.received:
            raise Stopped(f"Stopped by {self.received}, {where}. The same command resumes it.")

    def _note(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGHUP":
            self.received = self.received or name
            _leave_terminal()
            return
        if self.received:
            raise KeyboardInterrupt
        self.received = name
        if not console.quiet:
            # Not by `say`: a handler may run in the middle of another write to the same stream.
            words = "stopping after this step, which is saved. Ctrl-C again stops at once."
            os.write(2, f"\n{name}: {words}\n".encode())


def _leave_terminal() -> None:
    """The terminal is gone: printing to it would fail, and end the run before it is saved."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)


@contextlib.contextmanager
def record_outcome(run: RunFolder) -> Iterator[Interrupts]:
    """However the loop ends, run.json records it, and errors say how to resume."""
    try:
        with Interrupts() as interrupts:
            yield interrupts
    except Diverged as error:
        if run.has_progress:
            note, advice = f"Training diverged: {error}.", _after_divergence(run)
        else:
            note = f"Before the first step {error}."
            advice = "Look at the weights of the models that this run starts from."
        run.finish("failed", note=note)
        raise RunError(f"{note} {advice}") from error
    except (Stopped, KeyboardInterrupt):
        run.finish("stopped")
        raise
    except Exception as error:
        if lost := describe_lost_rank(error):
            run.finish("failed", note=lost)
            raise RunError(lost) from error
        explained = isinstance(error, MarlhfError)
        run.finish("failed", note=str(error) if explained else "")
        raise


def _after_divergence(run: RunFolder) -> str:
    saved = list_checkpoints(run.checkpoints)
    last = f"The last good checkpoint is {saved[-1]}. " if saved else ""
    return f"{last}Try a lower learning rate, or a higher kl_coef, in a new output_dir."


def peak_memory() -> float:
    """Peak memory of this process in GiB: of the GPU, or of RAM without one."""
    if torch.cuda.is_available():
        held = torch.cuda.max_memory_allocated()
        return held / 2**30
    import resource  # Windows has none, and no lock on run folders either

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def finish(run: RunFolder, summary: dict[str, Any], next_step: str = "") -> Path:
    """Close the run and say where things are."""
    run.state["peak_memory_gib"] = peak = peak_memory()
    run.finish("finished", summary)
    say(f"{run.path.name} finished in {run.state['seconds']:.0f} s", style="bold green")
    say(f"  model   {run.model}\n  metrics {run.path / METRICS}")
    limit = "of RAM"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        limit = f"of the GPU's {device.total_memory / 2**30:.0f} GiB"
    say(f"  memory  {peak:.1f} GiB at most, {limit}")
    if next_step and not stages_ahead.method:  # `marlhf run` begins it by itself
        say(f"  next    {next_step}")
    return run.model
