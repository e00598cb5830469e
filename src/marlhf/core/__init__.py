"""The algorithm, as pure functions on tensors. Needs torch and nothing else."""

from marlhf.core.advantages import (
    adaptive_lam,
    boundary_gae,
    gae,
    group_advantages,
    macro_gae,
    pool_rewards,
    rloo_advantages,
    state_advantages,
    tree_advantages,
)
from marlhf.core.losses import (
    dpo_loss,
    importance_weights,
    ppo_policy_loss,
    ppo_value_loss,
    reward_loss,
    sft_loss,
)
from marlhf.core.masked import masked_mean, moments, whiten
from marlhf.core.responses import Responses, Vocabulary, pack_spans
from marlhf.core.rewards import at_last_token, kl_estimate, overlong_penalty, shape_rewards
from marlhf.core.segmenters import (
    Constituents,
    Entropy,
    Learned,
    Lines,
    NGram,
    Perplexity,
    RandomNGram,
    Segmenter,
    Sentences,
    Surprise,
    Turns,
    ValueChange,
    Words,
    needs,
    parser_of,
    segment,
    thin_out,
)
from marlhf.core.segments import Segments

# fmt: off
__all__ = [
    "Constituents", "Entropy", "Learned", "Lines", "NGram", "Perplexity", "RandomNGram",
    "Responses", "Segmenter", "Segments", "Sentences", "Surprise", "Turns", "ValueChange",
    "Vocabulary", "Words", "adaptive_lam", "at_last_token", "boundary_gae", "dpo_loss", "gae",
    "group_advantages", "importance_weights", "kl_estimate", "macro_gae", "masked_mean", "moments",
    "needs", "overlong_penalty", "pack_spans", "parser_of", "pool_rewards", "ppo_policy_loss",
    "ppo_value_loss", "reward_loss", "rloo_advantages", "segment", "sft_loss", "shape_rewards",
    "state_advantages", "thin_out", "tree_advantages", "whiten",
]
# fmt: on
