# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL and what shares its prompt: a video is one framed run per temporal patch, timestamps stand between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..contract.handoff import ItemHandoff, Modality
from .qwen_vl import QwenVL


class Qwen3VL(QwenVL):
    model_types: tuple[str, ...] = ("qwen3_vl", "qwen3_vl_moe", "cosmos3_omni")

    def framing_tokens(self) -> Sequence[str]:
        return (self.processor.vision_start_token, self.processor.vision_end_token)

    def item_positions(self, modality: Modality, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"grid_thw": inputs[f"{modality}_grid_thw"][0].tolist()}

    def time_step(self, item: ItemHandoff) -> float:
        return 1.0


class Cosmos3Edge(Qwen3VL):
    """One run per frame. The chat template's wrapper around a video is part of the placeholder."""

    model_types: tuple[str, ...] = ("cosmos3_edge",)

    def markers(self) -> list[tuple[str, Modality]]:
        p = self.processor
        wrapped = p.vision_start_token + p.video_token + p.vision_end_token
        return [(wrapped, "video"), (p.video_token, "video"), (p.image_token, "image")]
