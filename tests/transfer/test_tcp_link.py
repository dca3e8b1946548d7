# SPDX-License-Identifier: Apache-2.0
"""Links over real sockets: messages and the bytes behind them, in pieces, cancelled, cut off and not read."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import uvloop

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.transfer import tcp_link
from dynamo_epd.transfer.control import Incoming, Link
from dynamo_epd.transfer.protocol import AnyMessage, Done, Payload, encode
from dynamo_epd.transfer.tcp_link import MAX_UNSENT_BYTES, Listener, TcpLink, dial, listen

from .conftest import eventually

KB, MB = 1 << 10, 1 << 20


class Handler:
    """Keeps what it is told; puts the bytes behind each ``Payload`` into memory of its own."""

    def __init__(self, on: Callable[[Handler, AnyMessage], None] | None = None):
        self.link: TcpLink
        self.messages: list[AnyMessage] = []
        self.memory: dict[int, bytearray] = {}
        self.incoming: dict[int, Incoming] = {}
        self.arrived: list[int] = []
        self.faults: list[TransferError] = []
        self.losses: list[tuple[str, bool]] = []
        self._on = on

    def connected(self, link: Link) -> None:
        assert isinstance(link, TcpLink)
        self.link = link

    def received(self, link: Link, message: AnyMessage) -> None:
        self.messages.append(message)
        if isinstance(message, Payload):
            memory = self.memory[message.request] = bytearray(message.nbytes)
            arrived = partial(self.arrived.append, message.request)
            self.incoming[message.request] = link.receive(message.nbytes, memoryview(memory), arrived)
        if self._on is not None:
            self._on(self, message)

    def faulted(self, link: Link, error: TransferError) -> None:
        self.faults.append(error)

    def lost(self, link: Link, error: TransferError, dead: bool) -> None:
        self.losses.append((str(error), dead))


def connected(handler: Handler) -> socket.socket:
    """A link for ``handler``, and the other end of it."""
    here, there = socket.socketpair()
    # A Unix socket, which has no TCP options to set.
    wrapped = _Plain(here.detach())
    TcpLink(handler, wrapped)
    there.setblocking(False)
    return there


class _Plain(socket.socket):
    def __init__(self, fd: int):
        super().__init__(fileno=fd)

    def setsockopt(self, level: int, *args: object) -> None:  # type: ignore[override]
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *args)  # type: ignore[arg-type]


def some(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


async def drained(there: socket.socket, nbytes: int) -> bytes:
    """What arrives at a bare socket."""
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < nbytes:
        data += await asyncio.wait_for(loop.sock_recv(there, 1 << 16), 30)
    return bytes(data)


@pytest.mark.parametrize("seed", range(6))
async def test_messages_and_the_bytes_behind_them_in_any_pieces(seed: int) -> None:
    handler, choose = Handler(), random.Random(seed)
    there = connected(handler)
    sizes = [1, 100, 16 * KB - 7, 16 * KB, 70 * KB, 300 * KB]
    choose.shuffle(sizes)
    stream, expected = b"", []
    for number, nbytes in enumerate(sizes):
        expected += [Payload(number, nbytes), Done(number, nbytes)]
        stream += encode(expected[-2]) + some(nbytes, number) + encode(expected[-1])
    while stream:
        count = choose.choice((1, 20, 1000, 60 * KB))
        await asyncio.get_running_loop().sock_sendall(there, stream[:count])
        stream = stream[count:]
        if choose.random() < 0.3:
            await asyncio.sleep(0)
    await eventually(lambda: len(handler.messages) == len(expected))
    assert handler.messages == expected and handler.arrived == list(range(len(sizes)))
    assert all(handler.memory[number] == some(nbytes, number) for number, nbytes in enumerate(sizes))
    there.close()
    await eventually(lambda: handler.losses)
    assert handler.losses == [("the connection to the peer ended", True)]


async def both_ways() -> None:
    """Over TCP, 20 payloads each way, some larger than the sockets' buffers."""
    serving = Handler()
    listener, address = await listen("127.0.0.1", 0, lambda: serving)
    dialling = Handler()
    await dial(address, dialling)
    await eventually(lambda: hasattr(serving, "link"))
    ended: list[str] = []
    sizes = [8 * MB if number % 10 == 9 else MB >> number % 4 for number in range(20)]
    for number, nbytes in enumerate(sizes):
        for seed, handler in enumerate((serving, dialling)):
            content = memoryview(some(nbytes, 100 * seed + number))
            handler.link.send_bytes(Payload(number, nbytes), content, ended.append)
            handler.link.send(Done(number, seed))
    await eventually(lambda: len(serving.messages) == len(dialling.messages) == 2 * len(sizes))
    for seed, handler in enumerate((dialling, serving)):
        assert handler.arrived == list(range(len(sizes)))
        assert all(handler.memory[number] == some(nbytes, 100 * seed + number) for number, nbytes in enumerate(sizes))
    await eventually(lambda: len(ended) == 2 * len(sizes))
    assert set(ended) == {""}
    dialling.link.close()
    dialling.link.close()
    await eventually(lambda: serving.losses and dialling.losses)
    assert serving.losses[0][1] and not dialling.losses[0][1]
    listener.close()


async def test_both_ways_over_tcp() -> None:
    await both_ways()


def test_both_ways_on_the_loop_that_dynamo_runs() -> None:
    uvloop.run(both_ways())


async def test_memory_is_in_use_until_the_kernel_has_it() -> None:
    handler, ended = Handler(), list[str]()
    there = connected(handler)
    content = bytearray(some(8 * MB, 1))
    handler.link.send_bytes(Payload(1, len(content)), memoryview(content), ended.append)
    handler.link.send(Done(1, 1))
    await asyncio.sleep(0.05)
    assert not ended
    header = encode(Payload(1, len(content)))
    data = await drained(there, len(header) + len(content) + len(encode(Done(1, 1))))
    assert data == header + content + encode(Done(1, 1))
    await eventually(lambda: ended)
    assert ended == [""]
    handler.link.close()


async def test_what_has_not_begun_can_be_cancelled_and_nothing_else() -> None:
    handler, ended = Handler(), dict[int, str]()
    there = connected(handler)
    sizes = {1: 4 * MB, 2: 100, 3: 200}
    cancels = [
        handler.link.send_bytes(Payload(n, size), memoryview(some(size, n)), partial(ended.__setitem__, n))
        for n, size in sizes.items()
    ]
    for cancel in cancels[:2]:
        cancel()
        cancel()
    await asyncio.sleep(0)
    assert ended == {2: "cancelled"}
    expected = b"".join(encode(Payload(n, sizes[n])) + some(sizes[n], n) for n in (1, 3))
    assert await drained(there, len(expected)) == expected
    await eventually(lambda: len(ended) == 3)
    for cancel in cancels:
        cancel()
    await asyncio.sleep(0)
    assert ended == {1: "", 2: "cancelled", 3: ""}
    handler.link.close()


@pytest.mark.parametrize("who", ["this side", "the peer"])
async def test_the_end_of_a_link_ends_what_was_under_way(who: str) -> None:
    handler, ended = Handler(), list[str]()
    there = connected(handler)
    await asyncio.get_running_loop().sock_sendall(there, encode(Payload(9, 1000)) + b"some of it")
    await eventually(lambda: handler.incoming)
    for number in range(3):
        handler.link.send_bytes(Payload(number, 4 * MB), memoryview(bytes(4 * MB)), ended.append)
    if who == "the peer":
        there.close()
    else:
        handler.link.close()
    await eventually(lambda: handler.losses)
    assert ended == ["the connection to the peer ended"] * 3 and not handler.arrived
    assert len(handler.losses) == 1 and handler.losses[0][1] == (who == "the peer")
    handler.link.send(Done(1, 1))
    handler.link.send_bytes(Payload(1, 1), memoryview(b"x"), ended.append)
    await asyncio.sleep(0)
    assert ended[3:] == ["the link is closed"] and len(handler.losses) == 1


@pytest.mark.parametrize("before", [0, 5000])
async def test_bytes_that_nobody_wants_any_more_go_nowhere(before: int) -> None:
    handler = Handler()
    there, loop = connected(handler), asyncio.get_running_loop()
    content = some(300 * KB, 1)
    await loop.sock_sendall(there, encode(Payload(1, len(content))) + content[:before])
    await eventually(lambda: handler.incoming and len(content) - handler.incoming[1].left == before)
    handler.incoming[1].drop()
    await loop.sock_sendall(there, content[before:] + encode(Done(1, 1)) + encode(Payload(2, 3)) + b"abc")
    await eventually(lambda: handler.arrived)
    assert handler.arrived == [2] and handler.memory[2] == b"abc"
    assert handler.memory[1][:before] == content[:before] and not any(handler.memory[1][before:])
    assert handler.messages == [Payload(1, len(content)), Done(1, 1), Payload(2, 3)]
    handler.link.close()


@pytest.mark.parametrize("direction", ["in", "out"])
async def test_the_loop_stays_awake_while_a_tensor_moves_and_for_a_moment_after(
    monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    now = 100.0
    monkeypatch.setattr(tcp_link, "time", SimpleNamespace(monotonic=lambda: now))
    handler, ended = Handler(), list[str]()
    there, loop = connected(handler), asyncio.get_running_loop()
    link = handler.link
    header, content = encode(Payload(1, 8 * MB)), bytes(8 * MB)
    await loop.sock_sendall(there, encode(Done(1, 1)))
    await eventually(lambda: handler.messages)
    link.send(Done(1, 1))
    assert await drained(there, len(encode(Done(1, 1)))) and not link._looking  # a message alone is no reason
    if direction == "in":
        await loop.sock_sendall(there, header + content[: 4 * MB])
        await eventually(lambda: handler.incoming and handler.incoming[1].left == 4 * MB)
    else:
        link.send_bytes(Payload(1, 8 * MB), memoryview(content), ended.append)
    for _ in range(100):
        await asyncio.sleep(0)
        assert link._looking
    now += tcp_link._FLOW_S
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not link._looking  # nothing has moved for a while
    if direction == "in":
        await loop.sock_sendall(there, content[4 * MB :])
        await eventually(lambda: handler.arrived)
    else:
        await drained(there, len(header) + 8 * MB)
        await eventually(lambda: ended)
    await asyncio.sleep(0)
    assert not link._looking
    link.close()


async def test_a_peer_that_does_not_read_gets_no_more_messages_for_its_tensors() -> None:
    """What is behind messages does not count: it waits in memory that is bounded otherwise."""
    handler = Handler()
    there = connected(handler)
    handler.link.send_bytes(Payload(1, 8 * MB), memoryview(bytes(8 * MB)), lambda error: None)
    message, sent = Done(1 << 40, 1 << 40), 0
    with pytest.raises(TransferError, match="does not read") as caught:
        for _ in range(MAX_UNSENT_BYTES):
            handler.link.send(message)
            sent += len(encode(message))
    assert caught.value.reason == "peer_lost" and sent > MAX_UNSENT_BYTES
    handler.link.close()
    there.close()


async def test_a_flood_of_messages_leaves_the_loop_to_others_between(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, turns = Handler(), list[int]()
    there, loop = connected(handler), asyncio.get_running_loop()
    await loop.sock_sendall(there, encode(Done(1, 1)) * 10_000)
    while len(handler.messages) < 10_000:
        before = len(handler.messages)
        await asyncio.sleep(0)
        turns.append(len(handler.messages) - before)
    assert max(turns) <= tcp_link._SCRATCH_BYTES // len(encode(Done(1, 1))) + 1
    handler.link.close()


async def test_what_cannot_be_understood_is_told_once_and_the_rest_is_not_read() -> None:
    handler = Handler()
    there, loop = connected(handler), asyncio.get_running_loop()
    await loop.sock_sendall(there, encode(Done(1, 1)) + b"\x05\0\0\0\x09abcd" + encode(Done(2, 2)))
    await eventually(lambda: handler.faults)
    await loop.sock_sendall(there, encode(Done(3, 3)))
    there.close()
    await eventually(lambda: handler.losses)
    assert handler.messages == [Done(1, 1)] and len(handler.faults) == 1
    assert "version 9" in handler.losses[0][0]


async def test_a_handler_that_refuses_what_is_behind_a_message() -> None:
    def refuse(handler: Handler, message: AnyMessage) -> None:
        if isinstance(message, Payload):
            raise TransferError("protocol", "nobody asked for that")

    handler = Handler(refuse)
    there = connected(handler)
    await asyncio.get_running_loop().sock_sendall(there, encode(Payload(1, 100)) + bytes(100) + encode(Done(1, 1)))
    await eventually(lambda: handler.faults)
    await asyncio.sleep(0)
    assert handler.messages == [Payload(1, 100)] and not handler.arrived
    handler.link.close()


async def test_a_handler_that_closes_the_link_hears_no_more_of_it() -> None:
    handler = Handler(lambda handler, message: handler.link.close())
    there = connected(handler)
    await asyncio.get_running_loop().sock_sendall(there, encode(Done(1, 1)) + encode(Done(2, 2)))
    await eventually(lambda: handler.losses)
    assert handler.messages == [Done(1, 1)] and handler.losses == [("the connection to the peer ended", False)]


async def test_a_handler_with_a_fault_of_its_own_costs_the_link_and_is_reported() -> None:
    def fail(handler: Handler, message: AnyMessage) -> None:
        raise KeyError("a fault")

    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    handler = Handler(fail)
    there = connected(handler)
    await asyncio.get_running_loop().sock_sendall(there, encode(Done(1, 1)))
    await eventually(lambda: handler.losses)
    assert [type(context["exception"]) for context in reported] == [KeyError]
    assert handler.losses == [("the connection to the peer ended: 'a fault'", False)]


async def test_an_endpoint_out_of_file_descriptors_accepts_again_when_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_link, "_ACCEPT_PAUSE_S", 0.01)

    class Short(socket.socket):
        left = 3

        def accept(self) -> tuple[socket.socket, object]:
            if Short.left:
                Short.left -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    handler, other = Handler(), Handler()
    listener = Listener(Short(fileno=socket.create_server(("127.0.0.1", 0)).detach()), lambda: handler)
    await dial(f"127.0.0.1:{listener.port}", other)
    await eventually(lambda: hasattr(handler, "link"))
    assert not Short.left
    listener.close()
    for each in (handler, other):
        each.link.close()


async def test_an_endpoint_is_dialled_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, other = Handler(), Handler()
    listener, address = await listen("127.0.0.1", 0, lambda: handler)
    nobody = socket.create_server(("127.0.0.1", 0))
    closed = nobody.getsockname()
    nobody.close()

    async def found(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert host == "worker.example"
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*kind, closed), (*kind, ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    link = await dial(f"worker.example:{listener.port}", other)
    await eventually(lambda: hasattr(handler, "link"))
    link.close()
    listener.close()
    with pytest.raises(TransferError, match=f"no transfer endpoint at worker.example:{listener.port}") as caught:
        await dial(f"worker.example:{listener.port}", Handler())
    assert caught.value.reason == "peer_lost"


@pytest.mark.parametrize("address", ["", "host", "host:", "host:0", "host:65536", "host:port", f"{'a' * 70}.b:1"])
async def test_what_is_no_address(address: str) -> None:
    with pytest.raises(TransferError) as caught:
        await dial(address, Handler())
    assert caught.value.reason == "protocol"
