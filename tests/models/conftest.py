# SPDX-License-Identifier: Apache-2.0
"""Tiny models, each made and loaded once in a session."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from dynamo_epd import models
from dynamo_epd.models import Family

from .tiny import make_weights, write_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model, made when first asked for."""

    @cache
    def make(name: str) -> Path:
        target = write_model_dir(name, tmp_path_factory.mktemp("models") / name)
        make_weights(target, zlib.crc32(name.encode()))
        return target

    return make


@pytest.fixture(scope="session")
def family(model_dir: Callable[[str], Path]) -> Callable[[str], Family]:
    """The family of a tiny model, with its encoder."""
    return cache(lambda name: models.load(model_dir(name), tower=True))


@pytest.fixture(scope="session")
def full(model_dir: Callable[[str], Path]) -> Callable[[str], Any]:
    """The whole model as plain transformers loads it."""

    @cache
    def load(name: str) -> Any:
        config = transformers.AutoConfig.from_pretrained(model_dir(name))
        return getattr(transformers, config.architectures[0]).from_pretrained(model_dir(name)).eval()

    return load
