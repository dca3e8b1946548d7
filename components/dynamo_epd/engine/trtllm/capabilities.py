# SPDX-License-Identifier: Apache-2.0
"""What the installed TensorRT-LLM understands, found out by trying, and what is done where it does not.

No version string is parsed: what counts is whether a class takes a field and whether a function takes an argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from ...contract.convert import FORMS, Form
from ...contract.errors import ConfigError
from ...contract.layout import PromptLayout
from .names import Names, field_names

IdHelper = Literal["node_process", "machine", "none"]

REUSE_KEY = "kv_cache_config.enable_block_reuse"

_TRIAL_FORMS: tuple[Form, ...] = ("seven", "item_runs", "four")


@dataclass(frozen=True)
class Capabilities:
    """What one installation can do.

    Attributes:
        version: for messages only.
        form: the richest form of ``MultimodalInput`` that the class accepts.
        preprocessed_inputs: prompts, keys and embeddings can be handed over ready-made.
        prefix_sum: embedding rows are found by ``multimodal_embed_mask_cumsum``, also where there is no
            ``MultimodalInput``.
        cache_salt: ``generate_async`` takes one.
        to_handle: tensors can cross to the engine's processes as shared-memory handles.
        disagg_fields: fields of ``DisaggregatedParams``; empty where there is none.
        id_helper: how the helper for request ids that are unique among workers is called.
        kv_events: block events can be read.
        capacity: the engine tells how many KV blocks it has.
        encoder: the stand-alone multimodal encoder is there, with a way to read its handles.
    """

    version: str
    form: Form
    preprocessed_inputs: bool
    prefix_sum: bool
    cache_salt: bool
    to_handle: bool
    disagg_fields: frozenset[str]
    id_helper: IdHelper
    kv_events: bool
    capacity: bool
    encoder: bool


def probe(names: Names) -> Capabilities:
    """Find out what ``names`` can do. Starts no engine and needs no GPU."""
    id_parameters = _parameters(names.get_global_disagg_request_id)
    return Capabilities(
        version=names.version,
        form=_form(names.MultimodalInput),
        preprocessed_inputs={"prompt_token_ids", "multimodal_params"} <= field_names(names.PreprocessedInputs)
        and {"multimodal_input", "multimodal_data"} <= field_names(names.MultimodalParams),
        prefix_sum="embed_mask_cumsum" in field_names(names.MultimodalRuntimeData),
        cache_salt="cache_salt" in _parameters(getattr(names.LLM, "generate_async", None)),
        to_handle=callable(getattr(names.MultimodalParams, "to_handle", None)),
        disagg_fields=field_names(names.DisaggregatedParams),
        id_helper="node_process" if "process_id" in id_parameters else "machine" if id_parameters else "none",
        kv_events=callable(getattr(names.LLM, "get_kv_cache_events_async", None)),
        capacity=callable(getattr(names.LLM, "get_kv_cache_capacity", None)),
        encoder=names.MultimodalEncoder is not None and names.SharedTensorContainer is not None,
    )


def refusal(caps: Capabilities, *, block_reuse: bool) -> str | None:
    """Why no worker may start with this installation, or None where there is a safe way."""
    if not caps.preprocessed_inputs:
        return (
            f"TensorRT-LLM {caps.version} has no PreprocessedInputs with multimodal parameters: embeddings that were "
            "made elsewhere cannot be handed to it. Use a newer release"
        )
    if block_reuse and caps.form == "none" and not caps.cache_salt:
        return (
            f"{REUSE_KEY} is on, but TensorRT-LLM {caps.version} takes neither a MultimodalInput nor a cache_salt: "
            "every image would have the same block keys and one request could be answered from another's image. "
            f"Set {REUSE_KEY}: false, or use a newer release"
        )
    return None


def check(caps: Capabilities, *, block_reuse: bool) -> None:
    """Raise ``ConfigError`` with ``refusal``'s reason, if there is one."""
    reason = refusal(caps, block_reuse=block_reuse)
    if reason:
        raise ConfigError(reason)


class Row(NamedTuple):
    """One capability: how to see whether it is there, and what is done with it or without it."""

    name: str
    have: Callable[[Capabilities], bool]
    then: str
    otherwise: str
    essential: bool = False


TABLE: tuple[Row, ...] = (
    Row(
        "PreprocessedInputs",
        lambda c: c.preprocessed_inputs,
        "prompt, keys and embeddings are handed over ready-made",
        "workers do not start: embeddings cannot be handed over",
        essential=True,
    ),
    Row(
        "exact runs in MultimodalInput",
        lambda c: c.form in ("seven", "item_runs"),
        "blocks are keyed by each item's content and exact runs",
        "items of one run are keyed exactly; others by a salt made from the content",
    ),
    Row(
        "MultimodalInput",
        lambda c: c.form != "none",
        "blocks are keyed by each item's content",
        "requests with media share blocks by a salt made from the content",
    ),
    Row(
        "embedding rows by prefix sum",
        lambda c: c.prefix_sum,
        "prefill may start anywhere in an item",
        "items whose runs cannot be said share nothing, and are refused where chunked prefill is on",
    ),
    Row(
        "cache_salt",
        lambda c: c.cache_salt,
        "callers are kept apart, and inexact keys made safe, by it",
        "requests that need a salt are refused while block reuse is on",
    ),
    Row(
        "to_handle",
        lambda c: c.to_handle,
        "embeddings reach the engine's processes as handles",
        "embeddings are pickled to the engine's processes",
    ),
    Row(
        "DisaggregatedParams",
        lambda c: bool(c.disagg_fields),
        "prefill hands over to decode",
        "only agg workers can be served",
    ),
    Row(
        "request ids for prefill and decode",
        lambda c: c.id_helper != "none" and "disagg_request_id" in c.disagg_fields,
        "made by TensorRT-LLM's own helper, unique among workers",
        "the prefill engine numbers its requests itself",
    ),
    Row(
        "block events",
        lambda c: c.kv_events,
        "KV-aware routing sees this worker's blocks",
        "KV-aware routing does not see this worker's blocks",
    ),
    Row(
        "KV capacity",
        lambda c: c.capacity,
        "block size and number are read from the engine",
        "block size and number are taken from the engine YAML",
    ),
    Row(
        "MultimodalEncoder",
        lambda c: c.encoder,
        "--encoder trtllm can be used",
        "--encoder hf only",
    ),
)
"""Capability -> what we do. ``dynamo-epd doctor`` prints it."""


def _form(kind: Any) -> Form:
    """The richest form that ``kind`` accepts, tried with an item of two runs (one run for the four fields)."""
    if kind is None:
        return "none"
    for form in _TRIAL_FORMS:
        item = np.array([-1, 0, 0, -1 if form != "four" else 0, 0, -1])
        layout = PromptLayout.from_flat(np.arange(6), item, np.zeros(6, bool), 1)
        mm = layout.multimodal_input(["00" * 32])
        fields = None if mm is None else FORMS[form](mm, layout)
        if fields is None:
            continue
        try:
            made = kind(**fields)
        except (TypeError, ValueError, AssertionError):
            continue
        if all(hasattr(made, name) for name in fields):
            return form
    return "none"


def _parameters(function: Any) -> frozenset[str]:
    if not callable(function):
        return frozenset()
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()
