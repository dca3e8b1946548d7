# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL and Qwen2.5-VL: one run of slots per item, M-RoPE positions from the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..contract.errors import InvalidMetadata
from ..contract.handoff import ItemHandoff, Modality
from ..contract.layout import PromptLayout
from . import mrope
from .general import GeneralFamily


class QwenVL(GeneralFamily):
    model_types = ("qwen2_vl", "qwen2_5_vl")

    def item_positions(self, modality: Modality, inputs: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"grid_thw": inputs[f"{modality}_grid_thw"][0].tolist()}
        if "second_per_grid_ts" in inputs:
            found["second_per_grid"] = float(inputs["second_per_grid_ts"][0])
        return found

    def seconds_to_positions(self, item: ItemHandoff) -> float:
        """Position ids between two temporal patches of the item."""
        per_second = getattr(self.config.vision_config, "tokens_per_second", None)
        if item.modality != "video" or per_second is None:
            return 1.0
        return per_second * item.positions.get("second_per_grid", 1.0)

    def positions(self, layout: PromptLayout, items: Sequence[ItemHandoff]) -> tuple[np.ndarray | None, int]:
        merge = self.config.vision_config.spatial_merge_size
        offsets, advances = [], []
        for i, item in enumerate(items):
            grid = item.positions.get("grid_thw")
            if (
                not isinstance(grid, (list, tuple))
                or len(grid) != 3
                or not all(isinstance(v, int) and v > 0 for v in grid)
            ):
                raise InvalidMetadata(f"items[{i}].positions.grid_thw", f"{grid!r} must be three positive integers")
            offsets.append(mrope.grid_offsets(grid, merge, self.seconds_to_positions(item)))
            if offsets[-1].shape[1] != item.rows:
                raise InvalidMetadata(
                    f"items[{i}].positions.grid_thw",
                    f"{grid!r} makes {offsets[-1].shape[1]} rows, the item has {item.rows}",
                )
            advances.append(max(grid[1], grid[2]) // merge)
        return mrope.place(layout, offsets, advances)
