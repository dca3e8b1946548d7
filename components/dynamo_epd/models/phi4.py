# SPDX-License-Identifier: Apache-2.0
"""Phi-4 multimodal: no feature methods, so its two embedding modules are asked to fill a prompt of slots only.

Audio is projected in another way when the request also has an image; that choice is an option of the item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..contract.handoff import Modality
from .base import Media, Prepared
from .general import GeneralFamily

if TYPE_CHECKING:
    import torch

_MODE = "audio_projection_mode"


class Phi4Multimodal(GeneralFamily):
    model_types = ("phi4_multimodal",)
    oldest_transformers = (5, 23)

    def extra_options(self) -> Mapping[str, Any]:
        return {_MODE: "speech"}

    def request_options(self, counts: Mapping[Modality, int], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**kwargs, _MODE: "vision" if counts.get("image") else "speech"}

    def resolved_options(self, modality: Modality, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        chosen = dict(super().resolved_options(modality, kwargs))
        if modality != "audio":
            del chosen[_MODE]
        return chosen

    def prepare_audio(self, media: Media, kwargs: Mapping[str, Any]) -> Prepared:
        return replace(super().prepare_audio(media, kwargs), positions={_MODE: kwargs.get(_MODE, "speech")})

    def batch_key(self, item: Prepared) -> object:
        """transformers 5.24 attends causally where no patch of a call is masked: such images stay among their kind."""
        return super().batch_key(item), bool(item.features["image_attention_mask"].all())

    def embed(self, modality: Modality, inputs: Mapping[str, Any], items: Sequence[Prepared]) -> list[torch.Tensor]:
        import torch

        modules = self.model.model.embed_tokens_extend
        slot = modules.image_token_id if modality == "image" else modules.audio_token_id
        rows = [item.rows for item in items]
        ids = torch.full((1, sum(rows)), slot, device=self.model.device)
        blank = torch.zeros((1, sum(rows), self.hidden_size), device=self.model.device, dtype=self.model.dtype)
        if modality == "image":
            filled = modules.image_embed(ids, blank, **inputs)
        else:
            mode = items[0].positions[_MODE]
            filled = modules.audio_embed(ids, blank, **inputs, audio_projection_mode=mode)
        return list(filled[0].split(rows))
