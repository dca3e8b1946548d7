# SPDX-License-Identifier: Apache-2.0
"""Which network device the data plane uses where it has TCP alone: the one whose address the peers are told."""

from __future__ import annotations

import os
from pathlib import Path
from socket import inet_ntoa

import pytest

from dynamo_epd.transfer import device
from dynamo_epd.transfer.device import tcp_alone, wire_device

from .child import WIDTH, make_offer
from .conftest import Opened


@pytest.mark.parametrize(
    ("tls", "devices", "host", "found"),
    [
        ("tcp", None, "127.0.0.1", "lo"),
        ("TCP, self", "all", "127.0.0.1", "lo"),
        ("tcp", None, "localhost", "lo"),
        ("tcp", None, "203.0.113.9", None),
        ("tcp", None, "::1", None),
        ("tcp", None, "no such host", None),
        ("tcp", None, "x" * 300, None),
        ("tcp", "eth7", "127.0.0.1", None),
        ("rc,tcp", None, "127.0.0.1", None),
        ("cuda_ipc,tcp", None, "127.0.0.1", None),
        ("^tcp", None, "127.0.0.1", None),
        (None, None, "127.0.0.1", None),
    ],
)
def test_the_device_is_chosen_where_it_is_ours_to_choose(
    monkeypatch: pytest.MonkeyPatch, tls: str | None, devices: str | None, host: str, found: str | None
) -> None:
    for name, value in (("UCX_TLS", tls), ("UCX_NET_DEVICES", devices)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert wire_device(host) == found


@pytest.mark.parametrize(
    ("tls", "devices", "alone"),
    [
        ("tcp", ["mlx5_0"], True),
        ("self,tcp", None, True),
        (None, None, True),
        (None, [], True),
        ("all", [], True),
        (None, ["mlx5_0"], False),
        ("", ["efa_0"], False),
        ("rc,tcp", None, False),
        ("^tcp", None, False),
        ("shm", None, False),
    ],
)
def test_tcp_is_all_there_is_where_ucx_was_told_so_or_has_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tls: str | None, devices: list[str] | None, alone: bool
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
    listed = tmp_path / "infiniband"
    for name in devices or []:
        (listed / name).mkdir(parents=True)
    if devices == []:
        listed.mkdir()
    monkeypatch.setattr(device, "RDMA_DEVICES", listed)
    assert tcp_alone() == alone


@pytest.mark.parametrize("before", [None, "all"])
async def test_nobody_else_is_listened_to(opened: Opened, monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("UCX_NET_DEVICES", before)
    others = _sockets()
    sender, receiver = await opened(mode="write", tls="tcp"), await opened(mode="write", tls="tcp")
    (await receiver.fetch(await make_offer(sender, WIDTH, 1))).release()
    assert {address for socket, address in _sockets().items() if socket not in others} == {"127.0.0.1"}
    assert os.environ.get("UCX_NET_DEVICES") == before


def _sockets() -> dict[str, str]:
    """This process's IPv4 sockets, listening or connected: the inode of each, and its own address."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
        except FileNotFoundError:
            continue  # the one that lists them
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {row[9]: inet_ntoa(bytes.fromhex(row[1].split(":")[0])[::-1]) for row in rows if row[9] in inodes}
