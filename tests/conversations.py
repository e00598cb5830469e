"""Chat templates, and a script that stands for a model and its engine."""

from dataclasses import dataclass

from marlhf.data import Row
from marlhf.environments import ChatTokens, Conversations, Episodes
from marlhf.models.tiny import tiny_tokenizer

CHATML = r"""{%- if tools %}
    {{- '<|im_start|>system\n# Tools' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""Written as Qwen's."""
DROPS_THINKING = CHATML.replace(
    "+ message.content }}\n        {%- for",
    "+ message.content.split('</think>')[-1].lstrip('\\n') }}\n        {%- for",
)


def chatml_tokenizer(template=CHATML):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    tokenizer.chat_template = template
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


@dataclass
class Played:
    """A batch that was played: the ids of each row, and what is on record."""

    prompts: list
    responses: list
    records: list


def play(make, replies, tokenizer, rows=None, seeds=None, **settings):
    """Play a batch with a script for a model: `replies(row, turn, ids so far)` gives text or ids.

    It does what an engine does with its reply function, one row after the other.
    """
    rows = rows or [Row("Begin.")]
    seeds = seeds if seeds is not None else list(range(len(rows)))
    settings = {"max_turns": 6, "episode_tokens": 4000, "timeout": 10.0} | settings
    episodes = Episodes(Conversations(make, ChatTokens(tokenizer), **settings), rows, seeds)
    responses = []
    for row, prompt in enumerate(episodes.prompts):
        ids, limit = [], episodes.limits[row]
        for turn in range(100):
            said = replies(row, turn, prompt + ids)
            said = tokenizer.encode(said) if isinstance(said, str) else said
            said = said[: limit - len(ids)]
            ids += said
            more = episodes.reply(row, said) if len(ids) < limit else None
            if more is None or len(ids) + len(more) >= limit:
                break
            ids += more
        responses.append(ids)
    return Played(episodes.prompts, responses, episodes.records(responses))
