"""A first recipe for a user's own data: `marlhf init`.

The rows decide the stages, the model's size and the card decide what trains of the model. What is
written is a plain recipe with comments, which was checked as any other.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import StrictUndefined, Template

from marlhf.config.build import ConfigError
from marlhf.data import DataConfig, Row, load_data, read_hub, read_records
from marlhf.data.load import hub_config, is_hub_name
from marlhf.data.sources import PUBLISHED, SOURCES
from marlhf.runs.atomic import write_text
from marlhf.runs.layout import model_folder
from marlhf.runs.read import parameters_in
from marlhf.train.recipe import check_recipe

Kind = Literal["preferences", "demonstrations", "answers", "prompts"]
SYNONYMS = {
    "prompt": ("question", "instruction", "query", "problem", "input"),
    "chosen": ("chosen_response", "preferred", "accepted", "winner", "response", "output"),
    "rejected": ("rejected_response", "dispreferred", "loser"),
}
"""What other people call our columns, likeliest first."""
MAX_LOOKED_AT = 1000
"""Rows that decide what kind of data it is."""
MIN_ROWS = 24
SIZES = {
    16: "t4 v100 4080",
    24: "l4 a10 3090 4090",
    32: "5090",
    48: "a6000 l40 l40s",
    80: "a100 h100",
    141: "h200",
}
CARDS = {name: size for size, names in SIZES.items() for name in names.split()}
"""Memory of GPUs in GB, by name."""
BYTES = {"ppo": 42.0, "grpo": 24.0, "sft": 18.0}
"""Per parameter, where all weights train: docs/gpu.md."""
LORA_BYTES = {"": 2.5, "4bit": 1.1}
"""Per parameter of the frozen base, which all models of a stage share, by `lora.quantize`."""
ROOM = 0.7
"""The share of a card's memory that weights may take; activations need the rest."""


KINDS = {
    "preferences": "a prompt with a better and a worse response",
    "demonstrations": "a prompt with a response to learn from",
    "answers": "a prompt with the number that is the right answer",
    "prompts": "prompts alone, so a function of yours scores responses",
}
TEMPLATE = Template(
    (Path(__file__).parent / "new_recipe.yaml.jinja").read_text(encoding="utf-8"),
    trim_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)
REWARDS = '''"""Scores responses. Write what you want more of: higher is better."""


def score(prompts, completions, **columns):
    """One number per completion. As an example, shorter ones are better: replace it."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [-len(text) / 100 for text in texts]
'''


@dataclass(frozen=True)
class DataFacts:
    """What a data file holds."""

    kind: Kind
    columns: dict[str, str]
    rows: int
    messages: bool


@dataclass(frozen=True)
class NewRecipe:
    """Files that were written."""

    path: Path
    rewards: Path | None
    data: DataFacts


def write_recipe(data: str, model: str, card: str, path: Path) -> NewRecipe:
    """Look at the data, and write a recipe that fits it, the model and the card."""
    if path.exists():
        raise ConfigError(f"{path} exists. Choose another file with -o, or remove it.")
    memory, facts = card_memory(card), look_at(data)
    stages = _stages(facts.kind)
    lora = adapters(model, model_size(model), memory, stages[-1])
    text = _recipe(data, facts, model, memory, lora, path)
    write_text(path, text)
    check_recipe(path)
    rewards = Path("rewards.py") if facts.kind == "prompts" else None  # imported from here
    if rewards is not None and not rewards.exists():
        write_text(rewards, REWARDS)
    return NewRecipe(path, rewards, facts)


def look_at(data: str) -> DataFacts:
    """The kind of rows in a file, a folder or a data set on the hub, and what its columns mean."""
    if data in SOURCES:
        raise ConfigError(
            f"{data} is built in and has recipes of its own: see `marlhf recipes`. `marlhf init` "
            "is for a file of yours, a folder of files, or a data set on the hub."
        )
    on_hub = not Path(data).expanduser().exists() and is_hub_name(data)
    records = read_hub(data, "train", hub_config(data)) if on_hub else read_records(data)
    some = list(itertools.islice(records, MAX_LOOKED_AT))
    count = len(some) if on_hub else len(some) + sum(1 for _ in records)
    first = some[0][0]
    published = any(source.recognise(first) for source in PUBLISHED.values())
    columns = {} if published else guess_columns(data, first)
    config = DataConfig(path=data, columns=columns, limit=MAX_LOOKED_AT, parts={}, eval_size=0)
    rows = load_data(config, needs=("prompt",)).train
    if count < MIN_ROWS:
        raise ConfigError(f"{data} has {count} rows. Give at least {MIN_ROWS} to train on.")
    return DataFacts(_kind(rows), columns, count, isinstance(rows[0].prompt, list))


def guess_columns(data: str, record: dict[str, Any]) -> dict[str, str]:
    """Our names to those in the file, for the columns that have another one there."""
    if {"prompt", "messages"} & record.keys() or isinstance(record.get("chosen"), list):
        prompt: dict[str, str] = {}
    elif name := _first_of(SYNONYMS["prompt"], record):
        prompt = {"prompt": name}
    else:
        raise ConfigError(
            f"{data} has the columns {', '.join(record)}, and none looks like a prompt. Rename it "
            "to `prompt`; responses are `chosen` and `rejected`, chats `messages`."
        )
    found = dict(prompt)
    if not {"chosen", "completion", "messages"} & record.keys():
        if name := _first_of(SYNONYMS["chosen"], record):
            found["chosen"] = name
        elif isinstance(answer := record.get("answer"), str) and not _is_answer(answer):
            found["chosen"] = "answer"
    if "rejected" not in record and (name := _first_of(SYNONYMS["rejected"], record)):
        found["rejected"] = name
    return found


def _first_of(names: tuple[str, ...], record: dict[str, Any]) -> str:
    return next((name for name in names if isinstance(record.get(name), str | list)), "")


def _is_answer(value: Any) -> bool:
    """Whether `marlhf.reward.gsm8k` finds a number in it: the whole text, or what follows ####."""
    text = str(value).strip()
    return "####" in text or re.fullmatch(r"-?\$?\d[\d,]*(\.\d+)?", text) is not None


def _kind(rows: list[Row]) -> Kind:
    if all(row.chosen is not None and row.rejected is not None for row in rows):
        return "preferences"
    if all(_is_answer(row.columns.get("answer")) for row in rows):
        return "answers"
    if all(row.chosen is not None for row in rows):
        return "demonstrations"
    return "prompts"


def _stages(kind: Kind) -> list[str]:
    return {"preferences": ["sft", "reward", "ppo"], "demonstrations": ["sft"]}.get(kind, ["grpo"])


def card_memory(card: str) -> float:
    """Memory of a GPU in GB, by its name or size; 0 for none.

    >>> card_memory("4090"), card_memory("A100 40GB"), card_memory("16 GB"), card_memory("none")
    (24.0, 40.0, 16.0, 0.0)
    """
    words = card.strip().lower()
    if words in ("", "0", "none", "no", "cpu"):
        return 0.0
    if words == "auto":
        import torch

        has_card = torch.cuda.is_available()
        return torch.cuda.get_device_properties(0).total_memory / 1e9 if has_card else 0.0
    named = [CARDS[word] for word in re.split(r"[\s_-]+", words) if word in CARDS]
    if not named and (size := re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:gi?b?)?", words)):
        return float(size[1])
    if not named:
        raise ConfigError(
            f"{card!r} is no card that marlhf knows. Give its memory, such as 24GB, or none; known "
            f"names are {', '.join(CARDS)}."
        )
    stated = re.search(r"(\d+) ?gb", words)  # an A100 may have 40 or 80
    return float(stated[1] if stated else named[0])


def model_size(model: str) -> float | None:
    """Parameters of a model, in billions, by the files in its folder or by its name.

    >>> model_size("Qwen/Qwen2.5-0.5B-Instruct"), model_size("SmolLM2-135M"), model_size("gpt2")
    (0.5, 0.135, None)
    """
    folder = Path(model_folder(model))
    if model != "tiny" and not folder.exists() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        raise ConfigError(
            f"{model!r} is neither a folder nor the name of a model on the hub, such as "
            "Qwen/Qwen2.5-0.5B-Instruct."
        )
    if folder.is_dir() and (count := parameters_in(folder)):
        return count / 1e9
    size = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])", model.lower())
    return float(size[1]) / (1 if size[2] == "b" else 1000) if size else None


def adapters(model: str, billions: float | None, memory: float, stage: str) -> dict[str, Any]:
    """`lora`, where not all weights of the model can train on the card; else nothing."""
    if billions is None or not memory or BYTES[stage] * billions <= ROOM * memory:
        return {}
    shared = {"shared_base": True} if stage == "ppo" else {}
    for quantize, size in LORA_BYTES.items():
        if size * billions <= ROOM * memory:
            return {"r": 16, **shared, **({"quantize": quantize} if quantize else {})}
    most = ROOM * memory / LORA_BYTES["4bit"]
    raise ConfigError(
        f"{model} has {billions:g} billion parameters, too many for {memory:g} GB. Choose one of "
        f"at most {most:.1f} billion, or train on several GPUs with parallel: fsdp."
    )


def _recipe(
    data: str, facts: DataFacts, model: str, memory: float, lora: dict[str, Any], path: Path
) -> str:
    stages = _stages(facts.kind)
    instruct = re.search(r"instruct|chat|-it\b", model.lower()) is not None
    part = 0.2 if len(stages) > 1 else 1.0  # SFT's share of the rows is the smallest
    smallest = part * facts.rows * 0.9
    batch = next(size for size in (64, 32, 16, 8, 4, 2, 1) if 4 * size <= smallest or size == 1)
    batch = min(batch, 16) if facts.kind in ("answers", "prompts") or not memory else batch
    rate = 1.0e-4 if lora else 1.0e-5
    settings: dict[str, Any] = {"path": data}
    settings |= {"columns": facts.columns} if facts.columns else {}
    settings |= {"chat": True} if instruct and not facts.messages else {}
    settings |= {"eval_size": 0.2 if facts.rows < 300 else max(60, min(200, facts.rows // 20))}
    settings |= {} if len(stages) > 1 else {"parts": {}}
    return TEMPLATE.render(
        stages=stages,
        model=model,
        kind=facts.kind,
        about=KINDS[facts.kind],
        name=Path(data).name,
        path=path,
        rows=facts.rows,
        data=settings,
        batch_size=batch,
        memory=f"{memory:g}",
        lora=lora,
        rate=f"{rate:.1e}",
        tenth=f"{rate / 10:.1e}",
        max_new_tokens=256 if memory else 64,
        flow=_flow,
        scalar=_scalar,
    )


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False).strip()


def _scalar(value: str) -> str:
    return yaml.safe_dump(value, width=1000).splitlines()[0]
