# SPDX-License-Identifier: Apache-2.0
"""Which variant of TensorRT-LLM this stand-in is, and where each of its rules comes from.

It is for tests only. It has the public names that dynamo-epd touches, refuses what the real package refuses, and
answers by running dynamo-epd's reference engine.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

VARIANT = os.environ.get("DYNAMO_EPD_STANDIN", "seven")
"""``seven``: ``MultimodalInput`` with run fields. ``item_runs``: with ``multimodal_item_runs`` instead. ``four``: an
older release, with neither run fields nor a prefix sum of embedding rows, and media ids behind the vocabulary."""

if VARIANT not in ("four", "seven", "item_runs"):
    raise ImportError(f"DYNAMO_EPD_STANDIN={VARIANT!r} is not four, seven or item_runs")

PREFIX_SUM = VARIANT != "four"
"""Whether rows are found by ``multimodal_embed_mask_cumsum``."""

EVENTS_BY_RPC = VARIANT == "seven"
"""Whether block events are asked for in the engine's process, as in newer releases, or wait in a queue in this one."""

RULES: dict[str, str] = {
    "plain-lists": "inputs/multimodal.py, _validate_int_list: boundary metadata must be list[int], no tensor or tuple",
    "hashes-lists": "inputs/multimodal.py, MultimodalInput.__post_init__: hashes are a list of lists of one length",
    "hashes-empty": "the same: min() of no hashes raises, so text-only means None",
    "counts": "inputs/multimodal.py, _validate_multimodal_positions_and_lengths: one position and length per hash, "
    "positions >= 0, lengths > 0",
    "uuids": "inputs/multimodal.py, MultimodalInput.__post_init__: None, or per hash a str or None",
    "runs-together": "inputs/multimodal.py, _validate_multimodal_runs: all three run fields or none",
    "runs": "the same: offsets from 0, not decreasing, to the number of runs; lengths sum; runs ordered; int32",
    "item-runs": "the item-run line's prepare_multimodal_item_runs: (start, length, offsets), ordered, in the run, "
    "globally without overlap",
    "video-data": "inputs/multimodal_data.py, VideoData: one frame or more, and a dict of metadata; input processors "
    "read video.frames",
    "to-handle": "inputs/multimodal.py, MultimodalParams.to_handle: only 'multimodal_data'",
    "preprocessed": "llmapi/llm.py, BaseLLM.generate_async: PreprocessedInputs skips preprocessing; ids are list[int]",
    "llm-args": "llmapi/llm.py, BaseLLM.__init__: an argument that LlmArgs lacks is a ValueError",
    "max-tokens": "llmapi/llm.py, generate_async: a context-only request generates one token",
    "max-num-tokens": "llmapi/llm.py, _check_arguments: a longer prompt is a RequestError where prefill is not chunked",
    "events-queue": "executor/executor.py, aget_kv_events: asserts before the first request; llmapi/utils.py, "
    "AsyncQueue.get: QueueEmpty where it may not wait; _SyncQueue.get: None at the end, which is no JSON",
    "events-rpc": "executor/proxy.py, aget_kv_events and get_kv_events: a synchronous call to the worker's process",
    "shared-positions": "pyexecutor's input preparation: set_mrope_position of every context-only request that has "
    "both M-RoPE fields; shared_tensor.py: memory that was shared is kept until somebody has opened it",
    "max-seq-len": "executor/base_worker.py, _deduce_max_tokens: no room behind the prompt is an error",
    "transceiver": "executor/base_worker.py, _enqueue_request: disaggregated requests need cache_transceiver_config",
    "request-type": "disaggregated_params.py, DisaggregatedParams.__post_init__: one of three request types",
    "one-random-hash": "disaggregated_params.py: embedding handles without hashes get one random hash for all items",
    "generation-state": "disaggregated_params.py, get_context_phase_params: generation needs what context returned",
    "cumsum": "inputs/multimodal.py, check_mm_embed_cumsum_if_needed: reuse and chunked prefill need the prefix sum",
    "cumsum-form": "inputs/multimodal.py, MultimodalRuntimeData.__post_init__: on the CPU, as long as the prompt",
    "row-count": "modeling_multimodal_utils.py, fuse_input_embeds: as many rows as media tokens, else 'Multimodal "
    "token count mismatch'",
    "media-ids": "modeling_multimodal_utils.py, filter_mm_token_from_input_ids: ids of get_mm_token_ids, or from the "
    "vocabulary's size on",
    "mrope": "pyexecutor/model_engine.py: M-RoPE models read mrope_config of every request, ids and deltas together",
    "placeholder-keys": "kv_cache_manager_v2, _augment_tokens_for_block_reuse: without hashes plain ids are the key",
    "priority": "executor/request.py, GenerationRequest: priority in [0, 1]",
}
"""Rule -> the public source (mid-2026 main, unless it says otherwise) that it was read off."""


def refuse(rule: str, message: str, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise what the real package raises for a broken ``rule``."""
    if rule not in RULES:
        raise KeyError(rule)
    raise kind(f"[{rule}] {message}")


def int_list(rule: str, name: str, values: Any) -> None:
    if not isinstance(values, list):
        refuse(rule, f"{name} must be a list", TypeError)
    if not all(isinstance(value, int) for value in values):
        refuse(rule, f"{name} must contain only integers", TypeError)
