"""`marlhf chat RUN --environment NAME`: watching a conversation, and answering as the world."""

import io
import os
import pty

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from marlhf.chat.terminal import open_task, play, summary_of
from marlhf.cli import app, main
from marlhf.environments import ConversationError, EpisodeRecord, Turn
from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions
from marlhf.evaluate.score import evaluate

OPTIONS = EvaluationOptions(prompts=2, reference="none", device="cpu")


@pytest.fixture
def run(finished):
    """A finished run in the guessing game, of an untrained model."""
    file = finished / "ppo" / "config.yaml"
    settings = {
        "environment": "guess",
        "max_turns": 2,
        "episode_tokens": 100,
        "reward_model": "",
        "data": {"source": "guess", "limit": 200, "eval_size": 20},
        "sampling": {"max_new_tokens": 4, "temperature": 1.0},
    }
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | settings))
    return finished / "ppo"


def console():
    return Console(file=io.StringIO(), width=200, highlight=False, markup=False)


def test_what_is_watched_is_what_was_evaluated(run):
    task, out = open_task(str(run), OPTIONS), console()
    records = []
    for number, line in enumerate(evaluate([run], OPTIONS)[0].lines):
        records.append(play(task, number, out, None))
        assert records[-1].to_dict() == line["episode"]
    shown = out.file.getvalue().splitlines()
    said = [message for record in records for message in record.messages]
    for role in ("assistant", "user"):
        written = sum(text.startswith(f"{role}: ") for text in shown)
        assert written == sum(message["role"] == role for message in said) > 0
    assert shown[0].startswith("user: Game ")
    lost = EpisodeRecord(records[0].messages, [Turn(0, 2, 0.0, "")] * 2, "max_turns", success=False)
    assert "after 2 turns, reward 0, not solved" in summary_of(lost, scored=True)


def test_a_person_answers_in_place_of_the_environment(run):
    task, out, asked = open_task(str(run), OPTIONS), console(), []

    def read():
        asked.append(out.file.getvalue())
        return "higher" if len(asked) == 1 else None

    record = play(task, 0, out, read)
    roles = [m["role"] for m in record.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert record.messages[2]["content"] == "higher"
    assert record.reason == "done"
    said = [m["content"] for m in record.messages if m["role"] == "assistant"]
    assert asked[0].count("assistant: ") == 1  # the turn is there before it is answered
    assert asked[1].count("assistant: ") == 2
    assert len(said) == 2
    assert out.file.getvalue() == asked[1]  # and nothing is shown twice
    assert summary_of(record, scored=False) == "ended by done after 2 turns"


def test_nonsense_is_a_sentence(run, finished):
    with pytest.raises(ConversationError, match="There is no environment 'gues'"):
        open_task(str(run), EvaluationOptions(environment="gues", device="cpu"))
    with pytest.raises(EvaluationError, match="was not trained in an environment"):
        open_task(str(finished / "sft"), OPTIONS)
    with pytest.raises(EvaluationError, match="--environment, not none"):
        open_task(str(run), EvaluationOptions(environment="none", device="cpu"))
    with pytest.raises(EvaluationError, match="holds 4 runs"):
        open_task(str(finished), OPTIONS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ppo", "--as", "judge"], "The only choice is world"),
        (["ppo", "sft", "--environment", "guess"], "Give one run"),
    ],
)
def test_the_command_line_refuses_nonsense(words, message):
    refused = CliRunner().invoke(app, ["chat", *words])
    assert isinstance(refused.exception, EvaluationError)
    assert message in str(refused.exception)


def test_the_world_answers_at_a_real_terminal(run, monkeypatch, capfd):
    """The person's own line is not repeated, and Ctrl-D twice leaves."""
    outer, inner = pty.openpty()
    os.write(outer, b"higher\n\x04\x04")
    command = ["marlhf", "chat", str(run), "--as", "world", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", command)
    with open(inner) as keyboard:
        monkeypatch.setattr("sys.stdin", keyboard)
        with pytest.raises(SystemExit) as end:
            main()
    os.close(outer)
    said = "".join(capfd.readouterr())
    assert not end.value.code, said
    assert said.count("assistant: ") == 2
    assert "ended by done after 2 turns" in said
    assert "user: higher" not in said
