# SPDX-License-Identifier: Apache-2.0
"""Two endpoints in one process, over real sockets and real memory."""

from __future__ import annotations

import asyncio

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from dynamo_epd.contract.errors import ConfigError, TransferError
from dynamo_epd.contract.handoff import TensorRef
from dynamo_epd.transfer.metrics import register_transfer_metrics

from .child import WIDTH, make_offer, pattern
from .conftest import WAYS, Opened, pair, rest

KB = 1 << 10
BOTH = [("map", ""), ("stream", "tcp")]
"""Without a data plane, and with bytes that come later."""


async def test_what_is_kept_is_not_moved_again(opened: Opened) -> None:
    sender, receiver = await pair(opened)
    first = await receiver.fetch(await make_offer(sender, 64 * KB, 1, digest="d"))
    receiver.keep("d", first)
    moved = receiver.effects.moved_bytes
    # Other bytes under the same digest: were they moved, it would show.
    again = await receiver.fetch(await make_offer(sender, 64 * KB, 2, digest="d"))
    assert receiver.effects.moved_bytes == moved
    assert torch.equal(again.tensor((64, WIDTH), "uint8"), pattern(64 * KB, 1))
    first.release()
    again.release()
    # The offer that was not needed is over as well.
    await rest(sender)
    found = receiver.find("d")
    assert found is not None
    found.release()
    receiver.store.clear()
    await rest(receiver)


async def test_a_digest_with_another_shape_or_dtype_is_refused(opened: Opened) -> None:
    sender, receiver = await pair(opened)
    slot = await receiver.fetch(await make_offer(sender, 64 * KB, 1, digest="d"))
    receiver.keep("d", slot)
    slot.release()
    for shape, dtype in (((32, 2 * WIDTH), "uint8"), ((32, WIDTH), "float16"), ((32, WIDTH), "uint8")):
        source = await sender.allocate(64 * KB)
        ref = sender.offer(source, digest="d", shape=shape, dtype=dtype)
        source.release()
        with pytest.raises(TransferError, match="digest d is known here as uint8") as caught:
            await receiver.fetch(ref)
        assert caught.value.reason == "protocol"
    await rest(sender)
    receiver.store.clear()
    await rest(receiver)


@pytest.mark.parametrize(("mode", "tls"), BOTH)
async def test_those_who_want_the_same_share_one_transfer(opened: Opened, mode: str, tls: str) -> None:
    sender, receiver = await pair(opened, mode, tls=tls)
    refs = [await make_offer(sender, 4 << 20, 1, digest="d") for _ in range(6)]
    slots = await asyncio.gather(*(receiver.fetch(ref) for ref in refs))
    assert receiver.effects.moved_bytes == 4 << 20
    assert len({slot.allocation.index for slot in slots}) == 1
    for slot in slots[1:]:
        slot.release()
    assert torch.equal(slots[0].tensor((4 * KB, WIDTH), "uint8"), pattern(4 << 20, 1))
    slots[0].release()
    await rest(sender)
    await rest(receiver)


@pytest.mark.parametrize(("mode", "tls"), BOTH)
async def test_a_shared_transfer_that_fails_leaves_the_others_their_own_offers(
    opened: Opened, mode: str, tls: str
) -> None:
    sender, receiver = await pair(opened, mode, tls=tls)
    refs = [await make_offer(sender, 4 << 20, 1, digest="d") for _ in range(3)]
    sender.withdraw(refs[0])
    results = await asyncio.gather(*(receiver.fetch(ref) for ref in refs), return_exceptions=True)
    assert isinstance(results[0], TransferError) and results[0].reason == "expired"
    for slot in results[1:]:
        assert not isinstance(slot, BaseException)
        assert torch.equal(slot.tensor((4 * KB, WIDTH), "uint8"), pattern(4 << 20, 1))
        slot.release()
    await rest(sender)
    await rest(receiver)


@pytest.mark.parametrize(("mode", "tls"), BOTH)
async def test_a_caller_that_leaves_does_not_take_the_transfer_from_the_others(
    opened: Opened, mode: str, tls: str
) -> None:
    sender, receiver = await pair(opened, mode, tls=tls)
    refs = [await make_offer(sender, 8 << 20, 1, digest="d") for _ in range(2)]
    leaving, staying = (asyncio.create_task(receiver.fetch(ref)) for ref in refs)
    await asyncio.sleep(0)
    leaving.cancel()
    slot = await staying
    assert torch.equal(slot.tensor((8 * KB, WIDTH), "uint8"), pattern(8 << 20, 1))
    slot.release()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await rest(sender)
    await rest(receiver)


@pytest.mark.parametrize(("mode", "tls"), BOTH)
async def test_cancelling_at_any_moment_leaves_nothing_behind(opened: Opened, mode: str, tls: str) -> None:
    sender, receiver = await pair(opened, mode, tls=tls)
    for turns in range(40):
        task = asyncio.create_task(receiver.fetch(await make_offer(sender, 3 << 20, turns)))
        for _ in range(turns % 20 + 1):
            await asyncio.sleep(0 if turns < 20 else 0.0005)
        task.cancel()
        for result in await asyncio.gather(task, return_exceptions=True):
            if not isinstance(result, BaseException):
                result.release()
    await rest(sender)
    await rest(receiver)


@pytest.mark.parametrize(("mode", "tls"), BOTH)
async def test_several_tensors_arrive_together_or_none(opened: Opened, mode: str, tls: str) -> None:
    sender, receiver = await pair(opened, mode, tls=tls, arena_bytes=1 << 20, offer_ttl=1000.0)
    refs = [await make_offer(sender, 64 * KB, i) for i in range(3)]
    slots = await receiver.fetch_all([*refs, refs[0]])
    for i, slot in enumerate(slots):
        assert torch.equal(slot.tensor((64, WIDTH), "uint8"), pattern(64 * KB, i % 3))
        slot.release()
    assert await receiver.fetch_all([]) == []
    refs = [await make_offer(sender, 64 * KB, i) for i in range(3)]
    sender.withdraw(refs[1])
    with pytest.raises(TransferError) as caught:
        await receiver.fetch_all(refs)
    assert caught.value.reason == "expired"
    await rest(sender)
    await rest(receiver)


async def test_requests_that_need_two_slots_each_get_them_one_after_the_other(opened: Opened) -> None:
    sender = await opened(mode="map")
    receiver = await opened(mode="map", arena_bytes=192 * KB)

    async def request(number: int) -> None:
        refs = [await make_offer(sender, 64 * KB, 2 * number + i) for i in range(2)]
        slots = await receiver.fetch_all(refs)
        await asyncio.sleep(0.001)
        for i, slot in enumerate(slots):
            assert torch.equal(slot.tensor((64, WIDTH), "uint8"), pattern(64 * KB, 2 * number + i))
            slot.release()

    await asyncio.gather(*(request(number) for number in range(12)))
    await rest(sender)
    await rest(receiver)


@pytest.mark.parametrize(("mode", "tls"), BOTH)
async def test_a_full_arena_is_waited_for_and_then_an_error(opened: Opened, mode: str, tls: str) -> None:
    sender = await opened(mode=mode, tls=tls, offer_ttl=1000.0)
    receiver = await opened(mode=mode, tls=tls, arena_bytes=64 * KB)
    (await receiver.fetch(await make_offer(sender, KB, 0))).release()
    held = await receiver.allocate(64 * KB)
    with pytest.raises(TransferError, match="0 of 65536 are free") as caught:
        await receiver.fetch(await make_offer(sender, KB, 1), timeout=0.1)
    assert caught.value.reason == "arena_full"
    await rest(sender)
    with pytest.raises(TransferError) as caught:
        await receiver.allocate(1, timeout=0.1)
    assert caught.value.reason == "arena_full"
    waiting = asyncio.create_task(receiver.fetch(await make_offer(sender, KB, 2)))
    await asyncio.sleep(0.05)
    held.release()
    (await waiting).release()
    for too_large in (receiver.allocate(65 * KB), receiver.fetch(await make_offer(sender, 65 * KB, 3))):
        with pytest.raises(TransferError) as caught:
            await too_large
        assert caught.value.reason == "too_large"
    assert receiver.failures == {"arena_full": 2, "too_large": 2}
    await rest(receiver)
    await rest(sender)


async def test_a_cancelled_wait_for_memory_takes_none(opened: Opened) -> None:
    transfer = await opened(mode="map", arena_bytes=64 * KB)
    held = await transfer.allocate(64 * KB)
    waiting = asyncio.create_task(transfer.allocate(1))
    await asyncio.sleep(0)
    waiting.cancel()
    held.release()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await rest(transfer)


@pytest.mark.parametrize(("mode", "tls"), WAYS)
async def test_offers_expire_by_themselves(opened: Opened, mode: str, tls: str) -> None:
    sender, receiver = await pair(opened, mode, tls=tls, offer_ttl=0.05)
    ref = await make_offer(sender, KB, 1)
    await rest(sender)
    with pytest.raises(TransferError) as caught:
        await receiver.fetch(ref, timeout=60.0)
    # The bytes are still where they were, and must not be taken all the same.
    assert caught.value.reason in (("generation", "expired") if mode == "read" else ("expired",))
    await rest(receiver)


async def test_declined_and_withdrawn_offers_are_over(opened: Opened) -> None:
    sender, receiver = await pair(opened)
    (await receiver.fetch(await make_offer(sender, KB, 1))).release()
    receiver.decline(await make_offer(sender, KB, 2))
    ref = await make_offer(sender, KB, 3)
    sender.withdraw(ref)
    sender.withdraw(ref)
    receiver.withdraw(ref)
    await rest(sender)


async def test_memory_that_changes_under_a_read_is_thrown_away(opened: Opened) -> None:
    sender, receiver = await pair(opened, arena_bytes=4 << 20)
    (await receiver.fetch(await make_offer(sender, KB, 0))).release()
    outcomes = set()
    for seed in range(12):
        ref = await make_offer(sender, 3 << 20, seed)
        task = asyncio.create_task(receiver.fetch(ref))
        for _ in range(seed % 4):
            await asyncio.sleep(0)
        # The slot is used for other bytes while it is being read.
        sender.withdraw(ref)
        other = await sender.allocate(4 << 20)
        other.tensor((4 << 20,), "uint8").fill_(255)
        other.release()
        try:
            slot = await task
        except TransferError as error:
            outcomes.add(error.reason)
        else:
            outcomes.add("ok")
            assert torch.equal(slot.tensor(ref.shape, "uint8"), pattern(3 << 20, seed))
            slot.release()
    assert outcomes <= {"ok", "expired", "generation"} and outcomes - {"ok"}
    await rest(receiver)


async def test_an_offer_of_this_process_needs_no_transfer(opened: Opened) -> None:
    transfer = await opened(mode="map")
    ref = await make_offer(transfer, 64 * KB, 5)
    slot = await transfer.fetch(ref)
    assert torch.equal(slot.tensor((64, WIDTH), "uint8"), pattern(64 * KB, 5)) and not transfer.effects.moved_bytes
    slot.release()
    with pytest.raises(TransferError) as caught:
        await transfer.fetch(ref)
    assert caught.value.reason == "expired"
    ref = await make_offer(transfer, 64 * KB, 6)
    slot = await transfer.fetch(ref, first=60)
    assert torch.equal(slot.tensor((4, WIDTH), "uint8"), pattern(64 * KB, 6)[60:])
    slot.release()
    await rest(transfer)


@pytest.mark.parametrize(("mode", "tls"), BOTH)
async def test_references_that_lie(opened: Opened, mode: str, tls: str) -> None:
    sender, receiver = await pair(opened, mode, tls=tls, arena_bytes=1 << 20)
    good = await make_offer(sender, 64 * KB, 1)

    async def reason(**change: object) -> str:
        fields = {name: getattr(good, name) for name in TensorRef.__struct_fields__}
        with pytest.raises(TransferError) as caught:
            await receiver.fetch(TensorRef(**{**fields, **change}), timeout=5.0)
        return caught.value.reason

    # Who reads the memory finds another generation there; who asks for it is told.
    assert await reason(generation=good.generation + 1) == ("expired" if mode == "map" else "generation")
    assert await reason(offer=good.offer + 1) == "expired"
    assert await reason(offer=good.offer + (1 << 20)) == "protocol"
    assert await reason(offer=1 << 70) == "protocol"
    assert await reason(generation=1 << 63) == "protocol"
    assert await reason(agent="somebody else") == "peer_lost"
    assert await reason(shape=(1 << 40, WIDTH)) == "too_large"
    assert await reason(endpoint="127.0.0.1:1") == "peer_lost"
    assert await reason(endpoint="nowhere") == "protocol"
    assert await reason(endpoint="127.0.0.1:99999999") in ("protocol", "peer_lost")
    # An offer that was asked for in vain is over; another one is as good as ever.
    slot = await receiver.fetch(await make_offer(sender, 64 * KB, 1))
    assert torch.equal(slot.tensor((64, WIDTH), "uint8"), pattern(64 * KB, 1))
    slot.release()
    await rest(sender)
    await rest(receiver)


async def test_an_offer_must_fit_its_slot(opened: Opened) -> None:
    transfer = await opened(mode="map")
    slot = await transfer.allocate(KB)
    with pytest.raises(ValueError, match="1025 bytes, the slot has 1024"):
        transfer.offer(slot, digest="d", shape=(KB + 1,), dtype="uint8")
    with pytest.raises(ValueError, match="dtype"):
        transfer.offer(slot, digest="d", shape=(1,), dtype="int64")
    slot.release()
    await rest(transfer)


async def test_nothing_runs_when_nothing_is_in_flight(opened: Opened) -> None:
    sender, receiver = await pair(opened)
    (await receiver.fetch(await make_offer(sender, KB, 1))).release()
    await rest(sender)
    while sender._timer is not None or receiver._timer is not None:
        await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_metrics(opened: Opened) -> None:
    sender, receiver = await pair(opened, arena_bytes=1 << 20)
    registry = CollectorRegistry()
    register_transfer_metrics(registry, receiver, {"model": "toy"})
    slot = await receiver.fetch(await make_offer(sender, 64 * KB, 1, digest="d"))
    receiver.keep("d", slot)
    (await receiver.fetch(await make_offer(sender, 64 * KB, 1, digest="d"))).release()
    slot.release()
    held = await receiver.allocate(4096)
    open_ = await make_offer(receiver, 4096, 1)
    with pytest.raises(TransferError):
        await receiver.allocate(2 << 20)
    text = generate_latest(registry).decode()
    prefix = "dynamo_component_"
    for line in (
        'mm_transfer_seconds_count{model="toy"} 1.0',
        'mm_transfer_bytes_total{model="toy"} 65536.0',
        'mm_transfer_failures_total{model="toy",reason="too_large"} 1.0',
        'mm_arena_bytes{model="toy",state="free"} 974848.0',
        'mm_arena_bytes{model="toy",state="used"} 8192.0',
        'mm_arena_bytes{model="toy",state="kept"} 65536.0',
        'mm_arena_bytes{model="toy",state="quarantined"} 0.0',
        'mm_offers{model="toy",state="open"} 1.0',
        'mm_offers{model="toy",state="serving"} 0.0',
        'embedding_cache_hits_total{model="toy"} 1.0',
        'embedding_cache_misses_total{model="toy"} 1.0',
        'embedding_cache_evictions_total{model="toy"} 0.0',
        'embedding_cache_current_bytes{model="toy"} 65536.0',
        'embedding_cache_utilization{model="toy"} 0.0625',
        'embedding_cache_entries{model="toy"} 1.0',
    ):
        assert f"{prefix}{line}\n" in text, text
    with pytest.raises(ValueError):
        register_transfer_metrics(registry, sender, {"model": "toy"})
    held.release()
    receiver.withdraw(open_)


async def test_an_address_that_cannot_be_listened_on_is_a_configuration_error(opened: Opened) -> None:
    first = await opened(mode="map")
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        await opened(mode="map", port=port)
