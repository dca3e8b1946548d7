# SPDX-License-Identifier: Apache-2.0
"""What is given to Dynamo's publishers, with engine and publishers of this test's own."""

from __future__ import annotations

import pytest

from dynamo_epd.engine.base import BlocksRemoved, BlocksStored
from dynamo_epd.workers.events import KVEventForwarder, LoadReporter


class FakeEngine:
    def __init__(self):
        self.listeners = []

    def listen(self, listener):
        self.listeners.append(listener)

    def tell(self, event):
        for listener in self.listeners:
            listener(event)


class FakePublisher:
    def __init__(self, refuses=()):
        self.told = []
        self._refuses = refuses

    def publish_stored(self, **event):
        if event["block_hashes"] in self._refuses:
            raise RuntimeError("no")
        self.told.append(event)

    def publish_removed(self, **event):
        self.told.append(event)

    def publish(self, rank, snapshot):
        self.told.append((rank, snapshot.kv_used_blocks, snapshot.gpu_cache_usage, snapshot.kv_cache_hit_rate))


def test_events_are_forwarded_in_order_with_their_scope_until_closed():
    engine, publisher = FakeEngine(), FakePublisher()
    forwarder = KVEventForwarder(engine, 2)
    forwarder.publish_to(publisher)
    engine.tell(BlocksStored((7, 8), 6, (1, 2, 3, 4), "tenant", "adapter"))
    engine.tell(BlocksRemoved((8,)))
    forwarder.close()
    engine.tell(BlocksRemoved((7,)))
    stored = {
        "token_ids": [1, 2, 3, 4],
        "num_block_tokens": [2, 2],
        "block_hashes": [7, 8],
        "parent_hash": 6,
        "lora_name": "adapter",
        "cache_salt": "tenant",
    }
    assert publisher.told == [stored, {"block_hashes": [8]}]


def test_an_event_that_is_refused_costs_no_request():
    engine, publisher = FakeEngine(), FakePublisher(refuses=([1],))
    forwarder = KVEventForwarder(engine, 2)
    forwarder.publish_to(publisher)
    engine.tell(BlocksStored((1,), None, (1, 2)))
    engine.tell(BlocksStored((2,), None, (3, 4)))
    assert forwarder.skipped == 1 and [event["block_hashes"] for event in publisher.told] == [[2]]


def test_load_is_of_the_requests_in_flight():
    publisher, load = FakePublisher(), LoadReporter(total_blocks=10, tokens_per_block=4)
    load.publish_to(publisher)
    with load.request(9) as first, pytest.raises(ZeroDivisionError), load.request(40):
        first.cached(9, 4)
        raise ZeroDivisionError
    load.cached(1, 1)
    with load.request(1):
        pass
    assert publisher.told == [
        (0, 0, 0.0, None),
        (0, 3, 0.3, None),
        (0, 10, 1.0, None),
        (0, 3, 0.3, 4 / 9),
        (0, 0, 0.0, 4 / 9),
        (0, 1, 0.1, 0.5),
        (0, 0, 0.0, 0.5),
    ]
