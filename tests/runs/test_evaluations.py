"""Settings of an evaluation are in its lines; the file's name is for people."""

from marlhf.runs.atomic import append_jsonl
from marlhf.runs.evaluations import SamplingSettings, read_evaluations

LINE = {"setting": "s", "key": "1", "scores": {}}


def test_settings_are_read_from_the_lines_whatever_the_file_is_called(tmp_path):
    sampling = {"temperature": 0.5, "max_new_tokens": 9, "seed": 2, "data": "", "later": "field"}
    append_jsonl(tmp_path / "t1-m8-s0.jsonl", [LINE | {"sampling": sampling}])
    [file] = read_evaluations(tmp_path)
    assert file.settings == SamplingSettings(0.5, 9, 2)
    assert file.label == "temperature 0.5, 9 tokens, seed 2"


def test_the_name_for_people_says_the_settings():
    settings = SamplingSettings(0.8, 64, 0, "test", "reward")
    assert settings.file_name == "t0.8-m64-s0-test-reward.jsonl"


def test_lines_without_settings_are_labelled_by_the_name(tmp_path):
    append_jsonl(tmp_path / "a.jsonl", [LINE])
    append_jsonl(tmp_path / "b.jsonl", [LINE | {"sampling": [1]}])
    append_jsonl(tmp_path / "c.jsonl", [LINE | {"sampling": {}}])
    files = read_evaluations(tmp_path)
    assert [file.settings for file in files] == [None] * 3
    assert [file.label for file in files] == ["a", "b", "c"]
