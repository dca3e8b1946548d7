# SPDX-License-Identifier: Apache-2.0
"""A request that is cancelled while a thread copies into its slot keeps the slot until the thread is done.

Otherwise the next request gets the memory, and the late copy puts another's content under its digest.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynamo_epd.transfer import Endpoint, TransferConfig, open_transfer
from dynamo_epd.workers.encode import EncodeWorker
from dynamo_epd.workers.prefill import PrefillWorker

SHAPE = (16, 1024)


@pytest.fixture
async def transfer() -> AsyncIterator[Endpoint]:
    endpoint = await open_transfer(TransferConfig(host="127.0.0.1", mode="map", arena_bytes=1 << 20))
    yield endpoint
    await endpoint.close()


async def held_until_the_thread_is_done(transfer: Endpoint, copying: Any, go: threading.Event) -> None:
    size = transfer.arena.free_bytes
    task = asyncio.ensure_future(copying)
    for _ in range(2):
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.sleep(0.01)
    assert transfer.arena.free_bytes < size
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert transfer.arena.free_bytes == size


async def test_encode(transfer: Endpoint) -> None:
    go = threading.Event()
    worker = EncodeWorker(SimpleNamespace())  # type: ignore[arg-type]
    worker.transfer, worker._threads = transfer, ThreadPoolExecutor(1)
    worker._threads.submit(go.wait, 60)  # what copies stands behind it
    item: Any = SimpleNamespace(modality="image", rows=SHAPE[0], positions={})
    await held_until_the_thread_is_done(transfer, worker._store(SimpleNamespace(), [(item, torch.ones(SHAPE))]), go)  # type: ignore[arg-type]
    worker._threads.shutdown()


async def test_prefill(transfer: Endpoint) -> None:
    go = threading.Event()
    worker = PrefillWorker(SimpleNamespace())  # type: ignore[arg-type]
    worker._running = SimpleNamespace(transfer=transfer)  # type: ignore[assignment]
    kv: Any = SimpleNamespace(shape=SHAPE, dtype=torch.float32, copy_to=lambda out: go.wait(60))
    await held_until_the_thread_is_done(transfer, worker._offer(kv, "r"), go)
