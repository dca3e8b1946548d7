# SPDX-License-Identifier: Apache-2.0
"""Decides what the next step computes, and owns the blocks of all requests. Pure bookkeeping: no tensors, no waiting.

A request is admitted in order of arrival, once every block that it can ever need is certain (TensorRT-LLM's
GUARANTEED_NO_EVICT), so that no admitted request ever waits for another one. The one exception to the order: a
request whose next block is being computed by another one waits for that block and lets others pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .block_cache import BlockCache, Node
from .config import ReferenceConfig
from .sequence import Seq


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start..end`` of a sequence, computed in one step; from the last known token a new one is sampled."""

    seq: Seq
    start: int
    end: int

    @property
    def samples(self) -> bool:
        return self.end == self.seq.length


@dataclass
class Plan:
    """One step: which blocks to copy first, whose KV to fetch from elsewhere meanwhile, and what to compute."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    imports: list[Seq] = field(default_factory=list)


class Scheduler:
    """Requests that wait and run.

    Args:
        cache: the blocks.
        config: budgets; ``max_batch_size`` at most ``max_num_tokens``.
    """

    def __init__(self, cache: BlockCache, config: ReferenceConfig):
        self.cache = cache
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self.exported: list[Seq] = []
        self._config = config
        self._size = cache.tokens_per_block
        self._reserved = 0
        self._computing: dict[bytes, Seq] = {}  # key of a block -> who is going to commit it

    def add(self, seq: Seq) -> None:
        self.waiting.append(seq)

    def schedule(self) -> Plan:
        """Plan the next step. Without chunks, nothing can be computed until something changes."""
        plan = Plan()
        budget = self._config.max_num_tokens
        ready = [seq for seq in self.running if not seq.importing]
        for seq in ready:
            if seq.length > seq.n:
                budget -= self._plan_chunk(plan, seq, seq.length)
        for seq in ready:
            if seq.length == seq.n:
                end = seq.cut(seq.computed, min(seq.n, seq.computed + budget))
                if end == seq.computed:
                    return plan
                budget -= self._plan_chunk(plan, seq, end)
        self._admit(plan, budget)
        return plan

    def _admit(self, plan: Plan, budget: int) -> None:
        for seq in tuple(self.waiting):
            if len(self.running) >= self._config.max_batch_size:
                return
            if seq.awaits in self._computing:
                continue
            nodes, matched = self._match(seq)
            block = matched // self._size
            if seq.shareable and block < seq.n // self._size and seq.keys[block] in self._computing:
                seq.awaits = seq.keys[block]
                continue
            remote = seq.request.remote_kv is not None
            end = seq.n if remote else seq.cut(matched, min(seq.n, matched + budget))
            if not remote and (end == matched or (end < seq.n and not self._config.enable_chunked_prefill)):
                return
            if not self._enter(plan, seq, nodes, matched):
                return
            if remote:
                plan.imports.append(seq)
                self._take(seq, seq.n)
            else:
                budget -= self._plan_chunk(plan, seq, seq.cut(seq.computed, min(seq.n, seq.computed + budget)))

    def _match(self, seq: Seq) -> tuple[list[Node], int]:
        """The reusable prefix. The last prompt token is always computed, unless all KV comes from elsewhere."""
        if not seq.shareable:
            return [], 0
        remote = seq.request.remote_kv is not None
        nodes, matched = self.cache.match(seq.root, seq.keys, seq.prompt_blocks, seq.n if remote else seq.n - 1)
        cut = seq.cut(0, matched)
        if not self._config.enable_partial_reuse or (remote and cut < seq.n):
            cut = self._whole_blocks(seq, cut)
        return nodes[: -(-cut // self._size)], cut

    def _whole_blocks(self, seq: Seq, tokens: int) -> int:
        """The most tokens, up to ``tokens``, that end with a block and at a place where the prompt may be cut."""
        while tokens % self._size or seq.cut(0, tokens) != tokens:
            tokens = seq.cut(0, tokens - tokens % self._size)
        return tokens

    def _enter(self, plan: Plan, seq: Seq, nodes: list[Node], matched: int) -> bool:
        """Give ``seq`` its shared blocks and reserve the rest; False where too few blocks are left."""
        full = matched // self._size
        self.cache.pin(nodes)
        need = len(seq.blocks) - full
        if need > self.cache.available - self._reserved and len(nodes) > full:
            # The block to copy from may be the one that is missing.
            self.cache.unpin(nodes)
            matched = self._whole_blocks(seq, matched)
            return self._enter(plan, seq, nodes[: matched // self._size], matched)
        if need > self.cache.available - self._reserved:
            self.cache.unpin(nodes)
            return False
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.taken_up()
        seq.awaits = None
        seq.reserved = need
        self._reserved += need
        seq.nodes = nodes[:full]
        seq.blocks[:full] = [node.block for node in seq.nodes]
        seq.num_blocks = full
        seq.computed = seq.cached_tokens = matched
        if len(nodes) > full:
            seq.source = nodes[full]
            self._take(seq, matched)
            plan.copies.append((seq.source.block, int(seq.blocks[full])))
        if seq.shareable:
            self._publish(seq)
            for key in seq.keys[full : seq.n // self._size]:
                self._computing.setdefault(key, seq)
        return True

    def _plan_chunk(self, plan: Plan, seq: Seq, end: int) -> int:
        if end == seq.computed:
            return 0
        plan.chunks.append(Chunk(seq, seq.computed, end))
        self._take(seq, end)
        return end - seq.computed

    def _take(self, seq: Seq, tokens: int) -> None:
        """Give ``seq`` private blocks, of those reserved for it, for its first ``tokens`` tokens."""
        count = -(-tokens // self._size) - seq.num_blocks
        if count > 0:
            seq.blocks[seq.num_blocks : seq.num_blocks + count] = self.cache.take(count)
            seq.num_blocks += count
            seq.reserved -= count
            self._reserved -= count

    def computed(self, seq: Seq, end: int) -> None:
        """The KV of the first ``end`` tokens is there: commit the blocks that became full."""
        seq.computed = end
        self._drop_source(seq)
        before = len(seq.nodes)
        while seq.shareable and (len(seq.nodes) + 1) * self._size <= end:
            i = len(seq.nodes)
            key, tokens = seq.block(i)
            node = self.cache.commit(seq.nodes[-1] if i else None, seq.root, key, tokens, int(seq.blocks[i]))
            self._forget(seq, key)
            if node is None:
                seq.shareable = False
                break
            seq.blocks[i] = node.block
            seq.nodes.append(node)
        if len(seq.nodes) > before:
            self._publish(seq)

    def _publish(self, seq: Seq) -> None:
        request = seq.request
        lora = None if request.lora_id is None else str(request.lora_id)
        self.cache.publish(seq.nodes, seq.router_ids(), request.cache_salt, lora)

    def export(self, seq: Seq) -> None:
        """Take ``seq`` out of the batch; it keeps its blocks until ``release``."""
        self.running.remove(seq)
        self.exported.append(seq)
        for key in seq.keys:
            self._forget(seq, key)

    def release(self, seq: Seq) -> None:
        """Free everything that ``seq`` holds, wherever it stands. Safe to call twice."""
        for queue in (self.waiting, self.running, self.exported):
            if seq in queue:
                queue.remove(seq)
        self._drop_source(seq)
        for key in seq.keys:
            self._forget(seq, key)
        full = len(seq.nodes)
        private = seq.blocks[full : seq.num_blocks].tolist()
        if private and seq.shareable and seq.computed > full * self._size:
            key, tokens = seq.block(full)
            self.cache.commit_last(seq.nodes[-1] if full else None, seq.root, key, tokens, private.pop(0))
        self.cache.give(private)
        self.cache.unpin(seq.nodes)
        self._reserved -= seq.reserved
        seq.nodes, seq.num_blocks, seq.reserved = [], 0, 0

    def _drop_source(self, seq: Seq) -> None:
        if seq.source is not None:
            self.cache.unpin((seq.source,))
            seq.source = None

    def _forget(self, seq: Seq, key: bytes) -> None:
        if self._computing.get(key) is seq:
            del self._computing[key]

    def _holders(self) -> Iterator[Seq]:
        yield from self.running
        yield from self.exported

    def check(self) -> None:
        """Raise ``RuntimeError`` where the bookkeeping contradicts itself."""
        private = [b for seq in self._holders() for b in seq.blocks[len(seq.nodes) : seq.num_blocks].tolist()]
        pins = [node for seq in self._holders() for node in [*seq.nodes, *([seq.source] if seq.source else [])]]
        self.cache.check(private, pins)
        holders = set(self._holders())
        if self._reserved != sum(seq.reserved for seq in holders):
            raise RuntimeError("blocks are reserved for nobody")
        if not set(self._computing.values()) <= set(self.running):
            raise RuntimeError("a block is awaited from a request that does not run")
        for seq in holders:
            if any(seq.blocks[i] != node.block for i, node in enumerate(seq.nodes)):
                raise RuntimeError("a request reads another block than the one that it pins")
        if any(seq.nodes or seq.num_blocks or seq.reserved for seq in self.waiting):
            raise RuntimeError("a request that waits holds blocks")
