"""Whether a verl configuration works with macro actions, and how verl's trainer is started.

Everything here is checked before Ray starts or a GPU is asked for, so verl itself is not imported:
its package needs Ray and torch to load.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from marlhf.core import needs
from marlhf.engines.advantages import ESTIMATORS, MacroSettings, read_settings
from marlhf.engines.batch import EngineError

TESTED = ("0.9.1",)
"""Versions of verl that the tests run. Its trainer's internals change between releases."""
RATIOS = {"macro_ratio": "macro", "macro_mean_ratio": "macro_mean"}
"""Our policy losses in `actor_rollout_ref.actor.policy_loss.loss_mode`: the `ratio` of recipes."""
WHERE = "algorithm.macro"
PLUGIN = "marlhf.engines.verl"
MODULES = "VERL_USE_EXTERNAL_MODULES"
"""The environment variable that names what verl imports in every process. verl's other way, the
entry points of packages, hides the error of a plugin that cannot be imported."""


def check_version() -> str:
    """The installed verl's version, or a sentence."""
    wanted = f"Install it in this environment: pip install 'verl=={TESTED[-1]}'."
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        raise EngineError(f"verl is not installed. {wanted}") from None
    if version not in TESTED:
        raise EngineError(
            f"verl {version} is installed, but macro actions are tested with {', '.join(TESTED)} "
            f"only, and verl's trainer changes between releases. {wanted}"
        )
    return version


def check_config(config: Mapping[str, Any]) -> MacroSettings | None:
    """The macro settings of a whole verl configuration; None where it uses none.

    >>> check_config({"algorithm": {"adv_estimator": "gae"}, "actor_rollout_ref": {"actor": {}}})
    """
    algorithm = config["algorithm"]
    estimator = str(algorithm.get("adv_estimator"))
    loss_mode = _at(config, "actor_rollout_ref.actor.policy_loss.loss_mode")
    if estimator not in ESTIMATORS:
        ours = ", ".join(ESTIMATORS)
        if estimator.startswith("macro_"):
            raise EngineError(f"algorithm.adv_estimator={estimator} is unknown. Ours are {ours}.")
        if algorithm.get("macro") is not None:
            raise EngineError(
                f"{WHERE} is given, but algorithm.adv_estimator is {estimator}. Set it to one of "
                f"{ours}, or leave {WHERE} out."
            )
        if loss_mode in RATIOS:
            raise EngineError(
                f"policy_loss.loss_mode={loss_mode} takes the ratio of macro actions, but "
                f"algorithm.adv_estimator is {estimator}. Set it to one of {ours}."
            )
        return None
    settings = read_settings(algorithm.get("macro"), WHERE, estimator)
    if estimator == "macro_gae" and _at(config, "critic.enable") is False:
        raise EngineError(
            "macro_gae needs a critic, but critic.enable is False. Leave it out or set it to True."
        )
    if estimator != "macro_gae" and _at(config, "actor_rollout_ref.rollout.n") == 1:
        raise EngineError(
            f"{estimator} compares the responses to one prompt, but actor_rollout_ref.rollout.n is "
            "1. Set it to 2 or more."
        )
    if _at(config, "trainer.use_v1") is False:
        raise EngineError(
            f"{estimator} works with verl's v1 trainers: its older one shows an estimator neither "
            "values nor tokens. Leave out trainer.use_v1=False."
        )
    penalised = algorithm.get("use_kl_in_reward") or _at(
        config, "actor_rollout_ref.actor.use_kl_loss"
    )
    if needs(settings.segmenter, "ref_logprobs") and not penalised:
        raise EngineError(
            "The segmenter perplexity reads the reference model's log-probs, and verl computes "
            "none with these settings. Set algorithm.use_kl_in_reward=True or "
            "actor_rollout_ref.actor.use_kl_loss=True (a coefficient of 0 will do)."
        )
    if loss_mode in RATIOS and settings.credit != "macro":
        raise EngineError(
            f"policy_loss.loss_mode={loss_mode} takes one advantage per macro action, but with "
            f"{WHERE}.credit={settings.credit} every token has its own."
        )
    if loss_mode in RATIOS and _at(config, "distillation.enabled"):
        raise EngineError(
            f"policy_loss.loss_mode={loss_mode} cannot be combined with distillation: verl "
            "replaces the policy's loss there."
        )
    return settings


def plain_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides as Hydra needs them: verl's schema has no `algorithm.macro`, so it is added.

    >>> plain_overrides(["algorithm.macro.sigma=start", "algorithm.lam=0.9"])
    ['++algorithm.macro.sigma=start', 'algorithm.lam=0.9']
    """
    return [f"++{word}" if word.startswith(f"{WHERE}") else word for word in overrides]


def compose(arguments: Sequence[str]) -> dict[str, Any]:
    """verl's whole configuration with these overrides, as plain data, without running anything."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--config-path", "-cp", default=None)
    flags.add_argument("--config-name", "-cn", default="ppo_trainer")
    flags.add_argument("--config-dir", "-cd", default=None)
    known, overrides = flags.parse_known_args(list(arguments))
    unknown = [word for word in overrides if word.startswith("-")]
    if unknown:
        raise EngineError(
            f"{unknown[0]} is no override. Write key=value; of Hydra's own flags --config-path and "
            "--config-name are taken."
        )
    package: Any = importlib.util.find_spec("verl")  # `check_version` found it
    own = Path(package.submodule_search_locations[0]) / "trainer" / "config"
    folder = Path(known.config_path or own)
    if known.config_dir:
        overrides = [*overrides, f"hydra.searchpath=[file://{Path(known.config_dir).absolute()}]"]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder.absolute()), version_base=None):
            config = hydra_compose(known.config_name, overrides=overrides)
        return OmegaConf.to_container(config, resolve=False)  # pyright: ignore[reportReturnType]
    except (HydraException, OmegaConfBaseException) as error:
        raise EngineError(f"verl's configuration: {error}") from error


def launch_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of verl's `main_ppo`, once everything has been checked."""
    check_version()
    words = plain_overrides(arguments)
    config = compose(words)
    settings = check_config(config)
    modules = _at(config, f"ray_kwargs.ray_init.runtime_env.env_vars.{MODULES}")
    names = (modules or os.environ.get(MODULES, "")).split(",")
    modules = ",".join(dict.fromkeys([*filter(None, map(str.strip, names)), PLUGIN]))
    with_critic = settings is not None and _at(config, "algorithm.adv_estimator") == "macro_gae"
    if with_critic and _at(config, "critic.enable") is None:
        words.append("critic.enable=True")  # verl's default enables it for its own gae alone
    # Workers on other machines do not inherit this process's environment, but Ray's runtime_env.
    words.append(f"++ray_kwargs.ray_init.runtime_env.env_vars.{MODULES}='{modules}'")
    return words, {MODULES: modules}


def start_verl(arguments: Sequence[str]) -> None:
    """Check, then become verl's own `main_ppo`; does not return."""
    words, environment = launch_arguments(arguments)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    os.execve(sys.executable, command, {**os.environ, **environment})


def _at(config: Mapping[str, Any], path: str) -> Any:
    """A nested setting; None where any part of the path is missing."""
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value
