# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's block events -> ours, with token ids as a KV-aware router knows them.

The router hashes an image's tokens as one number per image, the engine's events carry placeholder ids (V1 manager: plus
``mm_keys``, which may be the caller's uuids) or digests and item-local ids (V2). Neither says where in a block an image
stands, or which image a uuid means. So the engine remembers the prompts that it sent, computes the keys that the engine
will give their blocks, and looks a stored block up by its name. Where an engine names blocks in a way of its own (V2
does so where it is told to use V1's names, and releases differ in how a salt enters a name), the block is found by what
it holds: its parent's key and its tokens. A block with media that is not known is not published, and neither is
anything behind it.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...contract import block_keys_v1
from ...contract.block_keys import Token, augmented_tokens, block_keys, extend_key, root_key
from ...contract.multimodal_input import MultimodalInput
from ..base import BlocksRemoved, BlocksStored

logger = logging.getLogger(__name__)

UNKNOWN = -1
"""In ``KnownPrompt.routing_ids``: the router has no id for this token, so a block with it is not published."""

_MASK64 = 2**64 - 1
_DIGEST = re.compile("[0-9a-f]{64}")

MmKeys = Sequence[Mapping[str, Any]] | None
"""V1: per run that touches a block its item's digest or uuid, and an offset."""

BlockHash = int | str
"""An engine's name of a block: V1's or truncated V2's 64-bit number, or V2's SHA-256 in hex."""


@dataclass(frozen=True, eq=False)
class KnownPrompt:
    """A prompt as it was sent to the engine.

    Attributes:
        token_ids: int64 ``[n]`` ids that the engine got.
        routing_ids: int64 ``[n]`` ids that the router knows; ``UNKNOWN`` where it has none.
        multimodal_input: the keys that the engine got, or None.
        engine_salt: the salt that the engine got.
        cache_salt: the caller's own.
    """

    token_ids: np.ndarray
    routing_ids: np.ndarray
    multimodal_input: MultimodalInput | None
    engine_salt: str | None
    cache_salt: str | None


@dataclass(frozen=True)
class _Place:
    """The block that starts at ``start`` of ``prompt``; ``key`` is its V2 key, whatever its engine calls it."""

    prompt: KnownPrompt
    start: int
    key: bytes


class EventTranslator:
    """Keeps what is needed to translate one engine's events, in order.

    Args:
        tokens_per_block: the engine's block size.
        vocab_size: where item-local ids begin (V2).
        max_blocks: block hashes to remember; the least recently stored prompts are forgotten first.

    Attributes:
        malformed: events that could not be read and were skipped.
        unknown: blocks with media whose prompt is not known; they were not published.
    """

    def __init__(self, tokens_per_block: int, vocab_size: int, *, max_blocks: int = 1 << 18):
        self._block = tokens_per_block
        self._vocab_size = vocab_size
        self._max_blocks = max_blocks
        self._fresh: deque[KnownPrompt] = deque(maxlen=4096)
        self._unhashed_v1: deque[KnownPrompt] = deque(maxlen=4096)
        self._places: OrderedDict[BlockHash, _Place] = OrderedDict()
        self._media_ids: set[int] = set()
        self._salted = False
        self._published: Counter[int] = Counter()
        self._keys: dict[int, bytes] = {}
        self._partial: set[BlockHash] = set()
        self._window: int | None = None
        self._created = True
        self.malformed = 0
        self.unknown = 0

    @property
    def published_blocks(self) -> int:
        """Blocks that the router knows now."""
        return len(self._published)

    def remember(self, prompt: KnownPrompt, slots: np.ndarray) -> None:
        """Note a prompt that is about to be sent. Plain text under the caller's own salt need not be.

        Args:
            slots: bool ``[n]``, where embedding rows go.
        """
        self._media_ids.update(np.unique(prompt.token_ids[slots]).tolist())
        self._salted |= prompt.engine_salt != prompt.cache_salt
        self._fresh.append(prompt)

    def translate(self, event: object) -> list[BlocksStored | BlocksRemoved]:
        """Our events for one of the engine's. Never raises: what cannot be read is counted and skipped."""
        try:
            return list(self._translate(event))
        except Exception as error:
            self.malformed += 1
            logger.warning("a KV event of the engine was skipped (%d so far): %r", self.malformed, error)
            return []

    def _translate(self, event: Any) -> Iterator[BlocksStored | BlocksRemoved]:
        data = event["data"]
        kind = data["type"]
        window = event.get("window_size")
        if kind == "created" and self._created:
            self._window = max(filter(None, (self._window, window)), default=None)
            return
        if kind not in ("stored", "removed"):
            return
        self._created = False
        if window is not None and self._window is not None and window != self._window:
            # Layers with a sliding window report their own blocks; routing counts those of full attention.
            return
        if kind == "removed":
            removed = list(self._removed(data["block_hashes"]))
            if removed:
                yield BlocksRemoved(tuple(removed))
            return
        yield from self._stored(data)

    def _removed(self, hashes: Sequence[BlockHash]) -> Iterator[int]:
        for block_hash in hashes:
            if block_hash in self._partial:
                self._partial.discard(block_hash)
                continue
            number = router_hash(block_hash)
            if number in self._published:
                self._published[number] -= 1
                if self._published[number] <= 0:
                    del self._published[number], self._keys[number]
                    yield number

    def _stored(self, data: Mapping[str, Any]) -> Iterator[BlocksStored]:
        parent = data.get("parent_hash") or None
        if parent is not None and router_hash(parent) not in self._published:
            return
        hashes: list[int] = []
        token_ids: list[int] = []
        first_parent = None if parent is None else router_hash(parent)
        salt = _one([data.get("cache_salt"), *(block.get("cache_salt") for block in data["blocks"])], "cache_salt")
        key = root_key(None, salt) if parent is None else self._keys[router_hash(parent)]
        keys: list[bytes] = []
        for block in data["blocks"]:
            tokens = [token["token_id"] for token in block["tokens"]]
            block_hash = block["block_hash"]
            if len(tokens) != self._block:
                self._partial.add(block_hash)
                break
            found = self._routing_ids(block_hash, key, tokens, block.get("mm_keys"))
            if found is None:
                break
            ids, known, key = found
            if known is not None:
                salt = known.cache_salt
            hashes.append(router_hash(block_hash))
            token_ids += ids
            keys.append(key)
        if hashes:
            again = self._published.keys() & set(hashes)
            self._published.update(hashes)
            self._keys.update(zip(hashes, keys, strict=True))
            if len(again) < len(hashes):
                yield BlocksStored(tuple(hashes), first_parent, tuple(token_ids), salt, data.get("lora_name"))

    def _routing_ids(
        self, block_hash: BlockHash, parent_key: bytes, tokens: list[int | str], mm_keys: MmKeys
    ) -> tuple[list[int], KnownPrompt | None, bytes] | None:
        """The router's ids of one full block, the prompt that it comes from where it is known, and its V2 key."""
        media = bool(mm_keys) or self._has_media(tokens)
        place = self._find(block_hash, media)
        key = place.key if place is not None else extend_key(parent_key, self._v2_form(tokens, mm_keys))
        if place is None and (media or self._salted):
            place = self._places.get(key.hex())
        if place is not None:
            ids = place.prompt.routing_ids[place.start : place.start + self._block]
            if not (ids == UNKNOWN).any():
                return ids.tolist(), place.prompt, key
        elif not media:
            return [int(t) for t in tokens], None, key
        elif (before := self._places.get(parent_key.hex())) is not None:
            # The end of a known prompt, with generated text behind it in the same block.
            start = before.start + self._block
            ids = before.prompt.routing_ids[start:]
            head, tail = tokens[: len(ids)], tokens[len(ids) :]
            told = 0 < len(ids) < self._block and not (ids == UNKNOWN).any() and not self._has_media(tail)
            if told and self._same(before.prompt, start, head, mm_keys):
                return [*ids.tolist(), *(int(t) for t in tail)], before.prompt, key
        self.unknown += media
        return None

    def _v2_form(self, tokens: list[int | str], mm_keys: MmKeys) -> list[Token]:
        """One block's tokens as V2 has them in its keys.

        V1's form is turned into V2's where it can be: where every key stands for one stretch of media ids, and by its
        digest. What comes out otherwise is found nowhere.
        """
        out = [bytes.fromhex(t) if isinstance(t, str) else int(t) for t in tokens]
        if not mm_keys or any(isinstance(t, bytes) for t in out):
            return out
        edges = np.flatnonzero(np.diff([False, *(self._has_media([t]) for t in tokens), False]))
        if len(edges) != 2 * len(mm_keys) or not all(_DIGEST.fullmatch(key["hash"]) for key in mm_keys):
            return out
        for start, end, key in zip(edges[::2].tolist(), edges[1::2].tolist(), mm_keys, strict=True):
            first = self._vocab_size + key["start_offset"]
            out[start:end] = range(first, first + end - start)
            if key["start_offset"] == 0:
                out[start] = bytes.fromhex(key["hash"])
        return out

    def _has_media(self, tokens: Sequence[int | str]) -> bool:
        return any(isinstance(t, str) or t >= self._vocab_size or t in self._media_ids for t in tokens)

    def _same(self, prompt: KnownPrompt, start: int, tokens: Sequence[int | str], mm_keys: MmKeys) -> bool:
        """Whether the prompt goes on with ``tokens`` from ``start``, in the one manager's form or the other's."""
        mm = prompt.multimodal_input
        if prompt.token_ids[start : start + len(tokens)].tolist() == list(tokens):
            block = block_keys_v1.extra_keys(mm, len(prompt.token_ids), self._block)[start // self._block]
            names = {digest.hex() for digest, _ in block} | set((mm and mm.multimodal_uuids) or ())
            return all(key["hash"] in names for key in mm_keys or ())
        keyed = augmented_tokens(prompt.token_ids, mm, self._vocab_size)
        form = [t.hex() if isinstance(t, bytes) else t for t in keyed[start : start + len(tokens)].tolist()]
        return form == list(tokens)

    def _find(self, block_hash: BlockHash, media: bool) -> _Place | None:
        """The place of the block of this name."""
        self._hash_fresh()
        key = block_hash & _MASK64 if isinstance(block_hash, int) else block_hash
        place = self._places.get(key)
        if place is None and (media or self._salted) and isinstance(block_hash, int) and self._unhashed_v1:
            # Slow in Python, so only where an engine turns out to name its blocks this way.
            while self._unhashed_v1:
                prompt = self._unhashed_v1.popleft()
                hashes = block_keys_v1.block_hashes(
                    prompt.token_ids.tolist(), prompt.multimodal_input, self._block, cache_salt=prompt.engine_salt
                )
                self._add(prompt, hashes, self._keys_of(prompt))
            place = self._places.get(key)
        return place

    def _hash_fresh(self) -> None:
        while self._fresh:
            prompt = self._fresh.popleft()
            keys = self._keys_of(prompt)
            self._add(prompt, [key.hex() for key in keys], keys)
            self._add(prompt, [int.from_bytes(key[:8], "big") for key in keys], keys)
            self._unhashed_v1.append(prompt)

    def _keys_of(self, prompt: KnownPrompt) -> list[bytes]:
        tokens = augmented_tokens(prompt.token_ids, prompt.multimodal_input, self._vocab_size)
        return block_keys(tokens, self._block, root_key(None, prompt.engine_salt))

    def _add(self, prompt: KnownPrompt, hashes: Sequence[BlockHash], keys: Sequence[bytes]) -> None:
        full = len(prompt.token_ids) // self._block
        for index, (block_hash, key) in enumerate(zip(hashes[:full], keys, strict=False)):
            self._places[block_hash] = _Place(prompt, index * self._block, key)
            self._places.move_to_end(block_hash)
        while len(self._places) > self._max_blocks:
            self._places.popitem(last=False)


def router_hash(block_hash: BlockHash) -> int:
    """A block's name as the non-negative 63-bit number that the router wants."""
    if isinstance(block_hash, str):
        return int(block_hash[:16], 16) >> 1
    return (block_hash & _MASK64) >> 1


def _one(values: Sequence[str | None], name: str) -> str | None:
    found = {value for value in values if value is not None}
    if len(found) > 1:
        raise ValueError(f"one stored event has {len(found)} values of {name}")
    return next(iter(found), None)
