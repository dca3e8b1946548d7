# SPDX-License-Identifier: Apache-2.0
"""Receivers that are stopped or killed at every point of a transfer, in every way that bytes can take."""

from __future__ import annotations

import asyncio
import signal

import pytest

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.transfer.protocol import PAYLOAD_BYTES

from .child import arm, jump, make_offer, state
from .conftest import LATER_S, Opened, Spawn, eventually, finish, rest
from .faults import KB, LARGE, MB, SIGNALS, expected, large, revive, settings


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("way", "point"),
    [
        ("write", "granted"),
        ("write", "written to"),
        ("stream", "granted"),
        ("stream", "receiving"),
        ("stream", "arrived"),
        pytest.param("read", "granted", marks=pytest.mark.slow),
        # UCX has crashed here once, in the process that answers the reads: over TCP they are emulated.
        pytest.param("read", "posted", marks=pytest.mark.slow),
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
    nbytes = large(way)
    fetching = asyncio.create_task(receiver.fetch(await make_offer(sender, nbytes, 2)))
    await receiver.stopped()
    if number == signal.SIGSTOP or way == "map":  # nobody hears of a mapped copy before it is there
        jump(sender, LATER_S)
    # Whatever the receiver was doing, the offer ends, and with it all but memory that the fabric still reads.
    await eventually(lambda: not state(sender)["offers"] and (not sender.arena.used_bytes or sender.offers.writing))
    assert sender.arena.used_bytes == (nbytes if sender.offers.writing else 0)
    if number == signal.SIGKILL:
        fetching.cancel()
    else:
        # When it goes on, its own deadline has passed as well.
        jumping = asyncio.create_task(receiver.call("jump", seconds=LATER_S))
        await asyncio.sleep(0)
    receiver = await revive(receiver, number, spawn, config)
    if number == signal.SIGSTOP:
        await jumping
        if point == "written to":
            await receiver.call("block", on=False)
        try:
            assert await fetching == expected(nbytes, 2)
        except TransferError as error:
            assert error.reason in ("timeout", "expired", "generation", "peer_lost")
    assert await receiver.fetch(await make_offer(sender, MB, 4)) == expected(MB, 4)
    await finish(sender, receiver)


async def test_a_receiver_that_stays_stopped_holds_no_memory_of_its_senders(spawn: Spawn, opened: Opened) -> None:
    """It has what the kernel holds for it; the rest of what it asked for is given up with the link."""
    config = {**settings("stream"), "verify_transfers": False}
    sender, receiver = await opened(**config), await spawn(**config)
    assert await receiver.fetch(await make_offer(sender, KB, 1)) == expected(KB, 1)
    await receiver.call("arm", point="receiving", number=signal.SIGSTOP)
    refs = [await make_offer(sender, PAYLOAD_BYTES, seed) for seed in range(2, 5)]
    fetching = [asyncio.create_task(receiver.fetch(ref)) for ref in refs]
    await receiver.stopped()
    await eventually(lambda: sender.offers.writing)
    assert sender.arena.used_bytes == 3 * PAYLOAD_BYTES
    jump(sender, LATER_S)  # whatever waits is cancelled, what has begun has as long again
    await eventually(lambda: sender.arena.used_bytes == PAYLOAD_BYTES)
    assert sender.offers.writing == 1
    jump(sender, LATER_S)
    await rest(sender)
    receiver.signal(signal.SIGCONT)
    for outcome in await asyncio.gather(*fetching, return_exceptions=True):
        assert isinstance(outcome, TransferError) and outcome.reason in ("peer_lost", "expired", "cancelled")
    assert await receiver.fetch(await make_offer(sender, MB, 5)) == expected(MB, 5)
    await finish(sender, receiver)


async def test_a_slot_that_the_kernel_lent_is_not_freed_by_a_stopped_receiver(spawn: Spawn, opened: Opened) -> None:
    """A source slot stays as it is while the fabric reads it, even when its offer is over."""
    config = {**settings("write"), "verify_transfers": False, "arena_bytes": 32 * MB}
    sender, receiver = await opened(**config), await spawn(**config)
    assert await receiver.fetch(await make_offer(sender, MB, 1)) == expected(MB, 1)
    await receiver.call("block", on=True)
    arm(sender, "posted", lambda: receiver.signal(signal.SIGSTOP))
    fetching = asyncio.create_task(receiver.fetch(await make_offer(sender, LARGE, 2)))
    await receiver.stopped()
    jump(sender, LATER_S)
    await eventually(lambda: not state(sender)["offers"])
    assert sender.offers.writing
    others = [await sender.allocate(MB) for _ in range(sender.arena.free_bytes // MB)]
    for slot in others:
        slot.tensor((MB,), "uint8").fill_(0)
    receiver.signal(signal.SIGCONT)
    await receiver.call("block", on=False)
    assert await fetching == expected(LARGE, 2)
    for slot in others:
        slot.release()
    await finish(sender, receiver)
