# SPDX-License-Identifier: Apache-2.0
"""Peers that a transfer failed with: what a worker's health check can know of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..contract.errors import TransferError, Unavailable
from ..contract.handoff import TensorRef

_CONNECT_SECONDS = 1.0
_REASONS = ("peer_lost", "timeout")


class LostPeers:
    """Addresses with which a transfer failed, until they can be reached again, or are too long ago to matter.

    Args:
        patience: seconds after which a failure is forgotten: nothing that the peer offered before it is valid then.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic):
        self._patience, self._clock = patience, clock
        self._lost: dict[str, float] = {}

    @contextmanager
    def watch(self, refs: Sequence[TensorRef]) -> Iterator[None]:
        """Around a transfer of ``refs``."""
        try:
            yield
        except TransferError as error:
            if error.reason in _REASONS:
                until = self._forget() + self._patience
                self._lost.update((ref.endpoint, until) for ref in refs)
            raise

    def _forget(self) -> float:
        """Drop what is too long ago. Returns the time."""
        now = self._clock()
        self._lost = {address: until for address, until in self._lost.items() if until > now}
        return now

    async def check(self) -> None:
        """Ask each of them for a connection.

        Raises:
            Unavailable: one refuses, or does not answer within a second. A process that is stopped still answers.
        """
        self._forget()
        addresses = list(self._lost)
        for address, there in zip(addresses, await asyncio.gather(*map(_reachable, addresses)), strict=True):
            if there:
                self._lost.pop(address, None)
        if self._lost:
            raise Unavailable(
                f"transfers from {', '.join(self._lost)} failed, where nobody answers", reason="peer_lost"
            )


async def _reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), _CONNECT_SECONDS)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True
