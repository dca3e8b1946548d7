# SPDX-License-Identifier: Apache-2.0
"""The stand-in for TensorRT-LLM in a chosen variant, and an engine on the toy model behind it."""

from __future__ import annotations

import json
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from dynamo_epd.demo.toy_data import TOY_MODEL

STANDIN = Path(__file__).parent / "standin"
VARIANTS = ("four", "seven", "item_runs")

ENGINE = {
    "kv_cache_config": {"enable_block_reuse": True, "tokens_per_block": 8, "max_tokens": 2048},
    "cache_transceiver_config": {"backend": "DEFAULT"},
    "max_seq_len": 512,
    "max_batch_size": 8,
    "max_num_tokens": 96,
    "enable_chunked_prefill": True,
}


def _forget() -> None:
    for name in [m for m in sys.modules if m == "tensorrt_llm" or m.startswith("tensorrt_llm.")]:
        del sys.modules[name]


@contextmanager
def installed(variant: str, manager: str = "v2"):
    """The stand-in as ``tensorrt_llm``, whatever else of that name is there."""
    patch = pytest.MonkeyPatch()
    patch.setenv("DYNAMO_EPD_STANDIN", variant)
    patch.setenv("DYNAMO_EPD_STANDIN_MANAGER", manager)
    patch.syspath_prepend(str(STANDIN))
    kept = {m: sys.modules[m] for m in sys.modules if m == "tensorrt_llm" or m.startswith("tensorrt_llm.")}
    _forget()
    try:
        yield
    finally:
        _forget()
        sys.modules.update(kept)
        patch.undo()


@pytest.fixture(params=VARIANTS)
def variant(request):
    with installed(request.param):
        yield request.param


@pytest.fixture
def seven():
    with installed("seven"):
        yield


@asynccontextmanager
async def running(engine=None, **overrides):
    """A started engine of the stand-in that is installed, or of ``engine``'s settings."""
    from dynamo_epd.engine.trtllm import create

    made = create(model_dir=TOY_MODEL, overrides=json.dumps({**ENGINE, **overrides}), **(engine or {}))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
