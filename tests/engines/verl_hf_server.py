"""The rollout server of `verl_hf`, a Ray actor.

Imports no verl at the top: Ray loads this module by name, and verl's plugins must not be half
loaded when it does.
"""

import asyncio
import zlib
from collections import Counter

import torch

PATIENCE = 0.5
"""Seconds that a request waits for others, to be sampled in one batch with them."""


class HFServer:
    """One model, which samples up to `max_batch` requests at once.

    A batch is in the order of its prompts and has a seed of its own, from its prompts, its weights'
    step, and how often it was asked for. So responses do not depend on the order of requests; with
    a batch of one and one response per prompt, nor on how many servers share them.
    """

    def __init__(self, path, *, device, dtype, max_tokens, max_batch):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self.model, self.device = model.to(device).eval(), device
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.max_tokens, self.max_batch, self.steps = max_tokens, max_batch, 0
        self.waiting, self.asked = [], Counter()
        self.lock = asyncio.Lock()

    async def ready(self):
        return True

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        response = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), sampling_params, response))
        if len(self.waiting) < self.max_batch:
            await asyncio.sleep(PATIENCE)
        async with self.lock:
            while not response.done():
                batch = sorted(self.waiting[: self.max_batch], key=lambda request: request[0])
                del self.waiting[: self.max_batch]
                prompts, params, responses = zip(*batch, strict=True)
                assert all(other == params[0] for other in params)
                outputs = await asyncio.to_thread(self.sample, prompts, params[0])
                for waiting, output in zip(responses, outputs, strict=True):
                    waiting.set_result(output)
        return response.result()

    @torch.no_grad()
    def sample(self, prompts, params):
        from verl.workers.rollout.replica import TokenOutput

        temperature = params.get("temperature", 1.0)
        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        seed = repr((self.steps, prompts))
        torch.manual_seed(zlib.crc32(seed.encode()) + self.asked[seed])
        self.asked[seed] += 1
        width = max(len(prompt) for prompt in prompts)
        rows = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        out = self.model.generate(
            input_ids=torch.tensor(rows, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=params.get("max_tokens") or self.max_tokens,
            pad_token_id=pad,
            eos_token_id=eos,
            do_sample=temperature > 0,
            top_k=0,
            top_p=params.get("top_p", 1.0),
            temperature=temperature or 1.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens = out.sequences[:, width:]
        logprobs = [
            scores.float().log_softmax(dim=-1).gather(1, token[:, None])[:, 0]
            for scores, token in zip(out.scores, tokens.T, strict=True)
        ]
        outputs = []
        for row, values in zip(tokens.tolist(), torch.stack(logprobs, dim=1).tolist(), strict=True):
            length = row.index(eos) + 1 if eos in row else len(row)
            outputs.append(
                TokenOutput(
                    token_ids=row[:length],
                    log_probs=values[:length],
                    stop_reason="completed",
                    extra_fields={"global_steps": self.steps},
                )
            )
        return outputs

    async def load_weights(self, weights, global_steps=None):
        missing = self.model.load_state_dict(weights, strict=False)
        assert not missing.unexpected_keys, missing
        self.steps = self.steps if global_steps is None else global_steps

    async def nothing(self, *args, **kwargs):
        return {}

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing
