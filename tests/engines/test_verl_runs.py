"""verl's whole trainer on a CPU, started by `marlhf verl`: full PPO steps, number by number.

Each run takes one to three minutes, most of it Ray's start. Ray sees only the loopback of a network
namespace of its own. Run by `make test-engines`.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes" / "verl").glob("*.sh"))
NOT_COMPARED = ("timing", "perf/", "macro/", "actor/ppo_kl", "actor/pg_clipfrac")
"""Metrics of the clock and of memory, those that verl's own estimator does not have, and two that
verl averages over micro-batches whatever their number of tokens: these differ between two runs of
one setting whose losses and gradient norms agree to 1e-6."""
NAMESPACE = ["unshare", "-n", "-fp", "--mount-proc", "true"]

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]
if importlib.util.find_spec("verl") is None:
    pytest.skip("needs verl: make test-engines", allow_module_level=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    from verl_toy import write_toy

    if subprocess.run(NAMESPACE, capture_output=True).returncode:
        pytest.skip("needs a network namespace of its own: make test-engines as root")
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def start(toy, tmp_path_factory):
    """`start(folder, *overrides)`: metrics by step of a run over three steps."""
    from verl_toy import run_verl

    def run(folder, *words, **options):
        return run_verl(toy, folder, "trainer.total_training_steps=3", *words, **options)

    return run


MACRO = (
    "algorithm.adv_estimator=macro_gae",
    "algorithm.use_kl_in_reward=True",
    "algorithm.macro.segmenter.type=perplexity",
    "algorithm.macro.segmenter.max_length=5",
    "algorithm.macro.sigma=start",
    "algorithm.macro.value_level=macro",
    "actor_rollout_ref.actor.policy_loss.loss_mode=macro_ratio",
    "actor_rollout_ref.actor.clip_ratio_low=0.1",
    "actor_rollout_ref.actor.clip_ratio_high=0.3",
    "trainer.save_freq=2",
)
"""Everything that is ours at once: macro actions from the reference, both losses over them."""


@pytest.fixture(scope="module")
def unbroken(start, tmp_path_factory):
    return start(tmp_path_factory.mktemp("unbroken"), *MACRO)


def compared(metrics):
    return {k: v for k, v in metrics.items() if not any(part in k for part in NOT_COMPARED)}


def assert_same(found, expected, tolerance):
    assert set(compared(found)) >= {"actor/pg_loss", "critic/vf_loss", "actor/grad_norm"}
    for name, value in compared(expected).items():
        assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def test_single_tokens_train_as_verls_own_gae(start, tmp_path):
    ours = start(
        tmp_path / "macro",
        "algorithm.adv_estimator=macro_gae",
        "algorithm.macro.segmenter.type=ngram",
        "algorithm.macro.segmenter.n=1",
    )
    verls = start(tmp_path / "gae", "algorithm.adv_estimator=gae")
    assert set(ours) == set(verls) == {1, 2, 3}
    for step in (1, 2, 3):
        assert ours[step]["macro/tokens_per_action"] == 1
        assert_same(ours[step], verls[step], 1e-5)


def test_a_killed_run_resumes_identically(start, unbroken, tmp_path):
    killed = start(tmp_path, *MACRO, kill_after=2)
    assert_same(killed[2], unbroken[2], 1e-5)
    resumed = start(tmp_path, *MACRO, "trainer.resume_mode=auto")
    assert set(resumed) == {3}
    assert_same(resumed[3], unbroken[3], 1e-5)
    assert resumed[3]["macro/actions"] == unbroken[3]["macro/actions"]


def test_two_ranks_train_as_one(start, unbroken, tmp_path):
    two = start(tmp_path, *MACRO, slots=2)
    names = ("critic/score/mean", "critic/advantages/max", "critic/returns/mean", "critic/vf_loss")
    names += ("actor/pg_loss", "actor/grad_norm", "critic/grad_norm", "macro/actions")
    for step in (1, 2, 3):
        for name in names:
            expected = pytest.approx(unbroken[step][name], rel=1e-4, abs=1e-5)
            assert two[step][name] == expected, (step, name)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_pass_every_check(recipe, tmp_path, monkeypatch):
    from marlhf.engines.verl_config import compose, launch_arguments

    command = tmp_path / "marlhf"
    dump = "import json, sys; print(json.dumps(sys.argv[1:]))"
    command.write_text(f"#!{sys.executable}\n{dump}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    shown = subprocess.run(["bash", recipe, "trainer.nnodes=2"], capture_output=True, check=True)
    name, *words = json.loads(shown.stdout)
    assert name == "verl"
    arguments, _ = launch_arguments(words)
    config = compose(arguments)
    assert config["trainer"]["nnodes"] == 2
    assert config["critic"]["enable"] is True


def test_a_mistake_is_a_sentence_before_ray_starts(toy, tmp_path):
    from verl_toy import run_verl

    with pytest.raises(RuntimeError) as error:
        run_verl(toy, tmp_path, "algorithm.adv_estimator=macro_gae", "algorithm.macro.sigmaa=start")
    assert "Did you mean sigma?" in str(error.value)
    assert "Traceback" not in str(error.value)
    assert "ray" not in str(error.value).lower()
