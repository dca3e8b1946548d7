# SPDX-License-Identifier: Apache-2.0
"""A media item -> its embedding in the arena: from the cache, from another request in flight, or encoded now."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ..contract.handoff import Modality
from ..models.base import Expansion
from ..transfer.base import Slot, Transfer

# Descriptions are a few hundred bytes each; they outlive their embedding only until it is asked for again.
_MAX_DESCRIPTIONS = 65536


@dataclass(frozen=True)
class Description:
    """What is known of an encoded item besides its embedding; determined by the item's digest."""

    modality: Modality
    expansion: Expansion
    rows: int
    width: int
    dtype: str
    positions: dict[str, object]


@dataclass(frozen=True)
class Encoded:
    """An encoded item and one hold on its embedding, which the owner must release."""

    description: Description
    slot: Slot


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
        self.hits = 0
        self.misses = 0

    async def get(self, key: str, make: Callable[[], Awaitable[Encoded]]) -> Encoded:
        """The embedding under ``key``, made by ``make`` if it is neither kept nor being made.

        A caller that is cancelled leaves the making to the others; the last one to leave cancels it.
        """
        description = self._descriptions.get(key)
        if description is not None:
            slot = self._transfer.find(key)
            if slot is not None:
                self._descriptions.move_to_end(key)
                self.hits += 1
                return Encoded(description, slot)
            del self._descriptions[key]
        flight = self._flights.get(key)
        if flight is None:
            self.misses += 1
            flight = self._flights[key] = _Flight(asyncio.ensure_future(make()))
        else:
            self.hits += 1
        flight.waiters += 1
        try:
            made = await asyncio.shield(flight.task)
            self._remember(key, made)
            return Encoded(made.description, made.slot.hold())
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                self._land(key, flight)

    def _remember(self, key: str, made: Encoded) -> None:
        if not self._enabled or key in self._descriptions:
            return
        self._transfer.keep(key, made.slot)
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
        task.result().slot.release()
