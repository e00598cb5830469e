"""The report in a real browser, of runs that were really trained: opened from disk, offline."""

import contextlib
import csv
import functools
import io
import re
from urllib.parse import unquote

import pytest

from marlhf.judge.verdicts import Judgement, write_verdicts
from marlhf.report.write import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("report page"),  # one process, so that one browser starts
]
DATA = {"source": "toy", "limit": 400, "eval_size": 16}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A sweep as `marlhf sweep` leaves it: one SFT and reward model, n of 1 and inf, two seeds."""
    from marlhf import DataConfig, PPOConfig, RewardConfig, SFTConfig
    from marlhf.core import NGram
    from marlhf.rollout import Sampling
    from marlhf.train import ppo, reward, sft

    root = tmp_path_factory.mktemp("runs") / "my-sweep"
    shared = {"data": DataConfig(**DATA), "batch_size": 8, "device": "cpu", "compile": False}
    sft.train(SFTConfig(model="tiny", output_dir=f"{root}/sft", num_steps=2, **shared))
    start = f"{root}/sft/model"
    reward.train(RewardConfig(model=start, output_dir=f"{root}/reward", num_steps=2, **shared))
    for n in (1, float("inf")):
        for seed in (0, 1):
            ppo.train(
                PPOConfig(
                    model=start,
                    reward_model=f"{root}/reward/model",
                    output_dir=f"{root}/n={n},seed={seed}/ppo",
                    seed=seed,
                    segmenter=NGram(n),
                    num_steps=2,
                    eval_every=1,
                    eval_prompts=12,
                    log_samples=3,
                    learning_rate=1e-3,
                    sampling=Sampling(max_new_tokens=8),
                    **shared,
                )
            )
    return root


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """`written(folder)`: the file of a report, written once for all that open it."""
    return functools.cache(
        lambda *paths: write_report(paths, tmp_path_factory.mktemp("report") / "report.html")
    )


@pytest.fixture
def open_page(pages, written):
    """`open_page(folder, width=390, ...)`: the report in a page that keeps faults and requests.

    The page that was opened before is closed.
    """
    with contextlib.ExitStack() as lent:

        def show(*paths, **profile):
            lent.close()
            file, faults, asked = written(*paths), [], []
            listeners = {
                "console": lambda message: faults.append(message.text),
                "pageerror": lambda error: faults.append(str(error)),
                "request": lambda request: asked.append(request.url),
            }
            page = lent.enter_context(pages.lend(listeners, height=900, **profile))
            page.faults, page.asked = faults, asked
            page.goto(file.as_uri())
            return page

        yield show


def _is_quiet(page) -> None:
    assert page.faults == []
    assert [url for url in page.asked if not url.startswith("file:")] == []


def _fits(page) -> None:
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= page.viewport_size["width"]


def test_a_trained_sweep_opens_quietly_with_its_figures(trained, open_page):
    page = open_page(trained)
    _is_quiet(page)
    ids = page.eval_on_selector_all("section", "found => found.map(each => each.id)")
    assert ids[:4] == ["summary", "learning", "frontier", "sweeps"]
    assert {"distributions", "samples", "training", "timing", "stages", "settings"} <= {*ids}
    assert page.locator("#summary table").inner_text().count("2 seeds, finished") == 2
    assert "1\u221en" in page.locator("#sweeps svg").first.text_content()
    assert page.locator("#samples i[title^='advantage']").count() > 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_of_the_page(trained, open_page, width, scheme):
    page = open_page(trained, width=width, color_scheme=scheme)
    _fits(page)
    _is_quiet(page)
    for box in page.eval_on_selector_all(
        "figure svg",
        "found => found.map(each => { const b = each.getBoundingClientRect();"
        " return [b.left, b.right, b.width, b.height] })",
    ):
        assert box[0] >= 0
        assert box[1] <= width + 1
        assert box[2] > 150
        assert box[3] > 40


def test_no_name_or_number_of_a_figure_is_cut_off(trained, demo, open_page):
    for folder in (trained, demo):
        for width, media in ((1280, "screen"), (390, "screen"), (720, "print")):
            page = open_page(folder, width=width)
            page.emulate_media(media=media)
            cut = page.eval_on_selector_all(
                "figure svg text",
                "found => found.filter(e => { const t = e.getBoundingClientRect(),"
                " s = e.ownerSVGElement.getBoundingClientRect();"
                " return t.left < s.left - 2 || t.right > s.right + 2 || t.top < s.top - 2"
                " || t.bottom > s.bottom + 2 }).map(e => e.textContent)",
            )
            assert cut == [], (width, media)


def test_samples_are_searched_where_scripts_run(demo, open_page):
    page = open_page(demo)
    samples, box = page.locator("#samples .sample"), page.get_by_label("Search")
    assert samples.count() == 4
    box.fill("  REAR   wheel")
    assert page.locator("#samples .sample:visible").count() == 1
    assert "rear wheel clicks" in page.locator("#samples .sample:visible").inner_text()
    assert page.locator(".search output").inner_text() == "1 of 4"
    box.fill("thrice-used")  # of a response, cut into macro actions
    assert page.locator("#samples .sample:visible").count() == 4
    box.fill("no such words")
    assert page.locator("#samples .sample:visible").count() == 0
    box.fill("")
    assert page.locator("#samples .sample:visible").count() == 4
    _is_quiet(page)
    without = open_page(demo, java_script_enabled=False)
    assert without.locator("#samples .sample:visible").count() == 4
    assert without.locator(".search").count() == 0


def test_text_has_contrast_in_light_and_dark(trained, open_page):
    for scheme in ("light", "dark"):
        page = open_page(trained, color_scheme=scheme)
        colours = page.evaluate(
            "['p.lead', 'td', 'svg .end', 'svg .ticks text'].map(s => {"
            " const style = getComputedStyle(document.querySelector(s));"
            " return s.startsWith('svg') ? style.fill : style.color })"
        )
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        for colour in colours:
            assert _contrast(colour, back) > 4.5


def _contrast(one: str, other: str) -> float:
    """WCAG's ratio of two CSS colours."""

    def light(colour: str) -> float:
        parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
        linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_figure_downloads_as_the_csv_it_draws(trained, open_page):
    page = open_page(trained)
    figures = page.locator("figure")
    assert figures.count() > 20
    assert page.locator("figure .csv").count() == figures.count()
    with page.expect_download() as download:
        page.locator("#frontier figure .csv").first.click()
    rows = list(csv.reader(io.StringIO(download.value.path().read_text("utf-8"))))
    assert download.value.suggested_filename == "score-against-kl.csv"
    assert rows[0] == ["run", "step", "eval/kl", "eval/score"]
    notes = page.eval_on_selector_all(
        "#frontier figure:first-of-type .marks title", "found => found.map(e => e.textContent)"
    )
    drawn = [re.fullmatch(r"(.+), step (\d+): (\S+) at KL (\S+)", note) for note in notes]
    shown = [(m[1], m[2], float(m[3]), float(m[4])) for m in drawn if m]
    kept = [(run, step, float(score), float(kl)) for run, step, kl, score in rows[1:]]
    assert len(shown) == len(kept) == 6
    for one, other in zip(shown, kept):
        assert one[:2] == other[:2]
        assert one[2:] == pytest.approx(other[2:], rel=0.01, abs=1e-5)


def test_the_contents_lead_to_each_section(trained, open_page):
    page = open_page(trained)
    links = page.eval_on_selector_all("nav a", "found => found.map(e => e.hash.slice(1))")
    assert links == page.eval_on_selector_all("section", "found => found.map(e => e.id)")
    page.locator("nav a", has_text="Samples").click()
    top = page.locator("#samples h2").evaluate("e => e.getBoundingClientRect().top")
    under = page.locator("nav").evaluate("e => e.getBoundingClientRect().bottom")
    assert under <= top < 300


def test_it_prints_on_white_and_in_pages(trained, open_page):
    page = open_page(trained, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    assert page.pdf(format="A4")[:5] == b"%PDF-"


@pytest.fixture
def judged_demo(demo):
    """The demo with the verdicts of a judge who saw both orders."""
    verdicts = [("a", "a"), ("a", "b"), ("b", "b")] * 8
    judgements = [
        Judgement(f"p{i}", "x" * (20 + i), "x" * 30, first if first == second else "tie")
        for i, (first, second) in enumerate(verdicts)
    ]
    about = {
        "judge": "openai:gpt-4o",
        "task": "tldr",
        "order": "both",
        "a": "macro-ppo",
        "b": "ppo",
    }
    write_verdicts(demo / "seed1/macro-ppo/judged/gpt.jsonl", judgements, about)
    return demo


def test_the_whole_demo_with_judges_fits_a_phone(judged_demo, open_page):
    page = open_page(judged_demo, width=390)
    _fits(page)
    _is_quiet(page)


def test_every_column_is_in_sight_on_a_wide_page(judged_demo, open_page):
    page = open_page(judged_demo, width=1440)
    assert "At equal length" in page.locator("#judged .table").first.inner_text()
    cut_off = "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText)"
    assert page.eval_on_selector_all("#summary .table, #judged .table", cut_off) == []


def test_hostile_names_and_samples_run_nothing(make_run, open_page):
    bad = "</style><script>document.title='hacked'</script><img src=http://evil.example/ onerror=x>"
    sample = {"step": 1, "prompt": bad, "pieces": [bad, "x" * 4000], "starts": [True, True]}
    runs = [
        make_run(
            f"{i}/ppo",
            name=bad,
            note=bad,
            config={"sigma": f"{bad}{i}", bad: i},
            metrics=[
                {"kind": "eval", "step": s, "seconds": s, "eval/score": s + i, "eval/kl": s}
                for s in (0, 1, 2)
            ],
            samples=[{**sample, "advantages": [1.0, -1.0]}],
        )
        for i in range(2)
    ]
    page = open_page(*runs, width=390)
    assert "hacked" not in page.title()
    _is_quiet(page)
    _fits(page)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1  # the page's own


def test_csv_links_hold_no_more_than_text(trained, tmp_path):
    html = write_report([trained], tmp_path / "r.html").read_text("utf-8")
    assert len(html.encode()) < 5_000_000
    for data in re.findall(r'href="data:text/csv;charset=utf-8,([^"]*)"', html):
        rows = list(csv.reader(io.StringIO(unquote(data))))
        assert len(rows) > 1
        assert len({len(row) for row in rows}) == 1
