"""Weights from verl's trainer to rollout servers apart from it, through a file, for tests alone.

verl's own ways, of which `separate_async` needs one, all need a GPU. It imports this module by
`actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module`.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    def __init__(self, bucket_size, is_master=False):
        self.is_master = is_master

    def prepare(self):
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        folder = tempfile.mkdtemp(prefix="verl-weights-")
        sizes = (actor_wg_world_size, rollout_world_size)
        return tuple({"folder": [folder] * size} for size in sizes)

    def init_process_group(self, folder):
        self.folder = Path(folder)

    def finalize(self):
        if self.is_master:
            shutil.rmtree(self.folder)

    async def send_weights(self, weights, global_steps=None):
        # Reading a sharded weight is a collective call, so every rank reads all of them.
        state = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        if self.is_master:
            save_file(state, self.folder / "unfinished")
            (self.folder / "unfinished").rename(self.folder / "weights")

    async def receive_weights(self, global_steps=None):
        while not (self.folder / "weights").exists():
            await asyncio.sleep(0.05)
        for name, tensor in load_file(self.folder / "weights").items():
            yield name, tensor
