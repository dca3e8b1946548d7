# SPDX-License-Identifier: Apache-2.0
"""The two ends of each way that ``bench transfer`` measures, and the process that runs one of them.

``python -m dynamo_epd.bench.transfer_ways encode WAY`` listens and prints its port; ``... prefill WAY PORT`` connects
to it, takes ``{"bytes", "count", "warmup", "concurrency"}`` lines on its standard input and answers with times.
Both clocks are the machine's monotonic clock, so that a time begins in one process and ends in the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TextIO, cast

import msgspec
import torch
import uvloop

MAX_BYTES = 64 << 20
_WIDTH = 1024
_LENGTH_BYTES = 4
_WARMUP_S = 0.1
"""At least. Processes that were just continued share a core for the first 50 ms."""

Message = dict[str, Any]


class Channel(asyncio.Protocol):
    """Framed msgpack messages in both directions over one socket: the request plane of the measurement."""

    def __init__(self, received: Callable[[Channel, Message], None]):
        self._received = received
        self._buffer = bytearray()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        # The other process, or the one that started both, is gone.
        asyncio.get_running_loop().stop()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            self._received(self, msgspec.msgpack.decode(body))

    def send(self, message: Message) -> None:
        body = msgspec.msgpack.encode(message)
        self.transport.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)


class Way:
    """One way of moving an embedding; each process uses one half of it.

    ``tensor`` gives the memory that the encoder writes its output to, before the clock starts. ``send`` gives what the
    receiver must be told, and what to wait for before the memory may be used again; ``receive`` gives the tensor and
    how to give it back.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[torch.Tensor]] = {}

    async def open(self, role: str) -> None:
        """Set up this process's half."""

    async def tensor(self, shape: tuple[int, int]) -> torch.Tensor:
        idle = self._idle.setdefault(shape[0] * shape[1], [])
        return idle.pop() if idle else torch.zeros(shape, dtype=torch.bfloat16)

    def reuse(self, tensor: torch.Tensor) -> None:
        """The memory may be written to again."""
        self._idle[tensor.numel()].append(tensor)

    async def send(self, tensor: torch.Tensor, channel: Channel) -> tuple[Message, Awaitable[Any] | None]:
        raise TypeError(f"{type(self).__name__} has no sender")

    async def receive(self, message: Message, shape: tuple[int, int]) -> tuple[torch.Tensor, Callable[[], None]]:
        raise TypeError(f"{type(self).__name__} has no receiver")


class DynamoEpd(Way):
    """This package's transfer layer.

    Args:
        copy_in: copy the encoder's output into the arena within the measured time; else the encoder writes it there.
    """

    def __init__(self, copy_in: bool):
        super().__init__()
        self._copy_in = copy_in
        self._slots: dict[int, Any] = {}

    async def open(self, role: str) -> None:
        from ..transfer import open_transfer, transfer_config

        self.transfer = await open_transfer(transfer_config(host="127.0.0.1", arena_bytes=8 * MAX_BYTES))
        self.numbers = itertools.count()

    async def tensor(self, shape: tuple[int, int]) -> torch.Tensor:
        if self._copy_in:
            return await super().tensor(shape)
        slot = await self.transfer.allocate(2 * shape[0] * shape[1])
        tensor = slot.tensor(shape, "bfloat16")
        self._slots[tensor.data_ptr()] = slot
        return tensor

    def reuse(self, tensor: torch.Tensor) -> None:
        if self._copy_in:
            super().reuse(tensor)

    async def send(self, tensor: torch.Tensor, channel: Channel) -> tuple[Message, Awaitable[Any] | None]:
        shape, dtype = tuple(tensor.shape), "bfloat16"
        if self._copy_in:
            slot = await self.transfer.allocate(tensor.nbytes)
            slot.tensor(shape, dtype).copy_(tensor)
        else:
            slot = self._slots.pop(tensor.data_ptr())
        ref = self.transfer.offer(slot, digest=f"{next(self.numbers):064x}", shape=shape, dtype=dtype)
        slot.release()
        return msgspec.to_builtins(ref), None

    async def receive(self, message: Message, shape: tuple[int, int]) -> tuple[torch.Tensor, Callable[[], None]]:
        from ..contract.handoff import TensorRef

        slot = await self.transfer.fetch(msgspec.convert(message, TensorRef))
        return slot.tensor(shape, "bfloat16"), slot.release


class TrtllmStyle(Way):
    """What ``dynamo.trtllm`` does for embeddings: a readable per request, read into fresh zeros."""

    async def open(self, role: str) -> None:
        import dynamo.nixl_connect as nixl_connect

        self.nixl_connect = nixl_connect
        self.connector = nixl_connect.Connector()

    async def send(self, tensor: torch.Tensor, channel: Channel) -> tuple[Message, Awaitable[Any] | None]:
        readable = await self.connector.create_readable(self.nixl_connect.Descriptor(tensor))

        async def finish() -> None:
            with readable:
                await readable.wait_for_completion()

        return readable.metadata().model_dump(), finish()

    async def receive(self, message: Message, shape: tuple[int, int]) -> tuple[torch.Tensor, Callable[[], None]]:
        metadata = self.nixl_connect.RdmaMetadata.model_validate(message)
        tensor = torch.zeros(*shape, dtype=torch.bfloat16)
        operation = await self.connector.begin_read(metadata, self.nixl_connect.Descriptor(tensor))
        with operation:
            await operation.wait_for_completion()
        return tensor, _nothing


class Upstream(Way):
    """A sender and receiver pair of ``dynamo.common.multimodal.embedding_transfer``."""

    def __init__(self, name: str, **receiver_options: int):
        super().__init__()
        self._name = name
        self._options = receiver_options

    async def open(self, role: str) -> None:
        from dynamo.common.multimodal import embedding_transfer

        self.request = embedding_transfer.TransferRequest
        if role == "encode":
            self.sender = getattr(embedding_transfer, f"{self._name}EmbeddingSender")()
        else:
            self.receiver = getattr(embedding_transfer, f"{self._name}EmbeddingReceiver")(**self._options)

    async def send(self, tensor: torch.Tensor, channel: Channel) -> tuple[Message, Awaitable[Any] | None]:
        request, finished = await self.sender.send_embeddings(tensor, stage_embeddings=True)
        return request.model_dump(), finished

    async def receive(self, message: Message, shape: tuple[int, int]) -> tuple[torch.Tensor, Callable[[], None]]:
        number, tensor = await self.receiver.receive_embeddings(self.request.model_validate(message))
        return tensor, lambda: self.receiver.release_tensor(number)


class Socket(Way):
    """The bytes themselves over a TCP connection, into a buffer that is there already."""

    async def open(self, role: str) -> None:
        import socket

        self.loop = asyncio.get_running_loop()
        self.lock = asyncio.Lock()
        self.buffers = [torch.zeros(MAX_BYTES // 2, dtype=torch.bfloat16) for _ in range(8 if role == "prefill" else 0)]
        self.socket: socket.socket | None = None
        if role == "encode":
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.listener.setblocking(False)
            self.port = self.listener.getsockname()[1]

    async def send(self, tensor: torch.Tensor, channel: Channel) -> tuple[Message, Awaitable[Any] | None]:
        async def finish() -> None:
            async with self.lock:
                if self.socket is None:
                    self.socket, _ = await self.loop.sock_accept(self.listener)
                await self.loop.sock_sendall(self.socket, tensor.view(torch.uint8).numpy().data.cast("B"))

        return {"port": self.port}, finish()

    async def receive(self, message: Message, shape: tuple[int, int]) -> tuple[torch.Tensor, Callable[[], None]]:
        import socket

        buffer = self.buffers.pop()
        tensor = buffer[: shape[0] * shape[1]].view(shape)
        async with self.lock:
            if self.socket is None:
                self.socket = socket.socket()
                self.socket.setblocking(False)
                await self.loop.sock_connect(self.socket, ("127.0.0.1", message["port"]))
            left = tensor.view(torch.uint8).numpy().data.cast("B")
            while left:
                left = left[await self.loop.sock_recv_into(self.socket, left) :]
        return tensor, lambda: self.buffers.append(buffer)


class Memcpy(Way):
    """One copy inside the receiving process: nothing crosses, it is the floor."""

    async def open(self, role: str) -> None:
        self.source = torch.zeros(MAX_BYTES // 2, dtype=torch.bfloat16)
        self.target = torch.zeros(MAX_BYTES // 2, dtype=torch.bfloat16)

    async def receive(self, message: Message, shape: tuple[int, int]) -> tuple[torch.Tensor, Callable[[], None]]:
        count = shape[0] * shape[1]
        tensor = self.source[:count].view(shape)
        tensor[0, :] = tensor[-1, :] = message["mark"]
        message["start"] = time.monotonic()
        return self.target[:count].view(shape).copy_(tensor), _nothing


WAYS: dict[str, Callable[[], Way]] = {
    "dynamo-epd": lambda: DynamoEpd(copy_in=False),
    "dynamo-epd+copy": lambda: DynamoEpd(copy_in=True),
    "trtllm": TrtllmStyle,
    # Their defaults register 8 GB; the size changes nothing in the time of a transfer.
    "nixl-read": lambda: Upstream(
        "NixlRead", embedding_hidden_size=MAX_BYTES // 1024, max_item_mm_token=1024, max_items=8
    ),
    "nixl-write": lambda: Upstream("NixlWrite", buffer_size=8 * MAX_BYTES),
    "local": lambda: Upstream("Local"),
    "socket": Socket,
    "memcpy": Memcpy,
}


async def encode(name: str, answers: TextIO) -> None:
    """Serve embeddings until the prefill process is gone."""
    way = WAYS[name]()
    await way.open("encode")
    background: set[asyncio.Task[None]] = set()

    async def serve(channel: Channel, request: Message) -> None:
        tensor = await way.tensor((request["bytes"] // 2 // _WIDTH, _WIDTH))
        tensor[0, :] = tensor[-1, :] = request["mark"]
        start = time.monotonic()
        message, finished = await way.send(tensor, channel)
        channel.send({"number": request["number"], "start": start, "message": message})
        if finished is not None:
            await finished
        way.reuse(tensor)

    def received(channel: Channel, request: Message) -> None:
        if name == "memcpy":
            answer = {"number": request["number"], "start": 0.0, "message": {"mark": request["mark"]}}
            channel.send(answer)
            return
        task = asyncio.get_running_loop().create_task(serve(channel, request))
        background.add(task)
        task.add_done_callback(background.discard)

    server = await asyncio.get_running_loop().create_server(lambda: Channel(received), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], file=answers, flush=True)
    await asyncio.Event().wait()


async def prefill(name: str, port: int, results: TextIO) -> None:
    """Fetch embeddings as the lines of the standard input say, until it ends."""
    loop = asyncio.get_running_loop()
    way = WAYS[name]()
    await way.open("prefill")
    numbers = itertools.count()
    answers: dict[int, asyncio.Future[Message]] = {}

    def received(channel: Channel, answer: Message) -> None:
        answers.pop(answer["number"]).set_result(answer)

    _, channel = await loop.create_connection(lambda: Channel(received), "127.0.0.1", port)

    async def one(nbytes: int) -> float:
        number = next(numbers)
        mark = float(number % 251 + 1)
        answers[number] = loop.create_future()
        channel.send({"number": number, "bytes": nbytes, "mark": mark})
        answer = await answers[number]
        message = answer["message"]
        tensor, release = await way.receive(message, (nbytes // 2 // _WIDTH, _WIDTH))
        end = time.monotonic()
        if not (bool((tensor[0] == mark).all()) and bool((tensor[-1] == mark).all())):
            raise RuntimeError(f"{name} delivered wrong bytes")
        release()
        return end - message.get("start", answer["start"])

    async def several(nbytes: int, count: int) -> list[float]:
        return [await one(nbytes) for _ in range(count)]

    async def warm(nbytes: int, count: int) -> None:
        until = loop.time() + _WARMUP_S
        for number in itertools.count():
            if number >= count and loop.time() >= until:
                return
            await one(nbytes)

    print("ready", file=results, flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        job = json.loads(line)
        nbytes, lanes = job["bytes"], job["concurrency"]
        await asyncio.gather(*(warm(nbytes, job["warmup"]) for _ in range(lanes)))
        begin = time.monotonic()
        times = await asyncio.gather(*(several(nbytes, job["count"] // lanes) for _ in range(lanes)))
        seconds = time.monotonic() - begin
        print(json.dumps({"times": list(itertools.chain(*times)), "seconds": seconds}), file=results, flush=True)


def _nothing() -> None:
    """Nothing to give back."""


def main(argv: list[str]) -> None:
    """Run one half of one way."""
    torch.set_num_threads(1)
    role, name, *rest = argv
    # NIXL and UCX print to the standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.suppress(RuntimeError, KeyboardInterrupt):  # the loop is stopped when the other side is gone
        uvloop.run(encode(name, answers) if role == "encode" else prefill(name, int(rest[0]), answers))
    # Upstream's agents leave threads behind that keep a normal exit waiting.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
