"""The rollout server of `verl_cpu`, a Ray actor.

Imports no verl at the top: Ray loads this module by name, and verl's plugins must not be half
loaded when it does.
"""

import asyncio
import os

import torch

GATHER = int(os.environ.get("HF_GATHER", "1"))
"""Requests in a batch. They are sorted and sampled with a seed of their weights' step, so that two
runs sample the same responses."""


class HFServer:
    """One model; requests are gathered into batches."""

    def __init__(self, path, max_tokens):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.max_tokens, self.waiting, self.steps, self.task = max_tokens, [], 0, None

    async def ready(self):
        return True

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), dict(sampling_params), future))
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self.drain())
        return await future

    async def drain(self):
        while self.waiting:
            await asyncio.sleep(0.05)
            if len(self.waiting) < GATHER:
                continue
            self.waiting.sort(key=lambda request: request[0])
            batch, self.waiting = self.waiting[:256], self.waiting[256:]
            try:
                outputs = await asyncio.to_thread(self.sample, batch)
                for (_, _, future), output in zip(batch, outputs):
                    future.set_result(output)
            except Exception as error:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)

    @torch.no_grad()
    def sample(self, batch):
        from verl.workers.rollout.replica import TokenOutput

        params = batch[0][1]
        temperature = params.get("temperature", 1.0)
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        width = max(len(prompt) for prompt, _, _ in batch)
        ids = torch.tensor([[pad] * (width - len(p)) + p for p, _, _ in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _, _ in batch])
        torch.manual_seed(self.steps)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
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
        new = out.sequences[:, width:]
        scores = torch.stack(out.scores, dim=1).float().log_softmax(dim=-1)
        logprobs = scores.gather(2, new[:, :, None])[:, :, 0]
        results = []
        for row, of_row in zip(new.tolist(), logprobs.tolist()):
            end = row.index(eos) + 1 if eos in row else len(row)
            results.append(
                TokenOutput(
                    token_ids=row[:end],
                    log_probs=of_row[:end],
                    stop_reason="completed",
                    extra_fields={"global_steps": self.steps},
                )
            )
        return results

    async def load_weights(self, weights, global_steps=None):
        missing = self.model.load_state_dict(weights, strict=False)
        assert not missing.unexpected_keys, missing
        self.steps = self.steps if global_steps is None else global_steps

    async def nothing(self, *args, **kwargs):
        return {}

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing
