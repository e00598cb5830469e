"""README and docs are true: their code runs, their commands parse, their names exist."""

import ast
import dataclasses
import functools
import io
import json
import re
import shlex
import sys
import types
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
import yaml

from marlhf import core
from marlhf.cli import app, main
from marlhf.cli.memory import card_bytes, planned_stages, smallest_card
from marlhf.config.settings import SEGMENTERS, describe
from marlhf.report.page import TITLES
from marlhf.runtime.memory_plan import GIB, plan_run
from marlhf.train.recipe import kind_class, load_recipe, load_stage
from marlhf.train.stages import STAGES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/results").glob("*.md")),
]
RECIPE_KEYS = {
    "output_dir",
    "defaults",
    "stages",
    "like",
    "kind",
    "extends",
    "preset",
    "type",
}
TRAINING = ("run", *STAGES)
FENCE = re.compile(r"^(<!-- not run: .+? -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


class Block(NamedTuple):
    language: str
    code: str
    skipped: bool


class Command(NamedTuple):
    page: Path
    words: list[str]
    whole: bool  # a line to type, and not a mention such as `marlhf sft`


def blocks(page: Path, *languages: str) -> list[Block]:
    found = [Block(m[2], m[3], bool(m[1])) for m in FENCE.finditer(page.read_text("utf-8"))]
    return [block for block in found if block.language in languages]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def commands(page: Path) -> list[Command]:
    """Lines of shell blocks and indented lines, and mentions in the text."""
    lines = [line for b in blocks(page, "", "sh", "console") for line in b.code.splitlines()]
    lines += [line for line in prose(page).splitlines() if line.startswith("    ")]
    typed = [re.sub(r"^\$ |^torchrun .*? -m (?=marlhf )", "", line.strip()) for line in lines]
    found = [(line, True) for line in typed if line.startswith("marlhf ")]
    for span in SPAN.findall(prose(page)):
        if match := re.fullmatch(r"(?:[A-Z]+=\S+ )*(marlhf .+)", span):
            found.append((match[1], False))
    return [Command(page, shlex.split(c, comments=True)[1:], whole) for c, whole in found]


COMMANDS = [command for page in PAGES for command in commands(page)]


def tables(page: Path, first: str) -> list[list[list[str]]]:
    """Rows of cells of each table whose first column is headed so."""
    found = re.findall(r"(?:^\|.*\n)+", prose(page) + "\n", re.M)
    rows = [
        [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
        for table in found
    ]
    return [table[2:] for table in rows if table[0][0].strip("`") == first]


def first_column(page: Path, first: str) -> list[str]:
    cells = [row[0] for table in tables(page, first) for row in table]
    return [span for cell in cells for span in SPAN.findall(cell)]


@functools.cache
def known_settings() -> set[str]:
    names = {name for kind in STAGES for name, *_ in describe(kind_class(kind))}
    rules = [getattr(core, rule) for rule in SEGMENTERS.values()]
    return names | {field.name for rule in rules for field in dataclasses.fields(rule)}


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def say(*words: str) -> str:
    """What a command prints, output before errors; it must succeed."""
    out, err, before, status = io.StringIO(), io.StringIO(), sys.argv, None
    sys.argv = ["marlhf", *words]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        status = end.code
    finally:
        sys.argv = before
    assert not status, err.getvalue()
    return out.getvalue() + err.getvalue()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """`ran(page)`: the folder in which a page's Python blocks have run, one after the other."""
    folders: dict[Path, Path] = {}

    def run(page: Path) -> Path:
        if page not in folders:
            folder = tmp_path_factory.mktemp(page.stem)
            space = {"__name__": "__main__"}
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                patch.setenv("HF_HUB_OFFLINE", "1")
                for number, block in enumerate(blocks(page, "python"), start=1):
                    if not block.skipped:
                        name = f"{page_name(page)}, block {number}"
                        exec(compile(block.code, name, "exec"), space)
            folders[page] = folder
        return folders[page]

    return run


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """`recipes(page, name)`: the file of a recipe written out on that page, or on another."""
    folder = tmp_path_factory.mktemp("recipes")
    files: dict[tuple[Path, str], Path] = {}
    for page in PAGES:
        for block in blocks(page, "yaml"):
            if name := re.match(r"# (\S+\.yaml)\n", block.code):
                file = folder / page.stem / name[1]
                file.parent.mkdir(exist_ok=True)
                file.write_text(block.code, "utf-8")
                files[page, name[1]] = file
    rule = blocks(ROOT / "docs/segmenters.md", "python")[0].code
    (folder / "my_module.py").write_text(rule, "utf-8")

    def find(page: Path, name: str) -> str:
        elsewhere = (file for (_, other), file in files.items() if other == name)
        return str(files.get((page, name)) or next(elsewhere, name))

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield find
    sys.modules.pop("my_module", None)


one_process = pytest.mark.xdist_group("pages that ran")  # so that each runs once


@one_process
@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_blocks_run(page, ran):
    ran(page)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_recipes_load(page, recipes):
    for block in blocks(page, "yaml"):
        name = re.match(r"# (\S+\.yaml)\n", block.code)
        assert name, f"a recipe begins with a comment that names it:\n{block.code}"
        raw, file = yaml.safe_load(block.code), recipes(page, name[1])
        if "stages" in raw:
            rounds = range(1, raw.get("rounds", 0) + 1)
            repeated = [f"{name}-{k}" for k in rounds for name in raw["round"]]
            assert [stage.name for stage in load_recipe(file)] == [*raw["stages"], *repeated]
        else:
            scored = {"reward_model", "reward_funcs", "process_model"} & raw.keys()
            load_stage(file, "ppo" if scored else "sft")


@functools.cache
def command_group() -> typer.core.TyperGroup:
    return typer.main.get_command(app)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.page.stem}: {c.words[0]}")
def test_commands_exist(command, recipes):
    group = command_group()
    name, *words = command.words
    assert name in group.commands
    known = {flag for option in group.commands[name].params for flag in option.opts}
    flags = {word for word in words if re.match(r"--?[a-z]", word)}
    assert flags <= known | {"--help"}
    if not command.whole:
        return
    parsed = group.commands[name].make_context(name, list(words)).params
    if name in TRAINING:
        recipe, overrides = recipes(command.page, parsed["recipe"]), parsed["overrides"]
        if name == "run":
            assert load_recipe(recipe, overrides)
        else:
            assert load_stage(recipe, name, overrides, parsed["stage"])


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_shown_output_is_real(page):
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block.code, flags=re.M)[1:]:
            typed, _, shown = part.partition("\n")
            assert say(*shlex.split(typed)[1:]) == shown, typed


def test_quick_commands_run():
    wants_runs = ("report", "pass-at-k", "evaluate", "best-of-n", "judge", "agreement")
    wants_runs += ("annotate", "sweep", "chat", "verl", "credit", "watch", "init", "grpo", "export")
    told = {tuple(c.words) for c in COMMANDS if c.words[0] not in (*TRAINING, *wants_runs)}
    assert {words[0] for words in told} >= {"segment", "config", "recipes", "doctor"}
    for words in told:
        assert say(*words), words


def test_make_targets_exist():
    told = {word for page in PAGES for word in re.findall(r"^    make (\w+)", prose(page), re.M)}
    made = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    assert {"demo", "test"} <= told <= made


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]+)?\)", prose(page)):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{target} is not there"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(file), re.M)
            assert anchor[1:] in [re.sub(r"[^\w]+", "-", h.lower()).strip("-") for h in headings]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_settings_exist(page):
    known = known_settings()
    leaves = {name.rpartition(".")[2] for name in known} | RECIPE_KEYS
    assert set(first_column(page, "setting")) <= known
    written = {m[1] for s in SPAN.findall(prose(page)) if (m := re.match(r"([a-z_]+): \S", s))}
    assert written <= leaves


@one_process
def test_every_metric_is_explained(ran):
    """Just those that a run writes, and each of them."""
    folder = ran(ROOT / "docs/align.md") / "runs/py"
    lines = [json.loads(x) for f in folder.rglob("metrics.jsonl") for x in f.open("r")]
    written = {key for line in lines for key in line} - {"kind", "step", "seconds"}
    assert set(first_column(ROOT / "docs/report.md", "metric")) == written


@one_process
def test_every_file_of_a_run_is_explained(ran):
    there = {path.name for path in (ran(ROOT / "docs/align.md") / "runs/py/ppo").iterdir()}
    there.add("best")  # only where the start was beaten
    assert set(first_column(ROOT / "docs/resume.md", "file")) == there


def test_every_section_of_the_report_is_explained():
    explained = {row[0] for table in tables(ROOT / "docs/report.md", "section") for row in table}
    assert TITLES
    assert set(TITLES.values()) <= explained


def test_named_tests_exist():
    code = "\n".join(f.read_text("utf-8") for f in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", prose(page)):
            assert f"def {name}(" in code


def test_quoted_messages_are_those_of_the_code():
    said = "\n".join(text for f in (ROOT / "src").rglob("*.py") for text in strings(f))
    for page in PAGES:
        for message in first_column(page, "message"):
            for part in filter(None, (p.strip() for p in message.split("…"))):
                assert part in said, f"{page.name}: {part}"


def test_torchrun_knows_its_options():
    from torch.distributed.run import get_args_parser

    lines = [line for page in PAGES for b in blocks(page, "sh") for line in b.code.splitlines()]
    told = [shlex.split(line)[1:] for line in lines if line.startswith("torchrun ")]
    assert told
    for words in told:
        parsed = get_args_parser().parse_args(words)
        assert parsed.module, words
        assert parsed.training_script == "marlhf"


def test_the_migration_page_lists_every_change():
    """What the table says, done to TRL's script by machine, is the script that runs."""
    page = ROOT / "docs/migrate.md"
    _, before, after, *_ = blocks(page, "python")
    assert before.skipped
    script = before.code
    for old, new in tables(page, "in TRL's script")[0]:
        [theirs], ours = SPAN.findall(old), SPAN.findall(new)
        assert script.count(theirs) == 1, theirs
        if ours:
            script = script.replace(theirs, ours[0])
        else:
            assert new == "(remove)"
            script = re.sub(rf"^ *{re.escape(theirs)}\n", "", script, flags=re.M)
    assert ast.dump(ast.parse(script)) == ast.dump(ast.parse(after.code))  # but for line breaks


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [
        ("GRPO and RLOO", ("GRPOConfig", "RLOOConfig")),
        ("DPO", ("DPOConfig",)),
        ("SFT", ("SFTConfig",)),
        ("PRM", ("PRMConfig",)),
    ],
)
def test_migration_tables_name_real_settings_of_both_sides(heading, kinds):
    import marlhf

    trl = pytest.importorskip("trl")
    part = (ROOT / "docs/migrate.md").read_text("utf-8").split(f"\n## {heading}\n")[1]
    rows = re.findall(r"^\| (`.+) \| (.+) \|$", part.split("\n## ")[0], re.M)
    prm = pytest.importorskip("trl.experimental.prm")
    classes = [getattr(prm if kind == "PRMConfig" else trl, kind) for kind in kinds]
    theirs = {f.name for each in classes for f in dataclasses.fields(each)}
    ours = {name for kind in kinds for name, *_ in describe(getattr(marlhf, kind))}
    assert len(rows) > 5
    for left, right in rows:
        assert {*SPAN.findall(left)} <= theirs, left
        named = {re.split(r"[:=]", span)[0] for span in SPAN.findall(right)}
        assert named - {"samples.jsonl", "n"} <= ours, right


def test_the_memory_table_is_what_the_formula_says():
    page = ROOT / "docs/gpu.md"
    space: dict = {}
    [block] = blocks(page, "python")
    exec(block.code, space)
    [table] = tables(page, "model")
    assert len(table) == 9
    for size, gpus, *cells in table:
        for cell, way in zip(cells, ("data", "fsdp", "LoRA", "LoRA, shared base"), strict=True):
            found = round(space["gigabytes"](size, int(gpus), way))
            assert cell == ("-" if way == "fsdp" and gpus == "1" else str(found))


def test_the_table_of_models_and_cards_is_what_doctor_says():
    """One of its rows, in every way to train."""
    [table] = tables(ROOT / "docs/gpu.md", "PPO of")
    [cells] = [cells for name, *cells in table if name == "Llama-3.2-3B"]
    saving = ["optimizer=adamw_8bit", "trained_weights=bfloat16", "offload=true"]
    ways = [("full", []), ("full", saving[:1]), ("full", saving), ("lora", []), ("qlora", [])]
    for cell, (train, changes) in zip(cells, ways, strict=True):
        words = ["batch_size=64", *changes]
        config = planned_stages(None, words, "Llama-3.2-3B", train)[0].config
        peak = plan_run(config, card_bytes(141)).peak / GIB
        assert cell == f"{peak:.0f} ({smallest_card(config) or '-'})"


def test_the_notebook_runs(tmp_path, monkeypatch):
    """Cell by cell, in seconds; the last line of a cell may be an expression."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs/quickstart.ipynb").read_text("utf-8"))["cells"]
    space: dict = {"__name__": "__main__"}
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    with redirect_stdout(io.StringIO()) as out:
        for number, code in enumerate(codes, start=1):
            exec(compile(code, f"quickstart.ipynb, cell {number}", "exec"), space)
    assert space["segments"].ids[0].tolist() == [0] * 5 + [1] * 5 + [2] * 2
    assert "report.html" in out.getvalue()
    assert all(not cell.get("outputs") for cell in cells)


def test_links_of_the_readme_are_absolute_in_a_package_with_an_address(monkeypatch):
    interface = types.ModuleType("hatchling.metadata.plugin.interface")
    interface.__dict__["MetadataHookInterface"] = object  # hatchling is there while building
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    space: dict = {"__name__": "hatch_build"}
    exec((ROOT / "hatch_build.py").read_text("utf-8"), space)
    text = "[a](docs/gpu.md#time) ![b](docs/b.svg) [c](https://d.org) [e](#here)"
    assert space["absolute"](text, "https://x.org/r") == (
        "[a](https://x.org/r/blob/main/docs/gpu.md#time) ![b](https://x.org/r/raw/main/docs/b.svg) "
        "[c](https://d.org) [e](#here)"
    )
    readme = (ROOT / "README.md").read_text("utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert len(links) > 20
    assert not [link for link in links if "marlhf/marlhf" in link]
    changed = re.findall(r"\]\(([^)\s]+)\)", space["absolute"](readme, "https://x.org/r"))
    assert all(link.startswith(("https://", "#")) for link in changed)


def test_the_site_has_every_page_in_one_of_four_groups():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert [*map(next, map(iter, site["nav"]))] == ["Start", "Guides", "Concepts", "Reference"]
    listed = re.findall(r"[\w/-]+\.md", json.dumps(site["nav"]))
    written = [str(f.relative_to(ROOT / "docs")) for f in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*written, "settings.md"])  # made while the site is built


def test_the_settings_page_has_every_setting():
    space: dict = {}
    exec((ROOT / "docs/hooks.py").read_text("utf-8"), space)
    page = space["settings_page"]()
    for kind in STAGES:
        part = page.split(f"\n## {kind}\n")[1].split("\n## ")[0]
        names = [name for name, *_ in describe(kind_class(kind))]
        assert re.findall(r"^\| `([^`]+)` \|", part, re.M) == names


def test_the_picture_of_macro_actions_is_what_the_script_draws():
    space: dict = {"__name__": "pictures"}
    exec((ROOT / "bench/docs_pictures.py").read_text("utf-8"), space)
    drawn = space["picture"]()
    assert drawn == (ROOT / "docs/images/macro-actions.svg").read_text("utf-8")


def test_the_picture_of_credit_is_what_the_script_draws():
    """From the stored numbers of one response; both rows have the same tokens."""
    space: dict = {"__name__": "pictures"}
    exec((ROOT / "bench/credit_picture.py").read_text("utf-8"), space)
    data = json.loads((ROOT / "docs/images/credit.json").read_text("utf-8"))
    assert space["picture"](data) == (ROOT / "docs/images/credit.svg").read_text("utf-8")
    tokens, fives = data["credit"]["1"], data["credit"]["5"]
    assert len(tokens) == len(fives) == len(data["tokens"])
    assert all(len(set(fives[i : i + 5])) == 1 for i in range(0, len(fives), 5))
    assert len(set(tokens)) > len(tokens) / 2


def strings(file: Path) -> list[str]:
    """Every string of a file as one piece, what is filled in left out."""
    found = []
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        if isinstance(node, ast.JoinedStr):
            parts = [v.value for v in node.values if isinstance(v, ast.Constant)]
            found.append("\0".join(map(str, parts)))
    return found
