# SPDX-License-Identifier: Apache-2.0
import asyncio
from collections import Counter

import pytest

from dynamo_epd.contract.handoff import Group, Segment
from dynamo_epd.models.base import Expansion
from dynamo_epd.workers.embeddings import Description, EmbeddingCache, Encoded, Part

DESCRIPTION = Description(Expansion((Group(1, (Segment(5, 2, 0),)),)), (Part("image", 2, 4, "float32", {}),))


class FakeTransfer:
    """Counts holds by name, and keeps what it is told to until ``forget``."""

    def __init__(self):
        self.holds = Counter()
        self.kept = {}

    def slot(self, name):
        return FakeSlot(self, name)

    def keep(self, digest, slot):
        self.kept[digest] = slot.name

    def find(self, digest):
        return self.slot(self.kept[digest]) if digest in self.kept else None


class FakeSlot:
    def __init__(self, owner, name):
        self.owner, self.name, self.released = owner, name, False
        owner.holds[name] += 1

    def hold(self):
        return FakeSlot(self.owner, self.name)

    def release(self):
        assert not self.released
        self.released = True
        self.owner.holds[self.name] -= 1


@pytest.fixture
def transfer():
    return FakeTransfer()


@pytest.fixture
def cache(transfer):
    return EmbeddingCache(transfer, enabled=True)


def maker(transfer, name, gate=None, calls=None, error=None):
    async def make():
        if calls is not None:
            calls.append(name)
        if gate is not None:
            await gate.wait()
        if error is not None:
            raise error
        return Encoded(DESCRIPTION, (transfer.slot(name),))

    return make


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_second_request_is_served_from_what_is_kept(cache, transfer):
    calls = []
    first = await cache.get("k", maker(transfer, "one", calls=calls))
    second = await cache.get("k", maker(transfer, "two", calls=calls))
    assert calls == ["one"] and second.slots[0].name == "one"
    first.release()
    second.release()
    await settle()
    assert transfer.holds["one"] == 0


async def test_items_in_flight_are_made_once(cache, transfer):
    gate, calls = asyncio.Event(), []
    waiting = [asyncio.ensure_future(cache.get("k", maker(transfer, "one", gate, calls))) for _ in range(5)]
    await settle()
    gate.set()
    made = await asyncio.gather(*waiting)
    assert calls == ["one"]
    await settle()
    assert transfer.holds["one"] == 5
    for item in made:
        item.release()
    assert transfer.holds["one"] == 0


async def test_what_was_evicted_is_made_again(cache, transfer):
    (await cache.get("k", maker(transfer, "one"))).release()
    transfer.kept.clear()
    assert (await cache.get("k", maker(transfer, "two"))).slots[0].name == "two"


async def test_a_waiter_that_leaves_does_not_spoil_it_for_the_others(cache, transfer):
    gate = asyncio.Event()
    leaver, stayer = (asyncio.ensure_future(cache.get("k", maker(transfer, "one", gate))) for _ in range(2))
    await settle()
    leaver.cancel()
    await settle()
    gate.set()
    (await stayer).release()
    await settle()
    assert transfer.holds["one"] == 0


async def test_the_last_to_leave_cancels_the_making_and_nothing_stays_held(cache, transfer):
    gate, calls = asyncio.Event(), []
    only = asyncio.ensure_future(cache.get("k", maker(transfer, "one", gate, calls)))
    await settle()
    only.cancel()
    await settle()
    gate.set()
    await settle()
    assert transfer.holds["one"] == 0 and not cache._flights
    assert (await cache.get("k", maker(transfer, "two", calls=calls))).slots[0].name == "two"


async def test_an_error_reaches_all_who_wait_and_is_not_remembered(cache, transfer):
    gate = asyncio.Event()
    waiting = [
        asyncio.ensure_future(cache.get("k", maker(transfer, "one", gate, error=RuntimeError("boom"))))
        for _ in range(2)
    ]
    await settle()
    gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(r) for r in results] == ["boom", "boom"]
    assert (await cache.get("k", maker(transfer, "two"))).slots[0].name == "two"


async def test_a_disabled_cache_keeps_nothing(transfer):
    cache = EmbeddingCache(transfer, enabled=False)
    (await cache.get("k", maker(transfer, "one"))).release()
    await settle()
    assert not transfer.kept and transfer.holds["one"] == 0
