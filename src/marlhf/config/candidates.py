"""Ways to assign credit, by name.

Candidates of `credit: auto` and `marlhf credit` are text: `ngram n=5 lam=0.95`.

Presets are published methods: `preset: vineppo` sets what makes a method, and nothing else. They
are a few settings beneath those of a stage, which override them: see `presets.yaml`. Estimators are
tested against the papers' equations. Numbers were compared with the sources that `same` names.
Those of sae and vc-ppo could not be; gamma and lam of turn-ppo only with summaries of the paper.

Loads without torch: a rule is made of its settings when it is first needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from marlhf.config.settings import SEGMENTERS
from marlhf.errors import SettingError
from marlhf.fields import read_table

CANDIDATES = (
    "token lam=0.8",
    "token lam=0.9",
    "token lam=0.95",
    "token lam=0.99",
    "token lam=1",
    "ngram n=5 lam=0.77",
    "ngram n=5 lam=0.95",
    "ngram n=5 lam=0.95 credit=boundary",
    "sentences lam=0.77",
    "sentences lam=0.95",
    "perplexity lam=0.95",
)
"""What `credit: auto` chooses among unless `credit_candidates` says otherwise."""

TURN_CANDIDATES = ("turns lam=0.5", "turns lam=0.8", "turns lam=0.95", "turns lam=1")
"""More to choose among where an environment answers between turns."""

_CHOICES = {"sigma": ("equal", "unit", "position", "start"), "credit": ("macro", "boundary")}


@dataclass(frozen=True)
class Candidate:
    """A termination rule, and an estimator of advantages over it.

    >>> Candidate.parse("ngram n=5 lam=0.9")
    Candidate(rule='ngram', settings={'n': 5}, lam=0.9, sigma='start', credit='macro')
    """

    rule: str
    settings: dict[str, Any] = field(default_factory=dict)
    lam: float | str = 0.95  # or "adaptive", by `lam_alpha` of the run
    sigma: str = "start"
    credit: str = "macro"

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Read `RULE key=value ...`: lam, sigma and credit, the rest are the rule's settings."""
        rule, given = parse_rule(text, "'ngram n=5 lam=0.95'")
        if rule == "token":
            rule, given = "ngram", {"n": 1} | given
        if rule not in SEGMENTERS:
            rules = ", ".join(["token", *SEGMENTERS])
            raise SettingError(f"There is no rule {rule!r} ({text!r}). There are {rules}.")
        names = ("lam", "sigma", "credit")
        chosen: dict[str, Any] = {key: given.pop(key) for key in names if key in given}
        for key, choices in _CHOICES.items():
            if chosen.get(key, choices[0]) not in choices:
                raise SettingError(f"{text!r}: {key} must be one of {', '.join(choices)}.")
        lam = chosen.pop("lam", 0.95)
        if lam != "adaptive":
            if isinstance(lam, bool) or not isinstance(lam, (int, float)) or not 0 <= lam <= 1:
                raise SettingError(f"{text!r}: lam must lie between 0 and 1, or be adaptive.")
            lam = float(lam)
        return cls(rule, given, lam, **chosen)

    def segmenter(self) -> Any:
        """The rule itself."""
        from marlhf.config.build import build_segmenter  # it loads torch, and the help needs none

        return build_segmenter({"type": self.rule, **self.settings}, self.name)

    @property
    def name(self) -> str:
        """As people write it.

        >>> Candidate.parse("ngram n=1 lam=0.9 sigma=start").name
        'token lam=0.9'
        """
        token = self.rule == "ngram" and self.settings == {"n": 1}
        words = ["token"] if token else [self.rule]
        if not token:
            words += [f"{key}={value}" for key, value in self.settings.items()]
        words.append(f"lam={self._lam}")
        if self.credit != "macro":
            words.append(f"credit={self.credit}")
        elif self.sigma != "start" and not token:
            words.append(f"sigma={self.sigma}")
        return " ".join(words)

    @property
    def recipe(self) -> str:
        """The lines to put into a recipe, as one mapping.

        >>> Candidate.parse("token lam=1").recipe
        'segmenter: {type: ngram, n: 1}, lam: 1, sigma: start'
        """
        rule = ", ".join(f"{k}: {v}" for k, v in ({"type": self.rule} | self.settings).items())
        end = f"sigma: {self.sigma}" if self.credit == "macro" else f"credit: {self.credit}"
        return f"segmenter: {{{rule}}}, lam: {self._lam}, {end}"

    @property
    def _lam(self) -> str:
        return self.lam if isinstance(self.lam, str) else f"{self.lam:g}"


def parse_candidates(texts: tuple[str, ...]) -> list[Candidate]:
    """Each once, in order."""
    return list({c.name: c for c in map(Candidate.parse, texts)}.values())


def parse_rule(text: str, example: str) -> tuple[str, dict[str, Any]]:
    """A name and its settings, which are YAML: `ngram n=3`.

    >>> parse_rule("random lengths=[2,3]", "'ngram n=3'")
    ('random', {'lengths': [2, 3]})
    """
    import yaml  # not needed to list commands

    name, *words = text.split() or [""]
    if not name:
        raise SettingError(f"The name of a rule is missing. Write {example}.")
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise SettingError(f"Cannot read {word!r} of {text!r}. Write {example}.")
        settings[key] = yaml.safe_load(value)
    return name, settings


@dataclass(frozen=True)
class Preset:
    """A method of a paper, in settings of `marlhf ppo`, or of `marlhf rloo` and `marlhf grpo`.

    >>> presets()["vineppo"].needs_critic, presets()["vapo"].needs_critic
    (False, True)
    """

    name: str
    kind: str
    """The stage it is for: ppo, or rloo and grpo."""
    paper: str
    arxiv: str
    cost: str
    """Sampled tokens per prompt, where PPO samples one response."""
    settings: Mapping[str, Any]
    same: str
    """What is as in the paper."""
    differs: str
    """What is not."""

    @property
    def needs_critic(self) -> bool:
        return self.kind == "ppo" and self.settings.get("values", "critic") == "critic"


@cache
def presets() -> dict[str, Preset]:
    """Every preset by its name."""
    return {name: Preset(name, **facts) for name, facts in read_table("presets").items()}


@cache
def presets_of(kind: str) -> dict[str, dict[str, Any]]:
    """The settings of each preset for a kind of stage."""
    return {name: dict(p.settings) for name, p in presets().items() if p.kind == kind}
