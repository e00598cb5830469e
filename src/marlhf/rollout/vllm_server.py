"""Sampling by a vLLM server, over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from marlhf.configs.sampling import Sampling, check_url
from marlhf.models.base import Model, Precision
from marlhf.rollout.vllm import VLLM, Answer, RolloutError, fields, short

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


class VLLMServer(VLLM):
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
        body = fields(sampling, self.end_tokens) | PLAIN
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
                        f"{self.where} cannot be reached ({short(cause)}). Start it, or set "
                        "vllm_url to where it is."
                    ) from None
                self.lost = True
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")


def _reason(error: urllib.error.HTTPError) -> str:
    """What a server says about a refusal."""
    text = error.read().decode(errors="replace")
    try:
        found = json.loads(text)
        found = found.get("error") or found.get("detail") or text
        text = found["message"] if isinstance(found, dict) else str(found)
    except (ValueError, AttributeError, KeyError):
        pass
    return short(text) or error.reason
