"""vLLM behind the engine protocol.

Most of these run against stand-ins that say what vLLM says: a module with an `LLM`, and a small
server. Those at the end run against the real one, in an environment of its own:
`MARLHF_VLLM_PYTHON=/path/to/venv/bin/python pytest tests/rollout/test_vllm.py`.
"""

import contextlib
import copy
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from marlhf.config.settings import to_raw
from marlhf.config.stage import LoRA
from marlhf.core import Turns
from marlhf.data import DataConfig
from marlhf.errors import SettingError
from marlhf.kernels.sampling import truncate
from marlhf.models.adapters import FrozenBaseModel
from marlhf.models.forward import Sequences, token_stats
from marlhf.models.load import load_policy
from marlhf.rollout import Sampling, vllm_server
from marlhf.rollout import vllm as module
from marlhf.rollout.native import NativeEngine
from marlhf.rollout.vllm import RolloutError, VLLMEngine
from marlhf.rollout.vllm_server import VLLMServer
from marlhf.rollout.weight_transfer import EXTENSION, WeightReceiver, WeightSender, connect, receive
from marlhf.runs.layout import RunError
from marlhf.runs.write import RunFolder
from marlhf.runtime.distributed import World
from marlhf.runtime.loop import Loop
from marlhf.runtime.stage import GivenObjects
from marlhf.train.ppo import train
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import _load_engine

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20], [1, 1, 4]]
SEEDS = [11, 12, 13]
ENDS = [1, 7, 9]
SAMPLED = Sampling(9, temperature=0.7)
VLLM = os.environ.get("MARLHF_VLLM_PYTHON", "")
real = pytest.mark.skipif(not VLLM, reason="MARLHF_VLLM_PYTHON names no python with vLLM")


class Copy:
    """A model of one's own, as vLLM has it, and what vLLM does with it."""

    def __init__(self, folder, load_format="auto", **options):
        self.options = options
        if load_format == "dummy":
            assert [f.name for f in Path(folder).iterdir()] == ["config.json"]
            config = AutoConfig.from_pretrained(folder)
            kind = AutoModelForCausalLM.from_config
            torch.manual_seed(99)  # vLLM seeds the process too
            self.model = kind(config).float().eval()
        else:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.head = self.model.lm_head.weight = torch.nn.Parameter(
            self.model.lm_head.weight.clone()
        )
        self.model_config = SimpleNamespace(max_model_len=64)
        self.forgotten = self.loads = 0
        self.raw = self.headless = False

    def load(self, weights):
        """Tied or not, vLLM's head is a weight of its own, which stays if it is not named."""
        weights = dict(weights)
        if self.headless:
            if "lm_head.weight" in weights:
                raise ValueError("no module or parameter named 'lm_head'")
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        self.model.load_state_dict(dict(weights), strict=False)
        self.loads += 1

    @torch.no_grad()
    def answer(self, prompt, params):
        assert params["ignore_eos"]
        sampling = Sampling(
            params["max_tokens"], params["temperature"], params["top_k"], params["top_p"]
        )
        engine = NativeEngine(self.model, params["stop_token_ids"], 0)
        [tokens] = engine.generate([prompt], sampling, [params["seed"]]).responses
        logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        if not self.raw:  # processed: at the temperature, of what top-k and top-p leave
            logits = truncate((logits / sampling.scale).softmax(dim=1), sampling).log()
        logprobs = logits.log_softmax(dim=1).gather(1, torch.tensor(tokens)[:, None])
        return tokens, logprobs.squeeze(1).tolist()


class FakeLLM(Copy):
    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.load(kwargs["weights_iterator"])

    def reset_prefix_cache(self):
        self.forgotten += 1
        return True

    def generate(self, inputs, params, use_tqdm):
        for prompt, param in zip(inputs, params, strict=True):
            tokens, logprobs = self.answer(prompt["prompt_token_ids"], vars(param))
            dicts = [{t: SimpleNamespace(logprob=x)} for t, x in zip(tokens, logprobs)]
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=dicts)])


@pytest.fixture
def fake_vllm(monkeypatch):
    fake = SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for name in module.ENVIRONMENT:  # put back what the engine sets
        monkeypatch.setenv(name, os.environ.get(name, ""))


class Handler(BaseHTTPRequestHandler):
    """The paths of vLLM's server that are used. `faults`: answers to give before it works."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or "{}")
        server = self.server
        server.seen.append((self.path, body, self.headers.get("Authorization")))
        with server.lock:
            fault = server.faults.get(self.path, [])
            code = fault.pop(0) if fault else 200
        if code == "drop":
            self.connection.close()
            return
        if code != 200:
            found = {"error": {"message": "not now, says the stand-in"}}
        else:
            try:
                found = server.respond(self.path, body)
            except (ValueError, OSError) as error:
                code, found = 500, {"error": {"message": str(error)}}
        data = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class FakeWorker(WeightReceiver):
    """A worker with marlhf's extension; `taken` is what it was given last, type and all."""

    def __init__(self, copy):
        self.copy, self.taken = copy, {}

    def reload_weights(self, weights_iterator):
        self.taken = dict(weights_iterator)
        self.copy.load(self.taken)


class FakeServer(ThreadingHTTPServer):
    """`workers`: those with marlhf's extension; none if it was started without."""

    def __init__(self, folder, num_workers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.copy, self.faults, self.seen = Copy(folder), {}, []
        self.workers = [FakeWorker(self.copy) for _ in range(num_workers)]
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def respond(self, path, body):
        with self.lock:
            if path == "/v1/models":
                return {"data": [{"id": "its-name", "max_model_len": 64}]}
            if path.startswith("/server_info"):
                extension = EXTENSION if self.workers else ""
                return {"vllm_config": {"parallel_config": {"worker_extension_cls": extension}}}
            if path == "/collective_rpc":
                if self.workers and body["method"].startswith("marlhf_"):
                    return {"results": self.call_workers(body["method"], body.get("kwargs", {}))}
                assert body["method"] == "reload_weights"
                files = list(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
                self.copy.load({k: v for f in files for k, v in load_file(f).items()})
                return {"results": [None]}
            if path == "/reset_prefix_cache":
                self.copy.forgotten += 1
                return {"success": self.copy.forgotten > 1}  # the first time it is in use
            assert path == "/v1/completions"
            assert body["model"] == "its-name"
            assert body["repetition_penalty"] == 1  # or else the model's own recommendation holds
            tokens, logprobs = self.copy.answer(body["prompt"], body)
            return {"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}]}

    def call_workers(self, method, kwargs):
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(lambda worker: getattr(worker, method)(**kwargs), self.workers))


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """`serve(model)`: a stand-in server that was started from that model, with the extension."""
    monkeypatch.setattr(vllm_server, "RETRY_WAITS", (0.01, 0.01))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not matter
    started = []

    def start(model, num_workers=1):
        model.save_pretrained(tmp_path / "served")
        server = FakeServer(tmp_path / "served", num_workers)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture(params=["process", "server", "server without extension"])
def engine(request, small):
    """`engine(policy)`: vLLM's stand-in, in this process or as a server of other weights."""
    fixture = request.getfixturevalue("fake_vllm" if request.param == "process" else "serve")

    def make(policy, **options):
        if request.param == "process":
            return VLLMEngine(policy, ENDS, 0, **options)
        other = small("llama-tied", seed=5)
        server = fixture(other, num_workers=int(request.param == "server"))
        made = VLLMServer(server.url, policy, ENDS, 0, **options)
        made.llm = server.copy
        return made

    return make


def changed(model):
    """A model after a step of an optimiser."""
    model = copy.deepcopy(model).train()
    loss = model(torch.arange(40)[None], labels=torch.arange(40)[None]).loss
    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.05).step()
    return model.eval()


def same(found, expected):
    assert found.responses == expected.responses
    assert found.ended.tolist() == expected.ended.tolist()
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("top_k", [0, 3])
def test_limits_cut_responses_as_the_native_engine_does(engine, small, top_k):
    """The longest prompt has no room for a whole response: 64 positions are all there are."""
    policy = small("llama")
    prompts, sampling = [[5, 6], [7] * 60, [8, 9, 10]], Sampling(20, top_k=top_k)
    limits = [20, 4, 1]
    rollout = engine(policy).generate(prompts, sampling, [1, 2, 3], limits)
    native = NativeEngine(policy, ENDS, 0).generate(prompts, sampling, [1, 2, 3], limits)
    same(rollout, native)


@pytest.mark.parametrize("top_k", [0, 3])
def test_conversations_are_sampled_turn_by_turn(engine, small, top_k):
    """Each turn is a response to the text so far; the log-probs are the policy's own."""
    policy, sampling, limits = small("llama"), Sampling(5, 0.7, top_k=top_k), [9, 30, 23]

    def reply(row, tokens):
        return None if tokens[-1] == 7 else [3 + row, *tokens[:2]][: sum(tokens) % 4]

    native, expected, marks = NativeEngine(policy, ENDS, 0), [], []
    for row, (prompt, seed, limit) in enumerate(zip(PROMPTS, SEEDS, limits)):
        text, sampled, more = [], [], []
        while more is not None and len(text) + len(more) < limit:
            text, sampled = text + more, sampled + [False] * len(more)
            turn = replace(sampling, max_new_tokens=min(5, limit - len(text)))
            own = module.turn_seed(seed, len(text))
            [tokens] = native.generate([prompt + text], turn, [own]).responses
            text, sampled = text + tokens, sampled + [True] * len(tokens)
            more = reply(row, tokens)
        expected.append(text)
        marks.append(sampled)
    found = engine(policy).generate(PROMPTS, sampling, SEEDS, limits, reply)
    assert found.responses == expected
    assert [list(row[: len(m)]) for row, m in zip(found.sampled.tolist(), marks)] == marks
    assert found.ended.tolist() == [text[-1] in ENDS for text in expected]
    sequences = Sequences.from_lists(PROMPTS, expected, 0)
    with torch.no_grad():
        ours = token_stats(policy, sequences, 0.7).logprobs.masked_fill(~found.sampled, 0)
    torch.testing.assert_close(found.logprobs, ours, atol=1e-4, rtol=0)


def test_conversations_too_long_are_a_sentence(engine, small):
    with pytest.raises(RolloutError, match="prompt of 7 tokens and a response of 60 are more"):
        engine(small("llama")).generate(PROMPTS, SAMPLED, SEEDS, [60] * 3, lambda *_: None)


def test_turns_have_different_seeds():
    """Or each would draw the random numbers of the first."""
    seeds = {module.turn_seed(seed, used) for seed in SEEDS for used in range(50)}
    assert len(seeds) == 150
    assert [module.turn_seed(seed, 0) for seed in SEEDS] == SEEDS


@pytest.mark.parametrize(
    "sampling", [Sampling(9, 0), SAMPLED, Sampling(9, 0.7, top_k=5, top_p=0.9)]
)
def test_a_rollout_is_what_the_protocol_says(engine, small, sampling):
    policy = small("llama-tied")
    found = engine(policy).generate(PROMPTS, sampling, SEEDS)
    # The stand-in samples as the native engine does, so all must be equal. With top-k its
    # log-probs are of five tokens only, and those of the rollout must not be.
    same(found, NativeEngine(policy, ENDS, 0).generate(PROMPTS, sampling, SEEDS))
    assert found.logprobs.dtype == torch.float32
    assert found.ended.dtype == torch.bool


def test_new_weights_are_sampled_from_tied_head_included(engine, small):
    policy = small("llama-tied")
    later = changed(policy)
    made = engine(policy)
    first = made.generate(PROMPTS, SAMPLED, SEEDS)
    made.update_weights(later)
    found = made.generate(PROMPTS, SAMPLED, SEEDS)
    assert found.responses != first.responses
    same(found, NativeEngine(later, ENDS, 0).generate(PROMPTS, SAMPLED, SEEDS))
    torch.testing.assert_close(made.llm.model.lm_head.weight, later.lm_head.weight)


def test_a_family_without_a_head_of_its_own_gets_tied_weights_once(engine, small):
    policy = small("llama-tied")
    later, made = changed(policy), engine(policy)
    made.llm.headless = True
    for model in (policy, later):
        made.update_weights(model)
        same(
            made.generate(PROMPTS, SAMPLED, SEEDS),
            NativeEngine(model, ENDS, 0).generate(PROMPTS, SAMPLED, SEEDS),
        )
    assert made.llm.loads == 2


def test_weights_are_sent_once_a_change_and_prompts_read_before_are_forgotten(engine, small):
    policy = small("llama-tied")
    made = engine(policy)
    for _ in range(2):
        made.generate(PROMPTS, SAMPLED, SEEDS)
    assert made.llm.loads == 1
    forgotten = made.llm.forgotten
    made.update_weights(policy)
    made.update_weights(policy)
    made.generate(PROMPTS, SAMPLED, SEEDS)
    assert made.llm.loads == 2
    assert made.llm.forgotten > forgotten


def test_a_checkpoint_loaded_before_the_first_rollout_counts(engine, small):
    policy = small("llama-tied")
    made = engine(policy)
    policy.load_state_dict(changed(policy).state_dict())  # as a run that goes on does
    same(
        made.generate(PROMPTS, SAMPLED, SEEDS),
        NativeEngine(policy, ENDS, 0).generate(PROMPTS, SAMPLED, SEEDS),
    )


def test_an_adapter_is_merged(engine, small):
    policy = FrozenBaseModel(small("llama-tied")).language_model(LoRA(r=4))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    made = engine(policy)
    found = made.generate(PROMPTS, SAMPLED, SEEDS)
    sequences = Sequences.from_lists(PROMPTS, found.responses, 0)
    with torch.no_grad():
        expected = token_stats(policy, sequences, 0.7).logprobs
    torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=0)
    assert not any("lora" in name for name, _ in made._weights())


def test_other_weights_than_the_policys_are_noticed(engine, small):
    made = engine(small("llama-tied"))
    made.stale = False  # as if they had been lost
    for sampling in (SAMPLED, Sampling(9, 0.7, top_k=5)):
        with pytest.raises(RolloutError, match=r"does not sample from the policy: .* per token"):
            made.generate(PROMPTS, sampling, SEEDS)


def test_logprobs_at_another_temperature_are_noticed(engine, small):
    made = engine(small("llama-tied"))
    made.llm.raw = True
    with pytest.raises(RolloutError, match="Start it with --logprobs-mode processed_logprobs"):
        made.generate(PROMPTS, SAMPLED, SEEDS)
    made.generate(PROMPTS, Sampling(9), SEEDS)  # at temperature 1 they are the same


def test_rows_too_long_are_a_sentence(engine, small):
    with pytest.raises(RolloutError, match=r"prompt of 7 tokens .* of 60 are more than the 64"):
        engine(small("llama-tied")).generate(PROMPTS, Sampling(60), SEEDS)


def test_starting_vllm_leaves_the_random_state_alone(fake_vllm, small):
    policy, before = small("llama"), torch.random.get_rng_state()
    made = VLLMEngine(policy, ENDS, 0, memory=0.2, tensor_parallel_size=2)
    assert torch.equal(before, torch.random.get_rng_state())
    assert made.llm.options["gpu_memory_utilization"] == 0.2
    assert made.llm.options["tensor_parallel_size"] == 2
    assert made.llm.options["dtype"] == "float32"
    assert made.llm.options["enable_chunked_prefill"] is False  # fails with seeds on a CPU


def test_weights_that_vllm_does_not_take_are_a_sentence(fake_vllm, small, monkeypatch):
    def refuse(self, method, kwargs):
        raise KeyError("model.layers.0.odd")

    monkeypatch.setattr(FakeLLM, "collective_rpc", refuse)
    with pytest.raises(RolloutError, match=r"KeyError: 'model.layers.0.odd'\).*engine: native"):
        VLLMEngine(small("llama"), ENDS, 0).generate(PROMPTS, SAMPLED, SEEDS)


def test_a_vllm_that_patches_the_policys_classes_is_refused(fake_vllm, small, monkeypatch):
    policy = small("llama")
    start = FakeLLM.__init__

    def patching(self, *args, **options):
        start(self, *args, **options)
        monkeypatch.setattr(type(policy.model), "__call__", lambda *_: None)

    monkeypatch.setattr(FakeLLM, "__init__", patching)
    with pytest.raises(RolloutError, match="no code of its own for this model"):
        VLLMEngine(policy, ENDS, 0)


def test_without_vllm_there_is_a_command_to_run(monkeypatch, small):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in module.ENVIRONMENT:
        monkeypatch.setenv(name, "")
    with pytest.raises(RolloutError, match=r"Run `pip install .marlhf\[vllm\]"):
        VLLMEngine(small("llama"), ENDS, 0)


def test_importing_marlhf_imports_no_vllm():
    assert "vllm" not in sys.modules  # nor is it needed: this file has imported all that samples


def test_a_busy_or_broken_connection_is_tried_again(serve, small):
    policy = small("llama-tied")
    server = serve(policy)
    server.faults = {"/v1/models": ["drop", 503], "/v1/completions": [429, 200, 503]}
    made = VLLMServer(server.url, policy, ENDS, 0)
    same(
        made.generate(PROMPTS, SAMPLED, SEEDS),
        NativeEngine(policy, ENDS, 0).generate(PROMPTS, SAMPLED, SEEDS),
    )
    assert server.copy.loads == 1


def test_a_server_that_was_away_gets_the_weights_again(serve, small):
    policy = small("llama-tied")
    server = serve(policy)
    made = VLLMServer(server.url, policy, ENDS, 0)
    server.faults["/v1/completions"] = ["drop"]
    made.generate(PROMPTS, SAMPLED, SEEDS)
    assert server.copy.loads == 2
    asked = [body for path, body, _ in server.seen if path == "/v1/completions"]
    assert len(asked) == 2 * len(PROMPTS) + 1  # all of them, for any may be of the old weights


def test_a_server_samples_ahead_with_the_weights_of_when_it_began(serve, small):
    policy = small("llama-tied")
    server = serve(small("llama-tied", seed=5))
    made = VLLMServer(server.url, policy, ENDS, 0)
    expected = NativeEngine(policy, ENDS, 0).generate(PROMPTS, SAMPLED, SEEDS)
    finish = made.begin(PROMPTS, SAMPLED, SEEDS)
    new = changed(policy)
    made.update_weights(new)
    after = made.generate(PROMPTS, SAMPLED, SEEDS)  # sends the new weights once the batch is there
    same(finish(), expected)
    same(after, NativeEngine(new, ENDS, 0).generate(PROMPTS, SAMPLED, SEEDS))


def test_a_server_that_goes_away_while_it_samples_ahead_is_a_sentence(serve, small):
    policy = small("llama-tied")
    server = serve(policy)
    made = VLLMServer(server.url, policy, ENDS, 0)
    server.faults["/v1/completions"] = [200, "drop"]  # the first is the check before the batch
    finish = made.begin(PROMPTS, SAMPLED, SEEDS)
    with pytest.raises(RolloutError, match=r"went away while it sampled ahead.*same command"):
        finish()


def test_a_server_of_another_model_is_noticed_before_it_samples_ahead(serve, small, monkeypatch):
    made = VLLMServer(serve(small("llama", seed=5)).url, small("llama"), ENDS, 0)
    monkeypatch.setattr(made, "_send_weights", lambda: None)
    with pytest.raises(RolloutError, match="does not sample from the policy"):
        made.begin(PROMPTS, SAMPLED, SEEDS)


def test_a_server_that_is_not_there_is_a_sentence(monkeypatch, small):
    monkeypatch.setattr(vllm_server, "RETRY_WAITS", (0.01,))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RolloutError, match=f"server at {url} cannot be reached .* Start it"):
        VLLMServer(url, small("llama"), ENDS, 0)


def test_a_server_that_cannot_take_weights_is_a_sentence(serve, small):
    server = serve(small("llama"))
    made = VLLMServer(server.url, small("llama"), ENDS, 0)
    server.faults = {"/server_info?config_format=json": [404], "/collective_rpc": [404]}
    with pytest.raises(RolloutError, match=r"404: not now.* Start it with VLLM_SERVER_DEV_MODE=1"):
        made.generate(PROMPTS, SAMPLED, SEEDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_worker_gets_every_byte_and_no_file_is_written(serve, small, tmp_path, dtype):
    policy, server = small("llama-tied"), serve(small("llama-tied", seed=5), num_workers=2)
    made = VLLMServer(server.url, policy, ENDS, 0, folder=tmp_path / "never")
    made._dtype = lambda policy: dtype
    made._update()
    expected = {name: x.to(dtype) for name, x in policy.state_dict().items()}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= expected.keys()
    for worker in server.workers:
        assert worker.taken.keys() == expected.keys()
        for name, x in expected.items():
            assert worker.taken[name].dtype == dtype
            assert torch.equal(worker.taken[name], x)
    assert not (tmp_path / "never").exists()


def test_the_extension_needs_torch_alone():
    """So that marlhf can be installed beside any vLLM without what it requires."""
    code = "import sys, marlhf.rollout.weight_transfer; print(*sys.modules)"
    known = os.pathsep.join([str(Path(module.__file__).parents[2]), *sys.path])
    loaded = subprocess.check_output(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": known}, text=True
    )
    packages = {name.partition(".")[0] for name in loaded.split()}
    assert {"torch", "marlhf"} <= packages
    assert not packages & {"transformers", "safetensors", "accelerate", "yaml", "typer", "peft"}


def test_odd_shapes_and_types_arrive():
    sent = {
        "number": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
        "counts": torch.arange(5),
        "flags": torch.tensor([[True, False]]),
        "view": torch.arange(12.0).view(3, 4).t(),
    }
    sender = WeightSender("127.0.0.1", 1, timeout=30)
    with ThreadPoolExecutor(1) as thread:
        num_bytes = thread.submit(sender.send, sent.items(), lambda: False)
        with connect(**sender.address, token=sender.token) as trainer:
            taken = dict(receive(trainer, []))
    assert taken.keys() == sent.keys()
    for name, x in sent.items():
        assert taken[name].dtype == x.dtype
        assert torch.equal(taken[name], x)
    assert num_bytes.result() == 4 + 0 + 5 * 8 + 2 + 12 * 4


def test_only_the_token_opens_and_only_one_update_long():
    sender = WeightSender("127.0.0.1", 1, timeout=30)
    address = sender.address
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(sender.send, [("x", torch.ones(2))], lambda: False)
        with pytest.raises(ConnectionError, match=r"at 127\.0\.0\.1:\d+ refused a worker's token"):
            connect(**address, token="0" * len(sender.token))
        with socket.create_connection(tuple(address.values())) as silent:
            silent.sendall(b"short")
        with connect(**address, token=sender.token) as trainer:
            # The one worker is there. Nobody listens any more, or nobody answers.
            closed = "cannot reach the trainer|refused a worker's token"
            with pytest.raises(ConnectionError, match=closed):
                connect(**address, token=sender.token)
            assert [name for name, _ in receive(trainer, [])] == ["x"]
        assert done.result() == 8


def drip(address, stop):
    """A stranger who sends a byte now and then, and never a token."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(tuple(address.values())) as stranger,
    ):
        while not stop.wait(0.2):
            stranger.sendall(b"0")


def test_strangers_keep_no_worker_waiting():
    sender = WeightSender("127.0.0.1", 2, timeout=20)
    stop = threading.Event()
    with ThreadPoolExecutor(8) as threads:
        strangers = [threads.submit(drip, sender.address, stop) for _ in range(4)]
        began = time.monotonic()
        time.sleep(0.3)  # they are first
        done = threads.submit(sender.send, [("x", torch.ones(2))], lambda: False)
        workers = [connect(**sender.address, token=sender.token) for _ in range(2)]
        for worker in workers:
            with worker:
                assert [name for name, _ in receive(worker, [])] == ["x"]
        assert done.result() == 8
        assert time.monotonic() - began < 5
        stop.set()
        for stranger in strangers:
            stranger.result()


def test_one_deadline_holds_for_all_workers_together():
    sender = WeightSender("127.0.0.1", 2, timeout=1.5)
    stop = threading.Event()
    with ThreadPoolExecutor(4) as threads:
        stranger = threads.submit(drip, sender.address, stop)
        time.sleep(0.3)
        began = time.monotonic()
        done = threads.submit(sender.send, [("x", torch.ones(2))], lambda: False)
        with connect(**sender.address, token=sender.token):
            said = (
                r"1 of its 2 workers connected within 1\.5 seconds; 1 connections showed no token"
            )
            with pytest.raises(ConnectionError, match=said):
                done.result()
        assert time.monotonic() - began < 4
        stop.set()
        stranger.result()


def test_a_trainer_that_dies_half_way_is_a_sentence():
    def dies():
        yield "first", torch.ones(2)
        raise ZeroDivisionError

    taken = []
    worker = WeightReceiver()
    worker.reload_weights = lambda weights_iterator: taken.extend(weights_iterator)
    sender = WeightSender("127.0.0.1", 1, timeout=30)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(sender.send, dies(), lambda: False)
        answer = worker.marlhf_receive_weights(**sender.address, token=sender.token)
        with pytest.raises(ZeroDivisionError):
            done.result()
    assert [name for name, _ in taken] == ["first"]  # vLLM can finish what it has begun
    assert answer.startswith("ConnectionError: A worker lost its connection to the trainer after f")


def test_a_worker_that_dies_half_way_is_a_sentence(serve, small, monkeypatch):
    policy = small("llama-tied")
    server = serve(policy)
    made = VLLMServer(server.url, policy, ENDS, 0)

    def dies(self, weights_iterator):
        next(weights_iterator)
        raise OSError("the worker ran out of memory")

    monkeypatch.setattr(FakeWorker, "reload_weights", dies)
    with pytest.raises(
        RolloutError, match=r"did not take .* \(OSError: the worker ran out of memory\)"
    ):
        made.generate(PROMPTS, SAMPLED, SEEDS)
    monkeypatch.setattr(FakeWorker, "reload_weights", lambda self, weights_iterator: None)
    monkeypatch.setattr(made, "_weights", lambda: [("large", torch.zeros(1 << 24))])
    with pytest.raises(RolloutError, match=r"did not get .* \(\[Errno"):
        made.generate(PROMPTS, SAMPLED, SEEDS)


def test_a_server_that_dies_half_way_is_a_sentence(serve, small):
    policy = small("llama-tied")
    server = serve(policy)
    made = VLLMServer(server.url, policy, ENDS, 0)
    server.faults["/collective_rpc"] = [200, "drop"]  # the first asks for the protocol
    with pytest.raises(RolloutError, match="cannot be reached"):
        made.generate(PROMPTS, SAMPLED, SEEDS)
    assert made.skipped == set()  # nothing was refused, so tied weights are not the reason


def test_workers_that_cannot_connect_are_a_sentence(serve, small, monkeypatch):
    policy = small("llama")
    made = VLLMServer(serve(policy).url, policy, ENDS, 0)

    def elsewhere(host, num_workers, timeout):
        sender = WeightSender(host, num_workers, timeout)
        with socket.create_server((host, 0)) as closed:
            sender.address = {"host": host, "port": closed.getsockname()[1]}
        return sender

    monkeypatch.setattr(vllm_server, "WeightSender", elsewhere)
    with pytest.raises(RolloutError, match=r"cannot reach the trainer .* set vllm_weights_host to"):
        made.generate(PROMPTS, SAMPLED, SEEDS)
    monkeypatch.undo()
    made.weights_host = "192.0.2.1"  # of no machine
    with pytest.raises(RolloutError, match=r"cannot listen on 192\.0\.2\.1 .* vllm_weights_host"):
        made.generate(PROMPTS, SAMPLED, SEEDS)


def test_a_server_without_the_extension_reads_a_folder_which_is_said_once(serve, small, recwarn):
    policy = small("llama-tied")
    server = serve(policy, num_workers=0)
    made = VLLMServer(server.url, policy, ENDS, 0)
    made.generate(PROMPTS, SAMPLED, SEEDS)
    made.update_weights(changed(policy))
    made.generate(PROMPTS, SAMPLED, SEEDS)
    [warning] = [str(each.message) for each in recwarn if "extension" in str(each.message)]
    assert "started without --worker-extension-cls marlhf.rollout.weight" in warning
    assert server.copy.loads == 2
    asked = [body["method"] for path, body, _ in server.seen if path == "/collective_rpc"]
    assert asked == ["reload_weights", "reload_weights"]


def test_a_server_with_another_protocol_is_a_sentence(serve, small, monkeypatch):
    monkeypatch.setattr(FakeWorker, "marlhf_protocol", lambda self: "0")
    policy = small("llama")
    made = VLLMServer(serve(policy).url, policy, ENDS, 0)
    with pytest.raises(RolloutError, match="has another version of marlhf"):
        made.generate(PROMPTS, SAMPLED, SEEDS)


def test_a_slow_server_is_a_sentence(serve, small):
    server = serve(small("llama"))
    made = VLLMServer(server.url, small("llama"), ENDS, 0, timeout=0.2)
    with server.lock, pytest.raises(RolloutError, match=r"took more than 0\.2 seconds"):
        made.generate(PROMPTS, SAMPLED, SEEDS)


def test_what_is_not_vllm_is_a_sentence(serve, small):
    server = serve(small("llama"))
    server.respond = lambda path, body: b"<html>" if path == "/v1/models" else {}
    with pytest.raises(RolloutError, match=r"with no JSON\. Is it a vLLM server"):
        VLLMServer(server.url, small("llama"), ENDS, 0)
    server.respond = lambda path, body: {"data": []}
    with pytest.raises(RolloutError, match="names no model"):
        VLLMServer(server.url, small("llama"), ENDS, 0)


def test_an_older_server_is_a_sentence(serve, small):
    server = serve(small("llama"))
    made = VLLMServer(server.url, small("llama"), ENDS, 0)
    server.respond = lambda *_: {"choices": [{"text": "hello", "logprobs": None}]}
    with pytest.raises(RolloutError, match=r"Use vLLM 0.10.2 or newer"):
        made.generate(PROMPTS, SAMPLED, SEEDS)


def test_the_key_is_sent_and_never_told(serve, small, monkeypatch):
    server = serve(small("llama"))
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    made = VLLMServer(f"{server.url}/v1/", small("llama"), ENDS, 0)
    assert server.seen[-1][2] == "Bearer hunter2"
    server.faults["/v1/completions"] = [401] * 9
    with pytest.raises(RolloutError, match="Set VLLM_API_KEY") as raised:
        made.generate(PROMPTS, SAMPLED, SEEDS)
    assert "hunter2" not in str(raised.value)
    config = {"model": "tiny", "output_dir": "x", "engine": "vllm"}
    with pytest.raises(SettingError, match="holds a password") as raised:
        PPOConfig(**config, vllm_url="http://me:hunter2@127.0.0.1:8000")
    assert "hunter2" not in str(raised.value)
    with pytest.raises(SettingError, match="must be like http://127"):
        PPOConfig(**config, vllm_url="127.0.0.1:8000")


def brevity(completions, **_):
    return [-float(len(text)) for text in completions]


def interrupted(*_):
    raise KeyboardInterrupt


def run(folder, **changes):
    """Metrics of a short PPO run that is stopped once and goes on."""
    settings = {"num_steps": 2, "save_every": 1, "eval_every": 0, "eval_prompts": 4} | changes
    config = PPOConfig(
        model="tiny",
        data=DataConfig(source="toy", limit=60, eval_size=8),
        output_dir=str(folder),
        sampling=Sampling(max_new_tokens=8, temperature=0.8),
        batch_size=4,
        learning_rate=1e-2,
        warmup_steps=0,
        **settings,
    )
    objects = GivenObjects(reward_funcs=[brevity])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config, objects)
    shutil.rmtree(folder / "checkpoints" / "step-000002")
    train(config, objects)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [x for x in lines if x["kind"] == "train"]


def alike(found, expected):
    assert len(found) == len(expected) == 2
    for line, other in zip(found, expected):
        for key in ("rl/score", "rl/kl", "rl/length", "rl/policy_loss", "rl/value_loss"):
            assert line[key] == pytest.approx(other[key], abs=1e-4), key
        assert line["rl/logprob_gap"] < 1e-5


def test_a_run_is_the_same_with_either_engine(fake_vllm, serve, tmp_path):
    native = run(tmp_path / "native")
    alike(run(tmp_path / "process", engine="vllm"), native)
    url = serve(load_policy("tiny")).url
    alike(run(tmp_path / "server", engine="vllm", vllm_url=url), native)
    assert not [f.name for f in (tmp_path / "server").iterdir() if "vllm" in f.name]


@pytest.mark.xdist_group("forked")
def test_a_run_that_samples_ahead_is_the_same_with_a_server(serve, forked_samplers, tmp_path):
    ahead = {"async_steps": 1, "num_steps": 3}
    native = run(tmp_path / "native", **ahead)
    url = serve(load_policy("tiny")).url
    server = run(tmp_path / "server", engine="vllm", vllm_url=url, **ahead)
    assert [line["async/age"] for line in server] == [0, 1, 1]
    for line, other in zip(server, native, strict=True):
        for key in ("rl/score", "rl/kl", "rl/policy_loss", "async/kl", "async/weight_max"):
            assert line[key] == pytest.approx(other[key], abs=1e-4), key


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="Set engine: vllm"):
        PPOConfig(model="tiny", output_dir="x", vllm_url="http://127.0.0.1:8000")
    with pytest.raises(ValueError, match="must be like http"):
        PPOConfig(model="tiny", output_dir="x", engine="vllm", vllm_url="127.0.0.1:8000")
    with pytest.raises(ValueError, match="must be one address of this machine"):
        PPOConfig(
            model="tiny",
            output_dir="x",
            engine="vllm",
            vllm_url="http://127.0.0.1:8000",
            vllm_weights_host="0.0.0.0",
        )
    with pytest.raises(ValueError, match="vllm_memory must be"):
        PPOConfig(model="tiny", output_dir="x", engine="vllm", vllm_memory=2)


def test_the_engine_is_part_of_a_run_and_its_address_is_not(fake_vllm, tmp_path):
    run(tmp_path / "run", engine="vllm", num_steps=2)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["engine"] == "vllm"
    RunFolder(tmp_path / "run", "ppo", config | {"vllm_url": "http://127.0.0.1:1"})
    with pytest.raises(RunError, match="engine: 'vllm' there, 'native' now"):
        RunFolder(tmp_path / "run", "ppo", config | {"engine": "native"})


def test_several_processes_need_a_server(fake_vllm, small, tmp_path):
    world = World(torch.device("cpu"), rank=0, size=2)
    config = PPOConfig(model="tiny", output_dir=str(tmp_path), engine="vllm")
    with pytest.raises(RunError, match=r"one process, not with several\. Set vllm_url"):
        _load_engine(config, small("llama"), [2], 0, world)


def ranks_config(folder, **changes):
    """A PPO run of two steps, for the command line."""
    return PPOConfig(
        model="tiny",
        reward_model="tiny",
        random_reward_head=True,
        data=DataConfig(source="toy", limit=60, eval_size=8),
        output_dir=str(folder),
        sampling=Sampling(max_new_tokens=8, temperature=0.8),
        batch_size=5,
        learning_rate=1e-2,
        warmup_steps=0,
        num_steps=2,
        eval_prompts=3,
        save_every=0,
        device="cpu",
        **changes,
    )


def train_lines(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


@pytest.mark.distributed
@pytest.mark.xdist_group("forked")
@pytest.mark.parametrize(
    ("parallel", "num_workers", "changes"),
    [
        ("fsdp", 2, {}),
        ("fsdp", 1, {"lora": LoRA(r=2), "sampling": Sampling(8, 0.8, top_k=5)}),
        ("data", 0, {}),
    ],
)
def test_two_processes_with_a_server_are_one(
    serve, fork_server, tmp_path, parallel, num_workers, changes
):
    server = serve(load_policy("tiny"), num_workers)
    alone = replace(ranks_config(tmp_path / "alone"), **changes)
    train(alone)
    two = {"output_dir": str(tmp_path / "two"), "parallel": parallel}
    vllm = {"engine": "vllm", "vllm_url": server.url}
    recipe = tmp_path / "two.yaml"
    recipe.write_text(yaml.safe_dump(to_raw(replace(alone, **two, **vllm))))
    process = fork_server.start_ranks("-m", "marlhf", "ppo", str(recipe))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    for line, other in zip(
        train_lines(tmp_path / "two"), train_lines(tmp_path / "alone"), strict=True
    ):
        for key in ("rl/score", "rl/kl", "rl/length", "rl/policy_loss", "rl/value_loss"):
            assert line[key] == pytest.approx(other[key], abs=2e-4), key
        assert line["rl/logprob_gap"] < 1e-5
    asked = sum(path == "/v1/completions" for path, _, _ in server.seen)
    checks = 4 if "sampling" in changes else 0  # with top-k, a response more for each batch
    assert asked == 2 * 5 + 2 * 3 + checks  # by one process: two steps and two evaluations
    assert server.copy.loads == max(num_workers, 1) * 3  # at first, and after each step


@pytest.mark.distributed
@pytest.mark.xdist_group("forked")
def test_two_processes_sample_ahead_with_a_server_as_one_does(serve, fork_server, tmp_path):
    ahead = {"engine": "vllm", "async_steps": 1, "num_steps": 3, "sampling": Sampling(8)}
    asked = []
    for name, ranks in (("alone", 1), ("two", 2)):
        server = serve(load_policy("tiny"), num_workers=1)
        config = replace(ranks_config(tmp_path / name), vllm_url=server.url, **ahead)
        if ranks == 1:
            train(config)
        else:
            recipe = tmp_path / "two.yaml"
            recipe.write_text(yaml.safe_dump(to_raw(replace(config, parallel="fsdp"))))
            process = fork_server.start_ranks("-m", "marlhf", "ppo", str(recipe))
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
        asked.append(sum(path == "/v1/completions" for path, _, _ in server.seen))
    # By one process: three steps, each with a short response first, and two evaluations.
    assert asked == [3 * (1 + 5) + 2 * 3] * 2
    alone, two = (train_lines(tmp_path / name) for name in ("alone", "two"))
    assert [line["async/age"] for line in two] == [0, 1, 1]
    for line, other in zip(two, alone, strict=True):
        for key in ("rl/score", "rl/kl", "rl/policy_loss", "async/kl", "async/weight_max"):
            assert line[key] == pytest.approx(other[key], abs=2e-4), key


@pytest.mark.distributed
@pytest.mark.xdist_group("forked")
@pytest.mark.parametrize("parallel", ["fsdp", "data"])
def test_two_processes_converse_with_a_server_as_one_does(serve, fork_server, tmp_path, parallel):
    """The environments are in one process alone: a wrong answer of the game is drawn there."""
    settings = {
        "data": DataConfig(source="guess", limit=60, eval_size=8, parts={"ppo": 1.0}),
        "environment": "guess",
        "environment_options": {"wrong": 0.3},
        "max_turns": 3,
        "episode_tokens": 60,
        "segmenter": Turns(),
        "sampling": Sampling(4),
    }
    asked = []
    for name in ("alone", "two"):
        server = serve(load_policy("tiny"))
        config = ranks_config(tmp_path / name, engine="vllm", vllm_url=server.url)
        config = replace(config, **settings)
        if name == "alone":
            train(config)
        else:
            recipe = tmp_path / "two.yaml"
            recipe.write_text(yaml.safe_dump(to_raw(replace(config, parallel=parallel))))
            process = fork_server.start_ranks("-m", "marlhf", "ppo", str(recipe))
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
        asked.append(sum(path == "/v1/completions" for path, _, _ in server.seen))
    assert asked[0] == asked[1] > 2 * 5 + 2 * 3  # more than a turn each
    alone, two = (train_lines(tmp_path / name) for name in ("alone", "two"))
    for line, other in zip(two, alone, strict=True):
        for key in ("rl/score", "rl/kl", "rl/turns", "rl/world_tokens", "rl/policy_loss"):
            assert line[key] == pytest.approx(other[key], abs=2e-4), key
        assert line["rl/logprob_gap"] < 1e-5


@pytest.mark.distributed
@pytest.mark.xdist_group("forked")
def test_a_server_that_fails_ends_both_processes(serve, fork_server, tmp_path, monkeypatch):
    server = serve(load_policy("tiny"))

    def refuse(self, weights_iterator):
        next(weights_iterator)
        raise KeyError("odd")

    monkeypatch.setattr(FakeWorker, "reload_weights", refuse)
    config = ranks_config(tmp_path / "run", parallel="fsdp", engine="vllm", vllm_url=server.url)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(yaml.safe_dump(to_raw(config)))
    process = fork_server.start_ranks("-m", "marlhf", "ppo", str(recipe))
    _, errors = process.communicate(timeout=300)
    assert process.returncode
    assert "did not take the policy's weights (KeyError: 'odd')" in errors
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


# The real one. Head size 32, for its attention on a CPU has no smaller ones. Conversations are
# longer than its blocks of 128 tokens, so that their beginnings are in its prefix cache.
WIDE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 512}
STARTS = 420
"""Seconds that vLLM may take to start on a busy machine."""


def chat(row, tokens):
    """A reply of up to 90 tokens that depends on all of the turn, or the end."""
    number = (row + sum(tokens)) % 10
    return None if number == 9 else [(3 * i + row) % 40 + 2 for i in range(10 * number)]


REAL = f"""
import json, sys, time, torch
{inspect.getsource(chat)}"""
REAL += """
from transformers import AutoModelForCausalLM
from marlhf.config.stage import LoRA
from marlhf.models.adapters import FrozenBaseModel
from marlhf.models.forward import Sequences, token_stats
from marlhf.rollout import Sampling
from marlhf.rollout.native import NativeEngine
from marlhf.rollout.vllm import VLLMEngine

first, second, prompts, seeds, ends = json.loads(sys.argv[1])
load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
policy, later, found = load(first), load(second), {}

def gap(model, rollout, temperature):
    sequences = Sequences.from_lists(prompts, rollout.responses, 0)
    with torch.no_grad():
        expected = token_stats(model, sequences, temperature).logprobs
    if rollout.sampled is not None:
        expected = expected.masked_fill(~rollout.sampled, 0)
    return float((rollout.logprobs - expected).abs().max())

engine = VLLMEngine(policy, ends, 0, memory=0.1)
for name, model in ("first", policy), ("second", later):
    engine.update_weights(model)
    native = NativeEngine(model, ends, 0)
    greedy = Sampling(24, temperature=0)
    mine, theirs = (e.generate(prompts, greedy, seeds) for e in (native, engine))
    found[name] = {
        "greedy": [mine.responses, theirs.responses],
        "ended": [mine.ended.tolist(), theirs.ended.tolist()],
        "gaps": [gap(model, theirs, 1.0)],
    }
    for sampling in Sampling(24, 0.7), Sampling(24, 1.0), Sampling(24, 0.7, top_k=5, top_p=0.9):
        rollout = engine.generate(prompts, sampling, seeds)
        found[name]["gaps"].append(gap(model, rollout, sampling.scale))
    limits, greedy = [400] * len(prompts), Sampling(6, temperature=0)
    talks = [e.generate(prompts, greedy, seeds, limits, chat) for e in (native, engine)]
    found[name]["talks"] = [[talk.responses, talk.sampled.tolist()] for talk in talks]
    for sampling in Sampling(6, 0.7), Sampling(6, 0.7, top_k=5):
        talk = engine.generate(prompts, sampling, seeds, limits, chat)
        talks.append(talk)
        assert talk.responses == engine.generate(prompts, sampling, seeds, limits, chat).responses
    found[name]["talk_gaps"] = [gap(model, talk, 0.7) for talk in talks[2:]]
# More new tokens than vLLM reads at once.
texts = [[5 + i, *range(2, 40), *range(2, 40), *range(2, 40)] for i in range(40)]
found["many"] = [len(r) for r in engine.generate(texts, Sampling(4), range(40)).responses]
runs = [engine.generate(prompts, Sampling(24), s) for s in (seeds, seeds, seeds[::-1])]
found["seeds"] = [run.responses for run in runs]
found["alone"] = engine.generate(prompts[:1], Sampling(24), seeds[:1]).responses
counts = torch.zeros(policy.config.vocab_size)
many = engine.generate([[5, 2]] * 3000, Sampling(1, 0.8), range(3000))
for [token] in many.responses:
    counts[token] += 1
with torch.no_grad():
    exact = (later(torch.tensor([[5, 2]])).logits[0, -1] / 0.8).softmax(dim=0)
often = exact * 3000 >= 5
expected = (exact * 3000)[often]
found["chi_square"] = [float(((counts[often] - expected) ** 2 / expected).sum()), int(often.sum())]
try:
    view = FrozenBaseModel(policy).language_model(LoRA(r=4))
except ValueError:  # no peft there
    found["adapter"] = None
else:
    with torch.no_grad():
        for parameter in view.parameters():
            parameter.normal_(std=0.1)
    engine.update_weights(view)
    found["adapter"] = gap(view, engine.generate(prompts, Sampling(24), seeds), 1.0)
start = time.perf_counter()
engine.update_weights(later)
engine._send_weights()
found["seconds"] = time.perf_counter() - start
print("FOUND" + json.dumps(found))
"""


def pair(root, model):
    """A model and what an optimiser's step made of it, with folders of both."""
    models = {"first": model, "second": changed(model)}
    for name, one in models.items():
        one.save_pretrained(root / name)
    return root, models


@pytest.fixture(scope="module")
def tied(tmp_path_factory, small):
    return pair(tmp_path_factory.mktemp("tied"), small("llama-tied", **WIDE))


@pytest.fixture(scope="module")
def untied(tmp_path_factory, small):
    return pair(tmp_path_factory.mktemp("untied"), small("llama", **WIDE))


def environment():
    source = str(Path(module.__file__).parents[2])
    quiet = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    return os.environ | quiet | {"PYTHONPATH": source, "VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="module")
def measured(tied):
    """What the real vLLM does in one process, which is started once for all tests of it."""
    root, _ = tied
    given = [str(root / "first"), str(root / "second"), PROMPTS, SEEDS, ENDS]
    done = subprocess.run(
        [VLLM, "-c", REAL, json.dumps(given)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=STARTS,
        check=False,
    )
    assert "FOUND" in done.stdout, (done.stdout + done.stderr)[-3000:]
    found = json.loads(done.stdout.rpartition("FOUND")[2])
    print(json.dumps({k: v for k, v in found.items() if k not in ("seeds", "alone")}))
    return found


@real
@pytest.mark.slow
def test_real_greedy_is_the_native_engines_before_and_after_an_update(measured):
    for name in ("first", "second"):
        mine, theirs = measured[name]["greedy"]
        assert theirs == mine
        assert measured[name]["ended"][0] == measured[name]["ended"][1]
    assert measured["first"]["greedy"] != measured["second"]["greedy"]


@real
@pytest.mark.slow
def test_real_logprobs_are_those_of_the_training_pass(measured):
    gaps = [gap for name in ("first", "second") for gap in measured[name]["gaps"]]
    assert max(gaps) < 1e-4
    # Merging rounds once more. None where vLLM's environment has no peft.
    assert measured["adapter"] is None or measured["adapter"] < 5e-4


@real
@pytest.mark.slow
def test_real_conversations_are_the_native_engines_when_greedy(measured):
    for name in ("first", "second"):
        mine, theirs = measured[name]["talks"]
        assert theirs == mine
        assert max(map(len, mine[0])) > 200  # several blocks, and so several turns
        assert max(measured[name]["talk_gaps"]) < 1e-4
    assert measured["first"]["talks"] != measured["second"]["talks"]


@real
@pytest.mark.slow
def test_real_prompts_with_more_tokens_than_a_step_are_answered(measured):
    assert len(measured["many"]) == 40
    assert min(measured["many"]) > 0


@real
@pytest.mark.slow
def test_real_seeds_decide_and_neighbours_do_not(measured):
    again, other = measured["seeds"][1:]
    assert measured["seeds"][0] == again != other
    assert measured["alone"][0] == again[0]


@real
@pytest.mark.slow
def test_real_samples_follow_the_distribution(measured):
    statistic, outcomes = measured["chi_square"]
    assert statistic < 2.5 * outcomes + 10


@contextlib.contextmanager
def real_server(root, *options):
    """The address of a real server of the first of two models."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(root / "first")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init"]
    command += ["--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.1"]
    command += ["--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill", *options]
    log = root / "log"
    with log.open("w") as file:
        server = subprocess.Popen(command, env=environment(), stdout=file, stderr=file)
    try:
        until = time.monotonic() + STARTS
        while server.poll() is None and time.monotonic() < until:
            with socket.socket() as asked:
                if not asked.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(1)
        assert server.poll() is None, log.read_text()[-3000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture(scope="module")
def real_tied_server(tied):
    with real_server(tied[0], "--worker-extension-cls", EXTENSION) as url:
        yield url


def check_updates(engine, models):
    """Responses and log-probs of a real server are the policy's, before and after an update."""
    seen = []
    for model in models.values():
        engine.update_weights(model)
        greedy = Sampling(24, temperature=0)
        expected = NativeEngine(model, ENDS, 0).generate(PROMPTS, greedy, SEEDS)
        same(engine.generate(PROMPTS, greedy, SEEDS), expected)
        for sampling in (SAMPLED, Sampling(24, 0.7, top_k=5)):
            runs = [engine.generate(PROMPTS, sampling, SEEDS) for _ in range(2)]
            assert runs[0].responses == runs[1].responses
            sequences = Sequences.from_lists(PROMPTS, runs[0].responses, 0)
            with torch.no_grad():
                logprobs = token_stats(model, sequences, 0.7).logprobs
            torch.testing.assert_close(runs[0].logprobs, logprobs, atol=1e-4, rtol=0)
        seen.append(runs[0].responses)
        check_conversations(engine, model)
    assert seen[0] != seen[1]


def check_conversations(engine, model):
    """As by the native engine where greedy; drawn ones have log-probs of the training pass."""
    limits, native = [400] * len(PROMPTS), NativeEngine(model, ENDS, 0)
    asked = PROMPTS, Sampling(6, temperature=0), SEEDS, limits, chat
    found, expected = engine.generate(*asked), native.generate(*asked)
    assert found.responses == expected.responses
    assert found.ended.equal(expected.ended)
    assert found.sampled.equal(expected.sampled)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)
    assert max(map(len, found.responses)) > 200  # several blocks, and so several turns
    runs = [engine.generate(PROMPTS, Sampling(6, 0.7), SEEDS, limits, chat) for _ in range(2)]
    assert runs[0].responses == runs[1].responses
    sequences = Sequences.from_lists(PROMPTS, runs[0].responses, 0)
    with torch.no_grad():
        logprobs = token_stats(model, sequences, 0.7).logprobs.masked_fill(~runs[0].sampled, 0)
    torch.testing.assert_close(runs[0].logprobs, logprobs, atol=1e-4, rtol=0)


@real
@pytest.mark.slow
def test_real_server_takes_tied_weights_over_tcp(real_tied_server, tied, tmp_path):
    engine = VLLMServer(real_tied_server, tied[1]["first"], ENDS, 0, folder=tmp_path / "never")
    check_updates(engine, tied[1])
    assert not engine.by_folder
    assert not (tmp_path / "never").exists()


@real
@pytest.mark.slow
def test_real_server_takes_weights_over_tcp(untied, tmp_path):
    with real_server(untied[0], "--worker-extension-cls", EXTENSION) as url:
        engine = VLLMServer(url, untied[1]["first"], ENDS, 0, folder=tmp_path / "never")
        check_updates(engine, untied[1])
    assert not engine.by_folder
    assert not (tmp_path / "never").exists()


@real
@pytest.mark.slow
def test_real_server_without_the_extension_reads_a_folder(tied, tmp_path):
    with real_server(tied[0]) as url:
        engine = VLLMServer(url, tied[1]["first"], ENDS, 0, folder=tmp_path)
        with pytest.warns(UserWarning, match="worker-extension-cls"):
            check_updates(engine, tied[1])
    assert list(tmp_path.iterdir()) == []


@real
@pytest.mark.slow
def test_real_server_names_the_trainer_that_it_cannot_reach(real_tied_server, tied):
    engine = VLLMServer(real_tied_server, tied[1]["first"], ENDS, 0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    call = {"host": "127.0.0.1", "port": port, "token": "0"}
    answer = engine._call("/collective_rpc", {"method": "marlhf_receive_weights", "kwargs": call})
    assert f"cannot reach the trainer at 127.0.0.1:{port}" in answer["results"][0]
    same(  # and it goes on with the weights that it had
        engine.generate(PROMPTS, SAMPLED, SEEDS),
        engine.generate(PROMPTS, SAMPLED, SEEDS),
    )


@real
@pytest.mark.slow
def test_real_server_refuses_another_model(real_tied_server, small):
    for other in ({"hidden_size": 64}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}):
        engine = VLLMServer(real_tied_server, small("llama-tied", **WIDE | other), ENDS, 0)
        with pytest.raises(RolloutError, match=r"does not sample from the policy|did not take"):
            engine.generate(PROMPTS, SAMPLED, SEEDS)
