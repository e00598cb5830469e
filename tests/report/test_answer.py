"""The first lines of the page: did anything improve, who is better, by what, how sure is it."""

import json
import re

import pytest

from marlhf.report.findings import answer
from marlhf.report.groups import group_runs
from marlhf.report.write import write_report
from marlhf.runs.read import find_runs, read_run

SPREAD = (-0.3, -0.1, 0.1, 0.3)
"""How the prompts differ from one another: the same for all runs, so it cancels out."""
ENDED, NOT_ENDED = "In these runs, n5 ended", "In these runs, n5 did not end"
"""Of one seed the page only says what happened."""
NOISE = (-0.01, 0.01, 0.01, -0.01)
"""What is left of a difference, so that its interval is narrow but not empty."""


@pytest.fixture
def policy(make_run):
    """`policy(n, score, gold, kl)`: a run that started from 0 and ended at these means."""

    def make(n, score, gold=None, kl=2.0, prompts=SPREAD, **config):
        def values(end, step):
            return [step * end + x + step * n * noise for x, noise in zip(prompts, NOISE)]

        rows = [
            {"step": step, "scores": values(score, step), "kl": [step * kl] * len(prompts)}
            | ({} if gold is None else {"gold": values(gold, step)})
            for step in (0, 1)
        ]
        settings = {"segmenter": {"type": "ngram", "n": n}, **config}
        return make_run(f"n{n}", config=settings, evaluations=rows)

    return make


def lines_of(*folders):
    """Who is ahead as text, one line per sentence."""
    lines = all_lines(*folders)
    return lines[1:] if lines and lines[0].startswith("Over the model before RL") else lines


def all_lines(*folders):
    groups = group_runs([read_run(folder) for folder in folders])
    html = answer([group for group in groups if group.runs[0].is_policy])
    found = re.findall(r"<(?:p|li)[^>]*>(.*?)</(?:p|li)>", html)
    return [re.sub("<[^>]+>", "", line).replace("\u2212", "-") for line in found]


@pytest.mark.parametrize(
    ("golds", "words"),
    [
        ((0.9, 0.5), "n1 and n5 raised the true (gold) score and the learnt score"),
        (
            (-0.9, 0.0),
            "neither n1 nor n5 raised the true (gold) score; n1 and n5",
        ),
        ((-0.9, 0.5), "n5 raised the true (gold) score, n1 did not; n1 and n5 raised the learnt"),
        ((None, None), "n1 and n5 raised the learnt score."),
    ],
)
def test_the_first_line_says_whether_anything_improved(policy, golds, words):
    """Who is ahead comes second: both may be worse than the model that training began with."""
    runs = [policy(n, 1.0 + n / 10, gold=gold) for n, gold in zip((1, 5), golds)]
    assert all_lines(*runs)[0].startswith(f"Over the model before RL, {words}")


def test_nobody_improved_by_any_score(policy):
    lines = all_lines(policy(1, -1.0, gold=-1.0), policy(5, -2.0, gold=-2.0))
    neither = "neither n1 nor n5 raised the true (gold) score or the learnt score."
    assert lines[0] == f"Over the model before RL, {neither}"


def test_the_true_score_comes_first_then_equal_kl_then_the_learnt_score(policy):
    lines = lines_of(policy(1, 1.0, gold=0.9), policy(5, 2.0, gold=0.5))
    # What is left of a difference is 4 times the noise: 0.04 * 3.18 / sqrt(4 - 1) = 0.07 at most.
    assert lines[0] == f"{ENDED} worse than n1 by the true (gold) score: -0.40 [-0.47, -0.33]."
    assert lines[1].startswith("The learnt score at equal KL (2.00): better, +1.00 [")
    assert lines[2].startswith("The learnt score: better, +1.00 [")
    assert "win rate 100% (at KL 2.00 against 2.00)" in lines[2]
    assert lines[3].startswith(
        "Differences are paired by prompt, with 95% intervals over 4 prompts"
    )
    assert "One seed says nothing" in lines[3]


def test_without_a_true_score_equal_kl_comes_first(policy):
    # Twice the score for twice the KL: nothing is gained at equal KL.
    lines = lines_of(policy(1, 1.0, kl=2.0), policy(5, 2.0, kl=4.0))
    assert lines[0].startswith(
        f"{NOT_ENDED} clearly better or worse than n1 by the learnt score at"
    )
    assert "the 95% interval includes zero" in lines[0]
    assert lines[1].startswith("The learnt score: better, +1.00 [")


@pytest.mark.parametrize("scorer", [{"reward_funcs": ["mine:solved"]}, {"environment": "guess"}])
def test_what_functions_or_an_environment_give_is_not_called_learnt(policy, scorer):
    given = {**scorer, "reward_model": ""}
    lines = lines_of(policy(1, 1.0, kl=2.0, **given), policy(5, 2.0, kl=2.0, **given))
    assert lines[0].startswith(f"{ENDED} better than n1 by the score at equal KL (2.00): ")
    assert lines[1].startswith("The score: better, +1.00 [")


def test_pairing_by_prompt_takes_out_how_hard_prompts_are(policy):
    hard = [100 * x for x in SPREAD]  # prompts differ by tens, settings by 0.1
    lines = lines_of(policy(1, 1.0, kl=0.0, prompts=hard), policy(5, 1.1, kl=0.0, prompts=hard))
    assert lines[0].startswith(f"{ENDED} better than n1 by the learnt score: +0.10 [+0.03, +0.17]")


def test_other_prompts_cannot_be_paired(policy):
    lines = lines_of(policy(1, 1.0, kl=0.0), policy(5, 2.0, kl=0.0, prompts=SPREAD[:3]))
    assert lines[0].startswith(f"{ENDED} higher than n1 by the learnt score")
    assert "no interval" in lines[0]


def test_an_independent_judge_comes_before_any_learnt_score(policy):
    folder = policy(5, 2.0)
    (folder / "judged").mkdir()
    about = {"a": "n5", "b": "n1", "task": "hh", "pairs": 40, "dimensions": {}}
    shares = {"win": 0.2, "tie": 0.1, "loss": 0.7}
    for judge in ("openai:gpt", "scores:reward"):
        parts = {k: {"share": v, "low": 0.0, "high": 1.0} for k, v in shares.items()}
        file = folder / "judged" / f"{judge.partition(':')[0]}.json"
        file.write_text(json.dumps(about | {"judge": judge} | parts))
    lines = lines_of(policy(1, 1.0), folder)
    # 8 wins and 4 ties of 40 are 10 wins: 25%
    assert lines[0].startswith(
        f"{ENDED} worse than n1 by the judge openai:gpt: win rate 25% [14%, 40%]"
    )
    assert not any("scores:reward" in line for line in lines)


def test_a_reward_model_that_was_not_trained_on_is_independent(policy):
    config = {"reward_model": "runs/reward/model", "environment": "guess"}
    folders = [policy(n, 1.0, **config) for n in (1, 5)]
    for n, folder in zip((1, 5), folders):
        (folder / "evaluation").mkdir()
        rows = [
            {
                "key": str(i),
                "setting": "",
                "scores": {
                    "environment": float(n),
                    "reward": float(n),
                    "other": 0.1 * n + x + 0.001 * n * i,
                },
            }
            for i, x in enumerate(SPREAD)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "evaluation" / "t1-m8-s0.jsonl").write_text(text)
    lines = lines_of(*folders)
    assert lines[0].startswith(
        f"{ENDED} better than n1 by other, which was not trained on: +0.41 ["
    )
    assert not any(line.startswith(("Reward,", "Environment,")) for line in lines)


def test_a_single_setting_is_compared_with_the_model_before_rl(policy):
    lines = lines_of(policy(1, 1.0, gold=-0.5))
    assert lines[0].startswith(
        "In this run, n1 ended worse than the model before RL by the true (gold) score: -0.50"
    )
    assert lines[1].startswith("The learnt score: better, +1.00 [")


def test_a_run_that_was_stopped_before_it_learnt_is_not_compared(policy, make_run):
    rows = [{"step": 0, "scores": list(SPREAD), "kl": [0.0] * 4}]
    begun = make_run("n5", config={"segmenter": {"type": "ngram", "n": 5}}, evaluations=rows)
    alone = all_lines(policy(1, 0.5))
    assert all_lines(policy(1, 0.5), begun) == alone
    assert not any("n5" in line for line in alone)


def test_settings_that_were_scored_otherwise_are_not_compared(policy):
    assert lines_of(policy(1, 1.0, reward_model="a/x"), policy(5, 2.0, reward_model="b/y")) == []


def test_runs_of_two_tasks_are_compared_each_with_their_own(policy):
    first, second = {"reward_model": "a/x"}, {"reward_model": "b/y"}
    [one, _, two] = lines_of(
        policy(1, 1.0, **first),
        policy(2, 9.0, **second),
        policy(5, 2.0, **first),
        policy(7, 8.0, **second),
    )[:3]
    assert one.startswith("In these runs, n5 ended better than n1 by the learnt score")
    assert two.startswith("In these runs, n7 ended worse than n2 by the learnt score")


def test_of_many_settings_the_best_is_compared(policy):
    lines = lines_of(*(policy(n, score) for n, score in ((1, 1.0), (2, 2.0), (3, 4.0), (5, 3.0))))
    assert sum(" than n1 by " in line for line in lines) == 1
    assert lines[0].startswith("In these runs, n3 ended better than n1")


def test_a_win_rate_sets_each_seed_against_each(make_run):
    """Averaging seeds first would hide that each of them loses on half of the prompts."""
    rows = {1: [[0.0, 0.0], [0.0, 0.0]], 5: [[3.0, -1.0], [-1.0, 3.0]]}
    folders = [
        make_run(
            f"n{n}-s{seed}",
            seed=seed,
            config={"segmenter": {"type": "ngram", "n": n}, "seed": seed},
            evaluations=[{"step": 1, "scores": scores}],
        )
        for n, seeds in rows.items()
        for seed, scores in enumerate(seeds)
    ]
    assert "win rate 50%" in lines_of(*folders)[0]


def test_seeds_are_resampled_with_the_prompts(demo):
    groups = group_runs(find_runs([demo]))
    html = answer([group for group in groups if group.runs[0].is_policy])
    assert "<p><b>macro-ppo is better than ppo</b> by the true (gold) score: +0.3" in html
    assert "95% intervals over 2 seeds and 240 prompts" in html


def test_the_page_begins_with_the_answer(demo, tmp_path):
    page = write_report([demo], tmp_path / "report.html").read_text()
    main = page[page.index("<main>") :]
    assert main.removeprefix("<main>\n").startswith(
        '<div class="verdict"><p>Over the model before RL, <b>ppo and macro-ppo raised the true'
    )
