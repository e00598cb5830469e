import sys
import time

import pytest

from marlhf.data import DataError, files, read_hub

datasets = pytest.importorskip("datasets")


def load_instead(monkeypatch, answer):
    """Put a stand-in for `load_dataset`; returns the list of its calls."""
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return answer(*args, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(files, "_reachable", lambda _: True)
    return calls


def raising(error):
    def answer(*_, **__):
        raise error

    return answer


def refused(name="owner/name", **options) -> str:
    with pytest.raises(DataError) as caught:
        list(read_hub(name, **options))
    return str(caught.value)


def test_records_and_positions(monkeypatch):
    found = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    calls = load_instead(monkeypatch, lambda *_, **__: found)
    assert list(read_hub("owner/name", "test", "small")) == [
        ({"prompt": "a"}, "owner/name[test]:1"),
        ({"prompt": "b"}, "owner/name[test]:2"),
    ]
    assert calls == [(("owner/name", "small"), {"split": "test"})]


def test_a_data_set_with_a_program_is_read_from_the_hubs_conversion(monkeypatch):
    def answer(path, *_, **__):
        if path != "parquet":
            raise RuntimeError("Dataset scripts are no longer supported, but found name.py")
        return datasets.Dataset.from_list([{"prompt": "a"}])

    calls = load_instead(monkeypatch, answer)
    assert list(read_hub("owner/name", "train", "comparisons")) == [
        ({"prompt": "a"}, "owner/name[train]:1")
    ]
    [file] = calls[1][1]["data_files"].values()
    assert file == ("hf://datasets/owner/name@refs%2Fconvert%2Fparquet/comparisons/train/*.parquet")


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'marlhf[hub]'" in refused()


@pytest.mark.parametrize(
    "error",
    [
        datasets.exceptions.DatasetNotFoundError("Dataset 'owner/name' doesn't exist on the Hub"),
        ConnectionError("Couldn't reach the Hub"),
    ],
)
def test_not_found_or_offline(monkeypatch, error):
    load_instead(monkeypatch, raising(error))
    assert "`owner/name` is not a file or folder here, and could not be fetched" in refused()
    assert str(error) in refused()


def test_a_missing_split_lists_those_there_are(monkeypatch):
    error = ValueError("Unknown split \"valid\". Should be one of ['train', 'test'].")
    load_instead(monkeypatch, raising(error))
    assert "cannot give split `valid`" in refused(split="valid")
    assert "Should be one of ['train', 'test']." in refused(split="valid")


def test_missing_files_of_a_config(monkeypatch):
    load_instead(monkeypatch, raising(FileNotFoundError("no such files")))
    assert "has no data for config `small`, split `train`" in refused(config="small")


def test_other_errors_are_not_hidden(monkeypatch):
    load_instead(monkeypatch, raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        list(read_hub("owner/name"))


def test_a_hub_that_does_not_answer_is_tried_once(monkeypatch):
    tries = []

    def dataset_info(*_, **__):
        tries.append(1)
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # whatever the environment says
    began = time.monotonic()
    assert "it does not answer, and the cache lacks it" in refused("nobody/nothing-at-all")
    assert time.monotonic() - began < 5
    assert len(tries) == 1
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_cached_data_set_is_read_without_the_hub(monkeypatch):
    def answer(*_, **__):
        assert datasets.config.HF_HUB_OFFLINE
        return [{"prompt": "a"}]

    load_instead(monkeypatch, answer)
    monkeypatch.setattr(files, "_reachable", lambda _: False)
    assert list(read_hub("owner/name")) == [({"prompt": "a"}, "owner/name[train]:1")]
