# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .._torch.shared_tensor import SharedTensorContainer
from .disagg_params import DisaggregatedParams


class MultimodalEncoder:
    """Runs dynamo-epd's own encoder of the model, and gives one handle per item."""

    def __init__(self, model: str, max_batch_size: int = 1, trust_remote_code: bool = False, **kwargs: Any):
        from dynamo_epd import models

        self._family = models.load(model, tower=True)

    def generate(self, inputs: list[dict[str, Any]], use_tqdm: bool = True) -> list[Any]:
        results = []
        for prompt in inputs:
            items = [
                self._family.prepare(_media(modality, item), prompt.get("mm_processor_kwargs") or {})
                for modality, data in prompt["multi_modal_data"].items()
                for item in data
            ]
            embeddings: list[torch.Tensor] = self._family.encode(items)
            params = DisaggregatedParams(multimodal_embedding_handles=[_shared(e.clone()) for e in embeddings])
            if hasattr(params, "mrope_position_ids_handle"):
                params.mrope_position_ids_handle = _shared(torch.zeros(3, 1, 1))
                params.mrope_position_deltas_handle = _shared(torch.zeros(1, 1))
            results.append(SimpleNamespace(disaggregated_params=params))
        return results

    def shutdown(self) -> None:
        self._family = None


def _shared(tensor: torch.Tensor) -> dict[str, Any]:
    return SharedTensorContainer.from_tensor(tensor).dump_to_dict()


def _media(modality: str, item: Any) -> Any:
    from dynamo_epd.models.base import Media

    if modality != "video":
        return Media(modality, item)
    frames = np.stack([np.asarray(frame) for frame in item.frames])
    meta = {"fps": item.metadata.get("fps"), "total_frames": item.metadata["total_num_frames"]}
    return Media(modality, frames, {**meta, "frame_indices": item.metadata["frames_indices"]})
