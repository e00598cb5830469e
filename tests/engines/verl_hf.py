"""A rollout by transformers for verl, for tests and bench/verl_step.py. verl is not changed.

    VERL_USE_EXTERNAL_MODULES=verl_hf
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.free_cache_engine=False

verl's trainer samples by vLLM, SGLang or TensorRT-LLM only. This one runs wherever transformers
does, on the device of verl's platform; weights go to it through Ray's object store. Critics load
without flash attention, too.
"""

import os


def load_replica():
    import ray
    from verl.plugin.platform import get_platform
    from verl.workers.rollout.replica import RolloutReplica
    from verl_hf_server import HFServer

    class HFReplica(RolloutReplica):
        async def launch_servers(self):
            platform, config = get_platform(), self.config
            name = f"hf_server_{self.replica_rank}_0"
            # The server asks Ray for no GPU, since the trainer's worker has it, but must see it.
            seen = dict.fromkeys(platform.ray_noset_envvars(), "1")
            actor = ray.remote(HFServer).options(
                name=name, max_concurrency=1000, num_cpus=0, runtime_env={"env_vars": seen}
            )
            device = platform.device_name
            if device != "cpu":
                device = f"{device}:{self.replica_rank % self.gpus_per_node}"
            server = actor.remote(
                self.model_config.path,
                device=device,
                dtype=config.dtype,
                max_tokens=config.response_length,
                max_batch=config.max_num_seqs,
            )
            await server.ready.remote()
            self.servers, self._server_handle = [server], server
            self._server_address = f"ray://{name}"

    return HFReplica


def __getattr__(name):
    """verl looks the class up by its dotted name, long after this module is loaded."""
    if name != "ServerAdapter":
        raise AttributeError(name)
    import ray
    from verl.utils.torch_dtypes import PrecisionType
    from verl.workers.rollout.base import BaseRollout
    from verl.workers.rollout.utils import ensure_async_iterator

    class ServerAdapter(BaseRollout):
        def __init__(self, *args, replica_rank=None, **kwargs):
            super().__init__(*args, **kwargs)
            # In the trainer's workers each rank has a replica; apart from it they are numbered.
            self.replica_rank = int(os.environ["RANK"]) if replica_rank is None else replica_rank

        async def resume(self, tags):
            pass

        async def release(self):
            pass

        async def update_weights(self, weights, global_steps=None, **kwargs):
            # Reading a sharded weight is a collective call, so every rank reads all of them.
            dtype, state = PrecisionType.to_dtype(self.config.dtype), {}
            async for name, tensor in ensure_async_iterator(weights):
                state[name] = tensor.detach().to("cpu", dtype, copy=True)
            server = ray.get_actor(f"hf_server_{self.replica_rank}_0")
            await server.load_weights.remote(state, global_steps)

    return ServerAdapter


def load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code):
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


def register():
    from verl.utils import model
    from verl.workers.rollout import base, replica

    model.load_valuehead_model = load_valuehead_model  # verl's insists on flash_attention_2
    base._ROLLOUT_REGISTRY[("hf", "async")] = "verl_hf.ServerAdapter"
    replica.RolloutReplicaRegistry.register("hf", load_replica)


register()
