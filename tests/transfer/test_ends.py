# SPDX-License-Identifier: Apache-2.0
"""Endpoints that are closed, links that end, and what is said about it."""

from __future__ import annotations

import asyncio
import gc
import os

import pytest

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.contract.handoff import TensorRef
from dynamo_epd.transfer import TransferConfig, nixl_plane, open_transfer
from dynamo_epd.transfer.offers import Write

from .child import PATIENCE_S, blocked, jump, make_offer
from .conftest import Opened, eventually, pair, rest

KB = 1 << 10


async def test_close_leaves_nothing(opened: Opened) -> None:
    def arenas() -> list[str]:
        gc.collect()
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return [link for link in links if os.path.lexists(link) and "dynamo-epd-arena" in os.readlink(link)]

    known, before = len(arenas()), set(os.listdir("/proc/self/fd"))
    for _ in range(2):
        sender, receiver = [
            await open_transfer(TransferConfig(host="127.0.0.1", mode="map", arena_bytes=1 << 20)) for _ in range(2)
        ]
        fetched = await receiver.fetch(await make_offer(sender, KB, 1))
        waiting = asyncio.create_task(receiver.allocate(1 << 20))
        await asyncio.sleep(0)
        await sender.close()
        await receiver.close()
        await sender.close()
        with pytest.raises(TransferError) as caught:
            await waiting
        assert caught.value.reason == "cancelled"
        fetched.release()
        del sender, receiver, fetched, waiting, caught
    gc.collect()
    await asyncio.sleep(0.05)
    assert len(arenas()) == known
    assert len(set(os.listdir("/proc/self/fd"))) <= len(before) + 1


async def test_a_closed_endpoint_says_so(opened: Opened) -> None:
    sender, receiver = await pair(opened)
    (await receiver.fetch(await make_offer(sender, KB, 0))).release()
    refs = [await make_offer(sender, KB, 1), TensorRef("127.0.0.1:1", "nobody", 1 << 24, 1, "d", (1, 1), "uint8")]
    held = await receiver.allocate(receiver.region.size - KB)
    await receiver.close()
    for call in (receiver.fetch(refs[0]), receiver.fetch(refs[1]), receiver.fetch_all(refs), receiver.allocate(KB)):
        with pytest.raises(TransferError, match="the transfer layer was closed") as caught:
            await asyncio.wait_for(call, PATIENCE_S)
        assert caught.value.reason == "cancelled"
    held.release()


async def test_who_joined_a_transfer_that_closing_ends_is_told_so(opened: Opened) -> None:
    sender, receiver = await pair(opened, "stream", tls="tcp")
    (await receiver.fetch(await make_offer(sender, KB, 0))).release()
    refs = [await make_offer(sender, KB, 1, digest="d") for _ in range(2)]
    for peer in receiver.links._dialled.values():
        peer.link.close()
    fetching = [asyncio.create_task(receiver.fetch(ref)) for ref in refs]
    await asyncio.sleep(0)
    await receiver.close()
    for outcome in await asyncio.wait_for(asyncio.gather(*fetching, return_exceptions=True), PATIENCE_S):
        assert isinstance(outcome, TransferError) and outcome.reason in ("cancelled", "peer_lost")
    assert not receiver.arena.used_bytes


async def test_whoever_tries_again_at_once_gets_a_new_link(opened: Opened) -> None:
    sender, receiver = await pair(opened, "write", tls="tcp")
    (await receiver.fetch(await make_offer(sender, KB, 0))).release()
    write = sender.effects.write
    sender.effects.write = lambda write: sender._loop.call_soon(sender.effects.written, write, "broken")  # type: ignore[assignment]
    with pytest.raises(TransferError, match="broken"):
        await receiver.fetch(await make_offer(sender, KB, 1))
    sender.effects.write = write  # type: ignore[method-assign]
    (await receiver.fetch(await make_offer(sender, KB, 2))).release()
    for peer in receiver.links._dialled.values():
        peer.link.close()
    (await receiver.fetch(await make_offer(sender, KB, 3))).release()
    jump(receiver, 1000.0)
    await rest(sender)
    await rest(receiver)


async def test_a_peer_that_ends_says_its_last_words_about_everything_that_it_may_still_write(opened: Opened) -> None:
    """A link that was given up for one write that failed stays until those about the others have come."""
    sender, receiver = await pair(opened, "write", tls="tcp", timeout=5.0)
    (await receiver.fetch(await make_offer(sender, KB, 0))).release()
    writes: list[Write] = []
    sender.effects.write = writes.append  # type: ignore[method-assign]
    refs = [await make_offer(sender, KB, seed) for seed in (1, 2)]
    fetching = [asyncio.create_task(receiver.fetch(ref)) for ref in refs]
    await eventually(lambda: len(writes) == 2)
    sender.effects.written(writes[0], "broken")
    with pytest.raises(TransferError, match="broken"):
        await fetching[0]
    again = asyncio.create_task(receiver.fetch(await make_offer(sender, KB, 3)))  # waits for the next link
    await asyncio.sleep(0.05)
    assert receiver.fetches._granted and len(writes) == 2
    sender.effects.written(writes[1], "broken as well")
    with pytest.raises(TransferError, match="broken as well"):
        await fetching[1]
    await eventually(lambda: len(writes) == 3)
    sender.effects.written(writes[2], "cancelled")
    with pytest.raises(TransferError, match="cancelled"):
        await again
    jump(receiver, 1000.0)
    await rest(sender)
    await rest(receiver)


async def test_close_does_not_wait_for_a_data_plane_that_hangs(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_plane, "_CLOSE_S", 0.1)
    sender, receiver = await pair(opened, "write")
    (await receiver.fetch(await make_offer(sender, KB, 1))).release()
    with blocked(sender):
        await asyncio.wait_for(sender.close(), PATIENCE_S)
        with pytest.raises(TransferError) as caught:
            await receiver.fetch(TensorRef(sender.address, sender.agent, 1 << 24, 1, "d", (1, 1), "uint8"))
        assert caught.value.reason == "peer_lost"
    await rest(receiver)
