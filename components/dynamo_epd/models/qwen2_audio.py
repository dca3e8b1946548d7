# SPDX-License-Identifier: Apache-2.0
"""Qwen2-Audio: the model has no feature method, so its tower and projector are called as its forward does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract.handoff import Modality
from .base import Prepared
from .general import GeneralFamily

if TYPE_CHECKING:
    import torch


class Qwen2Audio(GeneralFamily):
    model_types = ("qwen2_audio",)

    def embed(self, modality: Modality, inputs: Mapping[str, Any], items: Sequence[Prepared]) -> list[torch.Tensor]:
        import torch

        parts = getattr(self.model, "model", self.model)
        tower, mels, valid = parts.audio_tower, inputs["input_features"], inputs["feature_attention_mask"].sum(-1)
        after_conv, rows = tower._get_feat_extract_output_lengths(valid)
        steps = torch.arange((mels.shape[-1] - 2) // 2 + 1, device=mels.device)
        hidden = torch.zeros((len(mels), 1, len(steps), len(steps)), device=mels.device, dtype=tower.dtype)
        hidden.masked_fill_((steps[None, :] >= after_conv[:, None])[:, None, None, :], torch.finfo(tower.dtype).min)
        output = parts.multi_modal_projector(tower(mels, attention_mask=hidden).last_hidden_state)
        return [embedding[: int(count)] for embedding, count in zip(output, rows, strict=True)]
