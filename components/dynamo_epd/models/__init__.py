# SPDX-License-Identifier: Apache-2.0
"""Model families. ``load`` is the only entry; a family is one class in one file of this folder."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABCMeta
from pathlib import Path

from ..contract.errors import ConfigError
from .base import Expansion, Family, Media, Prepared
from .checkpoint import read_json

__all__ = ["FAMILIES", "Expansion", "Family", "Media", "Prepared", "load"]


def _families() -> dict[str, type[Family]]:
    found: dict[str, type[Family]] = {}
    for module in pkgutil.iter_modules(__path__):
        for kind in vars(importlib.import_module(f".{module.name}", __name__)).values():
            # Not ``type``: to Python 3.10 an alias such as dict[str, int] is one, and no class.
            if isinstance(kind, ABCMeta) and issubclass(kind, Family):
                found.update(dict.fromkeys(vars(kind).get("model_types", ()), kind))
    return dict(sorted(found.items()))


FAMILIES: dict[str, type[Family]] = _families()
"""``config.model_type`` -> the class of this folder that names it in ``model_types``.

The modules import torch and transformers inside functions only, so looking through all of them costs milliseconds.
"""


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
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            f"{path} is a model of type {model_type!r}, which has no family here; known: {', '.join(FAMILIES)}"
        )
    return family.from_pretrained(path, raw, tower=tower, device=device, dtype=dtype)
