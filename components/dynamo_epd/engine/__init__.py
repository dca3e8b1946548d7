# SPDX-License-Identifier: Apache-2.0
"""The boundary to what runs the language model. ``base`` has the interface, every other module one engine."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..contract.errors import ConfigError

if TYPE_CHECKING:
    from .base import Engine

_KINDS = ("reference", "trtllm")


def create_engine(kind: str, **options: Any) -> Engine:
    """An engine that is not started yet.

    Args:
        kind: ``reference``, ``trtllm``, or ``auto``: TensorRT-LLM where it is installed, else the reference engine.
        options: ``model_dir``, ``config_file``, ``overrides``, ``keys``, ``device``, ``dtype``; see the engine's
            ``create``.

    Raises:
        ConfigError: the engine is not there, or refuses an option.
    """
    if kind == "auto":
        kind = "trtllm" if find_spec("tensorrt_llm") is not None else "reference"
    if kind not in _KINDS:
        raise ConfigError(f"there is no engine {kind!r}; there are {', '.join(_KINDS)}")
    return import_module(f".{kind}", __name__).create(**options)
