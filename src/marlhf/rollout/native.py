"""Sampling with the policy itself, near the speed of the hardware, with nothing to install.

Responses live in slots of a key-value cache (`slots.py`), and a slot whose response has ended takes
the next prompt (`continuous.py`), so a batch costs its mean length and not its longest. Prompts are
prefilled except for their last token, which the first step feeds: all sampling then happens in one
place, the step, and on a GPU that is one CUDA graph. Samples of one prompt, and prompts that begin
with each other, are prefilled once; the other slots read the keys and values there, or get a copy.

Memory: the key-value cache of `token_budget` tokens and, where weights are float32 but computed in
bfloat16, two bytes per weight. Both are kept between calls, unless the cache is large.

A sharded model has to be gathered around `generate`: processes end their responses at different
steps, so no layer may wait for other processes.

Model families differ in more ways than can be listed: windows, chunks, states, what they make of
padding. So each way of sampling is first run on a few fixed tokens, and its logits are compared
with those of one pass without a cache, which is what training computes.

Axes: B rows, N positions compared, V vocabulary.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from marlhf.errors import SettingError
from marlhf.models.base import Model, Precision, autocast
from marlhf.models.compile import is_compiled, uncompiled
from marlhf.models.forward import check_rotary
from marlhf.models.llama import has_hooks
from marlhf.rollout.continuous import MIN_SLOTS, DecodeStep, Schedule
from marlhf.rollout.conversations import ConversationSchedule
from marlhf.rollout.engine import (
    CheckedEngine,
    Reply,
    Rollout,
    Sampling,
    SamplingRequest,
)
from marlhf.rollout.llama import LlamaDecoder
from marlhf.rollout.plain import PlainEngine
from marlhf.rollout.slots import (
    CompiledDecoder,
    Decoder,
    ModuleDecoder,
    forward_parameters,
    sharded,
)
from marlhf.rollout.state import DecodeState

SIZE_MULTIPLE = 64
"""Slots and positions are rounded up to this, so that batches of similar size share a cache."""
KEPT_CACHE_SHARE = 0.08
"""A cache above this share of the GPU's memory is not kept from one call to the next."""
AUTO_TOKENS = 1 << 17
"""What `token_budget="auto"` is at least; where it takes less than the share above, that share."""

DecoderClass: TypeAlias = Callable[[Model, int, int, torch.dtype | None], Decoder]
"""Builds a decoder from a model, its number of slots, their capacity and the type of the cache."""


class NativeEngine(CheckedEngine):
    """Continuous batching over a static cache.

    >>> from marlhf.models.tiny import tiny_model
    >>> engine = NativeEngine(tiny_model(), end_tokens=[1], pad_id=0)
    >>> rollout = engine.generate([[5, 6], [7]], Sampling(max_new_tokens=4), seeds=[0, 1])
    >>> len(rollout.responses)
    2
    """

    serves_all_ranks = False

    def __init__(
        self,
        model: Model,
        end_tokens: Sequence[int],
        pad_id: int,
        *,
        token_budget: int | Literal["auto"] = "auto",
        precision: Precision = "auto",
        share_prefixes: bool = True,
    ) -> None:
        """`share_prefixes=False` prefills every row, to compare: it changes no response."""
        if {"cache_params", "state"} & forward_parameters(model):
            raise SettingError(
                f"A {type(model).__name__} keeps a state where others keep keys and values, and "
                "the native engine does not know how. Take a model with attention."
            )
        self.model = model
        self.end_tokens = list(end_tokens)
        self.token_budget = AUTO_TOKENS if token_budget == "auto" else token_budget
        self.may_take_more = token_budget == "auto"
        self.precision: Precision = precision
        self.share_prefixes = share_prefixes
        self.plain = PlainEngine(
            model, end_tokens, pad_id, token_budget=self.token_budget, precision=precision
        )
        self.decoder_class: DecoderClass | None = None  # stays None where no decoder works
        self.hooked = self.extends = False  # of the model, and of the check
        self.longest = self.checked_length = 0  # tokens of texts so far, and of the check for them
        self.session: DecodeSession | None = None

    def update_weights(self, model: nn.Module) -> None:
        assert model is self.model, "the native engine samples from the policy itself"

    def respond(self, request: SamplingRequest, reply: Reply | None) -> Rollout:
        longest = max(len(p) + limit for p, limit in zip(request.prompts, request.limits))
        with self._sampling(longest):
            extends = self.extends or reply is not None
            news = has_hooks(self.model) != self.hooked or extends != self.extends
            if longest > self.longest or news:
                self._check(longest, extends)
            if self.decoder_class is None:
                return self.plain.respond(request, reply)
            session = self._session(self.decoder_class, len(request.prompts), longest)
            return self._respond(session, request, reply)

    def _check(self, longest: int, extends: bool) -> None:
        """Choose how to sample: again when texts first exceed a window or chunk of the model.

        And again when hooks come or go, since only the model's own modules call them; and with the
        first conversation, since texts were not extended before.
        """
        check_rotary(self.model, longest)
        length, hooked = check_length(self.model.config, longest), has_hooks(self.model)
        if length > self.checked_length or hooked != self.hooked or extends != self.extends:
            self.session = None  # frees its memory
            self.extends = extends
            self.decoder_class, self.checked_length = self._choose(length), length
        self.longest, self.hooked = max(longest, self.longest), hooked

    def _respond(
        self, session: DecodeSession, request: SamplingRequest, reply: Reply | None
    ) -> Rollout:
        with session.decoder.ready():
            step = session.step(request.sampling, holds=reply is not None)
            budget = min(self.token_budget, session.decoder.prefill_tokens)
            if reply is None:
                schedule = Schedule(step, request, budget, share_prefixes=self.share_prefixes)
            else:
                schedule = ConversationSchedule(
                    step, request, reply, budget, share_prefixes=self.share_prefixes
                )
            schedule.run()
        self._drop_large(session)
        return schedule.rollout(self.end_tokens)

    def _drop_large(self, session: DecodeSession) -> None:
        cached, device = session.decoder.cache_bytes, self.model.device
        if device.type == "cuda" and cached > KEPT_CACHE_SHARE * total_memory(device):
            self.session = None

    def _session(self, decoder_class: DecoderClass, rows: int, length: int) -> DecodeSession:
        """Slots for rows of at most some length: those of the last call if they still fit.

        A much larger capacity than needed is not reused, nor is a session whose recorded graphs
        read weights at addresses where the model no longer has them.
        """
        gpu = self.model.device.type == "cuda"
        length += -length % SIZE_MULTIPLE
        if gpu:
            rows += -rows % SIZE_MULTIPLE
        budget = self._cache_tokens(rows * length)
        session, weights = self.session, [p.data_ptr() for p in self.model.parameters()]
        if (
            session is not None
            and length <= session.capacity <= 2 * length
            and session.slots >= min(rows, budget // session.capacity)
            and session.weights == weights
        ):
            return session
        self.session = session = None  # frees its memory before more is allocated
        slots = max(MIN_SLOTS, min(rows, budget // length))
        decoder = decoder_class(self.model, slots, length, self._cache_dtype())
        ends = torch.tensor(self.end_tokens, device=self.model.device)
        graphs = gpu and not sharded(self.model)
        self.session = DecodeSession(decoder, slots, length, weights, ends, graphs)
        return self.session

    def _cache_tokens(self, wanted: int) -> int:
        """Tokens that the slots of a session may have room for: found once, when first wanted."""
        device = self.model.device
        if self.may_take_more and wanted > self.token_budget and device.type == "cuda":
            dtype = self._cache_dtype() or next(self.model.parameters()).dtype
            size = token_bytes(self.model.config, dtype)
            # Others may work on the same GPU, so no more than half of what is free now.
            room = min(KEPT_CACHE_SHARE * total_memory(device), free_bytes(device) / 2)
            self.token_budget = max(self.token_budget, int(room) // size if size else 0)
            self.may_take_more = False
        return self.token_budget

    @contextlib.contextmanager
    def _sampling(self, longest: int) -> Iterator[None]:
        """The model as sampling texts of some length needs it, and afterwards as it was."""
        training = self.model.training
        # Where none of its modules run, they need not be told, which takes some milliseconds.
        runs = self.decoder_class is not LlamaDecoder or longest > self.longest
        if runs:
            self.model.eval()  # gradient checkpointing would disable the cache
        try:
            with autocast(self.model.device, self.precision):
                yield
        finally:
            if runs:
                self.model.train(training)

    def _cache_dtype(self) -> torch.dtype | None:
        """The type in which autocast computes attention; None where the model decides."""
        device = self.model.device.type
        enabled = torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if enabled else None

    def _choose(self, length: int) -> DecoderClass | None:
        """The fastest decoder whose logits are right; None for the plain engine."""
        candidates: list[DecoderClass] = [ModuleDecoder]
        if is_compiled(self.model) and self.model.device.type == "cuda":
            candidates.insert(0, CompiledDecoder)
        if LlamaDecoder.fits(self.model):
            candidates.insert(0, LlamaDecoder)
        fault = ""
        for candidate in candidates:
            fault = self._fault(
                lambda dtype, candidate=candidate: decoder_error(
                    candidate, self.model, dtype, length, extends=self.extends
                )
            )
            if not fault:
                return candidate
        name, way = type(self.model).__name__, "a plain loop, which is slower"
        self.plain.one_by_one = False
        if self._fault(lambda _: plain_error(self.plain, length, together=True)):
            self.plain.one_by_one = True
            way = "a plain loop one row at a time, since padding disturbs it, which is much slower"
            alone = self._fault(lambda _: plain_error(self.plain, length, together=False))
            if alone:
                raise SettingError(
                    f"The native engine cannot sample from a {name} with a key-value cache "
                    f"({alone}). Set engine: vllm, or use another model."
                )
        warnings.warn(
            f"The native engine cannot replace the attention of a {name} ({fault}). It samples by "
            f"{way}.",
            stacklevel=6,
        )
        return None

    def _fault(self, error_in: Callable[[torch.dtype | None], float]) -> str:
        """What is wrong with a way of sampling, given its relative error in a type; "" if nothing.

        In bfloat16 an error between 0.1 and 0.5 is either a small mistake or the model's own
        rounding: float32 tells which.
        """
        dtype = self._cache_dtype()
        try:
            error, allowed = error_in(dtype), 1e-3 if dtype is None else 0.1
            if dtype is not None and 0.1 < error < 0.5:
                with torch.autocast(self.model.device.type, enabled=False):
                    error, allowed = error_in(None), 1e-3
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # a family may do anything that an engine does not support
            return f"{type(failure).__name__}: {str(failure).rstrip('.')}"
        return "" if error <= allowed else f"logits were off by {error:.1%}"


def free_bytes(device: torch.device) -> int:
    """Free on the GPU, or held by torch without being in use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def total_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """What the keys and values of one token take; 0 where a configuration does not tell.

    >>> from marlhf.models.tiny import tiny_model
    >>> token_bytes(tiny_model().config, torch.bfloat16)  # 2 layers and 2 heads of 24 numbers
    384
    """
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 0
    groups = getattr(config, "num_key_value_heads", None) or heads
    hidden = getattr(config, "hidden_size", None) or 0
    width = getattr(config, "head_dim", None) or (hidden // heads if heads else 0)
    layers = getattr(config, "num_hidden_layers", None) or 0
    return layers * 2 * groups * width * dtype.itemsize


class DecodeSession:
    """A decoder with its cache, and a step for each way of sampling: graphs record both."""

    def __init__(
        self,
        decoder: Decoder,
        slots: int,
        capacity: int,
        weights: list[int],
        ends: Tensor,
        graphs: bool,
    ) -> None:
        self.decoder, self.slots, self.capacity = decoder, slots, capacity
        self.weights, self.ends, self.graphs = weights, ends, graphs
        self.steps: dict[tuple[Sampling, bool], DecodeStep] = {}

    def step(self, sampling: Sampling, *, holds: bool = False) -> DecodeStep:
        if (sampling, holds) not in self.steps:
            state = DecodeState.empty(self.slots, sampling.max_new_tokens, self.ends.device)
            self.steps[sampling, holds] = DecodeStep(
                self.decoder, state, sampling, self.ends, graphs=self.graphs, holds=holds
            )
        return self.steps[sampling, holds]


SHORT = 6
"""Tokens of the check where nothing changes with length."""
SIZE_SETTINGS = re.compile(r"window|chunk|topk|block_size|compress")
"""Names of settings with a number of tokens beyond which attention changes."""
BEYOND = 4
"""The check has this many times as many tokens: just beyond its size a window changes little."""
STEPS = 16
"""Tokens that the check of the plain engine feeds one at a time."""


def check_length(config: Any, longest: int) -> int:
    """How many tokens the check needs for texts of at most `longest` tokens.

    A window or chunk matters beyond its size only, so a model with sizes that no text exceeds is
    checked on few tokens.
    """
    settings = config.get_text_config().to_dict()
    sizes = [
        size
        for name, value in settings.items()
        if SIZE_SETTINGS.search(name)
        for size in _numbers(value)
        if size < longest
    ]
    length = BEYOND * max(sizes, default=0)
    return max(SHORT, min(length, settings.get("max_position_embeddings") or length))


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        value = list(value.values())
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, int) and not isinstance(each, bool):
            yield each


def decoder_error(
    decoder_class: Callable[[Model, int, int, torch.dtype | None], Decoder],
    model: Model,
    dtype: torch.dtype | None,
    length: int = SHORT,
    *,
    extends: bool = False,
) -> float:
    """The error of a decoder's logits, relative to their spread.

    Two prompts in slots 2 and 0, with slot 1 at rest between them. With `extends` the prompts come
    in two parts, the second at other positions in each.
    """
    ids = _probe(model, length)
    device = ids.device
    slots = torch.tensor([2, 0], device=device)
    last = torch.tensor([length - 1, length - 3], device=device)
    tokens = torch.zeros(3, dtype=torch.int64, device=device)
    positions = torch.zeros_like(tokens)
    tokens[slots], positions[slots] = ids.gather(1, last[:, None]).squeeze(1), last
    decoder = decoder_class(model, 3, length + 2, dtype)
    with decoder.ready():
        if extends:
            half = length // 2
            decoder.prefill(ids[:, :half], slots)
            starts = last - last[0] + half
            rest = starts[:, None] + torch.arange(length - 1 - half, device=device)
            decoder.extend(ids.gather(1, rest), slots, rest, length)
        else:
            decoder.prefill(ids[:, :-1], slots)
        ours = decoder.step(tokens, positions, None)[slots].clone()
    return _relative_error(ours[:, None], _without_cache(model, ids, last[:, None]))


def plain_error(engine: PlainEngine, length: int = SHORT, *, together: bool) -> float:
    """The same for the plain engine, with rows of different lengths in one batch or each alone."""
    steps = min(STEPS, length // 2 - 1)
    lengths = [length, length // 2 + 1, steps + 2]  # from no padding to little else
    ids = _probe(engine.model, length, len(lengths))
    ours: list[Tensor] = []
    for batch in [[0, 1, 2]] if together else [[0], [1], [2]]:
        rows = [ids[i, : lengths[i]] for i in batch]
        decode = engine.decode([row[:-steps].tolist() for row in rows], steps + 1)
        logits = [next(decode)]
        for step in range(-steps, 0):
            logits.append(decode.send(torch.stack([row[step] for row in rows])))
        ours.append(torch.stack(logits, dim=1))
    ends = torch.tensor(lengths, device=ids.device)[:, None]
    last = ends - 1 - torch.arange(steps, -1, -1, device=ids.device)
    return _relative_error(torch.cat(ours), _without_cache(engine.model, ids, last))


def _probe(model: Model, length: int, rows: int = 2) -> Tensor:
    """Rows of tokens from all over the vocabulary.

    Its first tokens are often special and untrained, and their logits in bfloat16 can be little
    but rounding.
    """
    size = model.config.get_text_config().vocab_size
    count = torch.arange(rows * length, device=model.device).view(rows, length)
    return (size // 3 + count * 7919) % size


@uncompiled()
def _without_cache(model: Model, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits at some positions, [B, N], of one pass: [B, N, V]."""
    if forward_parameters(model) & {"logits_to_keep", "kwargs"}:
        kept = positions.unique()  # sorted
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits
        columns = torch.searchsorted(kept, positions)
    else:
        logits, columns = model(input_ids=ids, use_cache=False).logits, positions
    return logits[torch.arange(len(ids), device=ids.device)[:, None], columns]


def _relative_error(ours: Tensor, reference: Tensor) -> float:
    ours, reference = ours.float(), reference.float()
    return float((ours - reference).norm() / (reference - reference.mean()).norm())
