# SPDX-License-Identifier: Apache-2.0
"""Three hosts in network namespaces, etcd on the first, and ``dynamo serve`` on each of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dynamo_epd.serve import processes

from ..transfer.network import Host, hosts, ip

ROOT = Path(__file__).parents[2]
DEADLINE = 240.0
# The console script ``dynamo``, which is there only where the package was installed with pip.
_DYNAMO = (sys.executable, "-c", "import sys; from dynamo_epd.serve.dynamo import main; sys.exit(main())")
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


@dataclass
class Part:
    """One ``dynamo serve`` on one host."""

    process: subprocess.Popen[bytes]
    log: Path

    def said(self, text: str) -> int:
        return self.log.read_text().count(text)

    def until(self, text: str, times: int = 1) -> None:
        end = time.monotonic() + DEADLINE
        while self.said(text) < times:
            assert time.monotonic() < end and self.process.poll() is None, f"no {text!r}\n{self.log.read_text()}"
            time.sleep(0.1)

    def stop(self) -> int:
        """End it as Ctrl-C does; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(DEADLINE)


class Cluster:
    """Hosts, and what runs on them; everything has ended when the context manager ``cluster`` is left."""

    def __init__(self, made: list[Host], folder: Path, ends: contextlib.ExitStack):
        self.hosts = made
        self.folder = folder
        self.etcd = f"http://{made[0].address}:2379"
        self._ends = ends

    def start(self, host: Host, name: str, *argv: str, **env: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Run ``argv`` on ``host``; its output goes to ``name``.log."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            process = processes.spawn(
                host.command(*argv), {**os.environ, "DYN_LOG": "warn,links=info", **env}, ROOT, out
            )
        self._ends.callback(_end, process)
        return process, log

    def serve(self, host: Host, *services: str, graph: str = "graphs.epd:Frontend", args: tuple[str, ...] = ()) -> Part:
        """``dynamo serve`` of ``services`` on ``host``, as a user of that host types it."""
        argv = ["-f", "configs/serve/toy.yaml", *(f"--service-name={name}" for name in services), *args]
        name = f"{host.port}-{'-'.join(services)}"
        return Part(*self.start(host, name, *_DYNAMO, "serve", graph, *argv, ETCD_ENDPOINTS=self.etcd))

    def run(self, host: Host, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, whose sockets are those of a process on ``host``."""
        with concurrent.futures.ThreadPoolExecutor(1, initializer=_enter, initargs=(host,)) as thread:
            return thread.submit(lambda: asyncio.run(_await(work))).result()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Three hosts, each with a second network that leads nowhere, under the same address on all of them."""
    with hosts(3, 0.0, 0.0) as made, contextlib.ExitStack() as ends:
        for host in made:
            ip("-n", host.name, "link", "add", "docker0", "type", "bridge")
            ip("-n", host.name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            ip("-n", host.name, "link", "set", "docker0", "up")
            ip("-n", host.name, "route", "add", "default", "dev", "docker0")
        together = Cluster(made, folder, ends)
        listen = ("--listen-client-urls", "http://0.0.0.0:2379", "--advertise-client-urls", together.etcd)
        together.start(made[0], "etcd", "etcd", "--data-dir", str(folder / "etcd"), *listen)
        yield together


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _enter(host: Host) -> None:
    with open(f"/run/netns/{host.name}") as namespace:
        if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace of {host.name}")


async def _await(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
