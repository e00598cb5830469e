"""Learned cuts: found where planted, no better than fixed ones on noise, and trained by."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from marlhf.cli import app
from marlhf.config.build import build_segmenter
from marlhf.config.candidates import Candidate
from marlhf.core import Learned, Responses, Vocabulary, segment
from marlhf.credit import cuts as learning
from marlhf.credit import measure as measuring
from marlhf.credit.cuts import learn_cuts, verdict
from marlhf.credit.measure import measure
from marlhf.credit.state import CreditError, open_state
from marlhf.errors import MarlhfError
from marlhf.runtime.stage import Stopped
from marlhf.train import ppo
from marlhf.train.credit_choice import unbiased
from marlhf.train.ppo import assign_credit
from marlhf.train.recipe import load_stage
from small_runs import everything, read_lines, small_ppo, stop_after, weights

ROWS, TOKENS, NUMBERS = 32, 40, 32
LINE = 1
"""The token that ends a line."""
LINES = 4
"""Of them in a response: as many as heads cut at."""


@pytest.fixture(scope="module")
def run(tmp_path_factory, parents):
    folder = tmp_path_factory.mktemp("cuts") / "run"
    ppo.train(small_ppo(parents, folder, num_steps=1, save_every=0, lam=0.5, sigma="start"))
    return folder


def simulated(critic: bool, vocabulary: Vocabulary):
    """`batch_gradients` of a policy whose tokens each earn what their score says, and more by luck.

    All reward comes at the end. The critic sees what was earned so far at the start of each line,
    and guesses wildly elsewhere; or it is not used, and all places are alike.
    """

    def gradients(state, options, numbers, seed):
        of_batches = []
        for number in numbers:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)

            def normal(*shape, generator=generator):
                return torch.randn(*shape, generator=generator)

            scores = normal(ROWS, TOKENS, NUMBERS)
            earned = scores.mean(dim=2) * 4 + normal(ROWS, TOKENS) / 2
            rewards = torch.zeros(ROWS, TOKENS)
            rewards[:, -1] = earned.sum(dim=1)
            places = torch.rand(ROWS, TOKENS - 1, generator=generator).argsort(dim=1)
            lines = torch.nn.functional.pad(places < LINES, (0, 1))
            others = torch.randint(2, 5, (ROWS, TOKENS), generator=generator)
            tokens = torch.where(lines, LINE, others)
            known = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=LINE) == LINE
            so_far = earned.cumsum(dim=1) - earned
            values = torch.where(known, so_far, so_far + 8 * normal(ROWS, TOKENS))
            responses = Responses(
                tokens,
                torch.ones(ROWS, TOKENS).bool(),
                vocabulary=vocabulary,
                ref_logprobs=normal(ROWS, TOKENS),
                logprobs=normal(ROWS, TOKENS),
                entropy=normal(ROWS, TOKENS),
                values=values,
            )
            by_way = []
            for config in [*(option.config for option in options), unbiased(state.ppo)]:
                segments = segment(config.segmenter, responses)
                seen = values if critic and config.lam < 1 else torch.zeros(ROWS, TOKENS)
                advantages = assign_credit(rewards, seen, segments, config).advantages
                by_way.append((advantages[:, :, None] * scores).sum(dim=(0, 1)))
            of_batches.append(torch.stack(by_way))
        line = {"explained": [0.0] * 3, "reaches": [1.0] * (len(options) + 1)}
        return torch.stack(of_batches, dim=1).double(), [line] * len(numbers)

    return gradients


@pytest.fixture
def learn(run, monkeypatch):
    """What is learned in a simulated world, and what the table of other batches says of it."""
    monkeypatch.setattr(learning, "POOL", 48)
    state = open_state(run, device="cpu")
    table = [torch.zeros(len(state.models.vocabulary.begins_word)).bool() for _ in range(5)]
    table[0][2] = table[2][3] = table[3][LINE] = True  # words, sentences, lines

    def learn(critic: bool, seed: int):
        gradients = simulated(critic, Vocabulary(*table))
        for module in (learning, measuring):
            monkeypatch.setattr(module, "batch_gradients", gradients)
        cuts = learn_cuts(state, batches=12, seed=seed)
        more = [cuts.way, *cuts.twins]
        return cuts, measure(state, ("token lam=1",), batches=12, seed=seed, more=more)

    return learn


def test_a_planted_rule_is_found_and_beats_fixed_ones(learn):
    cuts, measured = learn(critic=True, seed=0)
    rule = cuts.way.config.segmenter
    others = [abs(x) for x in (rule.entropy, rule.surprise, rule.ref_surprise, rule.word)]
    assert rule.line > 0.8 > 2 * max(others)
    agreement = measured.agreement
    for twin in range(2, 2 + len(cuts.twins)):
        ahead = agreement.cosine[1] - agreement.cosine[twin]
        assert ahead > 3 * agreement.difference_error(1, twin)
    assert "they are better (+" in verdict(cuts, measured)


def test_noise_teaches_nothing_that_lasts(learn):
    """Where no value is used all places are alike, so what the best of many is ahead by is luck."""
    for seed in range(2):
        cuts, measured = learn(critic=False, seed=seed)
        assert "they are no better" in verdict(cuts, measured)
        assert cuts.cosine > measured.agreement.cosine[1] + 0.02  # where it was chosen


def test_nothing_is_learned_from_the_batches_of_the_table(run, monkeypatch):
    asked = []

    def stop(*given):
        asked.append(given[-1])
        pytest.fail("sampled")

    monkeypatch.setattr(measuring, "_batch", stop)
    state = open_state(run, device="cpu")
    for measure_some in (learn_cuts, measure):
        with pytest.raises(pytest.fail.Exception):
            measure_some(state, batches=3, seed=8)
    assert asked == [learning.FIRST, 0]


def test_the_command_learns_cuts_that_a_recipe_takes(run, parents, tmp_path, monkeypatch):
    """The weights go into the run's config: it resumes identically without the file."""
    words = ["--batches", "3", "--learn-cuts", "--device", "cpu", "--rule"]
    real, asked = measuring.gradient_agreement, []

    def known(*given, **options):  # three batches of eight responses never tell the gradient
        asked.append(given[0].shape)
        found = real(*given, **options)
        cosine = torch.linspace(0.1, 0.3, len(found.cosine))
        return found._replace(cosine=cosine, known=torch.tensor(True))

    for module in (learning, measuring):
        monkeypatch.setattr(module, "gradient_agreement", known)
    out = CliRunner().invoke(app, ["credit", str(run), *words, "token lam=1"])
    assert out.exit_code == 0, out.output
    assert [shape[0] for shape in asked] == [learning.POOL, 6]
    assert "Learned cuts agree by 0.30" in out.output
    found = json.loads((run / "credit.json").read_text())
    assert found["learned_cuts"] in out.output
    assert "learned cuts lam=0.5" in {row["name"] for row in found["rows"]}
    saved = json.loads((run / "cuts.json").read_text())
    assert saved["vocabulary_size"] == len(open_state(run, device="cpu").models.vocabulary.is_space)

    recipe = yaml.safe_load((run / "config.yaml").read_text())
    recipe |= {"segmenter": {"type": "learned", "path": str(run / "cuts.json")}, "num_steps": 2}
    recipe |= {"save_every": 1}
    file = tmp_path / "recipe.yaml"

    def config(name):
        file.write_text(yaml.safe_dump(recipe | {"output_dir": str(tmp_path / name)}))
        return load_stage(file, "ppo").config

    whole, parts = config("whole"), config("parts")
    assert whole.segmenter == Learned(**saved)
    ppo.train(whole)
    lines = [line for line in read_lines(whole.output_dir) if line["kind"] == "train"]
    assert all(1 < line["rl/macro_length"] < line["rl/length"] for line in lines)
    with monkeypatch.context() as patched:
        stop_after(1, patched, ppo)
        with pytest.raises(Stopped):
            ppo.train(parts)
    (run / "cuts.json").unlink()
    ppo.train(load_stage(Path(parts.output_dir) / "config.yaml", "ppo").config)
    assert everything(whole.output_dir) == everything(parts.output_dir)
    assert weights(whole.output_dir) == weights(parts.output_dir)
    assert measure(open_state(Path(whole.output_dir), device="cpu"), batches=3).options[0].name == (
        "learned lam=0.5"
    )


def test_learning_resumes_where_it_was_killed(run, monkeypatch):
    state = open_state(run, device="cpu")
    with pytest.raises(CreditError, match="3 batches are too few, or too noisy, to learn cuts"):
        learn_cuts(state, batches=3, seed=5)
    monkeypatch.setattr(measuring, "_batch", lambda *_: pytest.fail("sampled again"))
    with pytest.raises(CreditError, match="Raise --batches"):
        learn_cuts(state, batches=3, seed=5)
    with pytest.raises(CreditError, match="at least 3 to learn anything; got 2"):
        learn_cuts(state, batches=2, seed=5)


def test_a_file_that_changed_is_measured_anew(run, tmp_path, monkeypatch):
    file = tmp_path / "cuts.json"
    state, real, sampled = open_state(run, device="cpu"), measuring._batch, []
    monkeypatch.setattr(measuring, "_batch", lambda *given: sampled.append(0) or real(*given))
    for weight, count in ((1.0, 3), (1.0, 3), (-1.0, 6)):
        file.write_text(json.dumps({"entropy": weight}))
        measure(state, (f"learned path={file} lam=0.5",), batches=3, seed=6)
        assert len(sampled) == count


def test_responses_too_short_to_cut_are_told(run, monkeypatch):
    def alike(state, options, numbers, seed):
        generator = torch.Generator().manual_seed(seed)
        of_any = torch.randn(1, len(numbers), NUMBERS, generator=generator)
        return of_any.repeat(len(options) + 1, 1, 1), []

    monkeypatch.setattr(learning, "batch_gradients", alike)
    with pytest.raises(CreditError, match="so short that a tenth of their tokens is none"):
        learn_cuts(open_state(run, device="cpu"), batches=3, seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "segmenter.path: there is no file .*cuts.json. `marlhf credit RUN --learn-cuts`"),
        ("{", "cuts.json does not hold learned cuts"),
        ("[1]", "cuts.json does not hold learned cuts"),
        ("{}", "cuts.json does not hold learned cuts"),
        ('{"line": "high"}', "segmenter.line: must be a number"),
        ('{"line": NaN}', "line must be a finite number; got nan"),
        ('{"lines": 1.0}', "unknown name 'lines'. Did you mean line"),
    ],
)
def test_files_that_are_refused(tmp_path, text, message):
    file = tmp_path / "cuts.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(MarlhfError, match=message):
        build_segmenter({"type": "learned", "path": str(file)})


def test_weights_can_be_given_beside_a_file_or_without(tmp_path):
    file = tmp_path / "cuts.json"
    file.write_text('{"line": 1.0, "quantile": 0.8}')
    rule = build_segmenter({"type": "learned", "path": str(file), "max_length": 9})
    assert rule == Learned(0.8, None, 9, line=1.0)
    assert Candidate.parse("learned line=1 lam=0.5").segmenter() == Learned(line=1.0)
    with pytest.raises(MarlhfError, match=r"give `path`, the cuts.json of `marlhf credit"):
        Candidate.parse("learned lam=0.5").segmenter()


def test_heads_are_the_features_alone_and_directions():
    heads = learning.heads(0, 7)
    assert heads[0] == Learned(0.9, entropy=1.0, vocabulary_size=7)
    assert heads[8] == Learned(0.9, entropy=-1.0, vocabulary_size=7)
    assert heads[6] == Learned(0.9, line=1.0, entropy=0.1, vocabulary_size=7)
    norms = [math.hypot(*(getattr(h, name) for name in learning.FEATURES)) for h in heads]
    assert norms == pytest.approx([1.0] * learning.POOL, abs=0.02)
    assert heads == learning.heads(0, 7) != learning.heads(1, 7)
