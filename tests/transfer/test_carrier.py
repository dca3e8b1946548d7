# SPDX-License-Identifier: Apache-2.0
"""Copies out of mapped memory, and what may be mapped at all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.contract.handoff import TensorRef
from dynamo_epd.transfer.arena import Arena
from dynamo_epd.transfer.carrier import Carrier
from dynamo_epd.transfer.config import GRANULE
from dynamo_epd.transfer.memory import MAGIC, Region, map_region, open_region, table_bytes
from dynamo_epd.transfer.offers import offer_number


@pytest.fixture
def region() -> Iterator[Region]:
    made = open_region(4 * GRANULE, "host")
    yield made
    made.close()


class Changing:
    """A generation table that is looked at twice."""

    def __init__(self, *seen: int):
        self._seen = iter(seen)

    def __getitem__(self, index: int) -> int:
        return next(self._seen)


@pytest.mark.parametrize(
    ("seen", "reason"),
    [((5, 5), None), ((5, 6), "generation"), ((5, 0), "generation"), ((0,), "expired"), ((4,), "expired")],
)
async def test_what_changes_under_a_copy_is_found_out(
    region: Region, seen: tuple[int, ...], reason: str | None
) -> None:
    carrier = Carrier(region, None, asyncio.get_running_loop())
    slots = Arena(region).take([GRANULE])
    assert slots is not None
    peer = SimpleNamespace(mapped=SimpleNamespace(payload=np.full(4 * GRANULE, 9, np.uint8), table=Changing(*seen)))
    results: list[TransferError | None] = []
    ref = TensorRef("h:1", "a", offer_number(1, 2), 5, "d", (GRANULE,), "uint8")
    carrier.bring(peer, ref, 0, GRANULE, slots[0], results.append)  # type: ignore[arg-type]
    (error,) = results
    assert (error.reason if error else None) == reason
    assert bool(slots[0].tensor((GRANULE,), "uint8").any()) == (len(seen) == 2)
    await carrier.close()


def test_a_region_is_mapped_by_its_nonce(region: Region) -> None:
    region.payload[5] = 77
    region.table[3] = 123
    mapped = map_region(os.getpid(), region.fd, region.size, region.nonce)
    assert mapped.payload[5] == 77 and mapped.table[3] == 123
    assert not mapped.payload.flags.writeable and not mapped.table.flags.writeable
    region.payload[5] = 78
    region.close()
    # It stays valid without the file, and without the process.
    assert mapped.payload[5] == 78


def test_nothing_but_the_announced_region_is_mapped(region: Region, tmp_path: os.PathLike[str]) -> None:
    pid = os.getpid()
    other = os.path.join(tmp_path, "file")
    with open(other, "wb") as file:
        file.write(MAGIC + region.nonce + bytes(table_bytes(region.size) + region.size))
    unsealed = os.memfd_create("dynamo-epd-arena")
    os.truncate(unsealed, table_bytes(region.size) + region.size)
    plain = os.open(other, os.O_RDONLY)
    try:
        for fd, size, nonce in (
            (region.fd, region.size, bytes(16)),
            (region.fd, region.size + GRANULE, region.nonce),
            (plain, region.size, region.nonce),
            (unsealed, region.size, region.nonce),
            (99999, region.size, region.nonce),
            (0, region.size, region.nonce),
        ):
            with pytest.raises(TransferError) as caught:
                map_region(pid, fd, size, nonce)
            assert caught.value.reason == "protocol"
        with pytest.raises(TransferError):
            map_region(1 << 30, region.fd, region.size, region.nonce)
    finally:
        os.close(unsealed)
        os.close(plain)


def test_a_peer_cannot_cut_a_mapped_region_short(region: Region) -> None:
    # Whoever maps it would be killed by a read behind the new end.
    with pytest.raises(OSError):
        os.truncate(region.fd, GRANULE)
