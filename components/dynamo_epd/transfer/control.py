# SPDX-License-Identifier: Apache-2.0
"""The control plane: links that carry ``protocol`` messages in order, and tell when the other process is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol, cast

from ..contract.errors import TransferError
from .protocol import AnyMessage, Framer, Message, encode

MAX_UNSENT_BYTES = 1 << 20


class Link(Protocol):
    """One connection to a peer."""

    def send(self, message: Message) -> None:
        """Send without waiting; nothing happens on a link that is closed.

        Raises:
            TransferError: ``peer_lost``; the peer has not read for so long that no more is queued for it.
        """
        ...

    def close(self) -> None:
        """Close after what was sent. Safe to call twice."""
        ...


class LinkHandler(Protocol):
    """Whoever a link belongs to; told of everything on the event loop, ``lost`` exactly once and last."""

    def connected(self, link: Link) -> None:
        """The link is there."""
        ...

    def received(self, link: Link, message: AnyMessage) -> None:
        """A message came. Raising ``TransferError`` means that the link cannot be used any further."""
        ...

    def faulted(self, link: Link, error: TransferError) -> None:
        """What came cannot be understood; nothing more is read. The handler closes the link, now or later."""
        ...

    def lost(self, link: Link, error: TransferError, dead: bool) -> None:
        """The connection has ended.

        Args:
            dead: the peer's kernel closed it, which means that the process has ended or that it let go of all memory
                of ours first; False when it just cannot be reached, or when this side closed the link.
        """
        ...


class TcpLink(asyncio.Protocol):
    """A ``Link`` over TCP."""

    def __init__(self, handler: LinkHandler):
        self._handler = handler
        self._framer = Framer()
        self._transport: asyncio.Transport | None = None
        self._fault: TransferError | None = None
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that vanished sends no FIN: find out within half a minute.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._handler.connected(self)

    def data_received(self, data: bytes) -> None:
        if self._fault or self._closing:
            return
        try:
            for message in self._framer.feed(data):
                self._handler.received(self, message)
        except TransferError as error:
            self._fault = error
            self._handler.faulted(self, error)

    def connection_lost(self, exc: Exception | None) -> None:
        dead = not self._closing and (exc is None or isinstance(exc, ConnectionError))
        cause = f": {exc}" if exc else ""
        self._closing, self._transport = True, None
        error = self._fault or TransferError("peer_lost", f"the connection to the peer ended{cause}")
        self._handler.lost(self, error, dead)

    def send(self, message: Message) -> None:
        if self._transport is None or self._closing:
            return
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise TransferError("peer_lost", "the peer does not read what it is sent")
        self._transport.write(encode(message))

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()


async def listen(host: str, port: int, accept: Callable[[], LinkHandler]) -> tuple[asyncio.Server, str]:
    """Listen for links; returns the server and its address as ``host:port``.

    Args:
        accept: gives the handler of each new link.

    Raises:
        OSError: the address cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: TcpLink(accept()), host, port)
    bound = server.sockets[0].getsockname()[1]
    return server, f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"


async def dial(address: str, handler: LinkHandler) -> TcpLink:
    """Connect to the endpoint at ``address``.

    Raises:
        TransferError: ``peer_lost``; nobody answers there.
    """
    host, _, port = address.rpartition(":")
    try:
        number = int(port)
        if not 0 < number < 1 << 16:
            raise ValueError
        _, link = await asyncio.get_running_loop().create_connection(lambda: TcpLink(handler), host.strip("[]"), number)
    except ValueError:
        raise TransferError("protocol", f"{address!r} is not an address of the form host:port") from None
    except OSError as error:
        raise TransferError("peer_lost", f"no transfer endpoint at {address}: {error}") from error
    return link
