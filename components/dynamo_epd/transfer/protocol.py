# SPDX-License-Identifier: Apache-2.0
"""What two transfer endpoints say to each other: one stream of framed, versioned msgpack messages per pair.

The process that fetches dials the one that offers. Both begin with ``Hello``. A frame is a little-endian uint32
length (of what follows it), one byte ``PROTOCOL_VERSION``, and one message. Behind a ``Payload`` come the bytes that it
announces, then the next frame. Anything else ends the connection.

Every ``Pull`` has exactly one last word: the note that comes with its bytes over the data plane, a ``Payload``, or an
``Ended``. After that the offering side will never write for it again. A granted slot may be used for something else
only then, or when the peer is known to be dead. What comes behind a ``Payload`` is put into the slot by the fetching
side itself, which may use the slot for something else whenever it no longer does so.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..contract.errors import TransferError
from .config import GRANULE, MAX_ARENA_BYTES
from .memory import NONCE_BYTES

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
PAYLOAD_BYTES = 8 << 20
"""Most bytes behind a ``Payload``: they go through the event loops of both sides, and messages wait behind them."""
_PREFIX_BYTES = 5

Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """Who speaks, and where its arena is. The first message in each direction.

    Attributes:
        agent: unique name of this process's transfer agent.
        machine: ``memory.machine_id()``.
        pid, fd: process and file descriptor of the host region.
        kind, device: memory of the payload, as in ``TransferConfig``.
        size: payload bytes.
        base: address of the payload.
        table_base: address of the header, with the generation table behind it.
        nonce: what stands in the header.
        metadata: NIXL metadata of the agent; empty where it has none.
    """

    agent: Name
    machine: Name
    pid: Count
    fd: Count
    kind: Literal["host", "cuda"]
    device: Count
    size: Annotated[int, msgspec.Meta(ge=GRANULE, le=MAX_ARENA_BYTES, multiple_of=GRANULE)]
    base: Count
    table_base: Count
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    metadata: bytes


class Wire(Message, frozen=True):
    """Fetcher: keep the data plane moving for me (``on``) or do not; the same message comes back when that is so.

    Attributes:
        request: number to tell the answers apart.
        error: in an answer: why the data plane cannot serve the fetcher; empty otherwise.
        driven: in an answer: ``DataPlane.driven``.
    """

    request: Count
    on: bool
    error: Text = ""
    driven: Count = 0


class Reading(Message, frozen=True):
    """Fetcher: I am reading this offer; ``Done`` ends it. Answered only by ``Ended``, where it cannot be read.

    Attributes:
        request: as in ``Pull``.
    """

    request: Count
    offer: Count
    generation: Count


class Pull(Message, frozen=True):
    """Fetcher: write bytes ``[skip, skip + nbytes)`` of the offered tensor into my slot, or send me them.

    Attributes:
        request: number of this pull, never used again by the fetcher.
        target: byte offset of the slot in the fetcher's arena; None: send them behind a ``Payload``.
        last: the offer is over once all bytes are sent, without another word.
    """

    request: Count
    offer: Count
    generation: Count
    skip: Count
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_ARENA_BYTES)]
    target: Count | None
    last: bool = False


class Payload(Message, frozen=True):
    """Offerer: the bytes of a pull, ``nbytes`` of them, right behind this message."""

    request: Count
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=PAYLOAD_BYTES)]


class Cancel(Message, frozen=True):
    """Fetcher: I no longer want this pull; ``Ended`` comes as soon as nothing will be written for it."""

    request: Count


Outcome = Literal["cancelled", "failed", "expired", "generation", "protocol"]


class Ended(Message, frozen=True):
    """Offerer: the last word on a ``Pull`` whose bytes do not come, or on a ``Reading``.

    Attributes:
        outcome: ``failed``: the data plane gave up and bytes may still be on their way; else why nothing was or will
            be written.
        detail: for people.
    """

    request: Count
    outcome: Outcome
    detail: Text = ""


class Check(Message, frozen=True):
    """Fetcher: what is the checksum of these bytes of the offered tensor?"""

    request: Count
    offer: Count
    generation: Count
    skip: Count
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_ARENA_BYTES)]


class Checked(Message, frozen=True):
    """Offerer: BLAKE3 of the bytes, or empty when the offer has ended."""

    request: Count
    checksum: Annotated[bytes, msgspec.Meta(max_length=32)]


class Done(Message, frozen=True):
    """Fetcher: I have the tensor or do not want it. The offer is over."""

    offer: Count
    generation: Count


AnyMessage = Hello | Wire | Reading | Pull | Payload | Cancel | Ended | Check | Checked | Done

_NOTE_BYTES = 8


def note(request: int) -> bytes:
    """What the data plane carries with the bytes of a pull."""
    return request.to_bytes(_NOTE_BYTES, "little")


def noted(data: bytes) -> int | None:
    """The request of a note, or None for what is none."""
    return int.from_bytes(data, "little") if len(data) == _NOTE_BYTES else None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """``message`` as one frame."""
    body = _encoder.encode(message)
    return (len(body) + 1).to_bytes(4, "little") + bytes((PROTOCOL_VERSION,)) + body


class Framer:
    """Cuts what arrives into messages, and gives what came behind one as it is; holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        """More has arrived. What ``next`` and ``rest`` do not take stays."""
        self._buffer += data

    def next(self) -> AnyMessage | None:
        """The next message, or None where it has not come whole.

        Raises:
            TransferError: ``protocol``; the stream cannot be used any further.
        """
        buffer = self._buffer
        if len(buffer) < _PREFIX_BYTES:
            return None
        length = int.from_bytes(buffer[:4], "little")
        if not 1 < length <= MAX_FRAME_BYTES:
            raise TransferError("protocol", f"frame of {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
        version = buffer[4]
        if version != PROTOCOL_VERSION:
            raise TransferError(
                "protocol",
                f"transfer protocol version {version}, this worker speaks {PROTOCOL_VERSION}: run the same "
                "dynamo-epd release on all workers",
            )
        if len(buffer) < 4 + length:
            return None
        try:
            message = _decoder.decode(buffer[_PREFIX_BYTES : 4 + length])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter from msgspec before 0.23
            raise TransferError("protocol", f"malformed transfer message: {error}") from error
        del buffer[: 4 + length]
        return message

    def rest(self, most: int) -> bytes:
        """Up to ``most`` of the bytes behind the last message, as far as they have arrived."""
        data = bytes(self._buffer[:most])
        del self._buffer[: len(data)]
        return data
