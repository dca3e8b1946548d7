# SPDX-License-Identifier: Apache-2.0
"""LLaVA, LLaVA-NeXT, Pixtral and Mistral 3: one run per image; Pixtral's row breaks and end are framing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..contract.handoff import Modality
from .general import GeneralFamily, whole_grid


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
        _, h, w = whole_grid(grid)
        size = self.processor.patch_size
        return {}, self.processor.replace_image_token({"image_sizes": [(h * size, w * size)]}, 0)
