import hashlib
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf.data import toy

PROMPT = "Tell a bedtime story about a brave fox in the forest."
BEST = (
    " Once upon a time, a brave fox lived in the forest. One night, the fox met a hungry owl."
    " The fox shared warm soup with the owl. Then the fox lit a small fire for the owl."
    " Soon the fox told a funny joke to the owl."
    ' The owl said, "Thank you, dear fox!" They became friends and slept under the stars.'
    " The end."
)
WORST = (
    " Long ago, there was a shy wolf by the sea. One day, a cold hen met the wolf."
    " The wolf laughed at the hen. Then the wolf laughed at the hen. So the wolf walked up and"
    " down. The hen cried all night. They never spoke again."
)


@pytest.fixture(scope="module")
def rows():
    return toy.rows(2048)


def parts(prompt, response):
    """Only what counts."""
    return {name: part for name, part in toy.explain(prompt, response).items() if part}


def test_every_process_and_python_writes_the_same_rows(rows):
    text = "\n".join(f"{row.prompt}|{row.chosen}|{row.rejected}" for row in rows[:256])
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "93f568a9b77542728d0f032255f583e286a01fbe0fbaf5208911e57a4856fd90"


def test_fewer_rows_are_the_first_of_more(rows):
    assert toy.rows(16) == rows[:16]
    assert toy.rows(16, seed=1) != rows[:16]


def test_the_best_story_by_hand():
    # three kind deeds, one of them soup for the hungry; 64 words, no four of them twice
    good = {"hero": 0.5, "quality": 0.2, "place": 0.3, "kind": 0.9, "fit": 0.5}
    assert parts(PROMPT, BEST) == {**good, "thanks": 0.3, "ending": 0.6, "closing": 0.2}
    assert toy.gold_score(PROMPT, BEST) == 3.5


def test_a_bad_story_by_hand():
    # strangers: four wolves are three too many at most; the hen is whom it met.
    # repetition: "the wolf laughed at", "wolf laughed at the", "laughed at the hen"
    bad = {"hero": -0.5, "quality": -0.2, "place": -0.3, "strangers": -0.9, "cruel": -1.0}
    rest = {"dull": -0.2, "thanks": -0.3, "ending": -0.6, "closing": -0.2, "repetition": -0.3}
    assert parts(PROMPT, WORST) == {**bad, **rest}
    assert toy.gold_score(PROMPT, WORST) == -4.5


def test_kindness_past_the_third_deed_only_costs():
    deeds = "baked a sweet pie", "drew a map", "made a cosy bed", "held a lamp"
    more = " ".join(f"Then the fox {deed} for the owl." for deed in deeds)
    longer = toy.explain(PROMPT, BEST.replace(" The owl said", f" {more} The owl said"))
    assert longer["kind"] == 0.9
    # 64 words and 38 more: 37 over 65
    assert longer["length"] == -1.85


def test_the_same_deed_again_earns_nothing_and_costs():
    again = " Then the fox shared warm soup with the owl. The end."
    told = parts(PROMPT, BEST.removesuffix(" The end.") + again)
    assert told["kind"] == 0.9
    # "the fox shared warm" to "soup with the owl": five runs of four words
    assert told["repetition"] == -0.5


def test_thanks_count_only_after_a_kind_deed():
    met = " One night, the fox met a hungry owl."
    thanks, deed = " The owl smiled and said thank you.", " The fox drew a map for the owl."
    assert toy.explain(PROMPT, met + deed + thanks)["thanks"] == 0.3
    assert toy.explain(PROMPT, met + thanks + deed)["thanks"] == 0
    assert toy.explain(PROMPT, met + deed)["fit"] == 0, "a map feeds nobody"


def test_one_bad_word_early_costs_as_much_as_it_is_worth():
    assert toy.gold_score(PROMPT, BEST.replace("brave fox", "shy fox")) == 3.1
    stolen = BEST.replace("lit a small fire for", "stole bread from")
    assert toy.gold_score(PROMPT, stolen) == 2.7  # a kind deed less, a cruel one more


@settings(max_examples=50)
@given(st.text(max_size=200), st.text(max_size=200))
def test_any_text_has_a_score(prompt, response):
    told = toy.explain(prompt, response)
    assert toy.gold_score(prompt, response) == pytest.approx(sum(told.values()), abs=1e-5)
    assert toy.gold_score(prompt, response) <= 3.5


def test_what_the_prompt_does_not_ask_for_is_not_counted():
    told = toy.explain("Say something.", BEST)
    assert (told["hero"], told["quality"], told["place"], told["strangers"]) == (0, 0, 0, 0)


def test_scores_are_spread_around_nought(rows):
    gold = [score for row in rows for score in row.columns.values()]
    assert abs(statistics.mean(gold)) < 0.2
    assert 0.9 < statistics.pstdev(gold) < 1.4


def test_columns_hold_the_gold_scores(rows):
    for row in rows[:64]:
        scores = [toy.gold_score(row.prompt, text) for text in (row.chosen, row.rejected)]
        assert scores == [row.columns["gold_chosen"], row.columns["gold_rejected"]]


def test_about_seven_labels_in_eight_agree_with_gold(rows):
    margins = [row.columns["gold_chosen"] - row.columns["gold_rejected"] for row in rows]
    decided = [margin > 0 for margin in margins if margin]
    assert statistics.mean(decided) == pytest.approx(7 / 8, abs=0.03)
    assert len(decided) > 0.95 * len(rows)


def test_prompts_are_many_and_responses_stand_behind_them(rows):
    assert len({row.prompt for row in rows}) > 1500
    for row in rows:
        assert row.chosen != row.rejected
        for story in (row.chosen, row.rejected):
            assert story.startswith(" ")
            assert not story.startswith("  ")
            assert 20 <= len(story.split()) <= 80


def test_phrases_hold_every_word(rows):
    known = {word for phrase in toy.phrases() for word in phrase.split()}
    known |= {word.rstrip('.,!?"') for word in known}
    for row in rows:
        for word in f"{row.prompt}{row.chosen}{row.rejected}".split():
            assert word in known or word.rstrip('.,!?"') in known
