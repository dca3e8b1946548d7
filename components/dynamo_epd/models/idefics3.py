# SPDX-License-Identifier: Apache-2.0
"""Idefics 3: an image is rows of tiles, each named in text, then the whole image again; breaks stand between rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..contract.handoff import Modality
from .general import GeneralFamily, whole_grid


class Idefics3(GeneralFamily):
    model_types = ("idefics3",)

    def embedding_text(
        self, modality: Modality, rows: int, grid: Sequence[int] | None, kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        """The grid counts tiles: ``(1, down, across)``, without the whole image that follows them."""
        _, down, across = whole_grid(grid, rows)
        if down * across == 1:
            down = across = 0
        return {}, self.processor.replace_image_token({"rows": [[down]], "cols": [[across]]}, 0)
