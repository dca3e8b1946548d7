# SPDX-License-Identifier: Apache-2.0
"""M-RoPE position ids of a prompt from its layout and the grids of its items.

Source of the rules: ``get_rope_index`` of the Qwen-VL models in transformers 5.24. A text token advances all three
axes by one; the tokens of a grid share their start and advance it by ``max(height, width)`` of the merged grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..contract.layout import PromptLayout


def grid_offsets(grid: Sequence[int], merge: int, interval: float = 1.0) -> np.ndarray:
    """int64 ``[3, rows]``: time, height and width offset of each embedding row of an item.

    Args:
        grid: ``(t, h, w)`` in patches.
        merge: patches per side that become one row.
        interval: position ids per step of ``t``; the product is cut to an integer, in float32 as torch does.
    """
    t, h, w = grid[0], grid[1] // merge, grid[2] // merge
    offsets = np.indices((t, h, w), dtype=np.int64).reshape(3, -1)
    offsets[0] = (offsets[0].astype(np.float32) * np.float32(interval)).astype(np.int64)
    return offsets


def place(layout: PromptLayout, offsets: Sequence[np.ndarray], advances: Sequence[int]) -> tuple[np.ndarray, int]:
    """Position ids of the whole prompt. Time starts at 0 in every uninterrupted stretch of an item's slots.

    Args:
        offsets: int64 ``[3, rows]`` per item, as from ``grid_offsets``.
        advances: per item, how far one uninterrupted stretch of its slots moves what follows.

    Returns:
        int64 ``[3, n]`` and the delta: generated token i has position ``n + i + delta``.
    """
    n = len(layout)
    slot_item = layout.slot_item
    inside = slot_item >= 0
    same_as_next = np.zeros(n, dtype=bool)
    same_as_next[:-1] = inside[:-1] & (slot_item[:-1] == slot_item[1:])
    step = np.where(inside, 0, 1).astype(np.int64)
    stretch_end = inside & ~same_as_next
    step[stretch_end] = np.asarray(advances, dtype=np.int64)[slot_item[stretch_end]]
    start = np.cumsum(step) - step
    positions = np.broadcast_to(start, (3, n)).copy()
    if inside.any():
        first_row = np.concatenate([[0], np.cumsum(layout.rows)])[:-1]
        own = np.concatenate(offsets, axis=1)[:, first_row[slot_item[inside]] + layout.slot_row[inside]]
        begins = np.concatenate([inside[:1], inside[1:] & ~same_as_next[:-1]])[inside]
        own[0] -= own[0, begins][np.cumsum(begins) - 1]
        positions[:, inside] += own
    return positions, int(positions.max(initial=-1)) + 1 - n
