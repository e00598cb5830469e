"""A script written for TRL runs with one import changed."""

import contextlib
import dataclasses
import inspect
import textwrap
from functools import partial

import pytest
from transformers import LlamaForCausalLM

import marlhf
from conversations import chatml_tokenizer, play
from marlhf import Sampling
from marlhf.data.rows import DataError, Row
from marlhf.environments import EpisodeRecord, environment_from
from marlhf.environments.protocol import scored_row
from marlhf.errors import SettingError, UnknownNameError
from marlhf.models.tiny import tiny_config, tiny_tokenizer
from marlhf.reward.functions import RewardError, RewardFunction
from marlhf.trainers.trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

WITH_ENVIRONMENT = """
class Counter:
    def __init__(self):
        self.count = 0
    def reset(self, goal, **kwargs):
        self.goal, self.count = goal, 0
        return f" The goal is {goal}."
    def increment(self, step: int) -> int:
        '''Add to the counter.

        Args:
            step: How much.
        '''
        self.count += step
        return self.count

def close_to_goal(environments, goal, completions, **kwargs):
    seen.append((len(completions), [type(e).__name__ for e in environments]))
    assert [e.goal for e in environments] == goal
    return [-abs(e.goal - e.count) for e in environments]

dataset = [
    {"prompt": [{"role": "user", "content": f"Count, {n}."}], "goal": n % 7} for n in range(24)
]
trainer = NAMETrainer(
    model=model,
    args=NAMEConfig(
        output_dir=str(folder),
        learning_rate=1e-5,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=48,
        max_tool_calling_iterations=2,
        max_steps=2,
        logging_steps=1,
        bf16=False,
        report_to="none",
    ),
    train_dataset=dataset,
    reward_funcs=close_to_goal,
    environment_factory=Counter,
)
trainer.train()
"""


def chat_model(folder):
    tokenizer = chatml_tokenizer()
    model = LlamaForCausalLM(tiny_config(max_position_embeddings=1024))
    model.resize_token_embeddings(len(tokenizer))
    for each in (model, tokenizer):
        each.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_a_script_with_an_environment_runs(tmp_path, name):
    names = {"GRPOConfig": GRPOConfig, "GRPOTrainer": GRPOTrainer}
    names |= {"RLOOConfig": RLOOConfig, "RLOOTrainer": RLOOTrainer}
    names |= {"seen": [], "folder": tmp_path / "run", "model": chat_model(tmp_path / "model")}
    exec(WITH_ENVIRONMENT.replace("NAME", name), names)
    assert names["trainer"].state.global_step == 2
    # Each step samples two prompts four times each, as TRL counts, beside the evaluations.
    assert [(count, set(kinds)) for count, kinds in names["seen"]].count((8, {"Counter"})) >= 2


def test_an_environment_that_opens_its_episodes_needs_no_data(tmp_path):
    class Rising:
        """Its own tasks: `reset` takes no row."""

        def reset(self, seed: int, **_) -> str:
            opened.append(seed)
            return "Rise."

        def rise(self) -> str:
            """Rise."""
            return "Risen."

        def get_reward(self) -> float:
            return 1.0

    def reward(environments, **_):
        return [each.get_reward() for each in environments]

    opened = []
    settings = {"per_device_train_batch_size": 8, "num_generations": 4, "bf16": False}
    settings |= {"max_completion_length": 8, "save_strategy": "no"}
    trainer = partial(GRPOTrainer, chat_model(tmp_path / "model"), reward)
    args = GRPOConfig(str(tmp_path / "run"), max_steps=3, **settings)
    assert trainer(args, environment_factory=Rising).train().global_step == 3
    assert len(set(opened)) > 3 * 2  # a seed for each prompt of a step, and for those held out
    with pytest.raises(SettingError, match=r"num_steps \(max_steps in TRL\)"):
        trainer(GRPOConfig(str(tmp_path / "other"), **settings), environment_factory=Rising)
    with pytest.raises(SettingError, match="Several environments need a train_dataset"):
        trainer(args, environment_factory={"a": Rising})
    # As scripts for older versions of TRL do, and with what is held out.
    empty = [{"prompt": [{"role": "user", "content": ""}]}] * 40
    again = trainer(args, empty, environment_factory=Rising).objects
    assert (len(again.train_rows), len(again.eval_rows)) == (38, 2)
    with pytest.raises(DataError, match="the prompt is empty"):
        trainer(args, empty)


def test_max_steps_go_through_the_data_anew():
    assert GRPOConfig(max_steps=100).num_epochs == 100
    assert GRPOConfig(num_train_epochs=2).num_epochs == 2


def test_settings_become_those_of_marlhf():
    args = GRPOConfig(
        "out",
        per_device_train_batch_size=8,
        steps_per_generation=4,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_steps=100,
        beta=0.04,
        epsilon=0.1,
        epsilon_high=0.3,
        scale_rewards="none",
        loss_type="dr_grpo",
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=0.1,
        optim="paged_adamw_8bit",
        bf16=True,
        temperature=0.9,
        max_completion_length=256,
        eval_strategy="steps",
        eval_steps=25,
        save_strategy="no",
        model_init_kwargs={"dtype": "bfloat16"},
    )
    assert args == marlhf.GRPOConfig(
        output_dir="out",
        batch_size=4,
        num_mini_batches=2,
        num_samples=8,
        num_steps=50,
        num_epochs=50,
        seed=42,
        learning_rate=1e-6,
        adam_betas=(0.9, 0.999),
        kl_coef=0.04,
        clip=(0.1, 0.3),
        scale_group=False,
        divide_by="max_tokens",
        schedule="constant",
        warmup_ratio=0.1,
        optimizer="adamw_8bit",
        precision="bfloat16",
        sampling=Sampling(max_new_tokens=256, temperature=0.9),
        episode_tokens=768,
        max_turns=256,
        eval_every=25,
        save_every=0,
        keep_best=False,
    )


def test_a_limit_of_tool_calls_leaves_a_turn_to_answer():
    """TRL runs the tools so many times, and the model speaks after each of them."""
    assert GRPOConfig(max_tool_calling_iterations=1).max_turns == 2
    assert GRPOConfig(max_completion_length=300).max_turns == 300  # none: each turn has a token
    assert GRPOConfig(max_turns=3).max_turns == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": None, "top_p": None, "num_generations": None, "max_completion_length": None},
        {"do_train": True, "eval_on_start": True, "auto_find_batch_size": True},
        {"sapo_temperature_pos": 1.0, "ref_model_sync_steps": 512, "entropy_coef_max": 1.0},
        {"vllm_server_host": "0.0.0.0", "vllm_importance_sampling_correction": True},
        {"use_bias_correction_kl": True, "multi_objective_aggregation": "sum_then_normalize"},
        {"save_strategy": "epoch"},
    ],
)
def test_settings_without_effect_are_accepted(settings):
    assert GRPOConfig(**settings) == GRPOConfig()


def test_what_only_matters_with_another_setting_is_refused_with_it():
    for more in ({"beta": 0.1, "use_bias_correction_kl": True}, {"entropy_coef": 0.1}):
        with pytest.raises(UnknownNameError):
            GRPOConfig(**more)
    with pytest.raises(UnknownNameError, match="vllm_importance_sampling_correction"):
        GRPOConfig(use_vllm=True, vllm_importance_sampling_correction=True)


def test_vllms_server_is_where_trl_looks_for_it():
    server = {"use_vllm": True, "vllm_mode": "server"}
    assert GRPOConfig(**server).vllm_url == "http://127.0.0.1:8000"
    args = GRPOConfig(**server, vllm_server_host="10.0.0.2", vllm_server_port=80)
    assert args.vllm_url == "http://10.0.0.2:80"
    assert GRPOConfig(**server, vllm_server_base_url="http://host:1").vllm_url == "http://host:1"
    assert GRPOConfig(use_vllm=True).vllm_url == ""
    assert GRPOConfig(engine="vllm", vllm_gpu_memory_utilization=0.5).vllm_memory == 0.5


class Walker:
    """An environment of TRL's whose tool is called `step`."""

    def reset(self, **columns):
        self.place, self.columns = 0, columns

    def step(self, by: int) -> int:
        """Walk.

        Args:
            by: How far.
        """
        self.place += by
        return self.place


class Opening:
    """Takes the column that it needs, and says the prompt."""

    def reset(self, goal) -> str:
        return f"Reach {goal}."

    def walk(self) -> str:
        """Walk."""
        return "done"

    def get_reward(self) -> float:
        return 1.0


def test_an_environment_may_have_a_tool_called_step():
    made = environment_from(factory=Walker)()
    assert made.reset(Row("Go."), 0) == [{"role": "user", "content": "Go."}]
    assert [tool.__name__ for tool in made.tools] == ["step"]
    assert made.tools[0](2) == 2


def test_reward_functions_see_the_calls():
    tokenizer = chatml_tokenizer()
    call = '<tool_call>{"name": "step", "arguments": {"by": 3}}</tool_call>'
    texts = [f"{call}<tool_call>no JSON</tool_call>", "Done."]

    def replies(row, turn, ids):
        return texts[turn] + tokenizer.eos_token

    made = environment_from(factory=Walker)
    [record] = play(made, replies, tokenizer, rows=[Row("Go.")]).records

    def count_calls(completions):
        return [[m.get("tool_calls") for m in messages] for messages in completions]

    [calls] = count_calls([scored_row(Row("Go."), record).conversation.messages])
    function = {"name": "step", "arguments": {"by": 3}}
    assert calls == [[{"type": "function", "function": function}], None, None, None]
    assert "calls" not in record.to_dict()


def test_rows_need_no_prompt_where_the_environment_says_it(tmp_path):
    rows = [{"goal": n, "environment": "ab"[n % 2]} for n in range(12)]
    factory = {"a": Opening, "b": Opening}
    args = GRPOConfig(str(tmp_path), max_completion_length=8, max_steps=1)
    trainer = partial(GRPOTrainer, chat_model(tmp_path / "model"), args=args, train_dataset=rows)
    with pytest.raises(DataError, match="no column `prompt`"):
        trainer(reward_funcs=lambda **_: [])
    trainer = trainer(environment_factory=factory)
    rows = trainer.objects.train_rows
    assert rows[0].prompt == [{"role": "user", "content": ""}]
    first = trainer.objects.environment().reset(rows[0], 0)
    assert first[0]["content"].startswith("Reach ")


def test_something_must_score(tmp_path):
    def search(query: str) -> str:
        """Search.

        Args:
            query: Words.
        """
        return query

    trainer = partial(GRPOTrainer, chat_model(tmp_path / "model"), args=GRPOConfig("x"))
    for given in ({"tools": [search]}, {"environment_factory": _counter()}):
        with pytest.raises(SettingError, match="whose environments have get_reward"):
            trainer(train_dataset=[{"prompt": "Go."}] * 8, **given)


def test_marlhfs_own_settings_work_beside_them():
    args = RLOOConfig(num_generations=4, gamma=0.9, batch_size=16, sampling=Sampling(top_k=5))
    assert (args.num_samples, args.gamma, args.batch_size, args.kl_coef) == (4, 0.9, 16, 0.05)
    assert args.sampling.top_k == 5


def test_processes_count(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert GRPOConfig(per_device_train_batch_size=2, num_generations=2).batch_size == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_iterations": 2}, "each response is used once"),
        ({"num_generations": 3}, "8 responses are sampled at a time"),
        ({"num_train_epochs": 1.5}, "Set max_steps"),
        ({"scale_rewards": "batch"}, "It may be True, 'group', False, 'none'; got 'batch'"),
        ({"model_init_kwargs": {"revision": "x"}}, "load the model and pass it"),
        ({"max_complection_length": 3}, "has no setting max_complection_length"),
    ],
)
def test_what_has_no_equivalent_is_refused(settings, message):
    with pytest.raises((SettingError, TypeError), match=message):
        GRPOConfig(**settings)


@pytest.mark.parametrize("ours", [GRPOConfig, RLOOConfig])
def test_the_defaults_are_trls(ours):
    trl = pytest.importorskip("trl")
    fields = dataclasses.fields(getattr(trl, ours.__name__))
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    accepted = 0
    for name, value in defaults.items():
        with contextlib.suppress(UnknownNameError):  # an option of what is off by default
            with_it = ours(**{name: value})
            same = {"gradient_checkpointing": "auto", "report_to": ()}  # no result differs
            assert dataclasses.replace(with_it, **same) == ours(), name
            accepted += 1
    assert accepted > 0.7 * len(defaults)


def test_without_environments_a_function_that_takes_them_says_so():
    def reward(environments, **_):
        return [1.0 for _ in environments]

    scorer = RewardFunction(reward, tiny_tokenizer())
    with pytest.raises(RewardError, match="Give the trainer an environment_factory"):
        scorer([[1]], [[2]], [Row("Why?")])


def test_environments_are_not_saved():
    made = environment_from(factory=_counter())()
    made.reset(Row("Count.", columns={"goal": 3}), 0)
    record = EpisodeRecord([], [], "done", environment=made.inner)
    assert "environment" not in record.to_dict()
    assert EpisodeRecord.from_dict(record.to_dict()) == record


def _counter():
    names = {}
    exec(textwrap.dedent(WITH_ENVIRONMENT.partition("def close_to_goal")[0]), names)
    assert inspect.isclass(names["Counter"])
    return names["Counter"]
