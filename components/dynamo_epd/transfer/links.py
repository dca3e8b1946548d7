# SPDX-License-Identifier: Apache-2.0
"""The links of a process: dialled to fetch, accepted to serve; and who gets what comes over them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ..contract.errors import TransferError
from ..contract.handoff import TensorRef
from .config import Mode
from .fetch import Fetch, FetchState
from .fetches import Fetches
from .memory import Region
from .offers import Offers
from .peers import Peer, choose_way
from .plane import DataPlane
from .protocol import AnyMessage, Cancel, Check, Checked, Done, Ended, Hello, Payload, Pull, Reading, Wire
from .tcp_link import Listener, dial, listen

logger = logging.getLogger(__name__)

_MAX_DECLINED = 1000
"""Declined offers that are remembered for a peer that is being dialled; the others expire."""


class Links:
    """Connects the two machines of a process to their peers.

    Args:
        hello: what this process says of itself; ``region`` and ``plane`` are what it says it of.
        timeout: seconds that reaching a peer may take.
        stepped: called when one of the machines was stepped, and may have new deadlines.
    """

    def __init__(
        self,
        hello: Hello,
        region: Region,
        plane: DataPlane | None,
        mode: Mode,
        timeout: float,
        offers: Offers,
        fetches: Fetches,
        clock: Callable[[], float],
        stepped: Callable[[], None],
    ):
        self._hello = hello
        self._region = region
        self._plane = plane
        self._mode = mode
        self._timeout = timeout
        self._offers = offers
        self._fetches = fetches
        self._clock = clock
        self._stepped = stepped
        self._loop = asyncio.get_running_loop()
        self._server: Listener | None = None
        self._accepted: dict[Peer, None] = {}
        self._dialled: dict[str, Peer] = {}
        self._given_up: dict[str, Peer] = {}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._wanting: dict[str, list[Fetch]] = {}
        self._declined: dict[str, list[TensorRef]] = {}
        self._probing = asyncio.Lock()
        self._closed = False

    async def open(self, host: str, port: int) -> str:
        """Start to listen; returns the address for peers. Raises ``OSError``."""
        self._server, address = await listen(host, port, self._accept)
        return address

    def _accept(self) -> Peer:
        peer = Peer(self)
        self._accepted[peer] = None
        peer.patience = self._loop.call_later(self._timeout, lambda: peer.link.close())
        return peer

    def ways(self) -> dict[str, str]:
        """How bytes come from each peer that was dialled, by its agent's name."""
        return {peer.hello.agent: peer.way for peer in self._dialled.values()}

    def known(self, address: str, agent: str) -> Peer | None:
        """The peer of that name that is connected already."""
        peer = self._usable(address)
        return peer if peer is not None and peer.hello.agent == agent else None

    def _usable(self, address: str) -> Peer | None:
        peer = self._dialled.get(address)
        return None if peer is None or peer.link.closed else peer

    def give_up(self, peer: Peer) -> None:
        """The data plane's connection is broken: the next fetch makes a new one, with a new link.

        Until the peer has said its last words about what it may still write, the link stays: a process that is ending
        says them, and nobody could be asked for them afterwards.
        """
        if self._dialled.get(peer.address) is peer:
            del self._dialled[peer.address]
            self._given_up[peer.address] = peer
            peer.given_up = self._loop.call_later(self._timeout, peer.link.close)
        self.settle()

    def settle(self) -> None:
        """Close the links that were given up and are not waited for any more."""
        for peer in self._given_up.values():
            if not self._fetches.grants(peer):
                peer.link.close()

    def connect(self, fetch: Fetch) -> None:
        """Have ``fetches.connected`` or ``fetches.failed`` called, now or later."""
        address = fetch.ref.endpoint
        peer = self._usable(address)
        if peer is not None:
            self._fetches.connected(fetch, peer)
            return
        self._wanting.setdefault(address, []).append(fetch)
        self._reach(address)

    def _reach(self, address: str) -> None:
        if address not in self._dialling and address not in self._given_up and not self._closed:
            self._dialling[address] = self._loop.create_task(self._dial(address))

    def decline(self, ref: TensorRef) -> None:
        """Tell the offering peer that its offer is over."""
        if self._closed:
            return
        peer = self._usable(ref.endpoint)
        if peer is None:
            declined = self._declined.setdefault(ref.endpoint, [])
            if len(declined) < _MAX_DECLINED:
                declined.append(ref)
            self._reach(ref.endpoint)
        elif peer.hello.agent == ref.agent:
            with contextlib.suppress(TransferError):
                peer.link.send(Done(ref.offer, ref.generation))

    def stop_dialling(self) -> None:
        """Accept and dial nobody any more."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for task in list(self._dialling.values()):
            task.cancel()

    def close(self) -> None:
        """Close all links."""
        for peer in [*self._accepted, *self._dialled.values(), *self._given_up.values()]:
            peer.link.close()

    async def _dial(self, address: str) -> None:
        peer = Peer(self, address)
        first = set(self._wanting.get(address, ()))
        error: TransferError | None = TransferError("cancelled", "the transfer layer was closed")
        try:
            await asyncio.wait_for(self._meet(peer), self._timeout)
            error = None if peer.alive else TransferError("peer_lost", f"the connection to {address} ended")
        except asyncio.TimeoutError:
            error = TransferError("timeout", f"the transfer endpoint at {address} does not answer")
        except TransferError as fault:
            error = fault
        finally:
            del self._dialling[address]
            waiting, declined = self._wanting.pop(address, []), self._declined.pop(address, [])
            if error is None:
                self._dialled[address] = peer
                self._fetches.met(peer, self._clock())
                logger.info("transfers from %s at %s go by %s", peer.hello.agent, address, peer.way)
                for fetch in waiting:
                    self._fetches.connected(fetch, peer)
                for ref in declined:
                    self.decline(ref)
            else:
                peer.close()
                for fetch in waiting:
                    if fetch in first or self._closed:
                        self._fetches.failed(fetch, error)
                    elif fetch.state is FetchState.PEER:
                        # It has waited for less than the time that reaching a peer may take.
                        self.connect(fetch)
            self._stepped()

    async def _meet(self, peer: Peer) -> None:
        await dial(peer.address, peer)
        peer.link.send(self._hello)
        await peer.greeting
        await choose_way(peer, self._hello, self._mode, self._region, self._plane, self._probing)

    # What peers tell.

    def greeted(self, peer: Peer) -> None:
        if peer.patience is not None:
            peer.patience.cancel()
        if not peer.address:
            peer.link.send(self._hello)

    def dispatch(self, peer: Peer, message: AnyMessage) -> None:
        now = self._clock()
        if peer.address:
            if isinstance(message, Ended):
                if self._fetches.ended(peer, message, now) and message.outcome == "failed":
                    self.give_up(peer)
                self.settle()
            elif isinstance(message, Payload):
                self._fetches.payload(peer, message)
            elif isinstance(message, Checked):
                self._fetches.checked(peer, message.checksum, message.request)
            elif isinstance(message, Wire):
                peer.answered(message)
            else:
                raise TransferError("protocol", f"an offering peer may not send {type(message).__name__}")
        elif isinstance(message, Pull):
            self._offers.pull(peer, message, now)
        elif isinstance(message, Reading):
            self._offers.reading(peer, message, now)
        elif isinstance(message, Done):
            self._offers.done(peer, message)
        elif isinstance(message, Cancel):
            self._offers.cancel(peer, message)
        elif isinstance(message, Check):
            self._offers.check(peer, message)
        elif isinstance(message, Wire):
            self._wire(peer, message)
        else:
            raise TransferError("protocol", f"a fetching peer may not send {type(message).__name__}")
        self._stepped()

    def stuck(self, peer: Peer) -> None:
        """The link has not taken in time what it was given."""
        peer.fault = TransferError("timeout", f"{peer.hello.agent} does not read what it has asked for")
        self.faulted(peer, peer.fault)

    def faulted(self, peer: Peer, error: TransferError) -> None:
        logger.warning("closing the link to a peer: %s", error)
        self.close_when_quiet(peer)

    def close_when_quiet(self, peer: Peer) -> None:
        """Close a link as soon as nothing is written to its peer: it takes the link's end for the end of all writes."""
        if not self._offers.writes_to(peer):
            peer.link.close()

    def lost(self, peer: Peer, error: TransferError, dead: bool) -> None:
        self._accepted.pop(peer, None)
        if peer.patience is not None:
            peer.patience.cancel()
        if self._dialled.get(peer.address) is peer:
            del self._dialled[peer.address]
        if peer.given_up is not None:
            peer.given_up.cancel()
            self._given_up.pop(peer.address, None)
            if peer.address in self._wanting or peer.address in self._declined:
                self._reach(peer.address)
        if not peer.alive:
            return
        if peer.address:
            self._fetches.lost(peer, error, dead, self._clock())
        else:
            self._offers.lost(peer)
        self._unload(peer)
        self._stepped()

    def _wire(self, peer: Peer, message: Wire) -> None:
        plane = self._plane
        if plane is None:
            peer.link.send(Wire(message.request, False, f"{self._hello.agent} runs without NIXL"))
            return

        if peer.loading:
            raise TransferError("protocol", "Wire came again before its answer")

        def ready(error: str) -> None:
            peer.loading, peer.loaded = False, peer.loaded or not error
            if message.on and not error and peer.wired is None:
                plane.expect(0)
                # It is asked for while a peer is being reached, which may take no longer.
                peer.wired = self._loop.call_later(self._timeout, self._unwire, peer)
            elif not message.on:
                self._unwire(peer)
            if not peer.alive:
                self._unload(peer)
                return
            with contextlib.suppress(TransferError):
                peer.link.send(Wire(message.request, message.on, error[:1000], plane.driven))

        if peer.loaded:
            ready("")
        else:
            peer.loading = True
            plane.load(peer.hello.agent, peer.hello.metadata, ready)

    def _unload(self, peer: Peer) -> None:
        self._unwire(peer)
        if self._plane is not None and peer.loaded:
            peer.loaded = False
            self._plane.forget(peer.hello.agent)

    def _unwire(self, peer: Peer) -> None:
        if self._plane is not None and peer.wired is not None:
            peer.wired.cancel()
            peer.wired = None
            self._plane.unexpect(0)
