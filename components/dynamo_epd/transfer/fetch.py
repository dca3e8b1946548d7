# SPDX-License-Identifier: Apache-2.0
"""One transfer into this process, and what the machine of ``fetches`` needs around it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..contract.errors import TransferError
from ..contract.handoff import TensorRef
from .arena import Content, Hold, Waiter
from .control import Incoming, Link
from .protocol import Hello, Message

Way = Literal["map", "read", "write", "stream"]
"""``stream``: up to ``PAYLOAD_BYTES`` over the link; what is larger, as by ``write``."""


class FetchState(enum.Enum):
    MEMORY = "memory"
    PEER = "peer"
    MOVING = "moving"
    CHECKING = "checking"
    OVER = "over"


class Source(Protocol):
    """A connected peer that offers, as the machine sees it."""

    link: Link
    hello: Hello
    address: str
    way: Way


@dataclass(eq=False)
class Watcher:
    """One caller that wants the outcome of a fetch: a hold on the slot, or an error, by ``deadline`` at the latest."""

    deadline: float
    done: Callable[[Hold | TransferError], None]


@dataclass(eq=False)
class Fetch:
    """One transfer into this process.

    Attributes:
        skip: bytes of the offered tensor that are left out at its start.
        request: number of the pull, and of the check; peers rely on its growing from pull to pull.
        begun: when it was begun.
        busy: the data plane, or this process's own copy, is using the slot.
        granted: the peer may write to the slot until it says ``Ended``.
        incoming: the bytes come over the link now.
        untold: the peer must be told that its offer is over; else it knows.
    """

    ref: TensorRef
    skip: int
    nbytes: int
    content: Content
    begun: float
    watchers: dict[Watcher, None] = field(default_factory=dict)
    state: FetchState = FetchState.MEMORY
    request: int = 0
    slot: Hold | None = None
    source: Source | None = None
    busy: bool = False
    granted: bool = False
    incoming: Incoming | None = None
    untold: bool = True
    memory: Waiter | None = None
    ours: bytes | None = None
    theirs: bytes | None = None


class FetchEffects(Protocol):
    """What the machine has done for it."""

    def connect(self, fetch: Fetch) -> None:
        """Call ``Fetches.connected`` or ``Fetches.failed``, now or later."""
        ...

    def move(self, fetch: Fetch) -> None:
        """Copy or read the bytes, by ``fetch.source.way``; call ``Fetches.moved`` once the slot is not in use."""
        ...

    def send(self, link: Link, message: Message) -> None: ...

    def receive(self, fetch: Fetch) -> Incoming:
        """Have the link put what it brings now into the slot; call ``Fetches.received`` once it is there."""
        ...

    def discard(self, link: Link, nbytes: int) -> None:
        """Have the link throw away what it brings now."""
        ...

    def expect(self, nbytes: int, on: bool) -> None:
        """The data plane must (not) make progress for a peer that writes."""
        ...

    def taken(self, fetch: Fetch) -> None:
        """Tell the peer, soon, that its offer is over: all bytes are here."""
        ...

    def sum_slot(self, fetch: Fetch) -> None:
        """Call ``Fetches.summed`` with the BLAKE3 of the slot's bytes."""
        ...

    def over(self, fetch: Fetch, error: TransferError | None) -> None:
        """The fetch has ended, one way or the other."""
        ...
