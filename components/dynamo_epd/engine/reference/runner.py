# SPDX-License-Identifier: Apache-2.0
"""Runs steps on the model: builds the tensors of a packed batch, and moves KV in and out of the pool.

Everything here runs in the engine's one worker thread, except ``read``, which any thread may call for blocks that
nobody writes to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...contract.errors import TransferError
from ..base import Logprob
from .attention import PagedAttention, Segment, Step
from .model import LanguageModel
from .sampler import sample
from .scheduler import Chunk
from .sequence import Seq

Sampled = tuple[int, Logprob | None]
Result = Sampled | Exception | None


class PagedRunner:
    """Runs a model whose state is KV alone.

    Args:
        num_blocks: blocks in the pool, numbered from 1. Block 0 is never written, so padding may point to it.
    """

    def __init__(self, model: LanguageModel, attention: PagedAttention, num_blocks: int, tokens_per_block: int):
        self._model = model
        self._attention = attention
        self._size = tokens_per_block
        self._pool = attention.allocate((num_blocks + 1) * tokens_per_block, model.dtype, model.device)
        layers, _, _, heads, dim = self._pool.shape
        self._blocks = self._pool.view(layers, num_blocks + 1, tokens_per_block, 2, heads, dim)
        self.block_shape = (layers, 2, heads, tokens_per_block, dim)
        self.dtype = model.dtype

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], copies: Sequence[tuple[int, int]]) -> list[Result]:
        """One step. Gives the next token of every chunk that ends its sequence, None for the others.

        Args:
            copies: (from, to) blocks that are copied first.
        """
        for source, target in copies:
            self._blocks[:, target] = self._blocks[:, source]
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].end - chunks[i].start == 1)
        ordered = [chunks[i] for i in order]
        hidden = self._forward(ordered)
        ends = np.cumsum([c.end - c.start for c in ordered]) - 1
        rows = [i for i, c in enumerate(ordered) if c.samples]
        results: list[Result] = [None] * len(chunks)
        if rows:
            last = hidden if len(rows) == len(hidden) else hidden[self._tensor(ends[rows])]
            sampled = sample(self._model.logits(last), [ordered[i].seq.draw for i in rows])
            for i, token, logprob in zip(rows, *sampled, strict=True):
                results[order[i]] = token, logprob
        return results

    def _forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Last hidden states ``[tokens, hidden]``; chunks of one token come last."""
        model = self._model
        step = self._step(chunks)
        embeds, extra = embed(model, chunks)
        self._attention.step = step
        try:
            out = model.decoder(
                inputs_embeds=embeds[None], position_ids=positions(model, chunks), use_cache=False, **extra
            )
        finally:
            self._attention.step = None
        return out.last_hidden_state[0]

    def _step(self, chunks: Sequence[Chunk]) -> Step:
        index = [np.arange(c.start, c.end) for c in chunks]
        write = [self._slots(c.seq, i) for c, i in zip(chunks, index, strict=True)]
        segments, first = [], 0
        singles = [c for c in chunks if c.end - c.start == 1]
        for c in chunks[: len(chunks) - len(singles)]:
            slots = self._tensor(self._slots(c.seq, np.arange(c.end))) if c.start else None
            group = None if c.seq.group is None else self._tensor(c.seq.group[: c.end])
            segments.append(Segment(first, c.start, c.end - c.start, slots, group))
            first += c.end - c.start
        decode_slots, ragged = None, False
        if singles:
            lengths = np.array([c.end for c in singles])
            longest = int(lengths.max())
            table = np.zeros((len(singles), -(-longest // self._size)), np.int64)
            for row, c in zip(table, singles, strict=True):
                held = -(-c.end // self._size)
                row[:held] = c.seq.blocks[:held]
            read = (table[:, :, None] * self._size + np.arange(self._size)).reshape(len(singles), -1)[:, :longest]
            ragged = bool((lengths != longest).any())
            if ragged:
                # What lies behind a sequence's end in its last block is another request's rest, and may not be finite.
                read = np.where(np.arange(longest) < lengths[:, None], read, 0)
            decode_slots = self._tensor(np.ascontiguousarray(read))
        flat = self._tensor(np.concatenate(index))
        return Step(self._tensor(np.concatenate(write)), flat, segments, len(singles), decode_slots, ragged)

    @torch.inference_mode()
    def read(self, blocks: np.ndarray, tokens: int, out: torch.Tensor) -> None:
        """Copy the first ``tokens`` tokens of ``blocks`` into ``out``: ``[blocks, *block_shape]``, the rest zeros."""
        out.copy_(self._blocks[:, self._tensor(blocks)].permute(1, 0, 3, 4, 2, 5))
        out[-1, :, :, :, (tokens - 1) % self._size + 1 :] = 0

    def check_import(self, kv: torch.Tensor, blocks: int, tokens_per_block: int) -> None:
        """Raise ``TransferError`` where ``kv`` is not ``blocks`` blocks of this model's KV."""
        layers, two, heads, _, dim = self.block_shape
        shape = (blocks, layers, two, heads, tokens_per_block, dim)
        if tuple(kv.shape) != shape or kv.dtype != self.dtype:
            raise TransferError(
                "protocol",
                f"the KV received is {kv.dtype} {tuple(kv.shape)}, this model's would be {self.dtype} {shape}",
            )

    @torch.inference_mode()
    def write(self, seq: Seq, kv: torch.Tensor, first: int, start: int) -> None:
        """Copy KV from another worker into the blocks of ``seq``, from token ``start`` to the end of its prompt.

        Args:
            kv: ``[blocks, layers, 2, kv_heads, tokens, head_dim]``; its first token is the prompt's token ``first``.
        """
        flat = kv.to(self._pool.device).permute(1, 0, 4, 2, 3, 5).flatten(1, 2)
        slots = self._tensor(self._slots(seq, np.arange(start, seq.n)))
        self._pool[:, slots] = flat[:, start - first : seq.n - first]

    def _slots(self, seq: Seq, index: np.ndarray) -> np.ndarray:
        return seq.blocks[index // self._size] * self._size + index % self._size

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device)


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


def positions(model: LanguageModel, chunks: Sequence[Chunk]) -> torch.Tensor:
    """The chunks' rotary positions: ``[3, 1, tokens]`` for M-RoPE, else ``[1, tokens]``."""
    if model.mrope:
        return torch.from_numpy(np.concatenate([_positions(c) for c in chunks], 1)).to(model.device)[:, None]
    return torch.from_numpy(np.concatenate([np.arange(c.start, c.end) for c in chunks])).to(model.device)[None]


def _ids(c: Chunk) -> np.ndarray:
    """int64 ids of the chunk; 0 for embedding slots, whose placeholder the vocabulary need not have."""
    ids = c.seq.tokens[c.start : c.end].astype(np.int64)
    if c.start < c.seq.n and c.seq.request.embeddings:
        slots = c.seq.request.layout.slot_item[c.start : c.end]
        ids[: len(slots)][slots >= 0] = 0
    return ids


def _positions(c: Chunk) -> np.ndarray:
    """int64 ``[3, tokens]``."""
    request, n = c.seq.request, c.seq.n
    later = np.arange(max(c.start, n), c.end) + request.position_delta
    if request.position_ids is None or c.start >= n:
        return np.broadcast_to(np.concatenate([np.arange(c.start, min(c.end, n)), later]), (3, c.end - c.start))
    return np.concatenate(
        [request.position_ids[:, c.start : min(c.end, n)], np.broadcast_to(later, (3, len(later)))], 1
    )
