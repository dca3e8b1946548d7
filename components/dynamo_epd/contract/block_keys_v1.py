# SPDX-License-Identifier: Apache-2.0
"""The 64-bit block hashes of TensorRT-LLM's V1 cache manager, which its KV events carry.

Facts from the public sources (``batch_manager/blockKey.cpp``; the mixers are the well-known integer hashes of
Stack Overflow 664014 and 72073933), pinned by ``tests/data/block_keys.json.gz``. Here the token ids are hashed as they
are, and each block adds, for every run that touches it, the item's digest and the item-local offset of the first
token that the block covers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .block_keys import salt_id
from .multimodal_input import MultimodalInput

_MASK32 = 2**32 - 1
_MASK64 = 2**64 - 1
_PARENT = 0xBF58476D1CE4E5B9

ExtraKey = tuple[bytes, int]
"""Digest of an item and item-local offset of the first of its tokens that a block covers."""


def extra_keys(mm: MultimodalInput | None, num_tokens: int, tokens_per_block: int) -> list[list[ExtraKey]]:
    """Per block the extra keys, in the order item by item, run by run."""
    blocks: list[list[ExtraKey]] = [[] for _ in range(-(-num_tokens // tokens_per_block))]
    if mm is None:
        return blocks
    mm.check_prompt(num_tokens)
    for digest, runs in zip(mm.digests, mm.item_runs, strict=True):
        local = 0
        for start, length in runs:
            for block in range(start // tokens_per_block, (start + length - 1) // tokens_per_block + 1):
                covered = max(start, block * tokens_per_block)
                blocks[block].append((digest, local + covered - start))
            local += length
    return blocks


def block_hashes(
    token_ids: Sequence[int],
    mm: MultimodalInput | None,
    tokens_per_block: int,
    *,
    cache_salt: str | None = None,
    lora_id: int | None = None,
) -> list[int]:
    """The chained 64-bit hash of every block, a partly filled last one included.

    As upstream has it, the salt enters where the parent hash is 0, which is the first block.
    """
    salt = salt_id(cache_salt)
    parent = 0
    hashes = []
    extras = extra_keys(mm, len(token_ids), tokens_per_block)
    for index, extra in enumerate(extras):
        tokens = token_ids[index * tokens_per_block : (index + 1) * tokens_per_block]
        seed = len(tokens) ^ (parent * _PARENT & _MASK64)
        if parent == 0 and salt is not None:
            seed = _mix64(salt, seed)
        for token in tokens:
            seed = _mix32(int(token), seed)
        if lora_id is not None:
            seed = _mix64(lora_id, seed)
        for digest, offset in extra:
            for word in struct.unpack("<8I", digest):
                seed = _mix32(word, seed)
            seed = _mix64(offset, seed)
        parent = seed
        hashes.append(seed)
    return hashes


def events_hash(key: bytes) -> int:
    """A V2 key as the non-negative 63-bit number that KV events want."""
    return int.from_bytes(key[:8], "little") >> 1


def _mix32(value: int, seed: int) -> int:
    value = ((value >> 16) ^ value) * 0x45D9F3B & _MASK32
    value = ((value >> 16) ^ value) * 0x45D9F3B & _MASK32
    value = ((value >> 16) ^ value) + 0x9E3779B9 & _MASK32
    return seed ^ (value + (seed << 6) + (seed >> 2) & _MASK64)


def _mix64(value: int, seed: int) -> int:
    value = ((value >> 30) ^ value) * 0xBF58476D1CE4E5B9 & _MASK64
    value = ((value >> 27) ^ value) * 0x94D049BB133111EB & _MASK64
    value = (value >> 31) ^ value
    return seed ^ (value + 0x9E3779B9 + (seed << 6) + (seed >> 2) & _MASK64)
