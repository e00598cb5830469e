"""Credit of runs with an environment: `marlhf credit`, and `credit: auto` among turns."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from marlhf.config.candidates import CANDIDATES, TURN_CANDIDATES, Candidate
from marlhf.core import Turns
from marlhf.credit.measure import measure
from marlhf.credit.state import open_state, sample_batch
from marlhf.credit.true_credit import locate
from marlhf.data import DataConfig
from marlhf.evaluate.eval_plan import EvaluationError
from marlhf.rollout import Sampling
from marlhf.train import credit_choice, ppo
from marlhf.train.credit_choice import by_each
from marlhf.train.ppo import assign_credit, shape_and_segment
from small_runs import read_lines, small_ppo

GAME = {
    "data": DataConfig(source="guess", limit=300, eval_size=24),
    "reward_model": "",
    "environment": "guess",
    "max_turns": 3,
    "episode_tokens": 80,
    "sampling": Sampling(max_new_tokens=4),
    "segmenter": Turns(),
    "lam": 0.9,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, parents):
    """A finished PPO run of two steps in the guessing game."""
    config = small_ppo(parents, tmp_path_factory.mktemp("turns") / "run", **GAME, num_steps=2)
    ppo.train(config)
    return Path(config.output_dir)


def test_turns_are_compared_where_an_environment_answers(run):
    measured = measure(open_state(run, device="cpu"), batches=3, seed=1)
    names = [option.name for option in measured.options]
    assert names[0] == "turns lam=0.9"
    assert set(TURN_CANDIDATES) < set(names)
    assert set(CANDIDATES) < set(names)
    recipe = measured.options[names.index("turns lam=0.5")].recipe
    assert recipe == "segmenter: {type: turns}, lam: 0.5, sigma: start"


def test_a_turn_candidate_is_what_training_by_it_would_use(run):
    state = open_state(run, device="cpu")
    experience, _ = sample_batch(state, 0, seed=1)
    values = experience.critic_values(state.models)

    def credit(config):
        shuffler = torch.Generator().manual_seed(0)
        rewards, segments = shape_and_segment(experience, state.models, config, 0.05, shuffler)
        return assign_credit(rewards, values, segments, config)

    other = replace(state.config, lam=0.5)
    shuffler = torch.Generator().manual_seed(0)
    own, configs = credit(state.config), [state.config, other]
    both = by_each(experience, own, state.models, shuffler, configs, assign_credit)
    for advantages, config in zip(both, configs):
        expected = credit(config).whitened(config.whiten) / experience.mask.sum()
        torch.testing.assert_close(advantages, expected)
        assert not bool(advantages[~experience.mask].any())
        for record, row in zip(experience.episodes, advantages):
            for turn in record.turns:
                assert len(set(row[turn.start : turn.stop].tolist())) == 1
    assert not torch.equal(*both)


def test_auto_may_choose_turns(parents, tmp_path, monkeypatch):
    config = small_ppo(
        parents, tmp_path / "auto", **GAME | {"lam": 0.95}, credit="auto", num_steps=7
    )
    names = [candidate.name for candidate in config.candidates]
    assert names == [*CANDIDATES, *TURN_CANDIDATES]
    # Its own are turns with lambda 0.95, so that of the four three are left, at the end.
    monkeypatch.setattr(credit_choice, "better", lambda *known, **allowed: 12)
    ppo.train(config)
    lines = [line for line in read_lines(config.output_dir) if line["kind"] == "train"]
    assert [line["credit/choice"] for line in lines] == [0, 0, 0, 0, 0, 0, 12]
    chooser = credit_choice.CreditChooser(config)
    assert chooser.options[12].name == "turns lam=0.5"
    assert all(line["rl/turns"] > 0 for line in lines)


def test_without_an_environment_there_are_no_turns(parents, tmp_path):
    names = [c.name for c in small_ppo(parents, tmp_path / "no", credit="auto").candidates]
    assert not any(name.startswith("turns") for name in names)
    assert Candidate.parse("turns lam=0.8").name == "turns lam=0.8"


def change(run, folder, **settings):
    """A copy of a run's settings with changes."""
    config = yaml.safe_load((run / "config.yaml").read_text()) | settings
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_bytes((run / "run.json").read_bytes())
    return folder


def test_an_environment_that_a_run_names_is_not_imported_unless_trusted(run, tmp_path, monkeypatch):
    code = 'from pathlib import Path\nPath(__file__).with_name("ran").touch()\n'
    (tmp_path / "hostile_world.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    named = {"environment": "hostile_world:World", "code": ["hostile_world"]}
    folder = change(run, tmp_path / "copy", **named)
    with pytest.raises(EvaluationError, match=r"hostile_world:World .*--trust-code"):
        open_state(folder, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_where_is_refused_with_an_environment(run):
    with pytest.raises(ValueError, match="an environment cannot be put back"):
        locate(open_state(run, device="cpu"), ())
