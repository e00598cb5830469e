"""The weight of the KL penalty, fixed or steered."""

from __future__ import annotations

from marlhf.errors import SettingError


class KLController:
    """Raise the coefficient while the KL is above its target, lower it while below.

    Proportional control with the error held to 20% (Ziegler et al., 2019). Without a target the
    coefficient stays.

    >>> controller = KLController(0.1, target=6.0, horizon=100)
    >>> controller.update(kl=12.0, responses=50)
    >>> round(controller.coef, 4)
    0.11
    """

    def __init__(self, coef: float, target: float | None = None, horizon: int = 10000) -> None:
        if target is not None and (target <= 0 or horizon < 1):
            raise SettingError(
                f"kl_target and kl_horizon must be positive; got {target}, {horizon}."
            )
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, responses: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * responses / self.horizon
