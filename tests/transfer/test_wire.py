# SPDX-License-Identifier: Apache-2.0
"""What strangers may send to a real endpoint, and that nobody else is hurt by it."""

from __future__ import annotations

import asyncio
import gc

import pytest
import torch
from msgspec.structs import replace

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.contract.handoff import TensorRef
from dynamo_epd.transfer import Endpoint
from dynamo_epd.transfer.memory import machine_id
from dynamo_epd.transfer.protocol import (
    MAX_FRAME_BYTES,
    PAYLOAD_BYTES,
    AnyMessage,
    Cancel,
    Check,
    Checked,
    Done,
    Ended,
    Framer,
    Hello,
    Message,
    Payload,
    Pull,
    Reading,
    Wire,
    encode,
)

from .child import WIDTH, make_offer, pattern, state
from .conftest import Opened, eventually, rest

KB = 1 << 10


def hello(**change: object) -> Hello:
    fields = {
        "agent": "stranger",
        "machine": machine_id(),
        "pid": 1,
        "fd": 0,
        "kind": "host",
        "device": 0,
        "size": 1 << 20,
        "base": 1 << 40,
        "table_base": 1 << 39,
        "nonce": bytes(16),
        "metadata": b"",
    }
    return Hello(**{**fields, **change})  # type: ignore[arg-type]


class Stranger:
    """A raw connection to an endpoint."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer
        self._framer = Framer()

    @classmethod
    async def connect(cls, address: str, greet: bool = True) -> Stranger:
        host, _, port = address.rpartition(":")
        stranger = cls(*await asyncio.open_connection(host, int(port)))
        if greet:
            stranger.send(hello())
            assert isinstance(await stranger.next(), Hello)
        return stranger

    def send(self, *messages: Message | bytes) -> None:
        for message in messages:
            self.writer.write(message if isinstance(message, bytes) else encode(message))

    async def next(self) -> AnyMessage:
        while (message := self._framer.next()) is None:
            data = await asyncio.wait_for(self.reader.read(1 << 16), 30)
            if not data:
                raise EOFError
            self._framer.feed(data)
        return message

    async def behind(self, count: int) -> bytes:
        """What is behind the last message."""
        while len(data := self._framer.rest(count)) < count:
            self._framer.feed(data + await asyncio.wait_for(self.reader.read(1 << 16), 30))
        return data

    async def ended(self) -> bool:
        """Whether the endpoint closed the connection without another word."""
        try:
            return await self.next() is None
        except (EOFError, ConnectionError):
            return True


async def still_good(sender: Endpoint, receiver: Endpoint) -> None:
    slot = await receiver.fetch(await make_offer(sender, 64 * KB, 9))
    assert torch.equal(slot.tensor((64, WIDTH), "uint8"), pattern(64 * KB, 9))
    slot.release()
    await rest(receiver)
    await rest(sender)


def frame(body: bytes, version: int = 1) -> bytes:
    return (len(body) + 1).to_bytes(4, "little") + bytes((version,)) + body


MALFORMED = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "version": frame(b"\x01", version=2),
    "malformed": frame(b"\xc1"),
    "oversized": (MAX_FRAME_BYTES + 1).to_bytes(4, "little") + b"\x01",
    "no hello": encode(Pull(1, 2, 3, 4, 5, 6)),
    "two hellos": encode(hello()) + encode(hello()),
    "ended": encode(hello()) + encode(Ended(1, "cancelled")),
    "checked": encode(hello()) + encode(Checked(1, b"")),
    "payload": encode(hello()) + encode(Payload(1, 5)) + b"12345",
    "short": encode(hello()) + frame(b"\x92\xa4Pull\x01"),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_what_cannot_be_understood_ends_the_link_and_nothing_else(opened: Opened, data: bytes) -> None:
    sender, receiver = await opened(mode="map"), await opened(mode="map")
    await still_good(sender, receiver)
    stranger = await Stranger.connect(sender.address, greet=False)
    stranger.send(data)
    while not await stranger.ended():
        pass
    await still_good(sender, receiver)


async def test_stale_duplicate_and_reordered_messages(opened: Opened) -> None:
    sender, receiver = await opened(mode="map"), await opened(mode="map")
    stranger = await Stranger.connect(sender.address)
    ref = await make_offer(sender, KB, 1)
    number, generation = ref.offer, ref.generation
    # About offers that were never made, or are another generation's: nothing happens, or it is refused.
    stranger.send(Done(12345, 1), Done(number, generation + 1), Cancel(3))
    assert await stranger.next() == Ended(3, "cancelled")
    stranger.send(Pull(2, number, generation, 0, KB, 0), Pull(3, number, generation, 0, KB, 0))
    stranger.send(Check(1, number, generation + 1, 0, KB))
    # Both pulls are older than what was cancelled.
    assert await stranger.next() == Checked(1, b"")
    stranger.send(Pull(4, number, generation + 1, 0, KB, 0), Pull(5, number + (1 << 24), generation, 0, KB, 0))
    outcomes = [await stranger.next(), await stranger.next()]
    assert [(m.request, m.outcome) for m in outcomes if isinstance(m, Ended)] == [(4, "generation"), (5, "expired")]
    # This endpoint has no data plane to write with.
    stranger.send(Pull(6, number, generation, 0, KB, 0), Wire(1, True))
    assert [await stranger.next(), await stranger.next()] == [
        Ended(6, "cancelled", "cancelled"),
        Wire(1, False, f"{sender.agent} runs without NIXL"),
    ]
    stranger.send(
        Done(number, generation), Done(number, generation), Reading(7, number, generation), Done(number, generation)
    )
    await rest(sender)
    await still_good(sender, receiver)


async def test_bytes_over_the_link_are_those_of_the_offer_and_no_others(opened: Opened) -> None:
    sender = await opened(mode="map")
    stranger = await Stranger.connect(sender.address)
    ref = await make_offer(sender, 4 * KB, 1)
    number, generation = ref.offer, ref.generation
    content = bytes(pattern(4 * KB, 1).numpy())
    refused = [
        Pull(1, number, generation + 1, 0, 4 * KB, None),
        Pull(2, number + (1 << 24), generation, 0, 4 * KB, None),
        Pull(3, number, generation, 1, 4 * KB, None),
        Pull(4, number, generation, 0, PAYLOAD_BYTES + 1, None),
    ]
    stranger.send(*refused)
    answers = [await stranger.next() for _ in refused]
    assert [getattr(answer, "outcome", "") for answer in answers] == ["generation", "expired", "protocol", "protocol"]
    stranger.send(Pull(5, number, generation, KB, 2 * KB, None), Pull(5, number, generation, KB, 2 * KB, None, True))
    assert await stranger.next() == Payload(5, 2 * KB)
    assert await stranger.behind(2 * KB) == content[KB : 3 * KB]
    assert state(sender)["offers"] == 1
    stranger.send(Pull(6, number, generation, 0, 4 * KB, None, True))
    assert await stranger.next() == Payload(6, 4 * KB)
    assert await stranger.behind(4 * KB) == content
    await rest(sender)
    stranger.send(Pull(7, number, generation, 0, 4 * KB, None))
    answer = await stranger.next()
    assert isinstance(answer, Ended) and answer.outcome == "expired"
    stranger.writer.close()


async def test_a_stranger_that_does_not_even_read_refusals_loses_its_link(opened: Opened) -> None:
    """Also where the refusal is told later, about bytes that were cancelled before they were sent."""
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    sender = await opened(mode="map")
    stranger = await Stranger.connect(sender.address)
    refs = [await make_offer(sender, PAYLOAD_BYTES, seed) for seed in range(3)]
    for request, ref in enumerate(refs):
        stranger.send(Pull(request, ref.offer, ref.generation, 0, PAYLOAD_BYTES, None))
    await eventually(lambda: sender.offers.writing == 3)
    (peer,) = sender.links._accepted
    with pytest.raises(TransferError):
        while True:
            peer.link.send(Done(1 << 40, 1 << 40))
    stranger.send(Cancel(1), Cancel(2))
    await eventually(lambda: not sender.links._accepted)
    assert not faults
    await rest(sender)
    stranger.writer.close()


async def test_ten_thousand_messages_about_nothing_leave_nothing(opened: Opened) -> None:
    """Of each kind, about offers that are unknown, have ended, or are another peer's: nothing is kept or driven."""
    sender, receiver = await opened(mode="write", tls="tcp", timeout=60.0), await opened(mode="write", tls="tcp")
    await still_good(sender, receiver)
    plane = sender.effects.carrier.plane
    stranger, owner = await Stranger.connect(sender.address), await Stranger.connect(sender.address)
    ended, held = await make_offer(sender, KB, 1), await make_offer(sender, KB, 2)
    sender.withdraw(ended)
    owner.send(Check(1, held.offer, held.generation, 0, KB), Reading(2, held.offer, held.generation))
    assert isinstance(await owner.next(), Checked)
    await eventually(lambda: plane._expected == 1)  # type: ignore[union-attr]
    gc.collect()
    before = len(gc.get_objects())
    for turn in range(0, 3400, 100):
        for request in range(turn, turn + 100):
            for number, generation in ((1 << 40, 1), (ended.offer, ended.generation), (held.offer, held.generation)):
                target = None if request % 2 else 0
                stranger.send(Reading(request, number, generation), Pull(request, number, generation, 0, 1, target))
                stranger.send(Check(request, number, generation, 0, 1), Done(number, generation), Cancel(request))
        # A pull whose number was used or cancelled is a duplicate, which is not answered.
        for _ in range(100 * (3 * 3 + 1)):
            assert isinstance(await stranger.next(), (Ended, Checked))
        stranger.send(Wire(turn, True))  # what it sent as its metadata is none
        answer = await stranger.next()
        assert isinstance(answer, Wire) and answer.error
    assert state(sender)["offers"] == 1 and plane._expected == 1  # type: ignore[union-attr]
    gc.collect()
    assert len(gc.get_objects()) < before + 500
    owner.send(Done(held.offer, held.generation))
    stranger.writer.close()
    owner.writer.close()
    await rest(sender)
    await eventually(lambda: not plane._busy)  # type: ignore[union-attr]
    await still_good(sender, receiver)


async def test_progress_that_was_asked_for_ends_by_itself(opened: Opened) -> None:
    """A peer may ask for it while it connects; not for longer than that may take."""
    sender, other = await opened(mode="write", tls="tcp", timeout=0.3), await opened(mode="write", tls="tcp")
    plane, (peer, *_) = sender.effects.carrier.plane, [await Stranger.connect(sender.address, greet=False)]
    peer.send(other.links._hello)
    assert isinstance(await peer.next(), Hello)
    for request in range(1000):
        peer.send(Wire(request, bool((request + 1) % 3)))
        assert replace(await peer.next(), driven=0) == Wire(request, bool((request + 1) % 3))
    await eventually(lambda: not plane._busy)  # type: ignore[union-attr]
    peer.send(Wire(1000, True))
    assert replace(await peer.next(), driven=0) == Wire(1000, True)
    assert plane._expected == 1  # type: ignore[union-attr]
    await eventually(lambda: not plane._busy)  # type: ignore[union-attr]
    peer.writer.close()
    await rest(sender)


async def test_who_comes_late_to_a_dial_that_fails_is_not_failed_by_it(opened: Opened) -> None:
    sender, receiver = await opened(mode="map"), await opened(mode="map", timeout=0.5)
    silent = True
    host, _, port = sender.address.rpartition(":")

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What stands between the two: says nothing at first, then passes everything on."""
        if silent:
            await reader.read()
            writer.close()
            return
        there, out = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_pass_on(reader, out), _pass_on(there, writer))

    server = await asyncio.start_server(forward, host, 0)
    address = f"{host}:{server.sockets[0].getsockname()[1]}"

    async def fetch(seed: int) -> str:
        ref = await make_offer(sender, 64 * KB, seed)
        try:
            slot = await receiver.fetch(
                TensorRef(address, ref.agent, ref.offer, ref.generation, ref.digest, ref.shape, ref.dtype), timeout=60.0
            )
        except TransferError as error:
            return error.reason
        assert torch.equal(slot.tensor((64, WIDTH), "uint8"), pattern(64 * KB, seed))
        slot.release()
        return "ok"

    first = asyncio.create_task(fetch(1))
    await eventually(lambda: receiver.links._dialling)
    await asyncio.sleep(0)
    second = asyncio.create_task(fetch(2))
    await eventually(lambda: len(receiver.links._wanting[address]) == 2)
    silent = False
    assert (await first, await second) == ("timeout", "ok")
    server.close()
    await rest(receiver)


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
    target.close()


async def test_a_stranger_that_leaves_takes_its_offers_with_it(opened: Opened) -> None:
    sender, receiver = await opened(mode="map"), await opened(mode="map")
    stranger = await Stranger.connect(sender.address)
    ref = await make_offer(sender, KB, 1)
    stranger.send(Reading(1, ref.offer, ref.generation), Check(1, ref.offer, ref.generation, 0, KB))
    assert isinstance(await stranger.next(), Checked)
    stranger.writer.close()
    await still_good(sender, receiver)


async def test_a_stranger_that_says_nothing_is_shown_out(opened: Opened) -> None:
    sender = await opened(mode="map", timeout=0.1)
    stranger = await Stranger.connect(sender.address, greet=False)
    assert await stranger.ended()


class Impostor:
    """Listens, and answers every connection with what it was told to."""

    def __init__(self, *answers: Message | bytes):
        self.answers = answers

    async def __aenter__(self) -> Impostor:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        for answer in self.answers:
            writer.write(answer if isinstance(answer, bytes) else encode(answer))
        while await reader.read(1 << 16):
            pass
        writer.close()

    def ref(self, agent: str = "stranger") -> TensorRef:
        return TensorRef(self.address, agent, 1 << 24, 1, "digest", (4, KB), "uint8")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((), "timeout"),
        ((b"220 smtp ready\r\n",), "protocol"),
        ((frame(b"x", version=7),), "protocol"),
        ((Done(1, 2),), "protocol"),
        ((hello(), Pull(1, 2, 3, 4, 5, 6)), "protocol"),
        ((hello(machine="elsewhere"),), "protocol"),
        ((hello(pid=1 << 40),), "protocol"),
        ((hello(agent="another", machine="elsewhere"),), "protocol"),
    ],
)
async def test_an_impostor_gives_a_typed_error(
    opened: Opened, answers: tuple[Message | bytes, ...], reason: str
) -> None:
    receiver = await opened(mode="map", timeout=0.5)
    async with Impostor(*answers) as impostor:
        with pytest.raises(TransferError) as caught:
            await receiver.fetch(impostor.ref(), timeout=5.0)
        assert caught.value.reason == reason
        await rest(receiver)


async def test_metadata_that_is_not_nixls(opened: Opened) -> None:
    receiver = await opened(mode="write", timeout=2.0)
    async with Impostor(hello(metadata=b"no metadata")) as impostor:
        with pytest.raises(TransferError, match="cannot connect the data plane") as caught:
            await receiver.fetch(impostor.ref())
        assert caught.value.reason == "peer_lost"
    await rest(receiver)


async def test_another_agents_metadata(opened: Opened) -> None:
    receiver, other = await opened(mode="write", timeout=2.0), await opened(mode="write")
    stolen = other.links._hello.metadata
    async with Impostor(hello(metadata=stolen)) as impostor:
        with pytest.raises(TransferError, match="came from") as caught:
            await receiver.fetch(impostor.ref())
        assert caught.value.reason == "peer_lost"
    await still_good(other, receiver)
