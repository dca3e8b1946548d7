# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading

import pytest
import torch

from dynamo_epd.models.base import Expansion, Prepared
from dynamo_epd.workers.batching import EncodeBatcher


def item(value, modality="image"):
    return Prepared(modality, {"x": torch.tensor([float(value)])}, Expansion(()), 1)


class Encoder:
    """Doubles each item; the first call waits for ``gate`` so that later items queue up behind it."""

    def __init__(self):
        self.gate = threading.Event()
        self.calls = []

    def __call__(self, items):
        self.gate.wait(10)
        self.calls.append([(i.modality, float(i.features["x"])) for i in items])
        if len(items) > 1 and any(float(i.features["x"]) < 0 for i in items):
            raise RuntimeError("one of them is bad")
        if float(items[0].features["x"]) < 0:
            raise ValueError("negative")
        return [i.features["x"] * 2 for i in items]


@pytest.fixture
def encoder():
    return Encoder()


@pytest.fixture
def batcher(encoder):
    batcher = EncodeBatcher(encoder, 3)
    yield batcher
    encoder.gate.set()
    batcher.close()


async def test_items_that_arrive_meanwhile_go_together(batcher, encoder):
    tasks = [asyncio.ensure_future(batcher.submit(item(i))) for i in range(1, 6)]
    await asyncio.sleep(0)
    encoder.gate.set()
    assert [float(t) for t in await asyncio.gather(*tasks)] == [2, 4, 6, 8, 10]
    assert [len(call) for call in encoder.calls] == [3, 2]


async def test_modalities_are_not_mixed_in_one_call(batcher, encoder):
    encoder.gate.set()
    kinds = ["image", "audio", "image"]
    await asyncio.gather(*(batcher.submit(item(1, kind)) for kind in kinds))
    assert all(len({kind for kind, _ in call}) == 1 for call in encoder.calls)
    assert sum(len(call) for call in encoder.calls) == 3


async def test_a_bad_item_fails_alone(batcher, encoder):
    encoder.gate.set()
    results = await asyncio.gather(*(batcher.submit(item(v)) for v in (1, -1, 3)), return_exceptions=True)
    assert float(results[0]) == 2 and float(results[2]) == 6
    assert isinstance(results[1], ValueError)


async def test_items_that_nobody_waits_for_are_not_encoded(batcher, encoder):
    first = asyncio.ensure_future(batcher.submit(item(1)))
    await asyncio.sleep(0.01)
    gone = asyncio.ensure_future(batcher.submit(item(2)))
    await asyncio.sleep(0)
    gone.cancel()
    encoder.gate.set()
    await first
    assert float(await batcher.submit(item(3))) == 6
    assert all(("image", 2.0) not in call for call in encoder.calls)
