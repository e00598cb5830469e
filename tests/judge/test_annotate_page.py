"""The page in a real browser against a real server: nothing is mocked, one of them gets killed."""

import contextlib
import json
import re
import signal
import sqlite3
import subprocess
import sys

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("annotate page"),  # one process, so that one browser starts
]
TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi.\n" * 40},
    {"role": "user", "content": "Why is the sky blue?"},
]
HOSTILE = (
    "<script>window.hacked = 1; fetch('http://evil.example/a')</script>"
    "<img src='http://evil.example/b' onerror='window.hacked = 1'>"
    "<svg onload='window.hacked = 1'></svg><iframe src='http://evil.example/c'></iframe>"
    "</div></main><style>* { display: none }</style><a href='javascript:hacked=1'>x</a>"
    "{{7*7}} ${7*7} &lt;b&gt; \u202e reversed \u0000 \u2028 ' \" ` \\ "
)


def rows(name):
    """Two plain pairs, one hostile all over, one without a break in it, one with a long chat."""
    texts = ["plain", "simple", HOSTILE, "x" * 3000, "talk"]
    prompts = ["A question", "Another", HOSTILE + "?", "y" * 3000, TURNS]
    return [
        {"prompt": prompt, "response": f"{name} {text}", "reference": f"See {text}"}
        for prompt, text in zip(prompts, texts)
    ]


class Server:
    """`marlhf annotate` as a process of its own."""

    def __init__(self, folder, port=0, host="127.0.0.1", files=None, options=()):
        for name in ("quince", "medlar"):
            file = folder / f"{name}.jsonl"
            word = {"quince": "One", "medlar": "Two"}[name]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows(word)), "utf-8")
        files = files or [folder / f"{name}.jsonl" for name in ("quince", "medlar")]
        self.database = folder / "votes.sqlite"
        command = [sys.executable, "-m", "marlhf", "annotate", *map(str, files), "--task", "webgpt"]
        command += [*options, "--host", host, "--port", str(port), "--database", str(self.database)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = ""
        while "Open" not in said:
            line = self.process.stderr.readline()
            assert line, said
            said += line
        self.url = re.search(r"Open (\S+) in", said)[1]
        self.port = int(re.search(r":(\d+)/", self.url)[1])

    def end(self, how=signal.SIGINT):
        self.process.send_signal(how)
        self.process.wait(60)
        self.process.stderr.close()

    def events(self, name):
        with sqlite3.connect(self.database, timeout=60) as db:
            found = db.execute(
                "SELECT kind, pair FROM events WHERE annotator = ? ORDER BY number", (name,)
            ).fetchall()
        db.close()
        return found

    def kinds(self, name):
        return [kind for kind, _ in self.events(name)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("votes"))
    yield server
    server.end()


class Person:
    """Someone at the page, in a browser profile of their own."""

    def __init__(self, pages, server, name, **profile):
        self.server, self.name = server, name
        self.faults, self.asked, self.heard = [], [], []
        listeners = {
            "console": lambda said: self.faults.append(said.text),
            "pageerror": lambda error: self.faults.append(str(error)),
            "dialog": lambda dialog: self.faults.append(dialog.message),
            "request": lambda request: self.asked.append(request.url),
            "response": lambda reply: self.heard.append(reply),
        }
        self._lent = contextlib.ExitStack()
        self.page = self._lent.enter_context(pages.lend(listeners, **profile))
        self.page.goto(server.url)

    def begin(self):
        self.page.get_by_label("Your name").fill(self.name)
        self.page.get_by_role("button", name="Begin").click()
        return self.ready()

    def ready(self):
        """The id of the pair that is shown, once it takes votes; None at the end."""
        self.page.wait_for_selector("body[data-state=ready], body[data-state=end]")
        return self.page.get_attribute("body", "data-pair")

    def act(self, action):
        """Do something that changes the pair, and wait for the next to be ready."""
        before = self.ready()
        action()
        self.page.wait_for_function("before => document.body.dataset.pair !== before", arg=before)
        return self.ready()

    def press(self, key):
        return self.act(lambda: self.page.keyboard.press(key))

    def tap(self, name):
        button = self.page.get_by_role("button", name=name)
        return self.act(button.tap if self.context_has_touch else button.click)

    context_has_touch = False

    def text(self, id):
        return self.page.locator(f"#{id}").text_content()

    def read_both(self):
        """Scroll to the end, as a phone wants before a vote."""
        self.page.evaluate("window.scrollTo(0, document.documentElement.scrollHeight)")
        self.page.wait_for_selector("body[data-seen=both]")

    def progress(self):
        return self.text("progress")

    def close(self):
        self._lent.close()


@pytest.fixture
def sit_down(pages, server):
    """`sit_down("Ann")`: a person at the page, gone again after the test."""
    people = []

    def sit_down(name, at=server, **profile):
        person = Person(pages, at, name, **profile)
        people.append(person)
        return person

    yield sit_down
    for person in people:
        person.close()


MARKDOWN = """# Title <b>

Some **bold** and `x < y` text.

- one
- two [link](javascript:alert(1))

```python
if a < b:
    print("<script>")
```
"""


def _format(page, text):
    """The outline of a text as the page formats it: tags and texts."""
    return page.evaluate(
        """async (text) => {
            const { markdown } = await import("/markdown.js");
            const box = document.createElement("div");
            box.append(...markdown(text));
            return [box.textContent, [...box.querySelectorAll("*")].map((e) => e.localName)];
        }""",
        text,
    )


def test_markdown_is_formatted_and_only_text(sit_down):
    ann = sit_down("Ann")
    words, tags = _format(ann.page, MARKDOWN)
    assert tags == ["h3", "p", "strong", "code", "ul", "li", "li", "pre", "code"]
    assert 'if a < b:\n    print("<script>")' in words
    assert "[link](javascript:alert(1))" in words
    words, tags = _format(ann.page, HOSTILE + " ```\n" + HOSTILE)
    assert not {"script", "img", "svg", "iframe", "style", "a"} & {*tags}
    assert ann.faults == []


def test_remarks_travel_with_the_vote_and_m_shows_the_raw_text(pages, tmp_path):
    for name in ("one", "two"):
        lines = [{"prompt": f"{i}?", "response": f"{name} **{i}**\n\n- a\n- b"} for i in range(2)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text, "utf-8")
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    server = Server(tmp_path, files=files, options=["--strength"])
    ann = Person(pages, server, "Ann")
    try:
        ann.begin()
        assert ann.page.locator("#left strong").count() == 1
        ann.page.keyboard.press("m")
        assert "**" in ann.text("left")
        assert ann.page.locator("#left strong").count() == 0
        ann.page.keyboard.press("e")
        ann.page.keyboard.press("f")
        ann.page.keyboard.press("n")
        ann.page.keyboard.type("1 is odd")  # no vote while typing
        ann.page.keyboard.press("Enter")
        ann.press("1")
        assert "**" in ann.text("left")  # raw stays raw
        assert ann.page.locator("#note").input_value() == ""
        assert not ann.page.locator("#flag").is_checked()
        ann.press("2")
        with sqlite3.connect(server.database, timeout=60) as db:
            kept = db.execute("SELECT strength, flag, note FROM remarks").fetchall()
        db.close()
        assert kept == [(3, 1, "1 is odd")]
        assert ann.faults == []
    finally:
        ann.close()
        server.end()


def test_conversations_are_shown_turn_by_turn(pages, tmp_path):
    for name in ("one", "two"):
        lines = []
        for i in range(2):
            said = [
                {"role": "user", "content": f"Game {i}?"},
                {"role": "assistant", "content": f"**{name}**\n\nuser: found"},
                {"role": "user", "content": HOSTILE},
            ]
            episode = {"messages": said, "turns": [{"start": 0, "stop": 3}]}
            lines.append({"prompt": said[:1], "response": "", "episode": episode})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text, "utf-8")
    server = Server(tmp_path, files=[tmp_path / "one.jsonl", tmp_path / "two.jsonl"])
    ann = Person(pages, server, "Ann")
    try:
        ann.begin()
        assert ann.page.locator("#prompt .turn").count() == 1
        for side in ("left", "right"):
            roles = ann.page.locator(f"#{side} .turn .role").all_text_contents()
            assert roles == ["assistant", "user"]
        words = ann.page.locator("#left .turn .words").all_text_contents()
        assert words[0] in ("**one**\n\nuser: found", "**two**\n\nuser: found")
        assert ann.page.locator("#raw").is_hidden()
        ann.press("1")
        assert ann.faults == []
    finally:
        ann.close()
        server.end()


def test_voting_by_keyboard_to_the_end(sit_down, server):
    ann = sit_down("Ann")
    first = ann.begin()
    assert ann.progress() == "0 of 5 compared"
    assert "Which answer is more useful" in ann.text("question")
    assert "Factual accuracy" in ann.text("criteria")
    assert ann.text("reference").startswith("See ")
    second = ann.press("1")
    assert ann.progress() == "1 of 5 compared"
    ann.press("2")
    ann.press("3")
    assert ann.press("s") is not None
    assert ann.progress() == "3 of 5 compared, 1 skipped"
    last = ann.press("1")
    assert server.events("Ann")[3] == ("skip", last)  # the skipped one comes again
    assert ann.press("3") is None
    assert server.kinds("Ann") == ["left", "tie", "right", "skip", "left", "right"]
    assert [pair for _, pair in server.events("Ann")][:2] == [first, second]
    assert ann.text("end-title") == "Thank you, Ann"
    assert ann.page.locator("#tally li").all_text_contents() == [
        "2 on the left were better", "1 were ties", "2 on the right were better"
    ]  # fmt: skip
    assert ann.press("u") == last
    assert ann.press("2") is None
    assert ann.faults == []


def test_keys_with_a_modifier_or_in_the_name_are_no_votes(sit_down, server):
    eve = sit_down("1 2 3")
    eve.page.get_by_label("Your name").press_sequentially("1 2 3 su")
    eve.begin()
    for key in ("Control+1", "Alt+2", "Meta+3", "4", "x"):
        eve.page.keyboard.press(key)
    eve.press("2")
    assert server.kinds("1 2 3") == ["tie"]


def test_voting_by_tap_on_a_phone(sit_down, server):
    bob = sit_down("Bob", width=360, height=740, has_touch=True, is_mobile=True)
    bob.context_has_touch = True
    bob.begin()
    taps = [
        ("First", "left"), ("Tie", "tie"), ("Undo", "undo"), ("Skip", "skip"), ("Second", "right")
    ]  # fmt: skip
    for name, _ in taps:
        wide, inner = bob.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= inner == 360
        for button in bob.page.locator("footer button:visible").all():
            box = button.bounding_box()
            assert box["height"] >= 44
            assert box["width"] >= 44
        bob.read_both()
        bob.tap(name)
    assert server.kinds("Bob") == [kind for _, kind in taps]
    left, right = (bob.page.locator(f"#{side}").bounding_box() for side in ("left", "right"))
    assert left["y"] + left["height"] <= right["y"]  # one below the other
    assert bob.faults == []


def test_on_a_phone_both_answers_come_before_a_vote(sit_down, server):
    phone = {"width": 390, "height": 844}
    eve = sit_down("Eve", **phone, has_touch=True, is_mobile=True)
    eve.context_has_touch = True
    eve.begin()
    refused = 0
    while eve.page.get_attribute("body", "data-state") != "end":
        if eve.page.get_attribute("body", "data-seen") == "part":
            before = server.kinds("Eve")
            eve.page.get_by_role("button", name="Tie").tap()
            hint = eve.page.locator("#hint").bounding_box()  # beside the buttons, and whole
            assert "Scroll down" in eve.text("hint")
            assert 0 <= hint["x"] <= hint["x"] + hint["width"] <= 390
            assert 422 < hint["y"] < 844
            assert server.kinds("Eve") == before
            refused += 1
        eve.read_both()
        assert eve.page.locator("#hint").is_hidden()
        eve.tap("Tie")
    assert refused >= 1  # the answers of 3000 characters do not fit
    assert eve.faults == []


def test_long_answers_show_that_they_continue_and_page_down_scrolls_both(sit_down):
    person = sit_down("Page", height=700)
    pair = person.begin()
    scrolled = 0
    while pair:
        tops = "[...document.querySelectorAll('.answer .text')].map(e => e.scrollTop)"
        if person.page.locator(".answer .text.continues").count():
            person.page.keyboard.press("PageDown")
            assert min(person.page.evaluate(tops)) > 0
            for _ in range(20):
                person.page.keyboard.press("PageDown")
            person.page.wait_for_selector(".answer .text.continues", state="detached")
            person.page.keyboard.press("PageUp")
            person.page.wait_for_selector(".answer .text.continues")
            scrolled += 1
        pair = person.press("2")
    assert scrolled >= 1


def test_no_width_scrolls_sideways_and_wide_pages_show_both_sides(sit_down):
    person = sit_down("Wide", height=800)
    pair = person.begin()
    while pair:
        for width in (320, 700, 800, 1280):
            person.page.set_viewport_size({"width": width, "height": 800})
            assert person.page.evaluate("document.documentElement.scrollWidth") <= width
        left, right = (person.page.locator(f"#{s}").bounding_box() for s in ("left", "right"))
        bar = person.page.locator("footer").bounding_box()
        assert left["y"] == right["y"]
        assert left["y"] + left["height"] <= bar["y"]  # nothing hides below the buttons
        pair = person.press("2")


def test_a_long_prompt_unfolds(sit_down):
    person = sit_down("Long")
    pair = person.begin()
    seen = 0
    while pair:
        more = person.page.locator("[aria-controls=prompt]")
        if "Why is the sky blue?" in person.text("prompt"):
            box = "[...document.querySelectorAll('#prompt')].map(e => e.clientHeight)[0]"
            folded = person.page.evaluate(box)
            more.click()
            assert more.get_attribute("aria-expanded") == "true"
            assert person.page.evaluate(box) > 3 * folded
            assert person.page.locator(".role").all_text_contents() == ["user", "assistant", "user"]
            seen += 1
        pair = person.press("2")
    assert seen == 1


def test_reload_goes_on_with_the_same_pair_on_the_same_sides(sit_down, server):
    cleo = sit_down("Cleo")
    cleo.begin()
    for key in ("1", "3"):
        pair = cleo.press(key)
        shown = cleo.text("left"), cleo.text("right")
        cleo.page.reload()
        assert cleo.ready() == pair  # the name is remembered
        assert (cleo.text("left"), cleo.text("right")) == shown
        assert cleo.text("annotator") == "Cleo"
    assert cleo.progress() == "2 of 5 compared"
    other = sit_down("cleo ")  # another device
    assert other.begin() == pair
    assert other.progress() == "2 of 5 compared"


def test_a_key_that_bounces_is_one_vote(sit_down, server):
    person = sit_down("Quick")
    person.begin()
    twice = "[1, 2].map(() => document.dispatchEvent(new KeyboardEvent('keydown', {key: '1'})))"
    person.act(lambda: person.page.evaluate(twice))
    assert server.kinds("Quick") == ["left"]


def test_undo_goes_back_and_the_new_vote_counts(sit_down, server):
    dora = sit_down("Dora")
    first = dora.begin()
    assert dora.page.locator("#undo").is_hidden()
    dora.page.keyboard.press("u")  # nothing to take back
    second = dora.press("1")
    assert dora.press("u") == first
    assert dora.press("3") == second
    assert dora.tap("Undo") == first
    dora.page.reload()
    assert dora.ready() == first
    assert server.kinds("Dora") == ["left", "undo", "right", "undo"]


def test_two_at_once_do_not_meet(sit_down, server):
    ann, ben = sit_down("Anna"), sit_down("Ben")
    pairs = ann.begin(), ben.begin()
    assert pairs[0] == pairs[1]
    for keys in ("13", "21", "32", "13", "31"):
        pairs = [ann.press(keys[0]), ben.press(keys[1])]
    assert pairs == [None, None]
    assert server.kinds("Anna") == ["left", "tie", "right", "left", "right"]
    assert server.kinds("Ben") == ["right", "left", "tie", "right", "left"]
    ann.page.get_by_role("button", name="Someone else votes").click()
    ann.name = "Carl"
    assert ann.begin() is not None
    assert ann.progress() == "0 of 5 compared"


def test_the_browser_is_never_told_which_run_is_which(sit_down):
    person = sit_down("Spy")
    pair = person.begin()
    while pair:
        pair = person.press("1")
    told = person.page.content()
    for reply in person.heard:
        told += reply.url + str(reply.headers) + (reply.text() if reply.status == 200 else "")
    assert "One plain" in told
    assert "quince" not in told
    assert "medlar" not in told


def test_hostile_text_is_text(sit_down, server):
    person = sit_down("Guard")
    pair, met = person.begin(), 0
    while pair:
        shown = {person.text("left"), person.text("right")}
        if HOSTILE in person.text("reference"):
            clean = HOSTILE.replace("\u0000", "")
            assert {text.replace("\u0000", "") for text in shown} == {
                f"One {clean}",
                f"Two {clean}",
            }
            assert person.page.locator("main :is(script, img, svg, iframe, style, a)").count() == 0
            met += 1
        pair = person.press("2")
    assert met == 1
    assert person.page.evaluate("window.hacked") is None
    assert all(url.startswith(server.url) for url in person.asked)
    assert person.faults == []


def test_a_bad_name_is_told_and_can_be_mended(sit_down):
    person = sit_down("<b>hello</b>")
    person.page.get_by_label("Your name").fill("<b>hello</b>")
    person.page.get_by_role("button", name="Begin").click()
    person.page.get_by_role("alert").filter(has_text="letters, digits").wait_for()
    person.name = "Mended"
    assert person.begin()
    assert person.page.locator("#notice").is_hidden()


def test_a_killed_server_loses_no_vote_and_the_page_goes_on(sit_down, tmp_path):
    first = Server(tmp_path)
    person = sit_down("Kim", at=first)
    voted = person.begin()
    with person.page.expect_response("**/api/vote") as reply:
        person.page.keyboard.press("1")
    assert reply.value.status == 200
    reply.value.finished()
    first.end(signal.SIGKILL)  # the vote is acknowledged, so it is there
    assert first.events("Kim") == [("left", voted)]

    pair = person.ready()
    person.page.keyboard.press("3")  # into the void: kept by the page
    person.page.get_by_role("alert").filter(has_text="Your vote is kept here").wait_for()
    again = Server(tmp_path, first.port)
    person.page.wait_for_function("old => document.body.dataset.pair !== old", arg=pair)
    person.ready()
    assert again.events("Kim") == [("left", voted), ("right", pair)]
    assert person.progress() == "2 of 5 compared"
    assert person.page.locator("#notice").is_hidden()
    again.end()


def test_the_token_opens_the_page_and_leaves_the_address(sit_down, tmp_path):
    guarded = Server(tmp_path, host="127.0.0.2")  # as foreign as loopback gets
    address, token = guarded.url.split("?token=")
    person = sit_down("Max", at=guarded)
    person.begin()
    assert person.page.url == address
    assert person.page.evaluate("[document.cookie, document.referrer]") == ["", ""]
    person.press("1")
    person.page.reload()
    person.ready()
    assert guarded.kinds("Max") == ["left"]
    assert [url for url in person.asked if token in url] == [guarded.url]
    guarded.url = address  # someone without it
    stranger = sit_down("Eve", at=guarded)
    assert "Open the address with the token" in stranger.page.content()
    guarded.end()


def test_a_vote_that_was_stored_but_not_acknowledged_counts_once(sit_down, server):
    person = sit_down("Lea")
    pair = person.begin()

    def lose_the_answer(route):
        route.fetch()
        route.abort()

    person.page.route("**/api/vote", lose_the_answer, times=1)
    person.press("1")  # sent again by the page
    assert server.events("Lea") == [("left", pair)]
    assert person.progress() == "1 of 5 compared"


def test_the_page_is_legible_in_light_and_dark(sit_down):
    """Contrast of text and buttons, by the WCAG formula: 4.5 and more."""
    measure = """() => {
      const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
      const light = (c) => { const [r, g, b] = rgb(c).slice(0, 3).map((v) => {
        v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const ground = (e) => { for (; e; e = e.parentElement) {
        const c = getComputedStyle(e).backgroundColor;
        if (c !== 'rgba(0, 0, 0, 0)') return c; } return 'rgb(255, 255, 255)'; };
      return [...document.querySelectorAll('#work *')]
        .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())
          && e.getClientRects().length && e.tagName !== 'KBD')
        .map((e) => { const a = light(getComputedStyle(e).color), b = light(ground(e));
          return [e.outerHTML, (Math.max(a, b) + .05) / (Math.min(a, b) + .05)]; });
    }"""
    for scheme in ("light", "dark"):
        person = sit_down(f"Eyes {scheme}", color_scheme=scheme)
        person.begin()
        person.press("2")
        found = person.page.evaluate(measure)
        assert len(found) > 12
        assert [each for each in found if each[1] < 4.5] == []
