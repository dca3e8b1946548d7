# SPDX-License-Identifier: Apache-2.0
"""The one decision about a request's keys, for every engine: exact, or shared by nobody else's content, or refused.

Placeholder ids are never a key by themselves: where the exact keys cannot be given to the engine, the cache salt makes
up for it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .convert import FORMS, Form
from .digest import content_salt
from .errors import InvalidMetadata
from .layout import PromptLayout
from .multimodal_input import MultimodalInput, interleaved_groups, item_name

Policy = Literal["refuse", "uncacheable"]
"""``--on-incomplete-metadata``: what becomes of a request whose keys cannot be exact."""

KeyKind = Literal["text", "exact", "content", "uncacheable"]


@dataclass(frozen=True)
class KeyDecision:
    """How the engine must key a request.

    Attributes:
        kind: ``text`` (no media), ``exact``, ``content`` (the salt stands for all items: requests with the same
            items share) or ``uncacheable`` (nobody shares).
        multimodal_input: the seven fields when ``kind`` is ``exact``, else None.
        engine_fields: the same in the form that was asked for; None unless ``exact``.
        cache_salt: the salt to give the engine: the caller's own for ``text`` and ``exact``.
        reason: why the keys are not exact, for the log; empty when they are.
    """

    kind: KeyKind
    multimodal_input: MultimodalInput | None
    engine_fields: dict[str, Any] | None
    cache_salt: str | None
    reason: str = ""

    @property
    def reuse(self) -> bool:
        """False where nothing may be taken from or left in the block cache."""
        return self.kind != "uncacheable"


def decide(
    num_items: int,
    *,
    layout: PromptLayout | None,
    digests: Sequence[str] = (),
    uuids: Sequence[str | None] | None = None,
    received: MultimodalInput | Mapping[str, Any] | None = None,
    rows: Sequence[int] | None = None,
    num_tokens: int | None = None,
    cache_salt: str | None = None,
    policy: Policy = "refuse",
    form: Form = "seven",
) -> KeyDecision:
    """Decide how a request is keyed.

    Args:
        num_items: media items that the request has, by whatever is known best (its media parts, its placeholders).
        layout: the expanded prompt, or None where only the ids are known.
        digests: 64 hex digits per item; may be empty when ``received`` brings hashes.
        uuids: the caller's ids per item.
        received: metadata that came with the request instead of being made from ``layout``.
        rows: embedding rows that are there, per item.
        num_tokens: length of the expanded prompt, where ``layout`` is None.
        cache_salt: the caller's salt.
        policy: what to do when the metadata is incomplete or contradicts itself.
        form: what the engine understands. A form that cannot say the keys exactly is not a fault of the request: it is
            keyed by content whatever the policy.

    Raises:
        InvalidMetadata: with ``policy="refuse"``, what is missing or wrong. With either policy, rows that are not the
            slots: such a prompt cannot be computed at all.
    """
    if layout is not None and rows is not None:
        _check_rows(layout, rows)
    if num_items == 0 and (layout is None or layout.num_items == 0) and received is None:
        return KeyDecision("text", None, None, cache_salt)
    try:
        mm = _exact(num_items, layout, digests, uuids, received, num_tokens)
    except InvalidMetadata as error:
        if policy == "refuse":
            raise
        known = _known_digests(num_items, digests, received)
        if known is None:
            return KeyDecision("uncacheable", None, None, unique_salt(), str(error))
        return KeyDecision("content", None, None, content_salt(known, cache_salt), str(error))
    fields = FORMS[form](mm, layout)
    if fields is None:
        salt = content_salt([digest.hex() for digest in mm.digests], cache_salt)
        return KeyDecision("content", None, None, salt, f"the engine's form {form!r} cannot say these runs exactly")
    return KeyDecision("exact", mm, fields, cache_salt)


def unique_salt() -> str:
    """A cache salt that no other request has."""
    return "epd-once-" + secrets.token_hex(32)


def _exact(
    num_items: int,
    layout: PromptLayout | None,
    digests: Sequence[str],
    uuids: Sequence[str | None] | None,
    received: MultimodalInput | Mapping[str, Any] | None,
    num_tokens: int | None,
) -> MultimodalInput:
    """The seven fields, after everything that is known of the request has been found to agree."""
    made: MultimodalInput | None = None
    if layout is not None:
        if layout.num_items != num_items:
            raise InvalidMetadata("layout", f"has {layout.num_items} items, but the request has {num_items}")
        num_tokens = len(layout)
        if digests:
            made = layout.multimodal_input(digests, uuids)
    if received is None:
        if made is None:
            problem = "the layout is not known" if layout is None else "there are no digests"
            raise InvalidMetadata("multimodal_input", f"{problem} for a request with {num_items} media items")
        return made
    mm = received if isinstance(received, MultimodalInput) else MultimodalInput.from_builtins(received)
    if mm.num_items != num_items:
        raise InvalidMetadata("multimodal_hashes", f"has {mm.num_items} entries, but the request has {num_items} items")
    if num_tokens is None:
        raise InvalidMetadata("multimodal_input", "the length of the prompt that it describes is not known")
    mm.check_prompt(num_tokens)
    if layout is None and not mm.has_run_fields:
        raise InvalidMetadata("multimodal_run_positions", "is missing, and without it an item's tokens are unknown")
    if made is None and interleaved_groups(mm.item_runs):
        raise InvalidMetadata("digests", "are needed where items interleave: the hashes alone do not say how they do")
    for item in range(num_items if layout is not None else 0):
        if layout is not None and list(mm.item_runs[item]) != layout.runs(item):
            raise InvalidMetadata(
                "multimodal_run_positions",
                f"says {list(mm.item_runs[item])[:4]}, but the prompt has {layout.runs(item)[:4]}",
                item=item_name(item),
            )
        if made is not None and mm.multimodal_hashes[item] != made.multimodal_hashes[item]:
            raise InvalidMetadata(
                f"multimodal_hashes[{item}]",
                f"is {mm.digests[item].hex()}, but the item's digest gives {made.digests[item].hex()}",
                item=item_name(item),
            )
    if layout is not None and made is None:
        made = layout.multimodal_input([digest.hex() for digest in mm.digests], mm.multimodal_uuids)
    return made or mm


def _check_rows(layout: PromptLayout, rows: Sequence[int]) -> None:
    if len(rows) != layout.num_items:
        raise InvalidMetadata("rows", f"there are embeddings for {len(rows)} items, the prompt has {layout.num_items}")
    for item, (have, need) in enumerate(zip(rows, layout.rows.tolist(), strict=True)):
        if have != need:
            raise InvalidMetadata(
                f"rows[{item}]",
                f"the embedding has {have} rows, the prompt has {need} slots for it",
                item=item_name(item),
            )


def _known_digests(
    num_items: int, digests: Sequence[str], received: MultimodalInput | Mapping[str, Any] | None
) -> list[str] | None:
    """The digests of all items in prompt order, where each of them is known and sound, else None."""
    if isinstance(received, MultimodalInput):
        found = [digest.hex() for digest in received.digests]
    elif isinstance(received, Mapping) and received.get("multimodal_hashes"):
        try:
            hashes = received["multimodal_hashes"]
            span = range(len(hashes))
            alone = MultimodalInput(hashes, tuple(span), tuple(1 for _ in span))
        except (InvalidMetadata, TypeError):
            return None
        found = [digest.hex() for digest in alone.digests]
    else:
        found = []
    if digests and found and list(digests) != found:
        return None
    known = list(digests) or found
    sound = all(len(digest) == 64 and set(digest) <= set("0123456789abcdef") for digest in known)
    return known if sound and len(known) == num_items > 0 else None
