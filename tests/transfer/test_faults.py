# SPDX-License-Identifier: Apache-2.0
"""What else goes wrong between two processes.

Each time: no wrong bytes, a typed error in time, everything released, and the next request good.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.contract.handoff import TensorRef
from dynamo_epd.transfer.protocol import Cancel, Check, Checked, Done, Ended, Pull, Reading

from .child import WIDTH, arm, checksum, jump, make_offer
from .conftest import LATER_S, PATIENCE_S, Opened, Spawn, eventually, finish, rest
from .faults import KB, LARGE, MB, WAYS, expected, fetched, good, settings
from .test_wire import MALFORMED, Stranger


@pytest.mark.parametrize("way", WAYS)
async def test_many_offers_of_which_one_is_never_read(spawn: Spawn, opened: Opened, way: str) -> None:
    config = settings(way)
    receiver, sender = await opened(**config), await spawn(**config)
    nbytes = 64 * WIDTH
    refs = await sender.offers(nbytes, 1, count=200)
    outcomes = await asyncio.gather(*(fetched(receiver, nbytes, 2 + i, ref) for i, ref in enumerate(refs[1:])))
    assert outcomes == ["ok"] * 199
    await rest(receiver)
    found = await sender.call("state")
    assert (found["used"], found["offers"]) == (nbytes, 1)
    await sender.call("jump", seconds=LATER_S)
    await sender.rest()
    assert await fetched(receiver, nbytes, 1, refs[0]) in ("expired", "generation")
    await good(sender, receiver, 2)
    await finish(receiver, sender)


async def test_what_no_endpoint_would_send(spawn: Spawn, opened: Opened) -> None:
    """Malformed, oversized, of an unknown version, stale, doubled or reordered, while a transfer is under way."""
    config = settings("map")
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 0)
    for seed, data in enumerate(MALFORMED.values()):
        fetching = asyncio.create_task(fetched(receiver, 4 * MB, seed, await sender.offer(4 * MB, seed)))
        stranger = await Stranger.connect(sender.address, greet=False)
        stranger.send(data)
        while not await stranger.ended():
            pass
        assert await asyncio.wait_for(fetching, PATIENCE_S) == "ok"
    stranger = await Stranger.connect(sender.address)
    ref = await sender.offer(MB, 1)
    number, generation = ref.offer, ref.generation
    stranger.send(Done(number, generation + 1), Done(number + (1 << 24), generation), Cancel(5), Cancel(5))
    stranger.send(Pull(5, number, generation, 0, MB, 0), Check(6, number, generation - 1, 0, MB))
    stranger.send(Reading(7, number, generation - 1), Pull(8, number, generation, 1, MB, 0))
    answers = [await stranger.next() for _ in range(5)]
    assert [(type(answer), getattr(answer, "outcome", "")) for answer in answers] == [
        (Ended, "cancelled"),
        (Ended, "cancelled"),
        (Checked, ""),
        (Ended, "generation"),
        (Ended, "protocol"),
    ]
    assert await fetched(receiver, MB, 1, ref) == "ok"
    stranger.writer.close()
    await finish(receiver, sender)


async def test_a_digest_that_is_known_with_another_shape(spawn: Spawn, opened: Opened) -> None:
    config = settings("map")
    receiver, sender = await opened(**config), await spawn(**config)
    slot = await receiver.fetch(await sender.offer(MB, 1, digest="d"))
    receiver.keep("d", slot)
    slot.release()
    for shape in ((MB // WIDTH // 2, 2 * WIDTH), (MB // WIDTH // 2, WIDTH)):
        ref = await sender.offer(MB, 2, digest="d")
        other = TensorRef(ref.endpoint, ref.agent, ref.offer, ref.generation, ref.digest, shape, ref.dtype)
        assert await fetched(receiver, MB, 2, other) == "protocol"
    assert await fetched(receiver, MB, 1, await sender.offer(MB, 2, digest="d")) == "ok"
    await sender.rest()
    await good(sender, receiver, 3)
    receiver.store.clear()
    await finish(receiver, sender)


async def test_an_arena_that_is_full(spawn: Spawn, opened: Opened) -> None:
    """Whoever waits gets an error that says so, by the deadline; two that need two slots each get them in turn."""
    receiver, sender = await opened(**settings("map"), arena_bytes=192 * KB), await spawn(**settings("map"))
    held = await receiver.allocate(192 * KB)
    fetching = asyncio.create_task(receiver.fetch(await sender.offer(64 * KB, 1)))
    await eventually(lambda: receiver.arena.waiting)
    jump(receiver, LATER_S)
    with pytest.raises(TransferError, match="0 of 196608 are free") as caught:
        await asyncio.wait_for(fetching, PATIENCE_S)
    assert caught.value.reason == "arena_full"
    held.release()
    await sender.rest()

    async def two(seed: int) -> None:
        refs = await sender.offers(64 * KB, seed, count=2)
        for i, slot in enumerate(await receiver.fetch_all(refs)):
            assert checksum(slot, 64 * KB) == expected(64 * KB, seed + i)
            slot.release()

    await asyncio.wait_for(asyncio.gather(*(two(2 * i) for i in range(8))), PATIENCE_S)
    await finish(receiver, sender)


async def test_links_that_end_under_living_peers_are_made_anew(spawn: Spawn, opened: Opened) -> None:
    for way in ("map", "read", "write", "stream"):
        config = settings(way)
        receiver, sender = await opened(**config), await spawn(**config)
        for seed in range(3):
            await good(sender, receiver, seed)
            ref = await sender.offer(MB, seed)
            for peer in receiver.links._dialled.values():
                peer.link.close()
            assert await fetched(receiver, MB, seed, ref) in ("ok", "peer_lost")
        await asyncio.gather(rest(receiver), sender.rest())


@pytest.mark.parametrize("fault", ["malformed", "stuck"])
async def test_a_link_is_not_closed_while_bytes_are_on_their_way(spawn: Spawn, opened: Opened, fault: str) -> None:
    """A receiver takes the end of a link for the end of all writes to its memory."""
    config = {**settings("write"), "verify_transfers": False}
    sender, receiver = await opened(**config), await spawn(**config)
    assert await receiver.fetch(await make_offer(sender, MB, 1)) == expected(MB, 1)
    await receiver.call("block", on=True)
    arm(sender, "posted", lambda: receiver.signal(signal.SIGSTOP))
    fetching = asyncio.create_task(receiver.fetch(await make_offer(sender, LARGE, 2)))
    await receiver.stopped()
    (peer,) = sender.links._accepted
    if fault == "malformed":
        peer.faulted(peer.link, TransferError("protocol", "as if it had sent something malformed"))
    else:
        sender.effects.stuck(peer)
    await asyncio.sleep(0.1)
    assert peer in sender.links._accepted
    receiver.signal(signal.SIGCONT)
    await receiver.call("block", on=False)
    try:
        assert await fetching == expected(LARGE, 2)
    except TransferError as error:
        assert error.reason == "peer_lost"
    await eventually(lambda: peer not in sender.links._accepted)
    assert await receiver.fetch(await make_offer(sender, MB, 3)) == expected(MB, 3)
