# SPDX-License-Identifier: Apache-2.0
"""Real processes that are stopped or killed at every point of a transfer, in every way that bytes can take.

Each time: no wrong bytes, a typed error in time, everything released, and the next request good.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
from blake3 import blake3

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.transfer import Endpoint

from .child import WIDTH, arm, block, checksum, make_offer, pattern, state
from .conftest import Child, Opened, Spawn, eventually, rest

pytestmark = pytest.mark.slow  # processes that are stopped and killed: minutes on a loaded machine

MB = 1 << 20
LARGE = 24 * MB
"""More than the sockets' buffers hold, so that a stopped peer stops the transfer."""

TIMEOUT_S = 1.0
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
WAYS = ["map", "write", pytest.param("read", marks=pytest.mark.slow)]


def expected(nbytes: int, seed: int) -> str:
    return blake3(pattern(nbytes, seed).numpy().data).hexdigest()


async def fetched(receiver: Endpoint, nbytes: int, seed: int, ref: object) -> str:
    """``ok`` where the right bytes came, else the reason of the error; anything else fails the test."""
    try:
        slot = await receiver.fetch(ref)  # type: ignore[arg-type]
    except TransferError as error:
        return error.reason
    assert checksum(slot, nbytes) == expected(nbytes, seed), "wrong bytes"
    slot.release()
    return "ok"


async def good(sender: Child, receiver: Endpoint, seed: int) -> None:
    """A transfer that nothing happens to."""
    nbytes = 2 * MB
    assert await fetched(receiver, nbytes, seed, await sender.offer(nbytes, seed)) == "ok"


async def revive(child: Child, number: int, spawn: Spawn, config: dict[str, object]) -> Child:
    """The child itself, going on, or one in its place."""
    if number == signal.SIGSTOP:
        await child.stopped()
        child.signal(signal.SIGCONT)
        return child
    return await spawn(**config)


def settings(way: str) -> dict[str, object]:
    tls = "" if way == "map" else "tcp"
    return {"mode": way, "tls": tls, "timeout": TIMEOUT_S, "offer_ttl": 2.0, "verify_transfers": True}


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_sender_that_is_lost_before_it_was_met(spawn: Spawn, opened: Opened, way: str, number: int) -> None:
    config = settings(way)
    receiver, sender = await opened(**config), await spawn(**config)
    ref = await sender.offer(MB, 1)
    sender.signal(number)
    assert await fetched(receiver, MB, 1, ref) in ("peer_lost", "timeout")
    sender = await revive(sender, number, spawn, config)
    await good(sender, receiver, 2)
    await asyncio.gather(rest(receiver), sender.rest())


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_sender_that_is_lost_between_two_transfers(spawn: Spawn, opened: Opened, way: str, number: int) -> None:
    config = {**settings(way), "verify_transfers": False}
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 1)
    ref = await sender.offer(MB, 2)
    sender.signal(number)
    outcome = await fetched(receiver, MB, 2, ref)
    # Mapped memory outlives the process that made it; and a link that is known to have ended maps nothing.
    assert outcome in (("ok", "peer_lost") if way == "map" else ("peer_lost", "timeout"))
    sender = await revive(sender, number, spawn, config)
    await good(sender, receiver, 3)
    await asyncio.gather(rest(receiver), sender.rest())


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("way", "point"),
    [
        ("write", "pull"),
        pytest.param("read", "pull", marks=pytest.mark.slow),
        ("write", "posted"),
        ("map", "done"),
        pytest.param("read", "done", marks=pytest.mark.slow),
        ("write", "done"),
    ],
)
async def test_a_sender_that_is_lost_during_a_transfer(
    spawn: Spawn, opened: Opened, way: str, point: str, number: int
) -> None:
    config = {**settings(way), "verify_transfers": False}
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 1)
    await sender.call("arm", point=point, number=number)
    ref = await sender.offer(LARGE, 2)
    fetching = asyncio.create_task(fetched(receiver, LARGE, 2, ref))
    if point == "posted":
        # Or all of it may be here before the sender stops.
        block(receiver, True)
        await sender.stopped()
        block(receiver, False)
    outcome = await fetching
    assert outcome in (("ok",) if point == "done" else ("peer_lost", "timeout"))
    if outcome != "ok":
        assert (receiver.arena.quarantined_bytes > 0) or number == signal.SIGKILL or way == "read"
    sender = await revive(sender, number, spawn, config)
    await good(sender, receiver, 3)
    await asyncio.gather(rest(receiver), sender.rest())


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_sender_that_is_lost_while_it_is_read(spawn: Spawn, opened: Opened, number: int) -> None:
    config = settings("read")
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 1)
    arm(receiver, "posted", lambda: sender.signal(number))
    ref = await sender.offer(LARGE, 2)
    assert await fetched(receiver, LARGE, 2, ref) in ("peer_lost", "timeout")
    sender = await revive(sender, number, spawn, config)
    await good(sender, receiver, 3)
    await asyncio.gather(rest(receiver), sender.rest())


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("way", "point"),
    [
        ("write", "granted"),
        ("write", "written to"),
        pytest.param("read", "granted", marks=pytest.mark.slow),
        ("read", "posted"),
        ("map", "arrived"),
        pytest.param("read", "arrived", marks=pytest.mark.slow),
        ("write", "arrived"),
    ],
)
async def test_a_receiver_that_is_lost(spawn: Spawn, opened: Opened, way: str, point: str, number: int) -> None:
    config = {**settings(way), "verify_transfers": False}
    sender, receiver = await opened(**config), await spawn(**config)
    assert await receiver.fetch(await make_offer(sender, MB, 1)) == expected(MB, 1)
    if point == "written to":
        await receiver.call("block", on=True)
        arm(sender, "posted", lambda: receiver.signal(number))
    else:
        await receiver.call("arm", point=point, number=number)
    fetching = asyncio.create_task(receiver.fetch(await make_offer(sender, LARGE, 2)))
    # Whatever the receiver was doing, the offer ends, and with it all but memory that the fabric still reads.
    await eventually(lambda: not state(sender)["offers"] and (not sender.arena.used_bytes or sender.offers.writing))
    assert sender.arena.used_bytes == (LARGE if sender.offers.writing else 0)
    receiver = await revive(receiver, number, spawn, config)
    if number == signal.SIGKILL:
        fetching.cancel()
    else:
        if point == "written to":
            await receiver.call("block", on=False)
        try:
            assert await fetching == expected(LARGE, 2)
        except TransferError as error:
            assert error.reason in ("timeout", "expired", "generation", "peer_lost")
    assert await receiver.fetch(await make_offer(sender, MB, 4)) == expected(MB, 4)
    await asyncio.gather(rest(sender), receiver.rest())


@pytest.mark.parametrize("tls", ["tcp"])
async def test_a_write_that_is_late_lands_in_quarantine_and_nowhere_else(
    spawn: Spawn, opened: Opened, tls: str
) -> None:
    config = {"mode": "write", "tls": tls, "timeout": 0.5, "arena_bytes": 32 * MB}
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 1)
    await sender.call("arm", point="posted", number=signal.SIGSTOP)
    fetching = asyncio.create_task(fetched(receiver, LARGE, 2, await sender.offer(LARGE, 2)))
    block(receiver, True)
    await sender.stopped()
    block(receiver, False)
    assert await fetching == "timeout"
    assert receiver.arena.quarantined_bytes == LARGE
    # Everything that can be had is in use for something else when the sender goes on.
    others = []
    while receiver.arena.free_bytes:
        slot = await receiver.allocate(MB)
        slot.tensor((MB,), "uint8").fill_(len(others) + 100)
        others.append(slot)
    with pytest.raises(TransferError) as caught:
        await receiver.allocate(MB)
    assert caught.value.reason == "arena_full"
    sender.signal(signal.SIGCONT)
    await eventually(lambda: not receiver.arena.quarantined_bytes)
    for i, slot in enumerate(others):
        assert bool((slot.tensor((MB,), "uint8") == i + 100).all())
        slot.release()
    await good(sender, receiver, 3)
    await asyncio.gather(rest(receiver), sender.rest())


@pytest.mark.parametrize("way", WAYS)
async def test_a_sender_restarted_at_the_same_address_with_other_content(
    spawn: Spawn, opened: Opened, way: str
) -> None:
    config = {**settings(way), "offer_ttl": 60.0}
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 1)
    old = await sender.offer(MB, 2, digest="same")
    sender.signal(signal.SIGKILL)
    port = int(sender.address.rpartition(":")[2])
    while True:
        try:
            restarted = await spawn(**config, port=port)
            break
        except RuntimeError:  # the port is not free yet
            await asyncio.sleep(0.05)
    assert restarted.address == sender.address
    new = await restarted.offer(MB, 3, digest="same")
    assert await fetched(receiver, MB, 2, old) == "peer_lost"
    assert await fetched(receiver, MB, 3, new) == "ok"
    await asyncio.gather(rest(receiver), restarted.rest())


@pytest.mark.parametrize("way", WAYS)
async def test_many_offers_of_which_one_is_never_read(spawn: Spawn, opened: Opened, way: str) -> None:
    config = {**settings(way), "offer_ttl": 2.5}
    receiver, sender = await opened(**config), await spawn(**config)
    nbytes = 64 * WIDTH
    refs = await sender.offers(nbytes, 1, count=200)
    outcomes = await asyncio.gather(*(fetched(receiver, nbytes, 2 + i, ref) for i, ref in enumerate(refs[1:])))
    assert outcomes == ["ok"] * 199
    found = await sender.call("state")
    assert (found["used"], found["offers"]) in ((nbytes, 1), (0, 0))
    await asyncio.gather(rest(receiver), sender.rest())
    assert await fetched(receiver, nbytes, 1, refs[0]) in ("expired", "generation")
    await asyncio.gather(rest(receiver), sender.rest())


async def test_links_that_end_under_living_peers_are_made_anew(spawn: Spawn, opened: Opened) -> None:
    for way in ("map", "read", "write"):
        config = settings(way)
        receiver, sender = await opened(**config), await spawn(**config)
        for seed in range(3):
            await good(sender, receiver, seed)
            ref = await sender.offer(MB, seed)
            for peer in receiver.links._dialled.values():
                peer.link.close()
            assert await fetched(receiver, MB, seed, ref) in ("ok", "peer_lost")
        await asyncio.gather(rest(receiver), sender.rest())


async def test_a_link_is_not_closed_while_bytes_are_on_their_way(spawn: Spawn, opened: Opened) -> None:
    """A receiver takes the end of a link for the end of all writes to its memory."""
    config = {**settings("write"), "verify_transfers": False, "timeout": 30.0}
    sender, receiver = await opened(**config), await spawn(**config)
    assert await receiver.fetch(await make_offer(sender, MB, 1)) == expected(MB, 1)
    await receiver.call("block", on=True)
    arm(sender, "posted", lambda: receiver.signal(signal.SIGSTOP))
    fetching = asyncio.create_task(receiver.fetch(await make_offer(sender, LARGE, 2)))
    await receiver.stopped()
    (peer,) = sender.links._accepted
    peer.faulted(peer.link, TransferError("protocol", "as if it had sent something malformed"))
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


async def test_a_slot_that_the_kernel_lent_is_not_freed_by_a_stopped_receiver(spawn: Spawn, opened: Opened) -> None:
    """A source slot stays as it is while the fabric reads it, even when its offer is over."""
    config = {**settings("write"), "verify_transfers": False, "arena_bytes": 32 * MB}
    sender, receiver = await opened(**config), await spawn(**config)
    assert await receiver.fetch(await make_offer(sender, MB, 1)) == expected(MB, 1)
    await receiver.call("block", on=True)
    arm(sender, "posted", lambda: receiver.signal(signal.SIGSTOP))
    fetching = asyncio.create_task(receiver.fetch(await make_offer(sender, LARGE, 2), timeout=60.0))
    await eventually(lambda: sender.offers.writing and not state(sender)["offers"])
    while sender.arena.free_bytes >= MB:
        (await sender.allocate(MB)).tensor((MB,), "uint8").fill_(0)
    receiver.signal(signal.SIGCONT)
    await receiver.call("block", on=False)
    assert await fetching == expected(LARGE, 2)
