"""Sampling by a vLLM server, over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from marlhf.config.stage import Sampling
from marlhf.data.collate import SingleProcess, TokenRows
from marlhf.models.base import Model, Precision
from marlhf.rollout.engine import Rollout, SamplingRequest, in_threads
from marlhf.rollout.vllm import VLLM, Completion, RefusedError, RolloutError, fields, short
from marlhf.rollout.weight_transfer import EXTENSION, PROTOCOL, WeightSender

RETRY_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each retry."""
RETRY_STATUS = (429, 502, 503, 504)
"""HTTP status of a server that is busy or starting."""
DEFAULTS = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs": 0,  # only that of the sampled token
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""Sent with each request, since a server fills in what its model's files recommend."""


class VLLMServer(VLLM):
    """A vLLM server, over HTTP. New weights go over TCP, or through a folder that both can read.

    The server must run in development mode, or it accepts no new weights:
    `VLLM_SERVER_DEV_MODE=1 ... --logprobs-mode processed_logprobs`, and for TCP with
    `--worker-extension-cls marlhf.rollout.weight_transfer.WeightReceiver`. The API key is read
    from `VLLM_API_KEY`, as by the server.
    """

    serves_all_ranks = True

    def __init__(
        self,
        url: str,
        policy: Model,
        end_tokens: Sequence[int],
        pad_id: int,
        *,
        folder: str | Path | None = None,
        weights_host: str = "127.0.0.1",
        token_budget: int = 1 << 15,
        precision: Precision = "auto",
        timeout: float = 600.0,
        processes: SingleProcess | None = None,
    ) -> None:
        """`weights_host`: this machine's address where the server's workers fetch weights.

        `folder`: where weights are written for a server that cannot; a temporary one if None.
        `processes`: those that train. Each makes every call; the main one speaks with the server.
        """
        together = processes or SingleProcess()
        super().__init__(policy, end_tokens, pad_id, token_budget, precision, together)
        self.url = url.partition("?")[0].rstrip("/").removesuffix("/v1")
        self.where = f"The vLLM server at {self.url}"
        self.folder = None if folder is None else Path(folder).resolve()
        self.by_folder = False  # whether the server takes weights from a folder alone
        self.weights_host = weights_host
        self.timeout = timeout
        self.lost = False  # whether a connection broke during the current call
        self.ahead: Future[list[Completion]] | None = None  # what `begin` started last, if main
        # No proxy: the environment's is meant for the internet, and servers are local.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        models = self._call("/v1/models").get("data")
        if not models:
            raise RolloutError(f"{self.where} names no model. Is it a vLLM server?")
        self.model: str = models[0]["id"]
        self.max_length = models[0].get("max_model_len") or 1 << 62

    def _prepare(self, request: SamplingRequest, *, turns: bool = False) -> None:
        if self.ahead is not None:
            self.ahead.exception()  # waits for it: it needs the weights that the server has now
        super()._prepare(request, turns=turns)

    @torch.no_grad()
    def begin(
        self, prompts: TokenRows, sampling: Sampling, seeds: Sequence[int]
    ) -> Callable[[], Rollout]:
        """Start to sample with the weights that the policy has now."""
        assert not sampling.truncated, "log-probs would be of the truncated distribution"
        request = SamplingRequest.checked(prompts, sampling, seeds)
        self._prepare(request)
        # Checked now by a short response: when the others are there, the policy has changed.
        self._verify(request, self._short_completion(request))
        if self.processes.main:
            thread = ThreadPoolExecutor(1, thread_name_prefix="sampling ahead")
            self.ahead = thread.submit(self._complete_ahead, request)
            thread.shutdown(wait=False)
        pending = self.ahead

        def wait() -> list[Completion]:
            assert pending is not None, "only the main process waits for the server"
            return pending.result()

        return lambda: self._rollout(request, self.processes.on_main(wait))

    def close(self) -> None:
        """The server is the user's, and stays."""

    def _complete_ahead(self, request: SamplingRequest) -> list[Completion]:
        completions = self._request_all(request)
        if self.lost:
            raise RolloutError(
                f"{self.where} went away while it sampled ahead, and may be back with the weights "
                "of its files. Run the same command again: it resumes from the last checkpoint."
            )
        return completions

    def _request_all(self, request: SamplingRequest) -> list[Completion]:
        self.lost = False
        ask = partial(self._request, request.sampling)  # each has its own seed, so by itself
        return in_threads(ask, request.prompts, request.seeds, request.limits)

    def _complete(self, request: SamplingRequest) -> list[Completion]:
        for _ in range(3):
            completions, lost = self.processes.on_main(
                lambda: (self._request_all(request), self.lost)
            )
            if not lost:
                return completions
            # It may have been restarted, with the weights of its files: send ours, sample again.
            self._update()
        raise RolloutError(f"{self.where} goes away again and again. Its log may say why.")

    def _request(
        self, sampling: Sampling, prompt: Sequence[int], seed: int, limit: int
    ) -> Completion:
        body = fields(sampling, self.end_tokens, limit) | DEFAULTS
        body |= {"model": self.model, "prompt": list(prompt), "seed": seed}
        [choice] = self._call("/v1/completions", body)["choices"]
        tokens, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if tokens is None or logprobs is None or len(logprobs["token_logprobs"]) != len(tokens):
            raise RolloutError(
                f"{self.where} does not give token ids with log-probs. Use vLLM 0.10.2 or newer."
            )
        return Completion(tokens, logprobs["token_logprobs"])

    def _send_weights(self) -> None:
        # All processes gather each weight of a sharded policy, to the last one.
        weights = self._weights()

        def transfer() -> None:
            try:
                self._transfer(weights)
            finally:
                deque(weights, maxlen=0)

        if not self.processes.main:
            deque(weights, maxlen=0)
        self.processes.on_main(transfer)

    def _transfer(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        workers = 0 if self.by_folder else self._count_workers()
        if workers:
            self._stream_weights(weights, workers)
        else:
            self._write_weights(weights)
            if not self.by_folder:
                self.by_folder = True
                warnings.warn(
                    f"{self.where} was started without --worker-extension-cls {EXTENSION}, so each "
                    "update writes the policy's weights to disk for it to read.",
                    stacklevel=2,
                )
        # The prefix cache holds keys and values of the old weights.
        for wait in RETRY_WAITS:
            if self._call("/reset_prefix_cache", {}).get("success", True):
                return
            time.sleep(wait)
        raise RolloutError(
            f"{self.where} did not clear the prefix cache of its old weights. It must have no "
            "other users."
        )

    def _count_workers(self) -> int:
        """How many workers take weights over TCP; 0 if they do not know how to."""
        try:
            # Not by calling a method that may be missing: see `WeightReceiver` on errors.
            info = self._call("/server_info?config_format=json")
        except RefusedError:
            return 0
        if EXTENSION not in str(info.get("vllm_config")):
            return 0
        versions = self._call("/collective_rpc", {"method": "marlhf_protocol"})["results"]
        if set(versions) != {PROTOCOL}:
            raise RolloutError(
                f"{self.where} has another version of marlhf, which takes weights in another way. "
                "Install the version of this process there, and restart it."
            )
        return len(versions)

    def _stream_weights(self, weights: Iterator[tuple[str, Tensor]], workers: int) -> None:
        """Send the weights to each worker over TCP, tensor by tensor."""
        try:
            sender = WeightSender(self.weights_host, workers, self.timeout)
        except OSError as error:
            raise RolloutError(
                f"This process cannot listen on {self.weights_host} ({short(error)}). Set "
                "vllm_weights_host to an address of this machine by which the server reaches it."
            ) from None
        rpc = {
            "method": "marlhf_receive_weights",
            "kwargs": sender.address | {"token": sender.token},
        }
        broken = ""
        with ThreadPoolExecutor(1, thread_name_prefix="weight update") as thread:
            # Tried once: a second call would find nobody listening.
            call = thread.submit(self._call, "/collective_rpc", rpc, waits=())
            try:
                sender.send(weights, call.done)
            except OSError as error:
                broken = short(error)
        failures = [answer for answer in call.result()["results"] if answer]
        # A worker that fails breaks the connections of the others, so its own words come first.
        refusals = [each for each in failures if not each.startswith("ConnectionError")]
        if refusals:
            raise RefusedError(
                f"{self.where} did not take the policy's weights ({short(refusals[0])}). Start it "
                "again, from the policy's model; its log has more."
            )
        if failures or broken:
            raise RolloutError(
                f"{self.where} did not get the policy's weights ({short([*failures, broken][0])}). "
                f"Its workers connect to {self.weights_host} for them: set vllm_weights_host to "
                "an address of this machine that they reach. Its log has more."
            )

    def _write_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write the weights into a folder that the server reads."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".vllm-", dir=self.folder) as folder:
            # Clones: safetensors refuses tensors that share memory, as tied weights do.
            tensors = {name: x.detach().cpu().clone() for name, x in weights}
            save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            try:
                self._call("/collective_rpc", rpc)
            except RolloutError as error:
                raise type(error)(
                    f"{error} So it did not take the policy's weights from {folder}. Start it with "
                    "VLLM_SERVER_DEV_MODE=1, from the policy's model, where it can read that "
                    "folder; its log has more."
                ) from error

    def _call(
        self, path: str, body: dict[str, Any] | None = None, waits: tuple[float, ...] | None = None
    ) -> dict[str, Any]:
        """One request, with retries where the server is away or busy."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        for wait in (*(RETRY_WAITS if waits is None else waits), None):
            try:
                with self.opener.open(request, timeout=self.timeout) as response:
                    text = response.read()
                return json.loads(text) if text else {}
            except urllib.error.HTTPError as error:
                if error.code not in RETRY_STATUS or wait is None:
                    hint = " Set VLLM_API_KEY to its key." if error.code == 401 else ""
                    raise RefusedError(
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
                        f"{self.where} cannot be reached ({short(cause)}). Start it, or set "
                        "vllm_url to where it is."
                    ) from None
                self.lost = True
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")


def _reason(error: urllib.error.HTTPError) -> str:
    """The server's own message about a refused request."""
    text = error.read().decode(errors="replace")
    try:
        body = json.loads(text)
        detail = body.get("error") or body.get("detail") or text
        text = detail["message"] if isinstance(detail, dict) else str(detail)
    except (ValueError, AttributeError, KeyError):
        pass
    return short(text) or error.reason
