"""Conversations in the report: numbers of episodes, and turns with their credit."""

import re

import pytest

from marlhf.report.groups import group_runs
from marlhf.report.sections.samples import conversations, macro_actions, samples
from marlhf.report.write import report_html
from marlhf.runs.read import read_run

EPISODE = {
    "messages": [
        {"role": "user", "content": "A number?"},
        {"role": "assistant", "content": "16"},
        {"role": "user", "content": "<b>lower</b>"},
        {"role": "assistant", "content": "8"},
    ],
    "turns": [
        {"start": 0, "stop": 2, "reward": 0.0, "state": "A number?"},
        {"start": 4, "stop": 5, "reward": 1.0, "state": "1-15"},
    ],
    "reason": "max_turns",
    "tool_calls": 0,
    "tool_errors": 0,
    "success": True,
}
SAMPLE = {
    "step": 2,
    "index": 0,
    "prompt": "A number?",
    "pieces": ["1", "6", "<b>lower", "</b>", "8"],
    "starts": [True, False, False, False, True],
    "advantages": [-0.5, -0.5, 0.0, 0.0, 2.0],
    "score": 1.0,
    "episode": EPISODE,
}
METRICS = [
    {"kind": "train", "step": step, "seconds": 1.0 * step, "rl/turns": 5.0 - step, **more}
    for step, more in ((1, {"rl/world_tokens": 7.0}), (2, {"rl/world_tokens": 6.0}))
] + [
    {"kind": "eval", "step": 2, "seconds": 3.0, "eval/turns": 2.0, "eval/success": 0.25}
    | {"eval/score": 1.0, "eval/length": 3.0, "eval/failed_episodes": 0.0}
]


@pytest.fixture
def group(make_run):
    def make(**sample):
        folder = make_run("ppo", samples=[SAMPLE | sample], metrics=METRICS)
        return group_runs([read_run(folder)])

    return make


def text(html):
    return re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", html))


def test_turns_show_their_credit_and_the_world_none(group):
    html = conversations(group())
    turns = re.findall(r'<p class="message turn".*?</p>', html)
    assert len(turns) == 2
    assert "16" in turns[0]
    assert "advantage \u22120.50 · reward 0.00 · 2 tokens" in text(turns[0])
    assert 'class="n' in turns[0]
    assert "advantage +2.00 · reward 1.00 · one token" in text(turns[1])
    assert 'class="p4"' in turns[1]
    assert '<p class="message" dir="auto"><b>user</b>&lt;b&gt;lower&lt;/b&gt;</p>' in html
    assert "score 1.00 · solved · 2 turns · ended by max turns" in text(html)


def test_means_over_episodes_are_held_out_ones_where_there_are_any(group):
    html = conversations(group())
    row = text(html[html.index("<tbody") : html.index("</tbody")]).split()
    assert row[-5:] == ["25%", "2.00", "3.00", "6.00", "0%"]
    assert "Tool calls" not in html
    for title in ("Success", "Turns", "Tokens of the model", "Tokens of the world", "Failed"):
        assert title in html


def test_samples_do_not_colour_the_world_s_tokens(group):
    macros = macro_actions(SAMPLE)
    assert [(m.text, m.length, m.is_world) for m in macros] == [
        ("16", 2, False),
        ("<b>lower</b>", 2, True),
        ("8", 1, False),
    ]
    html = samples(group())
    [world] = re.findall(r'<i class="world"[^>]*>([^<]*)</i>', html)
    assert world == "&lt;b&gt;lower&lt;/b&gt;"
    assert "2 macro actions" in html


def test_a_world_that_has_the_last_word_is_no_action():
    episode = EPISODE | {"turns": EPISODE["turns"][:1]}
    macros = macro_actions(SAMPLE | {"episode": episode})
    assert [(m.text, m.is_world) for m in macros] == [("16", False), ("<b>lower</b>8", True)]


def test_runs_without_an_environment_have_no_such_section(make_run):
    alone = {key: value for key, value in SAMPLE.items() if key != "episode"}
    line = {"kind": "train", "step": 1, "seconds": 1.0, "rl/length": 4.0}
    runs = [read_run(make_run("ppo", samples=[alone], metrics=[line]))]
    assert conversations(group_runs(runs)) == ""
    assert 'id="conversations"' not in report_html(runs)


@pytest.mark.parametrize(
    "episode",
    [
        "none",
        {"messages": [], "turns": [{"start": 0, "stop": 1}]},
        {"messages": [{"role": "user"}], "turns": []},
        EPISODE | {"turns": [{"start": -(10**12), "stop": 10**12, "reward": "x"}]},
        EPISODE | {"turns": [{"start": 4, "stop": 0}, {"start": "0", "stop": 1}]},
        EPISODE | {"turns": [{"start": 4, "stop": 0}]},
    ],
)
def test_an_episode_edited_by_hand_breaks_no_report(group, episode):
    assert conversations(group(episode=episode))
    assert samples(group(episode=episode))
