# SPDX-License-Identifier: Apache-2.0
"""Llama 4: an image is a row of tiles with separators, then the whole image again; the model projects outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract.handoff import Modality
from .base import Prepared
from .general import GeneralFamily, whole_grid

if TYPE_CHECKING:
    import torch


class Llama4(GeneralFamily):
    model_types = ("llama4",)

    def slot_token(self, modality: Modality) -> str:
        return self.processor.img_patch_token

    def framing_tokens(self) -> Sequence[str]:
        p = self.processor
        return (p.start_of_img_token, p.end_of_img_token, p.image_token, p.tile_token, p.tile_global_token)

    def embedding_text(
        self, modality: Modality, rows: int, grid: Sequence[int] | None, kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        """The grid counts tiles: ``(1, down, across)``, without the whole image that follows them."""
        _, down, across = whole_grid(grid, rows)
        tiles = down * across + 1 if down * across > 1 else 1
        return {}, self.processor._prompt_split_image((down, across), max(1, rows // tiles))

    def embed(self, modality: Modality, inputs: Mapping[str, Any], items: Sequence[Prepared]) -> list[torch.Tensor]:
        tiles = self.model.get_image_features(**inputs).last_hidden_state
        rows = self.model.multi_modal_projector(tiles.reshape(-1, tiles.shape[-1]))
        return list(rows.split([item.rows for item in items]))
