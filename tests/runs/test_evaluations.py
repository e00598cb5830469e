"""Settings of an evaluation: in its lines; in its name only where version 0.1 wrote it."""

import pytest

from marlhf.runs.evaluations import SamplingSettings, from_name, read_evaluations
from marlhf.runs.jsonl import append_jsonl

LINE = {"setting": "s", "key": "1", "scores": {}}


def test_settings_are_read_from_the_lines_whatever_the_file_is_called(tmp_path):
    sampling = {"temperature": 0.5, "max_new_tokens": 9, "seed": 2, "data": "", "later": "field"}
    append_jsonl(tmp_path / "t1-m8-s0.jsonl", [LINE | {"sampling": sampling}])
    [file] = read_evaluations(tmp_path)
    assert file.settings == SamplingSettings(0.5, 9, 2)
    assert file.label == "temperature 0.5, 9 tokens, seed 2"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("t1-m8-s0", SamplingSettings(1.0, 8, 0)),
        ("t0.25-m512-s3-test", SamplingSettings(0.25, 512, 3, "test")),
        ("t1e-05-m8-s0-mine-train", SamplingSettings(1e-5, 8, 0, "mine-train")),
        ("mine", None),
        ("t1-m8", None),
    ],
)
def test_files_of_version_0_1_are_read_by_their_names(tmp_path, name, settings):
    append_jsonl(tmp_path / f"{name}.jsonl", [LINE])
    [file] = read_evaluations(tmp_path)
    assert file.settings == settings
    assert file.lines == [LINE]
    if settings is None:
        assert file.label == name


def test_the_name_for_people_says_the_settings():
    settings = SamplingSettings(0.8, 64, 0, "test", "reward")
    assert settings.file_name == "t0.8-m64-s0-test-reward.jsonl"
    assert from_name(SamplingSettings(0.8, 64, 0).file_name.removesuffix(".jsonl")) is not None


def test_sampling_that_is_not_an_object_falls_back_to_the_name(tmp_path):
    append_jsonl(tmp_path / "t1-m8-s0.jsonl", [LINE | {"sampling": [1]}])
    append_jsonl(tmp_path / "t2-m8-s0.jsonl", [LINE | {"sampling": {}}])
    assert [file.settings.temperature for file in read_evaluations(tmp_path)] == [1.0, 2.0]
