# SPDX-License-Identifier: Apache-2.0
"""Puts items of concurrent requests into one encoder call."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from ..models.base import Prepared

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class _Item(NamedTuple):
    prepared: Prepared
    done: asyncio.Future[torch.Tensor]
    begun: Callable[[], None]


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
        self._waiting: deque[_Item] = deque()
        self._runner: asyncio.Task[None] | None = None

    async def submit(self, prepared: Prepared, begun: Callable[[], None] = lambda: None) -> torch.Tensor:
        """The item's embedding ``[rows, width]``; raises what the encoder raises for it.

        Args:
            begun: called when the item's turn has come.
        """
        done: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Item(prepared, done, begun))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.ensure_future(self._run())
        return await done

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = self._take()
            for item in batch:
                item.begun()
            try:
                outputs: list[torch.Tensor | Exception] = list(
                    await loop.run_in_executor(self._thread, self._encode, [item.prepared for item in batch])
                )
            except Exception as error:
                if len(batch) == 1:
                    outputs = [error]
                else:
                    logger.warning("encoding %d items together failed, trying each alone", len(batch), exc_info=error)
                    outputs = [await self._alone(item.prepared) for item in batch]
            for item, output in zip(batch, outputs, strict=True):
                if item.done.cancelled():
                    continue
                if isinstance(output, Exception):
                    item.done.set_exception(output)
                else:
                    item.done.set_result(output)

    def _take(self) -> list[_Item]:
        """Waiting items of one modality, oldest first; those that nobody waits for any more are dropped."""
        batch: list[_Item] = []
        others: deque[_Item] = deque()
        while self._waiting and len(batch) < self._max_items:
            item = self._waiting.popleft()
            if item.done.cancelled():
                continue
            same = not batch or batch[0].prepared.modality == item.prepared.modality
            (batch if same else others).append(item)
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
            self._waiting.popleft().done.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)
