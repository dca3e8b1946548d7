# SPDX-License-Identifier: Apache-2.0
"""Which part of an arena is free: two-level segregated fit.

Free blocks are listed by size class (a power of two, cut in 16), so that taking and giving back cost a constant
number of steps in any order; neighbours merge at once, and nothing is rounded up to a class.
"""

from __future__ import annotations

from collections import deque

_SUB_BITS = 4
_SUBS = 1 << _SUB_BITS


class Block:
    """``[start, start + size)``; ``before`` and ``after`` are its neighbours in memory."""

    __slots__ = ("after", "before", "free", "size", "start")

    def __init__(self, start: int, size: int, before: Block | None = None, after: Block | None = None):
        self.start = start
        self.size = size
        self.free = True
        self.before = before
        self.after = after


class FreeSpace:
    """Hands out blocks of ``[0, total)``. Counts units, knows nothing of memory.

    Args:
        cool: units given back last, and read elsewhere, that are handed out again only when there are no others. Memory
            that another core has just read is several times slower to write than memory that no cache holds.
    """

    def __init__(self, total: int, cool: int = 0):
        self.total = total
        self.free = total
        self._cool = cool
        self._cooling: deque[Block] = deque()
        self._cooling_units = 0
        self._lists: dict[int, dict[Block, None]] = {}
        self._filled = 0  # bit c is set where class c has a block
        self._insert(Block(0, total))

    def take(self, size: int) -> Block | None:
        """A block of exactly ``size`` units (>= 1), or None when no free block is that long."""
        block = self._find(size)
        while block is None and self._cooling:
            self._settle()
            block = self._find(size)
        if block is None:
            return None
        self._remove(block)
        if block.size > size:
            rest = Block(block.start + size, block.size - size, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._insert(rest)
        block.free = False
        self.free -= size
        return block

    def give(self, block: Block, read_elsewhere: bool) -> None:
        """Free a block that ``take`` gave.

        Args:
            read_elsewhere: by another core; what only this one used is still in its cache, and best used again at once.
        """
        self.free += block.size
        if not read_elsewhere:
            self._admit(block)
            return
        self._cooling.append(block)
        self._cooling_units += block.size
        while self._cooling_units > self._cool:
            self._settle()

    def _settle(self) -> None:
        """Admit the block that was given back first."""
        block = self._cooling.popleft()
        self._cooling_units -= block.size
        self._admit(block)

    def _admit(self, block: Block) -> None:
        """Merge a block with its free neighbours, to be handed out again."""
        block.free = True
        if block.after is not None and block.after.free:
            self._remove(block.after)
            _merge(block, block.after)
        if block.before is not None and block.before.free:
            self._remove(block.before)
            block = block.before
            _merge(block, block.after)
        self._insert(block)

    def _find(self, size: int) -> Block | None:
        own = _class(size)
        # Every block of a class above the request's own is long enough.
        above = self._filled >> (own + 1)
        for block in self._lists.get(own, ()):
            if block.size >= size:
                return block
        if not above:
            return None
        return next(iter(self._lists[own + (above & -above).bit_length()]))

    def _insert(self, block: Block) -> None:
        index = _class(block.size)
        self._lists.setdefault(index, {})[block] = None
        self._filled |= 1 << index

    def _remove(self, block: Block) -> None:
        index = _class(block.size)
        blocks = self._lists[index]
        del blocks[block]
        if not blocks:
            del self._lists[index]
            self._filled &= ~(1 << index)


def _merge(block: Block, after: Block | None) -> None:
    if after is None:
        return
    block.size += after.size
    block.after = after.after
    if after.after is not None:
        after.after.before = block


def _class(size: int) -> int:
    if size < _SUBS:
        return size
    shift = size.bit_length() - 1 - _SUB_BITS
    return (shift << _SUB_BITS) + (size >> shift)
