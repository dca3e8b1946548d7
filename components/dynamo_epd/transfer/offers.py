# SPDX-License-Identifier: Apache-2.0
"""The offering side of transfers: a state machine without clock, socket or memory traffic of its own.

An offer is OPEN until a receiver asks for it, SERVING while that one takes it, and then over. A write that was started
for a receiver outlives its offer: it has its own hold on the slot until the fabric is done with the memory. Bytes that
are sent over the link do so as well, until the kernel has them or the link ends; it ends when that takes too long.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from .arena import Hold
from .config import GRANULE
from .control import Link
from .protocol import PAYLOAD_BYTES, Cancel, Check, Checked, Done, Ended, Hello, Message, Outcome, Pull, Reading

_INDEX_BITS = 24


def offer_number(sequence: int, index: int) -> int:
    """Number of an offer whose slot starts at granule ``index``: with it, a receiver can read without asking first."""
    return sequence << _INDEX_BITS | index


def slot_index(offer: int) -> int:
    """The granule at which the offered slot starts."""
    return offer & ((1 << _INDEX_BITS) - 1)


class OfferState(enum.Enum):
    OPEN = "open"
    SERVING = "serving"


class Receiver(Protocol):
    """A peer that may take offers, as the machine sees it."""

    link: Link
    hello: Hello


@dataclass(eq=False)
class Offer:
    """One slot that a receiver may take.

    Attributes:
        writing: a write for it is under way; there is one at a time.
        reading: its receiver reads it, and the data plane makes progress for that.
        checked: its checksum was asked for; once is enough, and more would be work that anybody can order.
    """

    number: int
    slot: Hold
    nbytes: int
    deadline: float
    state: OfferState = OfferState.OPEN
    receiver: Receiver | None = None
    writing: bool = False
    reading: bool = False
    checked: bool = False


@dataclass(eq=False)
class Write:
    """Bytes on their way to a receiver's slot, in answer to one ``Pull``; over the link where it has no ``target``.

    Attributes:
        last: the offer ends with it.
        late: its time was over once, and it had begun.
    """

    offer: Offer
    receiver: Receiver
    request: int
    slot: Hold
    skip: int
    nbytes: int
    target: int | None
    last: bool
    late: bool = False


class OfferEffects(Protocol):
    """What the machine has done for it."""

    def send(self, link: Link, message: Message) -> None: ...

    def write(self, write: Write) -> None:
        """Start to write, or send; ``Offers.written`` is called once when the memory is no longer in use."""
        ...

    def abort(self, write: Write) -> None:
        """Hurry the end of a write."""
        ...

    def stuck(self, receiver: Receiver) -> None:
        """Close the link, which has not taken the bytes of a write in time."""
        ...

    def answer_check(self, receiver: Receiver, request: int, slot: Hold, skip: int, nbytes: int) -> None:
        """Answer with ``Checked``, then release ``slot``."""
        ...

    def expect(self, nbytes: int, on: bool) -> None:
        """The data plane must (not) make progress for a peer that reads."""
        ...


class Offers:
    """All offers of a process.

    Args:
        ttl: seconds that an offer stays open.
        timeout: seconds that a receiver may take over an offer, and a link over bytes that it is given.
    """

    def __init__(self, effects: OfferEffects, ttl: float, timeout: float):
        self._effects = effects
        self._ttl = ttl
        self._timeout = timeout
        self._sequence = 0
        # Deadlines only grow within each state, so the first of each is the next to end.
        self._offers: dict[OfferState, dict[int, Offer]] = {state: {} for state in OfferState}
        self._writes: dict[tuple[str, int], Write] = {}
        self._sending: dict[Write, float] = {}  # of these, those over links, and until when that may last
        self._newest: dict[Receiver, int] = {}  # the highest request of each receiver that was begun or cancelled
        self.expired = 0

    def count(self, state: OfferState) -> int:
        """Offers in ``state`` now."""
        return len(self._offers[state])

    @property
    def writing(self) -> int:
        """Writes whose memory is in use now."""
        return len(self._writes)

    def writes_to(self, receiver: Receiver) -> bool:
        """Whether the data plane writes to the receiver's memory."""
        return any(write.receiver is receiver and write.target is not None for write in self._writes.values())

    @property
    def busy(self) -> bool:
        """True while ``poll`` has something to watch."""
        return bool(self._sending) or any(self._offers.values())

    def number(self, slot: Hold) -> int:
        """A number for an offer of ``slot``."""
        self._sequence += 1
        return offer_number(self._sequence, slot.allocation.index)

    def add(self, number: int, slot: Hold, nbytes: int, now: float) -> None:
        """Offer the first ``nbytes`` of ``slot``, which gets a hold of its own."""
        self._offers[OfferState.OPEN][number] = Offer(number, slot.hold(), nbytes, now + self._ttl)

    def take(self, number: int, generation: int) -> Hold | None:
        """The slot of an open offer, for this very process; None when the offer has ended. Ends it."""
        offer = self._offers[OfferState.OPEN].get(number)
        if offer is None or offer.slot.allocation.generation != generation:
            return None
        slot = offer.slot.hold()
        self._end(offer)
        return slot

    def withdraw(self, number: int) -> None:
        """End an offer; nothing happens when it has ended already."""
        for offers in self._offers.values():
            if number in offers:
                self._end(offers[number])
                return

    def pull(self, receiver: Receiver, message: Pull, now: float) -> None:
        if message.request <= self._newest.get(receiver, -1):
            return  # a duplicate, or cancelled before it came: its last word is said or will be
        self._newest[receiver] = message.request
        offer, refusal = self._find(receiver, message.offer, message.generation)
        if offer is not None and (
            offer.writing or message.skip + message.nbytes > offer.nbytes or not _fits(message, receiver)
        ):
            offer, refusal = None, "protocol"
        if offer is None:
            detail = f"offer {message.offer} cannot be pulled: {refusal}"
            self._effects.send(receiver.link, Ended(message.request, refusal, detail))
            return
        self._serve(offer, receiver, now)
        offer.writing = True
        slot = offer.slot.hold()
        write = Write(
            offer, receiver, message.request, slot, message.skip, message.nbytes, message.target, message.last
        )
        self._writes[receiver.hello.agent, message.request] = write
        if write.target is None:
            self._sending[write] = now + self._timeout
        self._effects.write(write)

    def reading(self, receiver: Receiver, message: Reading, now: float) -> None:
        offer, refusal = self._find(receiver, message.offer, message.generation)
        if offer is None:
            detail = f"offer {message.offer} cannot be read: {refusal}"
            self._effects.send(receiver.link, Ended(message.request, refusal, detail))
        elif not offer.reading:
            self._serve(offer, receiver, now)
            offer.reading = True
            self._effects.expect(offer.nbytes, True)

    def cancel(self, receiver: Receiver, message: Cancel) -> None:
        self._newest[receiver] = max(message.request, self._newest.get(receiver, -1))
        write = self._writes.get((receiver.hello.agent, message.request))
        if write is None:
            self._effects.send(receiver.link, Ended(message.request, "cancelled"))
        else:
            # The answer goes to whoever asks now: the link of the pull may be gone.
            write.receiver = receiver
            self._effects.abort(write)

    def written(self, write: Write, error: str) -> None:
        """The memory of ``write`` is no longer in use.

        Args:
            error: empty when all bytes are at the receiver, which the data plane has told it, or on their way over
                the link.
        """
        self._sending.pop(write, None)
        self._writes.pop((write.receiver.hello.agent, write.request), None)
        write.offer.writing = False
        write.slot.release()
        if write.last and not error:
            self.withdraw(write.offer.number)
        if error:
            outcome: Outcome = "failed"
            if error == "cancelled":
                outcome = "expired" if write.late else "cancelled"
            self._effects.send(write.receiver.link, Ended(write.request, outcome, error[:200]))

    def check(self, receiver: Receiver, message: Check) -> None:
        offer, _ = self._find(receiver, message.offer, message.generation)
        if offer is None or offer.checked or message.skip + message.nbytes > offer.nbytes:
            self._effects.send(receiver.link, Checked(message.request, b""))
        else:
            offer.checked = True
            self._effects.answer_check(receiver, message.request, offer.slot.hold(), message.skip, message.nbytes)

    def done(self, receiver: Receiver, message: Done) -> None:
        offer, _ = self._find(receiver, message.offer, message.generation)
        if offer is not None:
            self._end(offer)

    def lost(self, receiver: Receiver) -> None:
        """The receiver's link is gone: what it was taking ends."""
        self._newest.pop(receiver, None)
        for offer in [o for o in self._offers[OfferState.SERVING].values() if o.receiver is receiver]:
            self._end(offer)
        for write in [w for w in self._writes.values() if w.receiver is receiver]:
            self._effects.abort(write)

    def poll(self, now: float) -> None:
        """End the offers whose deadline has passed, and the links that do not take what they are given."""
        for write in [write for write, deadline in self._sending.items() if deadline <= now]:
            if write.late:
                del self._sending[write]
                self._effects.stuck(write.receiver)
            else:
                # It may have waited for others. What has begun by now cannot be taken back, and has as long again.
                write.late = True
                self._sending[write] = now + self._timeout
                self._effects.abort(write)
        for state, offers in self._offers.items():
            while offers:
                offer = next(iter(offers.values()))
                if offer.deadline > now:
                    break
                self.expired += state is OfferState.OPEN
                self._end(offer)

    def close(self) -> None:
        """End all offers."""
        for offers in self._offers.values():
            for offer in list(offers.values()):
                self._end(offer)

    def _find(self, receiver: Receiver, number: int, generation: int) -> tuple[Offer | None, Outcome]:
        """The offer, or why ``receiver`` cannot have it."""
        for offers in self._offers.values():
            offer = offers.get(number)
            if offer is not None:
                if offer.slot.allocation.generation != generation:
                    return None, "generation"
                if offer.receiver not in (None, receiver):
                    return None, "protocol"
                return offer, "expired"
        return None, "expired"

    def _serve(self, offer: Offer, receiver: Receiver, now: float) -> None:
        if offer.state is OfferState.SERVING:
            return  # or an offer could be held for ever
        del self._offers[offer.state][offer.number]
        offer.state, offer.receiver, offer.deadline = OfferState.SERVING, receiver, now + self._timeout
        self._offers[OfferState.SERVING][offer.number] = offer

    def _end(self, offer: Offer) -> None:
        del self._offers[offer.state][offer.number]
        if offer.reading:
            self._effects.expect(offer.nbytes, False)
        offer.slot.release()


def _fits(message: Pull, receiver: Receiver) -> bool:
    """Whether the bytes fit where they are to go."""
    if message.target is None:
        return message.nbytes <= PAYLOAD_BYTES
    return not message.target % GRANULE and message.target + message.nbytes <= receiver.hello.size
