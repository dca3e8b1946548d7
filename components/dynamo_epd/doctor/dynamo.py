# SPDX-License-Identifier: Apache-2.0
"""Checks of Dynamo: SDK, runtime, discovery, planes, media policy."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from .finding import Finding, green, red, yellow

_INSTALL = "pip install 'ai-dynamo>=1.4.2,<2', or run launch/setup.sh where NVIDIA's package index cannot be reached"
_CONNECT_S = 2.0


def sdk() -> Finding:
    """The backend SDK with its encode role, and a runtime of the same version."""
    try:
        versions = {name: version(name) for name in ("ai-dynamo", "ai-dynamo-runtime")}
    except PackageNotFoundError as error:
        return red("Dynamo", f"{error.name} is not installed", _INSTALL)
    try:
        from dynamo.common.backend.worker import WorkerConfig
        from dynamo.common.constants import DisaggregationMode

        DisaggregationMode("encode")
        has_route = "route_to_encoder" in {f.name for f in fields(WorkerConfig)}
    except Exception as error:
        return red("Dynamo", f"{versions['ai-dynamo']}: the backend SDK cannot be used: {error!r}", _INSTALL)
    if not has_route:
        return red("Dynamo", f"{versions['ai-dynamo']} cannot route to encode workers", _INSTALL)
    if len(set(versions.values())) > 1:
        return yellow("Dynamo", f"SDK {versions['ai-dynamo']}, runtime {versions['ai-dynamo-runtime']}", _INSTALL)
    return green("Dynamo", f"{versions['ai-dynamo']}, with encode workers")


def planes(env: Mapping[str, str]) -> Iterator[Finding]:
    """Discovery and planes as the workers would use them, and whether what they need answers."""
    discovery = env.get("DYN_DISCOVERY_BACKEND", "etcd")
    if discovery == "file":
        yield _folder(Path(env.get("DYN_FILE_KV") or Path(tempfile.gettempdir()) / "dynamo_store_kv"))
    elif discovery == "etcd":
        yield from _reach("discovery", "etcd", env.get("ETCD_ENDPOINTS", "http://localhost:2379"), "ETCD_ENDPOINTS")
    elif discovery == "kubernetes":
        there = "KUBERNETES_SERVICE_HOST" in env
        yield (
            green("discovery", "kubernetes")
            if there
            else red("discovery", "kubernetes, but this is no pod", "run in a pod, or set DYN_DISCOVERY_BACKEND")
        )
    elif discovery == "mem":
        yield yellow("discovery", "mem: other processes cannot find this one", "DYN_DISCOVERY_BACKEND=file or etcd")
    else:
        yield red("discovery", f"{discovery!r} is unknown", "DYN_DISCOVERY_BACKEND=kubernetes, etcd or file")
    request, event = env.get("DYN_REQUEST_PLANE", "tcp"), env.get("DYN_EVENT_PLANE", "zmq")
    if "nats" in (request, event):
        yield from _reach("planes", "nats", env.get("NATS_SERVER", "nats://localhost:4222"), "NATS_SERVER")
    else:
        yield green("planes", f"requests over {request}, events over {event}")


def media_policy() -> Finding:
    """What media the encode workers would fetch."""
    try:
        from dynamo.common.http.url_validator import UrlValidationPolicy
    except Exception as error:
        return red("media policy", f"cannot be read: {error!r}", _INSTALL)
    policy = UrlValidationPolicy.from_env()
    local = policy.allowed_local_path
    if policy.allow_private_ips:
        return yellow(
            "media policy",
            "http and private addresses are allowed: a caller can make this worker read internal services",
            "unset DYN_MM_ALLOW_INTERNAL outside of tests",
        )
    if local is not None and not Path(local).is_dir():
        return yellow("media policy", f"DYN_MM_LOCAL_PATH={local} is no directory", "correct or unset it")
    return green("media policy", "https and data URLs" + (f", files below {local}" if local else ""))


def _folder(folder: Path) -> Finding:
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if parent.is_dir() and os.access(parent, os.W_OK):
        return green("discovery", f"file, in {folder}")
    return red("discovery", f"file: {folder} cannot be written", "DYN_FILE_KV=<a directory that all workers share>")


def _reach(check: str, what: str, addresses: str, variable: str) -> Iterator[Finding]:
    """Whether one of ``addresses`` (comma-separated URLs) takes a connection."""
    trouble = ""
    for address in addresses.split(","):
        parts = urlsplit(address if "//" in address else f"//{address}")
        try:
            with socket.create_connection((parts.hostname or "localhost", parts.port or 0), timeout=_CONNECT_S):
                yield green(check, f"{what} at {address}")
                return
        except (OSError, ValueError) as error:
            trouble = f"{what} at {address} does not answer: {error}"
    yield red(
        check, trouble, f"start {what}, or set {variable}; on one machine DYN_DISCOVERY_BACKEND=file needs neither"
    )
