# SPDX-License-Identifier: Apache-2.0
"""How block events are got out of a running TensorRT-LLM, without holding up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any


async def new_events(llm: Any) -> AsyncGenerator[Any, None]:
    """What ``llm`` has to tell of its blocks now, as dicts; waits for nothing more.

    To be asked after the first request only: before it, older releases have no queue and raise ``AssertionError``.

    Releases differ. In newer ones, whose executor has an ``rpc_client``, both ways to ask block their caller until
    another process has answered, so the plain one is called in a thread. In older ones only the asynchronous way works:
    it raises ``QueueEmpty`` at the end where it must not wait, and where it may, it is silent from then until the next
    request.
    """
    if getattr(getattr(llm, "_executor", None), "rpc_client", None) is not None:
        for event in await _in_thread(lambda: llm.get_kv_cache_events(timeout=0)):
            yield event
        return
    with contextlib.suppress(asyncio.QueueEmpty):
        async for event in llm.get_kv_cache_events_async(timeout=0):
            yield event


async def _in_thread(function: Callable[[], Any]) -> Any:
    """``function``'s result, from a thread that holds up no exit: a dead engine never answers."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, failure = None, None
        try:
            value = function()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name="trtllm-block-events", daemon=True).start()
    return await future
