# SPDX-License-Identifier: Apache-2.0
"""Loads the language model of a Hugging Face checkpoint, without its media towers, and finds out how to run it."""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as hf_logging

from ...contract.errors import ConfigError
from .attention import NAME, PagedAttention, paged_attention

logger = logging.getLogger(__name__)

AttentionInterface.register(NAME, paged_attention)

# Names that configurations give to the number of layers of a tower.
_DEPTHS = ("depth", "num_hidden_layers", "encoder_layers", "num_layers", "num_blocks")
# Models in which the tokens of one image see each other in both directions, in every layer.
_BIDIRECTIONAL_ITEMS = frozenset({"gemma3", "gemma3_text"})
# What the code of models that attend other than causally says.
_MASK_WORDS = ("block_sequence_ids", "or_mask_function")
_RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent"})


@dataclass(frozen=True)
class LanguageModel:
    """A language model and what a caller must know to run it.

    Attributes:
        decoder: the stack of layers; ``decoder(inputs_embeds=..., position_ids=...)``.
        embed: token ids -> embeddings.
        head: last hidden states -> logits.
        attention: the paged attention of its layers; None for a recurrent model.
        vocab_size: ids the model knows.
        hidden_size: width of an embedding.
        deepstack: groups of ``hidden_size`` columns that an item's embedding may carry behind the first.
        mrope: positions have three axes.
        atomic_items: attention inside an item is bidirectional: an item is computed as a whole or not at all.
        softcap: logits are ``softcap * tanh(logits / softcap)``, or None.
    """

    decoder: nn.Module
    embed: nn.Module
    head: nn.Module
    attention: PagedAttention | None
    config: Any
    vocab_size: int
    hidden_size: int
    deepstack: int
    mrope: bool
    atomic_items: bool
    softcap: float | None
    dtype: torch.dtype
    device: torch.device

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` -> ``[rows, vocab]``."""
        logits = self.head(hidden)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def read_config(model_dir: Path) -> Any:
    """The checkpoint's configuration; of an omni model, its thinker's. Raises ``ConfigError``."""
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{model_dir} is not a model directory that transformers can read: {error}") from error
    return getattr(config, "thinker_config", config)


def load_language_model(model_dir: Path, device: str, dtype: str, max_seq_len: int) -> LanguageModel:
    """Load weights, keep the language model, and run a few tokens to see how its layers attend.

    Args:
        device: ``auto`` (CUDA where there is a GPU), ``cpu``, ``cuda``, ``cuda:1``, ...
        dtype: ``auto`` (as in the checkpoint), ``float32``, ``bfloat16``, ``float16``.
        max_seq_len: longest sequence that will be run.

    Raises:
        ConfigError: the checkpoint, the device or the dtype cannot be used, or the model needs something that the
            reference engine does not do right.
    """
    config = read_config(model_dir)
    text = config.get_text_config(decoder=True)
    place = _device(device)
    model = _load(_model_class(config), model_dir, config, text, dtype)
    decoder = model.get_decoder()
    head = model.get_output_embeddings() or decoder.get_output_embeddings()
    if hasattr(decoder, "lm_head"):
        head, decoder = decoder.lm_head, decoder.model
    if head is None:
        raise ConfigError(f"{model_dir}: {type(model).__name__} has no output layer")
    source = inspect.getsource(sys.modules[type(model).__module__])
    bidirectional = any(word in source for word in _MASK_WORDS)
    if bidirectional and config.model_type not in _BIDIRECTIONAL_ITEMS:
        raise ConfigError(f"the reference engine does not know how {config.model_type} attends inside an item")
    _check(text, max_seq_len)
    decoder, head = decoder.to(place).eval(), head.to(place).eval()
    language_model = LanguageModel(
        decoder=decoder,
        embed=decoder.get_input_embeddings(),
        head=head,
        attention=None if is_recurrent(text) else PagedAttention(text),
        config=text,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        deepstack=_deepstack_levels(config, decoder),
        mrope=any(hasattr(module, "mrope_section") for module in decoder.modules()),
        atomic_items=bidirectional,
        softcap=getattr(text, "final_logit_softcapping", None),
        dtype=decoder.get_input_embeddings().weight.dtype,
        device=place,
    )
    if language_model.attention is not None:
        _install(language_model, language_model.attention)
    return language_model


def is_recurrent(text_config: Any) -> bool:
    """Whether some layers keep a state other than KV."""
    kinds = [
        *(getattr(text_config, "layer_types", None) or ()),
        *(getattr(text_config, "layers_block_type", None) or ()),
    ]
    return not _RECURRENT_LAYERS.isdisjoint(kinds)


def _model_class(config: Any) -> Any:
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            return auto
    raise ConfigError(f"transformers {transformers.__version__} has no language model for {config.model_type}")


def _load(cls: Any, model_dir: Path, config: Any, text: Any, dtype: str) -> Any:
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"dtype {dtype!r} is not auto or the name of a torch dtype")
    _without_towers(config, text)
    # The weights of the towers are not wanted, and a report on each of them would bury everything else.
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        model, report = cls.from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            key_mapping={r"^thinker\.": ""},
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"{model_dir} cannot be loaded: {error}") from error
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
    missing = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if missing:
        raise ConfigError(f"{model_dir} has no weights, or of another shape, for {', '.join(missing[:5])}")
    return model


def _without_towers(config: Any, text: Any) -> None:
    """Set the number of layers of every part but the language model to 0: their weights are then not loaded."""
    for part in [value for value in vars(config).values() if isinstance(value, transformers.PreTrainedConfig)]:
        if part is text:
            continue
        for name in _DEPTHS:
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, 0)
        if getattr(part, "layer_types", None):
            part.layer_types = []
        _without_towers(part, text)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {error}") from error
    return device


def _check(text: Any, max_seq_len: int) -> None:
    """Refuse what makes a token's KV depend on how long its sequence becomes, or what is not implemented."""
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    if kind in ("dynamic", "longrope") and max_seq_len > (original or 0):
        raise ConfigError(
            f"{kind} rotary positions change with the length of the sequence, so KV cannot be reused: set max_seq_len "
            f"to at most {original}"
        )
    for name in ("logit_scale", "logits_scaling"):
        if getattr(text, name, 1) != 1:
            raise ConfigError(f"the reference engine does not implement {name}")


def _deepstack_levels(config: Any, decoder: nn.Module) -> int:
    if "deepstack_visual_embeds" not in inspect.signature(type(decoder).forward).parameters:
        return 0
    return len(getattr(config.vision_config, "deepstack_visual_indexes", ()))


def _install(model: LanguageModel, attention: PagedAttention) -> None:
    """Put ``attention`` into every layer, and let a short forward pass tell it about them."""
    module: Any
    for module in model.decoder.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = NAME
        if hasattr(module, "layer_idx"):
            module.paged = attention
    positions = torch.arange(2, device=model.device).expand(*(3, 1) if model.mrope else (1,), 2)
    embeds = torch.zeros(1, 2, model.hidden_size, dtype=model.dtype, device=model.device)
    with torch.inference_mode():
        model.decoder(inputs_embeds=embeds, position_ids=positions, use_cache=False)
    if len(attention.layers) != model.config.num_hidden_layers:
        raise ConfigError(
            f"{len(attention.layers)} of the model's {model.config.num_hidden_layers} layers use transformers' "
            "attention interface; the reference engine needs all"
        )
