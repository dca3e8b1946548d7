# SPDX-License-Identifier: Apache-2.0
"""Block events all the way from the stand-in's cache to a listener."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from dynamo_epd.demo.toy_data import Picture
from dynamo_epd.engine.base import BlocksRemoved, BlocksStored

from .conftest import installed, running
from .prompts import answer, make_request

RED, BLUE = Picture("red", "white", "circle"), Picture("blue", "white", "circle")
ASK = "What colour is the background?"
HASHES = {RED: "00000000000000aa", BLUE: "00000000000000bb"}


def make(picture, **changes):
    return make_request([picture], ASK, mm_hashes=[HASHES[picture]], **changes)


async def settle(engine, events, count):
    for _ in range(500):
        if sum(len(e.token_ids) for e in events if isinstance(e, BlocksStored)) >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(events)


@pytest.mark.parametrize("manager", ["v1", "v2", "v2-64"])
@pytest.mark.parametrize("variant", ["four", "seven", "item_runs"])
async def test_every_full_block_is_told_with_the_routers_ids(variant, manager):
    with installed(variant, manager):
        events: list = []
        async with running() as engine:
            engine.listen(events.append)
            told = {}
            for picture in (RED, BLUE, RED):
                request = make(picture)
                tokens, _ = await answer(engine, request)
                ids = np.concatenate([request.routing_token_ids, tokens[:-1]])
                told[picture] = ids[: len(ids) // 8 * 8].tolist()
            shared = next(i for i in range(0, 999, 8) if told[RED][i : i + 8] != told[BLUE][i : i + 8])
            await settle(engine, events, len(told[RED]) + len(told[BLUE]) - shared)
            chains = {None: []}
            for event in events:
                assert isinstance(event, BlocksStored)
                ids = chains[event.parent_hash]
                for i, block in enumerate(event.block_hashes):
                    ids = [*ids, *event.token_ids[8 * i : 8 * i + 8]]
                    chains[block] = ids
            assert told[RED] in chains.values() and told[BLUE] in chains.values()
            assert len(chains) - 1 == (len(told[RED]) + len(told[BLUE]) - shared) // 8
            assert engine._events.malformed == engine._events.unknown == 0
            assert engine.used_blocks() == len(chains) - 1


async def test_evicted_blocks_are_told(seven):
    events: list = []
    async with running(kv_cache_config={"tokens_per_block": 8, "max_tokens": 128}) as engine:
        engine.listen(events.append)
        for i in range(12):
            picture = Picture("red", "white", "circle", centre=(0.4 + i / 60, 0.5))
            await answer(engine, make_request([picture], ASK, mm_hashes=[f"{i:016x}"]))
        for _ in range(500):
            if any(isinstance(e, BlocksRemoved) for e in events):
                break
            await asyncio.sleep(0.01)
    stored = {h for e in events if isinstance(e, BlocksStored) for h in e.block_hashes}
    removed = {h for e in events if isinstance(e, BlocksRemoved) for h in e.block_hashes}
    assert removed and removed <= stored


async def test_a_malformed_event_and_a_failing_listener_do_not_end_the_loop(seven):
    events: list = []

    def failing(event):
        raise RuntimeError("the router is gone")

    async with running() as engine:
        engine.listen(failing)
        engine.listen(events.append)
        for bad in (None, {"data": {"type": "stored"}}, "nonsense"):
            engine._llm._events.put(bad)
        await answer(engine, make(RED))
        await settle(engine, events, 16)
        assert engine._events.malformed == 3


async def test_a_stream_that_fails_is_read_again(seven):
    events: list = []
    async with running() as engine:
        engine.listen(events.append)
        real, failures = engine._llm.get_kv_cache_events, iter([True, True])

        def flaky(timeout):
            if next(failures, False):
                raise ConnectionError("lost")
            return real(timeout)

        engine._llm.get_kv_cache_events = flaky
        await answer(engine, make(RED))
        await settle(engine, events, 16)
        assert engine._events.malformed == 2


async def test_an_engine_that_never_answers_the_question_for_events_holds_up_nothing(seven):
    asked, release = threading.Event(), threading.Event()

    def silent(timeout):
        asked.set()
        release.wait(30)
        return []

    async with running() as engine:
        engine._llm.get_kv_cache_events = silent
        tokens, _ = await answer(engine, make(RED))
        assert await asyncio.to_thread(asked.wait, 10)
        assert (await answer(engine, make(RED)))[0] == tokens
    assert not release.is_set()
    release.set()


async def test_nothing_is_asked_before_the_first_request(variant):
    async with running() as engine:
        await asyncio.sleep(0.05)
        assert engine._events.malformed == 0 and not engine._poller.done()
        await answer(engine, make(BLUE))
        await asyncio.sleep(0.05)
        assert engine._events.malformed == 0


@pytest.mark.parametrize(("options", "reuse"), [({"kv_events": False}, True), ({}, False)])
async def test_no_events_where_nobody_wants_them_or_nothing_is_reused(seven, options, reuse):
    async with running(options, kv_cache_config={"enable_block_reuse": reuse, "tokens_per_block": 8}) as engine:
        await answer(engine, make(RED))
        assert engine._poller is None and engine.used_blocks() == 0 and engine._llm._events.empty()
