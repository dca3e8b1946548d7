# SPDX-License-Identifier: Apache-2.0
"""Calls that touch memory which others get when the caller is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


async def to_its_end(
    executor: Executor | None, call: Callable[..., T], *args: Any, undo: Callable[[T], object] = lambda result: None
) -> T:
    """``call(*args)`` in a thread; a cancellation, however often it comes, takes effect when the thread is done.

    A thread cannot be stopped. If its caller left before, what the caller then gives back would still be read or
    written, and by then it may be another request's.

    Args:
        executor: None for the event loop's own.
        undo: called with the result where the caller was cancelled and nobody takes it.
    """
    job = asyncio.get_running_loop().run_in_executor(executor, call, *args)
    cancelled: asyncio.CancelledError | None = None
    while not job.done():
        try:
            await asyncio.wait({job})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return job.result()
    if not job.cancelled() and job.exception() is None:
        undo(job.result())
    raise cancelled
