# SPDX-License-Identifier: Apache-2.0
"""LLaVA, LLaVA-NeXT, Pixtral and Mistral 3: one run per image; Pixtral's row breaks and end are framing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract.handoff import Modality
from .base import Prepared
from .general import GeneralFamily, whole_grid

if TYPE_CHECKING:
    import torch


class Llava(GeneralFamily):
    model_types = ("llava", "llava_next", "mistral3")

    def framing_tokens(self) -> Sequence[str]:
        names = ("image_break_token", "image_end_token")
        return tuple(token for name in names if (token := getattr(self.processor, name, None)))

    def embedding_text(
        self, modality: Modality, rows: int, grid: Sequence[int] | None, kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        """Where rows break, the grid is needed: ``(1, h, w)`` in patches of the vision tower."""
        if not self.framing_tokens():
            return super().embedding_text(modality, rows, grid, kwargs)
        _, h, w = whole_grid(grid, rows, self.processor.spatial_merge_size)
        size = self.processor.patch_size
        return {}, self.processor.replace_image_token({"image_sizes": [(h * size, w * size)]}, 0)

    def embed(self, modality: Modality, inputs: Mapping[str, Any], items: Sequence[Prepared]) -> list[torch.Tensor]:
        import torch

        if sum(item.rows for item in items) > 1:
            return super().embed(modality, inputs, items)
        # Mistral 3 in transformers 5.24 squeezes the only row of a call away, so such an image is encoded twice.
        twice = {name: torch.cat([value, value]) for name, value in inputs.items()}
        return super().embed(modality, twice, [*items, *items])[:1]
