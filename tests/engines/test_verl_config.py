"""What is wrong with a verl run is a sentence before Ray starts. verl itself is not needed here."""

import sys
from importlib import metadata

import pytest

from marlhf.cli import main
from marlhf.config.build import ConfigError
from marlhf.core import NGram
from marlhf.engines import verl_config
from marlhf.engines.batch import EngineError
from marlhf.engines.verl_config import check_config, check_version, launch_arguments

CONFIG = {
    "algorithm": {"adv_estimator": "macro_gae", "use_kl_in_reward": False},
    "actor_rollout_ref": {"actor": {"use_kl_loss": False, "policy_loss": {"loss_mode": "vanilla"}}},
    "critic": {"enable": None},
    "trainer": {"use_v1": True},
    "ray_kwargs": {"ray_init": {"num_cpus": None}},
    "distillation": {"enabled": False},
}


def changed(path: str, value: object) -> dict:
    """The configuration with one setting at a dotted path."""
    first, _, rest = path.partition(".")
    return _changed(CONFIG, first, rest, value)


def _changed(config: dict, first: str, rest: str, value: object) -> dict:
    if not rest:
        return {**config, first: value}
    second, _, further = rest.partition(".")
    return {**config, first: _changed(config.get(first, {}), second, further, value)}


def installed(monkeypatch, version: str | None) -> None:
    def of(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(verl_config.metadata, "version", of)


def test_settings_are_read_from_the_algorithm():
    settings = check_config(changed("algorithm.macro", {"segmenter": {"type": "ngram", "n": 2}}))
    assert settings.segmenter == NGram(2)
    assert check_config(CONFIG).segmenter == NGram(5)
    assert check_config(changed("algorithm.adv_estimator", "gae")) is None


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("critic.enable", False, "needs a critic"),
        ("trainer.use_v1", False, "v1 trainers"),
        ("algorithm.macro", {"segmenter": "perplexity"}, "use_kl_in_reward=True"),
        ("algorithm.macro", {"segmentr": "ngram"}, "algorithm.macro.segmentr.*mean segmenter"),
        ("algorithm", {"adv_estimator": "gae", "macro": {"rho": 1}}, "one of macro_gae"),
        ("algorithm", {"adv_estimator": "macro_rlo"}, "Ours are macro_gae, macro_rloo"),
    ],
)
def test_mistakes_are_sentences(path, value, words):
    with pytest.raises((EngineError, ConfigError), match=words):
        check_config(changed(path, value))


@pytest.mark.parametrize("estimator", ["macro_rloo", "macro_grpo", "macro_state"])
def test_critic_free_estimators_want_groups_and_no_critic(estimator, monkeypatch):
    algorithm = {"adv_estimator": estimator, "macro": {"segmenter": "turns"}}
    config = {**changed("actor_rollout_ref.rollout.n", 4), "algorithm": algorithm}
    assert check_config({**config, "critic": {"enable": False}}) is not None
    with pytest.raises(EngineError, match=r"rollout\.n is 1\. Set it to 2"):
        check_config({**changed("actor_rollout_ref.rollout.n", 1), "algorithm": algorithm})
    with pytest.raises(EngineError, match="credit is a setting of macro_gae"):
        check_config({**config, "algorithm": {**algorithm, "macro": {"credit": "boundary"}}})
    installed(monkeypatch, "0.9.1")
    monkeypatch.setattr(verl_config, "compose", lambda words: config)
    assert "critic.enable=True" not in launch_arguments([])[0]


def test_macro_state_wants_turns():
    algorithm = {"adv_estimator": "macro_state"}
    with pytest.raises(EngineError, match=r"segmenter is NGram.*Set it to turns"):
        check_config({**CONFIG, "algorithm": algorithm})
    algorithm = {"adv_estimator": "macro_rloo", "macro": {"turn_states": "rooms"}}
    with pytest.raises(EngineError, match="turn_states is for macro_state"):
        check_config({**CONFIG, "algorithm": algorithm})


def test_a_macro_ratio_needs_credit_by_macro_action():
    config = changed("actor_rollout_ref.actor.policy_loss.loss_mode", "macro_ratio")
    assert check_config(config) is not None
    algorithm = {"adv_estimator": "macro_gae", "macro": {"credit": "boundary"}}
    with pytest.raises(EngineError, match="one advantage per macro action"):
        check_config({**config, "algorithm": algorithm})
    with pytest.raises(EngineError, match="Set it to one of macro_gae"):
        check_config({**config, "algorithm": {"adv_estimator": "gae"}})
    with pytest.raises(EngineError, match="distillation"):
        check_config({**config, "distillation": {"enabled": True}})


def test_perplexity_is_content_with_either_kl():
    macro = {"segmenter": "perplexity"}
    algorithm = {"adv_estimator": "macro_gae", "macro": macro}
    check_config({**CONFIG, "algorithm": {**algorithm, "use_kl_in_reward": True}})
    with_loss = changed("actor_rollout_ref.actor.use_kl_loss", True)
    check_config({**with_loss, "algorithm": algorithm})


def test_other_versions_are_refused(monkeypatch):
    installed(monkeypatch, "0.9.1")
    assert check_version() == "0.9.1"
    installed(monkeypatch, "0.8.0")
    with pytest.raises(EngineError, match=r"verl 0\.8\.0 is installed.*verl==0\.9\.1"):
        check_version()
    installed(monkeypatch, None)
    with pytest.raises(EngineError, match="not installed"):
        check_version()


def test_the_plugin_is_named_here_and_in_rays_runtime_env(monkeypatch):
    installed(monkeypatch, "0.9.1")
    monkeypatch.setattr(verl_config, "compose", lambda words: CONFIG)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_platform")
    words, environment = launch_arguments(["algorithm.macro.sigma=start", "algorithm.lam=1"])
    modules = "my_platform,marlhf.engines.verl"
    assert environment == {"VERL_USE_EXTERNAL_MODULES": modules}
    variable = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"
    assert words == [
        "++algorithm.macro.sigma=start",
        "algorithm.lam=1",
        "critic.enable=True",
        f"++{variable}='{modules}'",
    ]
    given = changed(variable, "other,marlhf.engines.verl")
    monkeypatch.setattr(verl_config, "compose", lambda words: given)
    assert launch_arguments([])[1] == {"VERL_USE_EXTERNAL_MODULES": "other,marlhf.engines.verl"}


def test_the_command_becomes_verls_own(monkeypatch):
    installed(monkeypatch, "0.9.1")
    monkeypatch.setattr(verl_config, "compose", lambda words: CONFIG)
    calls = []
    monkeypatch.setattr(verl_config.os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(sys, "argv", ["marlhf", "verl", "algorithm.lam=1", "--config-name", "mine"])
    with pytest.raises(SystemExit):
        main()
    (_, command, environment) = calls[0]
    assert command[1:6] == [
        "-m",
        "verl.trainer.main_ppo",
        "algorithm.lam=1",
        "--config-name",
        "mine",
    ]
    assert environment["VERL_USE_EXTERNAL_MODULES"].endswith("marlhf.engines.verl")


def test_without_verl_the_command_says_so(monkeypatch, capsys):
    installed(monkeypatch, None)
    monkeypatch.setattr(sys, "argv", ["marlhf", "verl"])
    with pytest.raises(SystemExit) as status:
        main()
    assert status.value.code == 1
    assert "pip install" in capsys.readouterr().err
