# SPDX-License-Identifier: Apache-2.0
"""Bytes from one process's memory to another's. ``open_transfer`` gives each process its ``Transfer``."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable

from ..contract.errors import ConfigError
from .config import TransferConfig, add_transfer_arguments, resolve_host, transfer_config
from .device import wire_device
from .endpoint import Endpoint
from .memory import open_region

__all__ = ["Endpoint", "TransferConfig", "add_transfer_arguments", "open_transfer", "transfer_config"]


async def open_transfer(config: TransferConfig | None = None, clock: Callable[[], float] = time.monotonic) -> Endpoint:
    """Register this process's arena, make its agent, and listen for peers.

    Args:
        clock: seconds, by which offers, fetches and waits for memory end.

    Raises:
        ConfigError: there is no such memory, NIXL cannot be used, or the address cannot be listened on.
    """
    from .nixl_plane import NixlPlane

    config = config or transfer_config()
    loop = asyncio.get_running_loop()
    agent = f"{config.agent_prefix}-{os.getpid()}-{secrets.token_hex(6)}"
    region = await loop.run_in_executor(None, open_region, config.arena_bytes, config.kind, config.device)
    host = resolve_host(config.host)
    plane = None
    if config.mode != "map":
        plane = await loop.run_in_executor(None, lambda: NixlPlane(agent, region, loop, wire_device(host)))
    endpoint = Endpoint(config, agent, region, plane, clock)
    try:
        await endpoint.open(host)
    except OSError as error:
        await endpoint.close()
        raise ConfigError(f"the transfer endpoint cannot listen on {host}:{config.port}: {error}") from error
    return endpoint
