# SPDX-License-Identifier: Apache-2.0
"""The block pool and the prefix tree over the blocks that can be reused.

A block is free, private (one sequence writes to it), or committed: a node of the tree, immutable, shared, pinned by
``refs`` sequences. A node's key is what ``contract.block_keys`` gives, so it stands for the whole prefix; its tokens
are stored as well and compared at every lookup, so that a collision of hashes is a miss. Whoever pins a node pins all
its ancestors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...contract.block_keys import AugmentedTokens
from ..base import BlocksRemoved, BlocksStored, KVEventListener

Tokens = tuple[int, ...]
"""The tokens of one block: ids, and a negative number for a digest."""

_HASH_MASK = (1 << 63) - 1


def block_tokens(tokens: AugmentedTokens, tokens_per_block: int) -> list[Tokens]:
    """The augmented tokens cut in blocks, the last one possibly shorter."""
    ids = tokens.ids.tolist()
    for position, digest in zip(tokens.digest_positions.tolist(), tokens.digests, strict=True):
        ids[position] = -1 - int.from_bytes(digest, "big")
    return [tuple(ids[i : i + tokens_per_block]) for i in range(0, len(ids), tokens_per_block)]


class Node:
    """A committed block, or a root (one for each scope) that has no block."""

    __slots__ = ("block", "children", "key", "parent", "published", "refs", "siblings", "tokens")

    def __init__(self, key: bytes, tokens: Tokens = (), parent: Node | None = None, block: int = -1):
        self.key = key
        self.tokens = tokens
        self.parent = parent or self  # a root is its own parent
        self.block = block
        self.refs = 0
        self.published = parent is None
        self.children: dict[bytes, Node] = {}
        self.siblings: list[Node] = []  # the children, sorted by tokens

    @property
    def event_hash(self) -> int:
        """The non-negative 63-bit hash under which KV events name the block."""
        return int.from_bytes(self.key[:8], "little") & _HASH_MASK


def _longest_common_prefix(siblings: Sequence[Node], tokens: Tokens) -> tuple[Node | None, int]:
    """The node of sorted ``siblings`` that shares most leading tokens with ``tokens``, and how many.

    In a sorted list that is one of the two neighbours of where ``tokens`` would stand.
    """
    i = bisect_left(siblings, tokens, key=_by_tokens)
    best: tuple[Node | None, int] = (None, 0)
    for node in siblings[max(i - 1, 0) : i + 1]:
        common = next((k for k, (a, b) in enumerate(zip(node.tokens, tokens, strict=False)) if a != b), None)
        if common is None:
            common = min(len(node.tokens), len(tokens))
        if common > best[1]:
            best = node, common
    return best


def _by_tokens(node: Node) -> Tokens:
    return node.tokens


class BlockCache:
    """Blocks ``1..num_blocks`` (0 is never handed out); not thread-safe.

    Args:
        num_blocks: size of the pool.
        tokens_per_block: tokens in a full block.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int):
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.listeners: list[KVEventListener] = []
        self._free = list(range(num_blocks, 0, -1))
        self._roots: dict[bytes, Node] = {}
        # Unpinned nodes, least recently used first. A chain is unpinned from its end, so a node always stands behind
        # all of its descendants and the first one is a leaf.
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that ``take`` can give: free ones and those that nobody pins."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that are private or committed."""
        return self.num_blocks - len(self._free)

    def match(self, root: bytes, keys: Sequence[bytes], blocks: Sequence[Tokens], limit: int) -> tuple[list[Node], int]:
        """The longest cached prefix of a prompt, at most ``limit`` tokens.

        Args:
            root: the scope's ``root_key``.
            keys: key of every block of the prompt.
            blocks: tokens of every block, the last one possibly part filled.

        Returns:
            The nodes, and how many tokens they hold of the prompt. All but the last node match as a whole; the last
            one, where the tokens end inside it, must be copied before it is written to.
        """
        nodes: list[Node] = []
        matched = 0
        at = self._roots.get(root)
        for key, tokens in zip(keys, blocks, strict=True):
            if at is None or matched >= limit:
                break
            child = at.children.get(key)
            if child is not None and child.tokens == tokens and len(tokens) == self.tokens_per_block <= limit - matched:
                nodes.append(child)
                matched += len(tokens)
                at = child
                continue
            child, common = _longest_common_prefix(at.siblings, tokens)
            common = min(common, limit - matched)
            if child is not None and common:
                nodes.append(child)
                matched += common
            break
        return nodes, matched

    def pin(self, nodes: Iterable[Node]) -> None:
        """Keep ``nodes`` (a chain from the root, or the continuation of one that is pinned) from being evicted."""
        for node in nodes:
            if node.refs == 0:
                del self._idle[node]
            node.refs += 1

    def unpin(self, nodes: Sequence[Node]) -> None:
        """Undo ``pin``; ``nodes`` in the same order."""
        for node in reversed(nodes):
            node.refs -= 1
            if node.refs == 0:
                self._idle[node] = None

    def take(self, count: int) -> list[int]:
        """``count`` private blocks, evicting the least recently used leaves; ``count`` must be ``available``."""
        while len(self._free) < count:
            self._remove(next(iter(self._idle)))
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Free private blocks."""
        self._free.extend(blocks)

    def commit(self, parent: Node | None, root: bytes, key: bytes, tokens: Tokens, block: int) -> Node | None:
        """Make a private block, now completely written, reusable; the caller holds a pin on the result.

        Where an equal block is there already, ``block`` is freed and the other one is the result. None where another
        block has the same key (then ``block`` stays private).

        Args:
            parent: the node before, pinned by the caller, or None for the first block.
            root: the scope's ``root_key``.
        """
        at = parent or self._root(root)
        node = at.children.get(key)
        if node is None:
            node = Node(key, tokens, at, block)
            node.refs = 1
            self._insert(node)
            return node
        if node.tokens != tokens:
            return None
        self.pin((node,))
        self.give((block,))
        return node

    def commit_last(self, parent: Node | None, root: bytes, key: bytes, tokens: Tokens, block: int) -> None:
        """Give up a private block that is full or part filled and whose sequence goes no further.

        It becomes reusable and is not pinned; it is freed where the tree holds its tokens already.
        """
        at = parent or self._root(root)
        _, common = _longest_common_prefix(at.siblings, tokens)
        if common == len(tokens) or key in at.children:
            self.give((block,))
            self._drop_root(at)
            return
        node = Node(key, tokens, at, block)
        self._insert(node)
        self._idle[node] = None

    def publish(
        self,
        nodes: Sequence[Node],
        router_ids: Sequence[int] | np.ndarray,
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Tell the listeners of those of ``nodes`` that they do not know yet, as far as they know what is before.

        Args:
            nodes: a chain of full blocks from the root.
            router_ids: the router's ids of their tokens; blocks beyond its end are not told.
            cache_salt, lora_name: the scope, as the router knows it.
        """
        size = self.tokens_per_block
        start = 0
        while start < len(nodes) and nodes[start].published:
            start += 1
        end = min(len(nodes), len(router_ids) // size)
        if start >= end:
            return
        for node in nodes[start:end]:
            node.published = True
        parent = nodes[start - 1].event_hash if start else None
        hashes = tuple(node.event_hash for node in nodes[start:end])
        ids = tuple(int(t) for t in router_ids[start * size : end * size])
        self._emit(BlocksStored(hashes, parent, ids, cache_salt, lora_name))

    def _root(self, key: bytes) -> Node:
        return self._roots.get(key) or self._roots.setdefault(key, Node(key))

    def _insert(self, node: Node) -> None:
        at = node.parent
        at.children[node.key] = node
        i = bisect_left(at.siblings, node.tokens, key=_by_tokens)
        at.siblings.insert(i, node)
        # A part-filled block that this one continues has no use any more; it sorts right before its continuation.
        before = at.siblings[i - 1] if i else node
        if before is not node and before.refs == 0 and node.tokens[: len(before.tokens)] == before.tokens:
            self._remove(before)

    def _remove(self, node: Node) -> None:
        """Forget an unpinned leaf and free its block."""
        at = node.parent
        del self._idle[node]
        del at.children[node.key]
        del at.siblings[bisect_left(at.siblings, node.tokens, key=_by_tokens)]
        self._free.append(node.block)
        self._drop_root(at)
        if node.published:
            self._emit(BlocksRemoved((node.event_hash,)))

    def _drop_root(self, at: Node) -> None:
        if at.parent is at and not at.children:
            self._roots.pop(at.key, None)

    def _emit(self, event: BlocksStored | BlocksRemoved) -> None:
        for listener in self.listeners:
            listener(event)

    def check(self, private: Iterable[int], pins: Iterable[Node]) -> None:
        """Raise ``RuntimeError`` where the state contradicts itself.

        Args:
            private: all private blocks that the callers hold.
            pins: every pinned node, once for each pin.
        """
        held = Counter(pins)
        nodes = [node for root in self._roots.values() for node in _descendants(root)]
        blocks = sorted([*self._free, *private, *(node.block for node in nodes)])
        problems = []
        if blocks != list(range(1, self.num_blocks + 1)):
            problems.append(f"blocks are lost or held twice: {blocks}")
        if any(node.refs != held[node] for node in nodes) or not set(held) <= set(nodes):
            problems.append("pins were lost, or a pinned block was evicted")
        if {node for node in nodes if node.refs == 0} != set(self._idle):
            problems.append("the idle blocks are not the unpinned ones")
        age = {node: i for i, node in enumerate(self._idle)}
        for node in nodes:
            parent = node.parent
            if parent.parent is not parent:
                if node.refs > parent.refs:
                    problems.append("a block is pinned and what comes before it is not")
                if parent in age and age[parent] < age[node]:
                    problems.append("a block would be evicted before its continuation")
            if node.published and not parent.published:
                problems.append("the router knows a block without what comes before it")
            if len(node.tokens) != self.tokens_per_block and (node.children or node.published):
                problems.append("a part-filled block has children or was published")
        for at in [*self._roots.values(), *nodes]:
            if at.siblings != sorted(at.children.values(), key=_by_tokens):
                problems.append("the sorted children differ from the children")
        if any(not root.children for root in self._roots.values()):
            problems.append("a scope without blocks was kept")
        if problems:
            raise RuntimeError("; ".join(sorted(set(problems))))


def _descendants(root: Node) -> Iterator[Node]:
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()
