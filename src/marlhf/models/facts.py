"""What a model is, from its small files alone: where it is, its config, tokenizer, adapters, heads.

A folder with `adapter_config.json` is an adapter. marlhf also keeps one as `adapter/` inside the
folder of a merged model: the same folder then serves readers of plain models, and runs that put
the adapter on a shared base.
"""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
)
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from marlhf.models.base import Model, ModelError, Tokenizer, quiet_transformers
from marlhf.models.heads import SCALAR
from marlhf.models.tiny import tiny_tokenizer
from marlhf.runs.layout import MODEL, is_run

CONFIG, RECORD = "adapter_config.json", "base.json"
STEP_SEPARATOR = "step_separator"
"""What a process reward model's config has, and no other's."""
HUB_TIMEOUT = 10.0
"""Seconds to wait for the hub's first answer."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before its weights are read.

    Its config and its tokenizer are read when they are first asked for, and then kept.
    """

    model: str | Model
    saved: Path | None = None  # the saved adapter that the model is
    saved_on: ModelFacts | None = None  # the base of that adapter
    scalar: Path | None = None  # an adapter with a scalar head: the model, or the one beside it
    members: int = 1  # of an ensemble with an adapter each, whose first one it is
    trust_remote_code: bool = False
    setting: str = field(default="", compare=False)  # what named the model

    @property
    def base(self) -> ModelFacts:
        """What new adapters are put on: the model itself, or the base of a saved adapter."""
        return self.saved_on or self

    @property
    def name(self) -> str:
        """The model in an error."""
        given = f"the {type(self.model).__name__} given"
        named = f"`{self.setting}`: " if self.setting else ""
        return named + (self.model if isinstance(self.model, str) else given)

    @cached_property
    def files(self) -> dict[str, Any]:
        """The options by which `from_pretrained` finds it."""
        return locate(self.model, self.setting)

    @cached_property
    def config(self) -> Any:
        """transformers' config; None for an adapter, a GGUF file and `tiny`."""
        if not isinstance(self.model, str):
            return self.model.config
        if self.saved is not None or self.model == "tiny" or is_gguf(self.model):
            return None
        with explained(self.model, "model"):
            return AutoConfig.from_pretrained(
                **self.files, trust_remote_code=self.trust_remote_code
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Of a named model: one that has an EOS and a padding token, and pads on the left."""
        path = self.model
        assert isinstance(path, str), "a given model comes without its tokenizer"
        if path == "tiny":
            return tiny_tokenizer()
        if self.saved_on is not None and not (Path(path) / "tokenizer_config.json").is_file():
            return self.saved_on.tokenizer
        with explained(path, "tokenizer"):
            declared = {} if is_gguf(path) else get_tokenizer_config(**self.files)
            # AutoTokenizer goes by the model's family even where the folder says that its
            # tokenizer is a plain one, and a family's own class may cut text into other tokens.
            kind = declared.get("tokenizer_class")
            plain = kind in ("PreTrainedTokenizerFast", "TokenizersBackend")
            loader = PreTrainedTokenizerFast if plain else AutoTokenizer
            remote = self.trust_remote_code
            tokenizer = loader.from_pretrained(**self.files, trust_remote_code=remote)
            if is_gguf(path) and (end := gguf_end(path)) is not None:
                tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
        return with_ends(tokenizer, f"of {path}")

    @property
    def is_scalar(self) -> bool:
        """Whether it has a scalar head, so that `load_scalar` need not make a fresh one."""
        if not isinstance(self.model, str):
            return hasattr(self.model, "score")
        if self.config is None:
            return self.saved is not None and self.scalar is not None
        return any(SCALAR in kind for kind in self.config.architectures or ())

    @property
    def step_separator(self) -> str | None:
        """What separates the steps that a process reward model scores; None for other models."""
        return None if self.config is None else vars(self.config).get(STEP_SEPARATOR)

    def refuse_process_model(self) -> None:
        """A process model says nothing of a whole response."""
        if self.step_separator is not None:
            raise ModelError(
                f"{self.name} is a process reward model, which scores steps and not whole "
                "responses. Name it as process_model, or take a reward model that `marlhf reward` "
                "trained."
            )


def model_facts(
    model: str | Model, *, trust_remote_code: bool = False, setting: str = ""
) -> ModelFacts:
    """What a folder, a name on the hub, a GGUF file, `tiny` or a given object holds."""
    if not isinstance(model, str):
        return ModelFacts(model, trust_remote_code=trust_remote_code, setting=setting)
    adapter, base = find_adapter(model), adapter_base(model)
    known = partial(model_facts, trust_remote_code=trust_remote_code, setting=setting)
    return ModelFacts(
        model,
        None if base is None else Path(model),
        None if base is None else known(base),
        adapter if adapter is not None and is_scalar_adapter(adapter) else None,
        1 if base is None else saved_members(model),
        trust_remote_code,
        setting,
    )


def with_ends(tokenizer: Tokenizer, which: str) -> Tokenizer:
    """A tokenizer made ready: it ends responses, pads on the left, and gives text back as it is."""
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"The tokenizer {which} has no EOS token, so a response could never end. "
            "Set `eos_token` in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # harmless: masks come from lengths, not ids
    tokenizer.padding_side = "left"
    tokenizer.clean_up_tokenization_spaces = False  # text must come back as the tokens have it
    return tokenizer


def same_tokenizer(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether ids of one mean the same to the other."""
    return a is b or (a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id)


def adapter_base(path: str | Path) -> str | None:
    """The model that an adapter folder belongs to; None where the folder is no adapter."""
    if not (Path(path) / CONFIG).is_file():
        return None
    if not (source := adapter_source(path)):
        raise ModelError(
            f"The adapter {path} does not say which model it belongs to. Set "
            f"base_model_name_or_path in its {CONFIG}."
        )
    return source


def saved_members(folder: str | Path) -> int:
    """The members of a saved ensemble that have an adapter each: 1 where it is none."""
    record = Path(folder) / RECORD
    return read_json(record).get("members", 1) if record.is_file() else 1


def find_adapter(path: str | Path) -> Path | None:
    """The adapter in a folder: the folder itself, or `adapter/` beside a merged model."""
    folders = (Path(path), Path(path) / "adapter")
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def is_scalar_adapter(folder: str | Path) -> bool:
    """Whether an adapter includes a scalar head, as a reward model's does."""
    return read_json(Path(folder) / CONFIG).get("task_type") == "SEQ_CLS"


def adapter_source(folder: str | Path) -> str:
    """The model that an adapter says it belongs to."""
    return read_json(Path(folder) / CONFIG).get("base_model_name_or_path") or ""


def read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(file, error) from error


def damaged(file: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{file} is damaged ({error}). Save the adapter again, or take another folder."
    )


def is_gguf(path: str) -> bool:
    return path.endswith(".gguf")


def gguf_end(path: str) -> int | None:
    """The token that ends a text, as the file says: some versions of transformers take another."""
    from gguf import GGUFReader

    field = GGUFReader(path).fields.get("tokenizer.ggml.eos_token_id")
    return None if field is None else int(field.contents())


def locate(path: str, setting: str = "") -> dict[str, Any]:
    """The options by which `from_pretrained` finds a model; `setting` is where it was named."""
    file = Path(path)
    named = f"`{setting}`: " if setting else ""
    if is_gguf(path):
        if not file.is_file():
            raise ModelError(f"{named}There is no file {path}. Check the path to the GGUF file.")
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    if file.exists():
        return {"pretrained_model_name_or_path": path}
    if is_run(file.parent):
        raise ModelError(
            f"{named}There is no {path}: the run {file.parent} is not finished. Finish it first, "
            "by the command that began it."
        )
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(
            f"{named}There is no folder {path}. If an earlier stage of the recipe writes it, run "
            "that stage first; `marlhf run` does all of them in order."
        )
    return {"pretrained_model_name_or_path": _on_hub(path, named)}


def _on_hub(name: str, named: str) -> str:
    """The name of a model on the hub; without the hub, the folder where it was downloaded before.

    One question with a short timeout: transformers asks for every file of a model, five times
    each, and takes more than a minute to say that there is no network.
    """
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT)
    except EntryNotFoundError:
        return name  # it exists, and may hold a tokenizer alone
    except GatedRepoError:
        cause = (
            f"the hub gives it only to those who accepted its terms. Do so on "
            f"https://huggingface.co/{name}, and log in with `hf auth login`"
        )
    except (RepositoryNotFoundError, HFValidationError):
        cause = "the hub has none either, or does not show it to you. Correct the name"
    except Exception as error:  # which class depends on the HTTP client of huggingface_hub
        reason = textwrap.shorten(str(error) or type(error).__name__, 100)
        cause = f"the hub cannot be reached ({reason}). Correct the name, or download it first"
    else:
        return name
    for file in ("config.json", "tokenizer_config.json"):
        if isinstance(cached := try_to_load_from_cache(name, file), str):
            return str(Path(cached).parent)
    raise ModelError(f"{named}There is no folder {name} here, and {cause}.")


@contextlib.contextmanager
def explained(path: str, what: str) -> Iterator[None]:
    """transformers' many ways to fail, as one sentence with the cause at its end."""
    try:
        with quiet_transformers():  # it warns of a fresh score head, which is intended
            yield
    except ModelError:
        raise
    except Exception as error:  # safetensors, tokenizers and gguf each raise kinds of their own
        inner = Path(path) / MODEL
        if (inner / "config.json").is_file():
            hint = f"It is the folder of a run; its model is {inner}."
        elif "trust_remote_code" in str(error):
            raise ModelError(
                f"The {what} {path} comes with Python code of its own, which is run only if you "
                "say so: --trust-code on the command line, trust_remote_code: true in a recipe."
            ) from error
        elif not Path(path).exists():
            hint = "Is it a model on the hub that you may read?"
        elif is_gguf(path):
            hint = "Is it a whole GGUF file, of a family that transformers can read?"
        elif what == "tokenizer":
            hint = "Is it a folder written by save_pretrained, with a tokenizer.json?"
        else:
            hint = "Is it a folder written by save_pretrained, with safetensors weights?"
        cause = textwrap.shorten(str(error) or repr(error), 240)
        raise ModelError(f"Cannot load the {what} {path}. {hint} ({cause})") from error
