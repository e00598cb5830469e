"""Conversations: environments and tools on one side, an engine's tokens on the other.

episodes = Episodes(find_environment("guess"), rows, seeds, ChatTokens(tokenizer), ...)
rollout = engine.generate(episodes.prompts, sampling, seeds, episodes.limits, episodes.reply)
records = episodes.records(rollout.responses)
"""

from marlhf.environments.chat_tokens import ChatTokens
from marlhf.environments.conversations import (
    Conversations,
    episode_metrics,
    opening,
    scored_row,
    turn_rewards,
)
from marlhf.environments.episodes import Beginning, Episodes, preflight
from marlhf.environments.find import environment_from, find_environment
from marlhf.environments.protocol import (
    ConversationError,
    Environment,
    EpisodeRecord,
    Step,
    Turn,
    count_endings,
)

# fmt: off
__all__ = [
    "Beginning", "ChatTokens", "ConversationError", "Conversations", "Environment", "EpisodeRecord",
    "Episodes", "Step", "Turn", "count_endings", "environment_from",
    "episode_metrics", "find_environment", "opening", "preflight", "scored_row", "turn_rewards",
]
# fmt: on
