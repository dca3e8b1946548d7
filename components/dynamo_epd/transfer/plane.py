# SPDX-License-Identifier: Apache-2.0
"""The data plane's interface: what moves bytes between this process's registered memory and a peer's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Place:
    """Registered memory: an address in a process, and which memory it is in."""

    address: int
    kind: Literal["host", "cuda"] = "host"
    device: int = 0


@dataclass(frozen=True)
class Move:
    """One one-sided transfer.

    Attributes:
        op: ``read`` (remote to local) or ``write`` (local to remote).
        agent: the peer's agent name; it must have been loaded.
        nbytes: bytes to move.
        note: for writes: given to the peer's ``DataPlane.noted`` once all bytes are there.
        generation: for reads: once the bytes are here, the uint64 at ``word`` in the peer must be equal to this.
        word: address of that word; 0 for no check.
    """

    op: Literal["read", "write"]
    agent: str
    local: Place
    remote: Place
    nbytes: int
    note: bytes = b""
    generation: int = 0
    word: int = 0


Ended = Callable[[str], None]
"""Called once on the event loop: an empty string for success, ``cancelled``, ``generation``, or what went wrong."""


class DataPlane(Protocol):
    """Moves bytes. Every method returns at once; the work is done elsewhere, never on the event loop."""

    noted: Callable[[str, bytes], None]
    """To be set: called on the event loop with the agent's name and the note of each write that has arrived here."""

    driven: int
    """Grows whenever this process drives the fabric: while it stands still, what peers read here they read alone."""

    metadata: bytes
    """What a peer must load before it can move anything to or from here."""

    def load(self, agent: str, metadata: bytes, ended: Ended) -> None:
        """Get to know a peer. Counted: as many ``forget`` as ``load``."""
        ...

    def forget(self, agent: str) -> None:
        """Disconnect from a peer. Its moves that are in flight end with an error."""
        ...

    def move(self, move: Move, ended: Ended) -> int:
        """Start ``move``; gives a number for ``cancel``. The memory is in use until ``ended`` is called."""
        ...

    def cancel(self, number: int) -> None:
        """Give up a move: it ends at once if it has not begun, else when the fabric is done with the memory."""
        ...

    def expect(self, nbytes: int) -> None:
        """A peer is about to move ``nbytes`` to or from here: keep making progress for it. Counted."""
        ...

    def unexpect(self, nbytes: int) -> None:
        """Undo one ``expect`` of as many bytes."""
        ...

    def close(self) -> None:
        """Stop, and deregister the memory. Moves in flight end with an error."""
        ...
