"""Conversations: environments and tools on one side, an engine's tokens on the other.

conversations = Conversations(find_environment("guess"), ChatTokens(tokenizer), ...)
rollout, prompts, records = conversations.play(rows, seeds, engine, sampling)
"""

from marlhf.environments.chat_tokens import ChatTokens
from marlhf.environments.episodes import Beginning, Conversations, Episodes
from marlhf.environments.find import environment_from, find_environment
from marlhf.environments.protocol import (
    ConversationError,
    Environment,
    EpisodeRecord,
    Step,
    Turn,
    count_endings,
    episode_metrics,
    opening,
    scored_row,
    turn_rewards,
)

# fmt: off
__all__ = [
    "Beginning", "ChatTokens", "ConversationError", "Conversations", "Environment", "EpisodeRecord",
    "Episodes", "Step", "Turn", "count_endings", "environment_from",
    "episode_metrics", "find_environment", "opening", "scored_row", "turn_rewards",
]
# fmt: on
