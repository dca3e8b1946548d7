# SPDX-License-Identifier: Apache-2.0
"""One request inside the engine: its tokens, its block keys, and the blocks that it holds."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...contract.block_keys import AugmentedTokens, augmented_tokens, block_keys, extend_key, root_key
from ...contract.errors import InvalidRequest
from ...contract.multimodal_input import item_name
from ..base import EngineOutput, EngineRequest, FinishReason
from .block_cache import Node, Tokens, block_tokens
from .sampler import Draw, check_params


@dataclass(frozen=True)
class Limits:
    """What a request must fit, from the model and the configuration.

    Attributes:
        plain_keys: leave the media out of the block keys (WRONG answers; for demonstration only).
        reuse: whether blocks are shared at all.
        kv: whether the prompt's state is KV alone, so that it can be exported and imported.
    """

    vocab_size: int
    hidden_size: int
    deepstack: int
    mrope: bool
    atomic_items: bool
    max_seq_len: int
    max_num_tokens: int
    chunked_prefill: bool
    tokens_per_block: int
    reuse: bool = True
    plain_keys: bool = False
    kv: bool = True


_numbers = itertools.count()


class Seq:
    """A request that runs or waits.

    Attributes:
        number: unique in this process.
        n: tokens of the prompt.
        max_length: tokens of prompt and answer at most.
        tokens: int32 ``[max_length]``; the first ``length`` are known, the KV of the first ``computed`` is there.
        group: int64 ``[n]``, equal numbers >= 0 for the tokens of an item that see each other; else None.
        shareable: its blocks have keys and go into the prefix tree.
        nodes: committed blocks that it pins, from the first block on.
        blocks: int64, all blocks that it holds: those of ``nodes``, then private ones; ``num_blocks`` are there.
        source: a committed block whose first tokens are to be copied, pinned until that is done.
        reserved: blocks that it may still take.
        awaits: key of a block that another sequence computes now.
        cached_tokens: prompt tokens that were not computed for it.
        queue_seconds: how long it waited before it began to run.
        outputs: what ``generate`` is to yield or raise.
        left: set when it holds nothing any more.
    """

    def __init__(self, request: EngineRequest, limits: Limits):
        _check(request, limits)
        layout, params = request.layout, request.sampling
        self.number = next(_numbers)
        self.request = request
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.n = len(layout)
        new = 1 if request.prefill_only else min(params.max_tokens, limits.max_seq_len - self.n)
        self.max_length = self.n + new
        self.tokens = np.empty(self.max_length, np.int32)
        self.tokens[: self.n] = layout.token_ids
        self.length = self.n
        self.computed = 0
        self.group = _groups(layout.slot_item) if limits.atomic_items and layout.num_items else None

        self._size = limits.tokens_per_block
        self.shareable = request.reuse and limits.reuse
        self.root = b""
        self.keys: list[bytes] = []
        self.prompt_blocks: list[Tokens] = []
        self._augmented = AugmentedTokens(np.empty(0, np.int64))
        if self.shareable:
            mm = None if limits.plain_keys else request.multimodal_input
            self.root = root_key(request.lora_id, request.cache_salt)
            self._augmented = augmented_tokens(layout.token_ids, mm, limits.vocab_size)
            self.keys = block_keys(self._augmented, self._size, self.root)
            self.prompt_blocks = block_tokens(self._augmented, self._size)

        self.nodes: list[Node] = []
        self.blocks = np.zeros(-(-(self.max_length - 1) // self._size), np.int64)
        self.num_blocks = 0
        self.source: Node | None = None
        self.reserved = 0
        self.awaits: bytes | None = None
        self.cached_tokens = 0
        self._arrived = time.perf_counter()
        self.queue_seconds = 0.0
        self.cancelled = False
        self.outputs: asyncio.Queue[EngineOutput | BaseException] = asyncio.Queue()
        self.left = asyncio.Event()
        self.fetch: asyncio.Task[Any] | None = None

    @property
    def importing(self) -> bool:
        """Its prompt's KV is on its way from another worker."""
        return self.request.remote_kv is not None and self.length == self.n

    @property
    def draw(self) -> Draw:
        """The token to be sampled next."""
        return Draw(self.params, self.seed, self.length - self.n)

    def taken_up(self) -> None:
        """It waits no more."""
        self.queue_seconds = time.perf_counter() - self._arrived

    def append(self, token: int) -> None:
        self.tokens[self.length] = token
        self.length += 1

    def finish_reason(self, token: int) -> FinishReason | None:
        """Why the answer ends with ``token``, which comes next, or None where it goes on."""
        if token in self.params.stop_token_ids and self.length - self.n >= self.params.min_tokens:
            return "stop"
        return "length" if self.length + 1 == self.max_length else None

    def block(self, index: int) -> tuple[bytes, Tokens]:
        """Key and tokens of a block as far as its KV is computed."""
        start, stop = index * self._size, min((index + 1) * self._size, self.computed)
        if stop <= self.n and index < len(self.keys) and stop - start == len(self.prompt_blocks[index]):
            return self.keys[index], self.prompt_blocks[index]
        tokens = self._augmented[start : min(stop, self.n)] if start < self.n else self._augmented[:0]
        tokens = tokens.append(self.tokens[max(start, self.n) : stop]) if stop > self.n else tokens
        key = extend_key(self.keys[index - 1] if index else self.root, tokens)
        if stop - start == self._size:
            self.keys[index:] = [key]
        return key, block_tokens(tokens, self._size)[0]

    def router_ids(self) -> np.ndarray:
        """int64: the tokens as the KV-aware router knows them, as far as it knows them."""
        layout, routing = self.request.layout, self.request.routing_token_ids
        if routing is None:
            known = int(layout.run_starts.min()) if layout.num_items else self.length
            return self.tokens[:known].astype(np.int64)
        if (routing < 0).any():
            return routing[: int(np.argmax(routing < 0))]
        return np.concatenate([routing, self.tokens[self.n : self.length]])

    def cut(self, start: int, end: int) -> int:
        """The last place in ``start..end`` where the prompt may be cut; ``start`` where there is none."""
        if self.group is None or end >= self.n or end <= start or self.group[end] < 0:
            return end
        return max(int(np.argmax(self.group == self.group[end])), start)


def _groups(slot_item: np.ndarray) -> np.ndarray:
    """A number for each stretch of embedding slots of one item, -1 elsewhere."""
    starts = np.diff(slot_item, prepend=-1) != 0
    return np.where(slot_item >= 0, np.cumsum(starts), -1).astype(np.int64)


def _check(request: EngineRequest, limits: Limits) -> None:
    """Raise ``InvalidRequest`` for a request that cannot be run as it is."""
    layout = request.layout
    n = len(layout)
    check_params(request.sampling, limits.vocab_size)
    if n == 0:
        raise InvalidRequest("the prompt is empty")
    if n >= limits.max_seq_len:
        raise InvalidRequest(
            f"the prompt has {n} tokens with its media, and there is room for {limits.max_seq_len} with the answer; "
            "shorten it or send fewer or smaller media"
        )
    if not limits.chunked_prefill and n > limits.max_num_tokens and request.remote_kv is None:
        raise InvalidRequest(
            f"the prompt has {n} tokens, and without enable_chunked_prefill at most max_num_tokens "
            f"({limits.max_num_tokens}) can be computed: shorten it"
        )
    text = layout.token_ids[layout.slot_item < 0]
    if len(text) and text.max() >= limits.vocab_size:
        raise InvalidRequest(f"token id {int(text.max())} is not in the vocabulary of {limits.vocab_size}")
    if not limits.kv and (request.prefill_only or request.remote_kv is not None):
        raise InvalidRequest(
            "this model keeps a recurrent state, which cannot be handed from prefill to decode: use agg"
        )
    if request.remote_kv is not None and request.remote_kv.num_tokens != n:
        raise InvalidRequest(f"the KV received is of {request.remote_kv.num_tokens} tokens, the prompt has {n}")
    _check_items(request, limits)
    _check_positions(request, limits)


def _check_items(request: EngineRequest, limits: Limits) -> None:
    layout, mm = request.layout, request.multimodal_input
    items = layout.num_items
    if items and mm is None:
        raise InvalidRequest(f"the prompt has {items} media items but no multimodal_input: it is not run as text")
    if mm is not None and mm.num_items != items:
        raise InvalidRequest(f"multimodal_input has {mm.num_items} items, the prompt has {items}")
    for i in range(items):
        if mm is not None and list(mm.item_runs[i]) != layout.runs(i):
            raise InvalidRequest(
                f"multimodal_input places it at {list(mm.item_runs[i])[:4]}, the prompt at {layout.runs(i)[:4]}",
                item=item_name(i),
            )
    if request.remote_kv is None and len(request.embeddings) != items:
        raise InvalidRequest(f"there are {len(request.embeddings)} embeddings for {items} media items")
    widths = {limits.hidden_size, limits.hidden_size * (1 + limits.deepstack)}
    for i, embedding in enumerate(request.embeddings):
        rows = int(layout.rows[i])
        if embedding.ndim != 2 or embedding.shape[0] != rows or embedding.shape[1] not in widths:
            want = " or ".join(str(width) for width in sorted(widths))
            raise InvalidRequest(
                f"its embedding has shape {tuple(embedding.shape)}, the prompt has {rows} slots of width {want}",
                item=item_name(i),
            )
        if not embedding.is_floating_point():
            raise InvalidRequest(f"its embedding holds {embedding.dtype}, must hold floats", item=item_name(i))
    if limits.atomic_items and items:
        longest = int(np.bincount(_groups(layout.slot_item) + 1)[1:].max())
        if longest > limits.max_num_tokens:
            raise InvalidRequest(
                f"an item has {longest} tokens that are computed at once, max_num_tokens is {limits.max_num_tokens}"
            )


def _check_positions(request: EngineRequest, limits: Limits) -> None:
    positions, n = request.position_ids, len(request.layout)
    if positions is None:
        if limits.mrope and request.layout.num_items:
            raise InvalidRequest("this model needs position_ids for a prompt with media")
        return
    if not limits.mrope:
        raise InvalidRequest("this model takes no position_ids: its positions are 0, 1, 2, ...")
    if positions.shape != (3, n) or positions.dtype.kind not in "iuf":
        raise InvalidRequest(f"position_ids is {positions.dtype} {positions.shape}, must be numbers of shape (3, {n})")
