# SPDX-License-Identifier: Apache-2.0
"""Attention over KV blocks, put into Hugging Face models as an attention implementation.

Keys and values are written to the pool, then each chunk of a prompt attends to the slots of its own sequence, and all
decoding sequences attend in one padded call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...contract.errors import ConfigError
from .steps import Decode, LayerSpec, Segment, Step

NAME = "dynamo_epd_paged"


class PagedAttention:
    """The pool and the step that runs; one for each model, shared by all of its attention modules.

    Until ``allocate``, it records the layers that call it, in order, with plain causal attention.
    """

    def __init__(self, text_config: Any):
        self.layers: list[LayerSpec] = []
        self.kv_heads = self.head_dim = 0
        self.step: Step | None = None
        self._pool: list[torch.Tensor] = []  # per layer [2, kv_heads, slots, head_dim]
        self._blocks: list[torch.Tensor] = []  # the same memory, [2, kv_heads, blocks, tokens_per_block * head_dim]
        self._config = text_config
        # Per layer [2, kv_heads, rows, width, head_dim]: what decoding sequences attend to, kept from step to step so
        # that it is not gathered again for each token. On a GPU gathering costs less than the memory for this.
        self._held: list[torch.Tensor] = []
        self.holds = False

    def allocate(self, blocks: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the pool of ``blocks`` blocks of ``size`` tokens, zeroed: ``[layers, 2, kv_heads, slots, head_dim]``."""
        shape = (len(self.layers), 2, self.kv_heads, blocks * size, self.head_dim)
        pool = torch.zeros(shape, dtype=dtype, device=device)
        self._pool = list(pool)
        self._blocks = list(pool.view(*shape[:3], blocks, size * self.head_dim))
        self.holds = device.type == "cpu"
        self._held = [pool[0, :, :, :0]] * len(self.layers)
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
        step = self.step
        if step is None:
            raise RuntimeError("a forward pass without a step")
        new = torch.cat((k, v))
        self._pool[layer.index].index_copy_(2, step.write, new)
        if layer.query_scale is not None:
            q = (q * layer.query_scale(step.index)[:, None]).to(q.dtype)
        parts = [self._chunk(layer, segment, q[0], new, scale) for segment in step.segments]
        if step.decode is not None:
            parts.append(self._decode(layer, step.decode, q[0], new, scale))
        return parts[0][None] if len(parts) == 1 else torch.cat(parts)[None]

    def _chunk(
        self, layer: LayerSpec, segment: Segment, q: torch.Tensor, new: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """``[count, heads, dim]``; ``q`` is ``[heads, tokens, dim]``, ``new`` ``[2, kv_heads, tokens, dim]``."""
        rows = slice(segment.first, segment.first + segment.count)
        k, v = new[:, :, rows] if segment.blocks is None else self._gather(layer, segment.blocks)[:, :, : segment.end]
        repeat = len(q) // len(k)
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        mask = segment.mask(layer, q.device)
        # A causal square: zeros stand for the queries of tokens that were computed before.
        before = segment.start if mask is None else 0
        out = F.scaled_dot_product_attention(
            F.pad(q[None, :, rows], (0, 0, before, 0)),
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
        )
        return out[0, :, before:].transpose(0, 1)

    def _gather(self, layer: LayerSpec, blocks: torch.Tensor) -> torch.Tensor:
        """``[2, kv_heads, tokens, dim]`` of whole blocks: a block at a time is several times faster than a token."""
        return self._blocks[layer.index].index_select(2, blocks).view(2, self.kv_heads, -1, self.head_dim)

    def _decode(
        self, layer: LayerSpec, decode: Decode, q: torch.Tensor, new: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """``[rows, heads, dim]``. Queries that share a KV head attend as if they were several tokens."""
        rows, kv_heads, dim = len(decode.rows), new.shape[1], new.shape[3]
        if decode.gather is None:
            kv = self._held[layer.index]
            kv[:, :, decode.rows, decode.at] = new[:, :, -rows:]
        else:
            kv = self._gather(layer, decode.gather).view(2, kv_heads, rows, -1, dim)
            if decode.behind is not None:
                # Another request's rest, which may not be finite, and masked values that are not finite still count.
                row, index = decode.behind
                kv[:, :, row, index] = 0
            if self.holds:
                self._held[layer.index] = kv
        k, v = kv[:, :, :, : decode.longest].transpose(1, 2)
        q = q[:, -rows:].transpose(0, 1).reshape(rows, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=decode.mask(layer), scale=scale)
        return out.reshape(rows, -1, dim)


def _query_scale(module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Take over Llama 4's temperature tuning: the module would count positions from the first token of the pass."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    floor, scale = module.floor_scale, module.attn_scale
    module.attn_temperature_tuning = False
    return lambda index: torch.log1p(torch.floor((index.float() + 1.0) / floor)) * scale + 1.0


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
