# SPDX-License-Identifier: Apache-2.0
"""What the two machines have done for them: bytes go by the carrier, messages by the links."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from ..contract.errors import TransferError
from .arena import Hold
from .awake import Awake
from .carrier import Carrier
from .control import Incoming, Link
from .fetch import Fetch
from .fetches import Fetches
from .links import Links
from .offers import Offers, Receiver, Write
from .peers import Peer
from .protocol import Checked, Message, Payload, note, noted


class Effects:
    """The ``OfferEffects`` and ``FetchEffects`` of a process. The machines, which need it, are set by who makes them.

    Args:
        clock: seconds.
        stepped: called when one of the machines was stepped, and may have new deadlines.

    Attributes:
        moved_bytes: that have come into this process.
        observe: called with the seconds of each transfer that came whole.
    """

    offers: Offers
    fetches: Fetches
    links: Links

    def __init__(self, carrier: Carrier, clock: Callable[[], float], stepped: Callable[[], None]):
        self.carrier = carrier
        self.moved_bytes = 0
        self.observe: Callable[[float], None] = lambda seconds: None
        self._clock = clock
        self._stepped = stepped
        self._loop = asyncio.get_running_loop()
        self.awake = Awake(self._loop)
        self._moves: dict[Write, Callable[[], None]] = {}  # and how to hurry their ends
        if carrier.plane is not None:
            carrier.plane.noted = self.noted

    def connect(self, fetch: Fetch) -> None:
        self.links.connect(fetch)

    def move(self, fetch: Fetch) -> None:
        if isinstance(fetch.source, Peer) and fetch.slot is not None:
            self.carrier.bring(
                fetch.source, fetch.ref, fetch.skip, fetch.nbytes, fetch.slot, lambda error: self._moved(fetch, error)
            )

    def _moved(self, fetch: Fetch, error: TransferError | None) -> None:
        peer = fetch.source
        self.fetches.moved(fetch, error)
        if error is not None and error.reason == "peer_lost" and isinstance(peer, Peer):
            self.links.give_up(peer)
        self._stepped()

    def taken(self, fetch: Fetch) -> None:
        # Telling the peer wakes it; the caller need not wait for that.
        self._loop.call_soon(self.links.decline, fetch.ref)

    def over(self, fetch: Fetch, error: TransferError | None) -> None:
        if error is None:
            self.came(fetch.nbytes, fetch.begun)
        else:
            self.awake.sign()

    def came(self, nbytes: int, begun: float) -> None:
        """A transfer that was begun at ``begun`` has come whole."""
        self.awake.sign()
        self.moved_bytes += nbytes
        self.observe(self._clock() - begun)

    def sum_slot(self, fetch: Fetch) -> None:
        if fetch.slot is not None:
            self.carrier.checksum(fetch.slot, 0, fetch.nbytes, lambda done: self.fetches.summed(fetch, done))

    def write(self, write: Write) -> None:
        peer, slot, skip, nbytes = write.receiver, write.slot, write.skip, write.nbytes
        slot.allocation.read_elsewhere = False
        ended = partial(self.written, write)
        if write.target is None:
            view = self.carrier.view(slot, skip, nbytes)
            if view is not None:
                self._moves[write] = peer.link.send_bytes(Payload(write.request, nbytes), view, ended)
                return
        elif isinstance(peer, Peer):
            number = self.carrier.send(peer, slot, skip, nbytes, write.target, note(write.request), ended)
            if number is not None:
                self._moves[write] = partial(self.carrier.cancel, number)
                return
        self.offers.written(write, "cancelled")

    def receive(self, fetch: Fetch) -> Incoming:
        slot, source = fetch.slot, fetch.source
        if slot is None or source is None:
            raise ValueError("a fetch without memory or peer has asked for nothing")
        view = self.carrier.view(slot, 0, fetch.nbytes)
        return source.link.receive(fetch.nbytes, view, partial(self.fetches.received, fetch))

    def discard(self, link: Link, nbytes: int) -> None:
        link.receive(nbytes, None, _nobody_waits)

    def stuck(self, receiver: Receiver) -> None:
        if isinstance(receiver, Peer):
            self.links.stuck(receiver)

    def noted(self, agent: str, data: bytes) -> None:
        """The data plane brought the note of a write that has arrived."""
        request = noted(data)
        if request is not None:
            self.fetches.written(agent, request)
            self.links.settle()
            self._stepped()

    def written(self, write: Write, error: str) -> None:
        """The memory of a write is not in use any more; empty ``error`` for success."""
        self.awake.sign()
        self._moves.pop(write, None)
        try:
            self.offers.written(write, error)
        except TransferError:  # the receiver does not even read messages
            self.stuck(write.receiver)
        if isinstance(write.receiver, Peer) and write.receiver.fault is not None:
            self.links.close_when_quiet(write.receiver)

    def abort(self, write: Write) -> None:
        if write in self._moves:
            self._moves[write]()

    def answer_check(self, receiver: Receiver, request: int, slot: Hold, skip: int, nbytes: int) -> None:
        def answer(checksum: bytes) -> None:
            slot.release()
            with contextlib.suppress(TransferError):
                receiver.link.send(Checked(request, checksum))

        self.carrier.checksum(slot, skip, nbytes, answer)

    def send(self, link: Link, message: Message) -> None:
        link.send(message)

    def expect(self, nbytes: int, on: bool) -> None:
        self.carrier.expect(nbytes, on)


def _nobody_waits() -> None:
    """For what is thrown away."""
