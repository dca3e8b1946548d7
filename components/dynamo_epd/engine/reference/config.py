# SPDX-License-Identifier: Apache-2.0
"""Reads an engine YAML with TensorRT-LLM's keys, as far as the reference engine has them.

A TensorRT-LLM file carries many keys that mean nothing here: they are named in one log line and ignored. A key that
looks like one of ours but is not (misspelt, or at the wrong level) is an error, because ignoring it would silently
run with a default.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...contract.errors import ConfigError
from .. import arguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReferenceConfig:
    """What the engine YAML decides. Defaults are TensorRT-LLM's, except ``max_batch_size`` (2048 there).

    Attributes:
        max_seq_len: tokens of prompt and answer together.
        max_batch_size: requests that run at once.
        max_num_tokens: tokens in one forward pass.
        enable_chunked_prefill: a prompt may be computed in several passes; without it a prompt of more than
            ``max_num_tokens`` tokens is refused.
        tokens_per_block: tokens in one KV block.
        max_tokens: KV budget in tokens; None for what ``max_batch_size`` requests can fill, within the memory limit.
        enable_block_reuse: keep the blocks of finished requests and share them.
        enable_partial_reuse: also reuse the matching first tokens of a block that does not match as a whole.
        free_gpu_memory_fraction: share of the free memory that KV may take where ``max_tokens`` is not given.
    """

    max_seq_len: int
    max_batch_size: int = 64
    max_num_tokens: int = 8192
    enable_chunked_prefill: bool = False
    tokens_per_block: int = 32
    max_tokens: int | None = None
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    free_gpu_memory_fraction: float = 0.9


_KV = "kv_cache_config"
_TOP = ("max_seq_len", "max_batch_size", "max_num_tokens", "enable_chunked_prefill")
_NESTED = tuple(f.name for f in fields(ReferenceConfig) if f.name not in _TOP)
_PLACES: dict[str, str] = dict.fromkeys((*_TOP, _KV), "") | dict.fromkeys(_NESTED, _KV)
# Real TensorRT-LLM keys that are spelt much like one of ours.
_LOOKALIKES = {"max_input_len", "max_beam_width", "copy_on_partial_reuse", "max_attention_window", "max_queue_size"}
_BOOLS = {f.name for f in fields(ReferenceConfig) if f.type == "bool"}


def load_engine_config(path: Path | str | None, override_json: str | None, model_dir: Path | str) -> ReferenceConfig:
    """The configuration from a YAML file, overridden by a JSON object, with the model's limits as defaults.

    Args:
        path: engine YAML (``--extra-engine-args``), or None.
        override_json: a JSON object of the same form (``--override-engine-args``), or None.
        model_dir: the checkpoint; its ``max_position_embeddings`` bounds ``max_seq_len``.

    Raises:
        ConfigError: the file cannot be read; a key is misspelt or at the wrong level; a value has the wrong type.
    """
    given = arguments.read(path, override_json)
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for place, key, value in _entries(given):
        name = f"{place}.{key}" if place else key
        if _PLACES.get(key) == place:
            known[key] = _checked(name, key, value)
        else:
            _refuse_misspelt(name, place, key)
            unknown.append(name)
    if unknown:
        logger.info("engine keys without a meaning for the reference engine, ignored: %s", ", ".join(unknown))

    limit = _max_position_embeddings(Path(model_dir))
    config = ReferenceConfig(**{"max_seq_len": limit, **{k: v for k, v in known.items() if v is not None}})
    if config.max_seq_len > limit:
        logger.warning(
            "max_seq_len %d is more than the model's %d positions: using %d", config.max_seq_len, limit, limit
        )
        config = replace(config, max_seq_len=limit)
    if config.max_tokens is not None and config.max_tokens < config.tokens_per_block:
        raise ConfigError(
            f"{_KV}.max_tokens is {config.max_tokens}: not even one block of {config.tokens_per_block} tokens"
        )
    return config


def _entries(given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for key, value in given.items():
        if key != _KV:
            yield "", key, value
        elif value is not None:
            yield from ((_KV, k, v) for k, v in value.items())


def _checked(name: str, key: str, value: Any) -> Any:
    """``value`` if it has the type of the field. None (an empty YAML value) stands for the default."""
    if value is None:
        return None
    if key in _BOOLS:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}, must be true or false")
    elif key == "free_gpu_memory_fraction":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise ConfigError(f"{name} is {value!r}, must be a number above 0 and at most 1")
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}, must be a whole number of at least 1")
    return value


def _refuse_misspelt(name: str, place: str, key: str) -> None:
    if not isinstance(key, str):
        raise ConfigError(f"{name}: keys must be words")
    if key in _LOOKALIKES:
        return
    if key in _PLACES:
        where = f"belongs under {_PLACES[key]}" if _PLACES[key] else "belongs at the top level"
        raise ConfigError(f"{name} {where}")
    near = get_close_matches(key.lower().replace("-", "_"), _PLACES, n=1, cutoff=0.8)
    if near:
        right = f"{_PLACES[near[0]]}.{near[0]}" if _PLACES[near[0]] else near[0]
        raise ConfigError(f"{name} is not a key; did you mean {right}?")


def _max_position_embeddings(model_dir: Path) -> int:
    from .model import read_config

    text = read_config(model_dir).get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"{model_dir}: the language model's configuration has no max_position_embeddings")
    return limit
