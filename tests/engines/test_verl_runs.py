"""verl's whole trainer on a CPU, started by `marlhf verl`: full PPO steps, number by number.

Each run takes one to three minutes, most of it Ray's start. Ray sees only the loopback of a network
namespace of its own. Run by `make test-engines`.
"""

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes" / "verl").glob("*.sh"))
NOT_COMPARED = ("timing", "perf/", "macro/")
"""Metrics of the clock and of memory, and those that verl's own estimator does not have."""
BY_MICRO_BATCH = ("actor/ppo_kl", "actor/pg_clipfrac")
"""Metrics that verl averages over micro-batches whatever their number of tokens. They differ
between two runs of one setting whose losses and gradient norms agree to 1e-6, unless each
mini-batch is one micro-batch: then they agree, too."""
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
    """`start(folder, *overrides)`: metrics by step of a run, over three steps unless given."""
    from verl_toy import run_verl

    def run(folder, *words, steps=3, **options):
        return run_verl(toy, folder, f"trainer.total_training_steps={steps}", *words, **options)

    return run


def at_once(*runs):
    """The results of runs side by side: a run mostly waits for one process to start another."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [future.result() for future in [pool.submit(run) for run in runs]]


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
def one_and_two_ranks(start, tmp_path_factory):
    return at_once(
        partial(start, tmp_path_factory.mktemp("one"), *MACRO),
        partial(start, tmp_path_factory.mktemp("two"), *MACRO, slots=2),
    )


@pytest.fixture(scope="module")
def unbroken(one_and_two_ranks):
    return one_and_two_ranks[0]


def assert_same(found, expected, tolerance, leave_out=BY_MICRO_BATCH):
    left_out = (*NOT_COMPARED, *leave_out)
    names = {name for name in expected if not any(part in name for part in left_out)}
    assert names >= {"actor/pg_loss", "actor/grad_norm", "critic/returns/mean"}
    assert ("critic/vf_loss" in found) == ("critic/vf_loss" in expected)
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name


def test_single_tokens_train_as_verls_own_gae(start, tmp_path):
    single = ("algorithm.macro.segmenter.type=ngram", "algorithm.macro.segmenter.n=1")
    macro, gae = (f"algorithm.adv_estimator={name}" for name in ("macro_gae", "gae"))
    ours, verls = at_once(
        partial(start, tmp_path / "macro", macro, *single, micro=16),
        partial(start, tmp_path / "gae", gae, micro=16),
    )
    assert set(ours) == set(verls) == {1, 2, 3}
    for step in (1, 2, 3):
        assert ours[step]["macro/tokens_per_action"] == 1
        assert verls[step]["actor/pg_clipfrac"] > 0
        assert_same(ours[step], verls[step], 1e-5, leave_out=())


WHOLE = ("algorithm.macro.segmenter.type=ngram", "algorithm.macro.segmenter.n=1000")
"""One macro action per response."""


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_whole_responses_train_as_verls_own_group_estimators(start, tmp_path, name):
    """A GRPO script with one word changed, and no critic: three steps, number by number."""
    options = {"batch": 8, "micro": 32}
    group = ("actor_rollout_ref.rollout.n=4",)
    ours, verls = at_once(
        partial(
            start,
            tmp_path / "macro",
            f"algorithm.adv_estimator=macro_{name}",
            *WHOLE,
            *group,
            **options,
        ),
        partial(start, tmp_path / name, f"algorithm.adv_estimator={name}", *group, **options),
    )
    assert set(ours) == set(verls) == {1, 2, 3}
    for step in (1, 2, 3):
        assert ours[step]["macro/actions_per_response"] == 1
        assert verls[step]["critic/advantages/max"] > 0.01
        assert_same(ours[step], verls[step], 1e-5, leave_out=())


BONUS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    score = sum(letter == "e" for letter in solution_str) / max(len(solution_str), 1)
    return {"score": score, "bonus": f"[{score}]", "place": '["start"]'}
"""


def test_fields_of_samples_reach_the_estimator(start, tmp_path):
    """A reward of the first turn that is the score again doubles every advantage of RLOO."""
    (tmp_path / "bonus.py").write_text(BONUS)
    words = ("algorithm.adv_estimator=macro_rloo", "algorithm.macro.segmenter=turns")
    words += (
        "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={tmp_path}/bonus.py",
    )
    options = {"batch": 8, "micro": 32, "steps": 1}
    once, twice, states = at_once(
        partial(start, tmp_path / "once", *words, **options),
        partial(start, tmp_path / "twice", *words, "algorithm.macro.turn_rewards=bonus", **options),
        partial(
            start,
            tmp_path / "states",
            *words,
            "algorithm.adv_estimator=macro_state",
            "algorithm.norm_adv_by_std_in_grpo=False",
            "algorithm.macro.turn_states=place",
            **options,
        ),
    )
    name = "critic/advantages/max"
    assert once[1][name] > 0.01
    assert twice[1][name] == pytest.approx(2 * once[1][name], rel=1e-4)
    # Against the mean of four instead of the other three, and twice: all are in one state.
    assert states[1][name] == pytest.approx(2 * 3 / 4 * once[1][name], rel=1e-4)


def test_a_killed_run_resumes_identically(start, unbroken, tmp_path):
    killed = start(tmp_path, *MACRO, kill_after=2)
    assert_same(killed[2], unbroken[2], 1e-5)
    resumed = start(tmp_path, *MACRO, "trainer.resume_mode=auto")
    assert set(resumed) == {3}
    assert_same(resumed[3], unbroken[3], 1e-5)
    assert resumed[3]["macro/actions"] == unbroken[3]["macro/actions"]


def test_two_ranks_train_as_one(one_and_two_ranks):
    one, two = one_and_two_ranks
    names = ("critic/score/mean", "critic/advantages/max", "critic/returns/mean", "critic/vf_loss")
    names += ("actor/pg_loss", "actor/grad_norm", "critic/grad_norm", "macro/actions")
    for step in (1, 2, 3):
        for name in names:
            expected = pytest.approx(one[step][name], rel=1e-4, abs=1e-5)
            assert two[step][name] == expected, (step, name)


COLOCATED = (
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.v1.colocate_async.num_warmup_batches=0",
)
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.num_warmup_batches=0",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_file_weights",
    "ray_kwargs.ray_init.num_gpus=2",
)


def test_async_trainers_train_as_the_synchronous_one(start, unbroken, tmp_path):
    """With no batch ahead: which prompts and weights a batch has would else be a race."""
    runs = at_once(
        partial(start, tmp_path / "colocated", *MACRO, *COLOCATED, steps=2),
        partial(start, tmp_path / "separate", *MACRO, *SEPARATE, steps=2),
    )
    for metrics in runs:
        assert set(metrics) == {1, 2}
        for step in (1, 2):
            assert_same(metrics[step], unbroken[step], 1e-5)
            assert metrics[step]["macro/actions"] == unbroken[step]["macro/actions"]


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
    with_critic = config["algorithm"]["adv_estimator"] == "macro_gae"
    assert config["critic"]["enable"] is (True if with_critic else None)


def test_a_mistake_is_a_sentence_before_ray_starts(toy, tmp_path):
    from verl_toy import run_verl

    with pytest.raises(RuntimeError) as error:
        run_verl(toy, tmp_path, "algorithm.adv_estimator=macro_gae", "algorithm.macro.sigmaa=start")
    assert "Did you mean sigma?" in str(error.value)
    assert "Traceback" not in str(error.value)
    assert "ray" not in str(error.value).lower()
