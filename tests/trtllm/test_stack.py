# SPDX-License-Identifier: Apache-2.0
"""The whole path on the stand-in: a real frontend and our workers as processes, in every variant."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from dynamo_epd.demo.plain import PlainTransformers, PromptPredictor
from dynamo_epd.demo.toy_data import COLOUR, QUESTIONS, TOY_MODEL, Picture, random_picture
from dynamo_epd.serve.client import chat, user
from dynamo_epd.serve.stack import Stack, epd_services

from .conftest import ENGINE, STANDIN, VARIANTS

pytestmark = pytest.mark.slow

MODEL, MAX_TOKENS, AT_ONCE, CONVERSATIONS = "toy", 6, 6, 20
PROBE = Picture("white", "black", "square")
COMPONENTS = Path(__file__).parents[2] / "components"


@pytest.fixture(scope="module")
def plain():
    return PlainTransformers(TOY_MODEL)


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


def random_conversation(rng, pool):
    turns = []
    for turn in range(int(rng.integers(1, 4))):
        count = int(rng.integers(1, 4)) if turn == 0 else int(rng.random() < 0.3)
        pictures = [pool[int(rng.integers(len(pool)))] for _ in range(count)]
        turns.append((*pictures, QUESTIONS[int(rng.integers(len(QUESTIONS)))].text))
    return turns


async def converse(http, url, plain, predictor, turns, gate):
    sent, local, wrong, cached = [], [], [], 0
    for turn in turns:
        images = [p.draw() for p in turn[:-1]]
        sent.append(user(*images, turn[-1]))
        parts = [{"type": "image", "image": image} for image in images]
        local.append({"role": "user", "content": [*parts, {"type": "text", "text": turn[-1]}]})
        async with gate:
            answer = await chat(http, url, MODEL, sent, max_tokens=MAX_TOKENS)
        expected, _ = await asyncio.to_thread(plain.answer, local, MAX_TOKENS)
        length = len(predictor.layout(local)[0])
        if (answer.status, answer.text, answer.prompt_tokens) != (200, expected, length):
            wrong.append((turn, answer, expected, length))
        cached += answer.cached_tokens
        sent.append({"role": "assistant", "content": expected})
        local.append({"role": "assistant", "content": [{"type": "text", "text": expected}]})
    return wrong, cached


async def test_conversations_equal_plain_transformers_with_reuse_on(stack, plain):
    rng = np.random.default_rng(3)
    pool = [random_picture(rng, side) for side in (56, 84, 84, 112) for _ in range(2)]
    gate, predictor = asyncio.Semaphore(AT_ONCE), PromptPredictor(TOY_MODEL)
    work = [random_conversation(rng, pool) for _ in range(CONVERSATIONS)]
    async with aiohttp.ClientSession() as http:
        results = await asyncio.gather(*(converse(http, stack.url, plain, predictor, turns, gate) for turns in work))
    stack.check()
    assert [entry for wrong, _ in results for entry in wrong] == []
    assert sum(cached for _, cached in results) > 0


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
