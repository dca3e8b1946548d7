# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.transfer.arena import Arena, Hold, Waiter
from dynamo_epd.transfer.config import GRANULE
from dynamo_epd.transfer.store import Store

from .fakes import Memory


def make(granules: int, capacity: int | None = None) -> tuple[Arena, Store]:
    store = Store(capacity)
    return Arena(Memory(granules), store.evict, store.evictable), store


def one(arena: Arena, nbytes: int) -> Hold:
    slots = arena.take([nbytes])
    assert slots is not None
    return slots[0]


def test_last_hold_frees_and_release_counts_once() -> None:
    arena, _ = make(4)
    slot = one(arena, 5000)
    again = slot.hold()
    slot.release()
    slot.release()
    assert arena.used_bytes == 2 * GRANULE
    with pytest.raises(ValueError, match="released"):
        slot.hold()
    with pytest.raises(ValueError, match="released"):
        slot.tensor((1,), "uint8")
    again.release()
    assert arena.used_bytes == 0


def test_every_use_of_memory_has_a_generation_of_its_own() -> None:
    arena, _ = make(2)
    seen = set()
    for _ in range(20):
        slot = one(arena, 1)
        allocation = slot.allocation
        assert int(arena.memory.table[allocation.index]) == allocation.generation
        assert allocation.generation not in seen
        seen.add(allocation.generation)
        slot.release()
        assert int(arena.memory.table[allocation.index]) == 0


def test_tensor_is_a_view_of_the_slot() -> None:
    arena, _ = make(8)
    one(arena, 1)
    slot = one(arena, 3 * 5 * 2)
    tensor = slot.tensor((3, 5), "bfloat16")
    tensor.copy_(torch.arange(15).view(3, 5))
    assert torch.equal(slot.tensor((15,), "bfloat16").float(), torch.arange(15.0))
    start = slot.allocation.index * GRANULE
    assert arena.memory.payload[start : start + 30].any()
    assert slot.tensor((30,), "float8_e4m3fn").dtype is torch.float8_e4m3fn
    with pytest.raises(ValueError, match="32 bytes, the slot has 30"):
        slot.tensor((16,), "bfloat16")
    with pytest.raises(ValueError, match="int64"):
        slot.tensor((1,), "int64")


def test_too_large_is_refused_at_once_and_full_is_not() -> None:
    arena, _ = make(4)
    with pytest.raises(TransferError, match="raise --transfer-arena-bytes") as caught:
        arena.take([5 * GRANULE])
    assert caught.value.reason == "too_large"
    with pytest.raises(TransferError) as caught:
        arena.take([3 * GRANULE, 2 * GRANULE])
    assert caught.value.reason == "too_large"
    one(arena, 2 * GRANULE)
    assert arena.take([3 * GRANULE]) is None
    assert arena.used_bytes == 2 * GRANULE


def test_several_slots_come_together_or_not_at_all() -> None:
    arena, _ = make(4)
    first = one(arena, GRANULE)
    assert arena.take([2 * GRANULE, 2 * GRANULE]) is None
    assert arena.used_bytes == GRANULE
    first.release()
    slots = arena.take([2 * GRANULE, 2 * GRANULE])
    assert slots is not None and len(slots) == 2


class Asked:
    """A waiter and what it was told."""

    def __init__(self, arena: Arena, sizes: list[int], deadline: float):
        self.results: list[list[Hold] | TransferError] = []
        self.waiter = Waiter(sizes, deadline, self.results.append)
        arena.wait(self.waiter)

    @property
    def slots(self) -> list[Hold]:
        assert len(self.results) == 1 and isinstance(self.results[0], list)
        return self.results[0]


def test_waiters_are_served_when_memory_is_freed_and_fail_at_their_deadline() -> None:
    arena, _ = make(4)
    held = one(arena, 3 * GRANULE)
    large, small = Asked(arena, [4 * GRANULE], 10.0), Asked(arena, [2 * GRANULE], 5.0)
    arena.poll(4.9)
    assert not large.results and not small.results
    arena.poll(5.0)
    assert isinstance(small.results[0], TransferError) and small.results[0].reason == "arena_full"
    assert "4096 of 16384 are free" in str(small.results[0])
    held.release()
    assert large.slots[0].nbytes == 4 * GRANULE
    assert arena.waiting == 0
    arena.poll(100.0)
    assert len(large.results) == 1


def test_two_that_need_two_slots_each_do_not_block_each_other() -> None:
    arena, _ = make(3)
    busy = one(arena, 2 * GRANULE)
    first = Asked(arena, [GRANULE, GRANULE], 10.0)
    second = Asked(arena, [GRANULE, GRANULE], 10.0)
    busy.release()
    assert not second.results
    for slot in first.slots:
        slot.release()
    assert len(second.slots) == 2


def test_a_waiter_that_fits_does_not_wait_for_one_that_does_not() -> None:
    arena, _ = make(4)
    holder = one(arena, 2 * GRANULE)
    other = one(arena, 2 * GRANULE)
    large = Asked(arena, [4 * GRANULE], 10.0)
    # The holder of the first slot asks for more; the large one is waiting for exactly that slot.
    more = Asked(arena, [GRANULE], 10.0)
    other.release()
    assert more.slots and not large.results
    more.slots[0].release()
    holder.release()
    assert large.slots


def test_a_waiter_may_leave() -> None:
    arena, _ = make(1)
    held = one(arena, 1)
    asked = Asked(arena, [1], 10.0)
    arena.forget(asked.waiter)
    held.release()
    assert not asked.results and arena.used_bytes == 0


def test_a_backward_clock_only_makes_waiters_wait_longer() -> None:
    arena, _ = make(1)
    one(arena, 1)
    asked = Asked(arena, [1], 10.0)
    arena.poll(-1000.0)
    assert not asked.results
    arena.poll(1e9)
    assert isinstance(asked.results[0], TransferError)


def test_what_is_kept_goes_least_recently_used_first_and_never_in_use() -> None:
    arena, store = make(4)
    for name in "abcd":
        slot = one(arena, 1)
        store.keep(name, slot)
        slot.release()
    in_use = store.find("b")
    touched = store.find("a")
    assert in_use is not None and touched is not None
    touched.release()
    one(arena, 1)
    assert store.find("c") is None
    one(arena, 1)
    assert store.find("d") is None
    one(arena, 1)
    assert store.find("a") is None
    assert arena.take([1]) is None
    assert store.find("b") is not None
    assert (store.evictions, len(store)) == (3, 1)


def test_nothing_is_evicted_for_what_cannot_fit_anyway() -> None:
    arena, store = make(4)
    kept = one(arena, 1)
    store.keep("kept", kept)
    kept.release()
    one(arena, 2 * GRANULE)
    assert arena.take([3 * GRANULE]) is None
    assert store.find("kept") is not None


def test_a_release_that_makes_kept_memory_evictable_serves_a_waiter() -> None:
    arena, store = make(1)
    slot = one(arena, 1)
    store.keep("x", slot)
    asked = Asked(arena, [1], 10.0)
    assert not asked.results
    slot.release()
    assert asked.slots and store.find("x") is None


def test_capacity_of_the_store() -> None:
    arena, store = make(8, capacity=2 * GRANULE)
    slots = {name: one(arena, 1) for name in "abc"}
    for name, slot in slots.items():
        store.keep(name, slot)
    # All of them are held by others too: the third finds no room, and nothing was taken from anybody.
    assert len(store) == 2 and store.nbytes == 2 * GRANULE
    for slot in slots.values():
        slot.release()
    again = one(arena, 1)
    store.keep("d", again)
    assert [name for name in "abcd" if store.find(name)] == ["b", "d"]


def test_keeping_again_replaces() -> None:
    arena, store = make(4)
    first, second = one(arena, 1), one(arena, 1)
    store.keep("x", first)
    store.keep("x", first)
    assert first.allocation.holds == 2
    store.keep("x", second)
    first.release()
    assert arena.used_bytes == GRANULE
    found = store.find("x")
    assert found is not None and found.allocation is second.allocation
    store.clear()
    second.release()
    found.release()
    assert arena.used_bytes == 0


def test_quarantined_bytes_are_counted_until_the_slot_is_free() -> None:
    arena, _ = make(4)
    slot = one(arena, GRANULE + 1)
    arena.quarantine(slot.allocation)
    arena.quarantine(slot.allocation)
    assert arena.quarantined_bytes == 2 * GRANULE
    slot.release()
    assert arena.quarantined_bytes == 0 and arena.used_bytes == 0
