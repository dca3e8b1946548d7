# SPDX-License-Identifier: Apache-2.0
"""``PromptLayout``: the expanded prompt and where each media item's tokens and embedding rows sit in it.

A *run* is a maximal stretch of consecutive positions that belong to one item. Inside a run, a position is either an
embedding *slot* (it takes the item's next embedding row) or *framing* (start, end, separator: part of the item, but
embedded from its own id). Everything outside runs is text, also between the runs of one item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .digest import bind_interleaving
from .errors import InvalidMetadata
from .groups import MAX_TOKENS, segment_table
from .handoff import Replacement
from .ids import id_array
from .multimodal_input import MultimodalInput, digest_to_words, interleaved_groups, item_name


@dataclass(frozen=True, eq=False)
class PromptLayout:
    """An expanded prompt. Made by ``text``, ``expand`` or ``from_flat``, which check it; all arrays are read-only.

    Attributes:
        token_ids: int32 ``[n]``.
        num_items: media items; they are numbered as in ``Handoff.items``.
        row_cumsum: int64 ``[n]``, embedding slots in positions ``0..i``.
        run_cu_offsets: int64 ``[items + 1]``, offsets into the flat runs.
        run_starts: int64 ``[r]``, first position of each run; item by item, ascending inside an item.
        run_lengths: int64 ``[r]``.
        rows: int64 ``[items]``, embedding slots of each item.
    """

    token_ids: np.ndarray
    num_items: int
    row_cumsum: np.ndarray
    run_cu_offsets: np.ndarray
    run_starts: np.ndarray
    run_lengths: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def text(cls, token_ids: Sequence[int] | np.ndarray) -> PromptLayout:
        """A prompt without media. Raises ``InvalidMetadata`` for ids that are not int32 or negative."""
        return _build(id_array("prompt_token_ids", token_ids), *(np.zeros(0, np.int64),) * 3, 0)

    @classmethod
    def from_flat(
        cls, token_ids: Sequence[int] | np.ndarray, item: np.ndarray, framing: np.ndarray, num_items: int
    ) -> PromptLayout:
        """A layout from what each position is.

        Args:
            token_ids: ``[n]`` expanded ids.
            item: int ``[n]``, the item that the position belongs to, or -1.
            framing: bool ``[n]``, True where a position of an item takes no embedding row.
            num_items: every item of ``0..num_items - 1`` must have a slot, and first positions must ascend.

        Raises:
            InvalidMetadata: lengths differ, an item is out of range, without slots or out of order, or text is framing.
        """
        ids = id_array("prompt_token_ids", token_ids)
        n = len(ids)
        if len(item) != n or len(framing) != n:
            raise InvalidMetadata("item", f"{n} ids, {len(item)} item numbers and {len(framing)} framing flags differ")
        if not n:
            return cls.text(ids) if not num_items else _build(ids, item, item, framing, num_items)
        starts = np.flatnonzero((item[1:] != item[:-1]) | (framing[1:] != framing[:-1])) + 1
        starts = np.concatenate([[0], starts])
        return _build(ids, starts, item[starts], framing[starts], num_items)

    @cached_property
    def member_item(self) -> np.ndarray:
        """int32 ``[n]``: the item that a token belongs to, framing included, or -1 for text."""
        member = np.full(len(self), -1, np.int32)
        owner = np.repeat(np.arange(self.num_items, dtype=np.int32), np.diff(self.run_cu_offsets))
        member[_spread(self.run_starts, self.run_lengths)] = np.repeat(owner, self.run_lengths)
        return _readonly(member)

    @cached_property
    def slot_item(self) -> np.ndarray:
        """int32 ``[n]``: the item whose embedding slot sits here, or -1."""
        return _readonly(np.where(self._is_slot, self.member_item, np.int32(-1)))

    @cached_property
    def slot_row(self) -> np.ndarray:
        """int32 ``[n]``: the row inside that item's embedding, or -1."""
        before = self.row_cumsum[self.run_starts] - self._is_slot[self.run_starts]
        in_run = self.row_cumsum[self.run_starts + self.run_lengths - 1] - before
        owner = np.repeat(np.arange(self.num_items), np.diff(self.run_cu_offsets))
        item_base = np.concatenate([[0], np.cumsum(self.rows)])[:-1]
        shift = np.cumsum(in_run) - in_run - item_base[owner] - before
        row = np.full(len(self), -1, np.int64)
        positions = _spread(self.run_starts, self.run_lengths)
        row[positions] = self.row_cumsum[positions] - 1 + np.repeat(shift, self.run_lengths)
        return _readonly(np.where(self._is_slot, row, -1).astype(np.int32))

    @cached_property
    def framing(self) -> np.ndarray:
        """bool ``[n]``: True where a token belongs to an item but takes no row."""
        return _readonly((self.member_item >= 0) & ~self._is_slot)

    @cached_property
    def _is_slot(self) -> np.ndarray:
        return np.diff(self.row_cumsum, prepend=0).astype(bool)

    def runs(self, item: int) -> list[tuple[int, int]]:
        """``(start, length)`` of the item's runs, in prompt order."""
        a, b = self.run_cu_offsets[item], self.run_cu_offsets[item + 1]
        return list(zip(self.run_starts[a:b].tolist(), self.run_lengths[a:b].tolist(), strict=True))

    def positions(self, item: int) -> np.ndarray:
        """int64: all prompt positions that belong to the item, ascending."""
        a, b = self.run_cu_offsets[item], self.run_cu_offsets[item + 1]
        return _spread(self.run_starts[a:b], self.run_lengths[a:b])

    def special_offsets(self, item: int) -> np.ndarray:
        """int64: offsets in the item's concatenated runs that are framing, not slots."""
        return np.flatnonzero(~self._is_slot[self.positions(item)])

    def multimodal_input(
        self, digests: Sequence[str], uuids: Sequence[str | None] | None = None
    ) -> MultimodalInput | None:
        """The seven fields for this prompt, or None where it has no media.

        Args:
            digests: 64 hex digits per item, in the numbering of the layout.
            uuids: the caller's ids, unchanged, or None. All-None is the same as None.

        A V2 key names an item only at its first token, so which of two interleaved items a later token belongs to
        is not in the key by itself: the hash of an item that interleaves with another covers the pattern as well.

        Raises:
            InvalidMetadata: the counts differ from the number of items, or a digest is not 64 hex digits.
        """
        if len(digests) != self.num_items:
            raise InvalidMetadata("digests", f"there are {len(digests)} for {self.num_items} items")
        if uuids is not None and len(uuids) != self.num_items:
            raise InvalidMetadata("multimodal_uuids", f"has {len(uuids)} entries for {self.num_items} items")
        if not self.num_items:
            return None
        raw = [_digest_bytes(i, digest) for i, digest in enumerate(digests)]
        item_runs = [self.runs(item) for item in range(self.num_items)]
        for group in interleaved_groups(item_runs):
            origin = item_runs[group[0]][0][0]
            pattern = [[(start - origin, length) for start, length in item_runs[item]] for item in group]
            for rank, item in enumerate(group):
                raw[item] = bind_interleaving(raw[item], rank, pattern)
        return MultimodalInput(
            multimodal_hashes=tuple(digest_to_words(digest) for digest in raw),
            multimodal_positions=tuple(self.run_starts[self.run_cu_offsets[:-1]].tolist()),
            multimodal_lengths=tuple(np.add.reduceat(self.run_lengths, self.run_cu_offsets[:-1]).tolist()),
            multimodal_uuids=tuple(uuids) if uuids is not None and any(u is not None for u in uuids) else None,
            multimodal_item_run_cu_offsets=tuple(self.run_cu_offsets.tolist()),
            multimodal_run_positions=tuple(self.run_starts.tolist()),
            multimodal_run_lengths=tuple(self.run_lengths.tolist()),
        )


def expand(
    token_ids: Sequence[int] | np.ndarray,
    replacements: Sequence[Replacement],
    num_items: int,
    *,
    max_tokens: int = MAX_TOKENS,
) -> PromptLayout:
    """The prompt that ``replacements`` make of the unexpanded ``token_ids``, and its layout.

    Raises:
        InvalidMetadata: a replacement is out of range, out of order or overlaps another, a segment breaks a rule of
            ``handoff.Segment``, an item has no slot, or the prompt would be longer than ``max_tokens``. Sizes are
            checked before memory is taken.
    """
    ids = id_array("prompt_token_ids", token_ids)
    if not replacements:
        if num_items:
            raise InvalidMetadata("replacements", f"is empty, but the request has {num_items} media items")
        return PromptLayout.text(ids)
    tables: list[np.ndarray] = []
    texts: list[tuple[int, np.ndarray]] = []
    room = max_tokens - len(ids)
    at = 0
    end = 0
    for r, rep in enumerate(replacements):
        if rep.start < end or rep.length < 0 or rep.start + rep.length > len(ids):
            raise InvalidMetadata(
                f"replacements[{r}]",
                f"replaces {rep.length} tokens from {rep.start}, which must come after the replacement before it "
                f"(ends at {end}) and lie inside the prompt of {len(ids)} tokens",
            )
        text = ids[end : rep.start]
        end = rep.start + rep.length
        table = segment_table(f"replacements[{r}]", rep.groups, num_items, room + rep.length)
        added = int(table[1].sum())
        room += rep.length - added
        texts.append((at, text))
        # Text counts as one segment, whose ids are put in below.
        tables += [np.array([[0], [len(text)], [-1], [0]]), table]
        at += len(text) + added
    texts.append((at, ids[end:]))
    tables.append(np.array([[0], [len(ids) - end], [-1], [0]]))
    token, count, item, framing = np.concatenate(tables, axis=1)
    expanded = np.repeat(token.astype(np.int32), count)
    for at, text in texts:
        expanded[at : at + len(text)] = text
    ends = np.cumsum(count)
    some = count > 0
    return _build(expanded, (ends - count)[some], item[some], framing[some].astype(bool), num_items)


def _build(ids: np.ndarray, starts: np.ndarray, item: np.ndarray, framing: np.ndarray, num_items: int) -> PromptLayout:
    """The layout of int32 ``ids``, whose positions from ``starts[i]`` to the next start are all alike.

    Args:
        starts: int64 ``[s]``, ascending from 0; empty for text only.
        item: int ``[s]``, the item of each stretch, or -1.
        framing: bool ``[s]``.
    """
    n = len(ids)
    inside = item >= 0
    wrong = np.flatnonzero((item < -1) | (item >= num_items))
    if len(wrong):
        raise InvalidMetadata("item", f"number {item[wrong[0]]} is not between 0 and {num_items - 1}")
    wrong = np.flatnonzero(framing.astype(bool) & ~inside)
    if len(wrong):
        raise InvalidMetadata("framing", f"position {starts[wrong[0]]} is framing but belongs to no item")
    counts = np.diff(starts, append=n)
    slot = inside & ~framing.astype(bool)
    cumsum = np.repeat(slot.astype(np.int64), counts) if len(starts) else np.zeros(n, np.int64)
    np.cumsum(cumsum, out=cumsum)

    # Neighbouring stretches of one item are one run, whatever is framing in them.
    first = np.flatnonzero(np.diff(item, prepend=-2))
    owner, run_starts = item[first], starts[first]
    run_lengths = np.diff(run_starts, append=n)
    slots = np.add.reduceat(slot * counts, first) if len(first) else first
    keep = np.flatnonzero(owner >= 0)
    order = keep[np.argsort(owner[keep], kind="stable")]
    owner, run_starts, run_lengths, slots = owner[order], run_starts[order], run_lengths[order], slots[order]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_items))])
    rows = np.bincount(owner, weights=slots, minlength=num_items).astype(np.int64)
    if num_items and not rows.all():
        raise InvalidMetadata("rows", "has no embedding slot in the prompt", item=item_name(int(np.argmin(rows))))
    begins = run_starts[offsets[:-1]]
    if np.any(begins[1:] < begins[:-1]):
        raise InvalidMetadata("item", f"items must be numbered in prompt order, but they start at {begins.tolist()}")
    arrays = (cumsum, offsets, run_starts, run_lengths, rows)
    return PromptLayout(_readonly(ids), num_items, *map(_readonly, arrays))


def _digest_bytes(index: int, digest: str) -> bytes:
    try:
        raw = bytes.fromhex(digest)
    except (ValueError, TypeError) as error:
        raise InvalidMetadata(f"digests[{index}]", f"is not hex: {error}", item=item_name(index)) from error
    if len(raw) != 32 or len(digest) != 64:
        raise InvalidMetadata(f"digests[{index}]", f"{digest!r} is not 64 hex digits", item=item_name(index))
    return raw


def _spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: the positions of all runs, concatenated."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def _readonly(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
