# SPDX-License-Identifier: Apache-2.0
"""``RequestTrace``: what decides a request's block keys, as one JSON object without any media in it.

Workers write one per request with ``--trace-requests DIR``; ``dynamo-epd explain`` and ``dynamo-epd keys`` read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .errors import InvalidMetadata, InvalidRequest
from .handoff import ItemHandoff
from .layout import PromptLayout
from .multimodal_input import MultimodalInput


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the augmented prompt to print: positions ``start`` to ``end - 1``."""

    start: int
    end: int


class TraceItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One media item, in prompt order.

    Attributes:
        modality: ``image``, ``video`` or ``audio``.
        digest: its content digest, 64 hex digits.
        rows: embedding rows.
        uuid: the caller's id.
        positions: what places it (``grid_thw``, ``second_per_grid``, ...), as in ``ItemHandoff``.
        special_offsets: offsets in the item's concatenated runs that are framing.
    """

    modality: str
    digest: str
    rows: int = 0
    uuid: str | None = None
    positions: dict[str, Any] = {}
    special_offsets: tuple[int, ...] = ()


class RequestTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One request. The first fields are the input of ``dynamo-epd keys``, with its names.

    Attributes:
        prompt_token_ids: the expanded ids.
        multimodal_input: the seven fields by their upstream names, or None for text.
        vocab_size: what item-local ids start above.
        tokens_per_block: block size.
        cache_salt: the salt that the engine was given.
        lora_id: adapter number.
        slices: parts of the augmented prompt that ``keys`` prints.
        request_id: as in the worker's log.
        role: ``prefill``, ``decode`` or ``agg``.
        model: the handoff's model identity, or the served name.
        unexpanded_token_ids: the ids that the frontend sent.
        items: what is known of each media item.
        kind: ``text``, ``exact``, ``content`` or ``uncacheable``, as in ``metadata.KeyDecision``.
        reason: why the keys are not exact.
        texts: what some of the token ids stand for, for reading.
    """

    prompt_token_ids: tuple[int, ...]
    multimodal_input: dict[str, Any] | None
    vocab_size: int
    tokens_per_block: int
    cache_salt: str | None = None
    lora_id: int | None = None
    slices: tuple[Slice, ...] = ()
    request_id: str = ""
    role: str = ""
    model: str = ""
    unexpanded_token_ids: tuple[int, ...] = ()
    items: tuple[TraceItem, ...] = ()
    kind: str = ""
    reason: str = ""
    texts: dict[int, str] = {}


CONFORMANCE_FIELDS = ("name", "note", "cache_salt_id", "expected")
"""Fields of a case in a conformance file, which may be given as it stands."""


def make_trace(
    layout: PromptLayout,
    multimodal_input: MultimodalInput | None,
    items: Sequence[ItemHandoff] = (),
    *,
    vocab_size: int,
    tokens_per_block: int,
    unexpanded_token_ids: Sequence[int] = (),
    cache_salt: str | None = None,
    lora_id: int | None = None,
    request_id: str = "",
    role: str = "",
    model: str = "",
    kind: str = "",
    reason: str = "",
    texts: Mapping[int, str] | None = None,
) -> RequestTrace:
    """The trace of a request, from what a worker has at hand when it calls the engine."""
    return RequestTrace(
        prompt_token_ids=tuple(layout.token_ids.tolist()),
        multimodal_input=None if multimodal_input is None else multimodal_input.to_builtins(),
        vocab_size=vocab_size,
        tokens_per_block=tokens_per_block,
        cache_salt=cache_salt,
        lora_id=lora_id,
        request_id=request_id,
        role=role,
        model=model,
        unexpanded_token_ids=tuple(map(int, unexpanded_token_ids)),
        items=tuple(
            TraceItem(
                modality=item.modality,
                digest=item.digest,
                rows=item.rows,
                uuid=item.uuid,
                positions=item.positions,
                special_offsets=tuple(layout.special_offsets(index).tolist()),
            )
            for index, item in enumerate(items)
        ),
        kind=kind,
        reason=reason,
        texts=dict(texts or {}),
    )


def encode_trace(trace: RequestTrace) -> bytes:
    """``trace`` as JSON. ``multimodal_input`` is always written, also when it is null."""
    return msgspec.json.encode(trace)


def decode_trace(data: bytes, name: str = "the request") -> RequestTrace:
    """A trace, an input of ``keys``, or a case of a conformance file, from its JSON.

    Args:
        name: how an error message calls it.

    Raises:
        InvalidRequest: it is not JSON of this form.
        InvalidMetadata: a slice is outside the prompt, or the block size is below 1.
    """
    try:
        obj = msgspec.json.decode(data)
        if isinstance(obj, dict):
            obj = {key: value for key, value in obj.items() if key not in CONFORMANCE_FIELDS}
        # JSON has string keys only; ``texts`` has the ids as keys.
        trace = msgspec.convert(obj, RequestTrace, str_keys=True)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{name} cannot be read: {error}") from error
    if trace.tokens_per_block < 1:
        raise InvalidMetadata("tokens_per_block", f"is {trace.tokens_per_block}, must be at least 1")
    for i, part in enumerate(trace.slices):
        if not 0 <= part.start <= part.end <= len(trace.prompt_token_ids):
            raise InvalidMetadata(
                f"slices[{i}]",
                f"{part.start} to {part.end} is not inside the prompt of {len(trace.prompt_token_ids)} tokens",
            )
    return trace


def parse_multimodal_input(trace: RequestTrace) -> MultimodalInput | None:
    """The seven fields of ``trace``, checked. Raises ``InvalidMetadata``."""
    return None if trace.multimodal_input is None else MultimodalInput.from_builtins(trace.multimodal_input)
