"""`marlhf init`: recipes that fit the data, the model and the card, and validate."""

import io
import json
import sys

import pytest
import yaml

from marlhf.cli import main
from marlhf.train.new_recipe import adapters, look_at, write_recipe
from marlhf.train.recipe import check_recipe, load_recipe

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
DATA = {
    "preferences": [
        {"question": f"Name {i}.", "chosen": f"{i} it is.", "rejected": "No."} for i in range(60)
    ],
    "demonstrations": [
        {"messages": [{**CHAT[0], "content": f"Hello {i}"}, CHAT[1]]} for i in range(60)
    ],
    "answers": [{"problem": f"{i} + 1?", "answer": str(i + 1)} for i in range(60)],
    "prompts": [{"prompt": f"Tell me of {i}."} for i in range(60)],
}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A file of one kind of data, in the folder where commands run."""
    monkeypatch.chdir(tmp_path)

    def make(rows: str | list) -> str:
        records = DATA[rows] if isinstance(rows, str) else rows
        (tmp_path / "mine.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return "mine.jsonl"

    return make


@pytest.mark.parametrize("kind", DATA)
def test_the_recipe_fits_the_data(data, tmp_path, kind):
    written = write_recipe(data(kind), "tiny", "none", tmp_path / "mine.yaml")
    assert (written.data.kind, written.data.rows) == (kind, 60)
    stages = {stage.name: stage.config for stage in check_recipe(tmp_path / "mine.yaml")}
    wanted = {"preferences": ["sft", "reward", "ppo"], "demonstrations": ["sft"]}
    assert list(stages) == wanted.get(kind, ["grpo"])
    assert next(iter(stages.values())).output_dir.startswith("runs/mine/")
    if kind == "answers":
        assert stages["grpo"].reward_funcs == ("marlhf.reward.gsm8k:right_answer",)
    if kind == "preferences":
        assert stages["ppo"].data.columns == {"prompt": "question"}


def test_a_recipe_trains_with_its_example_of_a_reward(data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "mine.yaml"
    write_recipe(data("prompts"), "tiny", "none", path)
    from marlhf.train.stages import METHODS

    changes = ["num_steps=1", "batch_size=2", "eval_prompts=2", "num_samples=2"]
    for stage in load_recipe(path, [*changes, "sampling.max_new_tokens=4"]):
        METHODS[stage.kind].train(stage.config)
    assert (tmp_path / "runs/mine/grpo/model").is_dir()
    sys.modules.pop("rewards")


def test_what_does_not_fit_the_card_trains_adapters():
    model = "owner/model"
    assert adapters(model, 0.5, 80, "ppo") == {}
    assert adapters(model, 7, 0, "ppo") == {}  # on a CPU nothing is refused
    assert adapters(model, 3, 24, "ppo") == {"r": 16, "shared_base": True}
    assert adapters(model, 7, 24, "grpo") == {"r": 16, "quantize": "4bit"}
    with pytest.raises(ValueError, match=r"72 billion parameters, too many for 16 GB\. Choose one"):
        adapters(model, 72, 16, "ppo")


def test_a_large_model_has_lora_in_its_recipe(data, tmp_path):
    write_recipe(data("preferences"), "Qwen/Qwen2.5-3B-Instruct", "4090", tmp_path / "a.yaml")
    ppo = check_recipe(tmp_path / "a.yaml")[-1].config
    assert ppo.lora.shared_base
    assert ppo.data.chat


def test_columns_are_told_by_their_names_and_contents(data):
    rows = [{"instruction": f"Do {i}.", "output": "Done.", "level": 1} for i in range(30)]
    assert look_at(data(rows)).columns == {"prompt": "instruction", "chosen": "output"}
    solved = [{"question": f"{i}?", "answer": f"Because.\n#### {i}"} for i in range(30)]
    assert look_at(data(solved)).kind == "answers"
    essays = [{"question": f"Why {i}?", "answer": "For a reason."} for i in range(30)]
    assert look_at(data(essays)).columns == {"prompt": "question", "chosen": "answer"}


@pytest.mark.parametrize(
    ("rows", "model", "card", "message"),
    [
        ([{"foo": "a", "bar": "b"}] * 30, "tiny", "none", "none looks like a prompt"),
        ([{"prompt": "a"}] * 3, "tiny", "none", "has 3 rows. Give at least 24"),
        ("prompts", "what model?", "none", "neither a folder nor the name of a model"),
        ("prompts", "tiny", "a big one", "'a big one' is no card that marlhf knows"),
        ("prompts", "x/y-500B", "24", "too many for 24 GB"),
    ],
)
def test_nonsense_is_a_sentence(data, tmp_path, rows, model, card, message):
    with pytest.raises(ValueError, match=message):
        write_recipe(data(rows), model, card, tmp_path / "mine.yaml")
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize("name", ["toy", "nowhere.jsonl"])
def test_data_that_is_not_a_file_is_a_sentence(tmp_path, name):
    with pytest.raises(ValueError, match=r"marlhf recipes|There is no"):
        write_recipe(name, "tiny", "none", tmp_path / "mine.yaml")


def test_questions_are_asked_for_what_no_flag_gives(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["marlhf", "init", "-o", "mine.yaml"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{data('preferences')}\nnone\ntiny\n"))
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 0
    assert "question is the prompt" in said
    assert "next: marlhf run mine.yaml" in said
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["output_dir"] == "runs/mine"
    with pytest.raises(SystemExit):
        main()
    assert "Give --data, --card and --model instead" in capsys.readouterr().err


def test_nothing_is_overwritten(data, tmp_path):
    (tmp_path / "rewards.py").write_text("mine")
    write_recipe(data("prompts"), "tiny", "none", tmp_path / "mine.yaml")
    assert (tmp_path / "rewards.py").read_text() == "mine"
    with pytest.raises(ValueError, match=r"mine\.yaml exists"):
        write_recipe(data("prompts"), "tiny", "none", tmp_path / "mine.yaml")
