# SPDX-License-Identifier: Apache-2.0
"""Gemma 3: the placeholder is the begin-of-image token; pan and scan adds crops, each a framed run of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..contract.handoff import Modality
from .general import GeneralFamily


class Gemma3(GeneralFamily):
    model_types = ("gemma3",)

    def slot_token(self, modality: Modality) -> str:
        return self.tokenizer.image_token

    def framing_tokens(self) -> Sequence[str]:
        return (self.tokenizer.boi_token, self.tokenizer.eoi_token)

    def embedding_text(
        self, modality: Modality, rows: int, grid: Sequence[int] | None, kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        """One image, or one with crops: each has the same number of rows."""
        crops = max(1, rows // self.processor.image_seq_length) - 1
        return {}, self.processor.replace_image_token({"num_crops": [crops]}, 0)
