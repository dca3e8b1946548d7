# SPDX-License-Identifier: Apache-2.0
"""What Dynamo's KV-aware router is told: which blocks this worker can reuse, and how much it has to do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynamo.common.backend.publisher import ComponentSnapshot
from dynamo.llm import KvEventPublisher

from ..engine.base import BlocksRemoved, BlocksStored, Engine

logger = logging.getLogger(__name__)


class KVEventForwarder:
    """Forwards an engine's block events to a ``KvEventPublisher``, in order.

    Args:
        engine: whose events to forward.
        tokens_per_block: block size; equals the registered ``kv_cache_block_size``.
    """

    def __init__(self, engine: Engine, tokens_per_block: int):
        self._engine = engine
        self._block = tokens_per_block
        self._publisher: KvEventPublisher | None = None
        self.skipped = 0

    def publish_to(self, publisher: KvEventPublisher) -> None:
        """Called by Dynamo's worker once the publisher is there, which is before the first request."""
        self._publisher = publisher
        self._engine.listen(self._on_event)

    def _on_event(self, event: BlocksStored | BlocksRemoved) -> None:
        if self._publisher is None:
            return
        try:
            if isinstance(event, BlocksStored):
                self._publisher.publish_stored(
                    token_ids=list(event.token_ids),
                    num_block_tokens=[self._block] * len(event.block_hashes),
                    block_hashes=list(event.block_hashes),
                    parent_hash=event.parent_hash,
                    lora_name=event.lora_name,
                    cache_salt=event.cache_salt,
                )
            else:
                self._publisher.publish_removed(block_hashes=list(event.block_hashes))
        except Exception:
            # An event that the router cannot take costs a missed route; it must not cost the request.
            self.skipped += 1
            logger.exception("a KV event was not published (%d so far)", self.skipped)

    def close(self) -> None:
        """Publish nothing from now on."""
        self._publisher = None


class LoadReporter:
    """Counts the KV blocks that the requests in flight need, and how much of their prompts was cached.

    Blocks that are only kept for reuse do not count: they are there for the next request to take, and a worker whose
    cache is full of them is not busy.

    Args:
        total_blocks, tokens_per_block: of the engine.
    """

    def __init__(self, total_blocks: int, tokens_per_block: int):
        self._total, self._block = total_blocks, tokens_per_block
        self._publisher: Any = None
        self._used = self._prompt_tokens = self._cached_tokens = 0

    def publish_to(self, publisher: Any) -> None:
        """``publisher``: Dynamo's ``SnapshotPublisher``."""
        self._publisher = publisher
        self._publish()

    @contextmanager
    def request(self, prompt_tokens: int) -> Iterator[LoadReporter]:
        """A request is in flight inside this context."""
        blocks = -(-prompt_tokens // self._block)
        self._change(blocks)
        try:
            yield self
        finally:
            self._change(-blocks)

    def cached(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Of a prompt of so many tokens, so many came from the block cache."""
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def snapshot(self) -> ComponentSnapshot:
        """The state now; the hit rate is that of all prompts so far, by tokens."""
        used = min(self._used, self._total)
        rate = self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None
        return ComponentSnapshot(used, self._total, used / self._total, dp_rank=0, kv_cache_hit_rate=rate)

    def _change(self, blocks: int) -> None:
        self._used += blocks
        self._publish()

    def _publish(self) -> None:
        if self._publisher is not None:
            self._publisher.publish(0, self.snapshot())
