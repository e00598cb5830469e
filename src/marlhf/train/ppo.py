"""PPO over macro actions, from top to bottom.

Each step: sample responses, score them, cut them into macro actions, credit each with an
advantage, update policy and critic. With `segmenter: {type: ngram, n: 1}` this is ordinary PPO.

Axes: B rows, T response tokens, M macro actions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from marlhf.core import (
    NGram,
    Responses,
    Segments,
    Vocabulary,
    kl_estimate,
    macro_gae,
    masked_mean,
    moments,
    ppo_policy_loss,
    ppo_value_loss,
    segment,
    shape_rewards,
    whiten,
)
from marlhf.core.advantages import Pooling
from marlhf.core.losses import Level, Ratio
from marlhf.core.rewards import KLEstimator
from marlhf.core.segments import Sigma
from marlhf.data.collate import token_budget_batches
from marlhf.models.forward import Sequences, token_stats, token_values
from marlhf.models.load import (
    Model,
    Tokenizer,
    autocast,
    check_vocabulary,
    end_tokens,
    is_scalar,
    load_policy,
    load_scalar,
    load_tokenizer,
    pick_device,
    same_tokenizer,
)
from marlhf.reward import RewardModel
from marlhf.rollout import Engine, NativeEngine, Sampling
from marlhf.spans import vocabulary
from marlhf.train.checkpoint import generator_state, save_checkpoint, set_generator_state
from marlhf.train.guards import Guards, warn_early
from marlhf.train.kl import KLController
from marlhf.train.optim import apply_update, check_finite, learning_rate_at, make_optimizer
from marlhf.train.probe import Probe
from marlhf.train.progress import Steps, say, warn
from marlhf.train.run import RunError, RunFolder
from marlhf.train.stage import (
    StageConfig,
    batch_rows,
    check_numbers,
    check_positions,
    count_steps,
    due,
    each_prompt_once,
    finish,
    load_examples,
    orderly,
    resume,
)


@dataclass(frozen=True, kw_only=True)
class PPOConfig(StageConfig):
    """Settings of PPO. The defaults are the paper's for Gemma-2B, but for sampling."""

    reward_model: str
    """What scores responses: a reward model's folder or hub name, or `@stage`."""
    critic_model: str | None = None
    """Where the critic starts; the reward model unless given."""
    ref_model: str | None = None
    """What the KL penalty ties the policy to; where the policy started unless given."""
    sampling: Sampling = field(default_factory=Sampling)
    """How responses are drawn. The paper: temperature 0.8 and top_k 50, which bends the KL."""
    rollout_tokens: int = 131072
    """Padded tokens sampled at once: lower it when memory runs out while sampling. Other batches
    mean other random draws, from the same distribution."""

    segmenter: Callable[[Responses], Tensor] = field(default_factory=NGram)
    """The termination rule of macro actions: `{type: ngram, n: 5}`; n: 1 is ordinary PPO."""
    sigma: Sigma = "equal"
    """How a macro action's value weighs its tokens' values."""
    pooling: Pooling = "sum"
    """Macro reward as a sum (the paper's equation) or a mean (the authors' code: a weaker KL)."""
    ratio: Ratio = "token"
    """PPO's ratio by token (the paper's listing) or by macro action (its equation)."""
    value_level: Level = "token"
    """What the critic learns: each token's value, or that of the macro action."""
    split_last: bool = False
    """Make the last token an action of its own, as the authors' code does."""
    rho: float = 1.0
    """Discount of rewards inside a macro action."""
    gamma: float = 1.0
    """Discount from one macro action to the next."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation."""

    kl_coef: float = 0.05
    """Weight of the KL penalty. The paper: 0.05; 0.1 for 27B and for 7B on WebGPT."""
    kl_estimator: KLEstimator = "k1"
    """How a token's KL is estimated for the penalty."""
    kl_target: float | None = None
    """Adapt kl_coef so that the KL of a response comes near this; None leaves it fixed."""
    kl_horizon: int = 10000
    """Responses over which an adaptive kl_coef moves."""
    score_clip: float | None = None
    """Bound scores to plus or minus this. The authors' code: 2.5."""
    normalize_scores: bool = False
    """Scale scores to mean 0 and deviation 1 on the starting policy's held-out responses."""
    missing_eos_penalty: float = 0.0
    """Taken from the score of a response that was cut off before it ended."""
    whiten: Literal["tokens", "macros", "none"] = "tokens"
    """Scale advantages to mean 0 and deviation 1 over the batch, counting tokens or actions."""

    batch_size: int = 256
    """Prompts in a step. The paper: 256; code: 16."""
    learning_rate: float = 1.5e-5
    """Peak learning rate of the policy. The paper: 1.5e-5 for 2B, 1e-6 for 7B, 7e-7 for 27B."""
    critic_learning_rate: float = 1.5e-5
    """Peak learning rate of the critic. The paper: 1.5e-5 for 2B, 1e-6 for 7B and 27B."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rates fall after warm-up."""
    warmup_steps: int | None = None
    """Steps in which the rates rise; overrides warmup_ratio. The paper: 200; 27B 0; code 20."""
    num_ppo_epochs: int = 1
    """Passes over each batch of responses."""
    num_mini_batches: int = 1
    """Updates in each pass."""
    clip: float = 0.2
    """How far the ratio may move before its gradient stops."""
    value_clip: float | None = 0.2
    """How far a value may move in an update; None for no limit."""
    dual_clip: float | None = None
    """Bound the loss of negative advantages at this multiple; 3 is usual."""

    eval_prompts: int = 64
    """Held-out prompts for evaluations."""
    log_samples: int = 8
    """Held-out prompts whose responses are kept at each evaluation."""
    keep_best: bool = True
    """Keep the policy with the best held-out score in `best/`, beside the last in `model/`."""
    guards: Guards = field(default_factory=Guards)
    """When to warn of reward hacking, and when to stop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("num_ppo_epochs", "num_mini_batches", "critic_learning_rate", "clip")
        optional = ("kl_target", "kl_horizon", "value_clip", "score_clip", "rollout_tokens")
        check_numbers(self, (*positive, *optional), positive=True)
        check_numbers(self, ("kl_coef", "warmup_steps", "eval_prompts", "log_samples"), least=0)
        check_numbers(self, ("gamma", "lam", "rho"), least=0, most=1)
        check_numbers(self, ("missing_eos_penalty",))
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be larger than 1; got {self.dual_clip}.")
        if self.batch_size % self.num_mini_batches:
            raise ValueError(
                f"num_mini_batches ({self.num_mini_batches}) must divide "
                f"batch_size ({self.batch_size})."
            )

    @property
    def one_update(self) -> bool:
        """Whether each batch makes a single update, so that the old policy is the new one."""
        return self.num_ppo_epochs * self.num_mini_batches == 1


@dataclass(frozen=True)
class Models:
    """All that a step talks to."""

    policy: Model
    reference: Model
    critic: Model
    reward: RewardModel
    engine: Engine
    tokenizer: Tokenizer
    vocabulary: Vocabulary


@dataclass(frozen=True)
class Experience:
    """A batch of responses and what everyone thinks of them, before any update."""

    sequences: Sequences
    scores: Tensor  # [B], normalised, with the penalty for a missing end
    raw_scores: Tensor  # [B], what the reward model says
    ended: Tensor  # [B] bool
    logprobs: Tensor  # [B, T], of the policy that sampled
    ref_logprobs: Tensor  # [B, T]
    values: Tensor  # [B, T]
    old_logprobs: Tensor | None  # [B, T], by the training pass; None when one update follows


@dataclass(frozen=True)
class Credit:
    """Who earned what."""

    rewards: Tensor  # [B, T]
    segments: Segments
    advantages: Tensor  # [B, T], constant within a macro action
    returns: Tensor  # [B, T]


def train(config: PPOConfig) -> Path:
    """Train, or go on training; returns the folder of the policy."""
    run = RunFolder(config.output_dir, "ppo", config)
    if run.finished:
        say(f"{run.path.name} is finished: {run.model}")
        return run.model
    warn_early(config)
    torch.manual_seed(config.seed)
    models = load_models(config)
    device = models.policy.device
    loaded = load_examples(config, "ppo", models.tokenizer, needs=("prompt",))
    examples, held_out = map(each_prompt_once, loaded)
    readers = {"policy": models.policy, "reference": models.reference, "critic": models.critic}
    if not models.reward.foreign:  # else it counts other tokens
        readers["reward model"] = models.reward.model
    for name, model in readers.items():
        check_positions(model, examples + held_out, config.sampling.max_new_tokens, name)
    prompts = [e.prompt for e in examples]
    optimizers = {
        "policy": make_optimizer(models.policy, config.learning_rate, config.weight_decay),
        "critic": make_optimizer(models.critic, config.critic_learning_rate, config.weight_decay),
    }
    trained = {"policy": models.policy, "critic": models.critic}
    total = count_steps(config, len(prompts))
    sampler = torch.Generator(device).manual_seed(config.seed)
    shuffler = torch.Generator().manual_seed(config.seed + 1)  # mini-batches, random segments
    controller = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
    probe = Probe(config, models, held_out, run, credit)

    state = resume(run, models=trained, optimizers=optimizers)
    done = step = 0
    verdict = ""
    if state:
        done = step = state["step"]
        set_generator_state(sampler, state["sampler"])
        set_generator_state(shuffler, state["shuffler"])
        controller.coef = state["kl_coef"]
        probe.load_state(state["probe"])
        verdict = state["verdict"]

    with orderly(run) as interrupts, Steps(run.path.name, total, done) as progress:
        if not done:
            probe(0, controller.coef)
            interrupts.check("before the first step")
        for step in range(done + 1, (done if verdict else total) + 1):
            clock = Clock(device)
            batch = [prompts[i] for i in batch_rows(step - 1, config, len(prompts))]
            experience = collect(batch, models, config, sampler, probe.normalise, clock)
            plan = credit(experience, models.vocabulary, config, controller.coef, shuffler)
            check_finite(
                [
                    ("the scores", experience.scores),
                    ("the reference's log-probs", experience.ref_logprobs),
                    ("the critic's values", experience.values),
                    ("the rewards", plan.rewards),
                ]
            )
            clock.mark("credit")
            metrics = update(experience, plan, models, optimizers, config, step, total, shuffler)
            clock.mark("update")
            metrics |= describe(experience, plan, controller.coef)
            numbers = to_numbers(metrics) | clock.times(len(batch))
            controller.update(numbers["ppo/kl"], len(batch))
            run.log("train", step, numbers)
            progress.advance(step, {k: numbers[f"ppo/{k}"] for k in ("score", "kl", "length")})

            verdict = probe(step, controller.coef) if due(step, config.eval_every, total) else ""
            if due(step, config.save_every, 0) or interrupts.asked or verdict:
                state = {
                    "sampler": generator_state(sampler),
                    "shuffler": generator_state(shuffler),
                    "kl_coef": controller.coef,
                    "probe": probe.state(),
                    "verdict": verdict,
                }
                save_checkpoint(
                    run,
                    step,
                    models=trained,
                    optimizers=optimizers,
                    state=state,
                    keep=config.keep_checkpoints,
                )
            interrupts.check(f"saved at step {step} in {run.path}")
            if verdict:
                break
        if verdict:
            warn(verdict)
            run.state["note"] = verdict
        run.save_model(models.policy, models.tokenizer)
    next_step = f"marlhf report {run.path.parent} -o {run.path.parent / 'report.html'}"
    return finish(run, probe.latest | {"steps": step}, next_step)


def load_models(config: PPOConfig) -> Models:
    """Policy and critic to train, reference and reward model to ask."""
    device = pick_device(config.device)
    remote, checkpointing = config.trust_remote_code, config.gradient_checkpointing
    tokenizer = load_tokenizer(config.model, trust_remote_code=remote)
    policy = load_policy(
        config.model, seed=config.seed, trust_remote_code=remote, checkpointing=checkpointing
    )
    ref_path = config.ref_model or config.model
    reference = load_policy(ref_path, seed=config.seed, trust_remote_code=remote)
    if not same_tokenizer(tokenizer, load_tokenizer(ref_path, trust_remote_code=remote)):
        raise RunError(
            f"The tokenizer of the reference {ref_path} is not that of {config.model}: its "
            "log-probs would be of other tokens. Set ref_model to a model with the policy's "
            "tokenizer, or leave it out."
        )
    critic_path = config.critic_model or config.reward_model
    if not is_scalar(config.reward_model, trust_remote_code=remote):
        warn(
            f"{config.reward_model} is not a reward model but a language model: its scores come "
            "from a head of random weights and mean nothing. Train one with `marlhf reward`."
        )
    critic = load_scalar(
        critic_path, seed=config.seed, trust_remote_code=remote, checkpointing=checkpointing
    )
    if not same_tokenizer(tokenizer, load_tokenizer(critic_path, trust_remote_code=remote)):
        raise RunError(
            f"The critic starts from {critic_path}, whose tokenizer is not that of {config.model}: "
            "it would read other tokens. Set critic_model to a model with the policy's tokenizer, "
            "such as the SFT model."
        )
    reward = RewardModel(
        load_scalar(config.reward_model, trust_remote_code=remote).to(device),
        load_tokenizer(config.reward_model, trust_remote_code=remote),
        tokenizer,
        token_budget=2 * config.token_budget,
        precision=config.precision,
    )
    for name, model in (("the policy", policy), ("the reference", reference), ("critic", critic)):
        check_vocabulary(model, tokenizer, name)
    policy = policy.to(device)
    engine = NativeEngine(
        policy,
        end_tokens(policy, tokenizer),
        tokenizer.pad_token_id,
        token_budget=config.rollout_tokens,
        precision=config.precision,
    )
    size = policy.get_input_embeddings().weight.shape[0]
    table = vocabulary(tokenizer, size)
    return Models(
        policy,
        reference.to(device).requires_grad_(False),
        critic.to(device),
        reward,
        engine,
        tokenizer,
        Vocabulary(**{k: v.to(device) for k, v in vars(table).items()}),
    )


@torch.no_grad()
def collect(
    prompts: list[list[int]],
    models: Models,
    config: PPOConfig,
    sampler: torch.Generator,
    normalise: Callable[[Tensor], Tensor],
    clock: Clock,
) -> Experience:
    """Sample, then ask reward model, reference and critic."""
    rollout = models.engine.generate(prompts, config.sampling, sampler)
    clock.mark("rollout")
    sequences = Sequences.from_lists(
        prompts, rollout.responses, models.tokenizer.pad_token_id, models.policy.device
    )
    raw_scores = models.reward(prompts, rollout.responses)
    scores = normalise(raw_scores) - config.missing_eos_penalty * (~rollout.ended).float()
    temperature = config.sampling.scale
    shape, device = sequences.mask.shape, models.policy.device
    ref_logprobs, values = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    # With one update the old policy is the new one, and its log-probs need no pass of their own.
    old_logprobs = None if config.one_update else torch.zeros(shape, device=device)
    for micro in token_budget_batches(sequences.total_lengths, 2 * config.token_budget):
        part = sequences.rows(micro)
        where, width = torch.tensor(micro, device=device), part.mask.shape[1]
        with autocast(device, config.precision):
            ref = token_stats(models.reference, part, temperature).logprobs
            ref_logprobs[where, :width] = ref
            values[where, :width] = token_values(models.critic, part)
            if old_logprobs is not None:
                old = token_stats(models.policy, part, temperature).logprobs
                old_logprobs[where, :width] = old
    clock.mark("score")
    return Experience(
        sequences,
        scores,
        raw_scores,
        rollout.ended,
        rollout.logprobs,
        ref_logprobs,
        values,
        old_logprobs,
    )


@torch.no_grad()
def credit(
    experience: Experience,
    table: Vocabulary,
    config: PPOConfig,
    kl_coef: float,
    shuffler: torch.Generator,
) -> Credit:
    """Rewards, macro actions, advantages: the method itself."""
    sequences = experience.sequences
    seeds = torch.randint(2**62, (len(sequences.mask),), generator=shuffler)
    responses = Responses(
        sequences.responses,
        sequences.mask,
        ref_logprobs=experience.ref_logprobs,
        vocabulary=table,
        seeds=seeds.to(sequences.mask.device),
    )
    rewards = shape_rewards(
        experience.scores,
        experience.logprobs,
        experience.ref_logprobs,
        sequences.mask,
        kl_coef,
        kl=config.kl_estimator,
        score_clip=config.score_clip,
    )
    segments = segment(config.segmenter, responses, split_last=config.split_last).validate()
    advantages, returns = macro_gae(
        rewards,
        experience.values,
        segments,
        gamma=config.gamma,
        lam=config.lam,
        rho=config.rho,
        sigma=config.sigma,
        pooling=config.pooling,
    )
    return Credit(rewards, segments, advantages, returns)


def update(
    experience: Experience,
    plan: Credit,
    models: Models,
    optimizers: Mapping[str, torch.optim.Optimizer],
    config: PPOConfig,
    step: int,
    total: int,
    shuffler: torch.Generator,
) -> dict[str, Tensor]:
    """All updates that this batch of responses is used for."""
    warmup = config.warmup_steps
    warmup = round(config.warmup_ratio * total) if warmup is None else warmup
    policy_rate, critic_rate = (
        learning_rate_at(step - 1, peak, total=total, warmup=warmup, schedule=config.schedule)
        for peak in (config.learning_rate, config.critic_learning_rate)
    )
    plan = replace(plan, advantages=whitened(plan, config))
    rows = len(experience.scores)
    gathered: list[dict[str, Tensor]] = []
    for _ in range(config.num_ppo_epochs):
        alone = config.num_mini_batches == 1
        order = torch.arange(rows) if alone else torch.randperm(rows, generator=shuffler)
        for mini in order.chunk(config.num_mini_batches):
            losses = backward(mini.tolist(), experience, plan, models, config)
            check_finite((name, losses[name]) for name in ("ppo/policy_loss", "ppo/value_loss"))
            norms = [
                apply_update(model, optimizers[name], rate, config.max_grad_norm)
                for name, model, rate in (
                    ("policy", models.policy, policy_rate),
                    ("critic", models.critic, critic_rate),
                )
            ]
            gathered.append(
                losses | {"ppo/policy_grad_norm": norms[0], "ppo/critic_grad_norm": norms[1]}
            )
    models.engine.update_weights(models.policy)
    means = {name: torch.stack([g[name] for g in gathered]).mean() for name in gathered[0]}
    return means | {"ppo/learning_rate": torch.tensor(policy_rate)}


def backward(
    mini: list[int], experience: Experience, plan: Credit, models: Models, config: PPOConfig
) -> dict[str, Tensor]:
    """Gradients of one mini-batch, micro-batch by micro-batch, as exact parts of its mean."""
    chosen = experience.sequences.rows(mini)
    device = chosen.mask.device
    where = torch.tensor(mini, device=device)
    num_tokens = chosen.mask.sum().clamp(min=1)
    num_macros = plan.segments.macro_mask[where].sum().clamp(min=1)
    names = ("ppo/policy_loss", "ppo/value_loss", "ppo/clip_fraction", "ppo/approx_kl")
    sums = {name: torch.zeros((), device=device) for name in (*names, "ppo/logprob_gap")}
    for micro in token_budget_batches(chosen.total_lengths, config.token_budget):
        part, index = chosen.rows(micro), where[torch.tensor(micro, device=device)]
        mask, width = part.mask, part.mask.shape[1]

        def cut(x: Tensor, index: Tensor = index, width: int = width) -> Tensor:
            return x[index, :width]

        segments = Segments(cut(plan.segments.ids), mask)
        with autocast(device, config.precision):
            logprobs = token_stats(models.policy, part, config.sampling.scale).logprobs
            values = token_values(models.critic, part)
        old = experience.old_logprobs
        old = logprobs.detach() if old is None else cut(old)
        policy_loss = ppo_policy_loss(
            logprobs,
            old,
            cut(plan.advantages),
            mask,
            clip=config.clip,
            dual_clip=config.dual_clip,
            ratio=config.ratio,
            segments=segments,
            num_tokens=num_tokens if config.ratio == "token" else num_macros,
        )
        value_loss = ppo_value_loss(
            values,
            cut(experience.values),
            cut(plan.returns),
            mask,
            clip=config.value_clip,
            level=config.value_level,
            sigma=config.sigma,
            segments=segments,
            num_tokens=num_tokens if config.value_level == "token" else num_macros,
        )
        policy_loss.backward()
        value_loss.backward()
        with torch.no_grad():
            change = logprobs - old
            if config.ratio != "token":
                pool = segments.sum if config.ratio == "macro" else segments.mean
                change = segments.spread(pool(change))
            outside = ((change.exp() - 1).abs() > config.clip).float()
            gap = (logprobs - cut(experience.logprobs)).abs()
            found = (
                policy_loss,
                value_loss,
                masked_mean(outside, mask, num_tokens),
                masked_mean(kl_estimate(old, logprobs, "k3"), mask, num_tokens),
                masked_mean(gap, mask, num_tokens),
            )
            for name, value in zip(sums, found):
                sums[name] += value.detach()
    return sums


def whitened(plan: Credit, config: PPOConfig) -> Tensor:
    """Advantages at unit scale, each token or each macro action having one vote."""
    mask = plan.segments.mask
    if config.whiten == "none":
        return plan.advantages
    if config.whiten == "tokens":
        return whiten(plan.advantages, mask)
    stats = moments(plan.segments.first(plan.advantages), plan.segments.macro_mask)
    return whiten(plan.advantages, mask, stats=stats)


@torch.no_grad()
def describe(experience: Experience, plan: Credit, kl_coef: float) -> dict[str, Tensor]:
    """Numbers about a batch, all still on the device."""
    mask = experience.sequences.mask
    kl = torch.where(mask, experience.logprobs - experience.ref_logprobs, 0.0).sum(dim=1)
    lengths = mask.sum(dim=1).float()
    actions = plan.segments.macro_mask.sum().float()
    return {
        "ppo/score": experience.scores.mean(),
        "ppo/score_std": experience.scores.std(correction=0),
        "ppo/reward": plan.rewards.sum(dim=1).mean(),
        "ppo/kl": kl.mean(),
        "ppo/kl_coef": torch.tensor(kl_coef),
        "ppo/length": lengths.mean(),
        "ppo/ended": experience.ended.float().mean(),
        "ppo/entropy": -masked_mean(experience.logprobs, mask),
        "ppo/macro_length": lengths.sum() / actions.clamp(min=1),
        "ppo/advantage_norm": torch.linalg.vector_norm(plan.advantages),
        "ppo/q_norm": torch.linalg.vector_norm(plan.returns),
        "ppo/value": masked_mean(experience.values, mask),
        "ppo/explained_variance": explained_variance(experience.values, plan.returns, mask),
    }


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """How much of the returns the critic foresaw: 1 all of it, 0 no better than their mean."""

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, mask)).square(), mask)

    return 1 - variance(returns - values) / variance(returns).clamp(min=1e-8)


def to_numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    """To the host in one go: each `float()` would wait for the device once."""
    device = next(iter(metrics.values())).device
    values = torch.stack([v.detach().float().to(device) for v in metrics.values()]).tolist()
    return dict(zip(metrics, values))


class Clock:
    """Seconds of each phase of a step. Waits for the device only where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phases: dict[str, float] = {}
        self._last = self._start = time.perf_counter()

    def mark(self, phase: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.phases[f"time/{phase}"], self._last = now - self._last, now

    def times(self, rows: int) -> dict[str, Any]:
        whole = time.perf_counter() - self._start
        return self.phases | {"time/step": whole, "time/samples_per_second": rows / whole}
