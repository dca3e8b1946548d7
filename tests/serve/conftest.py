# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path

import pytest

FAKES = Path(__file__).parent / "fakes"


@pytest.fixture
def fakes() -> Path:
    """The working directory with the graph ``fakes:Front``."""
    return FAKES


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are imported by name: what one test imports must not be there for the next."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("fakes", "fake_service", "graphs", "mine"):
            del sys.modules[name]
