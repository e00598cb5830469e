import gzip
import json
import sys
from pathlib import Path

import pytest

from marlhf.data import DataError, read_records

RECORDS = [{"prompt": "a, b", "n": "1"}, {"prompt": "line\nbreak ü", "n": "2"}]


def read(path, **options):
    return [record for record, _ in read_records(path, **options)]


def refused(path, **options) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **options)
    return str(caught.value)


def as_lines(records) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write_table(path: Path, delimiter: str) -> None:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "n"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(RECORDS)


def test_every_text_form_gives_the_same_records(tmp_path):
    (tmp_path / "a.jsonl").write_text(as_lines(RECORDS))
    (tmp_path / "list.json").write_text(json.dumps(RECORDS, indent=2))
    (tmp_path / "lines.json").write_text(as_lines(RECORDS))
    write_table(tmp_path / "a.csv", ",")
    write_table(tmp_path / "a.tsv", "\t")
    for file in sorted(tmp_path.iterdir()):
        packed = file.with_name(file.name + ".gz")
        packed.write_bytes(gzip.compress(file.read_bytes()))
        assert read(file) == RECORDS, file
        assert read(packed) == RECORDS, packed


def test_parquet_keeps_lists_and_structs(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    records = [{"prompt": [{"role": "user", "content": "hi"}], "score": 1.5}]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    assert list(read_records(tmp_path / "a.parquet")) == [(records[0], f"{tmp_path}/a.parquet:1")]


def test_positions_are_lines_even_after_blank_and_long_ones(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "a.csv").write_text('a\n"two\nlines"\nlast\n')
    assert [p for _, p in read_records(tmp_path / "a.jsonl")] == [
        f"{tmp_path}/a.jsonl:1",
        f"{tmp_path}/a.jsonl:3",
    ]
    assert [p for _, p in read_records(tmp_path / "a.csv")] == [
        f"{tmp_path}/a.csv:2",
        f"{tmp_path}/a.csv:4",
    ]


def test_a_byte_order_mark_is_not_part_of_a_name(tmp_path):
    (tmp_path / "excel.csv").write_bytes(b"\xef\xbb\xbfprompt\nhi\n")
    assert read(tmp_path / "excel.csv") == [{"prompt": "hi"}]


def test_long_fields_fit(tmp_path):
    (tmp_path / "a.csv").write_text("prompt\n" + "x" * 200_000 + "\n")
    assert len(read(tmp_path / "a.csv")[0]["prompt"]) == 200_000


def test_jsonl_streams(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\nbroken\n')
    assert next(read_records(tmp_path / "a.jsonl"))[0] == {"a": 1}


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "b" / "1.jsonl").write_text('{"a": 2}\n')
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / ".cache" / "x.bin").write_text("no data")
    (tmp_path / "README.md").write_text("about")
    assert read(tmp_path) == [{"a": 1}, {"a": 2}]


def test_a_folder_names_what_it_cannot_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "b.xlsx").write_bytes(b"x")
    assert "b.xlsx" in refused(tmp_path)
    assert "convert them to one of" in refused(tmp_path)


def test_a_folder_without_data_says_so(tmp_path):
    assert f"The folder {tmp_path} holds no data." in refused(tmp_path)


def test_a_saved_data_set_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list([{"prompt": "hi"}])
    one.save_to_disk(str(tmp_path / "one"))
    both = datasets.DatasetDict({"train": one, "test": one})
    both.save_to_disk(str(tmp_path / "both"))
    assert read(tmp_path / "one") == [{"prompt": "hi"}]
    assert read(tmp_path / "both", split="test") == [{"prompt": "hi"}]
    assert "has no split `valid`. It has: train, test." in refused(tmp_path / "both", split="valid")


def test_a_saved_data_set_without_the_library(tmp_path, monkeypatch):
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'marlhf[hub]'" in refused(tmp_path)


def test_a_missing_file_names_its_neighbour(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n')
    assert f"Did you mean {tmp_path}/train.jsonl?" in refused(tmp_path / "trian.jsonl")
    assert f"{tmp_path} has nothing like it." in refused(tmp_path / "zzz")
    assert f"the folder {tmp_path} exists" in refused(tmp_path / "no" / "train.jsonl")


def test_an_empty_file(tmp_path):
    for name in ("a.jsonl", "a.json", "a.csv"):
        (tmp_path / name).write_text("")
        assert f"{tmp_path}/{name} is empty" in refused(tmp_path / name)
    (tmp_path / "b.csv").write_text("prompt,chosen\n")
    (tmp_path / "b.json").write_text("[]")
    assert "holds no records" in refused(tmp_path / "b.csv")
    assert "holds no records" in refused(tmp_path / "b.json")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_deeply_nested_json_is_a_sentence(tmp_path, name):
    record = '{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    good = '{"prompt": "b"}'
    text = f"{good}\n{record}\n" if name == "a.jsonl" else f"[{good},\n{record}]"
    (tmp_path / name).write_text(text)
    assert "its lists or objects are nested too deep" in refused(tmp_path / name)


def test_a_number_with_too_many_digits_is_a_sentence(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"x": ' + "1" * 5000 + "}")
    assert f"{tmp_path}/a.jsonl:2 cannot be read" in refused(tmp_path / "a.jsonl")


def test_broken_json_names_the_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n')
    (tmp_path / "a.json").write_text('[{"a": 1},\n {"a" 2}]')
    assert f"{tmp_path}/a.jsonl:2 is not JSON" in refused(tmp_path / "a.jsonl")
    assert f"{tmp_path}/a.json:2 is not JSON" in refused(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("line", "kind"), [("[1]", "a list"), ('"x"', "a text"), ("3", "`3`"), ("null", "`null`")]
)
def test_a_line_that_is_not_an_object(tmp_path, line, kind):
    (tmp_path / "a.jsonl").write_text(f'{{"a": 1}}\n{line}\n')
    assert f"a.jsonl:2 is {kind}, not an object" in refused(tmp_path / "a.jsonl")


def test_text_that_is_not_utf8_names_the_byte(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": "caf\xe9"}\n')
    # nine bytes of the first line, ten before the e with its accent
    assert "byte 19 is 0xe9. Save it as UTF-8" in refused(tmp_path / "a.jsonl")


def test_an_unknown_ending(tmp_path):
    for name in ("a.xlsx", "a", "a.parquet.gz", "a.gz"):
        (tmp_path / name).write_bytes(b"x")
        assert "has an unknown ending" in refused(tmp_path / name)


def test_damaged_archives(tmp_path):
    packed = gzip.compress(as_lines(RECORDS * 50).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-20])
    (tmp_path / "not.jsonl.gz").write_bytes(b"plain text")
    (tmp_path / "flipped.jsonl.gz").write_bytes(packed[:20] + b"\xff" * 8 + packed[28:])
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
    for name in ("cut.jsonl.gz", "not.jsonl.gz", "flipped.jsonl.gz", "a.parquet"):
        assert f"{tmp_path / name} is damaged" in refused(tmp_path / name)


def test_tables_that_do_not_add_up(tmp_path):
    (tmp_path / "wide.csv").write_text("a,b\n1,2\n1,2,3\n")
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    (tmp_path / "quote.csv").write_text('a,b\n1,2\n"1" 2,3\n')
    assert "wide.csv:3 has 3 fields, but the header has 2" in refused(tmp_path / "wide.csv")
    assert "twice.csv:1 names a column twice" in refused(tmp_path / "twice.csv")
    assert "quote.csv:3 cannot be read as a table" in refused(tmp_path / "quote.csv")


def test_permission_denied(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')

    def deny(self, *_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", deny)
    assert f"{tmp_path}/a.jsonl may not be read: permission denied" in refused(tmp_path / "a.jsonl")
