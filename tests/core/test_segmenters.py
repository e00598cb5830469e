import itertools
import math
import statistics
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import constituent_starts, peak_starts, perplexity_starts, tree_spans

from marlhf.core import (
    Constituents,
    Entropy,
    Learned,
    Lines,
    NGram,
    Perplexity,
    RandomNGram,
    Responses,
    Segments,
    Sentences,
    Surprise,
    ValueChange,
    Vocabulary,
    Words,
    pack_spans,
    segment,
    thin_out,
)


def responses(*lengths: int, width: int | None = None, **fields) -> Responses:
    width = max(lengths) if width is None else width
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return Responses(torch.zeros(len(lengths), width, dtype=torch.int64), mask, **fields)


def lengths(rule, given: Responses) -> list[list[int]]:
    segments = segment(rule, given).validate()
    return [[n for n in row if n] for row in segments.lengths.tolist()]


@pytest.mark.parametrize(
    ("n", "wanted"),
    [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (50, [7]), (math.inf, [7])],
)
def test_ngram_lengths(n, wanted):
    assert lengths(NGram(n), responses(7, 0, 2, width=9))[0] == wanted
    assert lengths(NGram(n), responses(7, 0, 2, width=9))[1] == []


def test_ngram_counts_from_the_first_response_token():
    mask = torch.tensor([[False, False, True, True, True]])
    assert lengths(NGram(2), Responses(mask.long(), mask)) == [[2, 1]]


@pytest.mark.parametrize("n", [0, -1, 2.5, math.nan])
def test_ngram_refuses_what_is_not_a_length(n):
    with pytest.raises(ValueError, match="n must be a whole number"):
        NGram(n)


@given(st.lists(st.integers(0, 90), min_size=1, max_size=4), st.integers(0, 2**40))
def test_random_ngram_covers_the_response_with_its_list(sizes, seed):
    given = responses(*sizes, width=90, seeds=torch.arange(len(sizes)) + seed)
    for size, found in zip(sizes, lengths(RandomNGram(), given)):
        assert sum(found) == size
        bag = sorted([2, 3, 5, 10] * 3)
        for length in found[:-1]:  # all but the last are whole members of the list
            bag.remove(length)
        if found and sum(found[:-1]) < 60:
            assert found[-1] <= max(bag)
        elif found:
            assert found[-1] == size - 60


def test_random_ngram_repeats_from_its_seeds_and_not_from_the_batch():
    seeds = torch.tensor([7, 8, 9])
    whole = RandomNGram()(responses(60, 60, 60, seeds=seeds))
    torch.rand(5)
    alone = RandomNGram()(responses(60, seeds=seeds[1:2]))
    assert torch.equal(whole[1:2], alone)
    assert not torch.equal(whole[0], whole[1])


def test_random_ngram_without_seeds_follows_torch():
    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        return RandomNGram()(responses(60, 60))

    assert torch.equal(draw(), draw())


def test_random_ngram_draws_every_order_about_equally():
    rule = RandomNGram(lengths=(1, 2, 3), repeats=1)
    starts = rule(responses(*[6] * 6000, seeds=torch.arange(6000)))
    found = segment(lambda _: starts, responses(*[6] * 6000)).lengths[:, :3]
    orders, counts = found.unique(dim=0, return_counts=True)
    assert len(orders) == 6
    assert (counts.double() - 1000).abs().max() < 130  # 4.5 standard deviations


@pytest.mark.parametrize("kind", ["macro", "prefix", "token"])
@given(
    nll=st.lists(
        st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]), st.floats(0, 9, width=32)),
        min_size=1,
        max_size=24,
    ),
    cap=st.sampled_from([None, 1, 2, 3, 7]),
)
def test_perplexity_matches_its_definition(kind, nll, cap):
    logprobs = -torch.tensor([[*nll, math.nan]], dtype=torch.float64)
    given = responses(len(nll), width=len(nll) + 1, ref_logprobs=logprobs)
    near_ties = perplexity_starts([x + 1e-7 * i for i, x in enumerate(nll)], kind, cap)
    wanted = perplexity_starts(nll, kind, cap)
    got = Perplexity(kind, max_length=cap)(given)[0, : len(nll)].tolist()
    exact = all(x * 1024 == int(x * 1024) for x in nll)
    if exact or wanted == near_ties == perplexity_starts(
        [x - 1e-7 * i for i, x in enumerate(nll)], kind, cap
    ):
        assert got == wanted


def test_perplexity_by_hand():
    given = responses(5, ref_logprobs=-torch.tensor([[2.0, 1.0, 1.4, 3.0, 1.0]]))
    # macro: 1 <= 2 joins; 1.4 <= mean 1.5 joins; 3 > 1.47 starts; 1 <= 3 joins
    assert lengths(Perplexity("macro"), given) == [[3, 2]]
    # prefix means 2, 1.5, 1.467, 1.85, 1.68: only the fourth rises
    assert lengths(Perplexity("prefix"), given) == [[3, 2]]
    # listing: 1.4 > 1 and 3 > 1.4 start
    assert lengths(Perplexity("token"), given) == [[2, 1, 2]]


def test_perplexity_in_blocks_equals_in_one(monkeypatch):
    torch.manual_seed(0)
    given = responses(300, 200, 300, ref_logprobs=-torch.rand(3, 300).cumsum(1).sin().abs())
    whole = Perplexity("macro")(given)
    rows = [
        perplexity_starts((-given.ref_logprobs[i, : given.mask[i].sum()]).tolist(), "macro", None)
        for i in range(3)
    ]
    for i, row in enumerate(rows):
        assert whole[i, : len(row)].tolist() == row


def test_perplexity_without_reference_says_so():
    with pytest.raises(ValueError, match=r"needs Responses\.ref_logprobs"):
        Perplexity()(responses(3))


trees = st.recursive(
    st.none(), lambda children: st.lists(children, min_size=1, max_size=5), max_leaves=30
)


def number_leaves(tree, start: int = 0):
    if tree is None:
        return start, start + 1
    children = []
    for child in tree:
        numbered, start = number_leaves(child, start)
        children.append(numbered)
    return children, start


@given(trees, st.integers(1, 9), st.booleans())
def test_constituents_walk_the_tree_depth_first(tree, cutoff, inclusive):
    tree, size = number_leaves([tree])
    given = responses(size, width=size + 2, spans=[tree_spans(tree)])
    got = Constituents(cutoff, inclusive)(given)[0, :size].tolist()
    assert got == constituent_starts(tree, cutoff, inclusive)


def test_constituents_by_hand():
    # (the fox) (ran (into (the wood))) . with cutoff 4: "the fox", "ran", ... see below
    spans = [[(0, 7), (0, 2), (2, 6), (3, 6), (4, 6), (6, 7)]]
    given = responses(7, spans=spans)
    # (2, 6) has 4 tokens, not fewer than 4: "ran" is single and joins, (3, 6) is one, "." joins
    assert lengths(Constituents(4), given) == [[3, 4]]
    assert lengths(Constituents(4, inclusive=True), given) == [[2, 5]]
    assert lengths(Constituents(4, max_length=2), given) == [[2, 1, 2, 2]]


def test_constituents_without_a_parse_are_single_tokens():
    given = responses(3, 3, spans=pack_spans([[], [(0, 3)]]))
    assert lengths(Constituents(5), given) == [[1, 1, 1], [3]]


def test_constituents_refuse_nonsense():
    with pytest.raises(ValueError, match="cutoff must be at least 1"):
        Constituents(0)
    with pytest.raises(ValueError, match=r"needs Responses\.spans"):
        Constituents()(responses(3))
    with pytest.raises(ValueError, match=r"spans must be \[B, S, 2\]"):
        responses(3, spans=torch.zeros(2, 1, 2))
    with pytest.raises(ValueError, match="max_length"):
        Constituents(max_length=0)


def test_validate_names_rows_whose_spans_cross_or_leave_the_row():
    fine = [(0, 4), (0, 2), (2, 4), (2, 4), (0, 0)]
    assert responses(4, 4, spans=[fine, []]).validate()
    with pytest.raises(ValueError, match=r"Spans must nest.*rows \[1\]"):
        responses(4, 4, spans=[fine, [(0, 3), (1, 4)]]).validate()
    with pytest.raises(ValueError, match=r"within the tokens.*rows \[0\]"):
        responses(4, spans=[[(0, 5)]]).validate()
    with pytest.raises(ValueError, match=r"within the tokens.*rows \[0\]"):
        responses(4, spans=[[(3, 1)]]).validate()


#          0: "The" 1: " f" 2: "ox" 3: " ran" 4: "." 5: " It" 6: "\n" 7: " " 8: "So" 9: "3" 10: "5"
#          11: '"' 12: ".\n\n"
TEXTS = ["The", " f", "ox", " ran", ".", " It", "\n", " ", "So", " 3", "5", '"', ".\n\n"]
VOCABULARY = Vocabulary(
    begins_word=torch.tensor([t[0] in " \n" for t in TEXTS]),
    is_space=torch.tensor([t.isspace() for t in TEXTS]),
    ends_sentence=torch.tensor([t.strip() == "." for t in TEXTS]),
    has_newline=torch.tensor(["\n" in t for t in TEXTS]),
    is_closing=torch.tensor([t == '"' for t in TEXTS]),
)


def split(rule, *tokens: int) -> list[str]:
    given = Responses(
        torch.tensor([tokens]), torch.ones(1, len(tokens)).bool(), vocabulary=VOCABULARY
    )
    starts = segment(rule, given).validate().starts[0]
    pieces: list[str] = []
    for token, start in zip(tokens, starts):
        if start:
            pieces.append("")
        pieces[-1] += TEXTS[token]
    return pieces


def test_words_undo_sub_words():
    assert split(Words(), 0, 1, 2, 3, 4, 5, 6, 8) == ["The", " fox", " ran.", " It", "\nSo"]
    assert split(Words(), 0, 12, 8, 3) == ["The.\n\n", "So", " ran"]
    assert split(Words(max_length=1), 0, 1, 2) == ["The", " f", "ox"]


def test_sentences_end_at_stops_and_lines():
    assert split(Sentences(), 0, 1, 2, 4, 5, 3, 4, 6, 6, 8, 3) == [
        "The fox.",
        " It ran.\n\n",
        "So ran",
    ]
    assert split(Sentences(), 5, 9, 4, 10, 4) == [" It 3.5."]
    assert split(Sentences(), 5, 4, 11, 3, 12, 8) == [' It."', " ran.\n\n", "So"]


def test_lines_end_at_line_breaks_only():
    assert split(Lines(), 0, 1, 2, 4, 5, 3, 4, 6, 6, 8, 3) == ["The fox. It ran.\n\n", "So ran"]
    assert split(Lines(), 5, 12, 8, 6, 6) == [" It.\n\n", "So\n\n"]
    assert split(Lines(), 6, 8, 7, 6, 5) == ["\n", "So \n", " It"]
    assert split(Lines(), 8, 6, 12, 5) == ["So\n", ".\n\n", " It"]
    assert split(Lines(max_length=2), 0, 1, 2, 6, 8) == ["The f", "ox\n", "So"]


@given(st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=30))
def test_lines_are_those_of_the_text(tokens):
    text = "".join(TEXTS[token] for token in tokens)
    pieces = split(Lines(), *tokens)
    assert "".join(pieces) == text
    # One line a piece, with the blank lines after it; the first may be blank lines alone.
    body = [piece.rstrip("\n") for piece in pieces]
    assert all("\n" not in line for line in body)
    assert [line for line in body if line] == [line for line in text.split("\n") if line]


def test_words_and_lines_need_a_vocabulary():
    with pytest.raises(ValueError, match=r"Lines needs .*vocabulary\(tokenizer\)"):
        Lines()(responses(3))
    with pytest.raises(ValueError, match=r"Words needs .*vocabulary\(tokenizer\)"):
        Words()(responses(3))


def test_a_rule_of_ones_own_in_ten_lines():
    @dataclass(frozen=True)
    class Surprise:
        nats: float = 3.0

        def __call__(self, responses: Responses) -> torch.Tensor:
            starts = -responses.ref_logprobs > self.nats
            starts[:, 0] = True
            return starts

    given = responses(4, ref_logprobs=-torch.tensor([[1.0, 5.0, 1.0, 4.0]]))
    assert lengths(Surprise(), given) == [[1, 2, 1]]


def test_a_rule_that_breaks_the_contract_is_told_how():
    given = responses(4)
    with pytest.raises(ValueError, match="bool tensor"):
        segment(lambda r: r.tokens, given)
    with pytest.raises(ValueError, match="shape of the mask"):
        segment(lambda r: r.mask[:, :2], given)
    with pytest.raises(ValueError, match="first token"):
        Segments.from_starts(~given.mask, given.mask).validate()


def test_padding_changes_no_rule():
    torch.manual_seed(1)
    logprobs = -torch.rand(2, 9)
    spans = [[(0, 3), (3, 9), (5, 9)], [(0, 9), (0, 4)]]
    seeds = torch.tensor([1, 2])
    tight = responses(9, 9, ref_logprobs=logprobs, spans=spans, seeds=seeds)
    loose = responses(
        9,
        9,
        width=14,
        ref_logprobs=torch.nn.functional.pad(logprobs, (0, 5), value=math.nan),
        spans=spans,
        seeds=seeds,
    )
    rules = [NGram(4), RandomNGram(), Constituents(4), Constituents(4, max_length=2)]
    rules += [Perplexity(kind) for kind in ("macro", "prefix", "token")]
    for rule in rules:
        assert torch.equal(rule(tight), rule(loose)[:, :9]), rule


def test_entropy_by_hand():
    entropy = torch.tensor([[0.1, 2.0, 0.5, 1.5, 0.2, 0.9], [3.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    given = responses(6, 2, entropy=entropy)
    # a third of six tokens are two: the second and the fourth; of two tokens it is one, the first
    assert lengths(Entropy(quantile=2 / 3), given) == [[1, 2, 3], [2]]
    assert lengths(Entropy(threshold=0.8), given) == [[1, 2, 2, 1], [2]]
    assert lengths(Entropy(threshold=9.0, max_length=4), given) == [[4, 2], [2]]


def test_value_change_by_hand():
    values = torch.tensor([[0.5, 0.5, 0.9, 0.8, 0.2, 0.2], [0.0, 0.7, 9.0, 9.0, 9.0, 9.0]])
    given = responses(6, 2, values=values)
    # changes 0, .4, .1, .6, 0: the two largest come after the second and the fourth token
    assert lengths(ValueChange(quantile=0.6), given) == [[2, 2, 2], [2]]
    assert lengths(ValueChange(threshold=0.5), given) == [[4, 2], [1, 1]]
    assert lengths(ValueChange(threshold=9.0, max_length=5), given) == [[5, 1], [2]]


@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=30, unique=True),
    st.floats(0.0, 0.99),
    st.one_of(st.none(), st.floats(0, 5)),
)
def test_entropy_and_value_change_cut_at_the_highest(x, quantile, threshold):
    quantile = round(quantile, 2) + 1e-4  # where rounding is not a tie
    wide = torch.tensor([[*x, math.nan]], dtype=torch.float64)
    given = responses(len(x), width=len(x) + 1, entropy=wide, values=wide)
    starts = Entropy(quantile, threshold)(given)[0, : len(x)]
    assert starts.tolist() == peak_starts(x, 0, quantile, threshold)
    change = [0.0, *(abs(b - a) for a, b in itertools.pairwise(x))]
    starts = ValueChange(quantile, threshold)(given)[0, : len(x)]
    assert starts.tolist() == peak_starts(change, 1, quantile, threshold)


@pytest.mark.parametrize("rule", [Entropy, ValueChange])
def test_peaks_are_known_early_by_threshold_alone(rule):
    assert rule().looks_at == "response"
    assert rule(threshold=1.0).looks_at == "prefix"
    with pytest.raises(ValueError, match="quantile must be at least 0 and below 1"):
        rule(quantile=1.0)
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        rule(max_length=0)
    with pytest.raises(ValueError, match=f"{rule.__name__} needs Responses"):
        rule()(responses(3))


FEATURES = tuple(asdict(Learned()))[3:-1]


def with_features(sizes: list[int], width: int, seed: int) -> Responses:
    """Rows of random numbers and tokens of six kinds, NaN at padding."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.tensor(sizes)[:, None]
    drawn = torch.zeros(4, len(sizes), width, dtype=torch.float64)
    tokens = torch.full(mask.shape, -1)
    for row, size in enumerate(sizes):  # row by row, so that the width does not matter
        drawn[:, row, :size] = torch.randn(4, size, generator=generator, dtype=torch.float64)
        tokens[row, :size] = torch.randint(6, (size,), generator=generator)
    entropy, values, logprobs, ref_logprobs = torch.where(mask, drawn, math.nan)
    kinds = torch.eye(6).bool()
    return Responses(
        tokens,
        mask,
        ref_logprobs=ref_logprobs,
        vocabulary=Vocabulary(kinds[0], kinds[1], kinds[2], kinds[3] | kinds[2], kinds[4]),
        logprobs=logprobs,
        entropy=entropy,
        values=values,
    )


def head_by_loop(rule: Learned, given: Responses, row: int) -> list[bool]:
    size = int(given.mask[row].sum())
    values, kinds = given.values[row].tolist(), given.tokens[row].tolist()
    score = [0.0] * size
    for name in FEATURES:
        x = [0.0] * size
        for t in range(1, size):
            x[t] = {
                "entropy": float(given.entropy[row, t]),
                "surprise": -float(given.logprobs[row, t]),
                "ref_surprise": -float(given.ref_logprobs[row, t]),
                "value_change": abs(values[t] - values[t - 1]),
                "value_fall": values[t - 1] - values[t],
                "word": float(kinds[t] == 0),
                "line": float(kinds[t - 1] in (2, 3)),
                "sentence": float(kinds[t - 1] == 2),
            }[name]
        spread = statistics.pstdev(x[1:]) if size > 1 else 0.0
        for t in range(1, size):
            mean = statistics.fmean(x[1:])
            score[t] += getattr(rule, name) * ((x[t] - mean) / spread if spread else 0.0)
    return peak_starts(score, 1, rule.quantile, rule.threshold)


WEIGHTS = st.lists(st.floats(-2, 2), min_size=len(FEATURES), max_size=len(FEATURES))


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=3),
    st.integers(0, 2**31),
    WEIGHTS,
    st.floats(0.0, 0.99),
    st.one_of(st.none(), st.floats(-2, 2)),
)
def test_learned_cuts_are_where_the_weighted_sum_is_high(sizes, seed, weights, quantile, threshold):
    weights[:3] = [x + 0.1 if x >= 0 else x - 0.1 for x in weights[:3]]  # where nothing ties
    rule = Learned(round(quantile, 2) + 1e-4, threshold, **dict(zip(FEATURES, weights)))
    given = with_features(sizes, 21, seed)
    for row, size in enumerate(sizes):
        assert rule(given)[row, :size].tolist() == head_by_loop(rule, given, row)


@given(st.lists(st.integers(0, 20), min_size=2, max_size=3), st.integers(0, 2**31), WEIGHTS)
def test_padding_and_other_rows_change_no_learned_cut(sizes, seed, weights):
    rule = Learned(0.7, None, 6, **dict(zip(FEATURES, weights)))
    together, wide = (with_features(sizes, width, seed) for width in (21, 30))
    starts = segment(rule, together).starts
    assert torch.equal(segment(rule, wide).starts[:, :21], starts)
    for row, size in enumerate(sizes):
        fields = ("tokens", "mask", "ref_logprobs", "logprobs", "entropy", "values")
        of_row = {name: getattr(together, name)[row : row + 1, :size] for name in fields}
        alone = segment(rule, Responses(**of_row, vocabulary=together.vocabulary))
        assert torch.equal(alone.starts[0], starts[row, :size])


def test_learned_cuts_are_of_one_tokenizer_and_finite():
    given = with_features([5], 5, 0)
    assert Learned(line=1.0, vocabulary_size=6)(given)[0, 0]
    with pytest.raises(ValueError, match="with a tokenizer of 7 tokens, and this one has 6"):
        Learned(line=1.0, vocabulary_size=7)(given)
    with pytest.raises(ValueError, match="line must be a finite number; got nan"):
        Learned(line=math.nan)
    with pytest.raises(ValueError, match=r"Learned needs Responses.values"):
        Learned(line=1.0)(replace(given, values=None))
    assert Learned(threshold=1.0).looks_at == "response"


def test_surprise_at_every_second_unlikely_token():
    logprobs = torch.tensor([[0.1, 0.9, 0.1, 0.1, 0.9, 0.1, 0.9]]).log()
    assert lengths(Surprise(0.2), responses(7, logprobs=logprobs)) == [[2, 1, 2, 2]]
    assert lengths(Surprise(0.2, every=2), responses(7, logprobs=logprobs)) == [[2, 3, 2]]
    with pytest.raises(ValueError, match="every must be at least 1"):
        Surprise(every=0)


def test_boundaries_with_the_highest_scores_are_kept():
    mask = torch.tensor([[True] * 6, [True, True, False, True, True, True]])
    starts = torch.tensor([[True, False, True, True, False, True]] * 2)
    scores = torch.tensor([[9.0, 8.0, 1.0, 3.0, 7.0, 2.0], [9.0, 8.0, 9.0, 0.0, 7.0, 2.0]])
    thin = thin_out(Segments.from_starts(starts, mask), scores, 1).validate()
    # the fourth token; in the second row the last one, for after the hole one starts anyway
    assert thin.starts.int().tolist() == [[1, 0, 0, 1, 0, 0], [1, 0, 0, 1, 0, 1]]
    everything = thin_out(Segments.from_starts(starts, mask), scores, 9)
    assert torch.equal(everything.starts, Segments.from_starts(starts, mask).starts)
    with pytest.raises(ValueError, match="count must be at least 1"):
        thin_out(thin, scores, 0)
