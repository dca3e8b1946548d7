# SPDX-License-Identifier: Apache-2.0
"""The memory of an arena: one region for the payload, and a table of generations that peers can read as well.

Host memory is an anonymous file (``memfd``), so that a process on the same machine can map it read-only::

    0        magic and nonce, then scratch words for remote reads of a generation
    4096     the generation table: one little-endian uint64 per granule of payload
    ...      the payload (host memory only), from a granule boundary on

Device memory has its payload in a tensor of its own; header and table stay in host memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..contract.errors import ConfigError, TransferError
from .config import GRANULE, Kind

if TYPE_CHECKING:
    import torch

MAGIC = b"dynamo-epd-1\0\0\0\0"
NONCE_BYTES = 16
HEADER_BYTES = 4096
PROBE_OFFSET = 512
SCRATCH_OFFSET = 1024
SCRATCH_WORDS = (HEADER_BYTES - SCRATCH_OFFSET) // 8

_FILE_NAME = "dynamo-epd-arena"
# Linux's fcntl.h; the names are missing from Python's fcntl module before 3.13.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SHRINK, _SEAL_GROW = 0x2, 0x4


def table_bytes(size: int) -> int:
    """Bytes of header and table before the payload of ``size`` bytes, a multiple of ``GRANULE``."""
    end = HEADER_BYTES + 8 * (size // GRANULE)
    return -(-end // GRANULE) * GRANULE


@dataclass
class Region:
    """One arena's memory.

    Attributes:
        kind, device: as in ``TransferConfig``.
        size: payload bytes.
        payload: uint8 ``[size]`` tensor over the payload.
        table: uint64 ``[size // GRANULE]`` generation of the slot that starts at each granule, 0 where none does.
        scratch: uint64 words that a remote generation can be read into.
        probe: uint64 words that a remote header can be read into.
        nonce: random bytes that tell this region from any other.
        fd: the host file.
        base: address of the payload.
        table_base: address of header and table.
    """

    kind: Kind
    device: int
    size: int
    payload: torch.Tensor
    table: np.ndarray
    scratch: np.ndarray
    probe: np.ndarray
    nonce: bytes
    fd: int
    base: int
    table_base: int
    _pinned: int = 0

    def close(self) -> None:
        """Close the file; the memory itself goes when nothing refers to it any more. Safe to call twice."""
        if self._pinned:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = 0
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_region(size: int, kind: Kind, device: int = 0) -> Region:
    """Memory for an arena of ``size`` bytes, all pages present; pinned where there is CUDA.

    Raises:
        ConfigError: the machine has no such memory, or too little of it.
    """
    import torch

    size = -(-size // GRANULE) * GRANULE
    before = table_bytes(size)
    length = before + (size if kind == "host" else 0)
    fd = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Allocating the pages now turns a lack of memory into an error here instead of a SIGBUS at first use.
        os.posix_fallocate(fd, 0, length)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
        memory = mmap.mmap(fd, length, flags=mmap.MAP_SHARED | _populate())
        payload = (
            torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=before)
            if kind == "host"
            else torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        )
    except (OSError, RuntimeError) as error:
        os.close(fd)
        raise ConfigError(f"no {kind} memory for an arena of {size} bytes: {error}") from error
    nonce = secrets.token_bytes(NONCE_BYTES)
    memory[: len(MAGIC) + NONCE_BYTES] = MAGIC + nonce
    words = np.frombuffer(memory, dtype=np.uint64, count=before // 8)
    region = Region(
        kind=kind,
        device=device,
        size=size,
        payload=payload,
        table=words[HEADER_BYTES // 8 : HEADER_BYTES // 8 + size // GRANULE],
        scratch=words[SCRATCH_OFFSET // 8 : HEADER_BYTES // 8],
        probe=words[PROBE_OFFSET // 8 : (PROBE_OFFSET + len(MAGIC) + NONCE_BYTES) // 8],
        nonce=nonce,
        fd=fd,
        base=payload.data_ptr(),
        table_base=words.ctypes.data,
    )
    # Copies between pinned memory and the device are asynchronous and twice as fast.
    pin = kind == "host" and torch.cuda.is_available()
    if pin and int(torch.cuda.cudart().cudaHostRegister(region.base, size, 0)) == 0:
        region._pinned = region.base
    return region


@dataclass(frozen=True)
class Mapped:
    """A peer's host region as this process sees it: read-only.

    The memory stays valid after the peer has died, for as long as this object is referred to.
    """

    payload: np.ndarray
    table: np.ndarray


def map_region(pid: int, fd: int, size: int, nonce: bytes) -> Mapped:
    """Map the region of the process ``pid`` on this machine.

    Raises:
        TransferError: ``protocol``; it is not there, may not be opened, or is not the region that was announced.
    """
    path = f"/proc/{pid}/fd/{fd}"
    length = table_bytes(size) + size
    try:
        # The numbers come from the wire: nothing but a sealed file of ours, of this size and nonce, is used.
        if not os.readlink(path).startswith(f"/memfd:{_FILE_NAME}"):
            raise TransferError("protocol", f"{path} is not an arena")
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(os.close, opened)
            status = os.fstat(opened)
            seals = fcntl.fcntl(opened, _F_GET_SEALS)
            if not stat.S_ISREG(status.st_mode) or status.st_size != length or not seals & _SEAL_SHRINK:
                raise TransferError("protocol", f"{path} is not an arena of {size} bytes")
            memory = mmap.mmap(opened, length, flags=mmap.MAP_SHARED | _populate(), prot=mmap.PROT_READ)
    except OSError as error:
        raise TransferError("protocol", f"cannot map the peer's arena {path}: {error}") from error
    if memory[: len(MAGIC) + NONCE_BYTES] != MAGIC + nonce:
        raise TransferError("protocol", f"{path} is another process's arena")
    data = np.frombuffer(memory, dtype=np.uint8)
    start = table_bytes(size)
    return Mapped(data[start:], data[HEADER_BYTES : HEADER_BYTES + 8 * (size // GRANULE)].view(np.uint64))


def machine_id() -> str:
    """Names the running kernel: equal for all processes on one machine, other after a reboot."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return secrets.token_hex(16)


def _populate() -> int:
    return int(getattr(mmap, "MAP_POPULATE", 0))
