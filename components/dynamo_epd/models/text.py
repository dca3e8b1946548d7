# SPDX-License-Identifier: Apache-2.0
"""Token ids and text: finding placeholders, and putting what replaces them into the prompt.

An *atomic* token is one that the tokenizer cuts out of the text before it merges anything (an added token). Text on
its two sides never merges, so replacing between atomic tokens is exact in token space. Where ordinary text meets
ordinary text, that one stretch is tokenised again as the family's own processor would have done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..contract.errors import ConfigError
from ..contract.groups import flat_from_groups, groups_from_flat
from ..contract.handoff import Modality, Replacement
from .base import Expansion

Flat = tuple[list[int], list[int], list[bool]]
"""Ids, item numbers (-1: text) and framing flags of the same tokens."""


class Codec:
    """Text <-> ids without special handling, safe to use from several threads.

    Args:
        tokenizer: a transformers tokenizer.

    Raises:
        ConfigError: the tokenizer has no Rust backend (no ``tokenizer.json``).
    """

    def __init__(self, tokenizer: Any):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} has no tokenizer.json; convert the tokenizer to the fast format"
            )
        self._backend = backend
        self.atomic = frozenset(backend.get_added_tokens_decoder())

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        """The id of an atomic token, or None where ``text`` is not one."""
        token = self._backend.token_to_id(text)
        return token if token in self.atomic else None

    @cached_property
    def _atomic_array(self) -> np.ndarray:
        return np.fromiter(self.atomic, dtype=np.int64, count=len(self.atomic))

    def atomic_mask(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """bool ``[n]``: which ids are atomic."""
        return np.isin(np.asarray(ids, dtype=np.int64), self._atomic_array)

    def find(self, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
        """``(start, length)`` of the tokens that hold each occurrence of ``text``, in order.

        Tokens at the edges may hold neighbouring text too where ``text`` is not made of atomic tokens.
        """
        pattern = self.encode(text)
        if all(token in self.atomic for token in pattern):
            return _occurrences(np.asarray(ids, dtype=np.int64), pattern)
        whole = self.decode(ids)
        if text not in whole:
            return []
        encoding = self._backend.encode(whole, add_special_tokens=False)
        if encoding.ids != list(ids):
            return _occurrences(np.asarray(ids, dtype=np.int64), pattern)
        found, at = [], whole.find(text)
        while at >= 0:
            covering = [encoding.char_to_token(char) for char in range(at, at + len(text))]
            tokens = [token for token in covering if token is not None]
            found.append((min(tokens), max(tokens) - min(tokens) + 1))
            at = whole.find(text, at + len(text))
        return found


def _occurrences(ids: np.ndarray, pattern: Sequence[int]) -> list[tuple[int, int]]:
    width = len(pattern)
    if len(ids) < width:
        return []
    hits = np.ones(len(ids) - width + 1, dtype=bool)
    for offset, token in enumerate(pattern):
        hits &= ids[offset : len(ids) - width + 1 + offset] == token
    found, free = [], 0
    for start in np.flatnonzero(hits).tolist():
        if start >= free:
            found.append((start, width))
            free = start + width
    return found


def expansion_of(codec: Codec, text: str, slots: Sequence[int], framing: frozenset[int]) -> tuple[Expansion, list[int]]:
    """What a processor's replacement text means for the prompt.

    Args:
        text: the replacement.
        slots: the id that takes embedding rows, for each item that the placeholder stands for.
        framing: ids that belong to the item without taking a row; with two items, to the first.

    Returns:
        The expansion and the rows of each item.
    """
    ids = codec.encode(text)
    number = {slot: item for item, slot in enumerate(slots)}
    items = [number.get(token, 0 if token in framing else -1) for token in ids]
    frames = [token in framing and token not in number for token in ids]
    return Expansion(groups_from_flat(ids, items, frames)), [ids.count(slot) for slot in slots]


@dataclass
class _Piece:
    """A stretch of the expanded prompt. ``source`` is the stretch of the unexpanded one that it stands for."""

    source: tuple[int, int]
    flat: Flat
    soft: bool
    changed: bool
    text: str | None = None


def replacements(
    codec: Codec,
    token_ids: Sequence[int],
    places: Sequence[tuple[int, int, Modality]],
    expansions: Sequence[Expansion],
    markers: Sequence[str],
) -> tuple[Replacement, ...]:
    """The edits that put ``expansions`` at ``places``; see ``Family.replacements``.

    Args:
        markers: the placeholder text of each place.

    Text that does not survive decoding and encoding (a broken character, an unusual tokenisation made by the caller)
    is left as it is and the replacement spliced in beside it.
    """
    edits: list[Replacement] = []
    pending: list[_Piece] = []
    for piece in (*_joined(codec, _pieces(codec, token_ids, places, expansions, markers)), None):
        if piece is not None and piece.changed:
            pending.append(piece)
        elif pending:
            edits.append(_edit(token_ids, pending))
            pending = []
    return tuple(edits)


def _pieces(
    codec: Codec,
    token_ids: Sequence[int],
    places: Sequence[tuple[int, int, Modality]],
    expansions: Sequence[Expansion],
    markers: Sequence[str],
) -> Iterator[_Piece]:
    atomic = codec.atomic_mask(token_ids)
    end = item = 0
    for (start, length, _), expansion, marker in zip(places, expansions, markers, strict=True):
        yield from _prompt_text(token_ids, atomic, end, start)
        end = start + length
        before = after = ""
        if not atomic[start:end].all():
            before, _, after = codec.decode(token_ids[start:end]).partition(marker)
        if before:
            yield _Piece((start, start), _text_flat(codec.encode(before)), True, True, before)
        ids, items, framing = (part.tolist() for part in flat_from_groups(expansion.groups))
        items = [number + item if number >= 0 else -1 for number in items]
        item = max([item - 1, *items]) + 1
        hard = np.flatnonzero(codec.atomic_mask(ids))
        a, b = (int(hard[0]), int(hard[-1]) + 1) if len(hard) else (len(ids), len(ids))
        yield _Piece((start, start), _text_flat(ids[:a]), True, True)
        yield _Piece((start, end), (ids[a:b], items[a:b], framing[a:b]), False, True)
        yield _Piece((end, end), _text_flat(ids[b:]), True, True)
        if after:
            yield _Piece((end, end), _text_flat(codec.encode(after)), True, True, after)
    yield from _prompt_text(token_ids, atomic, end, len(token_ids))


def _prompt_text(token_ids: Sequence[int], atomic: np.ndarray, start: int, end: int) -> Iterator[_Piece]:
    """Ordinary text at the two edges of ``start..end`` may merge with what comes to stand beside it."""
    cuts = np.flatnonzero(atomic[start:end]) + start
    if not len(cuts):
        yield _Piece((start, end), _text_flat(token_ids[start:end]), True, False)
        return
    a, b = int(cuts[0]), int(cuts[-1]) + 1
    for low, high, soft in ((start, a, True), (a, b, False), (b, end, True)):
        yield _Piece((low, high), _text_flat(token_ids[low:high]), soft, False)


def _text_flat(ids: Sequence[int]) -> Flat:
    return list(ids), [-1] * len(ids), [False] * len(ids)


def _joined(codec: Codec, pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """The pieces with every stretch of adjoining text tokenised as one."""
    run: list[_Piece] = []
    for piece in pieces:
        if not piece.flat[0] and piece.source[0] == piece.source[1]:
            continue
        if piece.soft:
            run.append(piece)
            continue
        yield from _merge(codec, run)
        run = []
        yield piece
    yield from _merge(codec, run)


def _merge(codec: Codec, run: list[_Piece]) -> Iterator[_Piece]:
    if len(run) < 2 or not any(piece.changed for piece in run):
        yield from run
        return
    texts = [piece.text if piece.text is not None else codec.decode(piece.flat[0]) for piece in run]
    exact = all(
        codec.encode(text) == piece.flat[0] for text, piece in zip(texts, run, strict=True) if piece.text is None
    )
    old = [token for piece in run for token in piece.flat[0]]
    new = codec.encode("".join(texts)) if exact else old
    if new == old:
        yield from run
        return
    # Only the tokens around the seams differ: what is equal at the two ends stays outside the edit.
    first, last = run[0], run[-1]
    head = _common(new, first.flat[0]) if not first.changed else 0
    tail = _common(new[head:][::-1], last.flat[0][::-1]) if not last.changed else 0
    (start, _), (_, end) = first.source, last.source
    for low, high, ids, changed in (
        (start, start + head, new[:head], False),
        (start + head, end - tail, new[head : len(new) - tail], True),
        (end - tail, end, new[len(new) - tail :], False),
    ):
        if ids or low < high:
            yield _Piece((low, high), _text_flat(ids), True, changed)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _edit(token_ids: Sequence[int], pieces: Sequence[_Piece]) -> Replacement:
    start, end = pieces[0].source[0], pieces[-1].source[1]
    parts = [piece.flat for piece in pieces]
    ids = [token for part in parts for token in part[0]]
    items = [item for part in parts for item in part[1]]
    framing = [frame for part in parts for frame in part[2]]
    return Replacement(start, end - start, groups_from_flat(ids, items, framing))
