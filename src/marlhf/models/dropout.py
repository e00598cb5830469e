"""Dropout and router noise off: PPO compares the log-probs of two passes over the same tokens."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from marlhf.models.base import Model


def disable_dropout(model: Model) -> None:
    """Make passes in training mode deterministic, for every family and however it was loaded.

    `model.eval()` would do, but gradient checkpointing only works in training mode. Families hold
    dropout as modules, as numbers of their layers (`F.dropout(x, p=self.dropout)`), or read it
    from the config in each pass, so all three are set to 0.
    """
    for module in list(model.modules()):
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        _zero_dropout_numbers(module)
        config = vars(module).get("config")
        if config is not None:
            _zero_dropout_numbers(config)
        if any(_is_noise(name, value) for name, value in vars(module).items()):
            _keep_in_eval_mode(module)
    _zero_dropout_numbers(model.config)
    _zero_dropout_numbers(model.config.get_text_config())


def _zero_dropout_numbers(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if "drop" in name and _is_positive(value):
            setattr(owner, name, 0.0)


def _is_noise(name: str, value: Any) -> bool:
    return ("jitter" in name or "noise" in name) and _is_positive(value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _keep_in_eval_mode(module: nn.Module) -> None:
    """Routers add noise in training mode, or draw experts at random.

    Setting their number to 0 is not enough: PhiMoE's is also a threshold in evaluation mode.
    """
    module.eval()
    module.train = MethodType(_stay, module)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module
