"""A critic that is trained before the first step: on which samples, towards what, and resumed."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from marlhf.config.build import ConfigError
from marlhf.core import Entropy, NGram, Perplexity, RandomNGram, ValueChange
from marlhf.data import DataConfig
from marlhf.errors import SettingError
from marlhf.runs.layout import RunError
from marlhf.runtime.stage import GivenObjects, Stopped
from marlhf.train import critic_samples, ppo
from marlhf.train.critic_samples import CriticSamples
from marlhf.train.critic_training import Pretraining
from marlhf.train.ppo_config import CriticPretraining
from marlhf.train.recipe import load_stage
from small_runs import everything, read_lines, weights

pytestmark = pytest.mark.xdist_group("forked")
FEW = CriticPretraining(responses=48, epochs=3, until=1.0)


def first_digit(prompts: list[str]) -> list[float]:
    """Known from the first token on, of prompts such as 7+2413."""
    return [int(prompt[0]) / 3 for prompt in prompts]


@pytest.fixture
def config(ppo_config, monkeypatch):
    """Runs of one step, whose samples are in files of 16."""
    monkeypatch.setattr(critic_samples, "CHUNK", 16)

    def make(name: str = "ppo", **changes):
        settings = {"critic_pretraining": FEW, "num_steps": 1, "eval_every": 0, "save_every": 0}
        return ppo_config(name, **settings | changes)

    return make


def state_of(config) -> dict:
    return json.loads((Path(config.output_dir) / "run.json").read_text())


def samples_of(config) -> list[Path]:
    return sorted((Path(config.output_dir).parent / "critic_samples").glob("*/*.safetensors"))


def critic(config) -> dict[str, torch.Tensor]:
    return load_file(Path(config.output_dir) / "critic" / "model.safetensors")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_pretrained_critic_explains_returns_of_prompts_it_never_saw(config, seed):
    made = config(
        seed=seed,
        data=DataConfig(source="sums", limit=300, eval_size=24),
        critic_pretraining=CriticPretraining(
            responses=200, epochs=20, until=0.5, learning_rate=3e-3
        ),
        reward_model="",
        kl_coef=0.0,
    )
    ppo.train(made, GivenObjects(reward_funcs=[first_digit]))
    epochs = state_of(made)["critic_pretraining"]["epochs"]
    assert epochs[0]["explained_variance"] < 0.1
    assert epochs[-1]["explained_variance"] > 0.5
    assert len(epochs) < 20
    assert epochs[-1]["explained_variance_1"] > 0.5  # the prompt says it all


def test_the_targets_are_the_rewards_still_to_come(config, monkeypatch):
    """Of each macro action, from its first token on, by an obvious loop."""
    rules = [NGram(1), RandomNGram(lengths=(1, 2, 3))]
    for number, rule in enumerate(rules):
        made = config(f"run{number}", segmenter=rule)
        seen = []
        real = CriticSamples.load

        def load(self, real=real, seen=seen):
            targets = real(self)
            seen.append((self, targets))
            return targets

        monkeypatch.setattr(CriticSamples, "load", load)
        ppo.train(made)
        monkeypatch.setattr(CriticSamples, "load", real)
        [(samples, targets)] = seen
        parts = [load_file(file) for file in samples.files]
        assert len(targets) == 48
        row = 0
        for part in parts:
            for rewards, length in zip(part["rewards"].tolist(), part["lengths"].tolist()):
                ids, returns = targets.ids[row].tolist(), targets.returns[row].tolist()
                assert targets.mask[row].tolist() == [t < length for t in range(len(ids))]
                for t in range(length):
                    first = ids.index(ids[t])
                    assert returns[t] == pytest.approx(sum(rewards[first:length]), abs=1e-5)
                row += 1


def test_an_update_is_that_of_the_squared_error(config, monkeypatch):
    """Value loss against half the mean squared error over all tokens of the rows."""
    losses, expected = [], []
    real = critic_samples.apply_updates

    def spy(updates, *rest):
        losses.append([p.grad.clone() for p in updates[0].model.parameters()])
        return real(updates, *rest)

    def update(self, targets, rows):
        sequences, _, returns = targets.rows(rows, self.rl.models)
        values = self.rl.models.values(sequences)
        loss = torch.zeros(())
        for i, length in enumerate(sequences.lengths):
            for t in range(length):
                loss = loss + (values[i, t] - returns[i, t]) ** 2 / 2
        (loss / sum(sequences.lengths)).backward()
        expected.append([p.grad.clone() for p in self.critic.parameters()])
        self.critic.zero_grad(set_to_none=True)
        return critic_samples.regress(
            targets, rows, self.rl.models, self.optimizer, self.rate, self.config
        )

    monkeypatch.setattr(critic_samples, "apply_updates", spy)
    monkeypatch.setattr(Pretraining, "_update", update)
    ppo.train(config(critic_pretraining=replace(FEW, epochs=1), token_budget=200))
    assert len(losses) == len(expected) == 5  # 43 rows in batches of 8
    for one, other in zip(losses, expected):
        for a, b in zip(one, other):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_run_after_it_samples_what_it_would_sample_anyway(config):
    """Only the critic differs: no random number of the run is spent."""
    plain, taught = config("plain", critic_pretraining=None), config("taught")
    ppo.train(plain)
    ppo.train(taught)
    one, other = read_lines(plain.output_dir), read_lines(taught.output_dir)
    same = ("rl/score", "rl/kl", "rl/length", "rl/entropy")
    assert [[x.get(k) for k in same] for x in one] == [[x.get(k) for k in same] for x in other]
    assert one[1]["rl/value"] != other[1]["rl/value"]
    assert not (Path(taught.output_dir) / "critic_pretraining").exists()


def stop_in(monkeypatch, at: int) -> None:
    """Ask for an end after so many updates of the critic."""
    real, count = Pretraining._update, [0]

    def update(self, targets, rows):
        count[0] += 1
        if count[0] == at:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, targets, rows)

    monkeypatch.setattr(Pretraining, "_update", update)


def test_a_stopped_pretraining_resumes_identically(config, monkeypatch):
    options = {
        "num_steps": 2,
        "segmenter": RandomNGram(lengths=(1, 2, 3)),
        "normalize_scores": True,
    }
    whole, parts = config("whole", **options), config("parts", **options)
    ppo.train(whole)
    for file in samples_of(whole):
        file.unlink()
    with monkeypatch.context() as patched:
        stop_in(patched, at=7)  # in the second of three epochs
        with pytest.raises(Stopped, match="with 2 epochs of critic pretraining saved"):
            ppo.train(parts)
    assert state_of(parts)["status"] == "stopped"
    ppo.train(parts)
    assert everything(whole.output_dir) == everything(parts.output_dir)
    assert weights(whole.output_dir) == weights(parts.output_dir)
    one, other = critic(whole), critic(parts)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_killed_pretraining_resumes_identically(ppo_config, start):
    """kill -9 while it samples and while it trains."""
    settings = CriticPretraining(responses=520, epochs=4, until=1.0)  # two files of samples
    options = {"critic_pretraining": settings, "num_steps": 1, "eval_every": 0, "batch_size": 16}
    whole, parts = ppo_config("a/run", **options), ppo_config("b/run", **options)
    for each in (whole, parts):
        Path(each.output_dir).parent.mkdir()
    ppo.train(whole)
    latest = Path(parts.output_dir) / "critic_pretraining" / "latest"
    for there in (lambda: len(samples_of(parts)) >= 1, lambda: any(latest.glob("step-*"))):
        process = start(parts)
        end = time.monotonic() + 120
        while not there() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    before = [file.stat().st_mtime_ns for file in samples_of(parts)]
    assert len(before) == 2
    ppo.train(parts)
    assert [file.stat().st_mtime_ns for file in samples_of(parts)] == before
    assert everything(whole.output_dir) == everything(parts.output_dir)
    assert weights(whole.output_dir) == weights(parts.output_dir)


def test_runs_that_learn_in_another_way_share_their_samples(config, monkeypatch):
    one = config("one", segmenter=NGram(1), lam=0.8)
    ppo.train(one)
    files = samples_of(one)
    assert len(files) == 3
    made = []
    real = CriticSamples._make
    monkeypatch.setattr(CriticSamples, "_make", lambda *args: made.append(args) or real(*args))
    ppo.train(config("two", segmenter=Perplexity(), lam=1.0, learning_rate=3e-3, num_steps=2))
    assert not made
    assert samples_of(one) == files
    ppo.train(config("three", kl_coef=0.5))  # other rewards
    assert len(made) == 3
    ppo.train(config("four", seed=1))
    assert len(made) == 6


@pytest.mark.parametrize("rule", [Entropy(quantile=0.7), ValueChange()], ids=str)
def test_rules_that_read_the_models_cut_stored_responses_too(config, rule):
    made = config(segmenter=rule, lam="adaptive")
    ppo.train(made)
    assert state_of(made)["critic_pretraining"]["epochs"][-1]["epoch"] == 3


def test_a_damaged_file_of_samples_is_sampled_again(config, capfd):
    one = config("one")
    ppo.train(one)
    victim = samples_of(one)[1]
    whole = victim.read_bytes()
    victim.write_bytes(whole[:100])
    ppo.train(config("two"))
    assert "is damaged" in capfd.readouterr().err.replace("\n", " ")
    assert victim.read_bytes() == whole


def test_two_at_once_sample_once(config, monkeypatch):
    """The second waits for what the first samples; if that one is gone, it samples itself."""
    from marlhf.runs.atomic import lock_folder

    first = config("first")
    ppo.train(first)
    [folder] = {file.parent for file in samples_of(first)}
    last = samples_of(first)[-1]
    kept = last.read_bytes()
    last.unlink()
    descriptor = lock_folder(folder)
    assert descriptor is not None
    made, waits = [], []
    real = CriticSamples._make
    monkeypatch.setattr(CriticSamples, "_make", lambda *args: made.append(args) or real(*args))

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:  # the other process has finished the file
            last.write_bytes(kept)

    monkeypatch.setattr(critic_samples.time, "sleep", sleep)
    ppo.train(config("second"))
    assert len(waits) == 3
    assert not made
    last.unlink()
    waits.clear()

    def die(seconds):
        waits.append(seconds)
        os.close(descriptor)

    monkeypatch.setattr(critic_samples.time, "sleep", die)
    ppo.train(config("third"))
    assert len(waits) == len(made) == 1
    assert last.read_bytes() == kept


def test_it_ends_where_enough_is_explained_or_nothing_more(config):
    def reason(explained, **changes):
        made = config(critic_pretraining=replace(FEW, **{"epochs": 50, "until": 0.5, **changes}))
        pretraining = object.__new__(Pretraining)
        pretraining.settings = made.critic_pretraining
        pretraining.epochs = [{"explained_variance": x} for x in explained]
        return pretraining._why_to_stop()

    assert not reason([0.0])
    assert not reason([0.0] * 20)  # it may know nothing for long
    assert "until" in reason([0.0, 0.2, 0.5])
    assert "gained nothing" in reason([0.0, 0.3, 0.29, 0.3, 0.301])
    assert not reason([0.0, 0.3, 0.29, 0.3, 0.31])
    assert "all epochs" in reason([0.0, 0.1, 0.2], epochs=2)


def test_the_best_epoch_is_kept(config, monkeypatch):
    made = config(critic_pretraining=replace(FEW, epochs=3))
    errors = iter([1.0, 0.2, 0.5, 0.6])
    real = Pretraining._evaluate
    saved = []

    def evaluate(self, *args):
        saved.append({k: v.clone() for k, v in self.critic.state_dict().items()})
        return real(self, *args) | {"error": next(errors)}

    checked = []
    real_report = Pretraining._report

    def report(self, reason):
        now = self.critic.state_dict()
        checked.append(all(torch.equal(now[k], x) for k, x in saved[1].items()))
        real_report(self, reason)

    monkeypatch.setattr(Pretraining, "_evaluate", evaluate)
    monkeypatch.setattr(Pretraining, "_report", report)
    ppo.train(made)
    assert checked == [True]


def test_rewards_that_are_no_numbers_end_it_with_a_sentence(config, monkeypatch):
    real = CriticSamples._make

    def make(self, number):
        score = self.rl.score

        def spoilt(*args):
            made = score(*args)
            return replace(made, normalised_scores=made.normalised_scores * float("nan"))

        self.rl.score = spoilt
        return real(self, number)

    monkeypatch.setattr(CriticSamples, "_make", make)
    made = config()
    with pytest.raises(RunError, match="the rewards of responses for the critic are NaN"):
        ppo.train(made)
    assert not samples_of(made)


def test_rewards_that_are_all_alike_teach_nothing_and_it_says_so(config, capfd):
    made = config(reward_model="", kl_coef=0.0)
    ppo.train(made, GivenObjects(reward_funcs=[lambda completions: [0.5] * len(completions)]))
    said = " ".join(capfd.readouterr().err.split())
    assert "all 48 responses of the starting policy have the same return, 0.5" in said
    assert read_lines(made.output_dir)[-1]["step"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"responses": 0}, "critic_pretraining.responses must be at least 20; got 0"),
        ({"epochs": 0}, "critic_pretraining.epochs must be at least 1; got 0"),
        ({"until": 1.5}, "critic_pretraining.until must be positive and at most 1; got 1.5"),
        ({"until": 0.0}, "critic_pretraining.until must be positive and at most 1; got 0.0"),
        ({"learning_rate": -1.0}, "critic_pretraining.learning_rate must be positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(SettingError, match=message):
        CriticPretraining(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"critic_pretraining": FEW}, "has no critic, so critic_pretraining"),
        ({"critic_replay": 2}, "has no critic, so critic_replay: 2 does not fit"),
        ({"critic_updates": 2}, "has no critic, so critic_updates: 2 does not fit"),
    ],
)
def test_without_a_critic_there_is_none_to_train(ppo_config, change, message):
    with pytest.raises(SettingError, match=message):
        ppo_config(values="monte_carlo", **change)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("critic_replay=-1", "critic_replay must be at least 0"),
        ("critic_updates=0", "critic_updates must be at least 1"),
        ("critic_pretraining={responses: 0}", "critic_pretraining.responses must be at least 20"),
        ("critic_pretraining={response: 9}", "response"),
    ],
)
def test_recipes_say_so_too(override, message):
    with pytest.raises(ConfigError, match=message):
        load_stage("toy", "ppo", [override])


def test_rloo_knows_no_such_setting():
    with pytest.raises(ConfigError, match="critic_pretraining"):
        load_stage("sums", "rloo", ["rloo.critic_pretraining={responses: 64}"])
