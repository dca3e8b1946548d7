# SPDX-License-Identifier: Apache-2.0
"""Attention of a packed ragged batch over KV blocks, put into Hugging Face models as an attention implementation.

All tokens of a step run as one row ``[1, tokens]``: first the chunks of prompts, one after another, then one token of
each sequence that decodes. Keys and values are written to the pool, then each chunk attends to the slots of its own
sequence, and all decoding sequences attend in one padded call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ...contract.errors import ConfigError

NAME = "dynamo_epd_paged"


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


@dataclass
class Segment:
    """A chunk of one prompt: rows ``first..first + count`` of the step are its tokens ``start..start + count``.

    Attributes:
        slots: int64 ``[start + count]``, where the sequence's KV is; None where the chunk is all there is.
        group: int64 ``[start + count]``, tokens with the same number >= 0 see each other in both directions; None
            where attention is causal only.
    """

    first: int
    start: int
    count: int
    slots: torch.Tensor | None
    group: torch.Tensor | None = None
    masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, layer: LayerSpec, device: torch.device) -> torch.Tensor | None:
        """bool ``[count, start + count]``; None for plain causal attention from the first token on."""
        end = self.start + self.count
        key = (layer.window if layer.window < end else 0, layer.chunk if layer.chunk < end else 0)
        if key not in self.masks:
            mask = None
            if self.start or any(key) or self.group is not None:
                kv = torch.arange(end, device=device)
                mask = _reachable(kv[self.start :, None], kv, *key)
            if mask is not None and self.group is not None:
                mask |= (self.group[self.start :, None] == self.group) & (self.group >= 0)
            self.masks[key] = mask
        return self.masks[key]


@dataclass
class Step:
    """Where the tokens of one forward pass are written and what they attend to.

    Attributes:
        write: int64 ``[tokens]``, the slot of each token.
        positions: int64 ``[tokens]``, each token's index in its sequence.
        segments: chunks of prompts.
        decode: rows at the end of the step that are one token of a sequence each.
        decode_slots: int64 ``[decode, longest]``, the slots of each sequence, padded with slot 0.
        ragged: whether some sequence is shorter than ``longest``.
    """

    write: torch.Tensor
    positions: torch.Tensor
    segments: list[Segment]
    decode: int = 0
    decode_slots: torch.Tensor | None = None
    ragged: bool = False
    masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, layer: LayerSpec, longest: int) -> torch.Tensor | None:
        """bool ``[decode, 1, 1, longest]``, or None where every sequence sees all of it."""
        key = (layer.window if layer.window < longest else 0, layer.chunk if layer.chunk < longest else 0)
        if key not in self.masks:
            mask = None
            if self.ragged or any(key):
                kv = torch.arange(longest, device=self.write.device)
                mask = _reachable(self.positions[-self.decode :, None], kv, *key)[:, None, None]
            self.masks[key] = mask
        return self.masks[key]


def _reachable(q: torch.Tensor, kv: torch.Tensor, window: int, chunk: int) -> torch.Tensor:
    mask = kv <= q
    if window:
        mask &= kv > q - window
    if chunk:
        mask &= torch.div(kv, chunk, rounding_mode="floor") == torch.div(q, chunk, rounding_mode="floor")
    return mask


class PagedAttention:
    """The pool and the step that runs; one for each model, shared by all of its attention modules.

    Until ``allocate``, it records the layers that call it, in order, with plain causal attention.
    """

    def __init__(self, text_config: Any):
        self.layers: list[LayerSpec] = []
        self.kv_heads = self.head_dim = 0
        self.step: Step | None = None
        self._pool: list[torch.Tensor] = []  # per layer [slots, 2, kv_heads, head_dim]
        self._config = text_config

    def allocate(self, slots: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the pool, zeroed: ``[layers, slots, 2, kv_heads, head_dim]``."""
        pool = torch.zeros(len(self.layers), slots, 2, self.kv_heads, self.head_dim, dtype=dtype, device=device)
        self._pool = list(pool)
        return pool

    def record(self, module: Any, key: torch.Tensor, options: dict[str, Any]) -> None:
        """Add a layer. Raises ``ConfigError`` for attention that this implementation does not do."""
        for option in ("softcap", "position_bias", "s_aux"):
            if options.get(option) is not None:
                raise ConfigError(f"the reference engine does not implement attention with {option}")
        shape = (key.shape[1], key.shape[3])
        if self.layers and shape != (self.kv_heads, self.head_dim):
            raise ConfigError("the reference engine does not run models whose layers differ in KV heads or head size")
        self.kv_heads, self.head_dim = shape
        types = getattr(self._config, "layer_types", None)
        kind = types[module.layer_idx] if types else None
        window, chunk = options.get("sliding_window") or 0, 0
        if kind == "sliding_attention":
            window = window or self._config.sliding_window
        elif kind == "chunked_attention":
            chunk = self._config.attention_chunk_size
        elif kind not in (None, "full_attention"):
            raise ConfigError(f"the reference engine does not implement layers of type {kind}")
        module.paged_layer = LayerSpec(len(self.layers), window, chunk, _query_scale(module))
        self.layers.append(module.paged_layer)

    def __call__(
        self, layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Write ``k`` and ``v``, ``[1, kv_heads, tokens, dim]``, and attend ``q``: ``[1, tokens, heads, dim]``."""
        step, pool = self.step, self._pool[layer.index]
        if step is None:
            raise RuntimeError("a forward pass without a step")
        pool[step.write] = torch.stack((k[0], v[0]), 0).permute(2, 0, 1, 3)
        if layer.query_scale is not None:
            q = (q * layer.query_scale(step.positions)[:, None]).to(q.dtype)
        parts = [_chunk(layer, s, pool, q, k, v, scale) for s in step.segments]
        if step.decode:
            parts.append(_decode(layer, step, pool, q[0, :, q.shape[2] - step.decode :], scale))
        return parts[0][None] if len(parts) == 1 else torch.cat(parts)[None]


def _chunk(
    layer: LayerSpec,
    s: Segment,
    pool: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    rows = slice(s.first, s.first + s.count)
    q, k, v = q[:, :, rows], k[:, :, rows], v[:, :, rows]
    if s.slots is not None:
        k, v = pool[s.slots].permute(1, 2, 0, 3)[:, None]
    mask = s.mask(layer, q.device)
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[0].transpose(0, 1)


def _decode(layer: LayerSpec, step: Step, pool: torch.Tensor, q: torch.Tensor, scale: float | None) -> torch.Tensor:
    """``q`` is ``[heads, decode, dim]``; the queries that share a KV head attend as if they were several tokens."""
    heads, rows, dim = q.shape
    slots = step.decode_slots
    if slots is None:
        raise RuntimeError("a decode step without slots")
    longest = slots.shape[1]
    k, v = pool.index_select(0, slots.view(-1)).view(rows, longest, 2, -1, dim).permute(2, 0, 3, 1, 4)
    kv_heads = k.shape[1]
    q = q.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=step.mask(layer, longest), scale=scale)
    return out.reshape(rows, heads, dim)


def _query_scale(module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Take over Llama 4's temperature tuning: the module would count positions from the first token of the pass."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    floor, scale = module.floor_scale, module.attn_scale
    module.attn_temperature_tuning = False
    return lambda positions: torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that Hugging Face's attention modules call."""
    paged: PagedAttention = module.paged
    layer = getattr(module, "paged_layer", None)
    if layer is not None:
        return paged(layer, query, key, value, scaling), None
    paged.record(module, key, options)
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None
