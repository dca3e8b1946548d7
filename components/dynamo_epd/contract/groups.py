# SPDX-License-Identifier: Apache-2.0
"""The compact form of an expansion: equal tokens in a row become a ``Segment``, repeated patterns a ``Group``.

The rows of an image (``[IMG] * k, [IMG_BREAK]``, again and again) become a few numbers, whatever the image's size.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from .errors import InvalidMetadata
from .handoff import Group, Segment
from .multimodal_input import INT32_MAX

MAX_TOKENS = 1 << 22
"""Largest prompt that is expanded unless told otherwise; a few bytes of handoff could ask for any size."""

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


def flat_from_groups(
    groups: Sequence[Group], num_items: int = INT32_MAX, *, limit: int = MAX_TOKENS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(token_ids int32 [n], item int32 [n], framing bool [n])`` of an expansion.

    Raises:
        InvalidMetadata: as ``segment_table``.
    """
    token, count, item, framing = segment_table("groups", groups, num_items, limit)
    return (
        np.repeat(token.astype(np.int32), count),
        np.repeat(item.astype(np.int32), count),
        np.repeat(framing.astype(bool), count),
    )


def segment_table(where: str, groups: Sequence[Group], num_items: int, limit: int) -> np.ndarray:
    """int64 ``[4, s]``: token id, count, item and framing of all segments, repeated as the groups say.

    Args:
        where: what the groups belong to, for error messages.
        limit: tokens that they may stand for at most; checked before anything is repeated.

    Raises:
        InvalidMetadata: a count or a number of times is below 1, a group is empty, the tokens are more than ``limit``,
            an id is not a non-negative int32, or an item number is not in ``-1..num_items - 1``.
    """
    segments = [segment for group in groups for segment in group.segments]
    times = [group.times for group in groups]
    sizes = [len(group.segments) for group in groups]
    for values, name, low, high in ((times, "times", 1, limit), (sizes, "the number of segments", 1, limit)):
        if values and not low <= min(values) <= max(values) <= high:
            g = next(g for g, value in enumerate(values) if not low <= value <= high)
            raise InvalidMetadata(f"{where}.groups[{g}]", f"{name} is {values[g]}, must be between {low} and {high}")
    if not segments:
        return np.zeros((4, 0), np.int64)
    columns = (
        [s.token_id for s in segments],
        [s.count for s in segments],
        [s.item for s in segments],
        [s.framing for s in segments],
    )
    try:
        table = np.array(columns, dtype=np.int64)
    except OverflowError as error:
        raise InvalidMetadata(where, "holds a number that does not fit 64 bits") from error
    ends = np.cumsum(sizes, dtype=np.int64)
    bounds = (("token id", 0, INT32_MAX), ("count", 1, limit), ("item number", -1, num_items - 1))
    for row, (name, low, high) in zip(table, bounds, strict=False):
        if row.min() < low or row.max() > high:
            at = int(np.flatnonzero((row < low) | (row > high))[0])
            g = int(np.searchsorted(ends, at, side="right"))
            raise InvalidMetadata(
                f"{where}.groups[{g}].segments[{at - int(ends[g]) + sizes[g]}]",
                f"{name} is {row[at]}, must be between {low} and {high}",
            )
    # Sums of int64 can overflow only beyond 2**63 / limit segments, which no message holds; products are Python's.
    lengths = np.add.reduceat(table[1], ends - np.array(sizes)).tolist()
    total = sum(map(operator.mul, lengths, times))
    if total > limit:
        raise InvalidMetadata(where, f"makes {total} tokens where at most {limit} fit: shorten the prompt")
    if max(times) == 1:
        return table
    parts = []
    end = 0
    for g, many in enumerate(times):
        if many > 1:
            start = int(ends[g]) - sizes[g]
            parts += [table[:, end:start], np.tile(table[:, start : start + sizes[g]], many)]
            end = start + sizes[g]
    return np.concatenate([*parts, table[:, end:]], axis=1)
