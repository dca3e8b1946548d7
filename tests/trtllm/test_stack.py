# SPDX-License-Identifier: Apache-2.0
"""The whole path on the stand-in: a real frontend and our workers as processes, in every variant."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from dynamo_epd.demo.toy_data import COLOUR, TOY_MODEL, Picture
from dynamo_epd.serve.client import chat, user
from dynamo_epd.serve.stack import Stack, epd_services

from ..conversations import wrong_answers
from .conftest import ENGINE, STANDIN, VARIANTS

pytestmark = pytest.mark.slow

MODEL, CONVERSATIONS = "toy", 20
PROBE = Picture("white", "black", "square")
COMPONENTS = Path(__file__).parents[2] / "components"


STACKS = [(v, t, "hf") for v in VARIANTS for t in ("e-p-d", "e-pd")] + [("seven", "e-p-d", "trtllm")]


@pytest.fixture(scope="module", params=STACKS, ids="-".join)
def stack(request, tmp_path_factory):
    variant, topology, encoder = request.param
    services = epd_services(
        TOY_MODEL,
        MODEL,
        topology=topology,
        engine_args=("--engine", "trtllm", "--override-engine-args", json.dumps(ENGINE), "--publish-kv-events"),
        encode_args=("--encoder", encoder, "--multimodal-embedding-cache-capacity-gb", "0.05"),
    )
    env = {
        "PYTHONPATH": f"{STANDIN}:{COMPONENTS}",
        "DYNAMO_EPD_STANDIN": variant,
        "DYNAMO_EPD_STANDIN_KV": str(tmp_path_factory.mktemp("kv")),
        "OMP_NUM_THREADS": "1",
    }
    with Stack(services, MODEL, env=env) as running:
        running.wait_ready(240, probe=user(PROBE.draw(), COLOUR.text))
        yield running


async def test_conversations_equal_plain_transformers_with_reuse_on(stack):
    async with aiohttp.ClientSession() as http:
        assert await wrong_answers(http, stack, MODEL, CONVERSATIONS, seed=3) == []


async def test_the_same_image_again_is_cached_and_another_is_not(stack):
    async with aiohttp.ClientSession() as http:
        answers = []
        for background in ("orange", "purple", "orange"):
            picture = Picture(background, "black", "triangle")
            asked = user(picture.draw(), "What colour is the background?")
            answers.append(await chat(http, stack.url, MODEL, [asked], max_tokens=4))
    assert [a.status for a in answers] == [200] * 3
    assert [a.text for a in answers] == ["orange", "purple", "orange"]
    assert answers[2].cached_tokens == answers[2].prompt_tokens - 1 > answers[1].cached_tokens
