"""verl on a CPU, for tests alone: a platform, and the rollout of `verl_hf`. verl is not changed.

    VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda
    actor_rollout_ref.rollout.name=hf trainer.device=cpu +ray_kwargs.ray_init.num_gpus=1

verl has no CPU platform: it asks for a device count, for memory and for streams as of a GPU. The
answers here keep its whole trainer running, with FSDP2 over gloo.
"""

import types
from contextlib import contextmanager
from functools import partial

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def nothing(*args, **kwargs):
    return None


def device_module() -> types.ModuleType:
    """What verl asks of torch.cuda, answered for a CPU."""
    module = types.ModuleType("verl_cpu_device")
    for name in (
        "empty_cache",
        "synchronize",
        "set_device",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "ipc_collect",
        "manual_seed",
        "manual_seed_all",
    ):
        setattr(module, name, nothing)
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(module, name, lambda *args, **kwargs: 0)
    module.is_available = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: "cpu"
    module.mem_get_info = lambda *args: (1, 1)
    module.get_device_name = lambda *args: "CPU"
    module.get_rng_state, module.set_rng_state = torch.get_rng_state, torch.set_rng_state
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device_module()
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = nothing
    empty_cache = profiler_start = profiler_stop = cudart = nothing

    def is_available(self):
        return False

    def is_platform_available(self, use_smi_check=False):
        return False  # only where it is asked for by name

    def is_ipc_supported(self):
        return False

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def get_device_capability(self, index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "VERL_CPU_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "GPU"  # verl's check of resources knows GPU and NPU; `num_gpus` counts slots

    def ray_noset_envvars(self):
        return []

    @contextmanager
    def nvtx_range(self, msg):
        yield


def register():
    import verl_hf  # noqa: F401 - registers the rollout
    from verl.utils import distributed

    # verl asks for "cpu:gloo,<device>:<backend>", which names the CPU twice where it is the device.
    start = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = partial(start, backend="gloo")
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # FSDP2 pins the reference model


register()
