# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine: Python, devices, and the rights and variables that fast transfers depend on."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from .finding import Finding, green, red, yellow

_PYTHON = ((3, 10), (3, 13))
_SHM = Path("/dev/shm")
_SHM_WANTED = 1 << 30
_GIB = 1 << 30

_LOOPBACK_ONLY = {"shm", "self", "sm", "mm", "posix", "sysv"}
_CUDA = {"cuda", "cuda_copy", "cuda_ipc", "all"}

_PEEK = """
import ctypes, sys
pid, address = int(sys.argv[1]), int(sys.argv[2])
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
local = Vector(ctypes.addressof(buffer), 8)
remote = Vector(address, 8)
libc = ctypes.CDLL(None, use_errno=True)
read = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
sys.stdout.write("ok" if read == 8 else str(ctypes.get_errno()))
"""


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    low, high = _PYTHON
    if low <= sys.version_info[:2] <= high:
        return green("Python", version)
    return red("Python", version, f"use Python {low[0]}.{low[1]} to {high[0]}.{high[1]}")


def devices() -> Finding:
    try:
        import torch
    except Exception as error:
        return red("torch", f"cannot be imported: {error}", "install the torch that your CUDA driver supports")
    if not torch.cuda.is_available():
        return yellow(
            "torch", f"{torch.__version__}, no GPU", "fine for the reference engine; TensorRT-LLM needs a CUDA GPU"
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return green("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, {listed}")


def shared_memory() -> Finding:
    """``/dev/shm``: handles of host tensors, and MPI between the engine's own processes, live there."""
    try:
        size = shutil.disk_usage(_SHM).total
        writable = os.access(_SHM, os.W_OK)
    except OSError as error:
        return red("shared memory", f"{_SHM}: {error}", "mount a tmpfs at /dev/shm")
    if not writable:
        return red("shared memory", f"{_SHM} cannot be written", "mount /dev/shm writable for this user")
    if size < _SHM_WANTED:
        return yellow(
            "shared memory",
            f"{_SHM} has {size >> 20} MiB",
            "docker run --shm-size=8g, or an emptyDir with medium: Memory on Kubernetes",
        )
    return green("shared memory", f"{_SHM} has {size / _GIB:.1f} GiB")


def peer_memory() -> Finding:
    """Whether a process may read another's memory, as UCX's ``cma`` does: a child tries to read this process."""
    word = ctypes.create_string_buffer(b"epd-peek", 8)
    command = [sys.executable, "-I", "-S", "-c", _PEEK, str(os.getpid()), str(ctypes.addressof(word))]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return yellow("reading a peer's memory", f"could not be tried: {error}", "transfers fall back to slower ways")
    if said == "ok":
        return green("reading a peer's memory", "allowed: transfers on one machine need no network")
    return yellow(
        "reading a peer's memory",
        f"refused ({os.strerror(int(said)) if said.isdigit() else said})",
        "add the SYS_PTRACE capability, or set kernel.yama.ptrace_scope=0; without it UCX uses slower transports",
    )


def peer_files() -> Finding:
    """Whether a process may open another's descriptors, as the mapped arena does."""
    handle = os.memfd_create("dynamo-epd-doctor")
    try:
        code = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDONLY)); print('ok')"
        path = f"/proc/{os.getpid()}/fd/{handle}"
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, path], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        return yellow("mapping a peer's arena", f"could not be tried: {error}", "transfers fall back to slower ways")
    finally:
        os.close(handle)
    if done.returncode == 0:
        return green("mapping a peer's arena", "allowed: workers on one machine share embeddings without a copy")
    return yellow(
        "mapping a peer's arena",
        (done.stderr.strip().splitlines() or ["refused"])[-1],
        "run the workers as one user in one PID namespace (shareProcessNamespace: true, --pid=host)",
    )


def locked_memory() -> Finding | None:
    """The limit on locked memory; only RDMA cards care."""
    if not Path("/sys/class/infiniband").is_dir():
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return green("locked memory", "unlimited")
    return yellow(
        "locked memory",
        f"limited to {soft >> 10} KiB: the arena cannot be registered with the RDMA card",
        "ulimit -l unlimited, docker run --ulimit memlock=-1, or the IPC_LOCK capability",
    )


def transports(env: Mapping[str, str], *, gpu: bool, gb200: bool = False) -> Iterator[Finding]:
    """UCX and NCCL variables that are known to hurt.

    Args:
        gpu: whether embeddings or KV live in GPU memory here.
        gb200: whether the GPUs reach those of other nodes by NVLink.
    """
    chosen = env.get("UCX_TLS", "").strip().lower()
    names = {name.strip().lstrip("\\") for name in chosen.lstrip("^").split(",") if name.strip()}
    found = True
    if names and not chosen.startswith("^"):
        if names <= _LOOPBACK_ONLY:
            yield red("UCX_TLS", f"{chosen}: NIXL cannot make an agent with it", "unset UCX_TLS, or add tcp")
        elif gpu and not names & _CUDA:
            yield red(
                "UCX_TLS",
                f"{chosen}: GPU memory cannot be registered",
                "UCX_TLS=cuda_copy,cuda_ipc,tcp, and rc before tcp with InfiniBand",
            )
        elif names == {"tcp"}:
            yield yellow("UCX_TLS", "tcp alone: reads are emulated, several times slower than writes", "unset UCX_TLS")
        else:
            found = False
    else:
        found = False
    if not found:
        yield green("UCX_TLS", chosen or "not set: UCX chooses")
    if gpu and env.get("UCX_MEMTYPE_CACHE", "").lower() in ("y", "1", "yes", "on"):
        yield yellow("UCX_MEMTYPE_CACHE", "on: memory of another allocator is misjudged", "UCX_MEMTYPE_CACHE=n")
    if gb200:
        for name, wanted in (
            ("NCCL_MNNVL_ENABLE", "1"),
            ("NCCL_CUMEM_ENABLE", "1"),
            ("UCX_CUDA_IPC_ENABLE_MNNVL", "y"),
        ):
            if env.get(name) != wanted:
                yield yellow(
                    name, f"{env.get(name, 'not set')}: NVLink between nodes may stay unused", f"{name}={wanted}"
                )


def has_gpu() -> tuple[bool, bool]:
    """Whether there is a GPU, and whether it is a GB200 or later of its kind."""
    try:
        import torch
    except Exception:  # ``devices`` reports it
        return False, False
    if not torch.cuda.is_available():
        return False, False
    return True, torch.cuda.get_device_name(0).upper().startswith(("NVIDIA GB2", "GB2", "NVIDIA GB3", "GB3"))
