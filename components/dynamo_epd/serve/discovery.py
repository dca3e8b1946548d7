# SPDX-License-Identifier: Apache-2.0
"""How the processes of a graph find each other: the variables that say so, and this host's address for the others."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from ..contract.errors import ConfigError
from .names import did_you_mean

LOOPBACK = "127.0.0.1"
_BACKENDS = ("file", "etcd", "kubernetes")
_ETCD_PORT = 2379
_HOSTS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_EPD_TRANSFER_HOST")
# Where a worker serves /health and /metrics; the frontend fetches the model's tokenizer and templates there.
_SYSTEM_HOST = "DYN_SYSTEM_HOST"


def variables(chosen: Mapping[str, str], whole: bool, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by which the processes find each other: the YAML file's, else the environment's, else files.

    Args:
        chosen: the YAML file's, with keys of ``DISCOVERY_KEYS``.
        whole: the whole graph runs here.
        folder: private to this launch.

    Raises:
        ConfigError: a discovery that cannot work.
    """
    backend = chosen.get("backend") or environ.get("DYN_DISCOVERY_BACKEND")
    if backend is None:
        backend = "etcd" if "etcd" in chosen or "ETCD_ENDPOINTS" in environ else "file"
    if backend not in _BACKENDS:
        raise ConfigError(f"discovery backend {backend!r} does not work here; {did_you_mean(backend, _BACKENDS)}")
    nats = chosen.get("nats") or environ.get("NATS_SERVER")
    event_plane = chosen.get("event-plane") or environ.get("DYN_EVENT_PLANE") or ("nats" if nats else "zmq")
    request_plane = chosen.get("request-plane") or environ.get("DYN_REQUEST_PLANE") or "tcp"
    env = {"DYN_DISCOVERY_BACKEND": backend, "DYN_REQUEST_PLANE": request_plane, "DYN_EVENT_PLANE": event_plane}
    host = ""
    if "nats" in (event_plane, request_plane):
        if not nats:
            raise ConfigError("a NATS plane needs a server: set Discovery.nats, or NATS_SERVER in the environment")
        env["NATS_SERVER"] = nats
    if backend == "etcd":
        env["ETCD_ENDPOINTS"] = chosen.get("etcd") or environ.get("ETCD_ENDPOINTS") or "http://localhost:2379"
        host = address_towards(servers(env["ETCD_ENDPOINTS"]))
    if backend == "file":
        # Launchers that each run a part of one graph on this host must meet in one folder.
        named = chosen.get("directory") or environ.get("DYN_FILE_KV")
        env["DYN_FILE_KV"] = named or str((folder if whole else shared_folder()) / "discovery")
        # A folder that somebody named may be on a file system that other hosts see.
        host = "" if named else LOOPBACK
        if whole:
            # The entry is stopped first, so that nobody routes to a worker that is about to stop.
            name = "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"
            env[name] = environ.get(name, "0.5")
    if "host" in chosen:
        return env | dict.fromkeys((*_HOSTS, _SYSTEM_HOST), chosen["host"])
    names = () if not host else _HOSTS if host == LOOPBACK else (*_HOSTS, _SYSTEM_HOST)
    return env | {name: environ.get(name, host) for name in names}


def servers(endpoints: str) -> list[tuple[str, int]]:
    """Host and port of each URL of ``ETCD_ENDPOINTS``.

    Raises:
        ConfigError: one is no URL.
    """
    found = []
    for url in filter(None, (part.strip() for part in endpoints.split(","))):
        try:
            parts = urlsplit(url if "://" in url else f"//{url}")
            host, port = parts.hostname, parts.port or _ETCD_PORT
        except ValueError:
            host = None
        if not host:
            raise ConfigError(f"etcd: {url!r} is no URL; write http://host:2379, several with commas between them")
        found.append((host, port))
    return found


def address_towards(servers: Iterable[tuple[str, int]]) -> str:
    """This host's IPv4 address on the network where it reaches the first of ``servers`` that it has a route to.

    Empty where that is loopback, or there is no route.

    The other hosts reach the same servers, which cannot be said of the default route's address.
    """
    for host, port in servers:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing: it only asks the routing table.
            probe.connect((host, port))
            found = str(probe.getsockname()[0])
            return "" if ip_address(found).is_loopback else found
    return ""


def shared_folder() -> Path:
    """Where the launchers of one user on one host meet, each of which runs a part of a graph."""
    return Path(tempfile.gettempdir()) / f"dynamo-epd-{os.getuid()}"


def make_folder(path: Path) -> None:
    """Make the folder of discovery by file.

    Raises:
        ConfigError: it cannot be made, or somebody else may write to the shared one: they could pose as a worker.
    """
    shared = shared_folder()
    try:
        if shared in path.parents:
            shared.mkdir(mode=0o700, exist_ok=True)
            status = shared.lstat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise ConfigError(f"{shared}: others may write there; remove it, or set Discovery.directory")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Discovery.directory: {error}") from None
