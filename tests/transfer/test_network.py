# SPDX-License-Identifier: Apache-2.0
"""Three hosts with 20 ms and 1% loss between any two of them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator

import pytest

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.transfer.protocol import PAYLOAD_BYTES

from .conftest import Child, Spawn
from .faults import expected
from .network import Host, hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2"),
]

MB = 1 << 20


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with hosts(3, 0.020, 0.01) as made:
        yield made


async def place(spawn: Spawn, host: Host, **config: object) -> Child:
    return await spawn(
        netns=host.name,
        host=host.address,
        **{"tls": "tcp", "mode": "auto", "verify_transfers": True, "timeout": 20.0, **config},
    )


async def test_from_encode_to_prefill_to_decode(spawn: Spawn, three: list[Host]) -> None:
    encode, prefill, decode = [await place(spawn, host) for host in three]
    sizes = [64 << 10, MB, 3 * MB, PAYLOAD_BYTES + MB]
    for turn in range(4):
        batch = [(nbytes, 10 * turn + i) for i, nbytes in enumerate(sizes)]
        sums = await asyncio.gather(*(_carry(encode, prefill, nbytes, seed) for nbytes, seed in batch))
        assert sums == [expected(nbytes, seed) for nbytes, seed in batch]
        sums = await asyncio.gather(*(_carry(prefill, decode, nbytes, seed) for nbytes, seed in batch))
        assert sums == [expected(nbytes, seed) for nbytes, seed in batch]
    assert (await prefill.call("state"))["ways"] == ["stream"]
    await asyncio.gather(encode.rest(), prefill.rest(), decode.rest())


@pytest.mark.parametrize(("nbytes", "quarantined"), [(24 * MB, 24 * MB), (PAYLOAD_BYTES, 0)])
async def test_a_cable_that_is_pulled_out_during_a_transfer(
    spawn: Spawn, three: list[Host], nbytes: int, quarantined: int
) -> None:
    encode, prefill = [await place(spawn, host, timeout=3.0, offer_ttl=4.0) for host in three[:2]]
    assert await _carry(encode, prefill, MB, 1) == expected(MB, 1)
    ref = await encode.offer(nbytes, 2)
    fetching = asyncio.create_task(prefill.fetch(ref))
    await asyncio.sleep(0.2)
    three[0].cut(True)
    with pytest.raises(TransferError) as caught:
        await fetching
    assert caught.value.reason == "timeout"
    assert (await prefill.call("state"))["quarantined"] == quarantined
    three[0].cut(False)
    # What was on its way arrives now, in a slot that nobody else has; then both sides are as before.
    await asyncio.gather(encode.rest(), prefill.rest())
    assert await _carry(encode, prefill, MB, 3) == expected(MB, 3)


async def _carry(sender: Child, receiver: Child, nbytes: int, seed: int) -> str:
    return await receiver.fetch(await sender.offer(nbytes, seed))
