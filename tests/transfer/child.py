# SPDX-License-Identifier: Apache-2.0
"""A second process for the tests: an endpoint that does what it is told over a Unix socket.

Run as a script with a socket path it imports everything once, then forks a child for each connection, so that a test
can have many processes, and kill them, at little cost. Requests and answers are JSON lines; the first answer is
``{"pid"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import blake3
import msgspec
import torch

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.contract.handoff import TensorRef
from dynamo_epd.transfer import Endpoint, TransferConfig, open_transfer
from dynamo_epd.transfer.arena import Hold
from dynamo_epd.transfer.offers import OfferState
from dynamo_epd.transfer.protocol import Done, Pull, Reading

WIDTH = 1024
PATIENCE_S = 60.0
"""For what must come, on a machine that may be busy; nothing is asserted of how soon."""
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


class Clock:
    """``time.monotonic``, and what it was put forward by: nobody has to wait for a deadline."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


def jump(transfer: Endpoint, seconds: float) -> None:
    """Put the clock of an endpoint forward."""
    clock = transfer._clock
    assert isinstance(clock, Clock)
    clock.ahead += seconds


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """uint8 ``[nbytes // WIDTH, WIDTH]`` that differs from other seeds' in most bytes, and from itself elsewhere."""
    row, column = torch.arange(nbytes // WIDTH).view(-1, 1), torch.arange(WIDTH).view(1, -1)
    rows = ((row * (2 * seed + 1) + (row >> 8) * 57) % 256).to(torch.uint8)
    columns = ((column * (4 * seed + 7) + (column >> 6) * 31 + seed * 13) % 256).to(torch.uint8)
    return rows + columns


def checksum(slot: Hold, nbytes: int) -> str:
    """BLAKE3 (hex) of the first ``nbytes`` of ``slot``."""
    return blake3.blake3(slot.tensor((nbytes,), "uint8").numpy().data).hexdigest()


async def make_offer(transfer: Endpoint, nbytes: int, seed: int, digest: str = "") -> TensorRef:
    """Offer ``pattern(nbytes, seed)``; only the offer holds the slot afterwards."""
    slot = await transfer.allocate(nbytes)
    content = pattern(nbytes, seed)
    slot.tensor(content.shape, "uint8").copy_(content)
    ref = transfer.offer(slot, digest=digest or f"seed {seed} of {transfer.agent}", shape=content.shape, dtype="uint8")
    slot.release()
    return ref


def state(transfer: Endpoint) -> dict[str, Any]:
    """What is in use at an endpoint."""
    return {
        "used": transfer.arena.used_bytes,
        "quarantined": transfer.arena.quarantined_bytes,
        "offers": sum(map(transfer.offers.count, OfferState)),
        "writing": transfer.offers.writing,
        "waiting": transfer.arena.waiting,
        "ways": sorted(set(transfer.links.ways().values())),
    }


def at_rest(found: dict[str, Any]) -> bool:
    """Whether ``state`` says that nothing is in use."""
    return not any(found[key] for key in ("used", "quarantined", "offers", "writing", "waiting"))


def block(transfer: Endpoint, on: bool) -> None:
    """Have an endpoint's data plane do nothing, or go on: what is written to it over TCP stays in the sockets."""
    lock = transfer.effects.carrier.plane._agent_lock  # type: ignore[union-attr]
    if not on:
        lock.release()
    elif not lock.acquire(timeout=PATIENCE_S):
        raise RuntimeError("the data plane does not let go of its agent")


@contextlib.contextmanager
def blocked(transfer: Endpoint) -> Iterator[None]:
    """``block`` for as long as this lasts, whatever happens meanwhile."""
    block(transfer, True)
    try:
        yield
    finally:
        block(transfer, False)


def arm(transfer: Endpoint, point: str, act: Callable[[], None]) -> None:
    """Have ``act`` called once, at a point of the next transfer.

    ``pull``: a receiver has asked, nothing was done for it; ``posted``: the data plane is in the middle of a move;
    ``sending``, ``receiving``: a link that is there already is in the middle of a tensor;
    ``granted``: this process has sent its own request; ``done``: a receiver has said that it is finished;
    ``arrived``: all bytes are here and nobody was told.
    """
    fired = False

    def once() -> None:
        nonlocal fired
        if not fired:
            fired = True
            act()

    def before(owner: object, name: str, matches: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any) -> Any:
            if matches(*args):
                once()
            return original(*args)

        setattr(owner, name, wrapped)

    if point == "pull":
        before(transfer.links, "dispatch", lambda peer, message: isinstance(message, (Pull, Reading)))
    elif point == "done":
        before(transfer.links, "dispatch", lambda peer, message: isinstance(message, Done))
    elif point == "arrived":
        before(transfer.fetches, "_arrived")
    elif point == "granted":
        send = transfer.effects.send

        def sending(link: Any, message: Any) -> None:
            send(link, message)
            if isinstance(message, (Pull, Reading)):
                # The bytes leave when the loop runs next.
                asyncio.get_running_loop().call_later(0.02, once)

        transfer.effects.send = sending  # type: ignore[method-assign]
    elif point in ("sending", "receiving"):
        links = transfer.links
        for peer in [*links._accepted, *links._dialled.values()]:
            link: Any = peer.link
            name, midst = ("_sent", _sends) if point == "sending" else ("_got", _receives)
            original = getattr(link, name)

            def piece(*args: Any, link: Any = link, original: Any = original, midst: Any = midst) -> None:
                original(*args)
                if midst(link):
                    once()

            setattr(link, name, piece)
    elif point == "posted":
        agent = transfer.effects.carrier.plane._agent  # type: ignore[union-attr]
        post = agent.transfer

        def posting(handle: Any, *args: Any) -> Any:
            result = post(handle, *args)
            if result == "PROC":
                once()
            return result

        agent.transfer = posting
    else:
        raise ValueError(point)


def _sends(link: Any) -> bool:
    return bool(link._unsent) and link._unsent[0].ended is not None and len(link._unsent[0].parts) == 1


def _receives(link: Any) -> bool:
    return link._incoming is not None


class Server:
    """Does what the lines say."""

    def __init__(self) -> None:
        self.transfer: Endpoint
        self.slots: dict[int, Hold] = {}

    async def do_open(self, tls: str = "", netns: str = "", host: str = "127.0.0.1", **config: Any) -> dict[str, Any]:
        os.environ.pop("UCX_TLS", None)
        if tls:
            os.environ["UCX_TLS"] = tls
        if netns:
            enter(netns)
        self.transfer = await open_transfer(TransferConfig(host=host, **config), Clock())
        return {"address": self.transfer.address, "agent": self.transfer.agent}

    async def do_offer(self, nbytes: int, seed: int, digest: str = "", count: int = 1) -> dict[str, Any]:
        refs = [await make_offer(self.transfer, nbytes, seed + i, digest) for i in range(count)]
        return {"refs": msgspec.to_builtins(refs)}

    async def do_fetch(self, ref: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        parsed = msgspec.convert(ref, TensorRef)
        slot = await self.transfer.fetch(parsed, timeout=timeout)
        sum_ = checksum(slot, parsed.nbytes)
        slot.release()
        return {"sum": sum_}

    async def do_arm(self, point: str, number: int) -> dict[str, Any]:
        arm(self.transfer, point, lambda: os.kill(os.getpid(), number))
        return {}

    async def do_jump(self, seconds: float) -> dict[str, Any]:
        jump(self.transfer, seconds)
        return {}

    async def do_block(self, on: bool) -> dict[str, Any]:
        block(self.transfer, on)
        return {}

    async def do_hold(self, nbytes: int) -> dict[str, Any]:
        slot = await self.transfer.allocate(nbytes)
        self.slots[len(self.slots)] = slot
        return {"slot": len(self.slots) - 1}

    async def do_state(self) -> dict[str, Any]:
        return state(self.transfer)

    async def do_cpu(self) -> dict[str, Any]:
        return {"seconds": sum(os.times()[:2]), "rss": _resident()}

    async def do_close(self) -> dict[str, Any]:
        await self.transfer.close()
        return {}

    async def serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        tasks: set[asyncio.Task[None]] = set()

        async def one(request: dict[str, Any]) -> None:
            number, name = request.pop("id"), request.pop("do")
            try:
                answer = await getattr(self, f"do_{name}")(**request)
            except TransferError as error:
                answer = {"reason": error.reason, "error": str(error)}
            except Exception as error:
                answer = {"reason": "", "error": repr(error)}
            writer.write(json.dumps({"id": number, **answer}).encode() + b"\n")

        writer.write(json.dumps({"pid": os.getpid()}).encode() + b"\n")
        while line := await reader.readline():
            task = asyncio.create_task(one(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def enter(netns: str) -> None:
    """Move this thread, and the threads that it will start, to a network namespace."""
    with open(f"/var/run/netns/{netns}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {netns}")


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(path: str) -> None:
    """Fork a child for each connection to ``path`` until the parent has gone."""
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    listener.settimeout(1.0)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            # Stopped or not, it ends with the process that made it.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            listener.close()
            connection.setblocking(False)
            asyncio.run(Server().serve(connection))
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
