"""Chat models: each one is prompted in the format that it was trained on.

A run records what its prompts looked like: messages through a chat template, dialogues in plain
text, or single requests. In another format a model answers worse than it can.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from marlhf.config.build import build_segmenter
from marlhf.core import needs
from marlhf.data import DataConfig, DataError, decode, load_data
from marlhf.data.code import write_problem
from marlhf.data.encode import encode_prompt
from marlhf.data.preferences import write_post, write_question
from marlhf.data.rows import Message, Text, after_colon
from marlhf.evaluate.eval_plan import (
    EvaluationError,
    PolicySource,
    find_policies,
    located,
    named_apart,
    without_none,
)
from marlhf.evaluate.sampling import seed_of
from marlhf.models.base import Model, Precision, Tokenizer, autocast
from marlhf.models.forward import token_stats
from marlhf.models.load import check_vocabulary, end_tokens, load_policy, load_tokenizer
from marlhf.models.sequences import Sequences
from marlhf.rollout import Sampling
from marlhf.rollout.native import NativeEngine
from marlhf.runs.layout import model_folder
from marlhf.spans.apply import segment_response

FORMS = {
    "chat": "messages through the chat template",
    "hh": "a dialogue of Human: and Assistant:",
    "webgpt": "Human: and Assistant:, each question on its own",
    "tldr": "posts to summarise, each on its own",
    "apps": "programming problems, each on its own",
    "text": "as typed, each on its own",
}
"""Prompt formats by name, each with a description for the user."""
WRITERS = {"webgpt": write_question, "tldr": write_post, "apps": write_problem}
REMEMBER = ("chat", "hh")
"""Formats in which earlier turns are part of the prompt, as in their data."""
SINGLE = ("toy", "toy-code", "sums", "sums-steps", "mbpp", "humaneval", "gsm8k")
"""Sources whose prompts have no fixed format, or one that does not fit on a line."""
MAX_NEW_TOKENS = 256
"""For models whose run does not record a response length."""


@dataclass(frozen=True)
class ChatTurn:
    """A question and its answer."""

    number: int
    question: str
    answer: str
    prompt_ids: list[int]
    answer_ids: list[int]
    ended: bool
    """Whether the answer ended with an end-of-sequence token."""
    seed: int


@dataclass
class ChatModel:
    """A loaded model with its conversation so far."""

    name: str
    policy: PolicySource
    tokenizer: Tokenizer
    model: Model
    form: str
    sampling: Sampling
    trust_code: bool = False
    system: str = ""
    turns: list[ChatTurn] = field(default_factory=list)

    @property
    def precision(self) -> Precision:
        return self.policy.config.get("precision") or "auto"

    def ask(self, question: str, number: int, seed: int) -> ChatTurn:
        """Answer a question in the context of earlier turns; the caller appends it to `turns`."""
        ids = encode_prompt(self.tokenizer, self.prompt(question))
        limit = getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize
        max_new_tokens = min(self.sampling.max_new_tokens, limit - len(ids))
        if max_new_tokens < 1:
            shorter = ", /undo or /reset" if self.turns and self.form in REMEMBER else ""
            raise EvaluationError(
                f"The prompt takes {len(ids)} tokens and leaves no room for an answer: the model "
                f"has {limit} positions. Write a shorter message{shorter}."
            )
        row_seed = seed_of(str(number), 0, seed)
        sampling = replace(self.sampling, max_new_tokens=max_new_tokens)
        try:
            rollout = self.engine.generate([ids], sampling, [row_seed])
        except KeyboardInterrupt:
            vars(self).pop("engine", None)  # its caches hold half an answer: build a new one
            raise
        [answer] = rollout.responses
        text = decode(self.tokenizer, answer)
        return ChatTurn(number, question, text, ids, answer, bool(rollout.ended[0]), row_seed)

    @cached_property
    def engine(self) -> NativeEngine:
        ends, pad = end_tokens(self.model, self.tokenizer), self.tokenizer.pad_token_id
        return NativeEngine(self.model, ends, pad, precision=self.precision)

    def prompt(self, question: str) -> Text:
        """The conversation so far and the question, in this model's prompt format."""
        if self.form == "chat":
            return [*self.messages(), {"role": "user", "content": question}]
        if self.form == "hh":
            earlier = "".join(
                f"Human: {turn.question}\n\nAssistant:{after_colon(turn.answer)}\n\n"
                for turn in self.turns
            )
            return f"{earlier}Human: {question}\n\nAssistant:"
        return WRITERS[self.form](question) if self.form in WRITERS else question

    def messages(self) -> list[Message]:
        """The conversation so far."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer.strip()})
        return messages

    def set_system(self, system: str) -> None:
        """Set the system message, if the chat template accepts one."""
        if self.form != "chat":
            raise EvaluationError(f"It was not trained with system messages ({FORMS[self.form]}).")
        before, self.system = self.system, system
        try:
            encode_prompt(self.tokenizer, self.prompt("Hello"))
        except (TemplateError, DataError) as error:
            self.system = before
            reason = error.__cause__ or error  # the template's own words, not advice about rows
            raise EvaluationError(f"Its chat template takes no system message: {reason}") from None

    @torch.no_grad()
    def actions(self, turn: ChatTurn) -> list[str]:
        """The text of each macro action of an answer, by the model's own segmenter."""
        config = self.policy.config
        if not config.get("segmenter"):
            raise EvaluationError("It was not trained with macro actions.")
        rule = config["segmenter"]
        rule = str(rule.get("type", "") if isinstance(rule, dict) else rule)
        if ":" in rule and not self.trust_code:
            raise EvaluationError(
                f"{self.policy.folder} names {rule} as its segmenter, and using it runs that code. "
                "Start the chat with --trust-code if you trust the folder."
            )
        segmenter = build_segmenter(config["segmenter"])
        ids = turn.answer_ids
        reads_reference = needs(segmenter, "ref_logprobs", unless_said=True)
        starts = segment_response(
            segmenter,
            ids,
            self.tokenizer,
            seed=turn.seed,
            ref_logprobs=self._ref_logprobs(turn) if reads_reference else None,
            split_last=bool(config.get("split_last")),
        )
        ends = [i for i, start in enumerate(starts) if start and i] + [len(ids)]
        # Decode prefixes rather than pieces: a token may depend on those before it, and a
        # character may be split between two actions. The action that completes it shows it.
        pieces, decoded = [], ""
        for end in ends:
            text = decode(self.tokenizer, ids[:end])
            if end < len(ids):
                text = text.rstrip("\ufffd")
            pieces.append(text[len(decoded) :])
            decoded = text
        return pieces

    @cached_property
    def reference(self) -> Model:
        config = self.policy.config
        path = model_folder(located(config.get("ref_model") or config["model"], self.policy))
        seed = int(config.get("seed") or 0)
        loaded = load_policy(path, seed=seed, trust_remote_code=self.trust_code)
        return loaded.to(self.model.device).eval()

    def _ref_logprobs(self, turn: ChatTurn) -> torch.Tensor:
        device, pad = self.model.device, self.tokenizer.pad_token_id
        whole = Sequences.from_lists([turn.prompt_ids], [turn.answer_ids], pad, device)
        with autocast(device, self.precision):
            return token_stats(self.reference, whole, self.sampling.scale).logprobs.cpu()


def load_chat_models(
    paths: Sequence[Path | str],
    device: torch.device,
    *,
    form: str = "auto",
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    trust_code: bool = False,
) -> list[ChatModel]:
    """Load every model under `paths`: runs, folders of runs, model folders, hub names, GGUF.

    Code that a run names or that comes with a model is run only with `trust_code`: a folder
    cannot vouch for itself.
    """
    if form not in ("auto", *FORMS):
        raise EvaluationError(
            f"There is no form {form!r}. Choose one of: auto, {', '.join(FORMS)}."
        )
    policies: dict[str, PolicySource] = {}
    for policy in (policy for path in paths for policy in _find_models(path)):
        policies.setdefault(policy.model, policy)
    overrides = without_none(temperature=temperature, max_new_tokens=max_new_tokens)
    chat_models: list[ChatModel] = []
    for policy in named_apart(policies.values()):
        tokenizer = load_tokenizer(policy.model, trust_remote_code=trust_code)
        model = load_policy(policy.model, trust_remote_code=trust_code).to(device).eval()
        check_vocabulary(model, tokenizer, policy.model)
        own_form = find_form(policy, tokenizer) if form == "auto" else form
        if own_form == "chat" and not tokenizer.chat_template:
            raise EvaluationError(
                f"The tokenizer of {policy.model} has no chat template. Choose another --form."
            )
        sampling = replace(_sampling(policy), **overrides)
        chat_models.append(
            ChatModel(policy.name, policy, tokenizer, model, own_form, sampling, trust_code)
        )
    if not chat_models:
        raise EvaluationError("No path was given. Give a run, a model folder or a hub name.")
    return chat_models


def find_form(policy: PolicySource, tokenizer: Tokenizer) -> str:
    """The prompt format that a model was trained on, as far as its run records it."""
    data: dict[str, Any] = policy.config.get("data") or {}
    source = data.get("source")
    if data.get("chat"):
        return "chat"
    if source in FORMS:
        return str(source)
    if source in SINGLE:
        return "text"
    path = Path(str(data.get("path"))).expanduser()
    if data.get("path") and path.exists():
        few = {"parts": {}, "eval_size": 0, "eval_split": None, "eval_path": None, "limit": 4}
        try:
            prompt = load_data(DataConfig(**{**data, **few})).train[0].prompt
        except DataError:  # the file has changed since the training
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


def _sampling(policy: PolicySource) -> Sampling:
    raw = dict(policy.config.get("sampling") or {})
    length = policy.config.get("max_response_tokens") or MAX_NEW_TOKENS
    return Sampling(**{"max_new_tokens": length, **raw})


def _find_models(path: Path | str) -> list[PolicySource]:
    """The policies in a folder; or one that is no local folder: `tiny`, a GGUF file, a hub name."""
    name, parts = str(path), str(path).split("/")
    if Path(path).is_file():
        if not name.endswith(".gguf"):
            raise EvaluationError(f"{name} is a file. Give the folder of a run or of a model.")
    elif (
        Path(path).exists()
        or parts[0] in ("", ".", "..", "~")
        or len(parts) > 2
        or (len(parts) == 2 and Path(parts[0]).is_dir())
    ):
        return find_policies([path])
    return [PolicySource(Path(name), name, name.rstrip("/").rpartition("/")[2])]
