# SPDX-License-Identifier: Apache-2.0
"""What touches the bytes: copies out of mapped memory, moves of the data plane, and checksums.

Small copies are made at once; everything else runs on threads, and its end is told on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import blake3
import numpy as np

from ..contract.errors import TransferError
from ..contract.handoff import TensorRef
from .arena import Hold
from .config import GRANULE
from .memory import HEADER_BYTES, Region
from .offers import slot_index
from .peers import Peer
from .plane import DataPlane, Ended, Move, Place

INLINE_BYTES = 2 << 20
"""Copies up to this size (0.1 to 0.3 ms) are made on the event loop; a thread would take longer to wake."""

Arrived = Callable[["TransferError | None"], None]


class Carrier:
    """Moves bytes in and out of one region.

    Args:
        plane: None where only memory of the same machine is used.
    """

    def __init__(self, region: Region, plane: DataPlane | None, loop: asyncio.AbstractEventLoop):
        self.region = region
        self.plane = plane
        self._loop = loop
        self._bytes = region.payload.numpy() if region.kind == "host" else np.empty(0, np.uint8)
        self._view = self._bytes.data
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="epd-copy")

    def bring(self, peer: Peer, ref: TensorRef, skip: int, nbytes: int, slot: Hold, arrived: Arrived) -> None:
        """Copy or read bytes ``[skip, skip + nbytes)`` of an offered tensor into ``slot``.

        Args:
            arrived: called once, possibly before this returns, when the slot is not in use any more.
        """
        if peer.mapped is not None:
            if nbytes <= INLINE_BYTES:
                arrived(self.copy(peer, ref, skip, nbytes, slot))
            else:
                self._threaded(lambda: self.copy(peer, ref, skip, nbytes, slot), arrived)
        elif self.plane is not None:
            hello, source = peer.hello, slot_index(ref.offer)
            move = Move(
                "read",
                hello.agent,
                self._place(slot.allocation.index * GRANULE),
                Place(hello.base + source * GRANULE + skip, hello.kind, hello.device),
                nbytes,
                b"",
                ref.generation,
                hello.table_base + HEADER_BYTES + 8 * source,
            )
            self.plane.move(move, lambda error: arrived(_read_error(error, ref)))

    def copy(self, peer: Peer, ref: TensorRef, skip: int, nbytes: int, slot: Hold) -> TransferError | None:
        """Copy out of the memory of a mapped peer, here and now; says why the bytes must not be used."""
        mapped, index = peer.mapped, slot_index(ref.offer)
        if mapped is None or mapped.table[index] != ref.generation:
            return TransferError("expired", "the offer had ended before its bytes were read")
        source, target = index * GRANULE + skip, slot.allocation.index * GRANULE
        np.copyto(self._bytes[target : target + nbytes], mapped.payload[source : source + nbytes])
        if mapped.table[index] != ref.generation:
            return TransferError("generation", "the offered memory was used for something else while it was read")
        return None

    def view(self, slot: Hold, skip: int, nbytes: int) -> memoryview | None:
        """Bytes ``[skip, skip + nbytes)`` of ``slot``, for a socket; None where they are not in host memory."""
        start = slot.allocation.index * GRANULE + skip
        return self._view[start : start + nbytes] if self.region.kind == "host" else None

    def send(
        self, peer: Peer, slot: Hold, skip: int, nbytes: int, target: int, note: bytes, ended: Ended
    ) -> int | None:
        """Write bytes of ``slot`` at ``target`` of the peer's payload; returns a number for ``cancel``.

        ``ended`` is called once, when the slot is not in use any more; never where None is returned.
        """
        if self.plane is None or not peer.loaded:
            return None
        hello = peer.hello
        local = self._place(slot.allocation.index * GRANULE + skip)
        remote = Place(hello.base + target, hello.kind, hello.device)
        return self.plane.move(Move("write", hello.agent, local, remote, nbytes, note), ended)

    def cancel(self, number: int) -> None:
        """Hurry the end of a write."""
        if self.plane is not None:
            self.plane.cancel(number)

    def checksum(self, slot: Hold, skip: int, nbytes: int, done: Callable[[bytes], None]) -> None:
        """BLAKE3 of bytes of ``slot``, which the caller holds until ``done`` is called."""
        start = slot.allocation.index * GRANULE + skip

        def compute() -> bytes:
            return blake3.blake3(self.region.payload[start : start + nbytes].cpu().numpy().data).digest()

        self._threaded(compute, done)

    def expect(self, nbytes: int, on: bool) -> None:
        """Make progress, or no longer, for a peer that moves ``nbytes`` in or out."""
        if self.plane is not None:
            (self.plane.expect if on else self.plane.unexpect)(nbytes)

    async def close(self) -> None:
        """Stop the data plane. Copies that are under way end in memory that is kept until they do."""
        if self.plane is not None:
            await self._loop.run_in_executor(None, self.plane.close)
        self._threads.shutdown(wait=False)

    def _place(self, offset: int) -> Place:
        return Place(self.region.base + offset, self.region.kind, self.region.device)

    def _threaded(self, work: Callable[[], object], done: Callable[..., None]) -> None:
        job = self._loop.run_in_executor(self._threads, work)
        job.add_done_callback(lambda job: None if job.cancelled() else done(job.result()))


def _read_error(error: str, ref: TensorRef) -> TransferError | None:
    if not error:
        return None
    if error == "generation":
        return TransferError("generation", f"the memory of offer {ref.offer} is used for something else")
    return TransferError("peer_lost", f"reading from {ref.endpoint}: {error}")
