# SPDX-License-Identifier: Apache-2.0
"""Model families. ``load`` is the only entry; a family is one class in one file of this folder."""

from __future__ import annotations

import importlib
from pathlib import Path

from ..contract.errors import ConfigError
from .base import Expansion, Family, Media, Prepared
from .checkpoint import read_json

__all__ = ["FAMILIES", "Expansion", "Family", "Media", "Prepared", "load"]

FAMILIES: dict[str, str] = {
    "cosmos3_edge": "qwen3_vl:Cosmos3Edge",
    "cosmos3_omni": "qwen3_vl:Qwen3VL",
    "gemma3": "gemma3:Gemma3",
    "llama4": "llama4:Llama4",
    "llava": "llava:Llava",
    "llava_next": "llava:Llava",
    "mistral3": "llava:Llava",
    "phi4_multimodal": "phi4:Phi4Multimodal",
    "nemotron_h_omni": "nemotron:NemotronOmni",
    "qwen2_5_omni": "qwen_omni:QwenOmni",
    "qwen2_5_omni_thinker": "qwen_omni:QwenOmni",
    "qwen2_5_vl": "qwen_vl:QwenVL",
    "qwen2_audio": "qwen2_audio:Qwen2Audio",
    "qwen2_vl": "qwen_vl:QwenVL",
    "qwen3_omni_moe": "qwen_omni:Qwen3Omni",
    "qwen3_omni_moe_thinker": "qwen_omni:Qwen3Omni",
    "qwen3_vl": "qwen3_vl:Qwen3VL",
    "qwen3_vl_moe": "qwen3_vl:Qwen3VL",
}
"""``config.model_type`` -> ``module:class`` in this folder. The module is imported when such a model is loaded."""


def load(model_dir: str | Path, *, tower: bool, device: str = "cpu", dtype: str | None = None) -> Family:
    """The family of the checkpoint in ``model_dir``.

    Args:
        tower: load the encoder's weights too (never the language model's); without them ``encode`` is refused.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; where the encoder runs.
        dtype: name of a torch dtype for the encoder; None for the checkpoint's own.

    Raises:
        ConfigError: the directory is not a checkpoint, its family is unknown, or its encoder is not complete.
    """
    path = Path(model_dir)
    raw = read_json(path / "config.json")
    model_type = raw.get("model_type")
    where = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if where is None:
        raise ConfigError(
            f"{path} is a model of type {model_type!r}, which has no family here; known: {', '.join(sorted(FAMILIES))}"
        )
    module, _, name = where.partition(":")
    family = getattr(importlib.import_module(f".{module}", __name__), name)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / 'config.json'} cannot be used: {error}") from error
    loaded = family(path, config, raw, tower=tower, device=device, dtype=dtype)
    # Both take a while and can fail: now, and not while the first request waits.
    _ = loaded.codec, loaded.identity
    return loaded
