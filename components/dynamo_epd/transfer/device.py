# SPDX-License-Identifier: Apache-2.0
"""Which networks UCX has, and which device of them it uses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

RDMA_DEVICES = Path("/sys/class/infiniband")
"""Where Linux lists them, InfiniBand or not."""
_NET_DEVICES = "UCX_NET_DEVICES"
_SIOCGIFADDR = 0x8915
_environment = threading.Lock()


def wire_device(host: str) -> str | None:
    """The network device with the IPv4 address ``host``, where UCX is to use TCP alone; None: leave the choice to UCX.

    UCX would spread what it sends by TCP over the fastest two devices of the machine, whether or not the peers can be
    reached by both.
    """
    if not _told_tcp_alone() or os.environ.get(_NET_DEVICES, "all") != "all":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError, UnicodeError):
        wanted = socket.inet_aton(socket.gethostbyname(host))
        for _, device in socket.if_nameindex():
            with contextlib.suppress(OSError):  # a device without an address
                request = struct.pack("256s", device.encode())
                if fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24] == wanted:
                    return device
    return None


def tcp_alone() -> bool:
    """Whether UCX reaches other machines by TCP and nothing else: it was told so, or there is no RDMA device here."""
    if os.environ.get("UCX_TLS", "").lower().strip() not in ("", "all"):
        return _told_tcp_alone()
    return not (RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()))


def _told_tcp_alone() -> bool:
    names = {name.strip() for name in os.environ.get("UCX_TLS", "").lower().split(",")}
    return "tcp" in names and not names - {"tcp", "self"}


@contextlib.contextmanager
def only(device: str | None) -> Iterator[None]:
    """Agents that are made here use this network device: UCX reads it from the environment, once."""
    if device is None:
        yield
        return
    with _environment:
        before = os.environ.get(_NET_DEVICES)
        os.environ[_NET_DEVICES] = device
        try:
            yield
        finally:
            del os.environ[_NET_DEVICES]
            if before is not None:
                os.environ[_NET_DEVICES] = before
