import math

from marlhf.report.groups import (
    describe_segmenter,
    differences,
    group_runs,
    same_prompts,
)
from marlhf.runs.read import chosen, find_runs, read_run


def _config(folder: str, seed: int, n: float, **more):
    return {"output_dir": folder, "seed": seed, "segmenter": {"type": "ngram", "n": n}, **more}


def _train(*scores: float):
    return [
        {"kind": "train", "step": i + 1, "seconds": 10.0 * (i + 1), "rl/score": score}
        for i, score in enumerate(scores)
    ]


def test_seeds_are_one_group_with_mean_and_extremes(make_run):
    a = make_run("ppo-seed1", seed=1, config=_config("a/x", 1, 5), metrics=_train(0.0, 1.0))
    b = make_run("ppo-seed2", seed=2, config=_config("b/y", 2, 5), metrics=_train(1.0, 2.0))
    (group,) = group_runs([read_run(a), read_run(b)])
    assert group.label == "ppo"
    assert [(p.step, p.mean, p.low, p.high) for p in group.curve("rl/score")] == [
        (1, 0.5, 0.0, 1.0),
        (2, 1.5, 1.0, 2.0),
    ]


def test_the_same_seed_twice_is_one_seed(make_run):
    runs = [read_run(make_run(f"{i}", seed=7, config=_config("a", 7, 5))) for i in (1, 2)]
    assert [group.num_seeds for group in group_runs(runs)] == [1]


def test_paths_beside_the_run_do_not_tell_seeds_apart(make_run):
    paths = [
        make_run(f"{i}", config=_config(f"runs/{i}/ppo", i, 5, model=f"runs/{i}/sft/model"))
        for i in (1, 2)
    ]
    runs = [read_run(path) for path in paths]
    assert chosen(runs[0])["model"] == "../sft/model"
    assert len(group_runs(runs)) == 1


def test_single_tokens_come_first_and_other_settings_stand_apart(make_run):
    macro = make_run("macro", config=_config("a", 1, 5))
    token = make_run("token", config=_config("b", 1, 1))
    groups = group_runs([read_run(macro), read_run(token)])
    assert [group.label for group in groups] == ["token", "macro"]
    assert [group.colour for group in groups] == ["var(--c0)", "var(--c1)"]
    assert differences(groups) == [("segmenter.n", ["1", "5"])]


def test_of_several_baselines_the_one_with_most_seeds_comes_first(make_run):
    weak = make_run("ppo-weak-s0", seed=0, config=_config("w", 0, 1, kl_coef=0.01))
    seeds = [make_run(f"ppo-s{i}", seed=i, config=_config(f"p{i}", i, 1)) for i in (0, 1)]
    groups = group_runs([read_run(path) for path in (weak, *seeds)])
    assert [group.label for group in groups] == ["ppo", "ppo-weak"]


def test_of_equal_baselines_the_one_most_like_the_rest_comes_first(make_run):
    settings = {"a-lam1": (1, 1.0), "b-ppo": (1, 0.95), "c-n5": (5, 0.95), "d-n9": (9, 0.95)}
    runs = [
        read_run(make_run(name, seed=0, config=_config(name, 0, n, lam=lam)))
        for name, (n, lam) in settings.items()
    ]
    assert [group.label for group in group_runs(runs)] == ["b-ppo", "a-lam1", "c-n5", "d-n9"]


def test_a_lone_seed_is_named_as_several_would_be(make_run):
    names = {"n5-s0": "n5", "n5-s1": "n5-s1", "gpt-2": "gpt-2", "x seed=0": "x"}
    for name, label in names.items():
        run = read_run(make_run(name, seed=0, config=_config(name, 0, 5)))
        assert [group.label for group in group_runs([run])] == [label]


def test_runs_without_a_config_are_never_taken_for_seeds(make_run):
    runs = [read_run(make_run(f"{i}/ppo", metrics=_train(1.0))) for i in (1, 2)]
    assert [group.label for group in group_runs(runs)] == ["1/ppo", "2/ppo"]


def test_the_demo_is_four_settings_of_two_seeds(demo):
    groups = group_runs(find_runs([demo]))
    assert [group.label for group in groups] == ["ppo", "macro-ppo", "sft", "reward"]
    assert all(len(group.runs) == 2 for group in groups)
    assert same_prompts(groups[0], groups[1])


def test_other_prompts_are_not_paired(make_run):
    def run(name: str, prompt: str, n: float):
        sample = {"step": 1, "index": 0, "prompt": prompt, "response": "x"}
        evaluation = {"step": 1, "scores": [1.0, 2.0]}
        config = _config(name, 1, n)
        return read_run(make_run(name, config=config, samples=[sample], evaluations=[evaluation]))

    alike = group_runs([run("a", "one", 1), run("b", "one", 5)])
    other = group_runs([run("c", "one", 1), run("d", "two", 5)])
    assert same_prompts(*alike)
    assert not same_prompts(*other)


def test_segmenters_in_words():
    def words(**segmenter):
        return describe_segmenter({"segmenter": segmenter})

    assert words(type="ngram", n=1) == "single tokens (n = 1)"
    assert words(type="ngram", n=math.inf) == "whole response (n = inf)"
    assert words(type="ngram", n=5) == "n-gram, n = 5"
    assert words(type="perplexity", kind="mean", max_length=None) == "perplexity, kind = mean"
    parsed = {"type": "constituents", "cutoff": 5, "inclusive": False, "sentences": False}
    assert words(**parsed, parser="english") == "constituents, cutoff = 5"
    assert words(**parsed, parser="python") == "constituents, cutoff = 5, parser = python"
    assert words(type="my:Rule", threshold=0) == "my:Rule, threshold = 0"
    assert describe_segmenter({}) == ""
