"""Tools in TRL's forms: what a GRPO script has runs unchanged."""

import asyncio
from types import SimpleNamespace

import pytest

from conversations import chatml_tokenizer, play
from marlhf.data import Row
from marlhf.environments import ChatTokens, ConversationError, Conversations, environment_from
from marlhf.environments.tools import Toolbox, ToolCall, read_calls, read_fenced, read_hermes

TOKENIZER = chatml_tokenizer()
END = TOKENIZER.eos_token


def call(name, **arguments):
    import json

    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def script(*texts):
    return lambda row, turn, ids: texts[min(turn, len(texts) - 1)] + END


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


async def later(text: str) -> str:
    """Say it later.

    Args:
        text: What to say.
    """
    await asyncio.sleep(0.001)
    return f"later: {text}"


class Counter:
    """As in TRL's own documentation."""

    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.goal = kwargs["goal"]
        return f"\nReach {self.goal}."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    async def fail(self) -> None:
        """Fail at once."""
        raise RuntimeError("no luck")

    @property
    def costly(self):
        raise AssertionError("a property is no tool")

    def _hidden(self):
        """Nobody calls this."""

    def get_reward(self) -> float:
        return 1.0 if self.counter == self.goal else 0.0


ROWS = [Row([{"role": "user", "content": "Count."}], columns={"goal": goal}) for goal in (3, 4)]


def test_an_environment_in_trls_form_runs_unchanged():
    make = environment_from(factory=Counter)
    model = script(f"First. {call('increment', step=1)}", call("increment", step=2), "Done.")
    played = play(make, model, TOKENIZER, ROWS)
    first, second = played.records
    assert [(m["role"], m["content"]) for m in first.messages] == [
        ("user", "Count.\nReach 3."),
        ("assistant", f"First. {call('increment', step=1)}"),
        ("tool", "1"),
        ("assistant", call("increment", step=2)),
        ("tool", "3"),
        ("assistant", "Done."),
    ]
    assert [turn.reward for turn in first.turns] == [0, 0, 1]
    assert (first.reason, first.success, first.tool_calls) == ("done", True, 2)
    assert (second.reason, second.success, second.tool_errors) == ("done", False, 0)
    prompt = TOKENIZER.decode(played.prompts[0])
    assert "increment" in prompt
    assert "_hidden" not in prompt
    # The last round of calls is made even where no turn is left to read it, as TRL does.
    [cut] = play(make, model, TOKENIZER, ROWS[:1], max_turns=2).records
    assert (cut.reason, cut.turns[-1].reward) == ("max_turns", 1)


def test_several_environments_are_chosen_by_the_row():
    class Other(Counter):
        def decrement(self, step: int) -> int:
            """Take away.

            Args:
                step: How much.
            """
            return self.increment(-step)

    make = environment_from([add], {"up": Counter, "down": Other})
    rows = [Row("Count.", columns={"goal": -2, "environment": name}) for name in ("up", "down")]
    played = play(make, script(call("decrement", step=2), "Done."), TOKENIZER, rows)
    assert [record.success for record in played.records] == [False, True]
    assert [record.tool_errors for record in played.records] == [1, 0]
    shown = [TOKENIZER.decode(prompt) for prompt in played.prompts]
    assert ["decrement" in text for text in shown] == [False, True]
    assert all('"add"' in text for text in shown)
    [lost] = play(make, script("x"), TOKENIZER, [Row("Count.", columns={"goal": 1})]).records
    assert "environment: None" in lost.reason


def test_tools_alone_answer_the_prompts_of_the_rows():
    make = environment_from([add, later])
    text = call("add", a=1, b=2) + call("later", text="x") + call("nothing") + call("add", a=1)
    [record] = play(make, script(text, "3"), TOKENIZER, [Row("1 + 2?")]).records
    assert [m["content"] for m in record.messages if m["role"] == "tool"] == [
        "3",
        "later: x",
        "error: there is no tool 'nothing'; there is add, later",
        "error: missing a required argument: 'b'",
    ]
    assert (record.tool_calls, record.tool_errors) == (4, 2)
    assert record.success is None  # nobody judged it here: reward functions do


def test_faults_go_back_to_the_model():
    make = environment_from(factory=Counter)
    for text, fault in (
        (call("fail"), "RuntimeError: no luck"),
        (call("increment", step="x"), "TypeError: "),
        (call("_hidden"), "there is no tool '_hidden'"),
        (call("reset"), "there is no tool 'reset'"),
        (call("get_reward"), "there is no tool 'get_reward'"),
        ("<tool_call>\n{}\n</tool_call>", "it has no name"),
        ("<tool_call>\n{'name': 1}\n</tool_call>", "it is not JSON"),
        (call("increment", step=1)[:-9], "it is cut off"),
    ):
        [record] = play(make, script(text, "Done."), TOKENIZER, ROWS[:1]).records
        assert record.messages[2]["role"] == "tool"
        assert record.messages[2]["content"].startswith("error: "), text
        assert fault in record.messages[2]["content"]
        assert (record.tool_errors, record.reason) == (1, "done")


def test_a_tool_that_hangs_ends_the_episode():
    async def forever() -> None:
        """Wait."""
        await asyncio.sleep(30)

    rows = [Row("Hi"), Row("Hi")]

    def model(row, turn, ids):
        return (call("forever") if row else call("later", text="x") if not turn else "ok") + END

    played = play(environment_from([forever, later]), model, TOKENIZER, rows, timeout=0.3)
    assert [record.reason for record in played.records] == ["done", "timeout"]


def test_calls_are_read_by_the_tokenizers_own_template_where_it_has_one():
    schemas = Toolbox([add]).schemas
    prompt = ChatTokens(TOKENIZER).prompt([{"role": "user", "content": "Hi"}], schemas)
    own = chatml_tokenizer()
    own.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "content": {"close": ["<|im_end|>"], "content": "text"},
            "tool_calls": {
                "open": "[[",
                "close": "]]",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    text = 'Well. [[{"name": "add", "arguments": {"a": 1, "b": 2}}]]<|im_end|>'
    assert read_calls(own, own.encode(text), prompt, schemas) == [ToolCall("add", {"a": 1, "b": 2})]
    assert read_calls(own, own.encode(call("add", a=1)), prompt, schemas) == []
    [bad] = read_calls(own, own.encode("[[{]]<|im_end|>"), prompt, schemas)
    assert "cannot be read" in bad.fault


def test_calls_in_the_form_of_hermes():
    text = f"{call('add', a=1)} and {call('add', a=2)}"
    assert [each.arguments for each in read_hermes(text)] == [{"a": 1}, {"a": 2}]
    assert read_hermes('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>') == [
        ToolCall("f", {"a": 1})
    ]
    assert read_hermes("None here.") == []
    for doubled in (
        '{{"name": "f", "arguments": {"a": 1}}}',
        '{{"name": "f", "arguments": {"a": 1}}',
    ):
        assert read_hermes(f"<tool_call>\n{doubled}\n</tool_call>") == [ToolCall("f", {"a": 1})]
    broken = '<tool_call>{"name": "f", "arguments": {"a": "x = 1\nprint(x)"}}</tool_call>'
    assert read_hermes(broken) == [ToolCall("f", {"a": "x = 1\nprint(x)"})]
    [bad] = read_hermes("<tool_call>{{name}}</tool_call>")
    assert "it is not JSON" in bad.fault


def test_calls_in_code_blocks_are_read():
    """Qwen2.5-Coder writes them so, with line breaks inside texts and text around the block."""
    call = '{"name": "f", "arguments": {"code": "x = 1\nprint(x)"}}'
    expected = [ToolCall("f", {"code": "x = 1\nprint(x)"})]
    for start in ("```json", "```", "```python "):
        assert read_fenced(f"First:\n{start}\n{call}\n```\nThen #### 1", ["f", "g"]) == expected
    assert len(read_fenced(f"```\n{call}\n```\n\n```\n{call}\n```", ["f"])) == 2
    [bad] = read_fenced(f"```json\n{call[:-1]}\n```", ["f"])
    assert "not JSON" in bad.fault
    for other in (
        f"```\n{call}",
        call,
        f"```\n[{call}]\n```",
        "```\n{'name': 'f'}\n```",
        "```\n```",
    ):
        assert read_fenced(other, ["f"]) == []
    assert read_fenced(f"```\n{call}\n```", ["g"]) == []


def test_tags_come_before_code_blocks():
    """A block beside a tagged call is text, and one alone is a call."""
    block = '```\n{"name": "f", "arguments": {"a": 2}}\n```'
    tagged = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    schemas = [{"type": "function", "function": {"name": "f"}}]
    for text, value in ((tagged + block, 1), (block, 2)):
        tokenizer = SimpleNamespace(decode=lambda _, text=text: text)
        assert read_calls(tokenizer, [], [], schemas) == [ToolCall("f", {"a": value})]


def test_what_is_no_tool_and_no_environment_gets_a_sentence():
    def undescribed(x):
        return x

    class NoReset:
        def increment(self): ...

    class Empty:
        def reset(self): ...

    class Stepped:
        def reset(self, row, seed): ...
        def step(self, reply): ...

    for tools, factory, sentence in (
        ([undescribed], None, "cannot be described"),
        ([3], None, "function with a name"),
        ([add, add], None, "Two tools are called `add`"),
        (None, NoReset, "has no `reset`"),
        (None, Empty, "neither `step` nor public methods"),
        ([add], Stepped, "is given alone"),
        (None, {"a": Stepped}, "is given alone"),
    ):
        with pytest.raises(ConversationError, match=sentence):
            environment_from(tools, factory)


def test_a_template_without_tools_is_refused_before_the_first_step():
    from marlhf.models.tiny import tiny_tokenizer

    limits = {"max_turns": 2, "episode_tokens": 2000}
    Conversations(environment_from([add]), ChatTokens(TOKENIZER), **limits).check(Row("Hi"))
    with pytest.raises(ConversationError, match="cannot do tools"):
        Conversations(environment_from([add]), ChatTokens(tiny_tokenizer()), **limits).check(
            Row("Hi")
        )
