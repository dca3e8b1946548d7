# SPDX-License-Identifier: Apache-2.0
"""Checks of NIXL: that it is there, which backends it has, and that it really moves bytes."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .finding import Finding, green, red

_BYTES = 1 << 20
_DEADLINE_S = 20.0
_INSTALL = "pip install nixl, of the same CUDA major version as torch"


def nixl() -> Iterator[Finding]:
    """Move 1 MB from one agent of this process to another and compare it."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config

        logging.getLogger("nixl").setLevel(logging.ERROR)  # it announces each agent on standard output
        installed = version("nixl")
    except PackageNotFoundError:
        installed = "of unknown version"
    except Exception as error:
        yield red("NIXL", f"cannot be imported: {error!r}", _INSTALL)
        return
    try:
        names = [f"doctor-{secrets.token_hex(4)}-{side}" for side in "ab"]
        a, b = (nixl_agent(name, nixl_agent_config(enable_prog_thread=False)) for name in names)
    except Exception as error:
        yield red("NIXL", f"{installed}: no agent with the UCX backend: {error!r}", "check UCX_TLS; " + _INSTALL)
        return
    yield green("NIXL", f"{installed}, backends {', '.join(sorted(a.get_plugin_list()))}")
    yield _transfer(a, b, names[1])


def _transfer(a: Any, b: Any, name_of_b: str) -> Finding:
    import numpy as np

    check = "NIXL transfer"
    source = np.frombuffer(secrets.token_bytes(_BYTES), np.uint8).copy()
    target = np.zeros(_BYTES, np.uint8)
    registered = []
    handle = None
    try:
        for agent, memory in ((a, target), (b, source)):
            registered.append((agent, agent.register_memory([(memory.ctypes.data, _BYTES, 0, "")], "DRAM")))
        a.add_remote_agent(b.get_agent_metadata())
        here = a.get_xfer_descs([(target.ctypes.data, _BYTES, 0)], "DRAM")
        there = a.get_xfer_descs([(source.ctypes.data, _BYTES, 0)], "DRAM")
        began = time.monotonic()
        handle = a.initialize_xfer("READ", here, there, name_of_b)
        state = a.transfer(handle)
        while state == "PROC" and time.monotonic() - began < _DEADLINE_S:
            b.get_new_notifs()  # without a progress thread both sides must be driven
            state = a.check_xfer_state(handle)
        took = time.monotonic() - began
    except Exception as error:
        return red(check, f"failed: {error!r}", "check UCX_TLS and UCX_NET_DEVICES; UCX_LOG_LEVEL=info says more")
    finally:
        if handle is not None:
            a.release_xfer_handle(handle)
        for agent, registration in registered:
            agent.deregister_memory(registration)
    if state != "DONE":
        return red(check, f"1 MB did not arrive in {_DEADLINE_S:g} s ({state})", "check UCX_TLS and UCX_NET_DEVICES")
    if not np.array_equal(source, target):
        return red(check, "1 MB arrived changed", "use another UCX transport (UCX_TLS), and report it to NIXL")
    return green(check, f"1 MB read in {1000 * took:.1f} ms, unchanged")
