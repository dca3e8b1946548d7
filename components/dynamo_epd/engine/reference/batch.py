# SPDX-License-Identifier: Apache-2.0
"""What goes into the decoder for the chunks of a step: input embeddings and rotary positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .model import LanguageModel
from .scheduler import Chunk


def embed(model: LanguageModel, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, dict[str, object]]:
    """The chunks' input embeddings, ``[tokens, hidden]``, and the decoder's deepstack arguments where there are any."""
    embeds = model.embed(torch.from_numpy(np.concatenate([_ids(c) for c in chunks])).to(model.device))
    if not any(c.seq.request.embeddings for c in chunks):
        return embeds, {}
    rows: list[np.ndarray] = []
    deep: list[torch.Tensor] = []
    first = 0
    for c in chunks:
        layout = c.seq.request.layout
        items = layout.slot_item[c.start : c.end]
        for item in np.unique(items[items >= 0]).tolist():
            at = np.flatnonzero(items == item)
            embedding = c.seq.request.embeddings[item]
            values = embedding[torch.from_numpy(layout.slot_row[c.start + at].astype(np.int64)).to(embedding.device)]
            values = values.to(embeds.device, embeds.dtype)
            embeds[torch.from_numpy(first + at).to(embeds.device)] = values[:, : model.hidden_size]
            if values.shape[1] > model.hidden_size:
                rows.append(first + at)
                deep.append(values[:, model.hidden_size :])
        first += c.end - c.start
    if not deep:
        return embeds, {}
    where = np.concatenate(rows)
    mask = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
    mask[0, torch.from_numpy(where).to(embeds.device)] = True
    levels = torch.cat(deep)[torch.from_numpy(np.argsort(where)).to(embeds.device)].split(model.hidden_size, 1)
    return embeds, {"visual_pos_masks": mask, "deepstack_visual_embeds": list(levels)}


def positions(model: LanguageModel, chunks: Sequence[Chunk], index: torch.Tensor) -> torch.Tensor:
    """The chunks' rotary positions: ``[3, 1, tokens]`` for M-RoPE, else ``[1, tokens]``.

    Args:
        index: int64 ``[tokens]``, each token's index in its sequence.
    """
    if not model.mrope:
        return index[None]
    return torch.from_numpy(np.concatenate([_positions(c) for c in chunks], 1)).to(model.device)[:, None]


def _ids(c: Chunk) -> np.ndarray:
    """int64 ids of the chunk; 0 for embedding slots, whose placeholder the vocabulary need not have."""
    ids = c.seq.tokens[c.start : c.end].astype(np.int64)
    if c.start < c.seq.n and c.seq.request.embeddings:
        slots = c.seq.request.layout.slot_item[c.start : c.end]
        ids[: len(slots)][slots >= 0] = 0
    return ids


def _positions(c: Chunk) -> np.ndarray:
    """``[3, tokens]``, int64 or float64."""
    request, n = c.seq.request, c.seq.n
    later = np.arange(max(c.start, n), c.end) + request.position_delta
    if request.position_ids is None or c.start >= n:
        return np.broadcast_to(np.concatenate([np.arange(c.start, min(c.end, n)), later]), (3, c.end - c.start))
    return np.concatenate(
        [request.position_ids[:, c.start : min(c.end, n)], np.broadcast_to(later, (3, len(later)))], 1
    )
