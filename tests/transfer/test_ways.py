# SPDX-License-Identifier: Apache-2.0
"""How bytes come from one endpoint to another, and which way is taken."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.transfer import peers
from dynamo_epd.transfer.offers import slot_index

from .child import WIDTH, make_offer, pattern
from .conftest import WAYS, Opened, pair, rest

KB = 1 << 10


@pytest.mark.parametrize(("mode", "tls"), WAYS)
async def test_bytes_arrive_whole(opened: Opened, mode: str, tls: str) -> None:
    sender, receiver = await pair(opened, mode, tls=tls, verify_transfers=True)
    for seed, nbytes in enumerate((WIDTH, 100 * KB, 3 << 20, 9 << 20)):
        ref = await make_offer(sender, nbytes, seed)
        slot = await receiver.fetch(ref)
        assert torch.equal(slot.tensor(ref.shape, ref.dtype), pattern(nbytes, seed))
        slot.release()
    assert list(receiver.links.ways().values()) == [mode]
    await rest(sender)
    await rest(receiver)


@pytest.mark.parametrize(("mode", "tls"), WAYS)
async def test_only_the_rows_that_are_missing_move(opened: Opened, mode: str, tls: str) -> None:
    sender, receiver = await pair(opened, mode, tls=tls)
    nbytes = 64 * WIDTH
    for first in (1, 17, 63):
        ref = await make_offer(sender, nbytes, first)
        slot = await receiver.fetch(ref, first=first)
        assert slot.nbytes == nbytes - first * WIDTH
        assert torch.equal(slot.tensor((64 - first, WIDTH), "uint8"), pattern(nbytes, first)[first:])
        slot.release()
    for first in (64, -1):
        ref = await make_offer(sender, nbytes, 1)
        with pytest.raises(TransferError, match=f"row {first} of TensorRef") as caught:
            await receiver.fetch(ref, first=first)
        receiver.decline(ref)
        assert caught.value.reason == "protocol"
    await rest(sender)
    await rest(receiver)


@pytest.mark.parametrize(("tls", "mapped", "way"), [("", True, "map"), ("", False, "read"), ("tcp", True, "stream")])
async def test_the_way_is_chosen_by_what_the_fabric_does(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tls: str, mapped: bool, way: str
) -> None:
    """UCX reads another process of the machine by itself (``cma``), and needs both over TCP."""
    if not mapped:
        monkeypatch.setattr(peers, "shared_memory_allowed", lambda: False)
    sender, receiver = await pair(opened, "auto", tls=tls)
    (await receiver.fetch(await make_offer(sender, KB, 1))).release()
    assert list(receiver.links.ways().values()) == [way]


async def test_device_memory_is_not_sent_over_the_link(opened: Opened) -> None:
    sender, receiver = await pair(opened, "auto", tls="tcp")
    sender.links._hello = replace(sender.links._hello, kind="cuda")
    (await receiver.fetch(await make_offer(sender, KB, 1))).release()
    assert list(receiver.links.ways().values()) == ["write"]
    await rest(sender)
    await rest(receiver)


async def test_a_fabric_that_is_more_than_tcp_keeps_its_writes(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "tcp_alone", lambda: False)
    sender, receiver = await pair(opened, "auto", tls="tcp")
    (await receiver.fetch(await make_offer(sender, KB, 1))).release()
    assert list(receiver.links.ways().values()) == ["write"]


async def test_a_peer_that_helps_others_meanwhile_is_not_taken_for_a_fabric_that_needs_no_help(opened: Opened) -> None:
    sender, receiver = await pair(opened, "auto", tls="tcp")
    sender.effects.expect(64 << 20, True)
    (await receiver.fetch(await make_offer(sender, KB, 1))).release()
    sender.effects.expect(64 << 20, False)
    assert list(receiver.links.ways().values()) == ["stream"]


@pytest.mark.parametrize("mode", ["map", "read", "write", "stream"])
async def test_memory_that_only_this_core_read_is_offered_again_first(opened: Opened, mode: str) -> None:
    sender, receiver = await pair(opened, mode)
    ref = await make_offer(sender, 64 * KB, 1)
    (await receiver.fetch(ref)).release()
    await rest(sender)
    again = await make_offer(sender, 64 * KB, 2)
    assert (slot_index(again.offer) == slot_index(ref.offer)) == (mode in ("write", "stream"))
    receiver.decline(again)
