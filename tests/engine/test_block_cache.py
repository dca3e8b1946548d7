# SPDX-License-Identifier: Apache-2.0
"""The block cache against a simple model of it: a plain list of prefixes, searched from end to end."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from dynamo_epd.contract.block_keys import AugmentedTokens, augmented_tokens, block_keys, root_key
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.engine.base import BlocksRemoved, BlocksStored
from dynamo_epd.engine.reference import block_cache
from dynamo_epd.engine.reference.block_cache import BlockCache, Node, block_tokens

SIZE = 4
ROOT = root_key()


def keyed(tokens: list[int], root: bytes = ROOT) -> tuple[list[bytes], list[tuple[int, ...]]]:
    augmented = AugmentedTokens(np.array(tokens, np.int64))
    return block_keys(augmented, SIZE, root), block_tokens(augmented, SIZE)


def store(cache: BlockCache, tokens: list[int], root: bytes = ROOT) -> list[Node]:
    """Commit all of ``tokens`` as a sequence would, and leave it unpinned. Gives the full nodes."""
    keys, blocks = keyed(tokens, root)
    nodes, matched = cache.match(root, keys, blocks, len(tokens) // SIZE * SIZE)
    nodes = nodes[: matched // SIZE]
    cache.pin(nodes)
    for i in range(len(nodes), len(blocks)):
        parent = nodes[-1] if nodes else None
        (block,) = cache.take(1)
        if len(blocks[i]) < SIZE:
            cache.commit_last(parent, root, keys[i], blocks[i], block)
        else:
            node = cache.commit(parent, root, keys[i], blocks[i], block)
            assert node is not None
            nodes.append(node)
    cache.unpin(nodes)
    return nodes


def matched(cache: BlockCache, tokens: list[int], limit: int = 10**9, root: bytes = ROOT) -> int:
    return cache.match(root, *keyed(tokens, root), limit)[1]


def test_full_blocks_are_found_and_the_last_one_as_far_as_it_matches() -> None:
    cache = BlockCache(8, SIZE)
    store(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert matched(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 9
    assert matched(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 9
    assert matched(cache, [1, 2, 3, 4, 5, 6, 0, 8, 9]) == 6
    assert matched(cache, [0, 2, 3, 4]) == 0
    assert matched(cache, [1, 2, 3, 4, 5, 6, 7, 8], limit=7) == 7
    assert matched(cache, [1, 2, 3, 4], root=root_key(cache_salt="another")) == 0


def test_the_best_of_many_siblings_is_found() -> None:
    cache = BlockCache(300, SIZE)
    for a in range(0, 60, 2):
        for b in range(5):
            store(cache, [7, a, b, 3])
    assert matched(cache, [7, 30, 4, 9]) == 3
    assert matched(cache, [7, 30, 9, 9]) == 2
    assert matched(cache, [7, 31, 1, 1]) == 1


def test_a_hash_collision_is_a_miss() -> None:
    cache = BlockCache(4, SIZE)
    (a,) = store(cache, [1, 2, 3, 4])
    collision = [a.key]
    assert cache.match(ROOT, collision, [(5, 6, 7, 8)], 4) == ([], 0)
    (block,) = cache.take(1)
    assert cache.commit(None, ROOT, a.key, (5, 6, 7, 8), block) is None
    cache.give([block])
    assert cache.match(ROOT, collision, [(1, 2, 3, 4)], 4) == ([a], 4)
    cache.check([], [])


def test_the_digest_tells_items_apart_and_interchangeable_tokens_do_not_match_it() -> None:
    item = np.array([-1, 0, 0, 0, 0, 0, -1, -1])
    layout = PromptLayout.from_flat([5, 9, 9, 9, 9, 9, 6, 7], item, np.zeros(8, bool), 1)
    cache = BlockCache(8, SIZE)

    def prompt(digest: str | None) -> tuple[list[bytes], list[tuple[int, ...]]]:
        mm = layout.multimodal_input([digest]) if digest else None
        augmented = augmented_tokens(layout.token_ids, mm, 100)
        return block_keys(augmented, SIZE, ROOT), block_tokens(augmented, SIZE)

    keys, blocks = prompt("11" * 32)
    nodes: list[Node] = []
    for key, tokens, block in zip(keys, blocks, cache.take(2), strict=True):
        node = cache.commit(nodes[-1] if nodes else None, ROOT, key, tokens, block)
        assert node is not None
        nodes.append(node)
    assert cache.match(ROOT, *prompt("11" * 32), 8)[1] == 8
    assert cache.match(ROOT, *prompt("22" * 32), 8)[1] == 1
    assert cache.match(ROOT, *prompt(None), 8)[1] == 1


def test_the_least_recently_used_leaf_goes_first_and_never_a_pinned_block() -> None:
    cache = BlockCache(4, SIZE)
    ab = store(cache, [1, 1, 1, 1, 2, 2, 2, 2])
    cd = store(cache, [3, 3, 3, 3, 4, 4, 4, 4])
    cache.pin(ab)
    cache.unpin(ab)  # used after cd
    cache.take(1)
    assert matched(cache, [3, 3, 3, 3, 4, 4, 4, 4]) == 4
    assert matched(cache, [1, 1, 1, 1, 2, 2, 2, 2]) == 8
    cache.pin(cd[:1])
    assert cache.available == 2
    cache.take(2)
    assert matched(cache, [3, 3, 3, 3]) == 4
    assert matched(cache, [1, 1, 1, 1]) == 0


def test_eviction_looks_at_few_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One comparison for each halving of the siblings, and none with other blocks, be they siblings or in chains."""
    looked = 0

    def counted(node: Node) -> tuple[int, ...]:
        nonlocal looked
        looked += 1
        return node.tokens

    class Counted(OrderedDict[Node, None]):
        def __iter__(self) -> Iterator[Node]:
            nonlocal looked
            for node in super().__iter__():
                looked += 1
                yield node

    cache = BlockCache(4096, SIZE)
    for i in range(1024):
        store(cache, [i % 32, i // 32, 0, 0, *range(8), 1])
    cache._idle = Counted(cache._idle)
    looked = 0
    monkeypatch.setattr(block_cache, "_by_tokens", counted)
    for evicted in range(1, 1025):
        cache.take(1)
        assert 0 < looked <= 13 * evicted
    assert cache.used == 4096 and cache.available == 3072


def test_an_equal_block_that_came_first_is_shared() -> None:
    cache = BlockCache(4, SIZE)
    (a,) = store(cache, [1, 2, 3, 4])
    (block,) = cache.take(1)
    assert cache.commit(None, ROOT, a.key, a.tokens, block) is a
    assert a.refs == 1
    assert cache.used == 1


def test_a_part_filled_block_gives_way_to_its_continuation() -> None:
    cache = BlockCache(8, SIZE)
    store(cache, [1, 2])
    store(cache, [1, 2, 3])
    assert cache.used == 1
    store(cache, [1, 2])
    assert cache.used == 1
    store(cache, [1, 2, 3, 4])
    assert cache.used == 1
    store(cache, [1, 2, 4])
    assert cache.used == 2
    cache.check([], [])


def test_events_name_blocks_in_chain_order_and_only_known_parents() -> None:
    cache = BlockCache(4, SIZE)
    events: list[BlocksStored | BlocksRemoved] = []
    cache.listeners.append(events.append)
    a, b, c = store(cache, list(range(12)))
    cache.publish([a, b, c], list(range(100, 109)), cache_salt="s")  # the router knows two blocks only
    cache.publish([a, b, c], list(range(100, 112)), cache_salt="s")
    cache.publish([a, b, c], list(range(100, 112)), cache_salt="s")
    assert events == [
        BlocksStored((a.event_hash, b.event_hash), None, tuple(range(100, 108)), "s"),
        BlocksStored((c.event_hash,), b.event_hash, tuple(range(108, 112)), "s"),
    ]
    assert all(0 <= node.event_hash < 2**63 for node in (a, b, c))
    events.clear()
    cache.take(3)
    assert events == [BlocksRemoved((c.event_hash,)), BlocksRemoved((b.event_hash,))]


def test_scopes_that_are_empty_are_forgotten() -> None:
    cache = BlockCache(2, SIZE)
    for i in range(50):
        store(cache, [1, 2, 3, 4, 5], root_key(cache_salt=str(i)))
    assert len(cache._roots) == 1


@dataclass
class Prefix:
    """A committed block in the simple model: the scope and all tokens up to its end."""

    scope: int
    tokens: tuple[int, ...]
    pins: int = 0
    used: int = 0


@dataclass
class Simple:
    """What the cache must do, in the most obvious way."""

    blocks: int
    prefixes: list[Prefix] = field(default_factory=list)
    private: int = 0
    clock: int = 0

    def find(self, scope: int, tokens: tuple[int, ...]) -> Prefix | None:
        return next((p for p in self.prefixes if p.scope == scope and p.tokens == tokens), None)

    def match(self, scope: int, tokens: tuple[int, ...], limit: int) -> int:
        full = 0
        while full + SIZE <= min(limit, len(tokens)) and self.find(scope, tokens[: full + SIZE]):
            full += SIZE
        best = 0
        for p in self.prefixes:
            if p.scope == scope and full < len(p.tokens) <= full + SIZE and p.tokens[:full] == tokens[:full]:
                common = 0
                while (
                    common < min(len(p.tokens), len(tokens)) - full and p.tokens[full + common] == tokens[full + common]
                ):
                    common += 1
                best = max(best, common)
        return min(limit, full + best)

    def has_child(self, p: Prefix) -> bool:
        n = len(p.tokens)
        return any(q.scope == p.scope and len(q.tokens) > n and q.tokens[:n] == p.tokens for q in self.prefixes)

    def take(self, count: int) -> None:
        for _ in range(count):
            if self.private + len(self.prefixes) == self.blocks:
                leaves = [p for p in self.prefixes if not p.pins and not self.has_child(p)]
                self.prefixes.remove(min(leaves, key=lambda p: p.used))
            self.private += 1

    def unpin(self, chain: list[Prefix]) -> None:
        for p in reversed(chain):
            p.pins -= 1
            self.clock += 1
            if not p.pins:
                p.used = self.clock

    def drop_continued(self, new: Prefix) -> None:
        n = len(new.tokens)
        for p in list(self.prefixes):
            k = len(p.tokens)
            if (
                p.scope == new.scope
                and k % SIZE
                and k < n
                and n - k < SIZE
                and new.tokens[:k] == p.tokens
                and not p.pins
            ):
                self.prefixes.remove(p)


def random_operations(seed: int, count: int, check_every: int) -> int:
    """Sequences that start, grow, end and leave at random. Gives the number of evictions seen."""
    rng = random.Random(seed)
    blocks = rng.choice([5, 12, 24])
    cache, simple = BlockCache(blocks, SIZE), Simple(blocks)
    removed = 0
    known: set[int] = set()

    def on_event(event: BlocksStored | BlocksRemoved) -> None:
        nonlocal removed
        if isinstance(event, BlocksStored):
            assert event.parent_hash is None or event.parent_hash in known
            assert not known & set(event.block_hashes)
            assert len(event.token_ids) == SIZE * len(event.block_hashes)
            known.update(event.block_hashes)
        else:
            removed += 1
            assert set(event.block_hashes) <= known
            known.difference_update(event.block_hashes)

    cache.listeners.append(on_event)
    roots = [root_key(), root_key(cache_salt="a")]
    # A running sequence: scope, tokens, its nodes and the model's prefixes, its private blocks.
    running: list[tuple[int, list[int], list[Node], list[Prefix], list[int]]] = []
    for step in range(count):
        kind = rng.random()
        if kind < 0.35 or not running:
            scope = rng.randrange(2)
            tokens = [rng.randrange(2 if i % SIZE else 3) for i in range(rng.randrange(1, 5 * SIZE))]
            keys, cut = keyed(tokens, roots[scope])
            limit = rng.choice([len(tokens), len(tokens) - 1])
            nodes, found = cache.match(roots[scope], keys, cut, limit)
            assert found == simple.match(scope, tuple(tokens), limit)
            full = found // SIZE
            need = len(cut) - full
            cache.pin(nodes[:full])
            if need > cache.available:
                cache.unpin(nodes[:full])
                chain = [simple.find(scope, tuple(tokens[: (i + 1) * SIZE])) for i in range(full)]
                for p in chain:
                    assert p is not None
                    p.pins += 1
                simple.unpin([p for p in chain if p])
                continue
            prefixes = []
            for i in range(full):
                p = simple.find(scope, tuple(tokens[: (i + 1) * SIZE]))
                assert p is not None
                p.pins += 1
                prefixes.append(p)
            private = cache.take(need)
            simple.take(need)
            assert len(set(private)) == need
            running.append((scope, tokens, nodes[:full], prefixes, private))
        elif kind < 0.75:
            scope, tokens, nodes, prefixes, private = rng.choice(running)
            i = len(nodes)
            if (i + 1) * SIZE > len(tokens):
                continue
            keys, cut = keyed(tokens, roots[scope])
            node = cache.commit(nodes[-1] if nodes else None, roots[scope], keys[i], cut[i], private.pop(0))
            assert node is not None
            nodes.append(node)
            simple.private -= 1
            prefix = simple.find(scope, tuple(tokens[: (i + 1) * SIZE]))
            if prefix is None:
                prefix = Prefix(scope, tuple(tokens[: (i + 1) * SIZE]))
                simple.prefixes.append(prefix)
                simple.drop_continued(prefix)
            prefix.pins += 1
            prefixes.append(prefix)
            if rng.random() < 0.7:
                cache.publish(nodes, tokens[: rng.randrange(len(tokens) + 1)])
        else:
            scope, tokens, nodes, prefixes, private = running.pop(rng.randrange(len(running)))
            i = len(nodes)
            computed = rng.randrange(i * SIZE, min(len(tokens), (i + 1) * SIZE - 1) + 1)
            if private and computed > i * SIZE:
                keys, cut = keyed(tokens[:computed], roots[scope])
                cache.commit_last(nodes[-1] if nodes else None, roots[scope], keys[i], cut[i], private.pop(0))
                simple.private -= 1
                part = tuple(tokens[:computed])
                held = [p for p in simple.prefixes if p.scope == scope and i * SIZE < len(p.tokens) <= (i + 1) * SIZE]
                if not any(p.tokens[:computed] == part for p in held):
                    simple.clock += 1
                    prefix = Prefix(scope, part, used=simple.clock)
                    simple.prefixes.append(prefix)
                    simple.drop_continued(prefix)
            cache.give(private)
            simple.private -= len(private)
            cache.unpin(nodes)
            simple.unpin(prefixes)
        if step % check_every == 0:
            cache.check([b for *_, p in running for b in p], [n for _, _, nodes, _, _ in running for n in nodes])
        assert cache.used == simple.private + len(simple.prefixes)
    return removed


def test_random_operations_equal_the_simple_model() -> None:
    assert sum(random_operations(seed, 1500, check_every=1) for seed in range(4)) > 100


@pytest.mark.slow
def test_100_000_random_operations_equal_the_simple_model() -> None:
    assert sum(random_operations(seed, 5_000, check_every=1) for seed in range(100, 120)) > 1000
