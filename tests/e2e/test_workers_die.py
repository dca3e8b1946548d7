# SPDX-License-Identifier: Apache-2.0
"""A worker is killed: the others stay up, requests in flight end in an error, nothing is answered from text alone."""

from __future__ import annotations

import asyncio
import time

import pytest

from dynamo_epd.demo.toy_data import COLOUR, Picture
from dynamo_epd.serve.client import chat, user

from .conftest import MODEL, make_stack, ready

RED = Picture("blue", "red", "circle")
SHORT = 20.0


@pytest.fixture(scope="module")
def stack(media):
    with make_stack("e-p-d", media) as running:
        yield ready(running)


async def ask(http, stack, picture=RED, **options):
    return await chat(
        http, stack.url, MODEL, [user(picture.draw(), COLOUR.text)], max_tokens=4, timeout=SHORT, **options
    )


async def recovers(http, stack, picture=RED):
    """The next request works once the worker is back and the frontend has seen it."""
    end = time.monotonic() + 120
    while True:
        answer = await ask(http, stack, picture)
        if answer.status == 200 or time.monotonic() > end:
            assert (answer.status, answer.text) == (200, picture.colour)
            return
        assert answer.status in (0, 404, 500, 502, 503, 504)
        await asyncio.sleep(0.3)


@pytest.mark.parametrize("name", ["encode", "prefill", "decode"])
async def test_a_killed_worker_is_an_error_and_never_a_wrong_answer(http, stack, name):
    await recovers(http, stack)
    running = [
        asyncio.ensure_future(ask(http, stack, RED.recoloured(c))) for c in ("green", "white", "black", "yellow")
    ]
    await asyncio.sleep(0.02)
    stack.kill(name)
    # What was in flight: the right answer, or an error, within seconds.
    for answer, colour in zip(await asyncio.gather(*running), ("green", "white", "black", "yellow"), strict=True):
        assert answer.status >= 400 or answer.text == colour, answer
        assert answer.status != 0, answer
    # New media: encode cannot have seen them, so without encode there is no answer at all.
    for colour in ("orange", "purple"):
        answer = await ask(http, stack, Picture("white", colour, "triangle"))
        assert answer.status >= 400, answer
    assert all(process.poll() is None for process in stack.processes.values())
    stack.start(name)
    await recovers(http, stack, Picture("white", "orange", "triangle"))


async def test_encode_fallback_asks_an_encode_worker(http, media):
    """With 'ask', a request that the frontend sent on without a handoff is encoded after all."""
    with make_stack("e-pd", media, engine_args=("--encode-fallback", "ask", "--no-route-to-encoder")) as running:
        ready(running)
        answer = await ask(http, running)
        assert (answer.status, answer.text) == (200, "red")
        again = await ask(http, running)
        assert again.cached_tokens == again.prompt_tokens - 1


async def test_without_fallback_a_request_without_handoff_is_refused(http, media):
    with make_stack("e-pd", media, engine_args=("--no-route-to-encoder",)) as running:
        running.wait_ready(120)
        assert (await chat(http, running.url, MODEL, [user("Hello!")], max_tokens=2)).status == 200
        answer = await ask(http, running)
        assert answer.status == 503, answer
