"""Tools and environments given in Python, in TRL's forms."""

import pytest

from conversations import DROPS_THINKING, chatml_tokenizer
from marlhf import (
    GRPOConfig,
    GRPOTrainer,
    MacroPPOTrainer,
    PPOConfig,
    RLOOConfig,
    RLOOTrainer,
    Sampling,
)
from marlhf.environments import ConversationError
from marlhf.errors import SettingError
from marlhf.models.tiny import tiny_model, tiny_tokenizer
from small_runs import read_lines

ROWS = [{"prompt": [{"role": "user", "content": f"Add up to {n}."}], "goal": n} for n in range(24)]


class Adding:
    """As TRL's GRPOTrainer takes it."""

    def reset(self, **row) -> str:
        self.total, self.goal = 0, row["goal"]
        return "Begin."

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: What to add.
        """
        self.total += number
        return str(self.total)

    def get_reward(self) -> float:
        return -abs(self.goal - self.total) / 10


def search(query: str) -> str:
    """Look something up.

    Args:
        query: What for.
    """
    return f"Nothing about {query}."


@pytest.fixture
def given(tmp_path):
    tokenizer = chatml_tokenizer()
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer))
    settings = {
        "batch_size": 4,
        "num_steps": 2,
        "save_every": 0,
        "max_turns": 2,
        "episode_tokens": 512,
        "output_dir": str(tmp_path / "run"),
        "sampling": Sampling(max_new_tokens=6),
    }
    return {"model": model, "processing_class": tokenizer, "train_dataset": ROWS}, settings


@pytest.mark.parametrize(
    ("trainer", "config", "more"),
    [
        (MacroPPOTrainer, PPOConfig, {}),
        (RLOOTrainer, RLOOConfig, {"num_samples": 2}),
        (GRPOTrainer, GRPOConfig, {"num_samples": 2, "group": "state"}),
    ],
)
def test_a_class_as_trl_takes_it_is_played(given, trainer, config, more):
    arguments, settings = given
    args = config(**settings, **more)
    trainer = trainer(environment_factory=Adding, args=args, **arguments)
    assert trainer.args.environment == "(given in Python) Adding"
    trainer.train()
    steps = [line for line in read_lines(args.output_dir) if "rl/score" in line]
    assert len(steps) == 2
    assert steps[0]["rl/score"] < 0
    assert steps[0]["rl/turns"] >= 1
    assert steps[0]["rl/failed_episodes"] == 0


def test_functions_are_tools_and_a_reward_function_sees_the_messages(given):
    arguments, settings = given
    seen = []

    def reward(completions, goal):
        seen.extend(completions)
        return [float(len(said)) for said in completions]

    MacroPPOTrainer(
        tools=[search], reward_funcs=reward, args=PPOConfig(**settings), **arguments
    ).train()
    assert all(message["role"] in ("assistant", "tool") for said in seen for message in said)
    assert seen[0][0]["role"] == "assistant"


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"environment_factory": object}, (TypeError, ConversationError), "reset"),
        (
            {"environment_factory": Adding, "more": {"episode_tokens": 9999}},
            ValueError,
            "positions",
        ),
        ({"tools": [print]}, (TypeError, ValueError), "print"),
        ({}, SettingError, "environment_factory"),
    ],
    ids=str,
)
def test_nonsense_is_refused_with_a_sentence(given, change, error, said):
    arguments, settings = given
    args = PPOConfig(**settings | change.pop("more", {}))
    with pytest.raises(error, match=said):
        MacroPPOTrainer(args=args, **arguments, **change).train()


def test_a_template_without_tools_is_refused_before_training(given):
    arguments, settings = given
    plain = {"model": tiny_model(), "processing_class": tiny_tokenizer()}
    with pytest.raises(ConversationError, match="chat template cannot do tools"):
        MacroPPOTrainer(
            environment_factory=Adding, args=PPOConfig(**settings), **(arguments | plain)
        ).train()


def test_a_template_that_rewrites_turns_is_refused_or_taken_raw(given):
    arguments, settings = given
    rewriting = arguments | {"processing_class": chatml_tokenizer(DROPS_THINKING)}
    config = PPOConfig(**settings)
    with pytest.raises(ConversationError, match="raw_turns: true"):
        MacroPPOTrainer(environment_factory=Adding, args=config, **rewriting).train()
    raw = PPOConfig(**settings, raw_turns=True)
    MacroPPOTrainer(environment_factory=Adding, args=raw, **rewriting).train()
    assert read_lines(raw.output_dir)
