from marlhf.evaluate.score import repetition


def test_repetition_by_hand():
    assert repetition([1, 2, 3, 4, 5]) == 0
    assert repetition([7] * 11) == 1 - 1 / 8  # eight 4-grams, all the same
    assert repetition([1, 2, 1, 2], n=2) == 1 - 2 / 3  # 12 21 12


def test_too_short_to_repeat():
    assert repetition([]) == repetition([1, 1, 1]) == 0
