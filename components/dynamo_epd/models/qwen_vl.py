# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL and Qwen2.5-VL: one run of slots per item, M-RoPE positions from the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..contract.handoff import ItemHandoff, Modality
from ..contract.layout import PromptLayout
from . import mrope
from .general import GeneralFamily


class QwenVL(GeneralFamily):
    model_types: tuple[str, ...] = ("qwen2_vl", "qwen2_5_vl")

    def item_positions(self, modality: Modality, inputs: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"grid_thw": inputs[f"{modality}_grid_thw"][0].tolist()}
        if "second_per_grid_ts" in inputs:
            found["second_per_grid"] = float(inputs["second_per_grid_ts"][0])
        return found

    def time_step(self, item: ItemHandoff) -> float:
        """Position ids between two temporal patches of the item."""
        per_second = getattr(self.config.vision_config, "tokens_per_second", None)
        if item.modality != "video" or per_second is None:
            return 1.0
        return per_second * np.float32(item.positions.get("second_per_grid", 1.0))

    def positions(self, layout: PromptLayout, items: Sequence[ItemHandoff]) -> tuple[np.ndarray | None, int]:
        merge = self.config.vision_config.spatial_merge_size
        grids = [mrope.grid_of(i, item, merge) for i, item in enumerate(items)]
        offsets = [
            mrope.grid_offsets(grid, merge, self.time_step(item)) for grid, item in zip(grids, items, strict=True)
        ]
        return mrope.place(layout, offsets, [max(h, w) // merge for _, h, w in grids])
