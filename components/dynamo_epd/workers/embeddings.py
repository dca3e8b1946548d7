# SPDX-License-Identifier: Apache-2.0
"""A media item -> its embedding in the arena: from the cache, from another request in flight, or encoded now."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ..contract.digest import value_digest
from ..contract.handoff import Modality
from ..models.base import Expansion
from ..transfer.base import Slot, Transfer

# Descriptions are a few hundred bytes each; they outlive their embedding only until it is asked for again.
_MAX_DESCRIPTIONS = 65536


@dataclass(frozen=True)
class Part:
    """One item of the handoff, without its embedding."""

    modality: Modality
    rows: int
    width: int
    dtype: str
    positions: Mapping[str, object]


@dataclass(frozen=True)
class Description:
    """What is known of an encoded item besides its embedding; determined by the item's digest.

    Attributes:
        expansion: what stands for the item in the prompt.
        parts: the item itself, or the two that its placeholder stands for (a video and its own sound).
    """

    expansion: Expansion
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Encoded:
    """An encoded item and one hold on the embedding of each part, which the owner must release."""

    description: Description
    slots: tuple[Slot, ...]

    def hold(self) -> Encoded:
        return Encoded(self.description, tuple(slot.hold() for slot in self.slots))

    def release(self) -> None:
        for slot in self.slots:
            slot.release()


def part_key(key: str, index: int, parts: int) -> str:
    """The digest of one part of an item: the item's own, where it is all of it."""
    return key if parts == 1 else value_digest([key, index])


@dataclass
class _Flight:
    task: asyncio.Task[Encoded]
    waiters: int = 0


class EmbeddingCache:
    """Embeddings by key, least recently used out first; each key is made once however many ask at the same time.

    Args:
        transfer: owner of the arena that the embeddings live in.
        enabled: False keeps nothing behind the requests in flight.
    """

    def __init__(self, transfer: Transfer, *, enabled: bool):
        self._transfer = transfer
        self._enabled = enabled
        self._descriptions: OrderedDict[str, Description] = OrderedDict()
        self._flights: dict[str, _Flight] = {}

    async def get(self, key: str, make: Callable[[], Awaitable[Encoded]]) -> Encoded:
        """The embedding under ``key``, made by ``make`` if it is neither kept nor being made.

        A caller that is cancelled leaves the making to the others; the last one to leave cancels it.
        """
        found = self._find(key)
        if found is not None:
            return found
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.ensure_future(make()))
        flight.waiters += 1
        try:
            made = await asyncio.shield(flight.task)
            self._remember(key, made)
            return made.hold()
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                self._land(key, flight)

    def _find(self, key: str) -> Encoded | None:
        description = self._descriptions.get(key)
        if description is None:
            return None
        n = len(description.parts)
        slots = [self._transfer.find(part_key(key, i, n)) for i in range(n)]
        held = tuple(slot for slot in slots if slot is not None)
        if len(held) == n:
            self._descriptions.move_to_end(key)
            return Encoded(description, held)
        for slot in held:
            slot.release()
        del self._descriptions[key]
        return None

    def _remember(self, key: str, made: Encoded) -> None:
        if not self._enabled or key in self._descriptions:
            return
        for i, slot in enumerate(made.slots):
            self._transfer.keep(part_key(key, i, len(made.slots)), slot)
        self._descriptions[key] = made.description
        while len(self._descriptions) > _MAX_DESCRIPTIONS:
            self._descriptions.popitem(last=False)

    def _land(self, key: str, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        flight.task.add_done_callback(_release)
        flight.task.cancel()


def _release(task: asyncio.Task[Encoded]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().release()
