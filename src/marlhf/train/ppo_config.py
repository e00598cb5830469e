"""The settings of PPO over macro actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marlhf.config.candidates import CANDIDATES, TURN_CANDIDATES, Candidate, parse_candidates
from marlhf.config.rl import RLConfig
from marlhf.errors import SettingError
from marlhf.fields import check_settings, setting

# The same as in marlhf.core, which needs torch; a test keeps them equal.
Pooling = Literal["sum", "mean"]
Level = Literal["token", "macro"]
Sigma = Literal["equal", "unit", "position", "start"]
ANSWER = "{answer}"
"""Stands for the right answer in `answer_template`."""


@dataclass(frozen=True)
class CriticPretraining:
    """Train the critic before the first step, on responses of the starting policy (VC-PPO).

    >>> CriticPretraining(responses=8192).until
    0.3
    """

    responses: int = setting(4096, least=20)
    """Responses to sample. A tenth of the prompts is held out of the training on them."""
    epochs: int = setting(20, least=1)
    """The most passes over the responses."""
    until: float = setting(0.3, above=0, most=1)
    """Stop at this explained variance on the held-out prompts, or once it no longer rises."""
    learning_rate: float | None = setting(None, above=0)
    """Learning rate of the critic meanwhile; `critic_learning_rate` unless given."""

    def __post_init__(self) -> None:
        check_settings(self, "critic_pretraining.")


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RLConfig):
    """Settings of PPO. The defaults are the paper's for Gemma-2B, but for sampling and `sigma`.

    >>> PPOConfig(model="tiny", reward_model="runs/reward/model", kl_coef=0.02).segmenter
    NGram(n=5)
    """

    critic_model: str | None = None
    """Where the critic starts; the reward model unless given, else the policy."""
    sigma: Sigma = setting("start", on_card=True)
    """How a macro action's value weighs its tokens' values. The paper: equal, which throws credit
    away (docs/decisions/0008)."""
    pooling: Pooling = setting("sum", on_card=True)
    """Macro reward as a sum (the paper's equation) or a mean (the authors' code: a weaker KL)."""
    value_level: Level = "token"
    """What the critic learns: each token's value, or that of the macro action."""
    rho: float = setting(1.0, least=0, most=1)
    """Discount of rewards inside a macro action."""
    lam: float | Literal["adaptive"] = setting(0.95, least=0, most=1, on_card=True)
    """Lambda of generalised advantage estimation. `adaptive` is 1 - 1 / (lam_alpha L), L being the
    number of macro actions of the response (VAPO): credit reaches over a share of any response."""
    lam_alpha: float = setting(0.05, above=0, on_card=True)
    """With `lam: adaptive`, the share of a response that credit reaches over. VAPO: 0.05."""
    lam_value: float | None = setting(None, least=0, most=1, on_card=True)
    """Lambda of the returns that the critic learns from; `lam` unless given. 1 is unbiased."""
    credit: Literal["macro", "boundary", "auto"] = setting("macro", on_card=True)
    """One advantage for all tokens of a macro action (macro, the paper's); one for each token, with
    values taken at the ends of macro actions only (boundary); or whichever of `credit_candidates`
    is measured to be best while training (auto)."""
    credit_candidates: tuple[str, ...] = ()
    """What `credit: auto` chooses among beside the settings here, such as [token lam=0.99,
    ngram n=5 lam=0.95]; a list of eleven unless given, and turns with an environment."""
    values: Literal["critic", "monte_carlo", "answer"] = setting("critic", on_card=True)
    """Where values come from: a critic, or the mean return of `continuations` sampled from the
    start of each macro action, which costs that many times more; or the policy's probability of the
    right answer there (answer), for rewards of 1 for right and 0 for wrong."""
    continuations: int = setting(4, above=0, on_card=True)
    """Responses sampled from the start of each macro action for `values: monte_carlo`."""
    continuation_kl: bool = True
    """Charge continuations the KL penalty too, which takes a pass of the reference over them all.
    Without it values are mean scores alone; at `lam: 1`, where they only are a baseline, credit is
    as unbiased as before."""
    boundaries: int | None = setting(None, above=0, on_card=True)
    """Without a critic, take values at the start of the response and at so many starts of macro
    actions where the policy's entropy is highest; the others are merged."""
    answer_column: str = "answer"
    """With `values: answer`: the column of the data that has the right answer."""
    answer_template: str = "\n#### {answer}"
    """With `values: answer`: how the policy writes its answer, after any part of a response. What
    comes before {answer} is given, the rest is scored."""
    answer_value: Literal["prob", "token_prob"] = "prob"
    """With `values: answer`: the probability of the whole answer, or the geometric mean of its
    tokens' probabilities (IGPO), for answers of many tokens."""
    num_samples: int = setting(1, above=0, on_card=True)
    """Responses to each prompt; batch_size counts prompts. With several and no critic, the value of
    a response's start is the mean return of the others (RLOO's baseline) and costs nothing."""
    whiten: Literal["tokens", "macros", "none"] = setting("tokens", on_card=True)
    """Scale advantages to mean 0 and deviation 1 over the batch, counting tokens or actions."""
    critic_learning_rate: float = setting(1.5e-5, above=0, on_card=True)
    """Peak learning rate of the critic. The paper: 1.5e-5 for 2B, 1e-6 for 7B and 27B."""
    critic_warmup_steps: int = setting(0, least=0, on_card=True)
    """First steps in which only the critic learns, for critics that start from a fresh head."""
    critic_pretraining: CriticPretraining | None = None
    """Train the critic before the first step, on stored responses of the starting policy:
    `{responses: 20000, epochs: 20, until: 0.3}`."""
    critic_replay: int = setting(0, least=0, most=64, on_card=True)
    """How many earlier batches the critic learns from again, beside the present one."""
    critic_updates: int | None = setting(None, least=1, on_card=True)
    """Updates of the critic per update of the policy; 1 + `critic_replay` unless given. The first
    is PPO's; the others regress on returns (lambda 1) of rows drawn from all these batches."""
    num_ppo_epochs: int = setting(1, above=0, on_card=True)
    """Passes over each batch of responses."""
    value_clip: float | None = setting(0.2, above=0)
    """How far a value may move in an update; None for no limit."""
    positive_lm_coef: float = setting(0.0, least=0, on_card=True)
    """Weight of the negative log-likelihood of responses that the reward gives more than
    `positive_score`, added to the policy's loss. VAPO: 0.1."""
    positive_score: float = 0.0
    """With `positive_lm_coef`: a response with a higher score than this is a positive example."""

    preset_kind = "ppo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.credit == "boundary":
            self._need("credit: boundary", "credits tokens", pooling="sum", rho=1.0)
            self._need("credit: boundary", "credits tokens", ratio="token", value_level="token")
        if self.credit == "auto":
            known = "compares rules by their gradients"
            self._need("credit: auto", known, pooling="sum", rho=1.0, ratio="token")
            self._need("credit: auto", known, value_level="token", values="critic")
            self._need("credit: auto", "measures responses of the policy itself", async_steps=0)
        elif self.credit_candidates:
            raise SettingError("credit_candidates are of use with credit: auto alone. Set it.")
        parse_candidates(self.credit_candidates)
        if self.values == "critic" and self.boundaries is not None:
            raise SettingError(
                "boundaries limit where values are taken, and values: critic has one per token. "
                "Leave boundaries out, or set values: monte_carlo or values: answer."
            )
        if not self.has_critic:
            self._check_without_critic()
        if self.critic_replay and self.critic_updates == 1:
            raise SettingError(
                f"critic_replay: {self.critic_replay} keeps batches that critic_updates: 1 never "
                "learns from. Leave critic_updates out, or set it to 2 or more."
            )

    def _check_without_critic(self) -> None:
        choice = f"values: {self.values}"
        self._refuse_critic_rules(f"{choice} has none")
        known = "knows values at the starts of macro actions only"
        self._need(choice, known, sigma="start", credit="macro")
        none = "has no critic"
        self._need(choice, none, critic_warmup_steps=0, critic_model=None)
        self._need(choice, none, lam_value=None, critic_pretraining=None)
        self._need(choice, none, critic_replay=0, critic_updates=None)
        self._need(choice, "adds up rewards as they are", gamma=1.0)
        if self.values == "answer":
            scale = "is a probability, which a reward of 0 or 1 has for its mean"
            self._need(choice, scale, normalize_scores=False)
            if self.answer_template.count(ANSWER) != 1:
                raise SettingError(
                    f"answer_template must have {ANSWER} once, as in '\\n#### {ANSWER}'; got "
                    f"{self.answer_template!r}."
                )
            return
        self._need(choice, "samples again after each rollout", async_steps=0)
        middle = "continues responses from the middle, where no environment can be put back"
        self._need(choice, middle, environment="")

    def _need(self, choice: str, why: str, **settings: object) -> None:
        """Refuse settings that another one makes meaningless, rather than ignore them."""
        wrong = {name: x for name, x in settings.items() if getattr(self, name) != x}
        if wrong:
            wanted = ", ".join(
                f"leave {name} out" if x is None else f"set {name}: {x}"
                for name, x in wrong.items()
            )
            got = ", ".join(f"{name}: {getattr(self, name)}" for name in wrong)
            raise SettingError(f"{choice} {why}, so {got} does not fit: {wanted}.")

    @property
    def candidates(self) -> list[Candidate]:
        """What `credit: auto` chooses among beside these settings."""
        turns = TURN_CANDIDATES if self.environment else ()
        chosen = self.credit_candidates or (*CANDIDATES, *turns)
        return parse_candidates(chosen) if self.credit == "auto" else []

    @property
    def has_critic(self) -> bool:
        return self.values == "critic"

    @property
    def responses_per_prompt(self) -> int:
        return self.num_samples

    @property
    def extra_critic_updates(self) -> int:
        """Updates of the critic per update of the policy, beyond the one of PPO itself."""
        return (self.critic_updates or 1 + self.critic_replay) - 1

    @property
    def one_update(self) -> bool:
        """Whether each batch makes a single update, so that the old policy is the new one."""
        return self.num_ppo_epochs * self.num_mini_batches == 1
