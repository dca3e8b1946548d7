# SPDX-License-Identifier: Apache-2.0
"""The reference engine's block events in TensorRT-LLM's form: V1's (placeholder ids and ``mm_keys``) or V2's."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dynamo_epd.contract import block_keys_v1
from dynamo_epd.contract.block_keys import Token, augmented_tokens, block_keys, extend_key, root_key
from dynamo_epd.engine.base import BlocksRemoved, BlocksStored

from ._requests import Made

MANAGER = os.environ.get("DYNAMO_EPD_STANDIN_MANAGER", "v2")
"""``v1``, ``v2`` (SHA-256 in hex) or ``v2-64`` (truncated); how blocks are named in events."""


@dataclass(frozen=True)
class _Block:
    name: int | str
    tokens: list[Token]
    sent: list[int]
    mm_keys: list[dict[str, Any]]
    salt: str | None
    key: bytes


class Blocks:
    """Knows the blocks of every prompt that was sent, by the number that the reference engine gives them."""

    def __init__(self, tokens_per_block: int, vocab_size: int):
        self._size, self._vocab_size = tokens_per_block, vocab_size
        self._known: dict[int, _Block] = {}
        self._tails: dict[bytes, tuple[list[Token], list[int], str | None]] = {}
        self._ids = itertools.count()
        self._created = False

    def remember(self, made: Made) -> None:
        request, size = made.request, self._size
        mm = None if made.placeholder_keys else request.multimodal_input
        # The reference engine keys what it was given; events carry what was sent.
        tokens = augmented_tokens(request.layout.token_ids, mm, self._vocab_size)
        keys = block_keys(tokens, size, root_key(None, request.cache_salt))
        sent = made.sent_ids.tolist()
        flat = tokens.tolist()
        if mm is None:
            flat = list(sent)
        v1 = block_keys_v1.block_hashes(sent, mm, size, cache_salt=request.cache_salt)
        named = augmented_tokens(made.sent_ids, mm, self._vocab_size)
        names = block_keys(named, size, root_key(None, request.cache_salt))
        extra = block_keys_v1.extra_keys(mm, len(sent), size)
        for i in range(len(sent) // size):
            cut = slice(i * size, (i + 1) * size)
            self._known[_number(keys[i])] = _Block(
                name=_name(names[i], v1[i]),
                tokens=flat[cut],
                sent=sent[cut],
                mm_keys=[{"type": "mm_key", "hash": d.hex(), "start_offset": o} for d, o in extra[i]],
                salt=request.cache_salt,
                key=names[i],
            )
        full = len(sent) // size
        parent = keys[full - 1] if full else root_key(None, request.cache_salt)
        self._tails[parent] = (flat[full * size :], sent[full * size :], request.cache_salt)

    def events(self, event: BlocksStored | BlocksRemoved) -> Iterator[dict[str, Any]]:
        if not self._created:
            self._created = True
            yield self._event({"type": "created", "num_blocks_per_cache_level": [1, 0]})
        if isinstance(event, BlocksRemoved):
            names = [self._known.pop(h).name for h in event.block_hashes if h in self._known]
            if names:
                yield self._event({"type": "removed", "block_hashes": names})
            return
        blocks = []
        parent = event.parent_hash
        for i, number in enumerate(event.block_hashes):
            block = self._known.get(number) or self._generated(number, parent, event.token_ids[i * self._size :])
            if block is None:
                break
            blocks.append(block)
            parent = number
        if blocks:
            before = self._known.get(event.parent_hash) if event.parent_hash is not None else None
            root = 0 if MANAGER == "v1" else None
            yield self._event(
                {
                    "type": "stored",
                    "parent_hash": root if before is None else before.name,
                    "blocks": [_stored(block) for block in blocks],
                }
            )

    def _generated(self, number: int, parent: int | None, ids: tuple[int, ...]) -> _Block | None:
        """A block that ends in generated tokens."""
        before = self._known.get(parent) if parent is not None else None
        if before is None:
            return None
        own = next((key for key in self._tails if _number(key) == parent), None)
        tail, sent, salt = self._tails.get(own, ([], [], before.salt)) if own else ([], [], before.salt)
        rest = list(ids[len(tail) : self._size])
        tokens = [*tail, *rest]
        key = extend_key(before.key, tokens)
        made = _Block(_name(key, int.from_bytes(key[:8], "big")), tokens, [*sent, *rest], [], salt, key)
        self._known[number] = made
        return made

    def _event(self, data: dict[str, Any]) -> dict[str, Any]:
        return {"event_id": next(self._ids), "data": data, "window_size": 4096}


def _stored(block: _Block) -> dict[str, Any]:
    shown: list[Any] = block.sent if MANAGER == "v1" else [t.hex() if isinstance(t, bytes) else t for t in block.tokens]
    return {
        "type": "stored_block",
        "block_hash": block.name,
        "tokens": [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in shown],
        "cache_level": 0,
        "priority": 35,
        "mm_keys": block.mm_keys if MANAGER == "v1" else [],
        "cache_salt": block.salt,
    }


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "little") & (1 << 63) - 1


def _name(key: bytes, v1: int) -> int | str:
    if MANAGER == "v1":
        return v1
    return key.hex() if MANAGER == "v2" else int.from_bytes(key[:8], "big")
