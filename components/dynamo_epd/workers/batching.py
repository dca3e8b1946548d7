# SPDX-License-Identifier: Apache-2.0
"""Puts items of concurrent requests into one encoder call."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..models.base import Prepared

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class EncodeBatcher:
    """Runs the encoder in one thread; what arrives while it is busy goes into its next call.

    Nothing waits for company: an item that finds the encoder idle is encoded alone at once.

    Args:
        encode: ``Family.encode``.
        max_items: items in one call at most.
    """

    def __init__(self, encode: Callable[[Sequence[Prepared]], list[torch.Tensor]], max_items: int):
        self._encode = encode
        self._max_items = max_items
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._waiting: deque[tuple[Prepared, asyncio.Future[torch.Tensor]]] = deque()
        self._runner: asyncio.Task[None] | None = None

    async def submit(self, prepared: Prepared) -> torch.Tensor:
        """The item's embedding ``[rows, width]``; raises what the encoder raises for it."""
        done: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self._waiting.append((prepared, done))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.ensure_future(self._run())
        return await done

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = self._take()
            try:
                outputs: list[torch.Tensor | Exception] = list(
                    await loop.run_in_executor(self._thread, self._encode, [item for item, _ in batch])
                )
            except Exception as error:
                if len(batch) == 1:
                    outputs = [error]
                else:
                    logger.warning("encoding %d items together failed, trying each alone", len(batch), exc_info=error)
                    outputs = [await self._alone(item) for item, _ in batch]
            for (_, done), output in zip(batch, outputs, strict=True):
                if done.cancelled():
                    continue
                if isinstance(output, Exception):
                    done.set_exception(output)
                else:
                    done.set_result(output)

    def _take(self) -> list[tuple[Prepared, asyncio.Future[torch.Tensor]]]:
        """Waiting items of one modality, oldest first; those that nobody waits for any more are dropped."""
        batch: list[tuple[Prepared, asyncio.Future[torch.Tensor]]] = []
        others: deque[tuple[Prepared, asyncio.Future[torch.Tensor]]] = deque()
        while self._waiting and len(batch) < self._max_items:
            item, done = self._waiting.popleft()
            if done.cancelled():
                continue
            same = not batch or batch[0][0].modality == item.modality
            (batch if same else others).append((item, done))
        self._waiting.extendleft(reversed(others))
        return batch

    async def _alone(self, item: Prepared) -> torch.Tensor | Exception:
        try:
            return (await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, [item]))[0]
        except Exception as error:
            return error

    def close(self) -> None:
        """Let the call that runs finish and fail what waits."""
        while self._waiting:
            self._waiting.popleft()[1].cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)
