"""Chat: prompts as in training, histories, commands, hostile answers, a real terminal."""

import io
import json
import os
import pty
import select
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from marlhf import cli
from marlhf.chat.models import ChatModel, ChatTurn, load_chat_models
from marlhf.chat.terminal import Chat, visible
from marlhf.config.stage import LoRA
from marlhf.data import DataConfig, load_data
from marlhf.data.encode import encode_prompt
from marlhf.evaluate.eval_plan import EvaluationError
from marlhf.models.base import ModelError
from marlhf.models.load import load_policy, load_scalar, load_tokenizer
from marlhf.train import sft

CPU = torch.device("cpu")
STORY = "Tell me a tale of a brave fox in the forest."
TOY = {"source": "toy"}


def save_run(folder: Path, stage: str, data=TOY, *, model=None, template="keep", **config) -> Path:
    """A run whose model is there, as if it had been trained."""
    folder.mkdir(parents=True)
    about = {"name": folder.name, "stage": stage, "status": "finished", "seed": 0}
    (folder / "run.json").write_text(json.dumps(about))
    whole = {"output_dir": str(folder), "seed": 0, "data": data, "model": "tiny", **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(whole))
    line = {"kind": "train", "step": 1, "seconds": 1.0, f"{stage}/loss": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (model or load_policy("tiny")).save_pretrained(folder / "model")
    tokenizer = load_tokenizer("tiny")
    if template != "keep":
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    short = {"sampling": {"max_new_tokens": 12, "temperature": 1.0}}
    save_run(root / "sft", "sft", max_response_tokens=10)
    save_run(root / "ppo", "ppo", segmenter={"type": "ngram", "n": 3}, **short)
    save_run(root / "hh", "ppo", {"source": "hh", "path": "gone.jsonl"}, **short)
    save_run(root / "reward", "reward", model=load_scalar("tiny"))
    (root / "unfinished").mkdir()
    (root / "unfinished" / "run.json").write_text('{"stage": "ppo", "status": "running"}')
    return root


@pytest.fixture
def talk(runs):
    """`talk("ppo", "sft")`: a chat with those, and a function for what it has shown."""

    def begin(*names: str, width: int = 100, terminal: bool = True, **options) -> Chat:
        models = load_chat_models([runs / name for name in names], CPU, **options)
        out = Console(
            file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, markup=False
        )
        chat = Chat(models, out)
        chat.errors = Console(file=io.StringIO(), width=200, soft_wrap=True, markup=False)
        return chat

    return begin


def shown(console: Console) -> str:
    text = console.file.getvalue()
    console.file.seek(0)
    console.file.truncate()
    return text


def said(model: ChatModel, question: str) -> str:
    ids = encode_prompt(model.tokenizer, model.prompt(question))
    return model.tokenizer.decode(ids)


def test_prompts_are_those_of_training(talk):
    [ppo, dialogue] = talk("ppo", "hh").models
    assert said(ppo, STORY) == STORY
    rows = load_data(DataConfig(source="toy", limit=100)).train
    assert ppo.prompt(str(rows[0].prompt)) == rows[0].prompt
    assert dialogue.prompt("Why?") == "Human: Why?\n\nAssistant:"
    [chat] = load_chat_models(["tiny"], CPU)
    assert said(chat, "Why?") == "<|user|>Why?<|assistant|>"
    [summary] = load_chat_models(["tiny"], CPU, form="tldr")
    assert summary.prompt("My cat left.").endswith("My cat left.\nTL;DR:")
    [question] = load_chat_models(["tiny"], CPU, form="webgpt")
    assert question.prompt("Why?") == "Human: Why?\n\nAssistant:"


def test_history_is_told_where_training_had_one(talk):
    turn = ChatTurn(0, "Hi", " Ho.", [], [], True, 0)
    chat = load_chat_models(["tiny"], CPU)[0]
    text, dialogue = talk("ppo", "hh").models
    for model in (chat, text, dialogue):
        model.turns.append(turn)
    assert said(chat, "So?") == "<|user|>Hi<|assistant|>Ho.<|eos|><|user|>So?<|assistant|>"
    assert text.prompt("So?") == "So?"
    assert dialogue.prompt("So?") == "Human: Hi\n\nAssistant: Ho.\n\nHuman: So?\n\nAssistant:"


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"prompt": [{"role": "user", "content": "Hi"}], "chosen": "Ho"}, "chat"),
        ({"prompt": "Human: Hi\n\nAssistant:", "chosen": " Ho"}, "hh"),
        ({"prompt": "A long story\nTL;DR:", "chosen": " Short"}, "tldr"),
        ({"prompt": "2 + 2 =", "chosen": " 4"}, "text"),
    ],
)
def test_own_files_tell_their_form(tmp_path, row, form):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(row) + "\n")
    run = save_run(tmp_path / "run", "sft", {"source": "auto", "path": str(path)})
    assert load_chat_models([run], CPU)[0].form == form
    path.unlink()  # then the template is all there is to go by
    assert load_chat_models([run], CPU)[0].form == "chat"


@pytest.mark.parametrize(("chat", "form"), [(True, "chat"), (False, "text")])
def test_text_that_was_trained_on_in_a_chat_is_asked_in_one(tmp_path, chat, form):
    run = save_run(tmp_path / "run", "ppo", {"source": "mbpp", "chat": chat})
    assert load_chat_models([run], CPU)[0].form == form


def test_a_model_without_a_template_is_asked_in_text(tmp_path):
    run = save_run(tmp_path / "run", "sft", {"source": "local", "path": "gone"}, template=None)
    assert load_chat_models([run], CPU)[0].form == "text"
    with pytest.raises(EvaluationError, match="no chat template"):
        load_chat_models([run], CPU, form="chat")


def test_answers_depend_on_seed_and_turn_alone(talk):
    model = talk("ppo").models[0]
    assert model.sampling.max_new_tokens == 12
    first, same = model.ask(STORY, 0, 0), model.ask(STORY, 0, 0)
    assert first == same
    assert {model.ask(STORY, 1, 0).answer, model.ask(STORY, 0, 3).answer} & {first.answer} == set()


def test_commands_change_what_comes_next(talk):
    chat = talk("ppo", "sft")
    assert chat.handle_line(STORY)
    ppo, other = chat.models
    first = ppo.turns[0].answer
    chat.handle_line("/undo")
    assert not ppo.turns
    assert not other.turns
    chat.handle_line("/seed 5")
    chat.handle_line(STORY)
    assert ppo.turns[0].answer != first
    chat.handle_line("/reset")
    chat.handle_line("/seed 0")
    chat.handle_line(STORY)
    assert [turn.answer for turn in ppo.turns] == [first]
    chat.handle_line("/max 3")
    chat.handle_line("/temperature 0")
    chat.handle_line(STORY)
    assert len(ppo.turns[1].answer_ids) <= 3
    ids = torch.tensor([encode_prompt(ppo.tokenizer, STORY)])
    assert ppo.turns[1].answer_ids[0] == int(ppo.model(ids).logits[0, -1].argmax())
    assert not chat.handle_line("/quit")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/temprature 1", "Did you mean /temperature?"),
        ("/temperature hot", "Give a number, as in /temperature 0.7."),
        ("/temperature -1", "temperature must be at least 0"),
        ("/temperature nan", "temperature must be finite"),
        ("/max 0", "max_new_tokens must be at least 1"),
        ("/seed", "Give a number, as in /seed 3."),
        ("/undo", "There is nothing to undo."),
        ("/save", "Give a file name"),
        ("/save /nowhere/x.jsonl", "Cannot write /nowhere/x.jsonl"),
        ("/system Be kind.", "It was not trained with system messages"),
        ("/help", "clear the conversation"),
    ],
)
def test_commands_that_cannot_be_done_say_why(talk, line, message):
    chat = talk("ppo")
    assert chat.handle_line(line)
    assert message in shown(chat.errors)


def test_two_slashes_say_a_slash(talk):
    chat = talk("ppo")
    chat.handle_line("//undo")
    assert chat.models[0].turns[0].question == "/undo"


def test_a_system_message_goes_to_templates_that_take_one(tmp_path):
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    run = save_run(tmp_path / "run", "sft", {"source": "local", "path": "gone"}, template=strict)
    kind, cold = load_chat_models(["tiny", run], CPU)
    kind.set_system("Be kind.")
    assert said(kind, "Hi").startswith("<|user|>Be kind.<|user|>Hi")
    with pytest.raises(EvaluationError, match="takes no system message: no system"):
        cold.set_system("Be kind.")
    assert cold.system == ""


def test_what_is_too_long_is_a_sentence_and_others_answer(talk):
    chat = talk("ppo", width=400)
    [chatty] = load_chat_models(["tiny"], CPU, max_new_tokens=400)
    chat.models.append(chatty)
    chatty.turns.append(ChatTurn(0, " fox" * 250, " owl" * 250, [], [], True, 0))
    chat.number = 1
    chat.handle_line(STORY)
    assert chat.failures == 1
    assert "leaves no room for an answer" in shown(chat.console)
    assert len(chat.models[0].turns) == 1
    assert len(chatty.turns) == 1
    chat.handle_line("/undo")
    assert len(chatty.turns) == 1  # the failed question was never part of its history
    chatty.turns[0] = ChatTurn(0, "fox " * 10, " owl" * 10, [], [], True, 0)
    room = 512 - len(encode_prompt(chatty.tokenizer, chatty.prompt(STORY)))
    assert len(chatty.ask(STORY, 1, 0).answer_ids) <= min(400, room)


HOSTILE = "\x1b[31mred\x1b]0;title\x07 [bold]not bold[/bold] :smile: \x9b2J \u202eevil\r\x08 a\tb"


def test_hostile_answers_are_shown_as_text(talk, monkeypatch):
    monkeypatch.setattr(
        ChatModel, "ask", lambda self, q, n, s: ChatTurn(n, q, HOSTILE, [1], [5, 6], True, 0)
    )
    for terminal in (True, False):
        chat = talk("ppo", "sft", width=200, terminal=terminal)
        chat.handle_line("Hi")
        text = shown(chat.console)
        for obeyed in ("\x1b[31m", "\x1b]", "\x07", "\x9b", "\u202e", "evil\r", "\x08"):
            assert obeyed not in text
        assert text.count("\\x1b[31mred") == 2
        assert text.count("[bold]not bold[/bold] :smile:") == 2


def test_visible_leaves_letters_of_all_kinds():
    text = "naïve 日本 e\u0301 👩\u200d👩 \xa0 line\nline"
    assert visible(text) == text


def test_answers_stand_side_by_side_where_there_is_room(talk):
    wide, narrow = talk("ppo", "sft", width=100), talk("ppo", "sft", width=50)
    for chat in (wide, narrow):
        chat.handle_line(STORY)
    beside, beneath = (shown(chat.console).splitlines() for chat in (wide, narrow))
    assert sum("ppo" in line and "sft" in line for line in beside) == 1
    assert sum("ppo" in line and "sft" in line for line in beneath) == 0


@pytest.mark.parametrize(
    "rule",
    [
        {"type": "ngram", "n": 3},
        {"type": "words"},
        {"type": "random", "lengths": [1, 2, 3]},
        {"type": "perplexity"},
        {"type": "constituents"},
    ],
)
def test_actions_cut_an_answer_as_the_run_would(tmp_path, rule):
    run = save_run(tmp_path / "run", "ppo", segmenter=rule)
    [model] = load_chat_models([run], CPU, max_new_tokens=20)
    turn = model.ask(STORY, 0, 0)
    actions = model.actions(turn)
    assert "".join(actions) == turn.answer
    if rule["type"] == "ngram":
        assert len(actions) == -(-len(turn.answer_ids) // 3)


def test_actions_are_highlighted_or_separated_by_bars(talk):
    chat = talk("ppo", "sft")
    chat.handle_line(STORY)
    shown(chat.console)
    chat.handle_line("/actions")
    assert "\x1b[30;44m" in shown(chat.console)
    assert "sft: no macro actions are shown. It was not trained with" in shown(chat.errors)
    chat = talk("ppo", terminal=False)
    chat.handle_line("/actions")
    chat.handle_line(STORY)
    assert shown(chat.console).count("|") >= 3


def test_a_conversation_is_saved_whole(talk, tmp_path):
    chat = talk("ppo", "sft")
    chat.handle_line(STORY)
    file = tmp_path / "talk.jsonl"
    chat.handle_line(f"/save {file}")
    chat.handle_line(f"/save {file}")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [Path(line["model"]).parent.name for line in lines] == ["ppo", "sft"]
    assert lines[0]["messages"][0] == {"role": "user", "content": STORY}
    assert lines[0]["messages"][1]["content"] == chat.models[0].turns[0].answer.strip()
    (tmp_path / "other").write_text("precious")
    chat.handle_line(f"/save {tmp_path / 'other'}")
    assert (tmp_path / "other").read_text() == "precious"
    assert "exists already" in shown(chat.errors)


def test_an_interrupted_answer_leaves_no_trace(talk, monkeypatch):
    chat = talk("ppo", "sft")
    ppo, second = chat.models
    before = ppo.ask(STORY, 0, 0)

    def interrupt(*_):
        raise KeyboardInterrupt

    second.ask(STORY, 0, 0)
    monkeypatch.setattr(second.engine, "generate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        chat.handle_line(STORY)
    assert not ppo.turns
    assert not second.turns
    chat.handle_line(STORY)
    assert ppo.turns == [before]
    assert len(second.turns) == 1


def test_adapters_answer_as_the_merged_model(tmp_path):
    pytest.importorskip("peft")
    base = save_run(tmp_path / "base", "sft") / "model"
    config = sft.SFTConfig(
        model=str(base),
        output_dir=str(tmp_path / "lora"),
        data=DataConfig(source="toy", limit=100, eval_size=4),
        lora=LoRA(r=2, merge=False),
        batch_size=4,
        num_steps=1,
        learning_rate=0.5,
    )
    folder = sft.train(config)
    assert (folder / "adapter_config.json").is_file()
    [tuned, plain] = load_chat_models([tmp_path / "lora", base.parent], CPU, max_new_tokens=8)
    assert tuned.form == "text"
    assert tuned.ask(STORY, 0, 0).answer_ids != plain.ask(STORY, 0, 0).answer_ids


def test_runs_that_cannot_speak_are_sentences(runs, tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="is a reward model"):
        load_chat_models([runs / "reward"], CPU)
    with pytest.raises(EvaluationError, match="has no model yet"):
        load_chat_models([runs / "unfinished"], CPU)
    with pytest.raises(EvaluationError, match="There is no folder"):
        load_chat_models([tmp_path / "nowhere"], CPU)
    monkeypatch.chdir(runs.parent)
    with pytest.raises(EvaluationError, match="There is no folder"):
        load_chat_models([f"{runs.name}/nowhere"], CPU)
    with pytest.raises(EvaluationError, match="is a file"):
        load_chat_models([runs / "ppo" / "config.yaml"], CPU)
    with pytest.raises(EvaluationError, match="There is no form 'poem'"):
        load_chat_models(["tiny"], CPU, form="poem")


def test_a_folder_of_runs_is_all_that_write(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "again")
    names = [v.name for v in load_chat_models([runs, tmp_path / "again" / "ppo"], CPU)]
    assert names == ["sft", "hh", str(runs / "ppo"), str(tmp_path / "again" / "ppo")]


def test_piped_questions_are_answered_in_order(runs, monkeypatch, capfd):
    def marlhf(text: bytes, *words: str) -> tuple[int, str, str]:
        stdin = io.TextIOWrapper(io.BytesIO(text))
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "argv", ["marlhf", "chat", *words])
        monkeypatch.setenv("COLUMNS", "20")
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capfd.readouterr()

    ppo = str(runs / "ppo")
    model = load_chat_models([ppo], CPU, max_new_tokens=6)[0]
    answers = [visible(model.ask(q, n, 0).answer.strip()) for n, q in enumerate(("Hi", "a\nb"))]
    status, out, err = marlhf(b"Hi\n\na\\\nb\n", ppo, "--max-new-tokens", "6")
    assert status == 0
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert "/help" not in err
    status, out, _ = marlhf(b"Hi\n/quit\nignored", ppo, str(runs / "sft"), "--seed", "1")
    assert status == 0
    assert out.startswith("ppo: ")
    assert "\nsft: " in out
    assert marlhf(b"\xff\xfe broken \n", ppo)[0] == 0
    status, _, err = marlhf(b"fox " * 600, ppo)
    assert status == 1
    assert "leaves no room for an answer" in err
    status, _, err = marlhf(b"", str(runs / "unfinished"))
    assert status == 1
    assert "has no model yet" in err


class Terminal:
    """The other side of a terminal."""

    def __init__(self, number: int) -> None:
        self.number, self.unread = number, ""

    def type(self, keys: str) -> None:
        os.write(self.number, keys.encode())

    def read_until(self, words: str, pressing: str = "", *, gone: bool = False) -> None:
        """Read until there are some words, or the other side is gone.

        A key is pressed, and again where nothing comes of it for some seconds.
        """
        self.type(pressing)
        end = time.monotonic() + 60
        while (gone or words not in self.unread) and time.monotonic() < end:
            try:
                if select.select([self.number], [], [], 3)[0]:
                    self.unread += os.read(self.number, 4096).decode("utf-8", "replace")
                else:
                    self.type(pressing)
            except OSError:  # the other side is gone
                break
        assert words in self.unread, self.unread
        self.unread = self.unread.partition(words)[2] if words else ""


@pytest.mark.xdist_group("forked")
def test_a_real_terminal(runs, fork_server, monkeypatch):
    """Typed lines, Ctrl-C at the prompt, Ctrl-D."""
    number, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    command = ["-m", "marlhf", "chat", str(runs / "ppo"), str(runs / "sft")]
    process = fork_server.start(*command, terminal=theirs)
    os.close(theirs)
    terminal = Terminal(number)
    try:
        terminal.read_until("Ctrl-D leaves.")
        terminal.read_until("> ")
        terminal.type(f"{STORY}\n")
        terminal.read_until("tokens]")
        terminal.read_until("> ")
        # Python hears of a key only once it waits for one, a moment after the prompt is there.
        terminal.read_until("type /quit to leave.", pressing="\x03")
        terminal.read_until("> ")
        terminal.read_until("", pressing="\x04", gone=True)
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(number)
