"""Environments in processes of their own: the same episodes, and no hang or crash outlives them."""

import os
import sys
import textwrap
import time

import pytest

from conversations import chatml_tokenizer, play
from marlhf.data import Row
from marlhf.environments import ConversationError, environment_from, find_environment
from marlhf.environments.games import Guess
from marlhf.environments.processes import OwnProcess
from marlhf.models.tiny import tiny_tokenizer

TINY = tiny_tokenizer()
END = TINY.eos_token

WORLD = """
import os, random, time
from marlhf.environments import Step
from marlhf.environments.games import Guess

class Inside(Guess):
    own_process = True
    timeout = 5  # Guess needs none

    def reset(self, row, seed):
        self.how = row.columns.get("how")
        return super().reset(row, seed)

    def step(self, reply):
        if self.how == "hang":
            time.sleep(60)
        if self.how == "crash":
            os._exit(7)
        if self.how == "lambda":
            return Step(state=lambda: None)
        if self.how == "raise":
            raise ValueError("broken")
        return super().step(reply)

class Counter:
    own_process = True

    def reset(self, **row):
        self.counter = 0

    def increment(self, by: int) -> int:
        '''Add to the counter.

        Args:
            by: How much.
        '''
        self.counter += by
        return self.counter

    def where(self) -> int:
        '''The process.'''
        return os.getpid()

    def get_reward(self):
        return float(self.counter)
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    (tmp_path / "world_of_tests.py").write_text(textwrap.dedent(WORLD))
    monkeypatch.syspath_prepend(str(tmp_path))
    OwnProcess(Guess).close()  # what all processes are forked from takes seconds to import torch
    yield "world_of_tests"
    sys.modules.pop("world_of_tests", None)


@pytest.fixture
def started(monkeypatch):
    """The processes that a test starts."""
    processes = []
    begin = OwnProcess.__init__

    def watched(self, make):
        begin(self, make)
        processes.append(self._process)

    monkeypatch.setattr(OwnProcess, "__init__", watched)
    return processes


def said(*texts):
    return lambda row, turn, ids: texts[min(turn, len(texts) - 1)] + END


def test_an_episode_is_the_same_in_a_process_of_its_own(world, started):
    rows = [Row("", columns={"game": n, "number": n + 1}) for n in range(3)]
    inside = play(find_environment(f"{world}:Inside"), said("3", "2", "1"), TINY, rows)
    here = play(find_environment("guess"), said("3", "2", "1"), TINY, rows)
    assert inside.records == here.records
    assert inside.responses == here.responses
    assert len(started) == 3
    assert os.getpid() not in [process.pid for process in started]
    assert not any(process.is_alive() for process in started)


def test_a_hang_or_a_crash_ends_one_episode_and_its_process(world, started):
    how = ["hang", "crash", "lambda", "raise", None]
    rows = [Row("", columns={"game": n, "number": 1, "how": each}) for n, each in enumerate(how)]
    begun = time.monotonic()
    played = play(find_environment(f"{world}:Inside"), said("1"), TINY, rows)
    assert time.monotonic() - begun < 50  # the environment would sleep for 60 seconds
    reasons = [record.reason for record in played.records]
    assert reasons[0] == "timeout"
    assert reasons[1] == "error: its process ended with exit code 7"
    assert reasons[2].startswith("error: what step returned cannot be sent")
    assert reasons[3] == "error: ValueError: broken"
    assert reasons[4] == "done"
    assert not any(process.is_alive() for process in started)


def test_tools_run_where_the_environment_is(world, started):
    import world_of_tests

    tokenizer = chatml_tokenizer()

    def replies(row, turn, ids):
        call = '<tool_call>{"name": "%s", "arguments": {%s}}</tool_call><|im_end|>'
        calls = [call % ("increment", '"by": 2'), call % ("where", ""), "Done.<|im_end|>"]
        return calls[turn]

    make = environment_from(factory=world_of_tests.Counter)
    played = play(make, replies, tokenizer, timeout=60, max_turns=4, episode_tokens=600)
    [record] = played.records
    tools = [m["content"] for m in record.messages if m["role"] == "tool"]
    assert tools[0] == "2"
    assert int(tools[1]) == started[-1].pid
    assert record.turns[-1].reward == 2.0
    assert record.tool_calls == 2


def test_a_class_that_no_process_can_import_is_refused():
    class Local:
        own_process = True

        def reset(self, row, seed):
            return [{"role": "user", "content": "Hi"}]

        def step(self, reply):
            raise AssertionError("never begun")

    with pytest.raises(ConversationError, match="Define its class and its tools in a module"):
        environment_from(factory=Local)()
