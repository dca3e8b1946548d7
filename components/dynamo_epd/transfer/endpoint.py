# SPDX-License-Identifier: Apache-2.0
"""The ``Transfer`` of a process: arena, store, control plane and data plane, tied together on one event loop.

Nothing runs while nothing is in flight: the machines are stepped by what arrives, and by a timer that exists only
while something has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence

from ..contract.errors import TransferError
from ..contract.handoff import TensorRef
from .arena import Arena, Content, Hold, Waiter
from .callers import abandon, release, require_rows, require_same, resolver
from .carrier import INLINE_BYTES, Carrier
from .config import GRANULE, TransferConfig
from .effects import Effects
from .fetch import Fetch, Watcher
from .fetches import Fetches
from .links import Links
from .memory import Region, machine_id
from .offers import Offers, slot_index
from .peers import Peer
from .plane import DataPlane
from .protocol import Hello
from .store import Store

_TICK_S = 0.05
_COOL_BYTES = 16 << 20
"""What half a last-level cache holds."""


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
            region,
            self.store.evict,
            self.store.evictable,
            first_generation=int.from_bytes(os.urandom(3), "big") << 28,
            cool=_COOL_BYTES // GRANULE if region.kind == "host" else 0,
        )
        self._loop = asyncio.get_running_loop()
        self.effects = Effects(Carrier(region, plane, self._loop), clock, self._arm)
        self.offers = self.effects.offers = Offers(self.effects, config.offer_ttl, config.timeout)
        self.fetches = self.effects.fetches = Fetches(
            self.arena, self.effects, config.verify_transfers, settle=config.timeout
        )
        self.failures: dict[str, int] = {}
        self.address = ""
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.links = self.effects.links = Links(
            _hello(agent, region, plane),
            region,
            plane,
            config.mode,
            config.timeout,
            self.offers,
            self.fetches,
            clock,
            self._arm,
        )

    async def open(self, host: str) -> None:
        """Start to listen. Raises ``OSError``."""
        self.address = await self.links.open(host, self.config.port)

    # What the workers call.

    async def allocate(self, nbytes: int, *, timeout: float | None = None) -> Hold:
        return (await self.allocate_all([nbytes], timeout=timeout))[0]

    async def allocate_all(self, sizes: Sequence[int], *, timeout: float | None = None) -> list[Hold]:
        """One slot per size, all at once: requests that need several cannot block each other half way."""
        self._require_open()
        try:
            slots = self.arena.take(sizes)
        except TransferError as error:
            self._count(error)
            raise
        if slots is not None:
            return slots
        future: asyncio.Future[list[Hold]] = self._loop.create_future()

        waiter = Waiter(sizes, self._deadline(timeout), resolver(future))
        self.arena.wait(waiter)
        self._arm()
        try:
            return await future
        except BaseException as error:
            self.arena.forget(waiter)
            abandon(future)
            if isinstance(error, TransferError):
                self._count(error)
            raise

    def offer(self, slot: Hold, *, digest: str, shape: Sequence[int], dtype: str) -> TensorRef:
        shape = tuple(shape)
        allocation = slot.allocation
        ref = TensorRef(self.address, self.agent, self.offers.number(slot), allocation.generation, digest, shape, dtype)
        if ref.nbytes > slot.nbytes:
            raise ValueError(f"{dtype} tensor of shape {shape} has {ref.nbytes} bytes, the slot has {slot.nbytes}")
        allocation.content = Content(shape, dtype)
        allocation.read_elsewhere = True
        self.offers.add(ref.offer, slot, ref.nbytes, self._clock())
        self._arm()
        self.effects.awake.sign()
        return ref

    @property
    def offering(self) -> bool:
        return self.offers.busy

    def withdraw(self, ref: TensorRef) -> None:
        if ref.agent == self.agent:
            self.offers.withdraw(ref.offer)

    async def fetch(self, ref: TensorRef, *, first: int = 0, timeout: float | None = None) -> Hold:
        require_rows(ref, first)
        peer = self.links.known(ref.endpoint, ref.agent)
        slot = self._copied(ref, peer) if peer is not None and not first else None
        return slot or (await self.fetch_all([ref], first=first, timeout=timeout))[0]

    def _copied(self, ref: TensorRef, peer: Peer) -> Hold | None:
        """A small tensor out of mapped memory, where that needs no waiting and nothing goes wrong; else None."""
        nbytes = ref.nbytes
        if (
            peer.mapped is None
            or nbytes > min(INLINE_BYTES, self.arena.memory.size)
            or self.config.verify_transfers
            or ref.digest in self.store
            or self.fetches.joinable(ref.digest)
            or slot_index(ref.offer) * GRANULE + nbytes > peer.hello.size
        ):
            return None
        begun = self._clock()
        (slot,) = self.arena.take([nbytes]) or (None,)
        if slot is None:
            return None
        if self.effects.carrier.copy(peer, ref, 0, nbytes, slot) is not None:
            slot.release()
            return None
        slot.allocation.content = Content(ref.shape, ref.dtype)
        self.store.misses += 1
        self.effects.came(nbytes, begun)
        # Telling the peer wakes it; the caller need not wait for that.
        self._loop.call_soon(self.decline, ref)
        return slot

    async def fetch_all(self, refs: Sequence[TensorRef], *, first: int = 0, timeout: float | None = None) -> list[Hold]:
        """Fetch several tensors as ``fetch`` does one; memory for them is taken all at once, and all arrive or none."""
        for ref in refs:
            require_rows(ref, first)
        deadline = self._deadline(timeout)
        leaders = {ref.digest if first == 0 else i: i for i, ref in reversed(list(enumerate(refs)))}
        left = set(leaders.values())
        led: set[int] = set()
        outcomes: dict[int, asyncio.Future[Hold]] = {}
        found: dict[int, Hold] = {}
        try:
            while left:
                self._begin({i: refs[i] for i in sorted(left)}, first, deadline, led, outcomes)
                for outcome in outcomes.values():
                    with contextlib.suppress(TransferError):
                        await outcome
                faults = []
                for i, outcome in outcomes.items():
                    error = outcome.exception()
                    if error is None:
                        found[i] = outcome.result()
                        left.discard(i)
                    elif i in led or self._clock() >= deadline:
                        # Whoever waited for another's transfer has an offer of its own to try; these have not.
                        faults.append(error)
                outcomes.clear()
                if faults:
                    raise faults[0]
            for i, ref in enumerate(refs):
                if i not in found:
                    leader = found[leaders[ref.digest]]
                    require_same(ref, leader.allocation.content, leader.nbytes)
                    found[i] = leader.hold()
        except BaseException as error:
            for outcome in outcomes.values():
                abandon(outcome)
            release(found.values())
            led.clear()
            if isinstance(error, TransferError):
                self._count(error)
            raise
        finally:
            # A transfer that came to its end has ended its offer.
            for i, ref in enumerate(refs):
                if i not in led:
                    self.decline(ref)
        return [found[i] for i in range(len(refs))]

    def decline(self, ref: TensorRef) -> None:
        if ref.agent == self.agent:
            self.offers.withdraw(ref.offer)
        else:
            self.links.decline(ref)

    def keep(self, digest: str, slot: Hold) -> None:
        self.store.keep(digest, slot)

    def find(self, digest: str) -> Hold | None:
        return self.store.find(digest)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.links.stop_dialling()
        self.offers.close()
        self.fetches.close()
        self.arena.close()
        # The peers take the end of a link for the end of all use of their memory, so the data plane goes first.
        await self.effects.carrier.close()
        self.links.close()
        if self._timer is not None:
            self._timer.cancel()
        self.store.clear()
        self.region.close()

    # Fetching.

    def _begin(
        self,
        wanted: dict[int, TensorRef],
        first: int,
        deadline: float,
        led: set[int],
        outcomes: dict[int, asyncio.Future[Hold]],
    ) -> None:
        """Fill in an outcome for each of ``wanted``: of the store, of a running transfer, or of a new one (``led``)."""
        self._require_open()
        self.effects.awake.sign()
        leads: dict[int, tuple[TensorRef, int]] = {}
        for i, ref in wanted.items():
            kept = self._at_hand(ref) if first == 0 else None
            flight = self.fetches.joinable(ref.digest) if first == 0 and kept is None else None
            if kept is not None:
                outcomes[i] = self._loop.create_future()
                outcomes[i].set_result(kept)
                require_same(ref, kept.allocation.content, kept.nbytes)
            elif flight is not None:
                require_same(ref, flight.content, flight.nbytes)
                watcher, outcomes[i] = self._watcher(deadline)
                self.fetches.watch(flight, watcher)
                self._bind(flight, watcher, outcomes[i])
            else:
                leads[i] = (ref, first * (ref.nbytes // ref.shape[0]))
        if leads:
            watchers = [self._watcher(deadline) for _ in leads]
            fetches = self.fetches.start(list(leads.values()), [watcher for watcher, _ in watchers], self._clock())
            led.update(leads)
            for i, fetch, (watcher, outcome) in zip(leads, fetches, watchers, strict=True):
                outcomes[i] = outcome
                self._bind(fetch, watcher, outcome)
        self._arm()

    def _at_hand(self, ref: TensorRef) -> Hold | None:
        """What is here already: kept under the digest, or offered by this very process."""
        kept = self.store.find(ref.digest)
        if kept is None and ref.agent == self.agent:
            kept = self.offers.take(ref.offer, ref.generation)
            if kept is None:
                raise TransferError("expired", f"offer {ref.offer} of this process has ended")
        return kept

    def _watcher(self, deadline: float) -> tuple[Watcher, asyncio.Future[Hold]]:
        future: asyncio.Future[Hold] = self._loop.create_future()
        return Watcher(deadline, resolver(future)), future

    def _bind(self, fetch: Fetch, watcher: Watcher, future: asyncio.Future[Hold]) -> None:
        if not future.done():
            future.add_done_callback(lambda f: self.fetches.unwatch(fetch, watcher) if f.cancelled() else None)

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError("cancelled", "the transfer layer was closed")

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


def _hello(agent: str, region: Region, plane: DataPlane | None) -> Hello:
    return Hello(
        agent=agent,
        machine=machine_id(),
        pid=os.getpid(),
        fd=region.fd,
        kind=region.kind,
        device=region.device,
        size=region.size,
        base=region.base,
        table_base=region.table_base,
        nonce=region.nonce,
        metadata=plane.metadata if plane else b"",
    )
