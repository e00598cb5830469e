"""Inside training: losses, norms and ratios of the training batches."""

from __future__ import annotations

from marlhf.report.curves import curve_figure
from marlhf.report.groups import Group
from marlhf.report.page import grid, section


def training(policies: list[Group]) -> str:
    """Numbers of the training batches."""
    measures = [
        ("L2 norm of advantages", ("rl/advantage_norm",)),
        ("L2 norm of Q-values", ("rl/q_norm",)),
        ("Reward after the KL penalty", ("rl/reward",)),
        ("Policy loss", ("rl/policy_loss",)),
        ("Value loss", ("rl/value_loss",)),
        ("Entropy", ("rl/entropy",)),
        ("Share of clipped ratios", ("rl/clip_fraction",)),
        ("Tokens per macro action", ("rl/macro_length",)),
        ("Explained variance of the critic", ("rl/explained_variance",)),
        ("EOS rate", ("eval/ended", "rl/ended")),
    ]
    return section(
        "training",
        "Inside training",
        "Signs of health: norms and losses that settle, entropy that falls slowly, few clipped "
        "ratios. Lower norms of advantages and Q-values mean smaller updates, where rewards are "
        "on the same scale. A falling EOS rate is a sign of reward hacking.",
        grid([curve_figure(title, policies, keys) for title, keys in measures]),
        folded=True,
    )
