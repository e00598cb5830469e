"""Models to talk to: what was said, in the form that each was trained on.

A run says what its prompts looked like: messages through a chat template, dialogues in plain text,
or one request at a time. Asked in another form, a model answers worse than it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from marlhf.config import build_segmenter
from marlhf.core import Constituents, Perplexity, Responses
from marlhf.data import DataConfig, DataError, apps, decode, load_data, tldr, webgpt
from marlhf.data.encode import encode_prompt
from marlhf.data.rows import Message, Text, after_colon
from marlhf.evaluate.eval_plan import EvaluationError, Subject, find_subjects, folder_of, located
from marlhf.evaluate.sampling import seed_of
from marlhf.models.base import Model, Precision, Tokenizer, autocast
from marlhf.models.forward import Sequences, token_stats
from marlhf.models.load import check_vocabulary, end_tokens, load_policy, load_tokenizer
from marlhf.rollout import NativeEngine, Sampling
from marlhf.spans import vocabulary
from marlhf.spans.align import TokenBytes
from marlhf.spans.apply import apply_segmenter
from marlhf.spans.parser import build_parser
from marlhf.spans.workers import parse_flat

FORMS = {
    "chat": "messages through the chat template",
    "hh": "a dialogue of Human: and Assistant:",
    "webgpt": "Human: and Assistant:, each question on its own",
    "tldr": "posts to summarise, each on its own",
    "apps": "programming problems, each on its own",
    "text": "as typed, each on its own",
}
"""How a prompt is put together, by name."""
REMEMBER = ("chat", "hh")
"""Forms in which earlier turns are part of the prompt: as the data had them."""
SINGLE = ("toy", "toy-code", "mbpp", "humaneval")
"""Data whose prompts are texts of no set form, or of one that takes more than a line."""
MAX_NEW_TOKENS = 256
"""For models that do not say how long their answers are."""


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    number: int
    question: str
    answer: str
    prompt_ids: list[int]
    answer_ids: list[int]
    ended: bool
    """Whether the answer ended by itself."""
    seed: int


@dataclass
class Voice:
    """A model, loaded, with what it was told and answered."""

    name: str
    subject: Subject
    tokenizer: Tokenizer
    model: Model
    form: str
    sampling: Sampling
    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    _engine: NativeEngine | None = None
    _reference: Model | None = None

    @property
    def precision(self) -> Precision:
        return self.subject.config.get("precision") or "auto"

    def ask(self, question: str, number: int, seed: int) -> Turn:
        """The answer to a question after all before it; it is not yet part of the history."""
        ids = encode_prompt(self.tokenizer, self.prompt(question))
        limit = getattr(self.model.config, "max_position_embeddings", None)
        most = self.sampling.max_new_tokens
        if limit is not None:
            most = min(most, limit - len(ids))
        if most < 1:
            shorter = ", /undo or /reset" if self.turns and self.form in REMEMBER else ""
            raise EvaluationError(
                f"The prompt takes {len(ids)} tokens and leaves no room for an answer: the model "
                f"has {limit} positions. Ask something shorter{shorter}."
            )
        chance = seed_of(str(number), 0, seed)
        if self._engine is None:
            ends, pad = end_tokens(self.model, self.tokenizer), self.tokenizer.pad_token_id
            self._engine = NativeEngine(self.model, ends, pad, precision=self.precision)
        try:
            sampling = replace(self.sampling, max_new_tokens=most)
            rollout = self._engine.generate([ids], sampling, [chance])
        except KeyboardInterrupt:
            self._engine = None  # whatever it was in the middle of
            raise
        [answer] = rollout.responses
        text = decode(self.tokenizer, answer)
        return Turn(number, question, text, ids, answer, bool(rollout.ended[0]), chance)

    def prompt(self, question: str) -> Text:
        """What was said so far and the question, as this model knows it."""
        if self.form == "chat":
            return [*self.messages(), {"role": "user", "content": question}]
        if self.form == "hh":
            said = [(t.question, after_colon(t.answer)) for t in self.turns]
            before = [f"Human: {q}\n\nAssistant:{a}\n\n" for q, a in said]
            return f"{''.join(before)}Human: {question}\n\nAssistant:"
        if self.form == "webgpt":
            return webgpt.write_prompt(question)
        if self.form == "tldr":
            return tldr.write_prompt(question)
        if self.form == "apps":
            return apps.write_prompt(question)
        return question

    def messages(self) -> list[Message]:
        """The conversation so far."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            found.append({"role": "user", "content": turn.question})
            found.append({"role": "assistant", "content": turn.answer.strip()})
        return found

    def instruct(self, system: str) -> None:
        """Set the system message, if the chat template has a place for it."""
        if self.form != "chat":
            raise EvaluationError(f"It was not trained with system messages ({FORMS[self.form]}).")
        before, self.system = self.system, system
        try:
            encode_prompt(self.tokenizer, self.prompt("Hello"))
        except (TemplateError, DataError) as error:
            self.system = before
            raise EvaluationError(f"Its chat template takes no system message: {error}") from None

    @torch.no_grad()
    def actions(self, turn: Turn) -> list[str]:
        """The text of each macro action of an answer, by the rule the model was trained with."""
        config = self.subject.config
        if not config.get("segmenter"):
            raise EvaluationError("It was not trained with macro actions.")
        rule = build_segmenter(config["segmenter"])
        ids = turn.answer_ids
        tokens, spans = torch.tensor([ids]), None
        if isinstance(rule, Constituents):
            aligned = TokenBytes.of(self.tokenizer).align([ids])
            found = parse_flat(build_parser(rule.parser), aligned.texts)
            spans = torch.from_numpy(aligned.token_spans(found))
        responses = Responses(
            tokens,
            torch.ones_like(tokens).bool(),
            ref_logprobs=self._ref_logprobs(turn) if _asks_reference(rule) else None,
            spans=spans,
            vocabulary=vocabulary(self.tokenizer),
            seeds=torch.tensor([turn.seed]),
        )
        split_last = bool(config.get("split_last"))
        starts = apply_segmenter(rule, responses, split_last=split_last).starts[0].tolist()
        ends = [i for i, start in enumerate(starts) if start and i] + [len(ids)]
        pieces, before = [], ""
        for end in ends:
            text = decode(self.tokenizer, ids[:end])
            if end < len(ids):
                text = text.rstrip("\ufffd")  # half a character: what completes it shows it
            pieces.append(text[len(before) :])
            before = text
        return pieces

    def _ref_logprobs(self, turn: Turn) -> torch.Tensor:
        config, device = self.subject.config, self.model.device
        reference = self._reference
        if reference is None:
            path = folder_of(located(config.get("ref_model") or config["model"], self.subject))
            remote = bool(config.get("trust_remote_code"))
            loaded = load_policy(path, seed=int(config.get("seed") or 0), trust_remote_code=remote)
            reference = self._reference = loaded.to(device).eval()
        pad = self.tokenizer.pad_token_id
        whole = Sequences.from_lists([turn.prompt_ids], [turn.answer_ids], pad, device)
        with autocast(device, self.precision):
            return token_stats(reference, whole, self.sampling.scale).logprobs.cpu()


def load_voices(
    paths: Sequence[Path | str],
    device: torch.device,
    *,
    form: str = "auto",
    temperature: float | None = None,
    max_new_tokens: int | None = None,
) -> list[Voice]:
    """Every model under `paths`: runs, folders of runs, model folders, hub names, GGUF files."""
    if form not in ("auto", *FORMS):
        raise EvaluationError(f"There is no form {form!r}. Forms: auto, {', '.join(FORMS)}.")
    subjects: dict[str, Subject] = {}
    for path in paths:
        for subject in [_elsewhere(str(path))] if _is_elsewhere(path) else find_subjects([path]):
            subjects.setdefault(subject.model, subject)
    names = [subject.name for subject in subjects.values()]
    told = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    told = {name: value for name, value in told.items() if value is not None}
    voices: list[Voice] = []
    for subject in subjects.values():
        remote = bool(subject.config.get("trust_remote_code"))
        tokenizer = load_tokenizer(subject.model, trust_remote_code=remote)
        model = load_policy(subject.model, trust_remote_code=remote).to(device).eval()
        check_vocabulary(model, tokenizer, subject.model)
        found = find_form(subject, tokenizer) if form == "auto" else form
        if found == "chat" and not tokenizer.chat_template:
            raise EvaluationError(
                f"The tokenizer of {subject.model} has no chat template. Choose another --form."
            )
        name = subject.name if names.count(subject.name) == 1 else str(subject.folder)
        sampling = replace(_sampling(subject), **told)
        voices.append(Voice(name, subject, tokenizer, model, found, sampling))
    if not voices:
        raise EvaluationError("No path was given. Give a run, a model folder or a hub name.")
    return voices


def find_form(subject: Subject, tokenizer: Tokenizer) -> str:
    """The form of the prompts that a model was trained on, as far as its run knows."""
    data: dict[str, Any] = subject.config.get("data") or {}
    source = data.get("source")
    if source in FORMS:
        return str(source)
    if source in SINGLE:
        return "text"
    path = Path(str(data.get("path"))).expanduser()
    if data.get("path") and path.exists():
        few = {"parts": {}, "eval_size": 0, "limit": 4}
        try:
            prompt = load_data(DataConfig(**{**data, **few})).train[0].prompt
        except DataError:  # moved on since it was trained on
            pass
        else:
            return _form_of(prompt)
    return "chat" if tokenizer.chat_template else "text"


def _form_of(prompt: Text) -> str:
    if not isinstance(prompt, str):
        return "chat"
    if prompt.startswith("Human:") and prompt.rstrip().endswith("Assistant:"):
        return "hh"
    return "tldr" if prompt.rstrip().endswith("TL;DR:") else "text"


def _sampling(subject: Subject) -> Sampling:
    raw = dict(subject.config.get("sampling") or {})
    length = subject.config.get("max_response_tokens") or MAX_NEW_TOKENS
    return Sampling(**{"max_new_tokens": length, **raw})


def _is_elsewhere(path: Path | str) -> bool:
    """Whether a model is no folder here: `tiny`, a GGUF file, or a name on the hub."""
    if Path(path).exists():
        return Path(path).is_file()
    words = str(path).split("/")
    here = words[0] in ("", ".", "..", "~") or len(words) > 2
    return not here and not (len(words) == 2 and Path(words[0]).is_dir())


def _elsewhere(name: str) -> Subject:
    if Path(name).is_file() and not name.endswith(".gguf"):
        raise EvaluationError(f"{name} is a file. Give the folder of a run or of a model.")
    return Subject(Path(name), name, name.rstrip("/").rpartition("/")[2])


def _asks_reference(rule: object) -> bool:
    """Whether a rule may want the reference's log-probs: perplexity rules, and rules of users."""
    return isinstance(rule, Perplexity) or not type(rule).__module__.startswith("marlhf.core")
