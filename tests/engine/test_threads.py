# SPDX-License-Identifier: Apache-2.0
"""Whoever leaves waits for the thread that still uses what it gives back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dynamo_epd.engine.threads import to_its_end


async def test_a_result_and_an_error_come_back() -> None:
    assert await to_its_end(None, lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        await to_its_end(None, lambda: 1 // 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_cancelled_again_and_again_it_still_waits_for_the_thread(fails: bool) -> None:
    go, undone = threading.Event(), []

    def call() -> str:
        assert go.wait(60)
        if fails:
            raise ValueError("late")
        return "result"

    task = asyncio.ensure_future(to_its_end(None, call, undo=undone.append))
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == ([] if fails else ["result"])
