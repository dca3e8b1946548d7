# SPDX-License-Identifier: Apache-2.0
"""The engine YAML: read, override, check against what ``LlmArgs`` knows, and turn into keyword arguments of ``LLM``.

``llm_args.json`` beside this file has the keys and types of TensorRT-LLM's public ``TorchLlmArgs`` and of the nested
configurations that the files in ``configs/`` use. Another version may know more or fewer: it refuses what it does not
know.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...contract.errors import ConfigError
from .. import arguments

EVENT_BUFFER = 100_000
"""Block events that the engine keeps for a reader; what Dynamo's own TensorRT-LLM worker asks for."""

DEFAULT_MAX_BATCH_SIZE = 2048
DEFAULT_MAX_NUM_TOKENS = 8192
DEFAULT_TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's own defaults."""

_OURS = ("model", "tokenizer")


@dataclass(frozen=True)
class EngineArgs:
    """An engine configuration.

    Attributes:
        values: the merged YAML and overrides, without ``backend`` and the keys that come from flags.
    """

    values: Mapping[str, Any]

    @property
    def kv_cache(self) -> Mapping[str, Any]:
        return self.values.get("kv_cache_config") or {}

    @property
    def block_reuse(self) -> bool:
        """On unless it is turned off, as in TensorRT-LLM."""
        return self.kv_cache.get("enable_block_reuse", True) is not False

    @property
    def chunked_prefill(self) -> bool:
        return bool(self.values.get("enable_chunked_prefill", False))

    @property
    def tokens_per_block(self) -> int:
        return int(self.kv_cache.get("tokens_per_block") or DEFAULT_TOKENS_PER_BLOCK)

    @property
    def transceiver(self) -> bool:
        """Whether KV can move between engines."""
        return bool((self.values.get("cache_transceiver_config") or {}).get("backend"))

    @property
    def in_process(self) -> bool:
        """Whether TensorRT-LLM runs in this process instead of one of its own."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        alone = all((self.values.get(name) or 1) == 1 for name in sizes)
        return alone and os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS", "0") == "1"

    def llm_options(self, model_dir: Path | str, dtype: str, *, events: bool) -> dict[str, Any]:
        """Keyword arguments of ``LLM``.

        Args:
            dtype: the ``--dtype`` flag; ``auto`` leaves it to the YAML and the checkpoint.
            events: have the engine keep block events for a reader.
        """
        options = {**self.values, "model": str(model_dir)}
        if dtype != "auto":
            options["dtype"] = dtype
        if events and self.block_reuse:
            options["kv_cache_config"] = {"event_buffer_max_size": EVENT_BUFFER, **self.kv_cache}
        return options


def load(path: Path | str | None, override_json: str | None) -> EngineArgs:
    """Read an engine YAML and lay overrides over it, key by key down to the values.

    Args:
        path: ``--extra-engine-args``, or None.
        override_json: ``--override-engine-args``, a JSON object, or None.

    Raises:
        ConfigError: the file cannot be read, or asks for what this package decides.
    """
    values = arguments.read(path, override_json)
    for key in _OURS:
        if key in values:
            raise ConfigError(f"engine key {key}: give --model on the command line instead")
    backend = values.pop("backend", "pytorch")
    if backend != "pytorch":
        raise ConfigError(f"engine key backend is {backend!r}: only pytorch takes embeddings from outside")
    scheduler = values.get("scheduler_config")
    if isinstance(scheduler, Mapping) and scheduler.get("capacity_scheduler_policy") == "MAX_UTILIZATION":
        raise ConfigError(
            "engine key scheduler_config.capacity_scheduler_policy is MAX_UTILIZATION: it takes the KV of running "
            "requests away and computes their prompts again, when the media's embeddings are gone. Use "
            "GUARANTEED_NO_EVICT"
        )
    return EngineArgs(values)


def problems(values: Mapping[str, Any]) -> list[str]:
    """What in an engine configuration ``LlmArgs`` does not know, or would refuse for its type."""
    return list(_problems(values, "", ""))


def _problems(values: Mapping[str, Any], section: str, prefix: str) -> Iterator[str]:
    schema = _schema()
    for key, value in values.items():
        name = f"{prefix}{key}"
        kind = schema[section].get(key)
        if kind is None:
            yield f"{name} is not a key of TensorRT-LLM's LlmArgs"
        elif kind in schema:
            if value is None:
                continue
            if isinstance(value, Mapping):
                yield from _problems(value, kind, f"{name}.")
            else:
                yield f"{name} is {value!r}, must be a mapping"
        elif value is not None and not _fits(value, kind):
            yield f"{name} is {value!r}, must be {kind}"


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return "bool" in kind.split("|")
    types: dict[str, type | tuple[type, ...]] = {
        "int": int, "float": (int, float), "str": str, "list": list, "map": Mapping,
    }  # fmt: skip
    return isinstance(value, types[kind]) if kind in types else value != "bool" and value in kind.split("|")


@cache
def _schema() -> dict[str, dict[str, str]]:
    return json.loads(files(__package__).joinpath("llm_args.json").read_text(encoding="utf-8"))
