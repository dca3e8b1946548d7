# SPDX-License-Identifier: Apache-2.0
"""What the tests of faults have in common."""

from __future__ import annotations

import asyncio
import signal

import pytest
from blake3 import blake3

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.transfer import Endpoint
from dynamo_epd.transfer.protocol import PAYLOAD_BYTES

from .child import checksum, jump, pattern
from .conftest import LATER_S, PATIENCE_S, Child, Spawn, eventually

KB, MB = 1 << 10, 1 << 20
LARGE = 24 * MB
"""More than the sockets' buffers hold, so that a stopped peer stops the transfer."""

SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
WAYS = ["map", "write", "stream", pytest.param("read", marks=pytest.mark.slow)]


def large(way: str) -> int:
    """Bytes that take a while."""
    return PAYLOAD_BYTES if way == "stream" else LARGE


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
    """Deadlines that only a clock which is put forward will reach."""
    tls = "" if way == "map" else "tcp"
    return {"mode": way, "tls": tls, "timeout": LATER_S / 2, "offer_ttl": LATER_S / 2, "verify_transfers": True}


async def lost(sender: Child, receiver: Endpoint, fetching: asyncio.Task[str], number: int) -> str:
    """The outcome of a transfer whose sender is stopped, or killed: in the first case it is there by the deadline."""
    await sender.stopped()
    if number == signal.SIGSTOP:
        await eventually(lambda: receiver.fetches.busy or fetching.done())
        jump(receiver, LATER_S)
    return await asyncio.wait_for(fetching, PATIENCE_S)


LOST = {signal.SIGKILL: "peer_lost", signal.SIGSTOP: "timeout"}
