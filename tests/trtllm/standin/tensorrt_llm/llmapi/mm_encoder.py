# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .._torch.shared_tensor import SharedTensorContainer
from .disagg_params import DisaggregatedParams


class MultimodalEncoder:
    """Runs dynamo-epd's own encoder of the model, and gives one handle per item."""

    def __init__(self, model: str, max_batch_size: int = 1, trust_remote_code: bool = False, **kwargs: Any):
        from dynamo_epd import models

        self._family = models.load(model, tower=True)

    def generate(self, inputs: list[dict[str, Any]], use_tqdm: bool = True) -> list[Any]:
        from dynamo_epd.models.base import Media

        results = []
        for prompt in inputs:
            items = [
                self._family.prepare(Media(modality, item), prompt.get("mm_processor_kwargs") or {})
                for modality, data in prompt["multi_modal_data"].items()
                for item in data
            ]
            embeddings: list[torch.Tensor] = self._family.encode(items)
            handles = [SharedTensorContainer.from_tensor(e.clone()).dump_to_dict() for e in embeddings]
            results.append(
                SimpleNamespace(disaggregated_params=DisaggregatedParams(multimodal_embedding_handles=handles))
            )
        return results

    def shutdown(self) -> None:
        self._family = None
