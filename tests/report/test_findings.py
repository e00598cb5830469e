import json
import math

import pytest

from marlhf.report.findings import critics, reward_health, shows, shows_not, verdict
from marlhf.report.groups import group_runs
from marlhf.report.measures import final_score, length_effect, score_at_kl
from marlhf.report.write import report_html
from marlhf.runs.read import find_runs, read_run


def _evals(scores, kls=None, golds=None, lengths=None):
    rows = []
    for i, score in enumerate(scores):
        row = {"kind": "eval", "step": 10 * i, "seconds": 5.0 * i, "eval/score": score}
        for key, values in (("kl", kls), ("gold", golds), ("length", lengths)):
            if values:
                row[f"eval/{key}"] = values[i]
        rows.append(row)
    return rows


@pytest.fixture
def group(make_run):
    """`group(name, scores, ...)`: a group of one run with these held-out means."""

    def make(name, *args, n=1, **more):
        config = {"segmenter": {"type": "ngram", "n": n}, "output_dir": name, "seed": 1}
        run = read_run(make_run(name, config=config, metrics=_evals(*args, **more)))
        return group_runs([run])[0]

    return make


def test_score_at_kl_is_read_off_the_line(group):
    a = group("a", [0.0, 1.0, 3.0], kls=[0.0, 2.0, 4.0])
    assert score_at_kl(a, 3.0) == 2.0  # half way from 1 to 3
    assert math.isnan(score_at_kl(a, 9.0))


def _by_prompt(make_run, scores, golds, name="a"):
    """A group of one run with these means over four prompts that differ by 0.1."""
    spread = (-0.15, -0.05, 0.05, 0.15)
    evaluations = [
        {
            "step": 10 * i,
            "scores": [score + x for x in spread],
            "gold": [gold + x * i for x in spread],
        }
        for i, (score, gold) in enumerate(zip(scores, golds))
    ]
    (group,) = group_runs([read_run(make_run(name, evaluations=evaluations))])
    return group


def test_over_optimisation_is_named(make_run):
    (_, gold, *_) = shows([_by_prompt(make_run, [0.0, 1.0, 2.0], [0.0, 0.0, -0.9])])
    assert '<span class="warn">Over-optimisation:</span>' in gold
    assert "fell by 0.90 [" in gold


def test_gold_that_peaked_earlier_is_named(make_run):
    (_, gold, *_) = shows([_by_prompt(make_run, [0.0, 1.0, 2.0], [0.0, 0.9, 0.4])])
    assert '<span class="warn">Over-optimisation sets in:</span>' in gold
    assert "peaked at 0.90 in step 10 and ended 0.50 [0.29, 0.71] lower" in gold


def test_there_is_no_alarm_without_an_interval(group):
    """Only means were recorded: what happened is said, but not that it is more than chance."""
    (_, gold, *_) = shows([group("a", [0.0, 1.0, 2.0], golds=[0.0, 0.9, -0.5])])
    assert "warn" not in gold
    assert "changed by \u22120.50" in gold
    assert "peaked at 0.90 in step 10 and ended 1.40 lower; there is no interval" in gold


def test_there_is_no_alarm_for_a_fall_whose_interval_includes_zero(make_run):
    (_, gold, *_) = shows([_by_prompt(make_run, [0.0, 1.0, 2.0], [0.0, 0.9, 0.85])])
    assert "warn" not in gold
    assert "ended 0.05 [\u22120.16, 0.26] lower; the interval includes zero" in gold


def test_a_little_less_gold_than_at_the_start_is_no_peak(make_run):
    evaluations = [
        {"step": step, "scores": [0.0 + step, 1.0 + step], "gold": gold}
        for step, gold in ((0, [1.0, -1.0]), (9, [-1.0, 0.9]))
    ]
    (group,) = group_runs([read_run(make_run("a", evaluations=evaluations))])
    said = " ".join(shows([group]))
    assert "Over-optimisation" not in said
    assert "it includes zero" in said


def test_gold_that_moved_with_the_score_is_said(group):
    (_, gold, *_) = shows([group("a", [0.0, 1.0], golds=[0.0, 0.5])])
    assert "score of a changed by +0.50" in gold


def test_more_kl_is_named_with_the_score_at_the_same_kl(group):
    base = group("base", [0.0, 1.0], kls=[0.0, 4.0])
    macro = group("macro", [0.0, 2.0], kls=[0.0, 8.0], n=5)
    said = shows([base, macro])[-1]
    assert "100% more KL" in said
    assert "may come from that" in said
    assert "KL 4.00 they score 1.00 and 1.00" in said


def test_less_kl_is_not_held_against_a_run(group):
    base = group("base", [0.0, 1.0], kls=[0.0, 8.0])
    macro = group("macro", [0.0, 2.0], kls=[0.0, 4.0], n=5)
    said = shows([base, macro])[-1]
    assert "50% less KL" in said
    assert "come from that" not in said
    assert "KL 4.00 they score 2.00 and 0.50" in said


def test_growing_responses_are_named(group):
    said = " ".join(shows([group("a", [0.0, 1.0], lengths=[20.0, 60.0])]))
    assert "grew from 20.0 to 60.0 tokens" in said


@pytest.mark.parametrize(
    ("key", "values", "sign"),
    [
        ("length", (60.0, 20.0), "responses shrank from 60.0 to 20.0 tokens"),
        ("repetition", (0.1, 0.3), "repetition rose from 10% to 30%"),
        ("ended", (0.9, 0.5), "end with EOS fell to 50%"),
        ("length", (20.0, 22.0), ""),
        ("repetition", (0.3, 0.3), ""),
        ("ended", (0.5, 0.5), ""),
    ],
)
def test_every_run_that_deserves_it_is_looked_at_twice(make_run, key, values, sign):
    groups = []
    for name in ("a", "b"):
        rows = _evals([0.0, 1.0])
        for row, value in zip(rows, values):
            row[f"eval/{key}"] = value
        run = make_run(name, config={"output_dir": name, "sigma": name}, metrics=rows)
        groups += group_runs([read_run(run)])
    flagged = [s for s in shows(groups) if '<span class="warn">Look twice</span>' in s]
    assert len(flagged) == (2 if sign else 0)
    assert all(sign in sentence for sentence in flagged)


def test_a_change_of_length_within_its_interval_is_no_sign(make_run):
    lengths = [[10.0, 30.0, 20.0, 20.0], [60.0, 12.0, 12.0, 20.0]]
    evaluations = [
        {"step": 10 * i, "scores": [0.0] * 4, "length": each} for i, each in enumerate(lengths)
    ]
    (group,) = group_runs([read_run(make_run("a", evaluations=evaluations))])
    assert "Look twice" not in " ".join(shows([group]))


def test_groups_that_mostly_score_alike_are_named(make_run):
    for share, named in ((0.75, True), (0.25, False)):
        train = [{"kind": "train", "step": 1, "rl/zero_std_groups": share}]
        run = make_run(f"a{share}", stage="grpo", metrics=[*train, *_evals([0.0, 1.0])])
        said = " ".join(shows(group_runs([read_run(run)])))
        assert ("to 75% of the prompts had the same score" in said) is named


@pytest.mark.parametrize(
    ("accuracy", "pairs", "said"),
    [
        (0.8, 400, "ranks 80% of 400 held-out pairs correctly."),
        (0.8, None, "ranks 80% of held-out pairs correctly."),
        (0.5, 400, "correctly: hardly better than chance."),
        (0.8, 20, "correctly: too few pairs to tell."),
        (0.5, 20, "hardly better than chance and too few pairs to tell."),
    ],
)
def test_the_health_of_the_reward_model_is_told(make_run, accuracy, pairs, said):
    metrics = [{"kind": "eval", "step": 2, "seconds": 1.0, "eval/accuracy": accuracy}]
    folder = make_run("rm", stage="reward", metrics=metrics)
    if pairs:
        about = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(about | {"rows": {"held-out": pairs}}))
    (line,) = reward_health(group_runs([read_run(folder)]))
    assert said in line
    assert ("warn" in line) is (accuracy < 0.55 or pairs == 20)
    assert reward_health(group_runs([read_run(make_run("p", metrics=_evals([0.0])))])) == []
    assert line in report_html([read_run(folder)])


def test_one_seed_is_no_evidence(group):
    said = " ".join(shows_not([group("a", [0.0, 1.0])], []))
    assert "one seed is no evidence" in said
    assert "No true score is known" in said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reward_model": "rm"}, "a reward model's, learnt from preferences;"),
        ({"reward_funcs": ["a:b"]}, "what functions give (<code>a:b</code>);"),
        ({"environment": "guess"}, "The score is what the environment gives (<code>guess</code>);"),
        (
            {"reward_model": "rm", "reward_funcs": ["a:b"]},
            "learnt from preferences, and what functions give (<code>a:b</code>);",
        ),
    ],
)
def test_it_is_said_who_scored(group, settings, words):
    runs = group("a", [0.0, 1.0])
    runs.runs[0].config.update(settings)
    assert words in " ".join(shows_not([runs], []))


def test_several_seeds_are_counted_and_compared(demo):
    runs = find_runs([demo])
    policies = [g for g in group_runs(runs) if g.runs[0].is_policy]
    said = " ".join(shows_not(policies, runs))
    assert "at least 2 seeds" in said
    assert "do not overlap" in said
    assert "differ in more than" not in said


def test_other_settings_that_differ_are_named(make_run):
    runs = [
        read_run(make_run(f"r{n}", config={"segmenter": {"type": "ngram", "n": n}, "kl_coef": kl}))
        for n, kl in ((1, 0.05), (5, 0.01))
    ]
    assert "<code>kl_coef</code>" in " ".join(shows_not(group_runs(runs), runs))


def test_a_stopped_run_is_named(make_run):
    run = read_run(make_run("a", status="failed", note="out of <memory>", metrics=_evals([0.0])))
    said = " ".join(shows_not([], [run]))
    assert "failed at step 0" in said
    assert "out of &lt;memory&gt;" in said


def test_the_interval_is_over_prompts(make_run):
    evaluation = {"step": 10, "scores": [1.0, 2.0, 3.0]}
    (group,) = group_runs([read_run(make_run("a", evaluations=[evaluation]))])
    assert final_score(group) == pytest.approx((2.0, -0.4841, 4.4841, 3), abs=1e-4)
    assert "2.00 [\u22120.48, 4.48]" in verdict([group], [])


def test_the_verdict_never_gives_a_score_without_kl_and_length(group):
    said = verdict([group("a", [0.0, 1.0], kls=[0.0, 4.0], lengths=[20.0, 21.0])], [])
    assert "1.00</b> (KL 4.00, 21.0 tokens)" in said


def test_what_critics_explain_stands_among_the_first_lines(make_run):
    def critic(name, *thirds):
        metrics = [
            {"kind": "train", "step": step, "seconds": 1.0 * step}
            | {f"rl/explained_variance_{i}": x for i, x in enumerate(thirds, 1)}
            for step in range(1, 31)
        ]
        config = {"output_dir": name, "seed": 1}
        return group_runs([read_run(make_run(name, config=config, metrics=metrics))])[0]

    knows, blind = critic("knows", 0.0, 0.27, 0.52), critic("blind", -0.02, 0.0, 0.01)
    (first,) = critics([knows])
    assert "explained 0.00 / 0.27 / 0.52 of the returns in the first / second / last" in first
    assert "warn" not in first
    (second,) = critics([blind])
    assert '<span class="warn">A critic that explains nothing:</span>' in second
    assert "critic_pretraining" in second
    assert first in shows([knows, blind])
    assert second in shows([knows, blind])


def test_runs_without_a_critic_say_nothing_of_it(group):
    assert critics([group("a", [0.0, 1.0])]) == []


def test_what_length_explains_of_a_gain(make_run):
    """Two scores a token within each evaluation, and three tokens more: 6 of a gain of 8."""
    evaluations = [
        {"step": 0, "scores": [0.0, 4.0], "length": [10, 12]},
        {"step": 9, "scores": [8.0, 12.0], "length": [13, 15]},
    ]
    (group,) = group_runs([read_run(make_run("a", evaluations=evaluations))])
    assert length_effect(group) == pytest.approx(6.0)
    (said,) = [line for line in shows([group]) if "ength explains" in line]
    assert "length explains 75% of the gain in score of" in said
    assert said.endswith("it would score 4.00.")  # 10 - 6
    assert "Longer rather than better" in said


def test_a_reward_model_that_goes_by_length_is_named(make_run):
    last = {"eval/accuracy": 0.8, "eval/length_correlation": 0.4, "eval/accuracy_short": 0.3}
    metrics = [{"kind": "eval", "step": 9, "seconds": 1.0, **last}]
    folder = make_run("rm", stage="reward", metrics=metrics)
    (line,) = reward_health(group_runs([read_run(folder)]))
    assert "correctly, 30% where the shorter one won: scores follow length" in line
    assert "length_head" in line
