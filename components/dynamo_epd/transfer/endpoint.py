# SPDX-License-Identifier: Apache-2.0
"""The ``Transfer`` of a process: arena, store, control plane and data plane, tied together on one event loop.

Nothing runs while nothing is in flight: the machines are stepped by what arrives, and by a timer that exists only
while something has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import blake3
import numpy as np

from ..contract.errors import TransferError
from ..contract.handoff import TensorRef
from .arena import Arena, Content, Hold, Waiter
from .config import GRANULE, TransferConfig
from .control import Link, close_server, dial, listen
from .fetches import Fetch, Fetches, Watcher
from .memory import HEADER_BYTES, Region, machine_id
from .offers import Offers, Write, slot_index
from .peers import Peer, choose_way
from .plane import DataPlane, Move, Place
from .protocol import AnyMessage, Cancel, Check, Checked, Done, Ended, Hello, Message, Pull, Reading, Wire
from .store import Store

logger = logging.getLogger(__name__)

_TICK_S = 0.05
_INLINE_BYTES = 1 << 20
"""Copies up to this size (about 0.1 ms) are made on the event loop; a thread would take longer to wake."""


class Endpoint:
    """Meets ``base.Transfer``; made by ``open_transfer``. It has, beyond that, ``allocate_all`` and ``fetch_all``."""

    def __init__(
        self,
        config: TransferConfig,
        agent: str,
        region: Region,
        plane: DataPlane | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        self.agent = agent
        self.region = region
        self.store = Store(config.keep_bytes)
        self.arena = Arena(
            region, self.store.evict, self.store.evictable, first_generation=int.from_bytes(os.urandom(3), "big") << 28
        )
        self.offers = Offers(self, config.offer_ttl, config.timeout)
        self.fetches = Fetches(self.arena, self, config.verify_transfers, settle=config.timeout)
        self.observe: Callable[[float, int], None] = lambda seconds, nbytes: None
        self.failures: dict[str, int] = {}
        self.address = ""
        self._plane = plane
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._bytes = region.payload.numpy() if region.kind == "host" else np.empty(0, np.uint8)
        self._server: asyncio.Server | None = None
        self._copier = ThreadPoolExecutor(2, thread_name_prefix="epd-copy")
        self._timer: asyncio.TimerHandle | None = None
        self._flights: dict[str, Fetch] = {}
        self._accepted: dict[Peer, None] = {}
        self._dialled: dict[str, Peer] = {}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._wanting: dict[str, list[Fetch]] = {}
        self._greetings: dict[Peer, asyncio.Future[None]] = {}
        self._moves: dict[Write, int] = {}
        self._probing = asyncio.Lock()
        self._closed = False

    async def open(self, host: str) -> None:
        """Start to listen."""
        self._server, self.address = await listen(host, self.config.port, lambda: Peer(self))

    @property
    def _hello(self) -> Hello:
        region, metadata = self.region, self._plane.metadata if self._plane else b""
        return Hello(
            agent=self.agent,
            machine=machine_id(),
            pid=os.getpid(),
            fd=region.fd,
            kind=region.kind,
            device=region.device,
            size=region.size,
            base=region.base,
            table_base=region.table_base,
            nonce=region.nonce,
            metadata=metadata,
        )

    # What the workers call.

    async def allocate(self, nbytes: int, *, timeout: float | None = None) -> Hold:
        return (await self.allocate_all([nbytes], timeout=timeout))[0]

    async def allocate_all(self, sizes: Sequence[int], *, timeout: float | None = None) -> list[Hold]:
        """One slot per size, all at once: requests that need several cannot block each other half way."""
        slots = self.arena.take(sizes)
        if slots is not None:
            return slots
        future: asyncio.Future[list[Hold]] = self._loop.create_future()

        def done(result: list[Hold] | TransferError) -> None:
            if isinstance(result, TransferError):
                self._count(result)
                _fail(future, result)
            elif future.done():
                _release(result)
            else:
                future.set_result(result)

        waiter = Waiter(sizes, self._deadline(timeout), done)
        self.arena.wait(waiter)
        self._arm()
        try:
            return await future
        except asyncio.CancelledError:
            self.arena.forget(waiter)
            if future.done() and not future.cancelled() and future.exception() is None:
                _release(future.result())
            raise

    def offer(self, slot: Hold, *, digest: str, shape: Sequence[int], dtype: str) -> TensorRef:
        shape = tuple(shape)
        allocation = slot.allocation
        ref = TensorRef(self.address, self.agent, 0, allocation.generation, digest, shape, dtype)
        if ref.nbytes > slot.nbytes:
            raise ValueError(f"{dtype} tensor of shape {shape} has {ref.nbytes} bytes, the slot has {slot.nbytes}")
        allocation.content = Content(shape, dtype)
        number = self.offers.add(slot, ref.nbytes, self._clock())
        self._arm()
        return TensorRef(self.address, self.agent, number, allocation.generation, digest, shape, dtype)

    def withdraw(self, ref: TensorRef) -> None:
        if ref.agent == self.agent:
            self.offers.withdraw(ref.offer)

    async def fetch(self, ref: TensorRef, *, first: int = 0, timeout: float | None = None) -> Hold:
        return (await self.fetch_all([ref], first=first, timeout=timeout))[0]

    async def fetch_all(self, refs: Sequence[TensorRef], *, first: int = 0, timeout: float | None = None) -> list[Hold]:
        """Fetch several tensors as ``fetch`` does one; memory for them is taken all at once, and all arrive or none."""
        deadline = self._deadline(timeout)
        leaders = {ref.digest if first == 0 else i: i for i, ref in reversed(list(enumerate(refs)))}
        left = set(leaders.values())
        led: set[int] = set()
        outcomes: dict[int, asyncio.Future[Hold]] = {}
        found: dict[int, Hold] = {}
        try:
            while left:
                outcomes = self._begin({i: refs[i] for i in sorted(left)}, first, deadline, led)
                if not all(outcome.done() for outcome in outcomes.values()):
                    await asyncio.wait(outcomes.values())
                faults = []
                for i, outcome in outcomes.items():
                    error = outcome.exception()
                    if error is None:
                        found[i] = outcome.result()
                        left.discard(i)
                    elif i in led or self._clock() >= deadline:
                        # Whoever waited for another's transfer has an offer of its own to try; these have not.
                        faults.append(error)
                outcomes = {}
                if faults:
                    raise faults[0]
            for i, ref in enumerate(refs):
                if i not in found:
                    leader = found[leaders[ref.digest]]
                    _require_same(ref, leader.allocation.content, leader.nbytes)
                    found[i] = leader.hold()
        except BaseException as error:
            for outcome in outcomes.values():
                if not outcome.cancel() and not outcome.exception():
                    outcome.result().release()
            _release(found.values())
            if isinstance(error, TransferError):
                self._count(error)
            raise
        finally:
            for i, ref in enumerate(refs):
                if i not in led:
                    self.decline(ref)
        return [found[i] for i in range(len(refs))]

    def keep(self, digest: str, slot: Hold) -> None:
        self.store.keep(digest, slot)

    def find(self, digest: str) -> Hold | None:
        return self.store.find(digest)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._server is not None:
            await close_server(self._server)
        self.offers.close()
        self.fetches.close()
        for task in list(self._dialling.values()):
            task.cancel()
        # The peers take the end of a link for the end of all use of their memory, so the data plane goes first.
        if self._plane is not None:
            await self._loop.run_in_executor(None, self._plane.close)
        for peer in [*self._accepted, *self._dialled.values()]:
            peer.link.close()
        if self._timer is not None:
            self._timer.cancel()
        self.store.clear()
        self._copier.shutdown(wait=False)
        self.region.close()

    # Fetching.

    def _begin(
        self, wanted: dict[int, TensorRef], first: int, deadline: float, led: set[int]
    ) -> dict[int, asyncio.Future[Hold]]:
        """One outcome for each of ``wanted``: the store's, a running transfer's, or a new one's (then in ``led``)."""
        outcomes = {}
        leads: dict[int, tuple[TensorRef, int]] = {}
        for i, ref in wanted.items():
            kept = self.store.find(ref.digest) if first == 0 else None
            flight = self.fetches.joinable(ref.digest) if first == 0 and kept is None else None
            if kept is not None:
                outcomes[i] = self._loop.create_future()
                outcomes[i].set_result(kept)
                _require_same(ref, kept.allocation.content, kept.nbytes)
            elif flight is not None:
                _require_same(ref, flight.content, flight.nbytes)
                watcher, outcomes[i] = self._watcher(deadline)
                self.fetches.watch(flight, watcher)
                self._bind(flight, watcher, outcomes[i])
            elif 0 <= first < ref.shape[0]:
                leads[i] = (ref, first * (ref.nbytes // ref.shape[0]))
            else:
                raise TransferError("protocol", f"row {first} of a tensor of shape {ref.shape} was asked for")
        if leads:
            watchers = [self._watcher(deadline) for _ in leads]
            fetches = self.fetches.start(list(leads.values()), [watcher for watcher, _ in watchers])
            led.update(leads)
            for i, fetch, (watcher, outcome) in zip(leads, fetches, watchers, strict=True):
                outcomes[i] = outcome
                self._bind(fetch, watcher, outcome)
        self._arm()
        return outcomes

    def _watcher(self, deadline: float) -> tuple[Watcher, asyncio.Future[Hold]]:
        future: asyncio.Future[Hold] = self._loop.create_future()

        def done(result: Hold | TransferError) -> None:
            if isinstance(result, TransferError):
                _fail(future, result)
            elif future.done():
                result.release()
            else:
                future.set_result(result)

        return Watcher(deadline, done), future

    def _bind(self, fetch: Fetch, watcher: Watcher, future: asyncio.Future[Hold]) -> None:
        if not future.done():
            future.add_done_callback(lambda f: self.fetches.unwatch(fetch, watcher) if f.cancelled() else None)

    def decline(self, ref: TensorRef) -> None:
        """Tell the offering side that its offer is over; when it cannot be told, its time to live tells it."""
        peer = self._dialled.get(ref.endpoint)
        if peer is not None and peer.hello.agent == ref.agent:
            with contextlib.suppress(TransferError):
                peer.link.send(Done(ref.offer, ref.generation))

    def connect(self, fetch: Fetch) -> None:
        address = fetch.ref.endpoint
        peer = self._dialled.get(address)
        if peer is not None:
            self.fetches.connected(fetch, peer)
            return
        self._wanting.setdefault(address, []).append(fetch)
        if address not in self._dialling:
            self._dialling[address] = self._loop.create_task(self._dial(address))

    async def _dial(self, address: str) -> None:
        peer, error = Peer(self, address), None
        try:
            await asyncio.wait_for(self._meet(peer), self.config.timeout)
            if not peer.alive:
                raise TransferError("peer_lost", f"the connection to {address} ended")
        except asyncio.TimeoutError:
            error = TransferError("timeout", f"the transfer endpoint at {address} does not answer")
        except TransferError as fault:
            error = fault
        finally:
            self._greetings.pop(peer, None)
            del self._dialling[address]
            waiting = self._wanting.pop(address, [])
            if error is None and not self._closed:
                self._dialled[address] = peer
                self.fetches.met(peer, self._clock())
                logger.info("transfers from %s at %s go by %s", peer.hello.agent, address, peer.way)
            elif hasattr(peer, "link"):
                peer.link.close()
        for fetch in waiting:
            if error is None:
                self.fetches.connected(fetch, peer)
            else:
                self.fetches.failed(fetch, error)

    async def _meet(self, peer: Peer) -> None:
        peer.link = await dial(peer.address, peer)
        greeted = self._greetings[peer] = self._loop.create_future()
        peer.link.send(self._hello)
        await greeted
        await choose_way(peer, self._hello, self.config.mode, self.region, self._plane, self._probing)

    def move(self, fetch: Fetch) -> None:
        peer, ref, slot = fetch.source, fetch.ref, fetch.slot
        if not isinstance(peer, Peer) or slot is None:
            return
        source, target = slot_index(ref.offer), slot.allocation.index * GRANULE
        if peer.way == "map":
            if fetch.nbytes <= _INLINE_BYTES:
                self.fetches.moved(fetch, self._copy(peer, source, ref.generation, fetch.skip, target, fetch.nbytes))
                return
            job = self._loop.run_in_executor(
                self._copier, self._copy, peer, source, ref.generation, fetch.skip, target, fetch.nbytes
            )
            job.add_done_callback(lambda done: self.fetches.moved(fetch, _outcome(done)))
        elif self._plane is not None:
            hello, region = peer.hello, self.region
            move = Move(
                "read",
                hello.agent,
                Place(region.base + target, region.kind, region.device),
                Place(hello.base + source * GRANULE + fetch.skip, hello.kind, hello.device),
                fetch.nbytes,
                ref.generation,
                hello.table_base + HEADER_BYTES + 8 * source,
            )
            self._plane.move(move, lambda error: self.fetches.moved(fetch, _read_error(error, ref)))

    def _copy(
        self, peer: Peer, index: int, generation: int, skip: int, target: int, nbytes: int
    ) -> TransferError | None:
        mapped = peer.mapped
        if mapped is None or mapped.table[index] != generation:
            return TransferError("expired", "the offer had ended before its bytes were read")
        start = index * GRANULE + skip
        np.copyto(self._bytes[target : target + nbytes], mapped.payload[start : start + nbytes])
        if mapped.table[index] != generation:
            return TransferError("generation", "the offered memory was used for something else while it was read")
        return None

    def sum_slot(self, fetch: Fetch) -> None:
        if fetch.slot is not None:
            job = self._loop.run_in_executor(self._copier, self._sum, fetch.slot, 0, fetch.nbytes)
            job.add_done_callback(lambda done: self.fetches.summed(fetch, done.result()))

    def _sum(self, slot: Hold, skip: int, nbytes: int) -> bytes:
        start = slot.allocation.index * GRANULE + skip
        data = self.region.payload[start : start + nbytes].cpu().numpy()
        return blake3.blake3(memoryview(data)).digest()

    def over(self, fetch: Fetch, error: TransferError | None) -> None:
        self._arm()

    # Offering.

    def write(self, write: Write) -> None:
        peer, plane, region = write.receiver, self._plane, self.region
        if not isinstance(peer, Peer) or plane is None or not peer.loaded:
            self.offers.written(write, "cancelled")
            return
        hello = peer.hello
        move = Move(
            "write",
            hello.agent,
            Place(region.base + write.slot.allocation.index * GRANULE + write.skip, region.kind, region.device),
            Place(hello.base + write.target, hello.kind, hello.device),
            write.nbytes,
        )
        self._moves[write] = plane.move(move, lambda error: self._written(write, error))

    def _written(self, write: Write, error: str) -> None:
        self._moves.pop(write, None)
        self.offers.written(write, error)
        peer = write.receiver
        if isinstance(peer, Peer) and peer.fault is not None:
            self.faulted(peer, peer.fault)

    def abort(self, write: Write) -> None:
        if self._plane is not None and write in self._moves:
            self._plane.cancel(self._moves[write])

    def checksum(self, receiver: object, request: int, slot: Hold | None, skip: int, nbytes: int) -> None:
        if not isinstance(receiver, Peer):
            return
        if slot is None:
            self.send(receiver.link, Checked(request, b""))
            return
        held = slot
        job = self._loop.run_in_executor(self._copier, self._sum, held, skip, nbytes)

        def answer(done: asyncio.Future[bytes]) -> None:
            held.release()
            with contextlib.suppress(TransferError):
                self.send(receiver.link, Checked(request, done.result()))

        job.add_done_callback(answer)

    # Both.

    def send(self, link: Link, message: Message) -> None:
        link.send(message)

    def expect(self, nbytes: int, on: bool) -> None:
        if self._plane is not None:
            (self._plane.expect if on else self._plane.unexpect)(nbytes)

    def greeted(self, peer: Peer) -> None:
        if peer.address:
            greeting = self._greetings.pop(peer, None)
            if greeting is not None and not greeting.done():
                greeting.set_result(None)
        else:
            self._accepted[peer] = None
            peer.link.send(self._hello)

    def dispatch(self, peer: Peer, message: AnyMessage) -> None:
        now = self._clock()
        if peer.address:
            if isinstance(message, Ended):
                self.fetches.ended(peer, message, now)
            elif isinstance(message, Checked):
                self.fetches.checked(peer, message.checksum, message.request)
            elif isinstance(message, Wire):
                answer = peer.answers.get(message.request)
                if answer is not None and not answer.done():
                    answer.set_result(message.error)
            else:
                raise TransferError("protocol", f"an offering peer may not send {type(message).__name__}")
        elif isinstance(message, Pull):
            self.offers.pull(peer, message, now)
        elif isinstance(message, Reading):
            self.offers.reading(peer, message, now)
        elif isinstance(message, Done):
            self.offers.done(peer, message)
        elif isinstance(message, Cancel):
            self.offers.cancel(peer, message)
        elif isinstance(message, Check):
            self.offers.check(peer, message)
        elif isinstance(message, Wire):
            self._wire(peer, message)
        else:
            raise TransferError("protocol", f"a fetching peer may not send {type(message).__name__}")
        self._arm()

    def _wire(self, peer: Peer, message: Wire) -> None:
        plane = self._plane
        if plane is None:
            peer.link.send(Wire(message.request, False, f"{self.agent} runs without NIXL"))
            return

        def ready(error: str) -> None:
            peer.loaded = peer.loaded or not error
            if not error and message.on != peer.wired:
                peer.wired = message.on
                self.expect(0, message.on)
            if not peer.alive:
                self._unload(peer)
            with contextlib.suppress(TransferError):
                peer.link.send(Wire(message.request, message.on, error[:1000]))

        if peer.loaded:
            ready("")
        else:
            plane.load(peer.hello.agent, peer.hello.metadata, ready)

    def _unload(self, peer: Peer) -> None:
        if peer.wired:
            peer.wired = False
            self.expect(0, False)
        if peer.loaded and self._plane is not None:
            peer.loaded = False
            self._plane.forget(peer.hello.agent)

    def faulted(self, peer: Peer, error: TransferError) -> None:
        logger.warning("closing the link to a peer: %s", error)
        # The peer takes the end of the link for the end of all writes to its memory.
        if not any(write.receiver is peer for write in self._moves):
            peer.link.close()

    def lost(self, peer: Peer, error: TransferError, dead: bool) -> None:
        greeting = self._greetings.pop(peer, None)
        if greeting is not None and not greeting.done():
            greeting.set_exception(TransferError(error.reason, str(error)))
        self._accepted.pop(peer, None)
        if self._dialled.get(peer.address) is peer:
            del self._dialled[peer.address]
        if not peer.alive:
            return
        if peer.address:
            self.fetches.lost(peer, error, dead, self._clock())
        else:
            self.offers.lost(peer)
        self._unload(peer)
        self._arm()

    def _deadline(self, timeout: float | None) -> float:
        return self._clock() + (self.config.timeout if timeout is None else timeout)

    def _arm(self) -> None:
        if self._timer is None and not self._closed and (self.offers.busy or self.fetches.busy or self.arena.waiting):
            self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock()
        self.offers.poll(now)
        self.fetches.poll(now)
        self.arena.poll(now)
        self._arm()

    def _count(self, error: TransferError) -> None:
        self.failures[error.reason] = self.failures.get(error.reason, 0) + 1


def _fail(future: asyncio.Future[Any], error: TransferError) -> None:
    if not future.done():
        future.set_exception(error)


def _release(slots: Iterable[Hold]) -> None:
    for slot in slots:
        slot.release()


def _require_same(ref: TensorRef, content: Content | None, nbytes: int) -> None:
    same = (content.shape, content.dtype) == (ref.shape, ref.dtype) if content else nbytes == ref.nbytes
    if not same:
        kept = f"{content.dtype} {content.shape}" if content else f"{nbytes} bytes"
        raise TransferError(
            "protocol", f"digest {ref.digest} is known here as {kept}, and offered as {ref.dtype} {ref.shape}"
        )


def _outcome(done: asyncio.Future[TransferError | None]) -> TransferError | None:
    fault = done.exception()
    return TransferError("peer_lost", f"copy failed: {fault}") if fault is not None else done.result()


def _read_error(error: str, ref: TensorRef) -> TransferError | None:
    if not error:
        return None
    if error == "generation":
        return TransferError("generation", f"the memory of offer {ref.offer} was used for something else")
    return TransferError("peer_lost", f"reading from {ref.endpoint}: {error}")
