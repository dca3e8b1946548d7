# SPDX-License-Identifier: Apache-2.0
"""The KV block keys that TensorRT-LLM's V2 cache manager derives, and the token sequence that they are made of.

Inside an item's runs, the item's token 0 is replaced by its 32 digest bytes and its token k > 0 by the id
``vocab_size + k``; text stays. A block's key is SHA-256 over the parent's key and the block's tokens (4 bytes little
endian each, digests raw); the root hashes the scope. Facts from the public sources of TensorRT-LLM
(``kv_cache_manager_v2``), pinned by ``tests/data/block_keys.json.gz``. The older V1 hashes are in ``block_keys_v1``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise

import numpy as np
from blake3 import blake3

from .errors import InvalidMetadata
from .ids import id_array
from .multimodal_input import INT32_MAX, MultimodalInput

DIGEST_MARK = -1
"""What ``AugmentedTokens.ids`` holds where a digest stands."""

Token = int | bytes
"""One augmented token: an id, or the 32 bytes of a digest."""


@dataclass(frozen=True, eq=False)
class AugmentedTokens:
    """A token sequence as the keys see it. Two are equal exactly when their key input is equal, token by token.

    Attributes:
        ids: int64 ``[n]``, read-only; ``DIGEST_MARK`` where a digest stands.
        digests: the digests in prompt order, one for each mark.
    """

    ids: np.ndarray
    digests: tuple[bytes, ...] = ()

    @cached_property
    def digest_positions(self) -> np.ndarray:
        """int64 ``[len(digests)]``: where the digests stand."""
        return np.flatnonzero(self.ids == DIGEST_MARK) if self.digests else np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> AugmentedTokens:
        """The tokens of a slice with step 1; the ids are a view."""
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"step {step} is not supported")
        a, b = np.searchsorted(self.digest_positions, (start, stop)) if self.digests else (0, 0)
        return AugmentedTokens(self.ids[start:stop], self.digests[a:b])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AugmentedTokens):
            return NotImplemented
        return self.digests == other.digests and np.array_equal(self.ids, other.ids)

    __hash__ = None  # type: ignore[assignment]

    def common_prefix(self, other: AugmentedTokens) -> int:
        """How many leading tokens are equal."""
        n = min(len(self), len(other))
        differ = self.ids[:n] != other.ids[:n]
        n = int(np.argmax(differ)) if differ.any() else n
        if not self.digests:
            return n
        for position, ours, theirs in zip(self.digest_positions, self.digests, other.digests, strict=False):
            if ours != theirs:
                return min(n, int(position))
        return n

    def append(self, token_ids: Sequence[int] | np.ndarray) -> AugmentedTokens:
        """This sequence followed by generated (text) ids."""
        return AugmentedTokens(_frozen(np.concatenate([self.ids, np.asarray(token_ids, np.int64)])), self.digests)

    def tolist(self) -> list[Token]:
        """Every token as an int or as digest bytes."""
        out: list[Token] = self.ids.tolist()
        for position, digest in zip(self.digest_positions.tolist(), self.digests, strict=True):
            out[position] = digest
        return out

    def key_bytes(self) -> bytes:
        """What is hashed: 4 bytes for an id, 32 for a digest."""
        words = self.ids.astype("<u4").tobytes()
        if not self.digests:
            return words
        parts: list[bytes] = []
        end = 0
        for position, digest in zip(self.digest_positions.tolist(), self.digests, strict=True):
            parts += [words[end : 4 * position], digest]
            end = 4 * position + 4
        parts.append(words[end:])
        return b"".join(parts)


def augmented_tokens(
    token_ids: Sequence[int] | np.ndarray, mm: MultimodalInput | None, vocab_size: int
) -> AugmentedTokens:
    """The expanded prompt as the keys see it.

    Args:
        token_ids: ``[n]`` expanded ids.
        mm: the seven fields, or None for a prompt without media.
        vocab_size: item-local ids start above it.

    Raises:
        InvalidMetadata: an item reaches beyond the prompt; an id is not int32; a text id of a prompt with media, or
            an item-local id, would be taken for the other kind.
    """
    ids = id_array("prompt_token_ids", token_ids).astype(np.int64)
    if mm is None:
        return AugmentedTokens(_frozen(ids))
    mm.check_prompt(len(ids))
    longest = max(mm.multimodal_lengths)
    if vocab_size < 1 or vocab_size + longest > INT32_MAX:
        raise InvalidMetadata("vocab_size", f"is {vocab_size}: item-local ids must be positive int32")
    text = np.ones(len(ids), bool)
    firsts: list[tuple[int, bytes]] = []
    for digest, runs in zip(mm.digests, mm.item_runs, strict=True):
        local = vocab_size
        for start, length in runs:
            ids[start : start + length] = np.arange(local, local + length)
            text[start : start + length] = False
            local += length
        ids[runs[0][0]] = DIGEST_MARK
        firsts.append((runs[0][0], digest))
    clash = np.flatnonzero(text & (ids >= vocab_size))
    if len(clash):
        at = int(clash[0])
        raise InvalidMetadata(
            f"prompt_token_ids[{at}]",
            f"is {ids[at]}, a text token at or above vocab_size {vocab_size}: its key would be that of an item's token",
        )
    return AugmentedTokens(_frozen(ids), tuple(digest for _, digest in sorted(firsts)))


def salt_id(cache_salt: str | None) -> int | None:
    """The 64-bit number under which the engine knows a cache salt: the first 8 bytes of its BLAKE3, little-endian."""
    if cache_salt is None:
        return None
    return int.from_bytes(blake3(cache_salt.encode()).digest(length=8), "little")


def root_key(lora_id: int | None = None, cache_salt: str | None = None) -> bytes:
    """The key that the first block of every prompt in this scope has as its parent."""
    salt = salt_id(cache_salt)
    mask = (lora_id is not None) | (salt is not None) << 1
    present = [value for value in (lora_id, salt) if value is not None]
    if any(not 0 <= value < 2**64 for value in present):
        raise InvalidMetadata("lora_id", f"is {lora_id}, must be an unsigned 64-bit number")
    return sha256(struct.pack(f"<B{len(present)}Q", mask, *present)).digest()


def block_keys(tokens: AugmentedTokens, tokens_per_block: int, root: bytes) -> list[bytes]:
    """The key of every block of ``tokens`` that follow ``root``, a partly filled last one included.

    Args:
        root: ``root_key(...)``, or the key of the block before ``tokens[0]``.
    """
    if tokens_per_block < 1:
        raise InvalidMetadata("tokens_per_block", f"is {tokens_per_block}, must be at least 1")
    edges = np.append(np.arange(0, len(tokens), tokens_per_block), len(tokens))
    offsets = 4 * edges
    if tokens.digests:
        offsets += 28 * np.searchsorted(tokens.digest_positions, edges)
    data = memoryview(tokens.key_bytes())
    keys = []
    for a, b in pairwise(offsets.tolist()):
        digest = sha256(root)
        digest.update(data[a:b])
        root = digest.digest()
        keys.append(root)
    return keys


def extend_key(parent: bytes, tokens: Iterable[Token] | AugmentedTokens) -> bytes:
    """The key of one block with these tokens whose parent has the key ``parent``; for generated tokens."""
    if isinstance(tokens, AugmentedTokens):
        return sha256(parent + tokens.key_bytes()).digest()
    return sha256(
        parent + b"".join(t if isinstance(t, bytes) else int(t).to_bytes(4, "little") for t in tokens)
    ).digest()


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
