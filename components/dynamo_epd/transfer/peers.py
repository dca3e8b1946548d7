# SPDX-License-Identifier: Apache-2.0
"""A connected peer, and how the way in which its bytes come here is chosen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from ..contract.errors import TransferError
from .config import Mode, shared_memory_allowed
from .control import Incoming, Link
from .device import tcp_alone
from .fetch import Way
from .memory import MAGIC, NONCE_BYTES, Mapped, Region, map_region
from .plane import DataPlane, Ended, Move, Place
from .protocol import AnyMessage, Hello, Message, Wire

logger = logging.getLogger(__name__)

_HEADER_BYTES = len(MAGIC) + NONCE_BYTES
_PATIENCE_S = 0.03
"""A read that the fabric does by itself takes microseconds; one that needs the peer's CPU never ends without it."""
_TRIES = 5


class _NoLink:
    """Stands where there is no connection yet."""

    closed = True

    def send(self, message: Message) -> None:
        raise TransferError("peer_lost", "the peer is not connected")

    def send_bytes(self, message: Message, payload: memoryview, ended: Ended) -> Callable[[], None]:
        raise TransferError("peer_lost", "the peer is not connected")

    def receive(self, nbytes: int, into: memoryview | None, arrived: Callable[[], None]) -> Incoming:
        raise TransferError("peer_lost", "the peer is not connected")

    def close(self) -> None:
        """Nothing to close."""


_NO_LINK = _NoLink()


class Owner(Protocol):
    """The endpoint, as a peer sees it."""

    def greeted(self, peer: Peer) -> None: ...

    def dispatch(self, peer: Peer, message: AnyMessage) -> None: ...

    def faulted(self, peer: Peer, error: TransferError) -> None: ...

    def lost(self, peer: Peer, error: TransferError, dead: bool) -> None: ...


class Peer:
    """One link and who is at its other end; the ``LinkHandler`` of the link.

    Attributes:
        address: where the peer was dialled; empty for one that dialled this process.
        hello: what it said of itself; set before anything but ``greeted`` is told of it.
        way: how its bytes come here; for dialled peers.
        mapped: its memory, where ``way`` is ``map``.
        loading, loaded: the data plane is getting to know it, and does.
        wired: the data plane makes progress for it, until this timer is over.
        patience: for one that dialled this process: by when it must have said hello.
        fault: what it did wrong; nothing more is read from it.
        alive: it has said hello, and its link has not ended.
        greeting: done when it has said hello.
        given_up: its data plane is broken; the link is closed when the last words are said, or by this timer.
    """

    def __init__(self, owner: Owner, address: str = ""):
        self.address = address
        self.link: Link = _NO_LINK
        self.hello: Hello
        self.way: Way = "write"
        self.mapped: Mapped | None = None
        self.loading = False
        self.loaded = False
        self.wired: asyncio.TimerHandle | None = None
        self.patience: asyncio.TimerHandle | None = None
        self.fault: TransferError | None = None
        self.alive = False
        self.given_up: asyncio.TimerHandle | None = None
        self.greeting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers: dict[int, asyncio.Future[Wire]] = {}
        self._owner = owner
        self._requests = 0

    def connected(self, link: Link) -> None:
        self.link = link

    def received(self, link: Link, message: AnyMessage) -> None:
        if self.alive:
            self._owner.dispatch(self, message)
        elif isinstance(message, Hello):
            self.hello, self.alive = message, True
            self._owner.greeted(self)
            if not self.greeting.done():
                self.greeting.set_result(None)
        else:
            raise TransferError("protocol", f"{type(message).__name__} came before Hello")

    def faulted(self, link: Link, error: TransferError) -> None:
        self.fault = error
        self._owner.faulted(self, error)

    def lost(self, link: Link, error: TransferError, dead: bool) -> None:
        error = self.fault or error
        if self.address:
            waiting: list[asyncio.Future[Any]] = [self.greeting, *self._answers.values()]
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(TransferError(error.reason, str(error)))
        self._owner.lost(self, error, dead)
        self.alive = False

    def answered(self, message: Wire) -> None:
        """The peer's answer to ``wire``."""
        answer = self._answers.get(message.request)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def close(self) -> None:
        """Close the link, if there is one, and let nobody wait for it."""
        self.greeting.cancel()
        self.link.close()

    async def wire(self, on: bool) -> int:
        """Have the peer drive its data plane for this process, or stop doing so; returns its ``driven`` when it does.

        Raises:
            TransferError: it cannot, or is gone.
        """
        self._requests += 1
        future = asyncio.get_running_loop().create_future()
        self._answers[self._requests] = future
        try:
            self.link.send(Wire(self._requests, on))
            answer = await future
            if answer.error:
                raise TransferError("peer_lost", answer.error)
            return answer.driven
        finally:
            self._answers.pop(self._requests, None)


async def choose_way(
    peer: Peer, own: Hello, mode: Mode, region: Region, plane: DataPlane | None, probing: asyncio.Lock
) -> None:
    """Connect the data plane to a peer that was just dialled, and set ``peer.way``.

    Memory of the same machine is mapped. Otherwise a small read is tried while the peer does not drive its data plane:
    it succeeds exactly where the fabric (RDMA, NVLink, ``cma``) reads without the peer's help. Where it does not, a
    write by the peer is faster; by TCP alone, what is small comes sooner over the link, and nothing must be driven.

    Args:
        probing: held while the region's probe words are in use.

    Raises:
        TransferError: no way that ``mode`` allows works.
    """
    hello, loop = peer.hello, asyncio.get_running_loop()
    if mode in ("auto", "map"):
        local = hello.machine == own.machine and hello.kind == own.kind == "host"
        if local and (mode == "map" or shared_memory_allowed()):
            try:
                peer.mapped = await loop.run_in_executor(None, map_region, hello.pid, hello.fd, hello.size, hello.nonce)
                peer.way = "map"
                return
            except TransferError as error:
                if mode == "map":
                    raise
                logger.info("memory of %s is not shared with this process: %s", hello.agent, error)
        elif mode == "map":
            raise TransferError(
                "protocol", f"{hello.agent} is not on this machine: transfer mode 'map' cannot reach it"
            )
    if plane is None or not hello.metadata:
        raise TransferError("protocol", f"{hello.agent} or this process runs without NIXL: set the same transfer mode")
    await _ended(lambda ended: plane.load(hello.agent, hello.metadata, ended))
    peer.loaded = True
    # Where any of this fails, the link is closed, and the peer makes no more progress for it.
    await peer.wire(True)
    async with probing:
        await _probe(peer, region, plane)
        if mode == "read" or (mode == "auto" and await _reads_alone(peer, region, plane)):
            peer.way = "read"
        elif (mode == "stream" or (mode == "auto" and tcp_alone())) and hello.kind == own.kind == "host":
            peer.way = "stream"
        else:
            peer.way = "write"
    await peer.wire(False)


async def _probe(peer: Peer, region: Region, plane: DataPlane) -> None:
    """Read the peer's header; the first transfer also makes the connection."""
    hello, words = peer.hello, region.probe
    words[:] = 0
    move = Move("read", hello.agent, Place(words.ctypes.data), Place(hello.table_base), _HEADER_BYTES)
    await _ended(lambda ended: plane.move(move, ended))
    if words.tobytes() != MAGIC + hello.nonce:
        raise TransferError("protocol", f"the data plane of {hello.agent} reaches another process's memory")


async def _reads_alone(peer: Peer, region: Region, plane: DataPlane) -> bool:
    """Whether a read succeeds while the peer does nothing. A peer that never rests counts as one that must help.

    A read that needs help counts from the second on: the first may only have waited for the connection.
    """
    helped = 0
    for _ in range(_TRIES):
        driven = await peer.wire(False)
        probe = asyncio.ensure_future(_probe(peer, region, plane))
        try:
            done, _ = await asyncio.wait({probe}, timeout=_PATIENCE_S)
            if not done:
                await peer.wire(True)
            await probe
        finally:
            probe.cancel()
        if not done:
            helped += 1
            if helped > 1:
                return False
        elif await peer.wire(False) == driven:
            return True
    logger.info("%s is too busy to be tried for reads that need no help of it", peer.hello.agent)
    return False


async def _ended(start: Callable[[Callable[[str], None]], object]) -> None:
    """Wait for something that the data plane does.

    Raises:
        TransferError: ``peer_lost``, with what the data plane said.
    """
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def ended(error: str) -> None:
        if not future.done():
            future.set_result(error)

    start(ended)
    if error := await future:
        raise TransferError("peer_lost", error)
