# SPDX-License-Identifier: Apache-2.0
"""InternVL: an image is one framed run of all its crops; a video is one framed run per frame, named in text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contract.handoff import Modality
from .base import Prepared
from .general import GeneralFamily

if TYPE_CHECKING:
    import torch


class InternVL(GeneralFamily):
    model_types = ("internvl",)

    def framing_tokens(self) -> Sequence[str]:
        return (self.processor.start_image_token, self.processor.end_image_token)

    def slot_token(self, modality: Modality) -> str:
        return self.processor.image_token

    def features(self, modality: Modality, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        pixels = {"image": "pixel_values", "video": "pixel_values_videos"}[modality]
        return {"pixel_values": inputs[pixels].reshape(-1, *inputs[pixels].shape[-3:])} if pixels in inputs else {}

    def embed(self, modality: Modality, inputs: Mapping[str, Any], items: Sequence[Prepared]) -> list[torch.Tensor]:
        return self.per_item(self.model.get_image_features(**inputs), items)

    def embedding_text(
        self, modality: Modality, rows: int, grid: Sequence[int] | None, kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        per_crop = self.processor.image_seq_length
        if modality == "image":
            return {}, self.processor.replace_image_token({"num_patches": [max(1, rows // per_crop)]}, 0)
        frames = np.empty((1, max(1, rows // per_crop), 0))
        return {}, self.processor.replace_video_token({"pixel_values_videos": frames}, 0)
