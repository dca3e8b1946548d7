# SPDX-License-Identifier: Apache-2.0
"""Nemotron Nano-Omni: images, audio, and video in tubelets with their times between, pruned by content on request.

Pruning (Efficient Video Sampling) keeps a share of a video's rows: all of the first tubelet, then those that differ
most from the row at the same place one tubelet earlier. The text stays; a tubelet that loses all rows keeps its frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contract.errors import InvalidMetadata, InvalidRequest
from ..contract.groups import flat_from_groups, groups_from_flat
from ..contract.handoff import Modality
from .base import Expansion, Media, Prepared
from .general import GeneralFamily

if TYPE_CHECKING:
    import torch

_RATE = "video_pruning_rate"


class NemotronOmni(GeneralFamily):
    model_types = ("nemotron_h_omni",)
    oldest_transformers = (5, 23)

    def framing_tokens(self) -> Sequence[str]:
        p = self.processor
        return (p.image_start_token, p.image_end_token, p.audio_start_token, p.audio_end_token)

    def slot_token(self, modality: Modality) -> str:
        return self.processor.image_token if modality == "video" else super().slot_token(modality)

    # Options

    def extra_options(self) -> Mapping[str, Any]:
        return {_RATE: float(getattr(self.config, _RATE, 0.0) or 0.0)}

    def resolved_options(self, modality: Modality, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        chosen = dict(super().resolved_options(modality, kwargs))
        if modality == "video":
            chosen[_RATE] = self._rate(kwargs)
        else:
            del chosen[_RATE]
        return chosen

    def _rate(self, kwargs: Mapping[str, Any]) -> float:
        rate = kwargs.get(_RATE, self.extra_options()[_RATE])
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
            raise InvalidRequest(f"mm_processor_kwargs.{_RATE} is {rate!r}, must be at least 0 and below 1")
        return float(rate)

    # Preparation

    def prepare_video(self, media: Media, kwargs: Mapping[str, Any]) -> Prepared:
        rate = self._rate(kwargs)
        prepared = super().prepare_video(media, kwargs)
        if not rate:
            return prepared
        return replace(prepared, positions={"tubelets": prepared.features["pixel_values_videos"].shape[1], _RATE: rate})

    def video_options(self, media: Media, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {"temporal_patch_size": self.processor.video_temporal_patch_dim, **super().video_options(media, kwargs)}

    def prepare_audio(self, media: Media, kwargs: Mapping[str, Any]) -> Prepared:
        chosen = self._call_options("audio", kwargs)
        mels, mask, counts = self.processor._process_audio([self.waveform(media)], chosen)
        inputs = {"input_features": mels} if mask is None else {"input_features": mels, "input_features_mask": mask}
        return self.prepared("audio", inputs, self.processor.replace_audio_token({"num_tokens": counts}, 0))

    def features(self, modality: Modality, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        found = super().features(modality, inputs)
        return {"pixel_values_videos": found["pixel_values_videos"]} if modality == "video" else found

    def embedding_text(
        self, modality: Modality, rows: int, grid: Sequence[int] | None, kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        """A video's embedding would have to say which rows of which tubelet it kept: not taken."""
        p = self.processor
        if modality == "video":
            raise InvalidRequest("this model takes no precomputed video embeddings: send the video")
        if modality == "audio":
            return {}, p.replace_audio_token({"num_tokens": [rows]}, 0)
        return {}, p.image_start_token + p.image_token * rows + p.image_end_token

    # Pruning

    def prunes(self, item: Prepared) -> bool:
        return item.modality == "video" and bool(item.positions.get(_RATE))

    def prune(self, item: Prepared, embedding: torch.Tensor) -> tuple[Prepared, torch.Tensor]:
        if not self.prunes(item):
            return item, embedding
        kept = retention(embedding, item.positions["tubelets"], item.positions[_RATE])
        return keep_rows(item, kept.cpu().numpy()), embedding[kept].contiguous()

    def reserve(self, item: Prepared) -> Prepared:
        """The item as it is laid out before its content is known: all rows that will be kept, in the first tubelet.

        This is what TensorRT-LLM's own preprocessor reserves; the total is the one that ``prune`` gives.
        """
        if not self.prunes(item):
            return item
        ids, owner, framing = flat_from_groups(item.expansion.groups)
        slots = np.flatnonzero((owner == 0) & ~framing)
        count = kept_rows(item.rows, item.positions["tubelets"], item.positions[_RATE])
        others = np.delete(np.arange(len(ids)), slots)
        order = np.insert(others, int(np.searchsorted(others, slots[0])), np.full(count, slots[0]))
        return replace(
            item, rows=count, expansion=Expansion(groups_from_flat(ids[order], owner[order], framing[order]))
        )


def kept_rows(rows: int, tubelets: int, rate: float) -> int:
    """Rows of a video that remain, as transformers counts them: never fewer than one tubelet has."""
    return max(rows // tubelets, int(rows * (1 - rate)))


def retention(embedding: torch.Tensor, tubelets: int, rate: float) -> torch.Tensor:
    """bool ``[rows]``: which rows of a video ``[rows, width]`` remain, by transformers' own rule."""
    from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import compute_retention_mask

    return compute_retention_mask(embedding, tubelets, rate)


def keep_rows(item: Prepared, kept: np.ndarray) -> Prepared:
    """``item`` with only the embedding rows of ``kept`` (bool ``[rows]``); framing and text stay.

    Raises:
        InvalidMetadata: ``kept`` has another length than the item has rows, or keeps none.
    """
    if kept.shape != (item.rows,) or not kept.any():
        raise InvalidMetadata(
            "kept", f"has shape {kept.shape} with {int(kept.sum())} set for an item of {item.rows} rows"
        )
    ids, owner, framing = flat_from_groups(item.expansion.groups)
    stays = np.ones(len(ids), dtype=bool)
    stays[(owner == 0) & ~framing] = kept
    groups = groups_from_flat(ids[stays], owner[stays], framing[stays])
    return replace(item, rows=int(kept.sum()), expansion=Expansion(groups))
