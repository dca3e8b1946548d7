# SPDX-License-Identifier: Apache-2.0
"""The control plane over TCP.

A link has its socket to itself, without a transport between: the bytes of a tensor go from the sender's slot to the
kernel and from there to the receiver's, and both sides know when a slot is not in use any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..contract.errors import TransferError
from .control import Incoming, LinkHandler
from .plane import Ended
from .protocol import Framer, Message, encode

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 1 << 20
TURN_BYTES = 1 << 20
"""Most bytes that a link moves before the event loop does something else (0.1 to 0.3 ms)."""
_SCRATCH_BYTES = 1 << 14
_ACCEPT_PAUSE_S = 1.0
_FLOW_S = 200e-6
"""For this long after bytes of a tensor have moved the event loop does not sleep: a link that stands still while more
come lets the sockets' buffers run full, or empty."""


@dataclass(eq=False)
class _Outgoing:
    parts: list[memoryview]
    ended: Ended | None = None
    begun: bool = False


class TcpLink:
    """A ``Link`` over a TCP connection.

    Args:
        sock: connected; the link closes it.
    """

    def __init__(self, handler: LinkHandler, sock: socket.socket):
        self._handler = handler
        self._sock: socket.socket | None = sock
        self._loop = asyncio.get_running_loop()
        self._framer = Framer()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._incoming: Incoming | None = None
        self._unsent: deque[_Outgoing] = deque()
        self._unsent_bytes = 0  # of messages; what is behind them is bounded by the arena
        self._writing = False
        self._looking = False
        self._moved = 0.0
        self._fault: TransferError | None = None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that vanished sends no FIN: find out within half a minute.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._loop.add_reader(sock, self._readable)
        handler.connected(self)

    def send(self, message: Message) -> None:
        if self._sock is None:
            return
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            raise TransferError("peer_lost", "the peer does not read what it is sent")
        frame = memoryview(encode(message))
        self._unsent_bytes += len(frame)
        self._queue(_Outgoing([frame]))

    def send_bytes(self, message: Message, payload: memoryview, ended: Ended) -> Callable[[], None]:
        outgoing = _Outgoing([memoryview(encode(message)), payload], ended)
        if self._sock is None:
            self._loop.call_soon(ended, "the link is closed")
        else:
            self._queue(outgoing)
        return lambda: self._cancel(outgoing)

    def receive(self, nbytes: int, into: memoryview | None, arrived: Callable[[], None]) -> Incoming:
        self._incoming = Incoming(nbytes, into, arrived)
        return self._incoming

    @property
    def closed(self) -> bool:
        return self._sock is None

    def close(self) -> None:
        self._end(None, dead=False)

    def _queue(self, outgoing: _Outgoing) -> None:
        self._unsent.append(outgoing)
        if not self._writing:
            self._writable()

    def _cancel(self, outgoing: _Outgoing) -> None:
        if outgoing in self._unsent and not outgoing.begun and outgoing.ended is not None:
            self._unsent.remove(outgoing)
            self._loop.call_soon(outgoing.ended, "cancelled")

    def _writable(self) -> None:
        turn = TURN_BYTES
        while self._sock is not None and self._unsent and turn > 0:
            outgoing = self._unsent[0]
            try:
                sent = self._sock.sendmsg([part[:TURN_BYTES] for part in outgoing.parts])
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._end(error, dead=isinstance(error, ConnectionError))
                return
            turn -= sent
            outgoing.begun = True
            self._sent(outgoing, sent)
        if self._unsent and self._unsent[0].ended is not None:
            self._look_again(turn < TURN_BYTES)
        if self._sock is not None and self._writing != bool(self._unsent):
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._sock, self._writable)
            else:
                self._loop.remove_writer(self._sock)

    def _sent(self, outgoing: _Outgoing, count: int) -> None:
        if outgoing.ended is None:
            self._unsent_bytes -= count
        parts = outgoing.parts
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][count:]
            return
        self._unsent.popleft()
        if outgoing.ended is not None:
            self._loop.call_soon(outgoing.ended, "")

    def _readable(self) -> None:
        turn = TURN_BYTES
        while self._sock is not None and turn > 0:
            incoming = self._incoming
            target = self._scratch
            if incoming is not None:
                target = (target if incoming.into is None else incoming.into)[: min(incoming.left, turn)]
            try:
                count = self._sock.recv_into(target)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._end(error, dead=isinstance(error, ConnectionError))
                return
            if not count:
                self._end(None, dead=True)
                return
            turn -= count
            if self._fault is None:
                self._received(count)
            if self._incoming is None:
                return  # whoever waits for a tensor need not wait for a look at what comes next; and messages cost more
        if self._incoming is not None:
            self._look_again(turn < TURN_BYTES)

    def _look_again(self, moved: bool) -> None:
        """A tensor is under way."""
        now = time.monotonic()
        if moved:
            self._moved = now
        else:
            os.sched_yield()  # the peer may need the core
        if not self._looking and now - self._moved < _FLOW_S:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if self._incoming is not None:
            self._readable()
        if self._unsent:
            self._writable()

    def _received(self, count: int) -> None:
        """The next bytes are in the scratch memory, or where those behind a message go."""
        try:
            if self._incoming is not None:
                self._got(count)
                return
            self._framer.feed(self._scratch[:count])
            while self._sock is not None and (message := self._framer.next()) is not None:
                self._handler.received(self, message)
                incoming = self._incoming
                if incoming is not None and (data := self._framer.rest(incoming.left)):
                    if incoming.into is not None:
                        incoming.into[: len(data)] = data
                    self._got(len(data))
        except TransferError as error:
            self._fault = error
            self._incoming = None
            self._handler.faulted(self, error)
        except BaseException as error:
            self._end(error, dead=False)
            raise

    def _got(self, count: int) -> None:
        incoming = self._incoming
        if incoming is not None:
            if incoming.left == count:
                self._incoming = None
            incoming.got(count)

    def _end(self, error: BaseException | None, dead: bool) -> None:
        sock, self._sock = self._sock, None
        if sock is None:
            return
        self._loop.remove_reader(sock)
        self._loop.remove_writer(sock)
        sock.close()
        self._incoming = None
        for outgoing in self._unsent:
            if outgoing.ended is not None:
                self._loop.call_soon(outgoing.ended, "the connection to the peer ended")
        self._unsent.clear()
        cause = f": {error}" if error else ""
        lost = self._fault or TransferError("peer_lost", f"the connection to the peer ended{cause}")
        self._loop.call_soon(self._handler.lost, self, lost, dead)


class Listener:
    """Accepts links on ``sock``, which listens, until it is closed.

    Args:
        accept: gives the handler of each new link.
    """

    def __init__(self, sock: socket.socket, accept: Callable[[], LinkHandler]):
        self.port: int = sock.getsockname()[1]
        self._accept = accept
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more, and close the socket."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._ready)

    def _ready(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            # Out of file descriptors, or of memory: whoever knocks waits until there are some.
            logger.error("no link can be accepted: %s", error)
            self._loop.remove_reader(self._sock)
            self._pause = self._loop.call_later(_ACCEPT_PAUSE_S, self._listen)
            return
        TcpLink(self._accept(), sock)


async def listen(host: str, port: int, accept: Callable[[], LinkHandler]) -> tuple[Listener, str]:
    """Listen for links; returns the listener and its address as ``host:port``.

    Raises:
        OSError: the address cannot be listened on.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    listener = Listener(socket.create_server(address, family=family), accept)
    return listener, f"[{host}]:{listener.port}" if ":" in host else f"{host}:{listener.port}"


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
        return TcpLink(handler, await _connect(host.strip("[]"), number))
    except ValueError:
        raise TransferError("protocol", f"{address!r} is not an address of the form host:port") from None
    except OSError as error:
        raise TransferError("peer_lost", f"no transfer endpoint at {address}: {error}") from error


async def _connect(host: str, port: int) -> socket.socket:
    """A socket connected to the first address of ``host`` that answers. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    failure: OSError = ConnectionRefusedError("no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, kind, protocol))
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, address)
            except OSError as error:
                failure = error
                continue
            stack.pop_all()
            return sock
    raise failure
