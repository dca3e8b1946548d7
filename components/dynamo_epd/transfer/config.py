# SPDX-License-Identifier: Apache-2.0
"""How the transfer layer of one process is set up: ``TransferConfig``, its flags and its environment variables."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ..contract.errors import ConfigError

Mode = Literal["auto", "map", "read", "write", "stream"]
Kind = Literal["host", "cuda"]

GRANULE = 4096
"""Allocation unit of an arena in bytes; also the alignment of every slot."""

MAX_ARENA_BYTES = GRANULE << 24
"""An offer's number holds the granule index of its slot in 24 bits."""

_SHARED_TRANSPORTS = {"all", "shm", "sm", "mm", "posix", "sysv", "cma", "knem", "xpmem"}


@dataclass(frozen=True)
class TransferConfig:
    """Settings of one process's transfer layer.

    Attributes:
        host: address to listen on and to give to peers. ``auto``: ``$DYN_EPD_TRANSFER_HOST``, else ``$POD_IP``, else
            the address of the default route, else loopback.
        port: control port; 0 takes a free one.
        arena_bytes: size of the one registered memory region; rounded up to whole granules.
        kind: ``host`` memory, or ``cuda`` device memory.
        device: CUDA device number, for ``cuda`` only.
        offer_ttl: seconds after which an offer that nobody took ends.
        timeout: seconds that a fetch or an allocation may take, unless the call says otherwise.
        verify_transfers: compare a BLAKE3 checksum of the bytes on both sides after each transfer.
        mode: how bytes move. ``auto`` maps the peer's memory on the same machine, reads where the fabric reads
            without the peer's help, and has the peer write otherwise, or, by TCP alone, stream; ``map``, ``read``,
            ``write``, ``stream`` force one way. ``stream`` is: what is small over the control link, the rest as by
            ``write``.
        keep_bytes: most bytes that ``keep`` may hold on to; None for all of the arena.
        agent_prefix: start of the NIXL agent's name.
    """

    host: str = "auto"
    port: int = 0
    arena_bytes: int = 512 << 20
    kind: Kind = "host"
    device: int = 0
    offer_ttl: float = 30.0
    timeout: float = 10.0
    verify_transfers: bool = False
    mode: Mode = "auto"
    keep_bytes: int | None = None
    agent_prefix: str = "dynamo-epd"

    def __post_init__(self) -> None:
        if not GRANULE <= self.arena_bytes <= MAX_ARENA_BYTES:
            raise ConfigError(f"arena_bytes {self.arena_bytes} must lie between {GRANULE} and {MAX_ARENA_BYTES}")
        if self.offer_ttl <= 0 or self.timeout <= 0:
            raise ConfigError(f"offer_ttl {self.offer_ttl} and timeout {self.timeout} must be positive seconds")
        if self.kind not in get_args(Kind):
            raise ConfigError(f"memory kind {self.kind!r} is not one of {', '.join(get_args(Kind))}")
        if self.mode not in get_args(Mode):
            raise ConfigError(f"transfer mode {self.mode!r} is not one of {', '.join(get_args(Mode))}")
        if self.mode in ("map", "stream") and self.kind == "cuda":
            raise ConfigError(
                f"transfer mode {self.mode!r} is for host memory: device memory needs 'auto', 'read' or 'write'"
            )
        if self.keep_bytes is not None and self.keep_bytes < 0:
            raise ConfigError(f"keep_bytes {self.keep_bytes} must not be negative")


_FLAGS: tuple[tuple[str, str, Any, str], ...] = (
    ("host", "--transfer-host", str, "address to listen on and to give to peers (auto: the default route's)"),
    ("port", "--transfer-port", int, "control port, 0 for a free one"),
    ("arena_bytes", "--transfer-arena-bytes", int, "bytes of registered memory for embeddings and KV"),
    ("mode", "--transfer-mode", str, "auto, map, read, write or stream"),
    ("offer_ttl", "--offer-ttl", float, "seconds until an offer that nobody took ends"),
    ("timeout", "--transfer-timeout", float, "seconds that one transfer may take"),
)


def add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ``--transfer-*`` flags; unset, the environment counts, then the default."""
    group = parser.add_argument_group("transfer")
    for name, flag, kind, text in _FLAGS:
        group.add_argument(flag, dest=f"transfer_{name}", type=kind, default=None, help=text)
    group.add_argument(
        "--verify-transfers",
        dest="transfer_verify_transfers",
        action="store_const",
        const=True,
        help="compare a checksum on both sides after each transfer",
    )


def transfer_config(args: argparse.Namespace | None = None, **overrides: Any) -> TransferConfig:
    """The configuration from ``overrides``, the parsed flags, the environment and the defaults, in this order.

    Raises:
        ConfigError: a value cannot be used; the message names it.
    """
    values: dict[str, Any] = {}
    for name, _, kind, _ in (*_FLAGS, ("verify_transfers", "", _flag, "")):
        text = os.environ.get(variable := _variable(name))
        if text is not None:
            try:
                values[name] = kind(text)
            except ValueError as error:
                raise ConfigError(f"{variable}={text!r}: {error}") from error
        given = getattr(args, f"transfer_{name}", None)
        if given is not None:
            values[name] = given
    unknown = overrides.keys() - {f.name for f in fields(TransferConfig)}
    if unknown:
        raise ConfigError(f"unknown transfer settings: {', '.join(sorted(unknown))}")
    return TransferConfig(**{**values, **overrides})


def resolve_host(host: str) -> str:
    """The address that ``host`` stands for; only ``auto`` stands for another."""
    if host != "auto":
        return host
    named = os.environ.get(_variable("host")) or os.environ.get("POD_IP")
    if named and named != "auto":
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing: it only asks the routing table. 192.0.2.0/24 is reserved.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def shared_memory_allowed() -> bool:
    """False where ``UCX_TLS`` restricts this process to transports that share no memory with others."""
    chosen = os.environ.get("UCX_TLS", "").lower().strip()
    if not chosen:
        return True
    names = {name.strip().lstrip("\\") for name in chosen.lstrip("^").split(",")}
    return bool(names & _SHARED_TRANSPORTS) != chosen.startswith("^")


def _variable(name: str) -> str:
    return f"DYN_EPD_{name.upper()}" if name.startswith(("offer", "verify")) else f"DYN_EPD_TRANSFER_{name.upper()}"


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected true or false")
