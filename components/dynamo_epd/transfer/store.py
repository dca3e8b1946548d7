# SPDX-License-Identifier: Apache-2.0
"""Contents that are kept by digest for as long as their memory is not needed for something else."""

from __future__ import annotations

from collections import OrderedDict

from .arena import Hold


class Store:
    """Least recently used goes first, and nothing that anybody but the store holds.

    Args:
        capacity: most bytes to keep, held by others or not; None for no limit but the arena's.
    """

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.nbytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._kept: OrderedDict[str, Hold] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    def keep(self, digest: str, slot: Hold) -> None:
        """Keep the content of ``slot`` under ``digest``; what was kept there is dropped."""
        old = self._kept.get(digest)
        if old is not None:
            if old.allocation is slot.allocation:
                self._kept.move_to_end(digest)
                return
            self._drop(digest)
        room = slot.allocation.room
        if self.capacity is not None:
            while self.nbytes + room > self.capacity and self.evict():
                pass
            if self.nbytes + room > self.capacity:
                return
        self._kept[digest] = slot.hold()
        self.nbytes += room

    def find(self, digest: str) -> Hold | None:
        """A new hold on what is kept under ``digest``, which becomes the most recently used; counts a hit or a miss."""
        kept = self._kept.get(digest)
        if kept is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(digest)
        return kept.hold()

    def evict(self) -> bool:
        """Drop the least recently used content that nobody holds; False when there is none."""
        for digest, kept in self._kept.items():
            if kept.allocation.holds == 1:
                self._drop(digest)
                self.evictions += 1
                return True
        return False

    def evictable(self) -> int:
        """Bytes that nobody but the store holds."""
        return sum(kept.allocation.room for kept in self._kept.values() if kept.allocation.holds == 1)

    def clear(self) -> None:
        """Drop everything."""
        for digest in list(self._kept):
            self._drop(digest)

    def _drop(self, digest: str) -> None:
        kept = self._kept.pop(digest)
        self.nbytes -= kept.allocation.room
        kept.release()
