# SPDX-License-Identifier: Apache-2.0
"""The wire schema of what one worker hands to the next, as small JSON objects without any tensor in them.

``Handoff`` is the encode worker's ``encoder_result``: prefill and decode both receive it. ``PrefillHandoff`` is the
reference engine's ``disaggregated_params``: decode receives it. Positions count tokens of the *unexpanded* prompt
(one placeholder per media item) unless a name says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .errors import InvalidRequest, Unavailable

HANDOFF_VERSION = 2

Modality = Literal["image", "video", "audio"]

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
"""The dtypes that a transferred tensor may have, with their item size in bytes. Anything else is refused."""


class TensorRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where another process can fetch one contiguous tensor, and what it must look like when it arrives.

    Attributes:
        endpoint: control address of the process that holds the bytes (``host:port``).
        agent: NIXL agent name of that process, unique per process start.
        offer: number of the offer at that agent.
        generation: generation of the memory slot when it was offered.
        digest: content digest of what is offered (hex), the key under which a receiver may already hold it.
        shape: tensor shape; ``prod(shape) * itemsize`` is the size in bytes.
        dtype: one of ``DTYPE_BYTES``.
    """

    endpoint: str
    agent: str
    offer: int
    generation: int
    digest: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if not self.shape or any(d <= 0 for d in self.shape):
            raise ValueError(f"shape {self.shape} must have only positive dimensions")
        if self.offer < 0 or self.generation < 0:
            raise ValueError("offer and generation must not be negative")

    @property
    def nbytes(self) -> int:
        n = DTYPE_BYTES[self.dtype]
        for d in self.shape:
            n *= d
        return n


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """``count`` equal tokens in a row inside a replacement.

    Attributes:
        token_id: the id that is repeated.
        count: how often, >= 1.
        item: index into ``Handoff.items`` of the item that the tokens belong to, or -1 for ordinary (gap) text.
        framing: True where the token belongs to the item but has no embedding row (start, end, separators).
    """

    token_id: int
    count: int
    item: int = -1
    framing: bool = False


class Group(msgspec.Struct, frozen=True, array_like=True):
    """A pattern of segments repeated ``times`` times: rows of an image compress to a few numbers."""

    times: int
    segments: tuple[Segment, ...]


class Replacement(msgspec.Struct, frozen=True, array_like=True):
    """Replace ``length`` tokens of the unexpanded prompt, from ``start``, by ``groups``."""

    start: int
    length: int
    groups: tuple[Group, ...]


class ItemHandoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One media item, in prompt order.

    Attributes:
        modality: ``image``, ``video`` or ``audio``.
        digest: the content digest, 64 hex digits (see ``contract.digest``).
        rows: embedding rows of the item = embedding slots that the replacements give it.
        embedding: where the embedding of shape ``[rows, width]`` can be fetched; width is a multiple of the hidden
            size (deepstack features are concatenated behind the embedding).
        uuid: the caller's id of the item, unchanged, or None.
        positions: what the model family needs to place the item (``grid_thw``, ``second_per_grid``, ...): plain
            numbers and lists of numbers.
    """

    modality: Modality
    digest: str
    rows: int
    embedding: TensorRef
    uuid: str | None = None
    positions: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if len(self.digest) != 64 or any(c not in "0123456789abcdef" for c in self.digest):
            raise ValueError("digest must be 64 lower-case hex digits")
        if self.rows <= 0 or self.embedding.shape[0] != self.rows or len(self.embedding.shape) != 2:
            raise ValueError(f"embedding shape {self.embedding.shape} must be [rows={self.rows}, width]")


class HandoffError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault that encode found. It travels inside the handoff: the frontend swallows errors of the encode hop."""

    status: Literal[400, 503]
    message: str


class Handoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``encoder_result``: everything that prefill and decode need to know of the media of one request.

    Attributes:
        version: ``HANDOFF_VERSION``; a receiver refuses any other.
        model: identity of the model and encoder that made the embeddings; a receiver of another model refuses.
        items: media items in prompt order.
        replacements: how the unexpanded prompt becomes the expanded one; ordered, not overlapping.
        prompt_digest: digest (hex) of the unexpanded ids that the replacements were made for.
        error: set when encode could not do its work; ``items`` is then empty.
    """

    version: int
    model: str
    items: tuple[ItemHandoff, ...] = ()
    replacements: tuple[Replacement, ...] = ()
    prompt_digest: str = ""
    error: HandoffError | None = None


class PrefillHandoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``disaggregated_params`` of the reference engine.

    Attributes:
        version: ``HANDOFF_VERSION``.
        model: fingerprint of the language model's weights; decode refuses KV of another one.
        prompt_digest: digest (hex) of the unexpanded ids that the KV was computed for.
        kv: the KV blocks of the prompt, ``[blocks, layers, 2, kv_heads, tokens_per_block, head_dim]``.
        num_tokens: prompt tokens whose KV is in ``kv``.
        tokens_per_block: block size that ``kv`` is cut in.
        first_token: the token that prefill sampled.
        first_logprob: its log probability, when asked for.
        first_top_logprobs: ``(token_id, logprob)`` of the most likely tokens at that step, when asked for.
    """

    version: int
    model: str
    prompt_digest: str
    num_tokens: int
    tokens_per_block: int
    first_token: int
    kv: TensorRef
    first_logprob: float | None = None
    first_top_logprobs: tuple[tuple[int, float], ...] = ()


def to_json_object(message: Handoff | PrefillHandoff) -> dict[str, Any]:
    """``message`` as the plain dict that Dynamo carries."""
    return msgspec.to_builtins(message)


def parse_handoff(obj: object) -> Handoff:
    """The received ``encoder_result`` as a ``Handoff``.

    Raises:
        Unavailable: it is not a handoff of this version (an older worker, or something else wrote it).
    """
    return _parse(obj, Handoff, "encoder_result")


def parse_prefill_handoff(obj: object) -> PrefillHandoff:
    """The received ``disaggregated_params`` as a ``PrefillHandoff``; raises as ``parse_handoff`` does."""
    return _parse(obj, PrefillHandoff, "disaggregated_params")


def _parse(obj: object, kind: type, name: str) -> Any:
    version = obj.get("version") if isinstance(obj, dict) else None
    if version != HANDOFF_VERSION:
        raise Unavailable(
            f"{name} has version {version!r}, this worker understands {HANDOFF_VERSION}: run the same dynamo-epd "
            "release on all workers"
        )
    try:
        return msgspec.convert(obj, kind)
    except msgspec.ValidationError as error:
        raise Unavailable(f"{name} is malformed: {error}") from error


def raise_for_error(handoff: Handoff) -> None:
    """Raise what encode reported: ``InvalidRequest`` for a fault of the request, else ``Unavailable``."""
    if handoff.error is not None:
        raise (InvalidRequest if handoff.error.status == 400 else Unavailable)(handoff.error.message)
