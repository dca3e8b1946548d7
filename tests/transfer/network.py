# SPDX-License-Identifier: Apache-2.0
"""Network namespaces with delay and loss between them: ``tc netem`` where the kernel has it, else a relay in Python.
Without delay and loss, the kernel's bridge.

Run as a script it is the relay: it takes frames from one end of each cable and puts them out of the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

MTU = 9000
_ETH_P_ALL = 3
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, _STSO, _SGSO


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Host:
    """One namespace: its name, its address, and its end of the cable in the hub."""

    name: str
    address: str
    port: str
    hub: str

    def cut(self, off: bool) -> None:
        """Take the cable out, or put it back."""
        ip("-n", self.hub, "link", "set", self.port, "down" if off else "up")

    def command(self, *argv: str) -> list[str]:
        """``argv`` as it is run on this host, which has shared memory of its own."""
        script = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.name, "sh", "-c", script, "sh", *argv]


@contextlib.contextmanager
def hosts(count: int, delay_s: float, loss: float) -> Iterator[list[Host]]:
    """``count`` namespaces in one network. Needs root.

    Args:
        delay_s: one way, between any two.
        loss: share of the frames that vanish.
    """
    hub = f"epd-{os.getpid()}-hub"
    made = [Host(f"epd-{os.getpid()}-{i}", f"10.97.0.{i + 1}", f"cable{i}", hub) for i in range(count)]
    relay: subprocess.Popen[bytes] | None = None
    try:
        ip("netns", "add", hub)
        for host in made:
            ip("netns", "add", host.name)
            ip("link", "add", host.port, "netns", hub, "mtu", str(MTU), "type", "veth", "peer", "name", "eth0",
               "netns", host.name, "mtu", str(MTU))  # fmt: skip
            ip("-n", host.name, "link", "set", "lo", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
            ip("-n", hub, "link", "set", host.port, "up")
        if not _bridge(made, delay_s, loss):
            for host in made:
                script = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import network; "
                subprocess.run(
                    ["ip", "netns", "exec", host.name, sys.executable, "-c", script + "network.whole_frames('eth0')"],
                    check=True,
                )
            ports = [host.port for host in made]
            relay = subprocess.Popen(
                ["ip", "netns", "exec", hub, sys.executable, __file__, str(delay_s), str(loss), *ports]
            )
        yield made
    finally:
        if relay is not None:
            relay.kill()
            relay.wait()
        for name in [hub, *(host.name for host in made)]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def whole_frames(interface: str) -> None:
    """Have the kernel put complete frames with complete checksums on the wire, as a relay needs them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP", interface.encode(), ctypes.addressof(value)))


def _bridge(made: list[Host], delay_s: float, loss: float) -> bool:
    hub = made[0].hub
    ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
    for host in made:
        tc = ["tc", "-n", hub, "qdisc", "add", "dev", host.port, "root", "netem"]
        netem = [*tc, "delay", f"{delay_s * 1e3}ms", "loss", f"{loss * 100}%"]
        if (delay_s or loss) and subprocess.run(netem, capture_output=True).returncode:
            ip("-n", hub, "link", "del", "bridge0")
            return False
        ip("-n", hub, "link", "set", host.port, "master", "bridge0")
    ip("-n", hub, "link", "set", "bridge0", "up")
    return True


def relay(delay_s: float, loss: float, ports: list[str]) -> None:
    """Forward frames between ``ports``, each after ``delay_s`` and some never, until killed."""
    chance = random.Random(1)
    selector = selectors.DefaultSelector()
    sockets = []
    for port in ports:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        sock.bind((port, 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
        sockets.append(sock)
    home: dict[bytes, socket.socket] = {}
    waiting: list[tuple[float, int, bytes, socket.socket]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, frame, source = heapq.heappop(waiting)
            target = home.get(frame[:6])
            for sock in [target] if target else sockets:
                if sock is not source:
                    with contextlib.suppress(OSError):  # a cable that is out
                        sock.send(frame)
        for key, _ in selector.select(max(0.0, waiting[0][0] - now) if waiting else 0.5):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            with contextlib.suppress(OSError):
                for _ in range(64):
                    frame, address = sock.recvfrom(MTU + 64)
                    if address[2] == socket.PACKET_OUTGOING:
                        continue
                    home[frame[6:12]] = sock
                    count += 1
                    if chance.random() >= loss:
                        heapq.heappush(waiting, (time.monotonic() + delay_s, count, frame, sock))


if __name__ == "__main__":
    relay(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
