# SPDX-License-Identifier: Apache-2.0
"""What shows only after a while: leaks, and what idling costs."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.contract.handoff import TensorRef
from dynamo_epd.transfer import carrier, endpoint

from .child import WIDTH, _resident, checksum
from .conftest import Child, Opened, Spawn, rest
from .faults import expected

pytestmark = pytest.mark.slow

TRANSFERS, WARM_UP = 10_000, 1_500


@pytest.mark.parametrize(("mode", "tls"), [("map", ""), ("read", ""), ("write", "tcp"), ("stream", "tcp")])
async def test_ten_thousand_transfers_leave_nothing(
    spawn: Spawn, opened: Opened, monkeypatch: pytest.MonkeyPatch, mode: str, tls: str
) -> None:
    """10% of them are cancelled at a random point, 5% are never read."""
    # Else a mapped copy is over before anybody can cancel it.
    monkeypatch.setattr(carrier, "INLINE_BYTES", 0)
    monkeypatch.setattr(endpoint, "INLINE_BYTES", 0)
    config = {"mode": mode, "tls": tls, "offer_ttl": 1.0, "timeout": 5.0, "arena_bytes": 32 << 20}
    receiver, sender = await opened(**config), await spawn(**config)
    chance = random.Random(4)
    sizes = [WIDTH * rows for rows in (4, 16, 64, 200)]
    sums = {(nbytes, seed): expected(nbytes, seed) for nbytes in sizes for seed in range(16)}
    counts = {"ok": 0, "cancelled": 0, "never": 0}

    async def one(ref: TensorRef, seed: int) -> None:
        fate = chance.random()
        if fate < 0.05:
            counts["never"] += 1
            return
        task = asyncio.create_task(receiver.fetch(ref))
        if fate < 0.15:
            for _ in range(chance.randrange(1, 6)):
                await asyncio.sleep(0)
            task.cancel()
        try:
            slot = await task
        except asyncio.CancelledError:
            counts["cancelled"] += 1
            return
        assert checksum(slot, ref.nbytes) == sums[ref.nbytes, seed]
        slot.release()
        counts["ok"] += 1

    async def run(count: int) -> None:
        done = 0
        while done < count:
            nbytes = chance.choice(sizes)
            refs = await sender.offers(nbytes, 0, count=16)
            await asyncio.gather(*(one(ref, seed) for seed, ref in enumerate(refs)))
            done += len(refs)
        await asyncio.gather(rest(receiver), sender.rest())
        gc.collect()

    await run(WARM_UP)
    before = _resident(), (await sender.call("cpu"))["rss"]
    await run(TRANSFERS)
    after = _resident(), (await sender.call("cpu"))["rss"]
    print(counts, before, after)
    assert min(counts.values()) > 300
    assert all(now < 1.02 * then for then, now in zip(before, after, strict=True))
    assert not receiver.fetches._granted and not receiver.fetches._checks and not receiver.fetches._whole
    assert not receiver.fetches._pulled
    assert not receiver.effects._moves and len(receiver.links._dialled) == 1
    if receiver.effects.carrier.plane is not None:
        agent = receiver.effects.carrier.plane._agent  # type: ignore[attr-defined]
        assert not any(agent.notifs.values()) and not agent._leaked_xfer_handles


@pytest.mark.parametrize(("mode", "tls"), [("auto", ""), ("auto", "tcp"), ("read", "")])
async def test_idling_costs_nothing(spawn: Spawn, mode: str, tls: str) -> None:
    """Less than 1% of a core over 30 s, after peers have met and bytes have moved both ways."""
    children = [await spawn(mode=mode, tls=tls, offer_ttl=1.0, timeout=1.0) for _ in range(2)]
    for sender, receiver in (children, children[::-1]):
        assert await receiver.fetch(await sender.offer(64 * WIDTH, 1)) == expected(64 * WIDTH, 1)
        await _never_read(sender)
    await asyncio.gather(*(child.rest() for child in children))
    await asyncio.sleep(2.0)
    before = [(await child.call("cpu"))["seconds"] for child in children]
    await asyncio.sleep(30.0)
    spent = [(await child.call("cpu"))["seconds"] - then for child, then in zip(children, before, strict=True)]
    print(spent)
    assert max(spent) < 0.3


async def _never_read(sender: Child) -> None:
    await sender.offer(64 * WIDTH, 2)
    try:
        await sender.fetch(TensorRef("127.0.0.1:1", "nobody", 1 << 24, 1, "d", (1, 1), "uint8"))
    except TransferError as error:
        assert error.reason == "peer_lost"
    else:
        raise AssertionError("a fetch from nobody succeeded")
