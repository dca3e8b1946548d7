# SPDX-License-Identifier: Apache-2.0
"""Tells Dynamo's KV-aware router which blocks this worker can reuse."""

from __future__ import annotations

import logging
from collections import deque

from dynamo.llm import KvEventPublisher

from ..engine.base import BlocksRemoved, BlocksStored, Engine

logger = logging.getLogger(__name__)


class KVEventForwarder:
    """Forwards an engine's block events to a ``KvEventPublisher``, in order, also those from before it was there.

    Args:
        engine: whose events to forward.
        tokens_per_block: block size; equals the registered ``kv_cache_block_size``.
    """

    def __init__(self, engine: Engine, tokens_per_block: int):
        self._block = tokens_per_block
        self._publisher: KvEventPublisher | None = None
        self._early: deque[BlocksStored | BlocksRemoved] = deque()
        self.skipped = 0
        engine.listen(self._on_event)

    def publish_to(self, publisher: KvEventPublisher) -> None:
        """Called by Dynamo's worker once the publisher is there."""
        self._publisher = publisher
        while self._early:
            self._on_event(self._early.popleft())

    def _on_event(self, event: BlocksStored | BlocksRemoved) -> None:
        if self._publisher is None:
            self._early.append(event)
            return
        try:
            if isinstance(event, BlocksStored):
                self._publisher.publish_stored(
                    token_ids=list(event.token_ids),
                    num_block_tokens=[self._block] * len(event.block_hashes),
                    block_hashes=list(event.block_hashes),
                    parent_hash=event.parent_hash,
                )
            else:
                self._publisher.publish_removed(block_hashes=list(event.block_hashes))
        except Exception:
            # An event that the router cannot take costs a missed route; it must not cost the request.
            self.skipped += 1
            logger.exception("a KV event was not published (%d so far)", self.skipped)

    def close(self) -> None:
        self._publisher = None
        self._early.clear()
