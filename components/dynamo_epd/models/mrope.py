# SPDX-License-Identifier: Apache-2.0
"""M-RoPE position ids of a prompt from its layout and the grids of its items.

Source of the rules: ``get_rope_index`` of the Qwen models in transformers 5.24. A text token advances all three axes
by one; the slots of one uninterrupted stretch share their start, and the stretch as a whole advances what follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..contract.errors import InvalidMetadata
from ..contract.handoff import ItemHandoff
from ..contract.layout import PromptLayout


def grid_of(index: int, item: ItemHandoff, merge: int) -> tuple[int, int, int]:
    """``(t, h, w)`` in patches, as it came with the handoff.

    Raises:
        InvalidMetadata: it is not three positive integers, or does not make as many rows as the item has.
    """
    grid, where = item.positions.get("grid_thw"), f"items[{index}].positions.grid_thw"
    if not isinstance(grid, (list, tuple)) or len(grid) != 3 or not all(isinstance(v, int) and v > 0 for v in grid):
        raise InvalidMetadata(where, f"{grid!r} must be three positive integers")
    t, h, w = grid
    rows = t * (h // merge) * (w // merge)
    if rows != item.rows:
        raise InvalidMetadata(where, f"{list(grid)} makes {rows} rows, the item has {item.rows}")
    return t, h, w


def grid_offsets(grid: Sequence[int], merge: int, *factors: float, whole: bool = True) -> np.ndarray:
    """``[3, rows]``: time, height and width offset of each embedding row of an item; int64 where all are whole.

    Args:
        grid: ``(t, h, w)`` in patches.
        merge: patches per side that become one row.
        factors: what a step of ``t`` is multiplied by, in this order and in float32 as torch does.
        whole: cut times to integers; else the result is float32 where one is a fraction.
    """
    t, h, w = grid[0], grid[1] // merge, grid[2] // merge
    offsets = np.indices((t, h, w), dtype=np.int64).reshape(3, -1)
    times = np.arange(t, dtype=np.float32)
    for factor in factors:
        times = times * np.float32(factor)
    if not whole and (times != np.floor(times)).any():
        offsets = offsets.astype(np.float32)
    offsets[0] = np.repeat(times.astype(offsets.dtype), h * w)
    return offsets


def place(
    layout: PromptLayout,
    offsets: Sequence[np.ndarray],
    advances: Sequence[float],
    *,
    stretch: Sequence[int] | None = None,
    still: Sequence[int] = (),
) -> tuple[np.ndarray, float]:
    """Position ids of the whole prompt. Time starts at 0 in every stretch.

    Args:
        offsets: ``[3, rows]`` per item, as from ``grid_offsets``.
        advances: per item, how far a stretch that ends in it moves what follows.
        stretch: per item a number; neighbouring slots of items with the same one are one stretch. None: each its own.
        still: prompt positions of text that does not advance.

    Returns:
        ``[3, n]``, int64 or, with fractions among ``offsets``, float64; and the delta: generated token i has position
        ``n + i + delta``, the one that it will have in the prompt of the next turn. It is not always behind all others:
        Qwen-VL's text after a long video goes on before the video's last time.
    """
    n = len(layout)
    slot_item = layout.slot_item
    inside = slot_item >= 0
    owner = slot_item if stretch is None else np.where(inside, np.asarray([*stretch, 0])[slot_item], -1)
    joined = inside[:-1] & inside[1:] & (owner[:-1] == owner[1:])
    kind = np.result_type(np.int64, *(offset.dtype for offset in offsets))
    step = np.where(inside, 0, 1).astype(kind)
    ends = inside & ~np.append(joined, False)
    step[ends] = np.asarray(advances, dtype=kind)[slot_item[ends]]
    step[list(still)] = 0
    start = np.cumsum(step) - step
    positions = np.broadcast_to(start, (3, n)).copy()
    if inside.any():
        first_row = np.concatenate([[0], np.cumsum(layout.rows)])[:-1]
        own = np.concatenate(offsets, axis=1)[:, first_row[slot_item[inside]] + layout.slot_row[inside]]
        begins = (inside & ~np.insert(joined, 0, False))[inside]
        own[0] -= own[0, begins][np.cumsum(begins) - 1]
        positions[:, inside] += own
    return positions, step.sum().item() - n
