# SPDX-License-Identifier: Apache-2.0
"""Runs steps on the model: builds the tensors of a packed batch, and moves KV in and out of the pool.

Everything here runs in the engine's one worker thread, except ``read``, which any thread may call for blocks that
nobody writes to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...contract.errors import TransferError
from ..base import Logprob
from .attention import PagedAttention
from .batch import embed, positions
from .model import LanguageModel
from .sampler import sample
from .scheduler import Chunk
from .sequence import Seq
from .steps import Decode, Segment, Step

Sampled = tuple[int, Logprob | None]
Result = Sampled | Exception | None

# Decoding sequences are gathered with room for this many more tokens, so that they are gathered again only then.
_ROOM = 128


class PagedRunner:
    """Runs a model whose state is KV alone.

    Args:
        num_blocks: blocks in the pool, numbered from 1. Block 0 stays zero: padding points to it.
    """

    def __init__(self, model: LanguageModel, attention: PagedAttention, num_blocks: int, tokens_per_block: int):
        self._model = model
        self._attention = attention
        self._size = tokens_per_block
        self._pool = attention.allocate(num_blocks + 1, tokens_per_block, model.dtype, model.device)
        layers, _, heads, _, dim = self._pool.shape
        self._blocks = self._pool.view(layers, 2, heads, num_blocks + 1, tokens_per_block, dim)
        self.block_shape = (layers, 2, heads, tokens_per_block, dim)
        self.dtype = model.dtype
        # What the attention holds gathered: the number and length of each decoding sequence, and the room for it.
        self._held: list[tuple[int, int]] = []
        self._held_width = 0

    @torch.inference_mode()
    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy each (source, target) block."""
        for source, target in blocks:
            self._blocks[:, :, :, target] = self._blocks[:, :, :, source]

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> list[Result]:
        """One step. Gives the next token of every chunk that ends its sequence, None for the others."""
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].end - chunks[i].start == 1)
        ordered = [chunks[i] for i in order]
        hidden = self._forward(ordered)
        rows = [i for i, c in enumerate(ordered) if c.samples]
        results: list[Result] = [None] * len(chunks)
        if rows:
            ends = np.cumsum([c.end - c.start for c in ordered]) - 1
            last = hidden if len(rows) == len(hidden) else hidden[self._tensor(ends[rows])]
            sampled = sample(self._model.logits(last), [ordered[i].seq.draw for i in rows])
            for i, token, logprob in zip(rows, *sampled, strict=True):
                results[order[i]] = token, logprob
        return results

    def _forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Last hidden states ``[tokens, hidden]``; chunks of one token come last."""
        model = self._model
        singles = [c for c in chunks if c.end - c.start == 1]
        index = self._tensor(np.concatenate([np.arange(c.start, c.end) for c in chunks]))
        write = self._tensor(np.concatenate([self._slots(c.seq, c.start, c.end) for c in chunks]))
        decode = self._decode(singles, index) if singles else None
        self._attention.step = Step(write, index, self._segments(chunks[: len(chunks) - len(singles)]), decode)
        try:
            embeds, extra = embed(model, chunks)
            place = positions(model, chunks, index)
            out = model.decoder(inputs_embeds=embeds[None], position_ids=place, use_cache=False, **extra)
        except BaseException:
            self._held = []
            raise
        finally:
            self._attention.step = None
        return out.last_hidden_state[0]

    def _segments(self, chunks: Sequence[Chunk]) -> list[Segment]:
        segments: list[Segment] = []
        first = 0
        for c in chunks:
            blocks = self._tensor(c.seq.blocks[: -(-c.end // self._size)]) if c.start else None
            group = None if c.seq.group is None else self._tensor(c.seq.group[: c.end])
            segments.append(Segment(first, c.start, c.end - c.start, blocks, group))
            first += c.end - c.start
        return segments

    def _decode(self, chunks: Sequence[Chunk], index: torch.Tensor) -> Decode:
        lengths = [c.end for c in chunks]
        longest = max(lengths)
        before = [(c.seq.number, c.end - 1) for c in chunks]
        gather = behind = None
        if before != self._held or longest > self._held_width or not self._attention.holds:
            width = -(-(longest + (_ROOM if self._attention.holds else 0)) // self._size)
            self._held_width = width * self._size
            table = np.zeros((len(chunks), width), np.int64)
            for row, c in zip(table, chunks, strict=True):
                blocks = -(-c.end // self._size)
                row[:blocks] = c.seq.blocks[:blocks]
            gather = self._tensor(table.reshape(-1))
            behind = self._behind(np.array(lengths))
        self._held = [(c.seq.number, c.end) for c in chunks]
        rows = torch.arange(len(chunks), device=self._model.device)
        return Decode(index[-len(chunks) :], rows, longest, min(lengths) < longest, gather, behind)

    def _behind(self, lengths: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Row and index of the tokens behind each length in its last block."""
        rest = -lengths % self._size
        if not rest.any():
            return None
        row = np.repeat(np.arange(len(lengths)), rest)
        index = np.arange(len(row)) - np.repeat(np.cumsum(rest) - rest, rest) + lengths[row]
        return self._tensor(row), self._tensor(index)

    @torch.inference_mode()
    def read(self, blocks: np.ndarray, tokens: int, out: torch.Tensor) -> None:
        """Copy the first ``tokens`` tokens of ``blocks`` into ``out``: ``[blocks, *block_shape]``, the rest zeros."""
        out.copy_(self._blocks[:, :, :, self._tensor(blocks)].permute(3, 0, 1, 2, 4, 5))
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
        flat = kv.to(self._pool.device).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        slots = self._tensor(self._slots(seq, start, seq.n))
        self._pool.index_copy_(3, slots, flat[:, :, :, start - first : seq.n - first])

    def _slots(self, seq: Seq, start: int, end: int) -> np.ndarray:
        """int64: where the tokens ``start..end`` of ``seq`` are in the pool."""
        index = np.arange(start, end)
        return seq.blocks[index // self._size] * self._size + index % self._size

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device)


class Export:
    """The KV of a finished ``prefill_only`` request; see ``engine.base.KVExport``."""

    def __init__(self, runner: PagedRunner, seq: Seq, release: Callable[[Seq], None]):
        self._runner, self._seq, self._release = runner, seq, release
        self.shape: tuple[int, ...] = (seq.num_blocks, *runner.block_shape)
        self.dtype = runner.dtype

    def copy_to(self, out: torch.Tensor) -> None:
        if tuple(out.shape) != self.shape or out.dtype != self.dtype:
            raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, must be {self.dtype} {self.shape}")
        self._runner.read(self._seq.blocks[: self.shape[0]], self._seq.n, out)

    def release(self) -> None:
        self._release(self._seq)
