# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM as an engine. Only ``names`` imports TensorRT-LLM, and only when an engine is made or probed."""

from __future__ import annotations

from .engine import TrtllmEngine, create

__all__ = ["TrtllmEngine", "create", "usable"]


def usable() -> bool:
    """Whether ``--engine auto`` should choose this engine: TensorRT-LLM imports, and there is a GPU for it."""
    from importlib.util import find_spec

    if find_spec("tensorrt_llm") is None:
        return False
    import torch

    from ...contract.errors import ConfigError
    from .names import load_names

    if not torch.cuda.is_available():
        return False
    try:
        load_names()
    except ConfigError:
        return False
    return True
