# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    disaggregated_params: Any = None


class GenerationResult:
    """What ``generate_async`` returns: itself, again and again, with what is there so far."""

    def __init__(self, request_id: int, on_abort: Callable[[], None]):
        self.request_id = request_id
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.cached_tokens = 0
        self._on_abort = on_abort
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Callable[[], None]] = asyncio.Queue()

    def _push(self, change: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, change)

    def abort(self) -> None:
        self._on_abort()

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self.finished:
            raise StopAsyncIteration
        change = await self._queue.get()
        change()
        return self

    async def aresult(self) -> GenerationResult:
        async for _ in self:
            pass
        return self
