"""Settings as people read them: plain data for YAML and JSON, the help of each field, and what to
write instead of TRL's names (`trl_names.yaml`; docs/migrate.md has the same, with the defaults).

The string under a field of a config is its help.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from marlhf.fields import read_table, type_options

SEGMENTERS = {
    "ngram": "NGram",
    "random": "RandomNGram",
    "perplexity": "Perplexity",
    "constituents": "Constituents",
    "words": "Words",
    "sentences": "Sentences",
    "lines": "Lines",
    "turns": "Turns",
    "surprise": "Surprise",
    "entropy": "Entropy",
    "value_change": "ValueChange",
    "learned": "Learned",
}
"""Rules by the name that recipes call them by; classes of `marlhf.core`."""


@dataclasses.dataclass(frozen=True)
class SegmenterSpec:
    """A segmenter by its name and settings, before the rule itself is made or imported."""

    type: str
    settings: dict[str, Any]

    def __call__(self, *_: Any) -> Any:
        raise AssertionError(f"the segmenter {self.type} has not been made yet")

    @property
    def is_user_code(self) -> bool:
        return ":" in self.type


@cache
def rule_defaults(name: str) -> dict[str, Any]:
    """A rule's settings unless given, read from its source, for recipes are compared without torch.

    >>> rule_defaults("surprise")
    {'probability': 0.2, 'every': 1, 'max_length': None}
    """
    source = Path(__file__).parents[1] / "core" / "segmenters.py"
    body = ast.parse(source.read_text(encoding="utf-8")).body
    classes = {c.name: c for c in body if isinstance(c, ast.ClassDef) and c.decorator_list}

    def defaults(rule: str) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for base in classes[rule].bases:
            known |= defaults(base.id) if isinstance(base, ast.Name) and base.id in classes else {}
        for node in classes[rule].body:
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                assert node.value is not None
                known[ast.unparse(node.target)] = to_raw(ast.literal_eval(node.value))
        return known

    return defaults(SEGMENTERS[name])


SECRET = re.compile(r"(^|_)(token|api_key|key|secret|password)$")


def flatten(raw: Any, where: str = "") -> dict[str, Any]:
    """Nested settings under dotted names.

    >>> flatten({"seed": 0, "segmenter": {"type": "ngram", "n": 5}})
    {'seed': 0, 'segmenter.type': 'ngram', 'segmenter.n': 5}
    """
    if not isinstance(raw, dict):
        return {where: raw}
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        flat |= flatten(value, f"{where}.{key}" if where else key)
    return flat


def default_settings(cls: type) -> dict[str, Any]:
    """Every setting of a config as it is unless given, under dotted names."""
    return flatten(to_raw(cls()))


def to_raw(config: Any) -> Any:
    """A config as plain data for YAML and JSON; secrets are left out by name."""
    if config is None or isinstance(config, (str, int, float)):  # most are, and sweeps ask often
        return config
    if isinstance(config, SegmenterSpec):
        return {"type": config.type, **config.settings}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        fields = {k: _hide(k, to_raw(v)) for k, v in fields.items()}
        return {"type": _type_name(config), **fields} if callable(config) else fields
    if isinstance(config, dict):
        return {str(k): _hide(str(k), to_raw(v)) for k, v in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_raw(v) for v in config]
    if isinstance(config, Path):
        return str(config)
    if isinstance(config, partial):
        return to_raw(config.func) | to_raw(config.keywords)
    if callable(config):
        settings = to_raw({k: v for k, v in vars(config).items() if not k.startswith("_")})
        name = getattr(config, "__qualname__", type(config).__qualname__)
        return {"type": f"{config.__module__}:{name}", **settings}
    return config


def describe(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and help of each field, nested dataclasses included."""
    hints = typing.get_type_hints(cls)
    written = _written(cls)
    for field in dataclasses.fields(cls):
        kind, text = written.get(field.name, (str(field.type), ""))
        kind = _choices(hints[field.name]) or kind
        inside = dataclass_in(hints[field.name])
        if inside is None or hints[field.name] is not inside:
            yield field.name, kind, _default(field), text
        else:
            yield field.name, "", "", text
        for name, inner, default, help_ in describe(inside) if inside else ():
            yield f"{field.name}.{name}", inner, default, help_


def _choices(hint: Any) -> str:
    """The values of a `Literal`, also of one that has a name or is in a union; else nothing.

    >>> _choices(int | typing.Literal["auto", "none"]), _choices(int | None)
    ('int | auto | none', '')
    """
    kinds = type_options(hint)
    if not any(typing.get_origin(kind) is typing.Literal for kind in kinds):
        return ""
    names: list[str] = []
    for kind in kinds:
        is_literal = typing.get_origin(kind) is typing.Literal
        names += map(str, typing.get_args(kind)) if is_literal else [kind.__name__]
    return " | ".join(names)


def dataclass_in(hint: Any) -> type | None:
    """The dataclass in `X`, `X | None`, if there is one."""
    classes = [o for o in type_options(hint) if dataclasses.is_dataclass(o) and isinstance(o, type)]
    return classes[0] if classes else None


def _type_name(segmenter: Any) -> str:
    short = {cls: name for name, cls in SEGMENTERS.items()}
    cls = type(segmenter)
    if cls.__module__.startswith("marlhf.core"):
        return short[cls.__name__]
    return f"{cls.__module__}:{cls.__qualname__}"


def _hide(key: str, value: Any) -> Any:
    if not isinstance(value, str) or not value:
        return value
    return "(hidden)" if SECRET.search(key.lower()) else value


def _written(cls: type) -> dict[str, tuple[str, str]]:
    """Each field's type as written, and the string beneath it, which is its help."""
    written: dict[str, tuple[str, str]] = {}
    for parent in cls.__mro__[:0:-1]:
        if dataclasses.is_dataclass(parent):
            written |= _written(parent)
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for node, after in zip(body.body, [*body.body[1:], None]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            written[node.target.id] = ast.unparse(node.annotation), text
    return written


def _default(field: dataclasses.Field[Any]) -> str:
    factory: Callable[[], Any] | Any = field.default_factory
    if field.default is not dataclasses.MISSING:
        value = to_raw(field.default)
    elif factory is not dataclasses.MISSING:
        value = to_raw(factory())
    else:
        return "(required)"
    import yaml  # not needed to list commands

    return yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("\n...")


def hint_for(name: str, known: Iterable[str] = ()) -> str:
    """What to write in place of an unknown setting; empty where nothing comes near.

    >>> hint_for("cliprange"), hint_for("optim"), hint_for("kl_cof", ["kl_coef", "clip"])
    ('In marlhf it is clip.', 'In marlhf it is optimizer.', 'Did you mean kl_coef?')
    """
    known, table = set(known), read_table("trl_names")
    if name == "max_completion_length" and "step_separator" in known:
        return "In marlhf it is max_response_tokens."
    if new := table["renamed"].get(name):
        ours = re.split(r"\W", new)[0]
        if "output_dir" in known and ours not in known:  # the settings of a stage without it
            return f"Leave it out: in marlhf it is {ours}, which this stage does not have."
        if ours == "batch_size" and "tree" in known:  # GRPO, RLOO
            return f"In marlhf it is {new}; TRL counts responses there, and marlhf prompts."
        return f"In marlhf it is {new}."
    if name in table["removed"]:
        return f"Leave it out: {table['removed'][name]}."
    absent = name in table["absent"] or name.startswith(tuple(table["prefixes"]))
    if near := difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8 if absent else 0.6):
        return f"Did you mean {near[0]}?"
    return "Leave it out: marlhf has nothing like it." if absent else ""
