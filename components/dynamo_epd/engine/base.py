# SPDX-License-Identifier: Apache-2.0
"""The boundary to what runs the language model: one request type, one output type, one ``Engine`` protocol.

Nothing here knows Dynamo, NIXL or how media became embeddings. An engine adds one file (or folder) beside this one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from ..contract.handoff import Modality
    from ..contract.layout import PromptLayout
    from ..contract.multimodal_input import MultimodalInput

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: candidates kept; 0 keeps all.
        seed: makes sampling repeatable; None draws one.
        max_tokens: tokens to generate at most, >= 1.
        min_tokens: tokens before which no stop token may be chosen.
        stop_token_ids: ids that end the request; the id itself is part of the output.
        logprobs: None for none, else how many alternatives per position (0: only the chosen token's).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None


@dataclass(frozen=True)
class Logprob:
    """Log probability of the chosen token and ``top``: (token id, log probability), most likely first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RemoteKV:
    """KV that another worker computed for exactly this prompt.

    Attributes:
        num_tokens: prompt tokens covered (all of the prompt).
        tokens_per_block: block size of the sender.
        first_token: the token that prefill sampled; it is the first output token.
        first_logprob: its ``Logprob``, when asked for.
        fetch: ``await fetch(first_block)`` gives the tensor ``[blocks - first_block, layers, 2, kv_heads,
            tokens_per_block, head_dim]`` (KV dtype); the engine calls it once, after it has pinned the blocks before
            ``first_block`` that it holds already, and not at all where it holds every block or where ``first_token``
            ends the answer. Raises ``TransferError``.
    """

    num_tokens: int
    tokens_per_block: int
    first_token: int
    fetch: Callable[[int], Awaitable[torch.Tensor]]
    first_logprob: Logprob | None = None


@dataclass(frozen=True)
class EngineRequest:
    """One request in the form that every engine understands.

    Attributes:
        request_id: unique among the requests in flight.
        layout: the expanded prompt (``layout.token_ids``, int32 ``[n]``) and where each item's embedding rows sit.
        sampling: sampling and stop options.
        multimodal_input: the seven fields, or None for a prompt without media.
        embeddings: per item in prompt order ``[rows, width]``; width = hidden size x (1 + deepstack layers).
        position_ids: ``[3, n]`` for M-RoPE models, int64 or (Qwen3-Omni's videos) float64; None for 0..n-1.
        position_delta: generated token i has position ``n + i + position_delta`` (on all three axes).
        cache_salt: isolates block sharing: only requests with an equal salt share; None is a salt of its own.
        lora_id: adapter number, part of the block keys' scope.
        reuse: False computes every prompt token and shares nothing with anybody (the uncacheable fallback).
        routing_token_ids: int64 ``[n]`` ids under which the KV-aware router knows this prompt, -1 from the first token
            on for which it has none; None where it knows the text before the first item only.
        prefill_only: stop after the first token and keep the prompt's KV for export.
        remote_kv: KV from a prefill worker; None where this worker computes the prompt itself.
        modalities: per item in prompt order its modality, where it is known.
        disaggregated_params: prefill's ``EngineOutput.params``, for an engine that moves KV itself (TensorRT-LLM);
            then ``remote_kv`` is None and ``embeddings`` is empty.
    """

    request_id: str
    layout: PromptLayout
    sampling: SamplingParams
    multimodal_input: MultimodalInput | None = None
    embeddings: Sequence[torch.Tensor] = ()
    position_ids: np.ndarray | None = None
    position_delta: float = 0
    cache_salt: str | None = None
    lora_id: int | None = None
    reuse: bool = True
    routing_token_ids: np.ndarray | None = None
    prefill_only: bool = False
    remote_kv: RemoteKV | None = None
    modalities: tuple[Modality, ...] = ()
    disaggregated_params: dict[str, Any] | None = None


class KVExport(Protocol):
    """The prompt's KV blocks of a finished ``prefill_only`` request, pinned until ``release``."""

    shape: tuple[int, ...]
    """``[blocks, layers, 2, kv_heads, tokens_per_block, head_dim]``, the last block possibly part filled."""
    dtype: torch.dtype

    def copy_to(self, out: torch.Tensor) -> None:
        """Write the blocks into ``out``, a contiguous tensor of ``shape`` and ``dtype``."""
        ...

    def release(self) -> None:
        """Unpin the blocks. Safe to call twice."""
        ...


@dataclass
class EngineOutput:
    """What one step adds to a request. The last output of a request has ``finish_reason``.

    Attributes:
        token_ids: new tokens.
        logprobs: one per new token, when asked for.
        cached_tokens: prompt tokens taken from the block cache; the same in every output of a request.
        kv: set on the last output of a ``prefill_only`` request; whoever receives it must release it.
        params: engine-specific JSON-safe state for the decode worker (TensorRT-LLM's disaggregated params).
        queue_seconds: how long the request waited before the engine took it up, where the engine knows; the same in
            every output of a request.
    """

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    cached_tokens: int = 0
    kv: KVExport | None = None
    params: dict[str, Any] | None = None
    queue_seconds: float = 0.0


@dataclass(frozen=True)
class EngineInfo:
    """What an engine tells when it has started."""

    tokens_per_block: int
    total_blocks: int
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    vocab_size: int
    hidden_size: int
    block_reuse: bool


@dataclass(frozen=True)
class BlocksStored:
    """Full blocks that became reusable, in chain order.

    Attributes:
        block_hashes: one non-negative 63-bit hash per block.
        parent_hash: hash of the block before the first, or None at the root.
        token_ids: ids of all tokens of these blocks, as the router knows them.
        cache_salt: the caller's salt, of which the router makes a scope of its own.
        lora_name: the adapter, another such scope.
    """

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    token_ids: tuple[int, ...]
    cache_salt: str | None = None
    lora_name: str | None = None


@dataclass(frozen=True)
class BlocksRemoved:
    """Blocks that can no longer be reused."""

    block_hashes: tuple[int, ...]


KVEventListener = Callable[["BlocksStored | BlocksRemoved"], None]


class Engine(Protocol):
    """A running language model. All methods are called on one event loop."""

    async def start(self) -> EngineInfo:
        """Load weights and get ready to accept ``generate``. Raises ``ConfigError``."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request. Closing the iterator early frees everything the request held.

        Raises:
            InvalidRequest: the prompt cannot be run (too long, metadata that does not fit).
            TransferError: ``remote_kv`` could not be fetched.
        """
        ...

    def listen(self, listener: KVEventListener) -> None:
        """Call ``listener`` for every change of the set of reusable blocks, from now on."""
        ...

    def used_blocks(self) -> int:
        """Blocks that hold KV now, in use or reusable."""
        ...

    async def stop(self) -> None:
        """Cancel what is in flight and free all memory. Safe after a failed ``start`` and twice."""
        ...
