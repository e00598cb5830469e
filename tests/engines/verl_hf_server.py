"""The rollout server of `verl_cpu`, a Ray actor.

Imports no verl at the top: Ray loads this module by name, and verl's plugins must not be half
loaded when it does.
"""

import asyncio
import zlib

import torch


class HFServer:
    """One model. Each response has a seed of its own, from its prompt and its weights' step.

    So it depends neither on the order of requests nor on how many servers share them, and two runs
    sample the same responses.
    """

    def __init__(self, path, max_tokens):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.max_tokens, self.steps = max_tokens, 0
        self.lock = asyncio.Lock()

    async def ready(self):
        return True

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        async with self.lock:
            return await asyncio.to_thread(self.sample, list(prompt_ids), sampling_params)

    @torch.no_grad()
    def sample(self, prompt, params):
        from verl.workers.rollout.replica import TokenOutput

        temperature = params.get("temperature", 1.0)
        eos = self.tokenizer.eos_token_id
        torch.manual_seed(zlib.crc32(repr((self.steps, prompt)).encode()))
        ids = torch.tensor([prompt])
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.get("max_tokens") or self.max_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=eos,
            do_sample=temperature > 0,
            top_k=0,
            top_p=params.get("top_p", 1.0),
            temperature=temperature or 1.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        new = out.sequences[0, len(prompt) :]
        scores = torch.cat(out.scores).float().log_softmax(dim=-1)
        return TokenOutput(
            token_ids=new.tolist(),
            log_probs=scores.gather(1, new[:, None])[:, 0].tolist(),
            stop_reason="completed",
            extra_fields={"global_steps": self.steps},
        )

    async def load_weights(self, weights, global_steps=None):
        missing = self.model.load_state_dict(weights, strict=False)
        assert not missing.unexpected_keys, missing
        self.steps = self.steps if global_steps is None else global_steps

    async def nothing(self, *args, **kwargs):
        return {}

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing
