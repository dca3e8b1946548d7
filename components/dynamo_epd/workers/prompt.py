# SPDX-License-Identifier: Apache-2.0
"""A frontend request and encode's handoff -> the prompt as an engine needs it. Never a media request run as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..contract.digest import prompt_digest
from ..contract.errors import InvalidMetadata, Unavailable
from ..contract.handoff import Handoff, ItemHandoff, Modality, parse_handoff, raise_for_error
from ..contract.layout import PromptLayout, expand
from ..contract.metadata import Policy, decide
from ..contract.multimodal_input import MultimodalInput
from ..models.base import Family

MEDIA_KEYS: dict[str, Modality] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}

# What a KV-aware frontend puts in place of an image's tokens: 1_000_000 + the low 30 bits of its hash (Dynamo 1.6.1).
_ROUTING_BASE = 1_000_000
_ROUTING_MASK = (1 << 30) - 1


@dataclass(frozen=True)
class Prompt:
    """The expanded prompt of one request.

    Attributes:
        layout: expanded ids and where the items' embedding rows sit.
        items: the items as encode described them, in prompt order.
        multimodal_input: the seven fields, or None for text.
        position_ids, position_delta: as in ``EngineRequest``.
        key_kind, key_reason: how the prompt is keyed and why not exactly; see ``metadata.KeyDecision``.
        cache_salt: the salt for the engine.
        reuse: False where no block may be shared.
        routing_token_ids: as in ``EngineRequest``.
    """

    layout: PromptLayout
    items: tuple[ItemHandoff, ...]
    multimodal_input: MultimodalInput | None
    position_ids: np.ndarray | None
    position_delta: float
    key_kind: str
    key_reason: str
    cache_salt: str | None
    reuse: bool
    routing_token_ids: np.ndarray


def media_counts(request: Mapping[str, Any]) -> dict[Modality, int]:
    """Media items of each modality in a frontend request. An unknown kind of media counts too, under its own name."""
    counts: dict[Modality, int] = {}
    for key, entries in (request.get("multi_modal_data") or {}).items():
        if entries:
            counts[MEDIA_KEYS.get(key, key)] = len(entries)
    return counts


def usable_handoff(request: Mapping[str, Any], family: Family) -> Handoff | None:
    """The request's handoff, checked against request and model; None for a request without media.

    Raises:
        InvalidRequest: encode found the request faulty, or the prompt has placeholders and no media.
        Unavailable: media without a handoff that this worker can use.
    """
    counts = media_counts(request)
    raw = request.get("encoder_result")
    if not counts:
        family.placeholders(request["token_ids"], {})
        return None
    if raw is None:
        raise Unavailable(
            "the request has media but no encoder_result: no encode worker could be reached, or the frontend does not "
            "route to one. It is not run as text; start an encode worker, or set --encode-fallback ask",
            reason="no_handoff",
        )
    handoff = parse_handoff(raw)
    raise_for_error(handoff)
    if handoff.model != family.identity:
        raise Unavailable(
            f"the encode worker runs another model or revision ({handoff.model[:12]}) than this worker "
            f"({family.identity[:12]}): start both from the same model directory contents",
            reason="other_model",
        )
    if handoff.prompt_digest != prompt_digest(request["token_ids"]):
        raise Unavailable(
            "encoder_result was made for another prompt than the one that it came with", reason="other_prompt"
        )
    # A video may bring its own sound along as a second item, so items can be more than the request's media.
    asked = sum(counts.values())
    if len(handoff.items) < asked:
        raise Unavailable(f"encoder_result has {len(handoff.items)} items for {asked} media in the request")
    return handoff


def build_prompt(
    request: Mapping[str, Any], handoff: Handoff | None, family: Family, policy: Policy = "refuse"
) -> Prompt:
    """Expand the prompt and derive everything that follows from it.

    Args:
        policy: what to do where the metadata does not give exact keys.

    Raises:
        InvalidMetadata: the handoff contradicts itself or the prompt.
    """
    token_ids = request["token_ids"]
    items: tuple[ItemHandoff, ...] = ()
    layout = PromptLayout.text(token_ids)
    if handoff is not None:
        items = handoff.items
        layout = expand(token_ids, handoff.replacements, len(items))
        for i, item in enumerate(items):
            width = item.embedding.shape[1]
            if width != family.embedding_width:
                raise InvalidMetadata(f"items[{i}].embedding", f"{width} columns, not {family.embedding_width}")
    keys = decide(
        len(items),
        layout=layout,
        digests=[item.digest for item in items],
        uuids=[item.uuid for item in items],
        rows=[item.rows for item in items],
        cache_salt=(request.get("routing") or {}).get("cache_salt"),
        policy=policy,
    )
    position_ids, delta = family.positions(layout, items)
    return Prompt(
        layout=layout,
        items=items,
        multimodal_input=keys.multimodal_input,
        position_ids=position_ids,
        position_delta=delta,
        key_kind=keys.kind,
        key_reason=keys.reason,
        cache_salt=keys.cache_salt,
        reuse=keys.reuse,
        routing_token_ids=_routing_ids(layout, items, request),
    )


def routing_ids(
    layout: PromptLayout,
    items: Sequence[ItemHandoff],
    mm_hashes: Sequence[str] | None,
    hashed: Sequence[int] | None = None,
) -> np.ndarray:
    """The prompt as a KV-aware frontend hashes it: int64 ``[n]``, -1 from the first token on that it hashes otherwise.

    That is the first token of an item without a value (a video, or an image with a uuid), or the first one where the
    frontend, which computes an image's length by itself, came to another prompt than this worker. Text before the
    first item is always as it is: that is how the frontend hashes it in a request without media.

    Args:
        mm_hashes: the frontend's own hash of each image, 16 hex digits, in prompt order.
        hashed: the ids that the frontend hashed, where it says so.
    """
    ids = np.asarray(layout.token_ids, dtype=np.int64)
    if not items:
        return ids
    images = [i for i, item in enumerate(items) if item.modality == "image"]
    values = np.full(len(items), -1, dtype=np.int64)
    if mm_hashes and len(mm_hashes) == len(images):
        values[images] = [_ROUTING_BASE + (int(h, 16) & _ROUTING_MASK) for h in mm_hashes]
    member = layout.member_item
    routing = np.where(member >= 0, values[np.maximum(member, 0)], ids)
    agreed = routing >= 0
    if hashed is not None:
        told = np.full(len(ids), -1, dtype=np.int64)
        told[: len(hashed)] = hashed[: len(ids)]
        # Framing may be the prompt's own text, which the frontend leaves alone, or come with the image's replacement.
        as_text = layout.framing & (told == ids)
        agreed &= (told == routing) | as_text
        routing = np.where(as_text, ids, routing)
    if not agreed.all():
        routing[max(int(np.argmin(agreed)), int(layout.run_starts.min())) :] = -1
    return routing


def _routing_ids(layout: PromptLayout, items: Sequence[ItemHandoff], request: Mapping[str, Any]) -> np.ndarray:
    info = request.get("mm_routing_info") or {}
    mm_hashes = (request.get("extra_args") or {}).get("mm_hashes")
    if any(info.get("block_mm_infos") or ()):
        # The frontend mixes something else into the blocks' hashes than their token ids.
        mm_hashes = None
    return routing_ids(layout, items, mm_hashes, info.get("routing_token_ids") or None)
