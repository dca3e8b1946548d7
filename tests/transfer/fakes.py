# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for everything around the two machines: memory, peers, and what is done for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.contract.handoff import TensorRef
from dynamo_epd.transfer.arena import Arena, Hold
from dynamo_epd.transfer.config import GRANULE
from dynamo_epd.transfer.control import Incoming
from dynamo_epd.transfer.fetch import Fetch, Watcher
from dynamo_epd.transfer.fetches import Fetches
from dynamo_epd.transfer.offers import Write, offer_number
from dynamo_epd.transfer.protocol import Done, Hello, Message


class Memory:
    """An arena's memory without a region."""

    def __init__(self, granules: int):
        self.size = granules * GRANULE
        self.payload = torch.zeros(self.size, dtype=torch.uint8)
        self.table = np.zeros(granules, np.uint64)


class FakeLink:
    """Keeps what was sent; ``blocked`` makes sending fail."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.blocked = False
        self.closed = False

    def send(self, message: Message) -> None:
        if self.blocked:
            raise TransferError("peer_lost", "the peer does not read what it is sent")
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True

    def take(self) -> list[Message]:
        sent, self.sent = self.sent, []
        return sent


@dataclass(eq=False)
class FakePeer:
    agent: str = "peer"
    way: str = "write"
    address: str = "host:1"
    granules: int = 64
    link: FakeLink = field(default_factory=FakeLink)

    @property
    def hello(self) -> Hello:
        size = self.granules * GRANULE
        return Hello(self.agent, "machine", 1, 2, "host", 0, size, 1 << 40, 1 << 39, bytes(16), b"")


@dataclass
class OfferRecord:
    """``OfferEffects`` that only records."""

    writes: list[Write] = field(default_factory=list)
    aborted: list[Write] = field(default_factory=list)
    stopped: list[FakePeer] = field(default_factory=list)
    checks: list[tuple[int, Hold, int, int]] = field(default_factory=list)
    expected: int = 0

    def send(self, link: FakeLink, message: Message) -> None:
        link.send(message)

    def write(self, write: Write) -> None:
        self.writes.append(write)

    def abort(self, write: Write) -> None:
        self.aborted.append(write)

    def stuck(self, receiver: FakePeer) -> None:
        self.stopped.append(receiver)

    def answer_check(self, receiver: FakePeer, request: int, slot: Hold, skip: int, nbytes: int) -> None:
        self.checks.append((request, slot, skip, nbytes))

    def expect(self, nbytes: int, on: bool) -> None:
        self.expected += 1 if on else -1


@dataclass
class FetchRecord:
    """``FetchEffects`` that only records."""

    connecting: list[Fetch] = field(default_factory=list)
    moving: list[Fetch] = field(default_factory=list)
    summing: list[Fetch] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    ended: list[TransferError | None] = field(default_factory=list)
    expected: int = 0

    def connect(self, fetch: Fetch) -> None:
        self.connecting.append(fetch)

    def move(self, fetch: Fetch) -> None:
        self.moving.append(fetch)

    def send(self, link: FakeLink, message: Message) -> None:
        link.send(message)

    def expect(self, nbytes: int, on: bool) -> None:
        self.expected += 1 if on else -1

    def receive(self, fetch: Fetch) -> Incoming:
        return Incoming(fetch.nbytes, memoryview(bytearray(fetch.nbytes)), lambda: None)

    def discard(self, link: FakeLink, nbytes: int) -> None:
        self.discarded.append(nbytes)

    def taken(self, fetch: Fetch) -> None:
        if fetch.source is not None:
            fetch.source.link.send(Done(fetch.ref.offer, fetch.ref.generation))

    def sum_slot(self, fetch: Fetch) -> None:
        self.summing.append(fetch)

    def over(self, fetch: Fetch, error: TransferError | None) -> None:
        self.ended.append(error)


class Receiving:
    """A ``Fetches`` with a clock that stands still unless it is moved."""

    def __init__(self, granules: int = 8, verify: bool = False, settle: float = 3.0):
        self.arena = Arena(Memory(granules))
        self.record = FetchRecord()
        self.fetches = Fetches(self.arena, self.record, verify, settle)  # type: ignore[arg-type]
        self.now = 100.0
        self.results: list[Hold | TransferError] = []
        self._offers = 0

    def ref(self, granules: int = 1, agent: str = "peer", digest: str = "", index: int = 0) -> TensorRef:
        """A tensor of ``[4 * granules, 256]`` float32: four rows per granule."""
        self._offers += 1
        shape = (4 * granules, 256)
        name = digest or f"digest {self._offers}"
        return TensorRef("host:1", agent, offer_number(self._offers, index), 77, name, shape, "float32")

    def watcher(self, timeout: float = 10.0) -> Watcher:
        return Watcher(self.now + timeout, self.results.append)

    def start(self, *refs: TensorRef, timeout: float = 10.0, skip: int = 0) -> list[Fetch]:
        watchers = [self.watcher(timeout) for _ in refs]
        return self.fetches.start([(ref, skip) for ref in refs], watchers, self.now)

    def begin(self, peer: FakePeer, ref: TensorRef | None = None) -> Fetch:
        """A fetch that has its memory and its peer."""
        (fetch,) = self.start(ref or self.ref())
        self.fetches.connected(fetch, peer)  # type: ignore[arg-type]
        return fetch

    def reasons(self) -> list[str]:
        """The outcome of every watcher so far: an error's reason, or ``ok``; holds are released."""
        reasons = []
        for result in self.results:
            if isinstance(result, TransferError):
                reasons.append(result.reason)
            else:
                reasons.append("ok")
                result.release()
        self.results.clear()
        return reasons

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.arena.poll(self.now)
        self.fetches.poll(self.now)

    def at_rest(self) -> bool:
        """Nothing is in flight, held or waited for."""
        return (
            self.arena.used_bytes == 0
            and self.arena.quarantined_bytes == 0
            and self.arena.waiting == 0
            and not self.fetches.busy
            and not self.fetches.quarantined
            and self.record.expected == 0
        )
