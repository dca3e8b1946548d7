# SPDX-License-Identifier: Apache-2.0
"""What a worker knows of peers that transfers failed with."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_epd.contract.errors import TransferError, Unavailable
from dynamo_epd.contract.handoff import TensorRef
from dynamo_epd.workers.peers import LostPeers


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
async def peer():
    """A peer that can die and come back: its reference, and how."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    class Peer:
        ref = TensorRef(f"127.0.0.1:{port}", "agent", 1, 1, "d", (1, 2), "float32")

        def die(self):
            server.close()

        async def revive(self):
            nonlocal server
            server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)

    yield Peer()
    server.close()


def fail(peers, ref, reason="peer_lost"):
    with pytest.raises(TransferError), peers.watch([ref]):
        raise TransferError(reason, "gone")


async def test_a_dead_peer_fails_the_check_until_it_is_back(peer):
    peers = LostPeers(30.0)
    await peers.check()
    peer.die()
    fail(peers, peer.ref)
    for _ in range(2):
        with pytest.raises(Unavailable, match=peer.ref.endpoint):
            await peers.check()
    await peer.revive()
    await peers.check()
    peer.die()
    await peers.check()


async def test_one_that_does_not_come_back_is_forgotten(peer):
    clock = Clock()
    peers = LostPeers(30.0, clock)
    peer.die()
    fail(peers, peer.ref, "timeout")
    clock.now = 29.0
    with pytest.raises(Unavailable):
        await peers.check()
    clock.now = 30.0
    await peers.check()


async def test_failures_that_are_not_the_peers_do_not_count(peer):
    peers = LostPeers(30.0)
    peer.die()
    for reason in ("arena_full", "too_large", "expired", "cancelled"):
        fail(peers, peer.ref, reason)
    with peers.watch([peer.ref]):
        pass
    await peers.check()


def test_peers_that_nobody_checks_are_not_kept_for_ever():
    clock = Clock()
    peers = LostPeers(30.0, clock)
    for number in range(100):
        clock.now += 10.0
        fail(peers, TensorRef(f"10.0.0.1:{1000 + number}", "agent", 1, 1, "d", (1, 2), "float32"))
    assert len(peers._lost) == 3
