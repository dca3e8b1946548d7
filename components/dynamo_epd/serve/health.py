# SPDX-License-Identifier: Apache-2.0
"""Asking a process of this host whether it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable
from typing import Literal, NamedTuple

_TIMEOUT = 5.0


class Probe(NamedTuple):
    """How readiness is asked for.

    Attributes:
        kind: ``http`` wants a status of 2xx; ``models`` also a model in the list that comes back; ``tcp`` wants the
            port to be open, for ports that speak TLS; ``running`` asks nothing.
    """

    kind: Literal["running", "tcp", "http", "models"]
    host: str = "127.0.0.1"
    port: int = 0
    path: str = "/health"


async def ready(probe: Probe) -> bool:
    """Whether ``probe`` succeeds now; False for any failure, a missing answer after 5 seconds included."""
    if probe.kind == "running":
        return True
    try:
        return await asyncio.wait_for(_ask(probe), _TIMEOUT)
    except (OSError, asyncio.TimeoutError, ValueError, EOFError, IndexError):
        return False


async def reachable(servers: Iterable[tuple[str, int]]) -> bool:
    """Whether one of ``servers``, host and port, accepts a connection within 5 seconds."""
    for host, port in servers:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _TIMEOUT)
            writer.close()
            return True
    return False


async def _ask(probe: Probe) -> bool:
    reader, writer = await asyncio.open_connection(probe.host, probe.port)
    try:
        if probe.kind == "tcp":
            return True
        # HTTP/1.0, so that the body ends with the connection and is never chunked.
        writer.write(f"GET {probe.path} HTTP/1.0\r\nHost: {probe.host}\r\n\r\n".encode())
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        if head.split(b" ", 2)[1][:1] != b"2":
            return False
        return probe.kind == "http" or bool(json.loads(body)["data"])
    except KeyError:
        return False
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
