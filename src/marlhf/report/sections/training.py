"""Inside training: losses, norms and ratios of the training batches."""

from __future__ import annotations

from marlhf.report.curves import curve_figure
from marlhf.report.groups import Group
from marlhf.report.page import grid, section


def training(policies: list[Group]) -> str:
    """What the optimiser saw, batch by batch."""
    measures = [
        ("L2 norm of advantages", ("ppo/advantage_norm",)),
        ("L2 norm of Q-values", ("ppo/q_norm",)),
        ("Reward after the KL penalty", ("ppo/reward",)),
        ("Policy loss", ("ppo/policy_loss",)),
        ("Value loss", ("ppo/value_loss",)),
        ("Entropy", ("ppo/entropy",)),
        ("Share of clipped ratios", ("ppo/clip_fraction",)),
        ("Tokens a macro action", ("ppo/macro_length",)),
        ("Variance the critic foresaw", ("ppo/explained_variance",)),
        ("Responses that end by themselves", ("eval/ended", "ppo/ended")),
    ]
    return section(
        "training",
        "Inside training",
        "Signs of health: norms and losses that settle, entropy that falls slowly, few clipped "
        "ratios. Lower norms of advantages and Q-values mean calmer updates, where the rewards are "
        "of one size. Responses that no longer end are a sign of reward hacking.",
        grid([curve_figure(title, policies, keys) for title, keys in measures]),
    )
