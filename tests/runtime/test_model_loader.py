"""Weights that several roles start from are read once, and no two roles share memory."""

import pytest
import torch

from marlhf.config.stage import StageConfig
from marlhf.runtime import model_loader
from marlhf.runtime.distributed import World
from marlhf.runtime.model_loader import load_sources
from marlhf.runtime.model_sources import WholeModel

SOURCES = {
    "policy": WholeModel("tiny", "language"),
    "reference": WholeModel("tiny", "language", setting="ref_model"),
    "critic": WholeModel("tiny", "scalar"),
    "reward-0": WholeModel("tiny", "scalar"),
    "gold": WholeModel("tiny", "scalar"),
    "another": WholeModel("tiny", "scalar", seed=1),
}


@pytest.fixture
def paths(monkeypatch) -> list[str]:
    """What was read by its name, in order."""
    read: list[str] = []

    def counted(real):
        def load(origin, **options):
            if isinstance(origin, str):
                read.append(origin)
            return real(origin, **options)

        return load

    for name in ("load_policy", "load_scalar"):
        monkeypatch.setattr(model_loader, name, counted(getattr(model_loader, name)))
    return read


def test_weights_are_read_once_and_copied_for_each_role(paths):
    config = StageConfig(gradient_checkpointing=True)
    models = load_sources(SOURCES, {"policy", "critic"}, config, World(torch.device("cpu")))
    assert len(paths) == 3  # the policy's, the critic's, and those of another seed
    weights = {role: dict(model.named_parameters()) for role, model in models.items()}
    alike = (("policy", "reference"), ("critic", "reward-0"), ("critic", "gold"))
    for one, other in alike:
        for name, weight in weights[one].items():
            assert torch.equal(weight, weights[other][name])
    assert not torch.equal(weights["critic"]["score.weight"], weights["another"]["score.weight"])
    addresses = [w.data_ptr() for role in weights.values() for w in role.values()]
    assert len(set(addresses)) == len(addresses)
    trained = {"policy", "critic"}
    for role, model in models.items():
        assert model.is_gradient_checkpointing == (role in trained)
        assert all(w.requires_grad == (role in trained) for w in model.parameters())


def test_with_shards_each_is_read_so_that_the_host_holds_one_at_a_time(paths):
    world = World(torch.device("cpu"), rank=0, size=2, sharded=True)
    loader = model_loader.ModelLoader(StageConfig(), world, SOURCES.values())
    for role, source in SOURCES.items():
        loader.read(role, source, trains=False)
    assert len(paths) == len(SOURCES)
