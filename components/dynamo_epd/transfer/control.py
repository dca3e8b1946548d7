# SPDX-License-Identifier: Apache-2.0
"""The control plane's interface: links that carry ``protocol`` messages in order, and tell when the peer is gone.

A link also carries the bytes of small tensors, each right behind a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..contract.errors import TransferError
from .plane import Ended
from .protocol import AnyMessage, Message


@dataclass(eq=False)
class Incoming:
    """Bytes that come behind a message.

    Attributes:
        left: how many have not come yet.
        into: where those go; None: nobody wants them.
        arrived: called when the last one is there.
    """

    left: int
    into: memoryview | None
    arrived: Callable[[], None]

    def drop(self) -> None:
        """What still comes is thrown away; ``arrived`` is not called."""
        self.into = None

    def got(self, count: int) -> None:
        """The next ``count`` bytes are there."""
        self.left -= count
        if self.into is not None:
            self.into = self.into[count:]
            if not self.left:
                self.arrived()


class Link(Protocol):
    """One connection to a peer."""

    @property
    def closed(self) -> bool:
        """It has ended, on whichever side; the handler knows or will be told."""
        ...

    def send(self, message: Message) -> None:
        """Send without waiting; nothing happens on a link that is closed.

        Raises:
            TransferError: ``peer_lost``; the peer has not read for so long that no more is queued for it.
        """
        ...

    def send_bytes(self, message: Message, payload: memoryview, ended: Ended) -> Callable[[], None]:
        """Send ``message`` and ``payload`` behind it; gives what cancels that, which has no effect once it has begun.

        Args:
            ended: called, never before this returns, when ``payload`` is not in use any more.
        """
        ...

    def receive(self, nbytes: int, into: memoryview | None, arrived: Callable[[], None]) -> Incoming:
        """Called for a message that has ``nbytes`` (>= 1) behind it, before anything else is read from the link.

        Args:
            into: where they go, as many; None: nowhere.
            arrived: called once they are there; never where the link ends first.
        """
        ...

    def close(self) -> None:
        """Close; what the kernel has not taken yet is not sent. Safe to call twice."""
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
