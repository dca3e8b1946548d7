# SPDX-License-Identifier: Apache-2.0
"""An engine request -> what ``LLM.generate_async`` takes: ids, keys, embeddings, prefix sum, positions."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...contract.convert import prompt_order, special_token_offsets
from ...contract.errors import InvalidMetadata, InvalidRequest
from ...contract.layout import PromptLayout
from ...contract.metadata import KeyDecision
from ..base import EngineRequest
from .capabilities import Capabilities
from .keys import metadata
from .names import Names

logger = logging.getLogger(__name__)

_ITEM_TYPES: Mapping[str, int] = {"image": 0, "video": 1, "audio": 2}


@dataclass(frozen=True)
class MediaTokens:
    """Which ids the loaded model takes as "an embedding row belongs here".

    Attributes:
        ids: these ids; None where every id from ``vocab_size`` on is one.
        sentinel: an id that is always taken so, or None where the version has no such id.
        vocab_size: first id that is no text.
        bidirectional: an item's tokens attend to those behind them, so none of its runs may be computed in parts.
    """

    ids: frozenset[int] | None
    sentinel: int | None
    vocab_size: int
    bidirectional: bool = False

    @classmethod
    def of(cls, llm: Any, vocab_size: int) -> MediaTokens:
        """As the input processor of a started ``llm`` tells it.

        Recent versions keep the model's own placeholder ids and name them (``get_mm_token_ids``, of which
        ``get_mm_special_token_ids`` are framing); older ones want an id behind the vocabulary
        (``tllm_multimodal_token_id``).
        """
        processor = getattr(llm, "input_processor", None)
        size = _call(processor, "get_vocab_size")
        vocab_size = int(size) if size else vocab_size
        sentinel = getattr(processor, "tllm_multimodal_token_id", None)
        if sentinel is None:
            sentinel = getattr(processor, "_tllm_multimodal_token_id", None)
        ids = _id_set(_call(processor, "get_mm_token_ids"))
        if ids is not None:
            ids -= _id_set(_call(processor, "get_mm_special_token_ids")) or frozenset()
        bidirectional = bool(getattr(processor, "mm_bidirectional_blocks", False))
        return cls(ids, None if sentinel is None else int(sentinel), vocab_size, bidirectional)

    def mask(self, token_ids: np.ndarray) -> np.ndarray:
        """bool ``[n]``: where the model will put embedding rows."""
        if self.ids is None:
            return token_ids >= self.vocab_size
        return np.isin(token_ids, np.fromiter(self.ids, np.int64, len(self.ids)))

    def apply(self, layout: PromptLayout) -> np.ndarray:
        """int64 ``[n]``: the prompt's ids, with exactly the embedding slots marked as the model wants them.

        Raises:
            InvalidRequest: text of the prompt would be taken for media.
        """
        ids = layout.token_ids.astype(np.int64)
        slots = layout.slot_item >= 0
        if not self.mask(ids)[slots].all():
            ids[slots] = self.sentinel if self.sentinel is not None else self.vocab_size + 1
        marked = self.mask(ids)
        if np.array_equal(marked, slots):
            return ids
        wrong = int(np.flatnonzero(marked != slots)[0])
        if slots[wrong]:
            raise InvalidMetadata(
                f"prompt_token_ids[{wrong}]",
                f"is {int(layout.token_ids[wrong])}, which the engine does not take for media",
            )
        raise InvalidRequest(
            f"token {wrong} of the prompt is {int(ids[wrong])}, a media placeholder outside the request's media; "
            "remove it from the text"
        )


def preprocessed_inputs(
    names: Names, caps: Capabilities, request: EngineRequest, decision: KeyDecision, media_tokens: MediaTokens
) -> Any:
    """``PreprocessedInputs`` for a prompt that this worker computes (prefill, agg).

    The embeddings are copied: the engine's processes read what they are given for as long as they like, also after the
    request was aborted, and the caller's memory may hold another item by then. Device memory is copied on the device.

    Raises:
        InvalidMetadata: embeddings that are not those of the layout, or ids that the engine would misread.
    """
    layout = request.layout
    data: dict[str, Any] = {}
    ids = layout.token_ids
    if layout.num_items:
        ids = media_tokens.apply(layout)
        data["multimodal_embedding"] = _copies(request)
        data["multimodal_embedding_lengths"] = layout.rows.tolist()
        data["multimodal_embed_mask_cumsum"] = torch.from_numpy(layout.row_cumsum.copy())
        data["special_token_offsets"] = special_token_offsets(layout)
        if media_tokens.bidirectional:
            data["mm_bidirectional_blocks"] = True
        if len(request.modalities) == layout.num_items:
            data["layout_metadata"] = {"item_types": [_ITEM_TYPES[name] for name in request.modalities]}
    return _inputs(names, caps, request, decision, ids, data)


def generation_inputs(
    names: Names, caps: Capabilities, request: EngineRequest, decision: KeyDecision, media_tokens: MediaTokens
) -> Any:
    """``PreprocessedInputs`` for a prompt whose KV comes from prefill (decode): ids, keys and positions only."""
    layout = request.layout
    ids = media_tokens.apply(layout) if layout.num_items else layout.token_ids
    return _inputs(names, caps, request, decision, ids, {})


def drop_handles(inputs: Any) -> None:
    """Take back what was shared for an engine that never got it: shared memory lives until somebody has opened it."""
    params = inputs.multimodal_params
    if params is None or not callable(getattr(params, "to_tensor", None)):
        return
    try:
        params.to_tensor("multimodal_data")
    except Exception as error:
        # Device memory cannot be opened by the process that shared it.
        logger.warning("the embeddings of a refused request stay in memory: %r", error)


def _inputs(
    names: Names,
    caps: Capabilities,
    request: EngineRequest,
    decision: KeyDecision,
    ids: np.ndarray,
    data: dict[str, Any],
) -> Any:
    if request.position_ids is not None:
        # M-RoPE models read both, for text-only prompts and in generation as well. TensorRT-LLM takes whole numbers;
        # halves go up, so that positions that were one apart stay so.
        positions = np.ascontiguousarray(np.floor(request.position_ids[:, None, :] + 0.5), dtype=np.int64)
        data["mrope_config"] = {
            "mrope_position_ids": torch.from_numpy(positions.copy()),
            "mrope_position_deltas": torch.tensor([[math.floor(request.position_delta + 0.5)]], dtype=torch.int32),
        }
    params = None
    mm = metadata(decision, names.MultimodalInput)
    if data or mm is not None:
        params = names.MultimodalParams(multimodal_input=mm, multimodal_data=data)
        if data and caps.to_handle:
            params.to_handle("multimodal_data")
    return names.PreprocessedInputs(prompt_token_ids=ids.tolist(), multimodal_params=params)


def _copies(request: EngineRequest) -> list[torch.Tensor]:
    """The items' embeddings in memory of their own, complete when this returns."""
    layout = request.layout
    have = [tuple(embedding.shape) for embedding in request.embeddings]
    need = layout.rows.tolist()
    if len(have) != len(need) or any(
        len(shape) != 2 or shape[0] != rows for shape, rows in zip(have, need, strict=True)
    ):
        raise InvalidMetadata("embeddings", f"have shapes {have}, the prompt has slots for {need} rows")
    order = prompt_order(layout)
    if order is None:
        copies = [embedding.clone(memory_format=torch.contiguous_format) for embedding in request.embeddings]
    else:
        # The engine finds rows by counting slots, so interleaved items' rows must come in the order of the prompt.
        joined = torch.cat(list(request.embeddings))
        taken = joined.index_select(0, torch.from_numpy(order).to(joined.device))
        copies = [part.clone() for part in taken.split(need)]
    for device in {copy.device for copy in copies if copy.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _call(processor: Any, method: str) -> Any:
    function = getattr(processor, method, None)
    return function() if callable(function) else None


def _id_set(values: Any) -> frozenset[int] | None:
    if values is None:
        return None
    return frozenset(int(v) for v in (values.tolist() if hasattr(values, "tolist") else values))
