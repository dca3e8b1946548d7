# SPDX-License-Identifier: Apache-2.0
"""A Dynamo frontend and workers on this machine, without etcd or NATS: for the demo, the benchmarks and the tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from ..contract.errors import EpdError
from . import processes

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class StackError(EpdError):
    """A process of the stack did not start, or died; the message has the end of its log."""


@dataclass(frozen=True)
class Service:
    """One process of a stack: ``args`` follow ``python -m <module>``."""

    name: str
    args: tuple[str, ...]
    module: str = "dynamo_epd"
    env: Mapping[str, str] = field(default_factory=dict)


def epd_services(
    model: Path,
    served_model_name: str,
    *,
    topology: str = "e-p-d",
    engine_args: Sequence[str] = (),
    encode_args: Sequence[str] = (),
    common_args: Sequence[str] = (),
) -> list[Service]:
    """The workers of a topology: ``e-p-d`` (encode, prefill, decode) or ``e-pd`` (encode, agg).

    Args:
        engine_args: flags of the workers that run the language model.
        encode_args: flags of the encode worker.
        common_args: flags of all.
    """
    roles = {"e-p-d": ("encode", "prefill", "decode"), "e-pd": ("encode", "agg")}[topology]
    base = ("--model", str(model), "--served-model-name", served_model_name, *common_args)
    return [
        Service(role, ("--disaggregation-mode", role, *base, *(encode_args if role == "encode" else engine_args)))
        for role in roles
    ]


class Stack:
    """Starts services with file discovery in a folder of its own; a context manager that always stops all of them.

    Args:
        services: the workers; the frontend is added.
        served_model_name: what clients ask for.
        frontend_args: further flags of ``dynamo.frontend``.
        env: environment of all processes, over this process's own.
    """

    def __init__(
        self,
        services: Sequence[Service],
        served_model_name: str,
        *,
        frontend_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ):
        self.model = served_model_name
        self._folder = tempfile.TemporaryDirectory(prefix="dynamo-epd-")
        self.folder = Path(self._folder.name)
        self.http_port = free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        frontend = Service(
            "frontend",
            (
                "--http-host",
                "127.0.0.1",
                "--http-port",
                str(self.http_port),
                "--discovery-backend",
                "file",
                *frontend_args,
            ),
            module="dynamo.frontend",
        )
        self._services = {s.name: s for s in (frontend, *services)}
        self._system_ports = {s.name: _system_port() for s in services}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (self.folder / "discovery").mkdir()
        self._env = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "DYN_LOG": os.environ.get("DYN_LOG", "warn"),
            "DYN_SELF_HOST_METADATA": "0",
            "DYN_EPD_TRANSFER_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }

    def __enter__(self) -> Stack:
        try:
            for name in self._services:
                self.start(name)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str) -> None:
        """Start the service ``name``, again if it ended."""
        service = self._services[name]
        port = {"DYN_SYSTEM_PORT": str(self._system_ports[name])} if name in self._system_ports else {}
        with self.log_path(name).open("ab") as log:
            self.processes[name] = processes.spawn(
                [sys.executable, "-m", service.module, *service.args],
                {**self._env, **port, **service.env},
                output=log,
            )

    @property
    def workers(self) -> list[str]:
        """Names of all services but the frontend."""
        return list(self._system_ports)

    def log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log_tail(self, name: str, lines: int = 12, width: int = 300) -> str:
        """The last lines of a log without colours, long ones cut."""
        path = self.log_path(name)
        text = path.read_text(errors="replace") if path.exists() else ""
        return "\n".join(line[:width] for line in _COLOUR.sub("", text).splitlines()[-lines:])

    def system_url(self, name: str) -> str:
        """Where a worker answers ``/health``, ``/live`` and ``/metrics``."""
        return f"http://127.0.0.1:{self._system_ports[name]}"

    def metrics(self, name: str) -> dict[str, float]:
        """The samples of a worker's ``/metrics``, by name and labels as they are written there."""
        with urllib.request.urlopen(f"{self.system_url(name)}/metrics", timeout=5) as response:
            text = response.read().decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                own = {k: v for k, v in sample.labels.items() if not k.startswith(("dynamo_", "model", "worker_"))}
                found[sample.name + (str(own) if own else "")] = sample.value
        return found

    def check(self) -> None:
        """Raise ``StackError`` for a process that ended by itself."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise StackError(f"{name} ended with exit code {process.returncode}:\n{self.log_tail(name)}")

    def wait_ready(self, deadline: float = 120.0, probe: Mapping[str, object] | None = None) -> None:
        """Wait until a chat request is answered.

        Args:
            deadline: seconds.
            probe: messages of the request; a word of text by default. Media make sure that encode is there too.

        Raises:
            StackError: a process died, or the deadline passed.
        """
        end = time.monotonic() + deadline
        body = {"model": self.model, "max_tokens": 1, "messages": [probe or {"role": "user", "content": "hi"}]}
        last = "no answer yet"
        while time.monotonic() < end:
            self.check()
            status, answer = post_json(
                f"{self.url}/v1/chat/completions", body, timeout=max(1.0, end - time.monotonic())
            )
            if status == 200:
                return
            last = f"{status} {answer}"
            time.sleep(0.2)
        logs = "\n".join(f"--- {name}\n{self.log_tail(name)}" for name in self.processes)
        raise StackError(f"not ready after {deadline:g} s, last answer {last}\n{logs}")

    def kill(self, name: str, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send ``sig`` to the process group of ``name``; reaps it when the signal is fatal."""
        process = self.processes[name]
        processes.kill_group(process.pid, sig)
        if sig in (signal.SIGKILL, signal.SIGTERM):
            process.wait(timeout=30)
            del self.processes[name]

    def stop(self, grace: float = 5.0) -> None:
        """Stop all processes: politely, then not. Safe to call twice."""
        for process in self.processes.values():
            processes.kill_group(process.pid, signal.SIGTERM)
        end = time.monotonic() + grace
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, end - time.monotonic()))
            processes.kill_group(process.pid)
            process.wait()
        self.processes.clear()
        self._folder.cleanup()


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _system_port() -> int:
    """A free port for a worker's ``/metrics``: Dynamo 1.6.1 reads DYN_SYSTEM_PORT as a signed 16-bit number."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def post_json(url: str, body: object, timeout: float) -> tuple[int, object]:
    """POST ``body``; status 0 where nobody listens. Never raises for an HTTP error."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            return error.code, json.loads(text)
        except ValueError:
            return error.code, text
    except OSError as error:
        return 0, str(error)
