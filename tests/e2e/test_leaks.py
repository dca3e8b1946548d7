# SPDX-License-Identifier: Apache-2.0
"""Whatever becomes of requests, afterwards no worker holds memory, offers or blocks for them."""

from __future__ import annotations

import asyncio
import random
import time

import aiohttp

from dynamo_epd.demo.toy_data import COLOUR, COLOURS, Picture
from dynamo_epd.serve.client import chat, user

from .conftest import MODEL


async def abandoned(http, stack, rng):
    """A request whose client goes away at a random moment."""
    picture = Picture("white", rng.choice([c for c in COLOURS if c != "white"]), "square")
    body = {"model": MODEL, "messages": [user(picture.draw(), COLOUR.text)], "max_tokens": 200, "stream": True}
    body |= {"ignore_eos": True}
    try:
        async with http.post(f"{stack.url}/v1/chat/completions", json=body) as response:
            await asyncio.wait_for(response.read(), rng.uniform(0.01, 0.4))
    except asyncio.TimeoutError:
        return


def held(stack) -> dict[str, float]:
    """Everything that is still there of a request, by worker."""
    found = {}
    for name in stack.workers:
        for sample, value in stack.metrics(name).items():
            if sample.startswith(("dynamo_component_mm_arena_bytes{'state': 'used'", "dynamo_component_mm_offers{")):
                found[f"{name} {sample}"] = value
    return found


async def test_nothing_is_left_of_served_refused_and_abandoned_requests(stack):
    rng = random.Random(7)
    async with aiohttp.ClientSession() as http:
        red, html = Picture("blue", "red", "circle").draw(), "data:image/png;base64,PCFkb2N0eXBlIGh0bWw+"
        for _ in range(5):
            await asyncio.gather(
                chat(http, stack.url, MODEL, [user(red, COLOUR.text)], max_tokens=4),
                chat(http, stack.url, MODEL, [user(red, html, COLOUR.text)], max_tokens=4),
                chat(http, stack.url, MODEL, [user(red, red, "What? " * 300)], max_tokens=4),
                *(abandoned(http, stack, rng) for _ in range(4)),
            )
        end = time.monotonic() + 40  # an offer that nobody could be told about lives for 30 s
        while any(held(stack).values()) and time.monotonic() < end:
            await asyncio.sleep(0.5)
        assert not {k: v for k, v in held(stack).items() if v}
        assert held(stack)
        answer = await chat(http, stack.url, MODEL, [user(red, COLOUR.text)], max_tokens=4)
    assert (answer.status, answer.text) == (200, "red")
