# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.transfer import protocol
from dynamo_epd.transfer.config import GRANULE, MAX_ARENA_BYTES
from dynamo_epd.transfer.protocol import (
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

HELLO = Hello("a-1", "machine", 1, 2, "host", 0, 4 * GRANULE, 1 << 40, 1 << 39, bytes(16), b"metadata")
MESSAGES: list[Message] = [
    HELLO,
    Wire(1, True),
    Wire(1, False, "no"),
    Reading(4, 5, 6),
    Pull(1, 2, 3, 4, 5, 6),
    Pull(1, 2, 3, 4, 5, None, True),
    Payload(1, 7),
    Cancel(1),
    Ended(1, "cancelled"),
    Ended(2, "failed", "why"),
    Check(1, 2, 3, 4, 5),
    Checked(1, bytes(32)),
    Done(1, 2),
]


def cut(framer: Framer, data: bytes) -> list[Message]:
    """The messages that ``data`` completes."""
    framer.feed(data)
    messages: list[Message] = []
    while (message := framer.next()) is not None:
        messages.append(message)
    return messages


def test_round_trip_in_any_pieces() -> None:
    stream = b"".join(map(encode, MESSAGES))
    for step in (1, 2, 3, 7, 50, len(stream)):
        framer, got = Framer(), []
        for start in range(0, len(stream), step):
            got += cut(framer, stream[start : start + step])
        assert got == MESSAGES


def test_bytes_behind_a_message_are_no_message() -> None:
    framer = Framer()
    framer.feed(encode(Payload(1, 7)) + encode(Done(1, 2))[:5])
    assert framer.next() == Payload(1, 7)
    assert framer.rest(3) == encode(Done(1, 2))[:3] and framer.rest(9) == encode(Done(1, 2))[3:5]
    assert framer.rest(9) == b"" and cut(framer, encode(Cancel(3))) == [Cancel(3)]


def refused(data: bytes) -> str:
    with pytest.raises(TransferError) as caught:
        cut(Framer(), data)
    assert caught.value.reason == "protocol"
    return str(caught.value)


def frame(body: bytes, version: int = protocol.PROTOCOL_VERSION) -> bytes:
    return (len(body) + 1).to_bytes(4, "little") + bytes((version,)) + body


def test_unknown_version_says_what_to_do() -> None:
    assert "version 9, this worker speaks 1: run the same" in refused(frame(b"anything", version=9))


def test_oversized_frame_is_refused_before_it_has_come() -> None:
    assert "frame of 1048577 bytes" in refused((protocol.MAX_FRAME_BYTES + 1).to_bytes(4, "little") + b"\x01")
    refused(bytes(5))
    assert cut(Framer(), protocol.MAX_FRAME_BYTES.to_bytes(4, "little") + b"\x01") == []


@pytest.mark.parametrize(
    "body",
    [
        ["Pull", 1, 2, 3, 4, 5],
        ["Pull", 1, 2, 3, 4, 5, 6, True, 7],
        ["Pull", -1, 2, 3, 4, 5, 6],
        ["Pull", 1, 2, 3, 4, 0, 6],
        ["Pull", 1, 2, 3, 4, MAX_ARENA_BYTES + 1, 6],
        ["Pull", "1", 2, 3, 4, 5, 6],
        ["Pull", 1.5, 2, 3, 4, 5, 6],
        ["Pull", 1, 2, 3, 4, 5, None, 1],
        ["Pull", 1, 2, 3, 4, 5, -1],
        ["Payload", 1, 0],
        ["Payload", 1, protocol.PAYLOAD_BYTES + 1],
        ["Push", 1],
        ["Ended", 1, "well", ""],
        ["Done", None, 1],
        ["Checked", 1, bytes(33)],
        ["Hello", "", "m", 1, 2, "host", 0, GRANULE, 0, 0, bytes(16), b""],
        ["Hello", "a", "m", 1, 2, "disk", 0, GRANULE, 0, 0, bytes(16), b""],
        ["Hello", "a", "m", 1, 2, "host", 0, GRANULE + 1, 0, 0, bytes(16), b""],
        ["Hello", "a", "m", 1, 2, "host", 0, 2 * MAX_ARENA_BYTES, 0, 0, bytes(16), b""],
        ["Hello", "a", "m", 1, 2, "host", 0, GRANULE, 0, 0, bytes(15), b""],
        {"type": "Done", "offer": 1, "generation": 2},
        [],
        7,
    ],
)
def test_malformed_messages(body: object) -> None:
    assert "malformed" in refused(frame(msgspec.msgpack.encode(body)))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_noise_never_gives_anything_but_a_protocol_error(data: bytes) -> None:
    try:
        for message in cut(Framer(), data):
            assert isinstance(message, Message)
    except TransferError as error:
        assert error.reason == "protocol"


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(MESSAGES), st.integers(0, 500), st.integers(0, 255))
def test_a_flipped_byte_never_gives_anything_but_a_message_or_a_protocol_error(
    message: Message, place: int, value: int
) -> None:
    data = bytearray(encode(message))
    data[place % len(data)] = value
    try:
        cut(Framer(), bytes(data))
    except TransferError as error:
        assert error.reason == "protocol"


def test_the_framer_keeps_no_more_than_one_frame() -> None:
    framer = Framer()
    for _ in range(1000):
        assert cut(framer, encode(Done(1, 2)) * 3) == [Done(1, 2)] * 3
    assert cut(framer, encode(HELLO)[:-1]) == []
    assert len(framer._buffer) == len(encode(HELLO)) - 1


def test_notes() -> None:
    for request in (0, 1, 1 << 63):
        assert protocol.noted(protocol.note(request)) == request
    assert protocol.noted(b"") is None and protocol.noted(b"123456789") is None
