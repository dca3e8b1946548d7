# SPDX-License-Identifier: Apache-2.0
"""When the event loop stays awake for the data plane, and when it sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from dynamo_epd.transfer import nixl_plane
from dynamo_epd.transfer.config import GRANULE
from dynamo_epd.transfer.memory import open_region
from dynamo_epd.transfer.nixl_plane import NixlPlane

MS = 1e-3


class Loop:
    """A plane's event loop: its clock stands still unless told, and it counts how often the plane looked again."""

    def __init__(self, plane: NixlPlane):
        self.plane = plane
        self.now = 1000.0
        self.looks = 0

    def look(self) -> None:
        self.looks += 1

    async def awake(self) -> bool:
        """Whether the plane keeps the loop from sleeping now."""
        before = self.looks
        for _ in range(20):
            await asyncio.sleep(0)
        return self.looks > before + 10


@pytest.fixture
async def loop(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loop]:
    region = open_region(GRANULE, "host")
    peer_region = open_region(GRANULE, "host")
    running = asyncio.get_running_loop()
    plane, peer = NixlPlane("linger", region, running), NixlPlane("linger-peer", peer_region, running)
    made = Loop(plane)
    known: asyncio.Future[str] = running.create_future()
    plane.load("linger-peer", peer.metadata, known.set_result)
    assert await known == ""
    monkeypatch.setattr(nixl_plane, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(nixl_plane, "os", SimpleNamespace(sched_yield=made.look))
    yield made
    monkeypatch.undo()
    for each, memory in ((plane, region), (peer, peer_region)):
        await running.run_in_executor(None, each.close)
        memory.close()


async def test_a_lone_offer_lets_the_loop_sleep(loop: Loop) -> None:
    for _ in range(3):
        loop.now += 1 * MS
        loop.plane.offered()
        assert not await loop.awake()


async def test_a_burst_keeps_the_loop_awake_for_a_moment(loop: Loop) -> None:
    for _ in range(3):
        loop.now += 0.3 * MS
        loop.plane.offered()
    assert await loop.awake()
    loop.now += 0.4 * MS
    assert await loop.awake()
    loop.now += 0.2 * MS
    assert not await loop.awake()
    loop.now += 1 * MS
    loop.plane.offered()
    assert not await loop.awake()


async def test_expected_bytes_keep_the_loop_awake_until_a_thread_takes_over(loop: Loop) -> None:
    loop.now += 1000 * MS
    loop.plane.expect(GRANULE)
    loop.now += 0.5 * MS
    assert await loop.awake()
    loop.now += 1 * MS
    assert not await loop.awake()
    loop.plane.unexpect(GRANULE)
    loop.now += 1 * MS
    assert not await loop.awake()


async def test_nothing_keeps_the_loop_awake_where_all_peers_are_mapped(loop: Loop) -> None:
    alone = open_region(GRANULE, "host")
    plane = NixlPlane("alone", alone, asyncio.get_running_loop())
    watched = Loop(plane)
    for _ in range(3):
        loop.now += 0.1 * MS
        plane.offered()
        before = loop.looks
        assert not await watched.awake()
        assert loop.looks == before
    await asyncio.get_running_loop().run_in_executor(None, plane.close)
    alone.close()
