# SPDX-License-Identifier: Apache-2.0
"""The boundary to what runs the language model. ``base`` has the interface, every other module one engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..contract.errors import ConfigError

if TYPE_CHECKING:
    from .base import Engine

_KINDS = ("reference", "trtllm")


def resolve(kind: str) -> str:
    """``auto`` as what it stands for: ``trtllm`` where TensorRT-LLM imports and there is a GPU, else ``reference``.

    Raises:
        ConfigError: there is no such engine.
    """
    if kind == "auto":
        return "trtllm" if import_module(".trtllm", __name__).usable() else "reference"
    if kind not in _KINDS:
        raise ConfigError(f"there is no engine {kind!r}; there are auto, {', '.join(_KINDS)}")
    return kind


def create_engine(kind: str, **options: Any) -> Engine:
    """An engine that is not started yet.

    Args:
        kind: as for ``resolve``.
        options: ``model_dir``, ``config_file``, ``overrides``, ``keys``, ``device``, ``dtype``; see the engine's
            ``create``.

    Raises:
        ConfigError: the engine is not there, or refuses an option.
    """
    return import_module(f".{resolve(kind)}", __name__).create(**options)
