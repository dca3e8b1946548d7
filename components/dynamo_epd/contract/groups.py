# SPDX-License-Identifier: Apache-2.0
"""The compact form of an expansion: equal tokens in a row become a ``Segment``, repeated patterns a ``Group``.

The rows of an image (``[IMG] * k, [IMG_BREAK]``, again and again) become a few numbers, whatever the image's size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import InvalidMetadata
from .handoff import Group, Segment
from .multimodal_input import INT32_MAX

MAX_PERIOD = 64
"""Longest repeated pattern that ``compress`` looks for, in segments."""


def groups_from_flat(
    token_ids: Sequence[int] | np.ndarray, item: Sequence[int] | np.ndarray, framing: Sequence[bool] | np.ndarray
) -> tuple[Group, ...]:
    """Compact groups for an expansion that is given position by position; ``flat_from_groups`` is the inverse.

    Args:
        token_ids: ``[n]`` ids.
        item: ``[n]`` item number, or -1 for text.
        framing: ``[n]``, True where a token of an item has no embedding row.
    """
    flat = np.array([token_ids, item, framing], dtype=np.int64)
    n = flat.shape[1]
    if n == 0:
        return ()
    starts = np.concatenate([[0], np.flatnonzero(np.any(flat[:, 1:] != flat[:, :-1], axis=0)) + 1])
    counts = np.diff(starts, append=n)
    ids, items, flags = flat[:, starts].tolist()
    segments = zip(ids, counts.tolist(), items, flags, strict=True)
    return compress([Segment(token, count, owner, bool(flag)) for token, count, owner, flag in segments])


def compress(segments: Sequence[Segment]) -> tuple[Group, ...]:
    """Groups that stand for ``segments``: at each place the repetition that saves most, else a plain stretch."""
    numbers: dict[Segment, int] = {}
    codes = np.array([numbers.setdefault(segment, len(numbers)) for segment in segments], dtype=np.int64)
    n = len(codes)
    saved = np.zeros((max(1, min(MAX_PERIOD, n // 2)), n), dtype=np.int64)
    for period in range(1, len(saved) + 1):
        if 2 * period > n:
            break
        equal = codes[period:] == codes[:-period]
        stops = np.append(np.flatnonzero(~equal), len(equal))
        reach = stops[np.searchsorted(stops, np.arange(len(equal)))] - np.arange(len(equal))
        saved[period - 1, : len(equal)] = reach // period * period
    best = np.argmax(saved, axis=0).tolist() if n else []
    gain = np.max(saved, axis=0).tolist() if n else []
    groups: list[Group] = []
    plain: list[Segment] = []
    at = 0
    while at < n:
        period = best[at] + 1
        # A group costs about as much on the wire as one segment.
        if gain[at] < 2:
            plain.append(segments[at])
            at += 1
            continue
        if plain:
            groups.append(Group(1, tuple(plain)))
            plain = []
        groups.append(Group(1 + gain[at] // period, tuple(segments[at : at + period])))
        at += period + gain[at]
    if plain:
        groups.append(Group(1, tuple(plain)))
    return tuple(groups)


def flat_from_groups(groups: Sequence[Group], num_items: int = INT32_MAX) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(token_ids int32 [n], item int32 [n], framing bool [n])`` of an expansion.

    Raises:
        InvalidMetadata: as ``segment_table``.
    """
    table = segment_table("groups", groups, num_items)
    counts = table[1]
    return (
        np.repeat(table[0].astype(np.int32), counts),
        np.repeat(table[2].astype(np.int32), counts),
        np.repeat(table[3].astype(bool), counts),
    )


def expanded_length(where: str, groups: Sequence[Group], limit: int) -> int:
    """How many tokens ``groups`` stand for, found without making them.

    Raises:
        InvalidMetadata: a count or a number of times is below 1, a group is empty, or the sum exceeds ``limit``.
    """
    total = 0
    for g, group in enumerate(groups):
        counts = [segment.count for segment in group.segments]
        if group.times < 1 or not counts or min(counts) < 1:
            raise InvalidMetadata(
                f"{where}.groups[{g}]",
                f"times {group.times} and counts {counts[:8]} must be at least 1, with at least one segment",
            )
        total += group.times * sum(counts)
        if total > limit:
            raise InvalidMetadata(f"{where}.groups[{g}]", f"makes {total} tokens where at most {limit} fit")
    return total


def segment_table(where: str, groups: Sequence[Group], num_items: int) -> np.ndarray:
    """int64 ``[4, s]``: token id, count, item and framing of all segments, repeated as the groups say.

    The caller has bounded the size with ``expanded_length``.

    Raises:
        InvalidMetadata: an id is not a non-negative int32, or an item number is not in ``-1..num_items - 1``.
    """
    parts: list[np.ndarray] = []
    single: list[int] = []
    try:
        for group in groups:
            numbers = [v for s in group.segments for v in (s.token_id, s.count, s.item, s.framing)]
            if group.times == 1:
                single += numbers
                continue
            parts.append(np.array(single, dtype=np.int64).reshape(-1, 4))
            single = []
            parts.append(np.tile(np.array(numbers, dtype=np.int64).reshape(-1, 4), (group.times, 1)))
        parts.append(np.array(single, dtype=np.int64).reshape(-1, 4))
    except OverflowError as error:
        raise InvalidMetadata(where, "a number does not fit 64 bits") from error
    table = np.concatenate(parts).T
    for row, name, low, high in ((0, "token id", 0, INT32_MAX), (2, "item number", -1, num_items - 1)):
        wrong = np.flatnonzero((table[row] < low) | (table[row] > high))
        if len(wrong):
            raise InvalidMetadata(where, f"{name} {table[row][wrong[0]]} is not between {low} and {high}")
    return table
