# SPDX-License-Identifier: Apache-2.0
"""How one request is keyed by the installed TensorRT-LLM: exactly, by a salt made from its content, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...contract.convert import FORMS
from ...contract.digest import content_salt
from ...contract.errors import InvalidMetadata, InvalidRequest
from ...contract.metadata import KeyDecision, unique_salt
from ..base import EngineRequest
from .capabilities import REUSE_KEY, Capabilities


@dataclass(frozen=True)
class KeyPolicy:
    """What ``decide`` needs to know of the running engine.

    Attributes:
        caps: what the version understands.
        block_reuse: whether blocks are shared at all.
        chunked_prefill: whether a prompt may be computed in several passes.
        placeholder: leave the media out of the keys (WRONG answers; for demonstration only).
    """

    caps: Capabilities
    block_reuse: bool
    chunked_prefill: bool
    placeholder: bool = False


def decide(request: EngineRequest, policy: KeyPolicy) -> KeyDecision:
    """The keys of ``request``. A request with media is never keyed by its placeholder ids, but for the demonstration.

    Raises:
        InvalidMetadata: media without metadata, or metadata that is not that of the prompt.
        InvalidRequest: the version has no safe way for this request.
    """
    layout, mm = request.layout, request.multimodal_input
    if layout.num_items == 0:
        if mm is not None:
            raise InvalidMetadata("multimodal_input", f"describes {mm.num_items} items, the prompt has none")
        if request.reuse:
            return _checked(KeyDecision("text", None, None, request.cache_salt), policy)
        return _checked(KeyDecision("uncacheable", None, None, unique_salt(), "asked for"), policy)
    if mm is None:
        if request.reuse:
            raise InvalidMetadata("multimodal_input", f"is missing for a prompt with {layout.num_items} media items")
        return _inexact(KeyDecision("uncacheable", None, None, unique_salt(), "no metadata"), policy)
    runs = [layout.runs(item) for item in range(layout.num_items)]
    if [list(item_runs) for item_runs in mm.item_runs] != runs:
        raise InvalidMetadata("multimodal_run_positions", "is not where the prompt has its items")
    if policy.placeholder:
        return _checked(KeyDecision("text", None, None, request.cache_salt), policy)
    fields = FORMS[policy.caps.form](mm, layout)
    salt = request.cache_salt if request.reuse else unique_salt()
    if fields is not None:
        return _checked(KeyDecision("exact", mm, fields, salt, "" if request.reuse else "asked for"), policy)
    reason = f"the form {policy.caps.form!r} of TensorRT-LLM {policy.caps.version} cannot say these runs"
    if not policy.caps.prefix_sum or not request.reuse:
        # Without the prefix sum, a prefill that starts behind cached tokens would take the wrong rows.
        return _inexact(KeyDecision("uncacheable", None, None, unique_salt(), reason), policy)
    digests = [digest.hex() for digest in mm.digests]
    return _inexact(KeyDecision("content", None, None, content_salt(digests, request.cache_salt), reason), policy)


def _inexact(decision: KeyDecision, policy: KeyPolicy) -> KeyDecision:
    if policy.chunked_prefill and not policy.caps.prefix_sum:
        raise InvalidRequest(
            f"{decision.reason}, and this version cannot split such a prompt: set enable_chunked_prefill: false, or "
            "use a newer release"
        )
    return _checked(decision, policy)


def _checked(decision: KeyDecision, policy: KeyPolicy) -> KeyDecision:
    if decision.cache_salt is not None and policy.block_reuse and not policy.caps.cache_salt:
        raise InvalidRequest(
            f"this request must not share KV blocks with others ({decision.reason or 'it has a cache_salt'}), and "
            f"TensorRT-LLM {policy.caps.version} takes no cache_salt: set {REUSE_KEY}: false, or use a newer release"
        )
    return decision


def metadata(decision: KeyDecision, kind: Any) -> Any:
    """The engine's own ``MultimodalInput`` for ``decision``, or None where the keys are not exact.

    Raises:
        InvalidMetadata: the engine's class refuses what passed our rules.
    """
    if decision.engine_fields is None:
        return None
    try:
        return kind(**decision.engine_fields)
    except (TypeError, ValueError, AssertionError) as error:
        raise InvalidMetadata("multimodal_input", f"TensorRT-LLM refuses it: {error}") from error
