# SPDX-License-Identifier: Apache-2.0
"""``MultimodalInput`` in the forms that versions of TensorRT-LLM understand. What a form cannot say exactly is None.

The dicts hold keyword arguments with the upstream names, made of lists of plain ints, which is all that upstream takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from .layout import PromptLayout
from .multimodal_input import MultimodalInput

Form = Literal["seven", "item_runs", "four", "none"]
"""What an engine takes: the seven fields, ``multimodal_item_runs``, the first four fields only, or no metadata."""


def seven_fields(mm: MultimodalInput, layout: PromptLayout | None = None) -> dict[str, Any] | None:
    """All seven fields; None where ``mm`` has no run fields and an item is not known to be one run."""
    return mm.to_builtins() if mm.has_run_fields else None


def four_fields(mm: MultimodalInput, layout: PromptLayout | None = None) -> dict[str, Any] | None:
    """The first four fields, or None unless every item is one contiguous run."""
    if not mm.has_run_fields or any(len(runs) != 1 for runs in mm.item_runs):
        return None
    fields = mm.to_builtins()
    names = ("multimodal_hashes", "multimodal_positions", "multimodal_lengths", "multimodal_uuids")
    return {name: fields[name] for name in names}


def item_runs(mm: MultimodalInput, layout: PromptLayout | None = None) -> dict[str, Any] | None:
    """Hashes, uuids and ``multimodal_item_runs``: per item ``(prompt_start, run_length, non_embed_offsets)``.

    The offsets are those of framing tokens and count from the run's first token. None unless ``mm`` has run fields
    and the layout is known.
    """
    if not mm.has_run_fields or layout is None:
        return None
    framing = layout.framing
    runs = [
        [(start, length, np.flatnonzero(framing[start : start + length]).tolist()) for start, length in runs]
        for runs in mm.item_runs
    ]
    fields = mm.to_builtins()
    return {
        "multimodal_hashes": fields["multimodal_hashes"],
        "multimodal_uuids": fields["multimodal_uuids"],
        "multimodal_item_runs": runs,
    }


FORMS: Mapping[Form, Callable[[MultimodalInput, PromptLayout | None], dict[str, Any] | None]] = {
    "seven": seven_fields,
    "item_runs": item_runs,
    "four": four_fields,
    "none": lambda mm, layout: None,
}


def special_token_offsets(layout: PromptLayout) -> list[int]:
    """Offsets of framing tokens among all tokens that belong to items, in prompt order, as TensorRT-LLM counts them."""
    return np.flatnonzero(layout.framing[layout.member_item >= 0]).tolist()


def prompt_order(layout: PromptLayout) -> np.ndarray | None:
    """Which row of all items' embeddings (concatenated item by item) each slot takes, in prompt order.

    Returns:
        int64 ``[slots]``, or None where that is ``0, 1, 2, ...`` because no items interleave. An engine that finds
        rows by the prefix sum of slots alone needs the rows in this order.
    """
    slots = layout.slot_item >= 0
    base = np.cumsum(layout.rows) - layout.rows
    order = layout.slot_row[slots] + base[layout.slot_item[slots]]
    return None if np.all(order[1:] > order[:-1]) else order
