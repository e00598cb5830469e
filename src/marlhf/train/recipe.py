"""Recipes: YAML to frozen dataclasses, with every mistake reported at once.

A recipe is either the settings of one stage, or several named stages:

    extends: ../base.yaml          # merged beneath this file; paths relative to this file
    output_dir: runs/mine
    defaults: {seed: 1}            # beneath every stage
    stages:
      sft: {model: gpt2, ...}
      reward: {model: "@sft", ...} # the model that stage `sft` leaves behind
      ppo: {model: "@sft", reward_model: "@reward", ...}
      macro-ppo: {like: ppo, segmenter: {type: ngram, n: 5}}

A stage's kind is its name or its `kind:`; `like:` starts from another stage.

With `rounds: 3` the stages under `round:` follow, three times over, as `label-1`, `ppo-1`,
`label-2` and so on. In them `@ppo` is the latest `ppo` so far, that of `stages:` at first.

`check_recipe` and `check_stage` import neither torch nor code that a recipe names: a segmenter is
then a `SegmenterSpec`. `load_recipe` and `load_stage` make the rules, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marlhf.config.build import (
    ConfigError,
    Raw,
    assign,
    at,
    build,
    field_names,
    find_recipe,
    make_segmenter,
    merge,
    raise_problems,
    read_override,
    read_recipe,
    unknown,
)
from marlhf.config.candidates import presets, presets_of
from marlhf.config.settings import SegmenterSpec, to_raw
from marlhf.config.stage import StageConfig
from marlhf.data.rows import DataError
from marlhf.errors import quoted
from marlhf.runs.layout import MODEL, PAIRS
from marlhf.train.stages import STAGES


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe, ready to run."""

    name: str
    kind: str
    config: Any
    where: str = ""
    """Its place in the recipe."""


def load_recipe(recipe: Path | str, overrides: list[str] | None = None) -> list[Stage]:
    """All stages of a recipe, in order. `ppo.kl_coef=0.1` overrides one stage, `seed=1` all;
    the first counts for more, in whichever order they stand."""
    return make_segmenters(check_recipe(recipe, overrides))


def load_stage(
    recipe: Path | str, kind: str, overrides: list[str] | None = None, name: str | None = None
) -> Stage:
    """One stage: a flat recipe of that kind, or the stage called `name` (or the kind) in it."""
    return make_segmenters([check_stage(recipe, kind, overrides, name)])[0]


def make_segmenters(stages: Sequence[Stage], *, user_code: bool = True) -> list[Stage]:
    """Checked stages with their rules, which takes torch.

    Without `user_code` rules that are the user's own stay specs, and nothing of theirs is imported.
    """
    problems: list[str] = []
    made: list[Stage] = []
    for stage in stages:
        spec, config = getattr(stage.config, "segmenter", None), stage.config
        if user_code or not (isinstance(spec, SegmenterSpec) and spec.is_user_code):
            config = make_segmenter(config, at(stage.where, "segmenter"), problems)
        made.append(replace(stage, config=config))
    raise_problems(problems)
    return made


def check_recipe(recipe: Path | str, overrides: list[str] | None = None) -> list[Stage]:
    """All stages of a recipe, validated."""
    return next(check_points(recipe, [overrides or []]))


def check_points(recipe: Path | str, points: Iterable[list[str]]) -> Iterator[list[Stage]]:
    """All stages of a recipe with each of several lists of overrides.

    The file is read once, and stages that come out the same are built once and are one object.
    """
    path = find_recipe(recipe)
    raw = _with_rounds(read_recipe(path), path)
    if "stages" not in raw:
        raise ConfigError(
            f"{path} has no `stages:`, so it is a single stage. "
            f"Run it by name, e.g. `marlhf ppo {recipe}`."
        )
    built: dict[str, Stage] = {}
    for overrides in points:
        yield _stages_with(path, raw, overrides, built)


def _stages_with(
    path: Path, raw: Raw, overrides: list[str], built: dict[str, Stage]
) -> list[Stage]:
    """The checked stages. Those in `built`, by their settings, are taken from there."""
    problems: list[str] = []
    stages, root, general, own = _resolve(path, raw, overrides, problems)
    for key, value in general:
        if key == "output_dir":
            continue
        first = key.partition(".")[0]
        known = [n for n, s in stages.items() if first in _stage_keys(n, s)]
        if not known:
            every = {key for n, s in stages.items() for key in _stage_keys(n, s)}
            problems.append(unknown(key, first, {*every, *stages}))
        for name in known:
            if (name, key) not in own:
                assign(stages[name], key, value)
    _check_references(stages, problems)
    keys: list[str] = []
    for name, stage in stages.items():
        stage["output_dir"] = str(Path(root) / name)
        keys.append(repr((name, stage)))
        if keys[-1] not in built:
            one = _build_stage(name, stage, f"stages.{name}", problems, root)
            built |= {keys[-1]: one} if one else {}
    raise_problems(problems, path)
    return [built[key] for key in keys]


def check_stage(
    recipe: Path | str, kind: str, overrides: list[str] | None = None, name: str | None = None
) -> Stage:
    """One stage, validated: see `load_stage`."""
    path, name, overrides = find_recipe(recipe), name or kind, overrides or []
    raw = _with_rounds(read_recipe(path), path)
    if "stages" not in raw:
        return stage_of(kind, raw, overrides, name, path)
    problems: list[str] = []
    stages, root, general, own = _resolve(path, raw, overrides, problems)
    if name not in stages:
        raise ConfigError(f"{path} has no stage {name!r}. It has: {', '.join(stages)}.")
    stage = stages[name]
    stage["output_dir"] = str(Path(root) / name)
    if (actual := stage.get("kind", name)) != kind:
        raise ConfigError(f"Stage {name!r} of {path} is of kind {actual!r}, not {kind!r}.")
    _refuse_other_stages(raw, name, overrides)
    for key, value in general:
        if (name, key) not in own:
            assign(stage, key, value)
    _check_references(stages, problems)
    # Stages stand side by side, as `marlhf run` lays them out. Of one that is run in a folder of
    # another name, those that it starts from are still in the recipe's folder.
    folder = Path(str(stage["output_dir"]))
    root = str(folder.parent if folder.name == name else raw.get("output_dir", "runs"))
    built = _build_stage(name, stage, f"stages.{name}", problems, root)
    raise_problems(problems, path)
    assert built
    return built


def stage_of(
    kind: str, raw: Raw, overrides: Sequence[str], name: str = "", path: Path | None = None
) -> Stage:
    """A stage of a kind by its settings, validated; `path` is their file, if they have one."""
    raw, problems = {**raw, "kind": kind}, list[str]()
    for key, value in map(read_override, overrides):
        assign(raw, key, value)
    beside = Path(str(raw.get("output_dir", "runs/stage"))).parent
    built = _build_stage(name or kind, raw, "", problems, str(beside))
    raise_problems(problems, path)
    assert built
    return built


def kind_class(kind: str) -> type[StageConfig]:
    """The dataclass of a kind of stage."""
    if kind not in STAGES:
        raise ConfigError(unknown("kind", kind, STAGES))
    return STAGES[kind].config


def _with_rounds(raw: Raw, path: Path) -> Raw:
    """The recipe with the stages of all rounds written out, NAME-1, NAME-2 and so on."""
    own, rounds = raw.get("round"), raw.get("rounds")
    if own is None and rounds is None:
        return raw
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise ConfigError(
            f"rounds of {path} must be a number from 1 on; got {quoted(rounds)}. Leave out "
            "`rounds` and `round` for a recipe without any."
        )
    if not isinstance(own, dict) or not own:
        raise ConfigError(
            f"`rounds: {rounds}` of {path} repeats the stages under `round:`, and there are none."
        )
    for part in (own, raw.get("stages")):
        _stage_names(raw | {"stages": part}, path)
    stages = dict(raw["stages"])
    for number in range(1, rounds + 1):
        for name, stage in own.items():
            stage = deepcopy(stage or {})
            stages[f"{name}-{number}"] = stage if "like" in stage else {"kind": name, **stage}
    return raw | {"stages": stages}


def _point_to_rounds(stages: dict[str, Raw], own: Sequence[str]) -> None:
    """In the stages of rounds let `@name` be the latest stage of that name so far.

    `data.more` has labels of all rounds so far.
    """
    for name, stage in stages.items():
        base, number = _round_of(name, own)
        if base is None:
            continue

        def latest(other: str, base: str = base, number: int = number) -> int:
            return number - (own.index(other) >= own.index(base))  # 0 before the first round

        def point(_: str, other: str, latest: Callable[[str], int] = latest) -> str:
            if other not in own or not latest(other):
                return f"@{other}"
            return f"@{other}-{latest(other)}"

        more = (stage.get("data") or {}).get("more") or ()
        stages[name] = _map_references(stage, point)
        if more:
            ranges = {x: range(1, latest(x[1:]) + 1) for x in more if x[1:] in own}
            files = [f"{x}-{i}" for x in ranges for i in ranges[x]]
            others = [x for x in more if x not in ranges]
            stages[name]["data"] = stage["data"] | {"more": others + files}


def _map_references(stage: Raw, change: Callable[[str, str], str]) -> Raw:
    """Settings with each `@name` in them changed, by the setting it is in and the name."""

    def changed(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [changed(key, each) for each in value]
        refers = isinstance(value, str) and value.startswith("@")
        return change(key, value[1:]) if refers else value

    stage = {key: changed(key, value) for key, value in stage.items()}
    for outer, inner in (("labels_from", "policy"), ("data", "more")):
        settings = stage.get(outer)
        if isinstance(settings, dict) and inner in settings:
            stage[outer] = settings | {inner: changed(f"{outer}.{inner}", settings[inner])}
    return stage


def _round_of(name: str, own: Sequence[str]) -> tuple[str | None, int]:
    """What a stage is called under `round:`, and the number of its round; None for others."""
    base, _, number = name.rpartition("-")
    return (base, int(number)) if base in own and number.isdecimal() else (None, 0)


def _stage_names(raw: Raw, path: Path) -> list[str]:
    """The names under `stages:`, once it is sure that they are names."""
    stages = raw["stages"]
    if not isinstance(stages, dict) or not stages:
        raise ConfigError(f"`stages:` of {path} must map names to settings.")
    if not isinstance(raw.get("defaults") or {}, dict):
        raise ConfigError(f"`defaults:` of {path} must be a mapping of names to settings.")
    for name, stage in stages.items():
        if not re.fullmatch(r"\w[\w-]*", str(name)):
            raise ConfigError(
                f"The stage name {name!r} of {path} cannot be a folder's. "
                "Use letters, digits, _ and -."
            )
        if not isinstance(stage or {}, dict):
            raise ConfigError(f"stages.{name} of {path} must be a mapping.")
    return [str(name) for name in stages]


def _refuse_other_stages(raw: Raw, name: str, overrides: list[str]) -> None:
    """An override of a stage that is not run, and that this one is not `like`, would do nothing."""
    reached, last = [name, _round_of(name, list(raw.get("round") or {}))[0]], name
    while like := (raw["stages"][last] or {}).get("like"):
        reached.append(last := like)
    for key, _ in map(read_override, overrides):
        first, _, rest = key.partition(".")
        if rest and first in raw["stages"] and first not in reached:
            raise ConfigError(
                f"{key} is a setting of another stage: this command trains {name} alone. Leave it "
                "out, or train all stages with `marlhf run`."
            )


def _resolve(
    path: Path, raw: Raw, overrides: list[str], problems: list[str]
) -> tuple[dict[str, Raw], str, list[tuple[str, Any]], set[tuple[str, str]]]:
    """Each stage's own mapping over the defaults and what it is `like`, the folder of all stages,
    the overrides that name no stage, and the stages and settings of those that do."""
    known = {"output_dir", "defaults", "stages", "rounds", "round"}
    rounds = list(raw.get("round") or {})
    problems += [unknown(key, key, known) for key in raw if key not in known]
    stages = {name: dict(raw["stages"][name] or {}) for name in _stage_names(raw, path)}
    general: list[tuple[str, Any]] = []
    own: set[tuple[str, str]] = set()
    for key, value in map(read_override, overrides):
        first, _, rest = key.partition(".")
        reached = [name for name in stages if first in (name, _round_of(name, rounds)[0])]
        if reached and rest:  # before `like:` is followed, so that it reaches those as well
            for name in reached:
                assign(stages[name], rest, value)
            own |= {(name, rest) for name in reached}
        else:
            general.append((key, value))

    def resolve(name: str, seen: tuple[str, ...] = ()) -> Raw:
        if name in seen:
            raise ConfigError(f"stages.{name} of {path} is `like` itself.")
        given = dict(stages[name])
        like = given.pop("like", None)
        if like is None:
            return {"kind": name, **merge(raw.get("defaults") or {}, given)}
        if not isinstance(like, str):
            raise ConfigError(f"stages.{name}.like: must be a name (got {quoted(like)})")
        if like not in stages:
            raise ConfigError(unknown(f"stages.{name}.like", like, stages))
        return merge(resolve(like, (*seen, name)), given)

    root = dict(general).get("output_dir", raw.get("output_dir", "runs"))
    if not isinstance(root, str) or not root:
        raise ConfigError(f"output_dir must be the name of a folder; {path} has {root!r}.")
    resolved = {name: resolve(name) for name in stages}
    _point_to_rounds(resolved, rounds)
    return resolved, root, general, own


def _check_references(stages: dict[str, Raw], problems: list[str]) -> None:
    """`@sft` must name a stage that comes before the one that starts from it."""
    names = list(stages)
    for number, (name, stage) in enumerate(stages.items()):

        def check(key: str, other: str, name: str = name, number: int = number) -> str:
            place = f"stages.{name}.{key}"
            if other not in stages:
                problems.append(unknown(place, other, stages))
            elif names.index(other) >= number:
                problems.append(f"{place}: stage {other!r} does not come before {name!r}.")
            return other

        _map_references(stage, check)


def _build_stage(name: str, raw: Raw, where: str, problems: list[str], root: str) -> Stage | None:
    """`root` is the folder in which `@sft` is the stage sft."""
    raw = dict(raw)
    kind = raw.pop("kind", name)
    preset = raw.pop("preset", None)
    for key, value in (("kind", kind), ("preset", preset or "")):
        if not isinstance(value, str):
            problems.append(f"{at(where, key)}: must be a name (got {quoted(value)})")
            return None
    if kind not in STAGES:
        problems.append(unknown(at(where, "kind"), str(kind), STAGES))
        return None
    config_class = STAGES[kind].config
    of_kind = presets_of(config_class.preset_kind)
    if preset is not None and preset not in of_kind:
        none = "" if of_kind else f" {kind} has no presets."
        if str(preset) in presets():
            kinds = [
                name
                for name, method in STAGES.items()
                if preset in presets_of(method.config.preset_kind)
            ]
            none = f" {preset} is a preset of {' and '.join(kinds)} stages."
        problems.append(unknown(at(where, "preset"), str(preset), of_kind) + none)
        return None

    def folder_of(key: str, stage: str) -> str:
        return str(Path(root) / stage / (PAIRS if key == "data.more" else MODEL))

    raw = _map_references(raw, folder_of)
    missing = [key for key in config_class.required(raw) if not raw.get(key)]
    problems += [f"{at(where, key)}: must be given" for key in missing]
    chosen, before = of_kind.get(preset or "", {}), len(problems)
    own = set(raw)
    raw = merge(chosen, raw)
    config = build(config_class, raw, where, problems)
    named = set(re.findall(r"\w+", " ".join(problems[before:])))
    if clash := [key for key in chosen if key in named - own]:  # settings the user did not see
        sets = ", ".join(f"{key}: {to_raw(chosen[key])}" for key in clash)
        problems.append(f"{at(where, 'preset')}: {preset} sets {sets}")
    try:
        if config is not None:
            config.data.check_named()
    except DataError as error:
        problems.append(f"{at(where, 'data')}: {error}")
    return None if config is None else Stage(name, kind, config, where)


def _stage_keys(name: str, stage: Raw) -> set[str]:
    """What may be set in a stage."""
    config = kind_class(str(stage.get("kind", name)))
    return field_names(config) | ({"preset"} if config.preset_kind else set())
