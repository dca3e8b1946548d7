# SPDX-License-Identifier: Apache-2.0
"""The receiving side of transfers: a state machine without clock, socket or memory traffic of its own.

    MEMORY -> PEER -> MOVING -> (CHECKING ->) over

A fetch whose bytes may still arrive after it failed keeps its slot, in quarantine, until the peer has said its last
word on it, or is dead and what it left in the sockets has been read. Bytes that come over the link are put into the
slot by this process alone: there the slot is free at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.errors import TransferError
from ..contract.handoff import TensorRef
from .arena import Arena, Content, Hold, Waiter
from .config import GRANULE
from .control import Link
from .fetch import Fetch, FetchEffects, FetchState, Source, Watcher
from .offers import slot_index
from .protocol import PAYLOAD_BYTES, Cancel, Check, Done, Ended, Message, Payload, Pull, Reading


class Fetches:
    """All fetches of a process.

    Args:
        verify: compare checksums.
        settle: seconds for which a slot stays in quarantine after the death of the peer that could write to it, and
            that a read which was given up may take before the link to its peer is closed.
    """

    def __init__(self, arena: Arena, effects: FetchEffects, verify: bool, settle: float):
        self._arena = arena
        self._effects = effects
        self._verify = verify
        self._settle = settle
        self._requests = 0
        self._active: dict[Fetch, None] = {}
        self._whole: dict[str, Fetch] = {}  # by digest: what another caller may join
        self._granted: dict[int, Fetch] = {}  # by request: the peer has not said its last word
        self._pulled: dict[int, Fetch] = {}  # by request: the peer was asked to send the bytes over the link
        self._reading: dict[int, Fetch] = {}  # by request: the data plane reads into the slot
        self._given_up: dict[Fetch, float] = {}  # of these, those that are over, and until when that may last
        self._checks: dict[int, Fetch] = {}
        self._settling: dict[Fetch, float] = {}

    @property
    def busy(self) -> bool:
        """True while ``poll`` has something to watch."""
        return bool(self._active or self._settling or self._reading)

    @property
    def quarantined(self) -> int:
        """Fetches that are over but whose slot a peer may still write to."""
        waited_for = [*self._granted.values(), *self._reading.values()]
        return sum(f.state is FetchState.OVER for f in waited_for) + len(self._settling)

    def grants(self, source: Source) -> bool:
        """Whether a peer may write to any slot in answer to what it was asked over this link."""
        return any(fetch.source is source for fetch in self._granted.values())

    def joinable(self, digest: str) -> Fetch | None:
        """The fetch under way that brings the whole tensor of ``digest``."""
        return self._whole.get(digest)

    def start(self, wanted: Sequence[tuple[TensorRef, int]], watchers: Sequence[Watcher], now: float) -> list[Fetch]:
        """Begin one fetch per ``(ref, bytes to skip)``, each with its first watcher; memory comes for all or for none.

        Raises:
            TransferError: ``too_large``; nothing was begun.
        """
        fetches = []
        for (ref, skip), watcher in zip(wanted, watchers, strict=True):
            row = ref.nbytes // ref.shape[0]
            content = Content((ref.shape[0] - skip // row, *ref.shape[1:]), ref.dtype)
            fetches.append(Fetch(ref, skip, ref.nbytes - skip, content, now, {watcher: None}))
        sizes = [fetch.nbytes for fetch in fetches]
        slots = self._arena.take(sizes)
        self._active.update(dict.fromkeys(fetches))
        self._whole.update((fetch.ref.digest, fetch) for fetch in fetches if not fetch.skip)
        if slots is None:
            waiter = Waiter(sizes, watchers[0].deadline, lambda result: self._remembered(fetches, result))
            for fetch in fetches:
                fetch.memory = waiter
            self._arena.wait(waiter)
        else:
            self._remembered(fetches, slots)
        return fetches

    def watch(self, fetch: Fetch, watcher: Watcher) -> None:
        """One more caller wants the outcome of ``fetch``, which is not over."""
        fetch.watchers[watcher] = None

    def unwatch(self, fetch: Fetch, watcher: Watcher) -> None:
        """A caller is not interested any more; the last one's leaving cancels the fetch."""
        if fetch.watchers.pop(watcher, watcher) is None and not fetch.watchers:
            self._fail(fetch, TransferError("cancelled", "the fetch was cancelled"))

    def connected(self, fetch: Fetch, source: Source) -> None:
        """The peer that ``fetch`` needs is there."""
        if fetch.state is not FetchState.PEER:
            return
        ref, hello = fetch.ref, source.hello
        if ref.agent != hello.agent:
            gone = f"agent {ref.agent} is gone; {hello.agent} answers at {ref.endpoint}"
            self._fail(fetch, TransferError("peer_lost", gone))
            return
        if slot_index(ref.offer) * GRANULE + ref.nbytes > hello.size:
            self._fail(fetch, TransferError("protocol", f"offer {ref.offer} lies outside the arena of {ref.agent}"))
            return
        self._requests += 1
        fetch.source, fetch.state, fetch.request = source, FetchState.MOVING, self._requests
        slot = fetch.slot
        if source.way == "stream" and fetch.nbytes <= PAYLOAD_BYTES:
            self._pulled[fetch.request] = fetch
            last = not self._verify
            self._send(fetch, Pull(fetch.request, ref.offer, ref.generation, fetch.skip, fetch.nbytes, None, last))
            return
        if source.way in ("write", "stream") and slot is not None:
            fetch.granted = True
            self._granted[fetch.request] = fetch
            self._effects.expect(fetch.nbytes, True)
            target = slot.allocation.index * GRANULE
            self._send(fetch, Pull(fetch.request, ref.offer, ref.generation, fetch.skip, fetch.nbytes, target))
            return
        if source.way == "read":
            self._send(fetch, Reading(fetch.request, ref.offer, ref.generation))
        if fetch.state is FetchState.MOVING:
            fetch.busy = True
            if source.way == "read":
                self._reading[fetch.request] = fetch
            self._effects.move(fetch)

    def failed(self, fetch: Fetch, error: TransferError) -> None:
        """The peer that ``fetch`` needs cannot be reached."""
        self._fail(fetch, error)

    def moved(self, fetch: Fetch, error: TransferError | None) -> None:
        """The slot is not in use by this side's copy or read any more."""
        fetch.busy = False
        self._reading.pop(fetch.request, None)
        self._given_up.pop(fetch, None)
        if fetch.state is FetchState.OVER:
            self._send(fetch, Done(fetch.ref.offer, fetch.ref.generation))
            self._free(fetch)
        elif error is not None:
            self._fail(fetch, error)
        else:
            self._arrived(fetch)

    def written(self, agent: str, request: int) -> None:
        """All bytes of a pull are here: the data plane brought the peer's last word on it."""
        fetch = self._granted.get(request)
        if fetch is None or fetch.ref.agent != agent:
            return  # stale, or a duplicate
        self._ungrant(fetch)
        if fetch.state is FetchState.OVER:
            self._free(fetch)
        else:
            self._arrived(fetch)

    def payload(self, source: Source, message: Payload) -> None:
        """The peer's last word on a pull, with the bytes right behind it.

        Raises:
            TransferError: they are not as many as were asked for.
        """
        fetch = self._pulled.get(message.request)
        if fetch is None or fetch.source is not source or fetch.incoming is not None:
            self._effects.discard(source.link, message.nbytes)  # of a fetch that was given up, or a duplicate
        elif message.nbytes != fetch.nbytes:
            raise TransferError("protocol", f"{message.nbytes} bytes came where {fetch.nbytes} were asked for")
        else:
            fetch.incoming = self._effects.receive(fetch)

    def received(self, fetch: Fetch) -> None:
        """All bytes that the link brought are in the slot."""
        del self._pulled[fetch.request]
        fetch.incoming = None
        fetch.untold = self._verify
        self._arrived(fetch)

    def ended(self, source: Source, message: Ended, now: float) -> bool:
        """The peer's last word on a pull whose bytes do not come, or on a read; False when it is about neither."""
        waiting = (self._granted, self._reading, self._pulled)
        fetch = next((found for fetches in waiting if (found := fetches.get(message.request))), None)
        if fetch is None or fetch.ref.agent != source.hello.agent:
            return False  # stale, or a duplicate
        if fetch.granted and message.outcome == "failed":
            self._release_later(fetch, now)
        elif fetch.granted:
            self._ungrant(fetch)
        self._pulled.pop(fetch.request, None)
        if fetch.state is FetchState.OVER:
            self._free(fetch)
        else:
            reason = "peer_lost" if message.outcome == "failed" else message.outcome
            self._fail(fetch, TransferError(reason, message.detail or f"the peer answered {message.outcome}"))
        return fetch.source is source

    def checked(self, source: Source, checksum: bytes, request: int) -> None:
        """The peer's checksum."""
        fetch = self._checks.get(request)
        if fetch is not None and fetch.ref.agent == source.hello.agent:
            fetch.theirs = checksum
            self._compare(fetch)

    def summed(self, fetch: Fetch, checksum: bytes) -> None:
        """This side's checksum."""
        fetch.busy = False
        if fetch.state is FetchState.OVER:
            self._free(fetch)
        else:
            fetch.ours = checksum
            self._compare(fetch)

    def lost(self, source: Source, error: TransferError, dead: bool, now: float) -> None:
        """The link to a peer is gone; see ``LinkHandler.lost`` for ``dead``."""
        for fetch in [f for f in self._active if f.source is source]:
            # A copy out of mapped memory needs the peer no more.
            if source.way != "map" or fetch.state is not FetchState.MOVING:
                self._fail(fetch, error)
        if dead:
            self._died([f for f in self._granted.values() if f.ref.agent == source.hello.agent], now)

    def met(self, source: Source, now: float) -> None:
        """A link was made: settle what an earlier one left open.

        The same process is asked for its last words; where another answers, the one before it is dead.
        """
        left = [f for f in self._granted.values() if f.state is FetchState.OVER]
        for fetch in left:
            if fetch.ref.agent == source.hello.agent:
                self._send(fetch, Cancel(fetch.request), source.link)
        agent, address = source.hello.agent, source.address
        self._died([f for f in left if f.ref.endpoint == address and f.ref.agent != agent], now)

    def poll(self, now: float) -> None:
        """Fail the callers whose deadline has passed; free the slots whose quarantine is over."""
        for fetch in list(self._active):
            late = [watcher for watcher in fetch.watchers if watcher.deadline <= now]
            if late:
                error = self._overdue(fetch)
                for watcher in late:
                    del fetch.watchers[watcher]
                    watcher.done(TransferError(error.reason, str(error)))
                if not fetch.watchers:
                    self._fail(fetch, error)
        for fetch in self._reading.values():
            if fetch.state is FetchState.OVER and self._given_up.setdefault(fetch, now + self._settle) <= now:
                # It needs the help of a peer that does not give it. The data plane ends it with the connection.
                self._given_up[fetch] = now + self._settle
                if fetch.source is not None:
                    fetch.source.link.close()
        for fetch in [f for f, until in self._settling.items() if until <= now]:
            del self._settling[fetch]
            self._effects.expect(fetch.nbytes, False)
            self._free(fetch)

    def close(self) -> None:
        """Fail everything that is in flight."""
        for fetch in list(self._active):
            self._fail(fetch, TransferError("cancelled", "the transfer layer was closed"))

    def _remembered(self, fetches: list[Fetch], result: list[Hold] | TransferError) -> None:
        for i, fetch in enumerate(fetches):
            fetch.memory = None
            if isinstance(result, TransferError):
                self._fail(fetch, result)
            elif fetch.state is FetchState.OVER:
                result[i].release()
            else:
                fetch.slot, fetch.state = result[i], FetchState.PEER
                self._effects.connect(fetch)

    def _arrived(self, fetch: Fetch) -> None:
        if not self._verify:
            self._complete(fetch)
            return
        fetch.state, fetch.busy = FetchState.CHECKING, True
        self._checks[fetch.request] = fetch
        self._effects.sum_slot(fetch)
        ref = fetch.ref
        self._send(fetch, Check(fetch.request, ref.offer, ref.generation, fetch.skip, fetch.nbytes))

    def _compare(self, fetch: Fetch) -> None:
        if fetch.ours is None or fetch.theirs is None:
            return
        if not fetch.theirs:
            self._fail(fetch, TransferError("expired", "the offer ended before its bytes could be verified"))
        elif fetch.ours != fetch.theirs:
            self._fail(
                fetch, TransferError("checksum", f"{fetch.nbytes} bytes from {fetch.ref.endpoint} arrived changed")
            )
        else:
            self._complete(fetch)

    def _complete(self, fetch: Fetch) -> None:
        slot = fetch.slot
        if slot is None:
            return
        slot.allocation.content = fetch.content
        watchers = list(fetch.watchers)
        self._over(fetch, None)
        for watcher in watchers:
            watcher.done(slot.hold())
        if fetch.untold:
            self._effects.taken(fetch)
        self._free(fetch)

    def _fail(self, fetch: Fetch, error: TransferError) -> None:
        if fetch.state is FetchState.OVER:
            return
        watchers = list(fetch.watchers)
        self._over(fetch, error)
        if fetch.source is not None:
            if fetch.incoming is not None:
                fetch.incoming.drop()
                fetch.incoming = None
            if self._pulled.pop(fetch.request, None) is not None or fetch.granted:
                self._send(fetch, Cancel(fetch.request))
            if not fetch.busy:  # else the peer may have to help until the read is over
                self._send(fetch, Done(fetch.ref.offer, fetch.ref.generation))
        if fetch.memory is not None and all(f.state is FetchState.OVER for f in self._sharing(fetch.memory)):
            self._arena.forget(fetch.memory)
        for watcher in watchers:
            watcher.done(TransferError(error.reason, str(error)))
        self._free(fetch)

    def _overdue(self, fetch: Fetch) -> TransferError:
        if fetch.state is FetchState.MEMORY:
            return self._arena.full(fetch.nbytes)
        where = f"from {fetch.ref.endpoint} did not arrive in time (state {fetch.state.value})"
        return TransferError("timeout", f"{fetch.nbytes} bytes {where}")

    def _sharing(self, memory: Waiter) -> list[Fetch]:
        return [fetch for fetch in self._active if fetch.memory is memory]

    def _over(self, fetch: Fetch, error: TransferError | None) -> None:
        fetch.state = FetchState.OVER
        fetch.watchers.clear()
        del self._active[fetch]
        self._checks.pop(fetch.request, None)
        if self._whole.get(fetch.ref.digest) is fetch:
            del self._whole[fetch.ref.digest]
        self._effects.over(fetch, error)

    def _free(self, fetch: Fetch) -> None:
        """Give the slot back, or leave it in quarantine while something may still write to it."""
        if fetch.slot is None:
            return
        if fetch.busy or fetch.granted or fetch in self._settling:
            self._arena.quarantine(fetch.slot.allocation)
        else:
            fetch.slot.release()
            fetch.slot = None

    def _ungrant(self, fetch: Fetch) -> None:
        del self._granted[fetch.request]
        fetch.granted = False
        self._effects.expect(fetch.nbytes, False)

    def _release_later(self, fetch: Fetch, now: float) -> None:
        # What a peer sent before its end may still be in the sockets, and is written when the data plane reads them.
        del self._granted[fetch.request]
        fetch.granted = False
        self._settling[fetch] = now + self._settle

    def _died(self, fetches: list[Fetch], now: float) -> None:
        for fetch in fetches:
            self._release_later(fetch, now)

    def _send(self, fetch: Fetch, message: Message, link: Link | None = None) -> None:
        if link is None:
            if fetch.source is None:
                return
            link = fetch.source.link
        try:
            self._effects.send(link, message)
        except TransferError as error:
            self._fail(fetch, error)
