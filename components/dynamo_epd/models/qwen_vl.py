# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL and Qwen2.5-VL: one run of slots per item, M-RoPE positions from the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..contract.errors import InvalidRequest
from ..contract.handoff import ItemHandoff, Modality
from ..contract.layout import PromptLayout
from . import mrope
from .base import Media
from .general import GeneralFamily, video_metadata, whole_grid


class QwenVL(GeneralFamily):
    model_types: tuple[str, ...] = ("qwen2_vl", "qwen2_5_vl")

    def item_positions(self, modality: Modality, inputs: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"grid_thw": inputs[f"{modality}_grid_thw"][0].tolist()}
        if "second_per_grid_ts" in inputs:
            found["second_per_grid"] = float(inputs["second_per_grid_ts"][0])
        return found

    def embedding_text(
        self, modality: Modality, rows: int, grid: Sequence[int] | None, kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        import torch

        whole = whole_grid(grid, rows, self.config.vision_config.spatial_merge_size)
        inputs: dict[str, Any] = {f"{modality}_grid_thw": torch.tensor([whole])}
        if modality == "video":
            inputs |= self.embedding_times(whole[0], kwargs)
        return inputs, getattr(self.processor, f"replace_{modality}_token")(inputs, 0)

    def embedding_times(self, patches: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the processor would have said of the times of a video of so many temporal patches."""
        per_patch = self.processor.video_processor.temporal_patch_size
        fps = self._sections(kwargs)["videos_kwargs"].get("fps")
        if fps is None:
            raise InvalidRequest("a precomputed video embedding needs mm_processor_kwargs.fps, its frames a second")
        frames = Media("video", range(patches * per_patch), {"fps": fps})
        return {"video_metadata": [video_metadata(frames)], "second_per_grid_ts": [per_patch / fps]}

    def time_step(self, item: ItemHandoff) -> float:
        """Position ids between two temporal patches of the item."""
        per_second = getattr(self.config.vision_config, "tokens_per_second", None)
        if item.modality != "video" or per_second is None:
            return 1.0
        return per_second * np.float32(item.positions.get("second_per_grid", 1.0))

    def positions(self, layout: PromptLayout, items: Sequence[ItemHandoff]) -> tuple[np.ndarray | None, float]:
        merge = self.config.vision_config.spatial_merge_size
        grids = [mrope.grid_of(i, item, merge) for i, item in enumerate(items)]
        offsets = [
            mrope.grid_offsets(grid, merge, self.time_step(item)) for grid, item in zip(grids, items, strict=True)
        ]
        return mrope.place(layout, offsets, [max(h, w) // merge for _, h, w in grids])
