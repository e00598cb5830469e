import math
import subprocess
import sys
import typing
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import marlhf
from marlhf import core
from marlhf.config.build import build_segmenter, shipped_recipes
from marlhf.config.rl import RLConfig
from marlhf.config.settings import SEGMENTERS, describe, rule_defaults, to_raw
from marlhf.core import NGram, Perplexity, RandomNGram, Words, advantages, losses, segments
from marlhf.core import rewards as core_rewards
from marlhf.fields import setting, settings_with
from marlhf.runs.layout import facts_of
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.recipe import (
    ConfigError,
    kind_class,
    load_recipe,
    load_stage,
)
from marlhf.train.stages import METHODS, Method

PIPELINE = """
output_dir: runs/x
defaults: {seed: 3, data: {source: toy}}
stages:
  sft: {model: tiny, learning_rate: 1e-3}
  reward: {model: "@sft"}
  ppo: {model: "@sft", reward_model: "@reward", segmenter: {type: ngram, n: 1}}
  macro: {like: ppo, segmenter: {type: perplexity, max_length: 20}}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "r.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_stages_share_defaults_and_refer_to_each_other(write):
    stages = load_recipe(write(PIPELINE))
    assert [(s.name, s.kind) for s in stages] == [
        ("sft", "sft"),
        ("reward", "reward"),
        ("ppo", "ppo"),
        ("macro", "ppo"),
    ]
    ppo, macro = stages[2].config, stages[3].config
    assert ppo.seed == macro.seed == 3
    assert ppo.model == "runs/x/sft/model"
    assert ppo.reward_model == "runs/x/reward/model"
    assert ppo.segmenter == NGram(1)
    assert macro.segmenter == Perplexity(max_length=20)
    assert macro.output_dir == "runs/x/macro"
    assert stages[0].config.learning_rate == 1e-3  # YAML reads 1e-3 as text


def test_overrides_reach_one_stage_or_all_that_know_the_name(write):
    path = write(PIPELINE)
    overrides = ["seed=7", "macro.segmenter.kind=token", "kl_coef=0.2", "output_dir=/tmp/y"]
    sft, _, ppo, macro = (s.config for s in load_recipe(path, overrides))
    assert (sft.seed, ppo.seed, ppo.kl_coef, macro.kl_coef) == (7, 7, 0.2, 0.2)
    assert macro.segmenter == Perplexity("token", 20)
    assert ppo.model == "/tmp/y/sft/model"


def test_an_override_of_one_stage_counts_for_more_than_one_of_all(write):
    recipe = write(PIPELINE)
    for overrides in (["sft.num_steps=9", "num_steps=5"], ["num_steps=5", "sft.num_steps=9"]):
        steps = {stage.name: stage.config.num_steps for stage in load_recipe(recipe, overrides)}
        assert steps == {"sft": 9, "reward": 5, "ppo": 5, "macro": 5}
        assert load_stage(recipe, "sft", overrides).config.num_steps == 9


def test_one_stage_of_a_pipeline(write):
    path = write(PIPELINE)
    assert load_stage(path, "ppo", name="macro").config.segmenter == Perplexity(max_length=20)
    assert load_stage(path, "ppo", ["segmenter.n=.inf"]).config.segmenter == NGram(math.inf)
    with pytest.raises(ConfigError, match="no stage 'dpo'"):
        load_stage(path, "ppo", name="dpo")
    with pytest.raises(ConfigError, match="of kind 'sft', not 'ppo'"):
        load_stage(path, "ppo", name="sft")


def test_a_stage_in_another_folder_starts_from_the_stages_of_its_recipe(write):
    path = write(PIPELINE)
    elsewhere = load_stage(path, "ppo", ["output_dir=runs/other"]).config
    assert (elsewhere.output_dir, elsewhere.model) == ("runs/other", "runs/x/sft/model")
    beside = load_stage(path, "ppo", ["output_dir=runs/y/ppo"]).config  # as `marlhf run` has it
    assert (beside.output_dir, beside.model) == ("runs/y/ppo", "runs/y/sft/model")


def test_a_flat_recipe_is_one_stage(write):
    path = write("model: tiny\noutput_dir: runs/a/sft\n")
    assert load_stage(path, "sft", ["seed=2"]).config.seed == 2
    with pytest.raises(ConfigError, match=r"no `stages:`.*marlhf ppo"):
        load_recipe(path)


def test_all_mistakes_come_at_once_with_path_and_nearest_name(write):
    bad = PIPELINE.replace("learning_rate: 1e-3", "learnign_rate: 1e-3, batch_size: many")
    bad = bad.replace("n: 1}", "m: 1}").replace("max_length: 20", "max_length: 0")
    bad = bad.replace("{seed: 3", "{sede: 3")
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(bad))
    text = str(caught.value)
    assert (
        "stages.sft.learnign_rate: unknown name 'learnign_rate'. Did you mean learning_rate?"
        in text
    )
    assert "stages.ppo.segmenter.m: unknown name 'm'" in text
    assert "stages.reward.sede: unknown name 'sede'. Did you mean seed?" in text
    # What a rule itself refuses is known once it is made, of all stages at once.
    bad = PIPELINE.replace("n: 1}", "n: 0}").replace("max_length: 20", "max_length: 0")
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(bad))
    assert "stages.ppo.segmenter: n must be a whole number from 1" in str(caught.value)
    assert "stages.macro.segmenter: max_length must be at least 1" in str(caught.value)


def test_wrong_types_name_their_place(write):
    path = write("model: tiny\noutput_dir: r\nbatch_size: many\ndata: {source: tdlr}\n")
    with pytest.raises(ConfigError) as caught:
        load_stage(path, "sft")
    assert "batch_size: must be a whole number" in str(caught.value)
    assert "data.source: Input should be" in str(caught.value)
    assert "2 mistakes" in str(caught.value)


def test_missing_settings_are_named(write):
    with pytest.raises(ConfigError, match="reward_model: must be given"):
        load_stage(write("model: tiny\noutput_dir: r\n"), "ppo")


def test_extends_merges_and_a_new_type_replaces(write):
    write(
        "model: tiny\noutput_dir: r\nreward_model: x\nsegmenter: {type: ngram, n: 3}\n", "base.yaml"
    )
    child = write("extends: base.yaml\nsegmenter: {type: words}\n", "child.yaml")
    assert load_stage(child, "ppo").config.segmenter == Words()
    same = write("extends: base.yaml\nsegmenter: {n: 9}\n", "same.yaml")
    assert load_stage(same, "ppo").config.segmenter == NGram(9)


def test_a_recipe_that_extends_itself_is_told_the_chain(write):
    write("extends: b.yaml", "a.yaml")
    path = write("extends: a.yaml", "b.yaml")
    with pytest.raises(ConfigError, match=r"extends itself: b.yaml -> a.yaml -> b.yaml"):
        load_stage(path, "sft")
    with pytest.raises(ConfigError, match="which does not exist"):
        load_stage(write("extends: nowhere.yaml", "c.yaml"), "sft")
    looped = PIPELINE.replace("{like: ppo,", "{like: macro,")
    with pytest.raises(ConfigError, match="`like` itself"):
        load_recipe(write(looped))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [unclosed", "is not YAML"),
        ("- a\n- b", "must be a mapping"),
        ("just words", "must be a mapping"),
        ("", "is empty"),
        ("seed: 1\nseed: 2", "seed is given twice"),
        ("stages: 3", "must map names"),
        ("stages: {sft: 3}", "must be a mapping"),
        ("stages: {sft: {model: tiny}}\nsede: 1", "sede: unknown name"),
        ("stages: {sfd: {model: tiny}}", "Did you mean sft"),
        ("stages: {ppo: {like: sft}}", "unknown name 'sft'"),
    ],
)
def test_nonsense_gets_a_sentence(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(text)) if "stages" in text else load_stage(write(text), "sft")


def test_bytes_that_are_not_text(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"seed: \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_stage(path, "sft")


@pytest.mark.parametrize("override", ["seed", "=3", "seed=[1"])
def test_overrides_must_be_key_value(write, override):
    with pytest.raises(ConfigError, match="Cannot read"):
        load_recipe(write(PIPELINE), [override])


def test_unknown_override_names_the_nearest(write):
    with pytest.raises(ConfigError, match="Did you mean kl_coef"):
        load_recipe(write(PIPELINE), ["kl_coeff=1"])


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean gemma-2b/tldr"):
        load_recipe("gemma-2b/tdlr")


def test_official_preset_sets_what_the_authors_code_does(write):
    text = PIPELINE.replace("{like: ppo,", "{like: ppo, preset: official, score_clip: 9,")
    *_, ppo, macro = (s.config for s in load_recipe(write(text)))
    assert (ppo.pooling, ppo.score_clip, ppo.split_last) == ("sum", None, False)
    assert (macro.pooling, macro.score_clip, macro.split_last) == ("mean", 9, True)
    assert (ppo.sigma, macro.sigma) == ("start", "equal")
    paper = load_recipe(write(text.replace("official", "paper")))[-1].config
    assert (paper.sigma, paper.pooling, paper.split_last) == ("equal", "sum", False)
    with pytest.raises(ConfigError, match=r"unknown name 'offical'\. Did you mean official"):
        load_recipe(write(text.replace("official", "offical")))


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_loads(name):
    kinds = [s.kind for s in load_recipe(name)]
    # Rewarded by tests or by the right answer.
    code = any(word in name for word in ("apps", "mbpp", "code"))
    code |= name in {f"evidence/{x}" for x in ("coarse", "predict", "sums", "updates")}
    if name.startswith("evidence/"):  # several reward models
        kinds = [k for i, k in enumerate(kinds) if k != "reward" or k not in kinds[:i]]
    expected = ["sft", "ppo", "ppo"] if code else ["sft", "reward", "ppo"]
    others = {"sums": ["sft", "ppo", "rloo"], "evidence/qwen": ["ppo", "rloo", "ppo"]}
    others |= {"evidence/critic": ["sft", "ppo"], "guess": ["sft", "ppo"]}
    others["evidence/qwen-turns"] = ["ppo", "ppo", "rloo"]
    others["evidence/qwen-methods"] = ["rloo", "ppo", "ppo"]
    others |= {f"qwen3-{x}/gsm8k": others["sums"] for x in ("0.6b", "1.7b", "4b-lora", "8b-qlora")}
    others["evidence/ensembles-tldr"] = ["sft", "reward", "ppo"]
    others["evidence/turns"] = ["sft", "ppo", "ppo"]
    others["evidence/prm"] = ["sft", "prm", "prm"]
    others["evidence/critic-reach"] = ["sft", "ppo", "ppo"]
    others["evidence/gain"] = ["sft", "sft", "sft"]
    others["evidence/turn-length"] = ["sft", "ppo", "sft"]
    assert kinds[:3] == others.get(name, expected)


def test_the_papers_settings_are_in_the_recipes():
    """Spot checks against the table of settings, one a column."""

    def stage(recipe: str, name: str):
        return next(s.config for s in load_recipe(recipe) if s.name == name)

    assert stage("gemma-2b/tldr", "sft").batch_size == 512
    assert stage("gemma-2b/webgpt", "sft").learning_rate == 1e-4
    assert stage("gemma-2b/webgpt", "reward").batch_size == 32
    assert stage("gemma-7b/webgpt", "ppo").kl_coef == 0.1
    assert stage("gemma-7b/tldr", "ppo").kl_coef == 0.05
    assert stage("gemma-7b/tldr", "macro-ppo").kl_coef == 0.01
    assert stage("gemma-7b/hh", "macro-ppo").kl_coef == 0.05
    assert stage("gemma-27b/tldr", "ppo").warmup_steps == 0
    assert stage("gemma-27b/tldr", "ppo").critic_learning_rate == 1e-6
    assert stage("llama-3.2-3b/tldr", "ppo").learning_rate == 5e-6
    assert stage("gemma-2b/hh", "macro-ppo").segmenter == NGram(5)
    assert stage("gemma-2b/hh", "ppo").segmenter == NGram(1)
    assert stage("codegemma-2b/apps", "sft").learning_rate == 5e-6
    assert stage("codegemma-7b/apps", "sft").batch_size == 32
    code = stage("codegemma-7b/apps", "macro-ppo")
    assert (code.segmenter, code.batch_size, code.warmup_steps) == (NGram(10), 16, 20)
    assert (code.learning_rate, code.critic_learning_rate) == (5e-7, 5e-5)
    assert code.critic_model == code.model == "runs/codegemma-7b-apps/sft/model"
    assert (code.sampling.temperature, code.sampling.top_k) == (1.0, 5)
    assert (code.data.max_prompt_tokens, code.data.parts) == (600, {"sft": 0.2, "ppo": 0.8})
    assert stage("codegemma-2b/apps", "parsing-ppo").segmenter.parser == "python"
    sampling = stage("gemma-2b/hh", "ppo").sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 50, 1.0)


@dataclass(frozen=True)
class Mine:
    nats: float = 3.0

    def __call__(self, responses):
        return responses.mask


def test_nothing_is_run_while_a_recipe_is_refused(write, tmp_path):
    """Neither a constructor of Python's own nor a module of the user's."""
    touched = tmp_path / "touched"
    (tmp_path / "own_rule.py").write_text(f"open({str(touched)!r}, 'w')\n")
    run = f'segmenter: {{type: "subprocess:Popen", args: [touch, {touched}]}}'
    with pytest.raises(ConfigError, match="part of Python itself"):
        load_recipe(write(PIPELINE.replace("segmenter: {type: ngram, n: 1}", run)))
    own = 'segmenter: {type: "own_rule:Mine"}, batch_size: many'
    with pytest.raises(ConfigError, match="batch_size"):
        load_recipe(write(PIPELINE.replace("segmenter: {type: ngram, n: 1}", own)))
    assert not touched.exists()


def test_a_rule_of_ones_own_by_name():
    sys.modules["my_rules"] = sys.modules[__name__]
    assert build_segmenter({"type": "my_rules:Mine", "nats": 1}) == Mine(1.0)
    with pytest.raises(ConfigError, match="cannot use my_rules:Yours"):
        build_segmenter({"type": "my_rules:Yours"})
    with pytest.raises(ConfigError, match=r"segmenter\.gnats: unknown name"):
        build_segmenter({"type": "my_rules:Mine", "gnats": 1})


def test_segmenters_by_name_alone():
    assert build_segmenter("random") == RandomNGram()
    with pytest.raises(ConfigError, match="Did you mean ngram"):
        build_segmenter("n-gram")
    with pytest.raises(ConfigError, match="write"):
        build_segmenter(5)


def test_a_resolved_config_reads_back_the_same(write):
    for stage in load_recipe(write(PIPELINE)):
        text = yaml.safe_dump(to_raw(stage.config))
        assert load_stage(write(text, "again.yaml"), stage.kind).config == stage.config


def test_secrets_are_not_dumped():
    assert to_raw({"hub_token": "hf_x", "api_key": "k", "seed": 1, "max_new_tokens": 5}) == {
        "hub_token": "(hidden)",
        "api_key": "(hidden)",
        "seed": 1,
        "max_new_tokens": 5,
    }


@pytest.mark.parametrize("kind", ["sft", "reward", "ppo"])
def test_every_setting_says_what_it_does(kind):
    for name, _, _, text in describe(kind_class(kind)):
        assert text, f"{kind}.{name} has no help"


def test_an_override_of_a_stage_that_is_not_trained_is_refused():
    assert load_stage("toy", "ppo", ["ppo.batch_size=32"], name="macro-ppo").config.batch_size == 32
    with pytest.raises(ConfigError, match=r"macro-ppo\.batch_size is a setting of another stage"):
        load_stage("toy", "ppo", ["macro-ppo.batch_size=32"])


def test_a_stages_override_reaches_those_that_are_like_it(write):
    *_, ppo, macro = (s.config for s in load_recipe(write(PIPELINE), ["ppo.kl_coef=0.3"]))
    assert ppo.kl_coef == macro.kl_coef == 0.3
    *_, ppo, macro = (s.config for s in load_recipe(write(PIPELINE), ["macro.kl_coef=0.3"]))
    assert (ppo.kl_coef, macro.kl_coef) == (0.05, 0.3)


def test_overrides_may_name_a_stage_a_rule_and_a_preset(write):
    path = write(PIPELINE)
    overrides = ["critic_model=@sft", "preset=official", "ppo.segmenter.type=words"]
    *_, ppo, macro = (s.config for s in load_recipe(path, overrides))
    assert ppo.critic_model == "runs/x/sft/model"
    assert ppo.pooling == macro.pooling == "mean"
    assert ppo.segmenter == Words()
    assert macro.segmenter == Perplexity(max_length=20)
    flat = write("model: a\nreward_model: b\noutput_dir: c\n", "flat.yaml")
    assert load_stage(flat, "ppo", ["segmenter.n=3"]).config.segmenter == NGram(3)


def test_unknown_names_do_not_hide_wrong_types(write):
    path = write("model: tiny\noutput_dir: r\nbatch_size: many\nsede: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_stage(path, "sft")
    assert "Did you mean seed" in str(caught.value)
    assert "batch_size: must be a whole number" in str(caught.value)


class Plain:
    def __init__(self, size: int = 2) -> None:
        self.size = size

    def __call__(self, responses):
        return responses.mask


def plain(responses, size=1):
    return size


def test_rules_that_are_no_dataclasses():
    sys.modules["my_rules"] = sys.modules[__name__]
    rule = build_segmenter({"type": "my_rules:Plain", "size": 4})
    assert rule.size == 4
    assert to_raw(rule)["size"] == 4
    assert build_segmenter({"type": "my_rules:plain", "size": 4})(None) == 4
    assert build_segmenter({"type": "my_rules:plain"})(None) == 1
    with pytest.raises(ConfigError, match="unexpected keyword argument 'sise'"):
        build_segmenter({"type": "my_rules:Plain", "sise": 4})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('reward_model: "@reward"', 'reward_model: "@rewrad"', "Did you mean reward"),
        ('reward: {model: "@sft"}', 'reward: {model: "@ppo"}', "does not come before 'reward'"),
        ("  sft: {", "  ../sft: {kind: sft, ", "cannot be a folder's"),
        ("defaults: {seed: 3, data: {source: toy}}", "defaults: [1]", "`defaults:` of"),
        (
            "{model: tiny, learning_rate: 1e-3}",
            "{model: tiny, batch_size: 0}",
            "be positive; got 0",
        ),
    ],
)
def test_mistakes_between_stages(write, old, new, message):
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(PIPELINE.replace(old, new)))
    assert message in str(caught.value)
    assert "'source': 'toy'" not in str(caught.value)  # not the whole mapping: it may hold secrets


def test_settings_of_rules_are_known_without_torch():
    for name, rule in SEGMENTERS.items():
        assert {"type": name, **rule_defaults(name)} == to_raw(getattr(core, rule)())


def test_configs_load_without_torch():
    code = (
        "import sys\n"
        "from marlhf import DPOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_choices_of_configs_are_those_of_the_core():
    of_core = {
        "sigma": segments.Sigma,
        "pooling": advantages.Pooling,
        "value_level": losses.Level,
        "ratio": losses.Ratio,
        "kl_estimator": core_rewards.KLEstimator,
    }
    hints = typing.get_type_hints(PPOConfig)
    for name, choices in of_core.items():
        assert typing.get_args(hints[name]) == typing.get_args(choices), name


def test_a_new_rl_method_is_its_loop_its_config_and_one_line(write, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class ReinforceConfig(RLConfig):
        baseline_decay: float = setting(0.9, least=0, most=1, on_card=True)

    seen = []
    line = Method(ReinforceConfig, lambda: seen.append, "REINFORCE with a running mean.")
    monkeypatch.setitem(METHODS, "reinforce", line)
    recipe = write(
        PIPELINE.replace("  macro: {like: ppo,", "  reinforce: {like: ppo, kind: reinforce,")
    )
    stage = load_recipe(recipe, ["reinforce.baseline_decay=0.5"])[-1]
    METHODS[stage.kind].train(stage.config)
    assert (seen[0].baseline_decay, stage.kind) == (0.5, "reinforce")
    assert facts_of("reinforce").samples
    assert facts_of("reinforce").label == "REINFORCE"
    assert "baseline_decay" in settings_with(ReinforceConfig, "on_card")
    args = ReinforceConfig(output_dir="runs/x")
    trainer = marlhf.ReinforceTrainer(model="tiny", reward_funcs=len, args=args)
    assert (trainer.stage, trainer.args.reward_funcs) == ("reinforce", ("len",))
    with pytest.raises(ConfigError, match="baseline_decay must be at least 0 and at most 1"):
        load_recipe(recipe, ["reinforce.baseline_decay=2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: 3\nseed: 1\n", "`extends:` of .* must be a file name"),
        ("extends:\nseed: 1\n", "`extends:` of .* must be a file name"),
        ("extends: [[a]]\nseed: 1\n", "`extends:` of .* must be a file name"),
        pytest.param("model: " + "[" * 3000 + "]" * 3000, "nested too deep", id="nested"),
        ("output_dir: null\n" + PIPELINE.replace("output_dir: runs/x\n", ""), "output_dir must be"),
        (PIPELINE.replace("runs/x", "3"), "output_dir must be"),
        (PIPELINE.replace("{like: ppo,", "{like: ppo, kind: [a],"), r"kind: must be a name"),
        (PIPELINE.replace("{like: ppo,", "{like: [ppo],"), r"like: must be a name"),
        (PIPELINE.replace("{like: ppo,", "{like: ppo, preset: [a],"), r"preset: must be a name"),
        (PIPELINE.replace("seed: 3", "seed: true"), r"seed: must be a number \(got True\)"),
        (PIPELINE.replace("{like: ppo,", "{like: ppo, guards: {max_kl: -1},"), "max_kl must"),
        (PIPELINE.replace("learning_rate: 1e-3", "learning_rate: .inf"), "must be finite; got inf"),
        (PIPELINE.replace("data: {source: toy}", "data: {eval_size: -1}"), "eval_size must be"),
    ],
)  # fmt: skip
def test_odd_recipes_are_refused_with_a_sentence(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(text))


def test_aliases_that_stand_for_too_much_are_refused(write):
    """Each anchor holds the one before nine times: written out, the last would take gigabytes."""
    lists = [f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    text = "\n".join(["x:", "- &a0 [x]", *lists])
    with pytest.raises(ConfigError, match="over 100,000 values with its aliases"):
        load_recipe(write(f"{text}\nstages: {{sft: {{model: *a11}}}}\n"))
    with pytest.raises(ConfigError, match="over 100,000 values with its aliases"):
        load_recipe(write("stages: {sft: {model: &a [*a]}}\n"))


def test_a_message_quotes_the_beginning_of_a_value(write):
    with pytest.raises(ConfigError, match=r"model: must be text") as refused:
        load_recipe(write(f"stages: {{sft: {{model: {list(range(5000))}}}}}\n"))
    assert "(got [0, 1, 2, 3, 4, 5, ...])" in str(refused.value)


def test_a_recipe_without_read_permission_is_a_sentence(write, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    path = write(PIPELINE)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"Cannot read .*: Permission denied"):
        load_recipe(path)


def test_yaml_merge_keys_are_read(write):
    text = PIPELINE.replace("{seed: 3, data: {source: toy}}", "&c {seed: 3, data: {source: toy}}")
    text += "  other: {<<: *c, kind: sft, model: tiny}\n"
    stages = load_recipe(write(text))
    assert stages[-1].config.seed == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": "8"}, "batch_size must be a whole number; got '8'"),
        ({"batch_size": 2.5}, "batch_size must be a whole number; got 2.5"),
        ({"batch_size": True}, "batch_size must be a whole number; got True"),
        ({"learning_rate": "1e-5"}, "learning_rate must be a number; got '1e-5'"),
        ({"learning_rate": math.inf}, "learning_rate must be finite; got inf"),
        ({"kl_coef": math.nan}, "kl_coef must be finite; got nan"),
        ({"warmup_ratio": 2}, "warmup_ratio must be at least 0 and at most 1; got 2"),
        ({"sigma": "equl"}, "sigma must be one of equal, unit, position, start; got 'equl'"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named_in_python_too(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_a_setting_of_several_types_is_one_mistake():
    wrong = ["data.eval_size=all", "seed=x", "token_budget=lots"]
    with pytest.raises(ConfigError) as caught:
        load_stage("toy", "ppo", wrong, "ppo")
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("3 mistakes")
    assert sum("token_budget: must be int or 'auto' (got 'lots')" in line for line in lines) == 1
    assert sum("data.eval_size: must be int or float (got 'all')" in line for line in lines) == 1
    assert sum("seed: must be a whole number" in line for line in lines) == 1
    with pytest.raises(ConfigError, match=r"1 mistake\n.*segmenter\.n: must be int or float \(got"):
        load_stage("toy", "ppo", ["segmenter.n=five"], "ppo")
