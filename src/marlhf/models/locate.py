"""Where a model or tokenizer is: a folder, a GGUF file, or the hub, which is asked once."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
)

from marlhf.models.base import ModelError, quiet_transformers
from marlhf.runs.layout import MODEL, is_run

HUB_TIMEOUT = 10.0
"""Seconds to wait for the hub's first answer."""


def is_gguf(path: str) -> bool:
    return path.endswith(".gguf")


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


@cache
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
