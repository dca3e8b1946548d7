# SPDX-License-Identifier: Apache-2.0
"""SIGTERM to a worker: what is in flight ends as it would have, and nothing new comes."""

from __future__ import annotations

import asyncio
import signal

import pytest

from dynamo_epd.demo.toy_data import COLOUR, Picture
from dynamo_epd.serve.client import chat, user

from .conftest import MODEL, until

pytestmark = pytest.mark.slow

TOKENS = 40
RED = Picture("blue", "red", "circle")


async def test_a_worker_that_is_told_to_end_finishes_what_it_has(http, watched):
    stack = watched.stack

    async def ask(tokens, **options):
        question = [user(RED.draw(), COLOUR.text)]
        return await chat(http, stack.url, MODEL, question, max_tokens=tokens, timeout=60, **options)

    def running():
        return stack.metrics("decode")["dynamo_component_inflight_requests"]

    until("decode is idle", lambda: running() == 0)
    wedge = watched.faults["decode"] / "engine"
    wedge.touch()
    try:
        answer = asyncio.ensure_future(ask(TOKENS, ignore_eos=True))
        while not running():
            await asyncio.sleep(0.05)
        process = stack.processes["decode"]
        process.send_signal(signal.SIGTERM)
        # With decode out of reach the frontend refuses, instead of letting the request wait in the standing engine.
        while (refused := await ask(4)).status == 200:
            await asyncio.sleep(0.05)
        assert refused.status in (404, 503), refused
        assert watched.health("decode") == 503
        assert not answer.done()
        wedge.unlink()
        finished = await answer
        assert (finished.status, finished.completion_tokens, finished.finish_reason) == (200, TOKENS, "length")
        assert await asyncio.to_thread(process.wait, 60) == 0, watched.log("decode")[-2000:]
    finally:
        wedge.unlink(missing_ok=True)
        stack.kill("decode")
        stack.start("decode")

    while (again := await ask(4)).status != 200:
        await asyncio.sleep(0.3)
    assert again.text == "red"
