# SPDX-License-Identifier: Apache-2.0
"""Endpoints in this process, and other processes with endpoints of their own."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.contract.handoff import TensorRef
from dynamo_epd.transfer import Endpoint, TransferConfig, open_transfer

from .child import PATIENCE_S, Clock, at_rest, jump, state

WAYS = [("map", ""), ("read", ""), ("write", ""), ("read", "tcp"), ("write", "tcp"), ("stream", "tcp")]
"""A mode, and UCX_TLS."""
LATER_S = 1000.0
"""By when everything that has a deadline is over."""


@pytest.fixture(scope="session")
def zygote() -> Iterator[Path]:
    """Socket of the process that makes processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "FATAL"}
        environment.pop("UCX_TLS", None)
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("child.py")), str(path)], env=environment
        )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not path.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the process that makes processes did not start")
                time.sleep(0.02)
            yield path
        finally:
            process.kill()
            process.wait(PATIENCE_S)


class Child:
    """Another process with an endpoint."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int):
        self.pid = pid
        self.address = ""
        self.agent = ""
        self._writer = writer
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._task = asyncio.create_task(self._read(reader))

    async def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer of the child. Raises the ``TransferError`` that it met."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
        found = await asyncio.wait_for(answer, PATIENCE_S)
        if "error" in found:
            raise TransferError(found["reason"], found["error"]) if found["reason"] else RuntimeError(found["error"])
        return found

    async def offer(self, nbytes: int, seed: int, **more: Any) -> TensorRef:
        return (await self.offers(nbytes, seed, **more))[0]

    async def offers(self, nbytes: int, seed: int, **more: Any) -> list[TensorRef]:
        answer = await self.call("offer", nbytes=nbytes, seed=seed, **more)
        return [msgspec.convert(ref, TensorRef) for ref in answer["refs"]]

    async def fetch(self, ref: TensorRef, timeout: float | None = None) -> str:
        """Checksum of the bytes that the child received."""
        return str((await self.call("fetch", ref=msgspec.to_builtins(ref), timeout=timeout))["sum"])

    async def rest(self) -> None:
        """Wait until nothing is in use in the child."""
        await until(lambda: self.call("state"))

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def stopped(self) -> None:
        """Wait until a signal that was armed has come: the child is stopped, or gone."""
        await eventually(lambda: self._state() in "TZX")

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "X"

    def end(self) -> None:
        self._task.cancel()
        self._writer.close()
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = json.loads(line)
            self._answers.pop(answer["id"]).set_result(answer)


async def until(check: Callable[[], Awaitable[dict[str, Any]] | dict[str, Any]]) -> None:
    """Wait until ``state`` says that nothing is in use."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = check()
        found = found if isinstance(found, dict) else await found
        if at_rest(found):
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"still in use: {found}")
        await asyncio.sleep(0.02)


async def eventually(check: Callable[[], object]) -> None:
    """Wait until ``check`` gives something true."""
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError("what must come did not come")
        await asyncio.sleep(0.02)


async def finish(transfer: Endpoint, child: Child) -> None:
    """Nothing may be in use once all deadlines have passed, here and in the child."""
    jump(transfer, LATER_S)
    await child.call("jump", seconds=LATER_S)
    await asyncio.gather(rest(transfer), child.rest())


async def rest(transfer: Endpoint) -> None:
    """Wait until nothing is in use at an endpoint of this process."""
    await until(lambda: state(transfer))


Spawn = Callable[..., Awaitable[Child]]
Opened = Callable[..., Awaitable[Endpoint]]


@pytest.fixture
async def spawn(zygote: Path) -> AsyncIterator[Spawn]:
    """``await spawn(**config)`` gives a child whose endpoint is open."""
    children: list[Child] = []

    async def make(**config: Any) -> Child:
        reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(str(zygote)), PATIENCE_S)
        child = Child(reader, writer, json.loads(await asyncio.wait_for(reader.readline(), PATIENCE_S))["pid"])
        children.append(child)
        found = await child.call("open", **{"arena_bytes": 64 << 20, **config})
        child.address, child.agent = found["address"], found["agent"]
        return child

    yield make
    for child in children:
        child.end()


@pytest.fixture
async def opened(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Opened]:
    """``await opened(**config)`` gives an endpoint in this process."""
    endpoints: list[Endpoint] = []

    async def make(tls: str = "", **config: Any) -> Endpoint:
        monkeypatch.delenv("UCX_TLS", raising=False)
        if tls:
            monkeypatch.setenv("UCX_TLS", tls)
        settings = TransferConfig(host="127.0.0.1", **{"arena_bytes": 64 << 20, **config})
        endpoint = await open_transfer(settings, Clock())
        endpoints.append(endpoint)
        return endpoint

    yield make
    for endpoint in endpoints:
        await asyncio.wait_for(endpoint.close(), PATIENCE_S)


async def pair(opened: Opened, mode: str = "map", **config: object) -> tuple[Endpoint, Endpoint]:
    return await opened(mode=mode, **config), await opened(mode=mode, **config)
