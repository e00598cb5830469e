"""Scalar heads: one number per token, for reward models and critics."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification

from marlhf.models.base import Model, ModelError

SCALAR = "ForSequenceClassification"
"""How the names of transformers' classes with a scalar head end."""
HALF = (torch.bfloat16, torch.float16)


def init_scalar_head(head: nn.Linear, seed: int, hidden_scale: float) -> None:
    """Draw the weights of a fresh head, scaled so that scores are about 1.

    The seed alone decides them: torch's global generator is neither read nor moved, so a critic
    is the same whatever was loaded before it. With several outputs, number m is what a head with
    one output has with the seed `seed + m`.
    """
    scale = 1 / math.sqrt(head.in_features + 1) / hidden_scale
    with torch.no_grad():
        for member, row in enumerate(head.weight.split(1)):
            generator = torch.Generator().manual_seed(seed + member)
            row.copy_(torch.randn(row.shape, generator=generator) * scale)


def fresh_scalar_head(hidden_size: int, seed: int, hidden_scale: float) -> nn.Linear:
    head: Any = nn.utils.skip_init(nn.Linear, hidden_size, 1, bias=False)
    init_scalar_head(head, seed, hidden_scale)
    return head


@torch.no_grad()
def hidden_scale(model: Model) -> float:
    """How large the numbers are that a model's head reads: their root mean square in a small pass.

    The weights of the last norm decide it: 1 in a model that was just made, 8 in
    Qwen2.5-Coder-1.5B. It is rounded to a power of two, so that rounding in the pass, which differs
    between devices, does not change a fresh head.
    """
    body, training = backbone(model), model.training
    ids = torch.tensor([[2, 3, 4, 5, 6]], device=model.device)
    # Frozen bases hold their matrices in half the bits, and need autocast beside other weights.
    half = next((p.dtype for p in body.parameters() if p.dtype in HALF), None)
    with torch.autocast(model.device.type, half or torch.bfloat16, enabled=half is not None):
        hidden = body.eval()(input_ids=ids, use_cache=False).last_hidden_state[:, 1:]
    model.train(training)
    size = float(hidden.float().square().mean().sqrt())
    # Weights that are not finite are refused later, with a message.
    return 2.0 ** round(math.log2(size)) if 0 < size < math.inf else 1.0


def backbone(model: Model) -> Model:
    """A model without its head.

    transformers' `base_model` is the model itself where a family's prefix names no submodule, as
    in the text model of Llama 4. The backbone is then what holds the embeddings.
    """
    if model.base_model is not model:
        return model.base_model
    embeddings = model.get_input_embeddings()
    return next(child for child in model.children() if embeddings in [*child.modules()])


def set_heads(model: Model, heads: int, seed: int, *, fresh: bool) -> None:
    """Give a scalar model several heads: fresh ones, or copies of the one that it has."""
    old = model.score
    if old.out_features != heads:
        new: Any = nn.utils.skip_init(nn.Linear, old.in_features, heads, bias=False)
        with torch.no_grad():
            new.weight.copy_(old.weight[:1].expand(heads, -1))
        if fresh:
            init_scalar_head(new, seed, hidden_scale(getattr(model, "module", model)))
        model.score = new.to(old.weight.device)
    if isinstance(model, PreTrainedModel):  # else the config is that of a base that others share
        declare_heads(model.config, heads)


def declare_heads(config: Any, heads: int) -> None:
    """Write into a config how many heads score, so that labels of a classifier are not taken for
    an ensemble."""
    config.num_labels = heads
    if heads > 1:
        config.reward_members = heads
    else:
        config.__dict__.pop("reward_members", None)


def num_members(config: Any) -> int:
    """The members of a reward model: 1 where it is no ensemble."""
    return getattr(config, "reward_members", 1)


def members_of(model: Model) -> list[Model]:
    """The models whose heads score in turn: an ensemble's members with an adapter each, else one
    model, which may have several heads."""
    return [*getattr(model, "members", [model])]


@torch.no_grad()
def average_heads(model: Model) -> Model:
    """One head that gives the mean of an ensemble's, as a critic starts from."""
    if model.score.out_features > 1:
        mean = model.score.weight.mean(dim=0, keepdim=True)
        set_heads(model, 1, 0, fresh=False)
        model.score.weight.copy_(mean)
    return model


def scalar_config(config: Any) -> Any:
    """The config of a scalar model of the same family.

    Many families have no sequence classifier in transformers. They get one here, built as
    transformers builds Llama's: the backbone and a linear layer `score`. It saves as any other
    model. In a process where it is registered, AutoModelForSequenceClassification loads it;
    `load_scalar` and this function register it.
    """
    config = copy.deepcopy(config)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
            raise ModelError(
                f"transformers knows no decoder of the family {config.model_type}, so it cannot "
                "have a scalar head. Take one such as Llama, Qwen or Gemma."
            )
        language_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if language_class.config_class is config.sub_configs.get("text_config"):
            config = config.get_text_config()  # of a multimodal family, which AutoModel reads so
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            scalar_class = _scalar_class(language_class, config)
            AutoModelForSequenceClassification.register(type(config), scalar_class, exist_ok=True)
    declare_heads(config, num_members(config))
    return config


def _scalar_class(language_class: Any, config: Any) -> type[PreTrainedModel]:
    with torch.device("meta"):
        language_model = language_class(config)
    body = backbone(language_model)
    (prefix,) = (name for name, child in language_model.named_children() if child is body)
    # The class that all models of the family share has its initialisation and loading rules.
    family = next(c for c in language_class.__mro__ if PreTrainedModel in c.__bases__)
    name = f"{family.__name__.removesuffix('PreTrainedModel')}{SCALAR}"
    settings = {
        "base_model_prefix": prefix,
        "config_class": type(config),
        "__module__": language_class.__module__,  # transformers reads its features from that file
    }
    return type(name, (GenericForSequenceClassification, family), settings)


def with_scalar_head(language_model: Model, seed: int) -> Model:
    """A copy of a language model in float32, with a fresh scalar head instead of its own."""
    config = scalar_config(language_model.config)
    try:
        model: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        backbone(model).load_state_dict(backbone(language_model).state_dict())
    except (RuntimeError, ValueError) as error:  # only the decoder of a larger model
        raise ModelError(
            f"A {type(language_model).__name__} cannot have a scalar head: its weights do not make "
            f"up a {config.model_type} model. Take a decoder such as Llama, Qwen or Gemma."
        ) from error
    check_head(model, f"The model of a {type(language_model).__name__}")
    init_scalar_head(model.score, seed, hidden_scale(model))
    return model


def check_head(model: Model, name: str) -> None:
    """Refuse a classifier of a family whose head is not `score`."""
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(
            f"{name} is a {type(model).__name__}, whose scalar head marlhf does not know. "
            "Decoder families such as Llama, Qwen, Gemma, Mistral and GPT-2 have `score`."
        )
