# SPDX-License-Identifier: Apache-2.0
"""When a burst of transfers keeps the event loop awake, and when it sleeps."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_epd.transfer.awake import Awake

from .child import WIDTH, make_offer
from .conftest import Opened, rest

MS = 1e-3


class Watched:
    """An ``Awake`` whose clock stands still unless told."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.rounds = 0
        self.awake = Awake(asyncio.get_running_loop(), lambda: self.now, self._count)

    def _count(self) -> None:
        self.rounds += 1

    def signs(self, count: int, pause: float) -> None:
        for _ in range(count):
            self.now += pause
            self.awake.sign()

    async def sleepless(self) -> bool:
        """Whether the loop goes round and round now."""
        before = self.rounds
        for _ in range(20):
            await asyncio.sleep(0)
        return self.rounds > before + 10


async def test_what_one_request_moves_is_no_burst() -> None:
    watched = Watched()
    for _ in range(5):
        watched.signs(15, 0.01 * MS)
        assert not await watched.sleepless()
        watched.now += 2 * MS


async def test_transfers_with_pauses_between_them_are_no_burst() -> None:
    watched = Watched()
    watched.signs(100, 1.1 * MS)
    assert not await watched.sleepless()


async def test_a_burst_keeps_the_loop_awake_for_as_long_as_its_longest_pause() -> None:
    watched = Watched()
    watched.signs(16, 0.9 * MS)
    assert await watched.sleepless()
    watched.now += 0.9 * MS
    assert await watched.sleepless()
    watched.awake.sign()
    watched.now += 0.9 * MS
    assert await watched.sleepless()
    watched.now += 0.2 * MS
    assert not await watched.sleepless()
    watched.awake.sign()
    assert not await watched.sleepless()


@pytest.mark.parametrize(("mode", "tls", "each"), [("map", "", 1), ("write", "tcp", 2), ("stream", "tcp", 2)])
async def test_both_ends_of_a_transfer_take_notice(opened: Opened, mode: str, tls: str, each: int) -> None:
    """Of a copy once, of what takes longer at its begin and at its end."""
    sender, receiver = await opened(mode=mode, tls=tls), await opened(mode=mode, tls=tls)
    signs: list[str] = []
    for name, endpoint in (("sender", sender), ("receiver", receiver)):
        endpoint.effects.awake.sign = lambda name=name: signs.append(name)  # type: ignore[method-assign,misc]
    for seed in range(3):
        signs.clear()
        (await receiver.fetch(await make_offer(sender, WIDTH, seed))).release()
        await rest(sender)
    assert sorted(signs) == ["receiver"] * each + ["sender"] * each
