"""Records of data sets on the Hugging Face hub. No code from the hub is ever run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

from marlhf.data.files import Records
from marlhf.data.rows import DataError

CONVERTED = "refs%2Fconvert%2Fparquet"
"""The branch on which the hub itself keeps parquet copies of older data sets."""


def read_hub(name: str, split: str = "train", config: str | None = None) -> Records:
    """Every record of one split of a hub data set, with "name[split]:row" as its position.

    >>> for record, position in read_hub("trl-lib/tldr", "train"):  # doctest: +SKIP
    ...     print(record["prompt"])
    """
    try:
        import datasets
        import datasets.exceptions
    except ImportError as error:
        raise DataError(
            f"`{name}` is not a file or folder here, and to fetch it from the hub the datasets "
            "library is needed. Correct the path, or run `pip install 'marlhf[hub]'`."
        ) from error
    reachable = _reachable(name)
    try:
        with contextlib.nullcontext() if reachable else _offline():
            loaded = _load(name, split, config)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError, TimeoutError) as error:
        cause = _first_line(error) if reachable else "it does not answer, and the cache lacks it"
        raise DataError(
            f"`{name}` is not a file or folder here, and could not be fetched from the hub "
            f"({cause}). Correct the name; log in with `hf auth login` if the data "
            "set is private; or, without a network, download it first and give its folder."
        ) from error
    except FileNotFoundError as error:
        raise DataError(
            f"The hub's `{name}` has no data for config `{config or 'default'}`, split `{split}` "
            f"({_first_line(error)}). Look up both on https://huggingface.co/datasets/{name}."
        ) from error
    except ValueError as error:
        raise DataError(
            f"The hub's `{name}` cannot give split `{split}` of config `{config or 'default'}`: "
            f"{' '.join(str(error).split())} Set `split` and `config` to one of those it has."
        ) from error
    for number, record in enumerate(loaded, start=1):
        yield dict(cast(Mapping[str, Any], record)), f"{name}[{split}]:{number}"


def _reachable(name: str) -> bool:
    """Whether the hub answers, by one request. `datasets` itself would retry for half a minute."""
    import huggingface_hub.errors

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=10)
    except huggingface_hub.errors.HfHubHTTPError:
        return True  # it answered, if only that there is no such data set
    except Exception:  # no network, no answer in time, offline mode: the type varies by version
        return False
    return True


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Read the cache alone, for a while."""
    import datasets.config
    import huggingface_hub

    settings: list[Any] = [datasets.config, huggingface_hub.constants]
    before = [each.HF_HUB_OFFLINE for each in settings]
    try:
        for each in settings:
            each.HF_HUB_OFFLINE = True
        yield
    finally:
        for each, value in zip(settings, before):
            each.HF_HUB_OFFLINE = value


def _load(name: str, split: str, config: str | None) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
    # The data set is published as a program; take the hub's own conversion instead.
    folder = f"hf://datasets/{name}@{CONVERTED}/{config or 'default'}/{split}"
    return datasets.load_dataset("parquet", data_files={split: f"{folder}/*.parquet"}, split=split)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
