"""Kappas against figures worked out by hand."""

import json
import math
from collections import Counter

import pytest

from marlhf.judge.pairs import JudgeError
from marlhf.judge.verdicts import agreement, cohen_kappa, compare, describe_agreement, fleiss_kappa


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def votes(judge, verdicts):
    return [{"pair": i, "judge": judge, "verdict": v} for i, v in enumerate(verdicts)]


def test_cohen_by_hand():
    # a table of 50: 20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no
    said = [("a", "a")] * 20 + [("a", "b")] * 5 + [("b", "a")] * 10 + [("b", "b")] * 15
    found = cohen_kappa(said)
    # p = 35/50 = 0.7; e = 0.5 * 0.6 + 0.5 * 0.4 = 0.5; (0.7 - 0.5) / 0.5 = 0.4
    assert found.mean == pytest.approx(0.4)
    # the large-sample deviation is about 0.13, so the interval spans about 0.4 +- 0.25
    assert found.low == pytest.approx(0.15, abs=0.04)
    assert found.high == pytest.approx(0.65, abs=0.04)


def test_cohen_with_ties_by_hand():
    said = [("a", "a")] * 3 + [("tie", "tie")] * 2 + [("a", "tie"), ("b", "tie"), ("b", "b")]
    # p = 6/8; margins: a 4, b 2, tie 2 and a 3, b 1, tie 4; e = (12 + 2 + 8) / 64
    assert cohen_kappa(said).mean == pytest.approx((6 / 8 - 22 / 64) / (1 - 22 / 64))


def test_kappa_ends():
    assert cohen_kappa([("a", "a"), ("b", "b")]).mean == 1.0
    assert cohen_kappa([("a", "b"), ("b", "a")]).mean == -1.0
    assert math.isnan(cohen_kappa([("a", "a")] * 5).mean)
    assert math.isnan(cohen_kappa([]).mean)


def test_fleiss_by_hand():
    rows = ["aaa", "aab", "bbb", "abb"]
    found = fleiss_kappa([list(row) for row in rows])
    # within pairs: 1, 1/3, 1, 1/3, mean 2/3; a and b are half each: e = 1/2; kappa = 1/3
    assert found.mean == pytest.approx(1 / 3)
    assert found.low < 1 / 3 < found.high


def test_fleiss_of_four_judges_and_three_verdicts():
    rows = ["aaaa", "aabb", "bbbt", "tttt"]
    words = {"a": "a", "b": "b", "t": "tie"}
    # within: 1, 1/3, 1/2, 1; sum 17/6, mean 17/24. shares: a 6, b 5, tie 5 of 16: e = 86/256
    expected = (17 / 24 - 86 / 256) / (1 - 86 / 256)
    assert fleiss_kappa([[words[c] for c in row] for row in rows]).mean == pytest.approx(expected)


def test_intervals_are_those_of_resampled_pairs():
    import random

    def kappa(pairs):
        ones, others = map(Counter, zip(*pairs))
        by_chance = sum(ones[verdict] * others[verdict] for verdict in ones) / len(pairs) ** 2
        return (sum(a == b for a, b in pairs) / len(pairs) - by_chance) / (1 - by_chance)

    said = [("a", "a")] * 14 + [("a", "b")] * 6 + [("b", "b")] * 12 + [("tie", "b")] * 4
    draw = random.Random(1)
    means = sorted(kappa(draw.choices(said, k=36)) for _ in range(2000))
    found = cohen_kappa(said)
    assert found.mean == pytest.approx(kappa(said))
    assert found.low == pytest.approx(means[50], abs=0.03)
    assert found.high == pytest.approx(means[1949], abs=0.03)
    assert found == cohen_kappa(list(reversed(said)))


def test_golden_verdicts_give_their_table(tmp_path):
    people = write(tmp_path / "people.jsonl", votes("ann", "aabb") + votes("bob", "aaab"))
    model = write(tmp_path / "model.jsonl", votes("gpt", "aabbb"))
    found = agreement([people, model])
    table = {(b.one, b.other): (b.pairs, b.agreement.mean, b.kappa.mean) for b in found.between}
    # ann, bob: p = 3/4, e = 1/2 * 3/4 + 1/2 * 1/4 = 1/2
    assert table["ann", "bob"] == (4, 0.75, pytest.approx(0.5))
    assert table["ann", "gpt"] == (4, 1.0, pytest.approx(1.0))
    assert found.judges == {"ann": 4, "bob": 4, "gpt": 5}
    assert found.common == 4
    # within: 1, 1, 1/3, 1, mean 5/6; a 7, b 5 of 12: e = 74/144
    assert found.fleiss is not None
    assert found.fleiss.mean == pytest.approx((5 / 6 - 74 / 144) / (1 - 74 / 144))
    lines = describe_agreement(found)
    assert len(lines) == 5
    assert "Fleiss' kappa of 3 on 4 pairs: 0.657" in lines[-1]


def test_the_other_way_round_is_the_same_pair(tmp_path):
    one = [{"prompt": f"p{i}", "response_a": "x", "response_b": "y", "verdict": v}
           for i, v in enumerate(["a", "b", "tie"])]  # fmt: skip
    other = [{"prompt": f"p{i}", "response_a": "y", "response_b": "x", "verdict": v}
             for i, v in enumerate(["b", "a", "tie"])]  # fmt: skip
    found = agreement([write(tmp_path / "one.jsonl", one), write(tmp_path / "two.jsonl", other)])
    assert found.between[0].kappa.mean == 1.0
    assert (found.between[0].one, found.between[0].other) == ("one", "two")


def test_one_judge_in_two_files_is_compared_with_itself(tmp_path):
    files = [write(tmp_path / f"{n}.jsonl", votes("gpt", v)) for n, v in (("x", "ab"), ("y", "aa"))]
    assert list(agreement(files).judges) == ["gpt (x)", "gpt (y)"]
    apart = [{"pair": 9, "judge": "gpt", "verdict": "a"}]
    more = write(tmp_path / "z.jsonl", apart + votes("ann", "ab"))
    assert agreement([files[0], more]).judges == {"gpt": 3, "ann": 2}


def test_a_changed_mind_counts_once(tmp_path):
    changed = [*votes("ann", "ab"), {"pair": 0, "judge": "ann", "verdict": "b"}]
    found = agreement([write(tmp_path / "f.jsonl", changed + votes("bob", "bb"))])
    assert found.between[0].agreement.mean == 1.0
    assert "undefined" in describe_agreement(found)[1]


def test_mistakes_are_sentences(tmp_path):
    with pytest.raises(JudgeError, match="needs two judges; there is ann"):
        agreement([write(tmp_path / "a.jsonl", votes("ann", "ab"))])
    with pytest.raises(JudgeError, match="No two judges"):
        compare({"ann": {"1": "a"}, "bob": {"2": "a"}})
    with pytest.raises(JudgeError, match="Write a, b or tie"):
        agreement([write(tmp_path / "b.jsonl", [{"pair": 1, "verdict": "A"}])])
    with pytest.raises(JudgeError, match="names no pair"):
        agreement([write(tmp_path / "c.jsonl", [{"verdict": "a"}])])
    with pytest.raises(JudgeError, match="Cannot read"):
        agreement([tmp_path / "none.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(JudgeError, match="has no verdicts"):
        agreement([tmp_path / "empty"])
