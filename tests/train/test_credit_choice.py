"""`credit: auto`: what it measures against what is known, and what it makes of it."""

import itertools

import pytest
import torch

from marlhf.config.candidates import Candidate, parse_candidates
from marlhf.core import NGram, Perplexity, Segments, gae
from marlhf.runtime.stage import Stopped
from marlhf.train import credit_choice, ppo
from marlhf.train.agreement import gradient_agreement
from marlhf.train.credit_choice import CreditChooser, better, name_of
from small_runs import read_lines, stop_after, weights

LENGTH, ROWS = 6, 32
GAINS = torch.tensor([1.0, -0.5, 0.8, 0.3, -0.7, 0.6], dtype=torch.float64)
"""What each of six binary tokens adds to the reward if it is 1."""
LAMBDAS = (0.0, 0.5, 0.95, 1.0)


def values_of(actions, spoilt):
    """The true values before each token, [B, T]; spoilt by something that depends on the state."""
    sums = (actions * GAINS).cumsum(dim=1) - actions * GAINS
    values = sums + 0.5 * (GAINS.sum() - GAINS.cumsum(dim=0) + GAINS)
    place = torch.arange(LENGTH)
    history = (actions.cumsum(dim=1) - actions) * (place + 1)
    return values + spoilt * torch.cos(3 * history + place)


def batch_gradients(generator, spoilt, count=ROWS):
    """Gradients by token GAE at each lambda, of the logits of six independent coins: [E, 6]."""
    actions = (torch.rand(count, LENGTH, generator=generator, dtype=torch.float64) < 0.5).double()
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    rewards = torch.zeros(count, LENGTH, dtype=torch.float64)
    rewards[:, -1] = (actions * GAINS).sum(dim=1) + noise
    mask = torch.ones(count, LENGTH).bool()
    values, scores = values_of(actions, spoilt), actions - 0.5
    found = [
        (gae(rewards, values, mask, lam=lam)[0] * scores).mean(dim=0) for lam in (*LAMBDAS, 1.0)
    ]
    return torch.stack(found)


def exact_cosines(spoilt):
    """From the whole distribution: 64 outcomes, the reward's noise by its variance."""
    true = GAINS * 0.25
    outcomes = torch.tensor(list(itertools.product((0.0, 1.0), repeat=LENGTH))).double()
    mask = torch.ones(len(outcomes), LENGTH).bool()
    rewards = torch.zeros(len(outcomes), LENGTH, dtype=torch.float64)
    rewards[:, -1] = (outcomes * GAINS).sum(dim=1)
    values, scores = values_of(outcomes, spoilt), outcomes - 0.5
    place = torch.arange(LENGTH)
    cosines = []
    for lam in LAMBDAS:
        terms = gae(rewards, values, mask, lam=lam)[0] * scores
        mean = terms.mean(dim=0)
        spread = terms.var(dim=0, correction=0) + 0.25 * lam ** (2 * (LENGTH - 1 - place))
        square = mean.square().sum() + spread.sum() / ROWS
        cosines.append(float((mean @ true) / (square.sqrt() * true.norm())))
    return cosines


@pytest.mark.parametrize("spoilt", [0.0, 1.0])
def test_the_measure_is_the_cosine_of_an_enumerated_process(spoilt):
    generator = torch.Generator().manual_seed(1)
    measured = torch.stack([batch_gradients(generator, spoilt) for _ in range(400)], dim=1)
    agreement = gradient_agreement(measured[:-1], measured[-1])
    exact = exact_cosines(spoilt)
    for found, error, known in zip(agreement.cosine.tolist(), agreement.error.tolist(), exact):
        assert abs(found - known) < 4 * error + 1e-3
    best = int(agreement.cosine.argmax())
    assert best == exact.index(max(exact))
    assert (best == 0) == (spoilt == 0)  # a perfect critic needs no reach


def chooser_of(ppo_config):
    names = tuple(f"token lam={lam:g}" for lam in LAMBDAS[1:])
    config = ppo_config(
        credit="auto", credit_candidates=names, segmenter=NGram(1), sigma="start", lam=0.0
    )
    return CreditChooser(config)


def test_it_follows_when_the_critic_is_spoilt(ppo_config, capfd):
    chooser = chooser_of(ppo_config)
    assert [o.name for o in chooser.options] == [f"token lam={lam:g}" for lam in LAMBDAS]
    generator = torch.Generator().manual_seed(0)
    for step in range(30):
        chooser.choose(step, batch_gradients(generator, 0.0, count=256))
    assert chooser.config.lam == 0.0
    for step in range(30, 60):
        metrics = chooser.choose(step, batch_gradients(generator, 1.0, count=256))
    assert metrics["credit/choice"] == chooser.choice
    assert metrics["credit/cosine"] == metrics[f"credit/cosine/token_lam={chooser.config.lam:g}"]
    assert 0 < metrics["credit/error"] < 0.1
    assert chooser.config.lam >= 0.95
    assert "instead of token lam=0" in capfd.readouterr().err


def test_it_stays_put_on_noise(ppo_config):
    """Candidates that differ by noise alone: over 20 runs of 40 steps hardly any switch."""
    generator = torch.Generator().manual_seed(0)
    switches = 0
    for _ in range(20):
        chooser = chooser_of(ppo_config)
        for step in range(40):
            signal = torch.ones(LENGTH, dtype=torch.float64)
            noise = torch.randn(len(LAMBDAS) + 1, LENGTH, generator=generator).double()
            before = chooser.choice
            chooser.choose(step, signal + 0.7 * noise)
            switches += chooser.choice != before
    assert switches <= 20 * 40 * 0.02


def test_nothing_is_chosen_where_nothing_can_be_told():
    nothing = torch.zeros(3, 6, 4)
    assert better(gradient_agreement(nothing, nothing[0]), used=1) == 1


def test_a_short_reach_is_not_chosen_while_the_critic_explains_nothing(ppo_config):
    """Gradients that favour lambda .5, which is not allowed, over those in use and above it."""

    def choice(allowed):
        chooser = chooser_of(ppo_config)
        chooser.choice = 3  # lambda 1
        generator = torch.Generator().manual_seed(0)
        for step in range(20):
            gradients = batch_gradients(generator, 0.0, count=256)
            chooser.choose(step, gradients, None, allowed)
        return chooser.config.lam

    assert choice(None) == 0.0
    assert choice([False, False, True, True]) == 0.95
    assert choice([False, False, False, True]) == 1.0


def test_the_choice_among_nobody_stays():
    generator = torch.Generator().manual_seed(0)
    measured = torch.stack([batch_gradients(generator, 0.0) for _ in range(12)], dim=1)
    agreement = gradient_agreement(measured[:-1], measured[-1])
    assert better(agreement, 2, allowed=[False] * 4) == 2


AUTO = {"credit": "auto", "num_steps": 8, "eval_every": 4}


def test_a_run_chooses_logs_and_resumes_identically(ppo_config, monkeypatch):
    monkeypatch.setattr(credit_choice, "better", lambda _, used, **__: (used + 5) % 12)
    whole = ppo_config("whole", **AUTO, num_ppo_epochs=2)
    ppo.train(whole)
    steps = [x for x in read_lines(whole.output_dir) if x["kind"] == "train"]
    assert all(x["credit/reach"] > 0 for x in steps)
    assert [x["credit/choice"] for x in steps] == [0, 0, 0, 0, 0, 0, 5, 10]
    parts = ppo_config("parts", **AUTO, num_ppo_epochs=2)
    with monkeypatch.context() as patched:
        stop_after(7, patched, ppo)
        with pytest.raises(Stopped):
            ppo.train(parts)
    ppo.train(parts)
    assert read_lines(whole.output_dir) == read_lines(parts.output_dir)
    assert weights(whole.output_dir) == weights(parts.output_dir)


def test_measuring_changes_nothing_that_is_learnt(ppo_config):
    """Until it switches, the same numbers as without it."""
    plain = ppo_config("plain", segmenter=NGram(5), sigma="start")
    auto = ppo_config("auto", segmenter=NGram(5), sigma="start", credit="auto")
    ppo.train(plain)
    ppo.train(auto)
    assert weights(plain.output_dir) == weights(auto.output_dir)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name of a rule is missing"),
        ("ngrams n=5", "no rule 'ngrams'"),
        ("ngram 5", "Cannot read '5'"),
        ("ngram n=5 lam=2", "lam must lie between 0 and 1"),
        ("ngram n=5 sigma=begin", "sigma must be one of"),
        ("token credit=auto", "credit must be one of"),
    ],
)
def test_candidates_that_cannot_be_read(ppo_config, text, message):
    with pytest.raises(ValueError, match=message):
        ppo_config(credit="auto", credit_candidates=(text,))


def test_settings_of_a_rule_are_checked_before_training(ppo_config):
    with pytest.raises(ValueError, match="ngram n=0"):
        CreditChooser(ppo_config(credit="auto", credit_candidates=("ngram n=0",)))


def test_auto_needs_settings_that_can_be_compared(ppo_config):
    with pytest.raises(ValueError, match="set pooling: sum"):
        ppo_config(credit="auto", pooling="mean")
    with pytest.raises(ValueError, match="credit: auto alone"):
        ppo_config(credit_candidates=("token lam=1",))


def test_a_config_is_named_as_candidates_are(ppo_config):
    for name in ("token lam=0.9", "ngram n=5 lam=0.95", "ngram n=3 lam=1 credit=boundary"):
        candidate = Candidate.parse(name)
        config = ppo_config(
            segmenter=NGram(candidate.settings["n"]),
            lam=candidate.lam,
            sigma="start",
            credit=candidate.credit,
        )
        assert name_of(config) == candidate.name == name
    assert [c.name for c in parse_candidates(("token lam=1", "ngram n=1 lam=1.0"))] == [
        "token lam=1"
    ]


def test_the_runs_own_settings_are_not_a_candidate_too(ppo_config):
    config = ppo_config(credit="auto", segmenter=Perplexity(), sigma="start")
    configs = [option.config for option in CreditChooser(config).options]
    assert sum(isinstance(each.segmenter, Perplexity) for each in configs) == 1


def test_macro_gae_over_single_tokens_is_the_unbiased_one(ppo_config):
    chooser = CreditChooser(ppo_config(credit="auto"))
    config = chooser.configs[-1]
    rewards, values = torch.rand(3, 7), torch.rand(3, 7)
    mask = torch.ones(3, 7).bool()
    segments = Segments.from_starts(mask, mask)
    credit = ppo.assign_credit(rewards, values, segments, config)
    torch.testing.assert_close(credit.advantages, gae(rewards, values, mask, lam=1.0)[0])
