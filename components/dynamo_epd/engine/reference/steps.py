# SPDX-License-Identifier: Apache-2.0
"""What one forward pass of a packed ragged batch attends to.

All tokens of a step stand in one row: first the chunks of prompts, one after another, then one token each of the
sequences that decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Pattern = tuple[int, int]
"""Window and chunk of a layer, each 0 where it does not restrict the sequences at hand."""


@dataclass(frozen=True)
class LayerSpec:
    """What distinguishes a layer's attention.

    Attributes:
        index: the layer's place in the pool.
        window: only the last ``window`` tokens are attended to, or 0.
        chunk: only tokens of the same chunk of this many tokens are attended to, or 0.
        query_scale: for Llama 4's temperature tuning, what queries at token positions ``[t]`` are multiplied by.
    """

    index: int
    window: int = 0
    chunk: int = 0
    query_scale: Callable[[torch.Tensor], torch.Tensor] | None = None

    def pattern(self, length: int) -> Pattern:
        """What restricts sequences of up to ``length`` tokens."""
        return self.window if self.window < length else 0, self.chunk if self.chunk < length else 0


@dataclass
class Segment:
    """A chunk of one prompt: rows ``first..first + count`` of the step are its tokens ``start..start + count``.

    Attributes:
        blocks: int64, the blocks that hold the sequence's KV; None where the chunk is all there is.
        group: int64 ``[start + count]``, tokens with the same number >= 0 see each other in both directions; None
            where attention is causal only.
    """

    first: int
    start: int
    count: int
    blocks: torch.Tensor | None
    group: torch.Tensor | None = None
    masks: dict[Pattern, torch.Tensor | None] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.count

    def mask(self, layer: LayerSpec, device: torch.device) -> torch.Tensor | None:
        """bool ``[count, start + count]``; None where the last ``count`` rows of a causal square do, and cost less."""
        end = self.end
        pattern = layer.pattern(end)
        if pattern not in self.masks:
            mask = None
            if self.start > self.count or any(pattern) or self.group is not None:
                kv = torch.arange(end, device=device)
                mask = _reachable(kv[self.start :, None], kv, pattern)
            if mask is not None and self.group is not None:
                mask |= (self.group[self.start :, None] == self.group) & (self.group >= 0)
            self.masks[pattern] = mask
        return self.masks[pattern]


@dataclass
class Decode:
    """The last rows of a step: one token each of several sequences.

    Attributes:
        at: int64 ``[rows]``, the token's index in its sequence.
        rows: int64 ``[rows]``, 0, 1, 2, ...
        longest: tokens of the longest sequence, this one included.
        ragged: whether some sequence is shorter.
        gather: int64 ``[rows * width]``, the blocks of each sequence, padded with block 0 to ``width``; None where the
            KV gathered for an earlier step is continued.
        behind: row and index of each token behind a sequence's end in its last block, where ``gather`` is given.
    """

    at: torch.Tensor
    rows: torch.Tensor
    longest: int
    ragged: bool
    gather: torch.Tensor | None
    behind: tuple[torch.Tensor, torch.Tensor] | None
    masks: dict[Pattern, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, layer: LayerSpec) -> torch.Tensor | None:
        """bool ``[rows, 1, 1, longest]``, or None where every sequence sees all of it."""
        pattern = layer.pattern(self.longest)
        if pattern not in self.masks:
            mask = None
            if self.ragged or any(pattern):
                kv = torch.arange(self.longest, device=self.at.device)
                mask = _reachable(self.at[:, None], kv, pattern)[:, None, None]
            self.masks[pattern] = mask
        return self.masks[pattern]


@dataclass
class Step:
    """Where the tokens of one forward pass are written and what they attend to.

    Attributes:
        write: int64 ``[tokens]``, the slot of each token.
        index: int64 ``[tokens]``, each token's index in its sequence.
    """

    write: torch.Tensor
    index: torch.Tensor
    segments: list[Segment]
    decode: Decode | None


def _reachable(q: torch.Tensor, kv: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    window, chunk = pattern
    mask = kv <= q
    if window:
        mask &= kv > q - window
    if chunk:
        mask &= torch.div(kv, chunk, rounding_mode="floor") == torch.div(q, chunk, rounding_mode="floor")
    return mask
