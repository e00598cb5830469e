"""Published methods by name: `preset: vineppo` sets what makes a method, and nothing else.

A preset is a few settings beneath those of a stage, which override them. Estimators are tested
against the papers' equations. Numbers were compared with the sources that `same` names. Those of
sae and vc-ppo could not be; gamma and lam of turn-ppo only with summaries of the paper.

Loads without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A method of a paper, in settings of `marlhf ppo`, or of `marlhf rloo` and `marlhf grpo`.

    >>> PRESETS["vineppo"].needs_critic, PRESETS["vapo"].needs_critic
    (False, True)
    """

    name: str
    kind: str
    """The stage it is for: ppo, or rloo and grpo."""
    paper: str
    arxiv: str
    cost: str
    """Sampled tokens per prompt, where PPO samples one response."""
    settings: Mapping[str, Any]
    same: str
    """What is as in the paper."""
    differs: str
    """What is not."""

    @property
    def needs_critic(self) -> bool:
        return self.kind == "ppo" and self.settings.get("values", "critic") == "critic"


TOKENS = {"type": "ngram", "n": 1}
WHOLE = {"type": "ngram", "n": math.inf}
GROUP = {"segmenter": WHOLE, "baseline": "group", "kl_in": "loss"}
"""One action per response, against the mean of its group."""

PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "paper",
            "ppo",
            "MA-RLHF: RLHF with macro actions",
            "2410.02743",
            "1",
            {"sigma": "equal"},
            "The value of a macro action is the mean over its tokens, as in appendix D.1.",
            "top_k is 0 here and 50 in the paper, which bends the KL penalty.",
        ),
        Preset(
            "official",
            "ppo",
            "MA-RLHF, the authors' code",
            "2410.02743",
            "1",
            {"sigma": "equal", "pooling": "mean", "score_clip": 2.5, "split_last": True},
            "Mean pooling, clipped scores, and a last token of its own, as the code has them.",
            "Learning rates and batch sizes are yours.",
        ),
        Preset(
            "vineppo",
            "ppo",
            "VinePPO: refining credit assignment in RL training of LLMs",
            "2410.01679",
            "1 + 9 x steps / 2",
            {
                "segmenter": {"type": "lines"},
                "values": "monte_carlo",
                "continuations": 9,
                "lam": 0.0,
            },
            "A step's advantage is the change of values that are means of 9 continuations. Clip "
            "0.2, whitened advantages. Checked: configs of McGill-NLP/VinePPO.",
            "Steps are lines, as in its GSM8K runs; MATH has a splitter of its own. One response "
            "per prompt and one pass, the authors' runs have 8 and 2, with KL in the loss (1e-4). "
            "Values also count the KL penalty.",
        ),
        Preset(
            "spo-chain",
            "ppo",
            "Segment Policy Optimization",
            "2505.23564",
            "1 + 9 x segments / 2",
            {
                "segmenter": {"type": "surprise", "probability": 0.9, "every": 5},
                "values": "monte_carlo",
                "continuations": 9,
                "lam": 0.0,
            },
            "Every fifth token of probability below 0.9 begins a segment; its advantage is the "
            "change of values, each the mean of 9 continuations. Checked: AIFrameResearch/SPO, "
            "spo_chain with interval5.",
            "The loss counts all tokens of a segment, the paper's only those of low probability. "
            "boundaries: k bounds the cost.",
        ),
        Preset(
            "spo-tree",
            "rloo",
            "Segment Policy Optimization",
            "2505.23564",
            "about 86 with tree [6, 6, 6]",
            {
                **GROUP,
                "segmenter": {"type": "ngram", "n": 5},
                "tree": [6, 6, 6],
                "scale_group": False,
                "ratio": "token",
            },
            "A segment's value is the mean of its children. Its advantage is that above its "
            "parent's. Checked: AIFrameResearch/SPO, spo_tree, whose adv_method is rloo.",
            "Branches come at shares of the mean length, the paper's after 30 to 600 tokens. The "
            "loss counts all tokens, the paper's only those of probability below 0.9. Its "
            "adv_method: grpo divides by the deviation of the siblings: scale_group: true.",
        ),
        Preset(
            "treerl",
            "rloo",
            "TreeRL: LLM reinforcement learning with on-policy tree search",
            "2506.11902",
            "about 18 with tree [6, 5]",
            {
                "segmenter": {"type": "entropy", "threshold": 1.0},
                "tree": [6, 5],
                "baseline": "global_local",
                "kl_in": "loss",
                "ratio": "token",
            },
            "30 leaves; a step's advantage is global plus local, weighted by its leaves' root. "
            "Checked: THUDM/TreeRL, scripts/treerl-qw14b.sh (m 6, n 2, l 1, t 2).",
            "Each response branches once, at the first token of high entropy after its middle; the "
            "paper branches twice at each of the two of highest entropy, and its script trains 16 "
            "of the 30 leaves. A response that ended early counts as a step with 5 leaves. kl_coef "
            "is yours; the script's is 0.",
        ),
        Preset(
            "sae",
            "ppo",
            "Segmental Advantage Estimation",
            "2601.07320",
            "1",
            {
                "segmenter": {"type": "surprise", "probability": 0.2},
                "credit": "boundary",
            },
            "Advantages bootstrap where a token of low probability begins a segment, nowhere else.",
            "lam is yours (0.95 unless set).",
        ),
        Preset(
            "turn-ppo",
            "ppo",
            "Turn-PPO: turn-level advantage estimation with PPO",
            "2512.17008",
            "1",
            {
                "segmenter": {"type": "turns"},
                "sigma": "start",
                "value_level": "macro",
                "gamma": 0.99,
                "lam": 0.9,
            },
            "Advantages and the critic's loss are of whole turns; values are of their starts.",
            "The ratio is each token's. A response of one turn is one action.",
        ),
        Preset(
            "vc-ppo",
            "ppo",
            "What's behind PPO's collapse in long-CoT? (VC-PPO)",
            "2503.01491",
            "1, and 20000 responses before",
            {
                "segmenter": TOKENS,
                "lam": 0.95,
                "lam_value": 1.0,
                "critic_pretraining": {"responses": 20000},
            },
            "The critic learns whole returns of the starting policy first, and goes on with whole "
            "returns beside the policy.",
            "Pretraining stops at an explained variance of 0.3, unless you set until.",
        ),
        Preset(
            "vapo",
            "ppo",
            "VAPO: efficient and reliable RL for advanced reasoning tasks",
            "2504.05118",
            "1, and 20000 responses before",
            {
                "segmenter": TOKENS,
                "lam": "adaptive",
                "lam_alpha": 0.05,
                "lam_value": 1.0,
                "positive_lm_coef": 0.1,
                "critic_pretraining": {"responses": 20000},
                "clip": [0.2, 0.28],
                "kl_coef": 0.0,
            },
            "A pretrained critic of whole returns, length-adaptive lambda, a mean over tokens, a "
            "higher upper clip, and the likelihood of correct responses in the loss.",
            "One response per prompt, the paper samples 16 of fewer prompts. Pretraining stops at "
            "an explained variance of 0.3, unless you set until.",
        ),
        Preset(
            "sao",
            "ppo",
            "Single-rollout asynchronous optimization",
            "2607.07508",
            "1",
            {
                "segmenter": TOKENS,
                "lam": "adaptive",
                "lam_value": 1.0,
                "critic_updates": 2,
                "async_steps": 1,
            },
            "One response per prompt, sampled while the policy trains. A critic of whole returns "
            "with two updates per batch, a length-adaptive lambda, tools' output left out of both.",
            "Weights of old samples are capped; the paper drops tokens outside a range. The critic "
            "trains all its weights; the paper freezes its attention. lam_alpha is VAPO's.",
        ),
        Preset(
            "gspo",
            "rloo",
            "Group Sequence Policy Optimization",
            "2507.18071",
            "num_samples",
            {**GROUP, "ratio": "macro_mean", "clip": [3e-4, 4e-4], "kl_coef": 0.0},
            "The ratio is the geometric mean over the response, clipped as one, a mean over "
            "responses, without KL. Checked: verl's gspo_trainer and TRL's paper index, which cite "
            "section 5.1.",
            "clip acts with several mini-batches only; the paper has four.",
        ),
        Preset(
            "dapo",
            "rloo",
            "DAPO: an open-source LLM reinforcement learning system at scale",
            "2503.14476",
            "16 to 48",
            {
                **GROUP,
                "ratio": "token",
                "num_samples": 16,
                "dynamic_sampling": 2,
                "overlong": [0.8, 1.0],
                "clip": [0.2, 0.28],
                "kl_coef": 0.0,
            },
            "Prompts whose responses all score the same are replaced; long responses are punished "
            "softly; the upper clip is higher; the loss is a mean over tokens, without KL.",
            "Prompts are replaced at most twice, and left out after that; the paper samples until "
            "the batch is full.",
        ),
        Preset(
            "gigpo",
            "rloo",
            "Group-in-Group Policy Optimization for LLM agent training (GiGPO)",
            "2505.10978",
            "8",
            {
                **GROUP,
                "segmenter": {"type": "turns"},
                "group": "state",
                "num_samples": 8,
                "ratio": "token",
            },
            "A turn's advantage is that of its episode in its group, plus that of the turn among "
            "the turns that were taken in the same state, with equal weights. Checked: gigpo and "
            "its trainer's scripts in a fork of verl-agent.",
            "Needs an environment. Both parts count the reward still to come, and gamma and "
            "kl_coef are yours; the scripts discount turns by 0.95 and have 0.01. They divide by "
            "deviations in ALFWorld; WebShop and Sokoban leave that out: scale_group: false.",
        ),
        Preset(
            "dr-grpo",
            "rloo",
            "Understanding R1-Zero-like training (Dr. GRPO)",
            "2503.20783",
            "8",
            {
                **GROUP,
                "ratio": "token",
                "num_samples": 8,
                "scale_group": False,
                "divide_by": "max_tokens",
                "kl_coef": 0.0,
            },
            "No division by the deviation of the group, nor by the length of the response: the sum "
            "over tokens is divided by max_new_tokens. 8 samples, no KL. Checked: "
            "sail-sg/understand-r1-zero, train_zero_math.py and its examples.",
            "Batch size and learning rate are yours; theirs are 128 prompts and 1e-6.",
        ),
    )
}
"""Every preset by its name."""


def presets_of(kind: str) -> dict[str, dict[str, Any]]:
    """The settings of each preset for a kind of stage."""
    return {name: dict(p.settings) for name, p in PRESETS.items() if p.kind == kind}
