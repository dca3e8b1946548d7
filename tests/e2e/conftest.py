# SPDX-License-Identifier: Apache-2.0
"""Real stacks: a Dynamo frontend and our workers as processes, shared by the tests of a module."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from dynamo_epd.demo.toy_data import COLOUR, TOY_MODEL, Picture
from dynamo_epd.serve.client import user
from dynamo_epd.serve.stack import Stack, epd_services

MODEL = "toy"
READY = 180.0
TRACES = "traces"
PROBE = Picture("white", "black", "square")

# 64 blocks for 8 requests at a time: eviction is the normal case.
ENGINE = {
    "kv_cache_config": {"enable_block_reuse": True, "tokens_per_block": 8, "max_tokens": 1024},
    "max_seq_len": 512,
    "max_batch_size": 8,
    "max_num_tokens": 96,
    "enable_chunked_prefill": True,
}


def make_stack(topology: str, media: Path, *, engine_args: tuple[str, ...] = (), **options) -> Stack:
    services = epd_services(
        TOY_MODEL,
        MODEL,
        topology=topology,
        engine_args=(
            *("--engine", "reference", "--override-engine-args", json.dumps(ENGINE)),
            *("--trace-requests", str(media / TRACES), *engine_args),
        ),
        encode_args=(
            *("--allowed-local-media-path", str(media)),
            *("--multimodal-embedding-cache-capacity-gb", "0.05"),
            *("--max-media-items", "16", "--max-file-size-mb", "2"),
        ),
        common_args=("--verify-transfers", "--transfer-timeout", "5"),
    )
    return Stack(services, MODEL, **options)


def ready(stack: Stack) -> Stack:
    stack.wait_ready(READY, probe=user(PROBE.draw(), COLOUR.text))
    return stack


@pytest.fixture(scope="session")
def media(tmp_path_factory) -> Path:
    """The folder that the encode worker may read files from."""
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session", params=["e-p-d", "e-pd"])
def stack(request, media):
    with make_stack(request.param, media) as running:
        yield ready(running)


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session
