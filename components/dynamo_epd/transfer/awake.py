# SPDX-License-Identifier: Apache-2.0
"""Keeps the event loop awake in a burst of transfers: waking up for each message takes longer than moving the bytes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

_PAUSE_S = 1e-3
"""A burst is over after a pause of this length, and for as long the loop stays awake after its last transfer."""
_BURST = 16
"""So many signs of transfers make a burst: what one request moves does not."""


class Awake:
    """Keeps ``loop`` from sleeping between the transfers of a burst; without one it does nothing.

    Args:
        give_way: called on each round of the loop that would have been sleep: somebody may need the core.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
        give_way: Callable[[], None] = os.sched_yield,
    ):
        self._loop = loop
        self._clock = clock
        self._give_way = give_way
        self._last = 0.0
        self._signs = 0
        self._awake = False

    def sign(self) -> None:
        """A transfer begins or ends."""
        now = self._clock()
        self._signs = self._signs + 1 if now - self._last < _PAUSE_S else 1
        self._last = now
        if self._signs >= _BURST and not self._awake:
            self._awake = True
            self._loop.call_soon(self._round)

    def _round(self) -> None:
        self._awake = self._clock() - self._last < _PAUSE_S
        if self._awake:
            self._give_way()
            self._loop.call_soon(self._round)
