# SPDX-License-Identifier: Apache-2.0
"""An arena: one memory region, handed out in slots that are held, counted, quarantined and given back.

Each use of a slot has a generation that no other use of any slot has. It stands in the region's table from the moment
the slot is taken to the moment it is free again, so that whoever read the slot remotely can look again afterwards:
the same generation means that the bytes were this slot's all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

from ..contract.errors import TransferError
from ..contract.handoff import DTYPE_BYTES
from .config import GRANULE
from .space import Block, FreeSpace

if TYPE_CHECKING:
    import numpy as np
    import torch


class Memory(Protocol):
    """What an arena needs of a ``memory.Region``."""

    size: int
    payload: torch.Tensor
    table: np.ndarray


@dataclass(frozen=True)
class Content:
    """What a slot holds: the shape and dtype under which it was written or received."""

    shape: tuple[int, ...]
    dtype: str


class Allocation:
    """One slot in use; freed when its last hold is released."""

    __slots__ = ("arena", "block", "content", "generation", "holds", "nbytes", "quarantined", "read_elsewhere")

    def __init__(self, arena: Arena, block: Block, nbytes: int, generation: int):
        self.arena = arena
        self.block = block
        self.nbytes = nbytes
        self.generation = generation
        self.holds = 0
        self.content: Content | None = None
        self.quarantined = False
        self.read_elsewhere = False  # by another core

    @property
    def index(self) -> int:
        """Granule at which the slot starts."""
        return self.block.start

    @property
    def room(self) -> int:
        """Bytes taken from the arena, >= ``nbytes``."""
        return self.block.size * GRANULE


class Hold:
    """A counted hold on an ``Allocation``; the ``Slot`` of ``transfer.base``."""

    __slots__ = ("_held", "allocation", "nbytes")

    def __init__(self, allocation: Allocation):
        self.allocation = allocation
        self.nbytes = allocation.nbytes
        self._held = True
        allocation.holds += 1

    def tensor(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """A view of the first bytes as a contiguous tensor, valid until ``release``.

        Raises:
            ValueError: released already, a dtype that may not be transferred, or more bytes than the slot has.
        """
        import torch

        allocation, shape = self.allocation, tuple(shape)
        if not self._held:
            raise ValueError("this hold on the slot was released")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        nbytes = prod(shape) * DTYPE_BYTES[dtype]
        if nbytes > self.nbytes:
            raise ValueError(f"{dtype} tensor of shape {shape} has {nbytes} bytes, the slot has {self.nbytes}")
        if allocation.content is None:
            allocation.content = Content(shape, dtype)
        start = allocation.index * GRANULE
        return allocation.arena.memory.payload[start : start + nbytes].view(getattr(torch, dtype)).view(shape)

    def hold(self) -> Hold:
        if not self._held:
            raise ValueError("this hold on the slot was released")
        return Hold(self.allocation)

    def release(self) -> None:
        if self._held:
            self._held = False
            self.allocation.arena.let_go(self.allocation)


class Waiter:
    """A request for memory that waits: ``sizes`` all at once or not at all, until ``deadline``."""

    __slots__ = ("deadline", "done", "sizes")

    def __init__(self, sizes: Sequence[int], deadline: float, done: Callable[[list[Hold] | TransferError], None]):
        self.sizes = sizes
        self.deadline = deadline
        self.done = done


class Arena:
    """Hands out the slots of one memory region.

    Args:
        memory: the region.
        evict: called when memory is short; frees one slot that nobody uses and returns True, or returns False.
        evictable: bytes that ``evict`` could free altogether.
        first_generation: generation of the first slot, counted up from there.
        cool: granules that are used again last; see ``FreeSpace``.
    """

    def __init__(
        self,
        memory: Memory,
        evict: Callable[[], bool] = lambda: False,
        evictable: Callable[[], int] = lambda: 0,
        first_generation: int = 1,
        cool: int = 0,
    ):
        self.memory = memory
        self.quarantined_bytes = 0
        self._space = FreeSpace(memory.size // GRANULE, cool)
        self._evict = evict
        self._evictable = evictable
        self._generation = first_generation
        self._waiters: dict[Waiter, None] = {}
        self._serving = False  # evicting for one waiter frees memory, which must not serve the next inside it

    @property
    def free_bytes(self) -> int:
        return self._space.free * GRANULE

    @property
    def used_bytes(self) -> int:
        return self.memory.size - self.free_bytes

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def take(self, sizes: Sequence[int]) -> list[Hold] | None:
        """One slot per size (in bytes, >= 1), evicting what nobody uses; None when they do not all fit now.

        Raises:
            TransferError: ``too_large``: they would not fit in the empty arena either.
        """
        granules = [-(-size // GRANULE) for size in sizes]
        total = sum(granules)
        if total > self._space.total:
            raise TransferError(
                "too_large",
                f"{sum(sizes)} bytes do not fit in the transfer arena of {self.memory.size} bytes: raise "
                "--transfer-arena-bytes",
            )
        if min(granules) <= 0:
            raise ValueError(f"slot sizes {list(sizes)} must be positive")
        if total > self._space.free and total * GRANULE > self.free_bytes + self._evictable():
            return None
        blocks: list[Block] = []
        for count in granules:
            block = self._space.take(count)
            while block is None and self._evict():
                block = self._space.take(count)
            if block is None:
                for taken in blocks:
                    self._space.give(taken, read_elsewhere=False)
                return None
            blocks.append(block)
        return [self._start(block, size) for block, size in zip(blocks, sizes, strict=True)]

    def wait(self, waiter: Waiter) -> None:
        """Give ``waiter`` its memory as soon as it is free, or an ``arena_full`` error at its deadline.

        Waiters are served in order, but one that fits does not wait for one that does not: it may hold what the
        other is waiting for.
        """
        self._waiters[waiter] = None

    def forget(self, waiter: Waiter) -> None:
        """``waiter`` is not interested any more."""
        self._waiters.pop(waiter, None)

    def poll(self, now: float) -> None:
        """Fail the waiters whose deadline has passed."""
        for waiter in [w for w in self._waiters if w.deadline <= now]:
            del self._waiters[waiter]
            waiter.done(self.full(sum(waiter.sizes)))

    def full(self, nbytes: int) -> TransferError:
        """What a wait for ``nbytes`` ends with."""
        return TransferError(
            "arena_full",
            f"no {nbytes} bytes became free in the transfer arena in time ({self.free_bytes} of {self.memory.size} are "
            f"free, {self.quarantined_bytes} in quarantine)",
        )

    def close(self) -> None:
        """Fail all waiters."""
        for waiter in list(self._waiters):
            del self._waiters[waiter]
            waiter.done(TransferError("cancelled", "the transfer layer was closed"))

    def serve(self) -> None:
        """Serve the waiters that fit by now."""
        if self._serving:
            return
        self._serving = True
        try:
            for waiter in list(self._waiters):
                if waiter in self._waiters and (slots := self.take(waiter.sizes)) is not None:
                    del self._waiters[waiter]
                    waiter.done(slots)
        finally:
            self._serving = False

    def quarantine(self, allocation: Allocation) -> None:
        """Count the slot as one that a peer may still write to; its last hold ends that."""
        if not allocation.quarantined:
            allocation.quarantined = True
            self.quarantined_bytes += allocation.room

    def let_go(self, allocation: Allocation) -> None:
        """One hold less."""
        allocation.holds -= 1
        if allocation.holds:
            if self._waiters and allocation.holds == 1:
                self.serve()
            return
        # Before the memory can be taken again: whoever reads it now must find out.
        self.memory.table[allocation.index] = 0
        if allocation.quarantined:
            self.quarantined_bytes -= allocation.room
        self._space.give(allocation.block, read_elsewhere=allocation.read_elsewhere)
        if self._waiters:
            self.serve()

    def _start(self, block: Block, nbytes: int) -> Hold:
        generation = self._generation
        self._generation += 1
        self.memory.table[block.start] = generation
        return Hold(Allocation(self, block, nbytes, generation))
