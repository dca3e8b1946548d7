# SPDX-License-Identifier: Apache-2.0
"""Senders that are stopped or killed at every point of a transfer, in every way that bytes can take.

Each time: no wrong bytes, a typed error in time, everything released, and the next request good.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from dynamo_epd.contract.errors import TransferError

from .child import arm, blocked
from .conftest import PATIENCE_S, Child, Opened, Spawn, eventually, finish, rest
from .faults import LARGE, LOST, MB, SIGNALS, WAYS, fetched, good, large, lost, revive, settings


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_sender_that_is_lost_before_it_was_met(spawn: Spawn, opened: Opened, way: str, number: int) -> None:
    config = settings(way)
    receiver, sender = await opened(**config), await spawn(**config)
    ref = await sender.offer(MB, 1)
    sender.signal(number)
    fetching = asyncio.create_task(fetched(receiver, MB, 1, ref))
    assert await lost(sender, receiver, fetching, number) == LOST[number]
    sender = await revive(sender, number, spawn, config)
    await good(sender, receiver, 2)
    await finish(receiver, sender)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_sender_that_is_lost_between_two_transfers(spawn: Spawn, opened: Opened, way: str, number: int) -> None:
    config = {**settings(way), "verify_transfers": False}
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 1)
    ref = await sender.offer(MB, 2)
    sender.signal(number)
    fetching = asyncio.create_task(fetched(receiver, MB, 2, ref))
    outcome = await lost(sender, receiver, fetching, number)
    # Mapped memory outlives the process that made it; and a link that is known to have ended maps nothing.
    assert outcome in (("ok", "peer_lost") if way == "map" else (LOST[number],))
    sender = await revive(sender, number, spawn, config)
    await good(sender, receiver, 3)
    await finish(receiver, sender)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("way", "point"),
    [
        ("write", "pull"),
        ("stream", "pull"),
        ("stream", "sending"),
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
    await sender.rest()  # or the end of the first offer sets it off
    await sender.call("arm", point=point, number=number)
    nbytes = large(way)
    ref = await sender.offer(nbytes, 2)
    fetching = asyncio.create_task(fetched(receiver, nbytes, 2, ref))
    if point == "done":
        assert await asyncio.wait_for(fetching, PATIENCE_S) == "ok"
    else:
        if point == "posted":
            # Or all of it may be here before the sender stops.
            with blocked(receiver):
                await sender.stopped()
        assert await lost(sender, receiver, fetching, number) == LOST[number]
        if way == "stream":
            assert receiver.arena.used_bytes == 0  # nobody but this process writes to it
        else:
            assert receiver.arena.quarantined_bytes == LARGE or (way, number) == ("read", signal.SIGKILL)
    sender = await revive(sender, number, spawn, config)
    await good(sender, receiver, 3)
    await finish(receiver, sender)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_sender_that_is_lost_while_it_is_read(spawn: Spawn, opened: Opened, number: int) -> None:
    config = settings("read")
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 1)
    arm(receiver, "posted", lambda: sender.signal(number))
    fetching = asyncio.create_task(fetched(receiver, LARGE, 2, await sender.offer(LARGE, 2)))
    assert await lost(sender, receiver, fetching, number) == LOST[number]
    sender = await revive(sender, number, spawn, config)
    await good(sender, receiver, 3)
    await finish(receiver, sender)


async def test_a_write_that_is_late_lands_in_quarantine_and_nowhere_else(spawn: Spawn, opened: Opened) -> None:
    config = {**settings("write"), "arena_bytes": 32 * MB}
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 1)
    await sender.call("arm", point="posted", number=signal.SIGSTOP)
    fetching = asyncio.create_task(fetched(receiver, LARGE, 2, await sender.offer(LARGE, 2)))
    with blocked(receiver):
        await sender.stopped()
    assert await lost(sender, receiver, fetching, signal.SIGSTOP) == "timeout"
    assert receiver.arena.quarantined_bytes == LARGE
    # Everything that can be had is in use for something else when the sender goes on.
    others = []
    while receiver.arena.free_bytes:
        slot = await receiver.allocate(MB)
        slot.tensor((MB,), "uint8").fill_(len(others) + 100)
        others.append(slot)
    with pytest.raises(TransferError) as caught:
        await receiver.allocate(MB, timeout=0.1)
    assert caught.value.reason == "arena_full"
    sender.signal(signal.SIGCONT)
    await eventually(lambda: not receiver.arena.quarantined_bytes)
    for i, slot in enumerate(others):
        assert bool((slot.tensor((MB,), "uint8") == i + 100).all())
        slot.release()
    await good(sender, receiver, 3)
    await finish(receiver, sender)


async def test_bytes_over_the_link_that_are_late_go_nowhere(spawn: Spawn, opened: Opened) -> None:
    config = {**settings("stream"), "arena_bytes": 16 * MB}
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 1)
    await sender.call("arm", point="sending", number=signal.SIGSTOP)
    fetching = asyncio.create_task(fetched(receiver, 8 * MB, 2, await sender.offer(8 * MB, 2)))
    assert await lost(sender, receiver, fetching, signal.SIGSTOP) == "timeout"
    # All of the memory is in use for something else when the sender goes on.
    others = [await receiver.allocate(MB) for _ in range(16)]
    for i, slot in enumerate(others):
        slot.tensor((MB,), "uint8").fill_(i + 100)
    sender.signal(signal.SIGCONT)
    await sender.rest()
    for i, slot in enumerate(others):
        assert bool((slot.tensor((MB,), "uint8") == i + 100).all())
        slot.release()
    await good(sender, receiver, 3)  # over the same link
    await finish(receiver, sender)


@pytest.mark.parametrize("way", ["write", "stream"])
async def test_a_fetch_that_is_cancelled_waits_for_nobody(spawn: Spawn, opened: Opened, way: str) -> None:
    config = settings(way)
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 1)
    ref = await sender.offer(MB, 2)
    sender.signal(signal.SIGSTOP)
    await sender.stopped()
    fetching = asyncio.create_task(receiver.fetch(ref))
    await eventually(lambda: receiver.fetches.busy)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert receiver.arena.quarantined_bytes == receiver.arena.used_bytes == (MB if way == "write" else 0)
    sender.signal(signal.SIGCONT)
    await asyncio.gather(rest(receiver), sender.rest())
    await good(sender, receiver, 3)
    await finish(receiver, sender)


@pytest.mark.parametrize("way", WAYS)
async def test_a_sender_restarted_at_the_same_address_with_other_content(
    spawn: Spawn, opened: Opened, way: str
) -> None:
    config = settings(way)
    receiver, sender = await opened(**config), await spawn(**config)
    await good(sender, receiver, 1)
    old = await sender.offer(MB, 2, digest="same")
    sender.signal(signal.SIGKILL)
    await sender.stopped()
    port = int(sender.address.rpartition(":")[2])
    restarted: Child | None = None
    for _ in range(100):
        try:
            restarted = await spawn(**config, port=port)
            break
        except RuntimeError:  # the port is not free yet
            await asyncio.sleep(0.05)
    assert restarted is not None and restarted.address == sender.address
    new = await restarted.offer(MB, 3, digest="same")
    assert await fetched(receiver, MB, 2, old) == "peer_lost"
    assert await fetched(receiver, MB, 3, new) == "ok"
    await finish(receiver, restarted)
