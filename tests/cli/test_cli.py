import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from marlhf.cli import main
from marlhf.models.tiny import tiny_tokenizer


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def marlhf(monkeypatch, capfd):
    """Run a command in this process: importing torch anew each time takes seconds."""

    def run(*args: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["marlhf", *args])
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        return Result(status, *capfd.readouterr())

    return run


def test_mistakes_leave_no_traceback_in_a_real_process():
    command = [sys.executable, "-m", "marlhf", "ppo", "nowhere"]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 1
    assert out.stderr.startswith("There is no recipe 'nowhere'")


def test_help_does_not_import_torch():
    code = (
        "import sys, marlhf.cli\n"
        "from typer.testing import CliRunner\n"
        "out = CliRunner().invoke(marlhf.cli.app, ['--help'])\n"
        "assert 'ppo' in out.stdout and out.exit_code == 0\n"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'yaml') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_segment_marks_macro_actions(marlhf):
    out = marlhf("segment", "--text", "there was a fox in the forest", "-s", "ngram n=2")
    assert out.returncode == 0
    assert out.stdout.rstrip("\n").replace("|", "") == "there was a fox in the forest"
    assert out.stdout.count("|") >= 2
    assert "macro actions" in out.stderr


def test_segment_keeps_every_character(marlhf):
    text = "Naïve 😀 \n\t twö  lines"
    out = marlhf("segment", "--text", text, "-s", "words")
    assert out.stdout.rstrip("\n").replace("|", "") == text


def test_segment_by_perplexity_asks_the_model(marlhf):
    text = "there was a fox in the forest"
    assert "give --model" in marlhf("segment", "--text", text, "-s", "perplexity").stderr
    out = marlhf("segment", "--text", text, "-s", "perplexity kind=token", "--model", "tiny")
    assert out.stdout.rstrip("\n").replace("|", "") == text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["segment", "--text", "x", "-s", "ngarm"], "Did you mean ngram"),
        (["segment", "--text", "x", "-s", "ngram n=0"], "n must be a whole number"),
        (["segment", "--text", "x", "-s", "ngram n"], "ngram n=3"),
        (["segment", "--text", ""], "text is empty"),
        (["segment"], "either --text or --file"),
        (["segment", "--file", "nowhere.txt"], "Cannot read nowhere.txt"),
        (["config", "pop"], "Did you mean ppo"),
        (["ppo", "nowhere"], "There is no recipe 'nowhere'"),
        (["sft", "toy", "learnign_rate=1"], "Did you mean learning_rate"),
        (["doctor", "--gpu", "24"], "give a recipe, or --model NAME"),
        (["doctor", "toy", "--train", "lora"], "--train goes with --model"),
        (["report", "nowhere"], "nowhere"),
        (["report", "{}/run/toyy"], "Did you mean {}/run/toy?"),
        (["evaluate", "{}/run/toyy"], "Did you mean {}/run/toy?"),
        (["sft", "toy", "output_dir=/dev/null/x"], "Cannot write to /dev/null/x"),
        (["sft", "toy", "device=gpu", "output_dir={}/a"], "There is no device 'gpu'"),
        (["sft", "toy", "model={}/x/model", "output_dir={}/b"], "run that stage first"),
        (["ppo", "toy", "model=tiny", "reward_model=@rewrad"], "Did you mean reward"),
    ],
)
def test_mistakes_get_a_sentence_and_status_1(marlhf, args, message, tmp_path):
    (tmp_path / "run" / "toy").mkdir(parents=True)
    out = marlhf(*(arg.replace("{}", str(tmp_path)) for arg in args))
    assert out.returncode == 1
    assert message.replace("{}", str(tmp_path)) in out.stderr


def test_doctor_names_versions_and_extras(marlhf):
    out = marlhf("doctor")
    assert out.returncode == 0
    for word in ("torch", "transformers", "CPU cores", "extras"):
        assert word in out.stdout


def test_version_is_a_flag_and_a_command(marlhf):
    from marlhf import __version__

    for way in ("--version", "version"):
        out = marlhf(way)
        assert (out.returncode, out.stdout) == (0, f"{__version__}\n")


def test_watch_is_report_watch(marlhf, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"stage": "sft", "status": "finished"}')
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "sft/loss": 1.0}\n')
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    said = set()
    for command in (["watch"], ["report", "--watch"]):
        out = marlhf(*command, str(run), "-o", str(tmp_path / "r.html"))
        assert out.returncode == 0
        assert "<html" in (tmp_path / "r.html").read_text("utf-8")
        said.add(out.stderr)
    assert len(said) == 1
    assert "All runs have ended." in said.pop()


def test_doctor_lists_every_extra(marlhf):
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    part = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", part, re.M)) - {"dev"}
    part = marlhf("doctor").stdout.split("\nextras")[1].split("\nsandbox")[0]
    heading, listed = part.split("\n", 1)
    assert "pip install 'marlhf[NAME]'" in heading
    assert max(map(len, listed.splitlines())) <= 80
    assert {line.split()[0] for line in listed.splitlines()} == extras
    assert all(line.split()[1] in ("yes", "no") for line in listed.splitlines())


@pytest.mark.parametrize("width", [60, 80, 200])
def test_help_is_not_cut_off(marlhf, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = marlhf("--help").stdout
    assert not [line for line in out.splitlines()[1:] if line.endswith("...")]
    assert "in order, skip finished ones, and write the report" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= max(width, 80)


def test_run_ends_with_one_table_and_what_to_do_next(marlhf, tmp_path):
    out = marlhf(
        *("run", "toy", f"output_dir={tmp_path}/toy", "data.limit=60", "data.eval_size=8"),
        *("num_steps=1", "batch_size=4", "eval_prompts=4", "sampling.max_new_tokens=4"),
        "compile=false",
    )
    assert out.returncode == 0, out.stderr
    header, *rows = [line for line in out.stdout.splitlines() if line.strip("-─ ")]
    assert header.split()[:4] == ["held", "out", "score", "gold"]
    for word in ("KL", "length"):
        assert word in header
    assert [row.split()[0] for row in rows] == ["sft", "reward", "ppo", "macro-ppo"]
    assert "report:" in out.stderr
    assert f"next: marlhf chat {tmp_path}/toy/ppo {tmp_path}/toy/macro-ppo" in out.stderr
    assert f"marlhf judge {tmp_path}/toy/ppo {tmp_path}/toy/macro-ppo" in out.stderr


def test_in_a_terminal_bars_end_above_their_summaries(in_terminal, tmp_path):
    """Two stages at 80 columns: bars stay above what comes after, and nothing is cut off."""
    recipe = tmp_path / "two.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path}/two\n"
        "defaults: {data: {source: toy, limit: 30, eval_size: 8, parts: {}}, device: cpu}\n"
        "stages:\n"
        "  one: {kind: sft, model: tiny, batch_size: 4, num_steps: 3}\n"
        "  two: {like: one}\n"
    )
    status, shown = in_terminal("run", str(recipe))
    assert status == 0, shown
    for stage in ("one", "two"):
        assert shown.rindex(f"{stage} ━") < shown.index(f"{stage} finished in")
    assert re.search(r"3/3 \d:\d\d:\d\d done\r", shown)
    assert "batch: loss " in shown
    assert "…" not in shown


def test_in_a_terminal_errors_break_between_words(in_terminal, tmp_path):
    missing = tmp_path / "a-folder-that-is-not-there" / "-".join(["long"] * 20)
    status, shown = in_terminal("report", str(missing))
    lines = shown.replace("\r", "").splitlines()
    assert status == 1
    assert any(str(missing) in line for line in lines)  # whole, for copying
    assert all(len(line) <= 80 for line in lines if str(missing) not in line)
    assert " ".join(lines).startswith(f"There is no folder {missing}. Give the folder of a run")


@pytest.fixture
def in_terminal(monkeypatch):
    """`in_terminal("run", ...)`: exit status in a terminal of 80 columns, and what it showed."""

    def run(*args: str) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        chunks: list[bytes] = []
        reader = threading.Thread(target=read_all, args=(ours, chunks))
        reader.start()
        with open(theirs, "w", encoding="utf-8") as screen, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            patch.setattr(sys, "stderr", screen)
            patch.setattr(sys, "argv", ["marlhf", *args])
            for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}.items():
                patch.setenv(name, value)
            try:
                main()
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
        reader.join()
        text = b"".join(chunks).decode("utf-8")
        return status, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)

    return run


def read_all(descriptor: int, chunks: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # Linux says so when the other side is closed
        while chunk := os.read(descriptor, 65536):
            chunks.append(chunk)
    os.close(descriptor)


def test_config_prints_help_and_resolved_recipes(marlhf):
    assert "Weight of the KL penalty" in marlhf("config", "ppo").stdout
    shown = marlhf("config", "ppo", "gemma-2b/tldr", "kl_coef=0.3").stdout
    assert "kl_coef: 0.3" in shown
    assert "type: ngram" in shown


def test_grpo_is_a_stage_of_its_own_name(marlhf, tmp_path):
    assert "learning_rate: float = 1.0e-06" in marlhf("config", "grpo").stdout
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path / 'runs'}\n"
        "stages:\n"
        "  grpo: {model: tiny, reward_model: tiny, random_reward_head: true, batch_size: 2,\n"
        "         num_samples: 2, num_steps: 1, eval_prompts: 2, clip: [0.2, 0.28],\n"
        "         sampling: {max_new_tokens: 4}, data: {source: toy, limit: 99}}\n"
    )
    out = marlhf("grpo", str(recipe))
    assert out.returncode == 0, out.stderr
    state = json.loads((tmp_path / "runs/grpo/run.json").read_text())
    assert (state["stage"], state["status"]) == ("grpo", "finished")
    assert marlhf("grpo", str(recipe)).stderr.count("is finished") == 1


def test_recipes_are_listed(marlhf):
    assert "gemma-2b/tldr" in marlhf("recipes").stdout


def test_a_segmenter_that_breaks_its_contract_is_a_sentence(marlhf, tmp_path, monkeypatch):
    (tmp_path / "late_rule.py").write_text(
        "import torch\n"
        "def late(responses):\n"
        "    starts = torch.zeros_like(responses.mask)\n"
        "    starts[:, 1] = True\n"
        "    return starts\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    small = ["batch_size=4", "eval_prompts=2", "sampling.max_new_tokens=4", "data.limit=300"]
    models = [
        "model=tiny",
        "reward_model=tiny",
        "random_reward_head=true",
        f"output_dir={tmp_path / 'run'}",
    ]
    out = marlhf("ppo", "toy", "segmenter=late_rule:late", *models, *small)
    assert out.returncode == 1
    assert "Set `starts[:, 0] = True`" in out.stderr
    assert "Traceback" not in out.stderr


def test_a_report_that_cannot_be_written_is_a_sentence(marlhf, tmp_path):
    (tmp_path / "run").mkdir()
    line = '{"kind": "train", "step": 1, "seconds": 1.0, "sft/loss": 2.0}\n'
    (tmp_path / "run" / "metrics.jsonl").write_text(line)
    out = marlhf("report", str(tmp_path / "run"), "-o", "/dev/null/report.html")
    assert out.returncode == 1
    assert "Cannot write to /dev/null: " in out.stderr
    assert "-o of a report" in out.stderr


def test_an_import_that_a_signal_garbles_is_a_stop(monkeypatch, capsys):
    def garbled():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except KeyboardInterrupt:
            raise RecursionError from None

    monkeypatch.setattr(sys.modules["marlhf.cli.app"], "app", garbled)
    with pytest.raises(SystemExit, match="130"):
        main()
    assert capsys.readouterr().err == "Stopped.\n"


@pytest.mark.parametrize("delay", [0.7, 1.0, 1.5, 2.5])
def test_sigterm_while_starting_is_status_130(delay):
    command = [sys.executable, "-m", "marlhf", "sft", "toy", "output_dir=/dev/null/x"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(delay)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    # -15: it had not come as far as its handler; 1: it was quick to find its folder missing.
    assert process.returncode in (130, 1, -signal.SIGTERM)
    assert "Traceback" not in errors


def test_a_signal_during_an_import_is_status_130(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, signal\nexec('os.kill(os.getpid(), signal.SIGTERM)\\nx = [0] * 10')\n"
    )
    code = (
        "import sys\n"
        "app = sys.modules['marlhf.cli.app']\n"
        "def command():\n    import slow\n    raise SystemExit(0)\n"
        "app.app = command\n"
        "app.main()"
    )
    out = subprocess.run(
        [sys.executable, "-c", "import marlhf.cli\n" + code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (out.returncode, out.stderr) == (130, "Stopped.\n")


@pytest.mark.parametrize("arguments", [["run", "toy", "ppo.batchsize=3"], ["ppo", "toy", "sede=1"]])
def test_a_typo_is_reported_before_torch_loads(arguments):
    code = (
        "import sys\n"
        "from marlhf.cli import main\n"
        f"sys.argv = ['marlhf', *{arguments}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    print(end.code, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.stdout.strip() == "1 []"
    assert "Did you mean" in out.stderr


LATER = [
    ("ppo.reward_funcs=[no_such_module:f]", "There is no module 'no_such_module'"),
    ("ppo.reward_funcs=[unparsable_rewards:f]", "Cannot import unparsable_rewards: SyntaxError"),
    ("ppo.reward_funcs=[brevity]", "as in my_rewards:brevity"),
    ("ppo.reward_funcs=['torch.utils.collect_env:run']", "is not marked as a reward"),
    ("ppo.reward_weights=[1.0, 2.0, 3.0]", "reward_weights. Give one each"),
    ("ppo.reward_weights=[.nan]", "reward_weights must be finite"),
    ("ppo.sampling.temperature=0", "The policy must explore"),
    ("ppo.sampling.max_new_tokens=100000", "leave no room for a prompt"),
    ("ppo.batch_size=100000", "rows for a batch of 100000"),
    ("ppo.batch_size=1000", "of 1000 that were read. Each stage has only its share"),
    ("ppo.device=cuda:99", "There is no device 'cuda:99'"),
    ("ppo.report_to=wandb", "pip install 'marlhf[wandb]'"),
    ("ppo.data={path: nowhere.jsonl}", "nowhere.jsonl"),
    ("ppo.segmenter={type: constituents, parser: 'stanza:en'}", "stanza"),
    ("ppo.engine=vllm", "marlhf[vllm]"),
    ("ppo.reward_model=@sft", "The stage sft trains a language model, which cannot score"),
    ("ppo.ref_model=./nowhere", "There is no folder ./nowhere"),
    ("ppo.critic_model=no/where", "`critic_model`: There is no folder no/where here, and the hub"),
    ("ppo.ref_model=other", "The reference other does not have the tokenizer of tiny"),
    ("ppo.ref_model=small", "tokens but the reference embeds only 10"),
    ("ppo.push_to_hub=true", "push_to_hub cannot work"),
]


@pytest.mark.parametrize(("override", "message"), LATER)
def test_mistakes_of_a_later_stage_are_reported_before_the_first_trains(
    marlhf, tmp_path, monkeypatch, trained, override, message
):
    monkeypatch.chdir(tmp_path)
    trained("byte-level").save_pretrained("other")
    tiny_tokenizer().save_pretrained("small")
    (tmp_path / "small" / "config.json").write_text('{"vocab_size": 10}')
    (tmp_path / "unparsable_rewards.py").write_text("def f(:\n")
    out = marlhf("run", "toy", "output_dir=runs/toy", "data.limit=1000", override)
    assert out.returncode == 1
    assert message in out.stderr
    assert not (tmp_path / "runs").exists()


def test_missing_columns_of_a_later_stage_are_reported_at_once(marlhf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": f"Why {n}?", "chosen": "Because."}) for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    out = marlhf("run", "toy", "output_dir=runs/toy", "data={path: rows.jsonl}")
    assert out.returncode == 1
    assert "reward: " in out.stderr
    assert "rejected" in out.stderr
    assert not (tmp_path / "runs").exists()


def test_settings_of_a_stage_are_given_alike_to_run_and_to_its_command(marlhf, tmp_path):
    out = marlhf("config", "ppo", "toy", "ppo.batch_size=32", "kl_coef=0.5")
    assert out.returncode == 0
    assert "batch_size: 32\n" in out.stdout
    assert "kl_coef: 0.5\n" in out.stdout
    out = marlhf("config", "ppo", "toy", "ppo.batch_siz=32")
    assert "Did you mean batch_size?" in out.stderr
    assert len(out.stderr) < 200


@pytest.fixture
def recipe_with_code(tmp_path, monkeypatch):
    """A recipe whose segmenter and reward are modules that leave a file when they are imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "open('imported', 'w').close()\n"
        "class Rule:\n"
        "    def __call__(self, responses): return responses.mask\n"
        "def score(completions, **_): return [0.0 for _ in completions]\n"
    )
    settings = {
        "model": "tiny",
        "reward_funcs": ["mine:score"],
        "segmenter": {"type": "mine:Rule"},
        "data": {"source": "toy", "limit": 60},
    }
    raw = {"output_dir": "runs/x", "stages": {"ppo": settings}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(raw))
    return "r.yaml"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["config", "ppo", "RECIPE"], 0),
        (["sweep", "RECIPE", "seed=0,1", "--dry-run"], 0),
        (["run", "RECIPE", "model=./nowhere"], 1),
        (["ppo", "RECIPE", "data={path: nowhere.jsonl}"], 1),
        (["sweep", "RECIPE", "seed=0,1", "device=cuda:99"], 1),
    ],
)
def test_looking_at_a_recipe_or_refusing_it_runs_none_of_its_code(
    marlhf, recipe_with_code, words, status
):
    out = marlhf(*(recipe_with_code if word == "RECIPE" else word for word in words))
    assert out.returncode == status, out.stderr
    assert not Path("imported").exists()
    if words[0] == "config":
        assert "type: mine:Rule" in out.stdout
