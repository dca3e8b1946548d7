# SPDX-License-Identifier: Apache-2.0
"""What the engine is told, checked as TensorRT-LLM checks it, as a request of the reference engine."""

from __future__ import annotations

import contextvars
import os
import secrets
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.contract.multimodal_input import MultimodalInput, digest_to_words, words_to_digest
from dynamo_epd.engine.base import EngineOutput, EngineRequest, Logprob, RemoteKV, SamplingParams

from ._rules import PREFIX_SUM, VARIANT, refuse
from ._torch.shared_tensor import SharedTensorContainer
from .executor.result import Logprob as EngineLogprob
from .llmapi.disagg_params import DisaggregatedParams

PLACEHOLDER_KEYS: contextvars.ContextVar[bool] = contextvars.ContextVar("placeholder_keys", default=False)
"""Whether the request of this task is keyed by its plain ids."""


@dataclass(frozen=True)
class Made:
    """A request of the reference engine, with the ids as they were sent."""

    request: EngineRequest
    sent_ids: np.ndarray
    placeholder_keys: bool


def switchable(engine: type) -> type:
    """``engine`` with keys by placeholder for the requests that say so."""

    class Switchable(engine):  # type: ignore[misc, valid-type]
        @property
        def _limits(self) -> Any:
            return replace(self._own_limits, plain_keys=True) if PLACEHOLDER_KEYS.get() else self._own_limits

        @_limits.setter
        def _limits(self, limits: Any) -> None:
            self._own_limits = limits

    return Switchable


def engine_request(
    request_id: str,
    inputs: Any,
    sampling: Any,
    disagg: Any,
    salt: str | None,
    *,
    vocab_size: int,
    processor: Any,
    mrope: bool,
    needs_prefix_sum: bool,
) -> Made:
    params = inputs.multimodal_params
    data = dict(params.multimodal_data or {}) if params is not None else {}
    mm = params.multimodal_input if params is not None else None
    sent = np.array(inputs.prompt_token_ids, np.int64)
    generation = disagg is not None and disagg.request_type == "generation_only"
    slots = _media_mask(sent, processor, vocab_size)
    embeddings = data.get("multimodal_embedding") or []
    joined = torch.cat(embeddings) if embeddings else torch.empty(0, 0)
    if embeddings and not generation:
        _check_rows(data, slots, joined, needs_prefix_sum, mm)
    ids = sent.copy()
    ids[sent >= vocab_size] = processor._ids[0] if processor._ids else 0
    exact = None if mm is None else _exact(mm)
    layout = _layout(ids, slots if embeddings or exact is not None else np.zeros_like(slots), exact, data, generation)
    if layout.num_items and exact is None:
        exact = layout.multimodal_input(["00" * 32] * layout.num_items)
    position_ids, delta = _positions(data, len(ids), mrope)
    prefill = disagg is not None and disagg.request_type == "context_only"
    request = EngineRequest(
        request_id=request_id,
        layout=layout,
        sampling=_sampling(sampling, prefill),
        multimodal_input=exact,
        embeddings=[] if generation else _per_item(layout, joined),
        position_ids=position_ids,
        position_delta=delta,
        cache_salt=salt,
        routing_token_ids=ids,
        prefill_only=prefill,
        remote_kv=_remote(disagg, len(ids), sampling) if generation else None,
    )
    return Made(request, sent, placeholder_keys=mm is None)


def _media_mask(ids: np.ndarray, processor: Any, vocab_size: int) -> np.ndarray:
    """``media-ids``"""
    if VARIANT == "four":
        return ids >= vocab_size
    return np.isin(ids, processor.get_mm_token_ids().numpy())


def _check_rows(data: dict[str, Any], slots: np.ndarray, joined: torch.Tensor, needed: bool, mm: Any) -> None:
    cumsum = data.get("multimodal_embed_mask_cumsum")
    if PREFIX_SUM:
        if cumsum is None and needed:
            refuse("cumsum", "chunked prefill or KV cache reuse needs multimodal_embed_mask_cumsum")
        if cumsum is not None:
            if cumsum.device.type != "cpu" or cumsum.dtype != torch.int64 or len(cumsum) != len(slots):
                refuse(
                    "cumsum-form", "embed_mask_cumsum must be int64, on the CPU, as long as the prompt", AssertionError
                )
            if not np.array_equal(np.cumsum(slots), cumsum.numpy()):
                refuse("row-count", "Multimodal token count mismatch: the prefix sum is not that of the media tokens")
    if int(slots.sum()) != len(joined):
        refuse("row-count", f"Multimodal token count mismatch: {int(slots.sum())} media tokens, {len(joined)} rows")


def _exact(mm: Any) -> MultimodalInput:
    runs = mm.runs()
    return MultimodalInput(
        multimodal_hashes=tuple(tuple(words) for words in mm.multimodal_hashes),
        multimodal_positions=tuple(r[0][0] for r in runs),
        multimodal_lengths=tuple(sum(length for _, length in r) for r in runs),
        multimodal_uuids=None if mm.multimodal_uuids is None else tuple(mm.multimodal_uuids),
        multimodal_item_run_cu_offsets=tuple(np.cumsum([0, *map(len, runs)]).tolist()),
        multimodal_run_positions=tuple(start for r in runs for start, _ in r),
        multimodal_run_lengths=tuple(length for r in runs for _, length in r),
    )


def _layout(
    ids: np.ndarray, slots: np.ndarray, exact: MultimodalInput | None, data: dict[str, Any], generation: bool
) -> PromptLayout:
    member = np.full(len(ids), -1, np.int64)
    if exact is not None:
        for i, runs in enumerate(exact.item_runs):
            for start, length in runs:
                member[start : start + length] = i
        if (slots & (member < 0)).any():
            refuse("row-count", "Multimodal token count mismatch: a media token belongs to no item")
        return PromptLayout.from_flat(ids, member, (member >= 0) & ~slots, exact.num_items)
    if generation or not slots.any():
        return PromptLayout.text(ids)
    lengths = data["multimodal_embedding_lengths"]
    member[slots] = np.repeat(np.arange(len(lengths)), lengths)
    return PromptLayout.from_flat(ids, member, np.zeros(len(ids), bool), len(lengths))


def _per_item(layout: PromptLayout, joined: torch.Tensor) -> list[torch.Tensor]:
    """The engine gives the k-th media token the k-th row; here they are sorted into items for the reference engine."""
    owner = layout.slot_item[layout.slot_item >= 0]
    return [joined[torch.from_numpy(np.flatnonzero(owner == i))] for i in range(layout.num_items)]


def _positions(data: dict[str, Any], n: int, mrope: bool) -> tuple[np.ndarray | None, int]:
    config = data.get("mrope_config")
    if not mrope:
        return None, 0
    if config is None:
        refuse("mrope", "this model needs mrope_config, of text-only prompts as well")
    ids, deltas = config.get("mrope_position_ids"), config.get("mrope_position_deltas")
    if ids is None or deltas is None:
        refuse("mrope", "mrope_position_ids and mrope_position_deltas must both be given")
    if ids.device.type != "cpu" or tuple(ids.shape) != (3, 1, n) or tuple(deltas.shape) != (1, 1):
        refuse("mrope", f"mrope shapes are {tuple(ids.shape)} and {tuple(deltas.shape)}")
    return ids[:, 0].numpy(), int(deltas[0, 0])


def _sampling(params: Any, prefill: bool) -> SamplingParams:
    greedy = params.top_k == 1 or (params.top_k is None and params.top_p is None and params.temperature is None)
    stops = set(params.stop_token_ids or ())
    if params.end_id is not None:
        stops.add(params.end_id)
    return SamplingParams(
        temperature=0.0 if greedy else (params.temperature if params.temperature is not None else 1.0),
        top_p=1.0 if greedy or params.top_p is None else params.top_p,
        top_k=0 if greedy or params.top_k is None else params.top_k,
        seed=params.seed,
        max_tokens=1 if prefill else params.max_tokens or 32,
        min_tokens=params.min_tokens or 0,
        stop_token_ids=frozenset() if params.ignore_eos else frozenset(stops),
        logprobs=params.logprobs,
    )


def handed_over(last: EngineOutput, made: Made, request_id: int, disagg: Any) -> Any:
    """``DisaggregatedParams`` of a finished context request; its KV waits in a file."""
    if last.kv is None:
        return None
    try:
        if last.finish_reason == "stop":
            return None
        tensor = torch.empty(last.kv.shape, dtype=last.kv.dtype)
        last.kv.copy_to(tensor)
    finally:
        last.kv.release()
    folder = Path(os.environ.get("DYNAMO_EPD_STANDIN_KV", tempfile.gettempdir()))
    path = folder / f"standin-kv-{secrets.token_hex(8)}.pt"
    torch.save({"kv": tensor, "tokens": len(made.request.layout)}, path)
    fields: dict[str, Any] = {
        "request_type": "context_only",
        "first_gen_tokens": list(last.token_ids),
        "ctx_request_id": request_id,
        "opaque_state": b"\x00\xff" + str(path).encode(),
    }
    if VARIANT != "four":
        fields["disagg_request_id"] = disagg.disagg_request_id
        fields["ctx_info_endpoint"] = ["tcp://127.0.0.1:1"]
        if last.logprobs:
            entry = last.logprobs[0]
            fields["first_gen_log_probs"] = [
                {t: EngineLogprob(v, i + 1) for i, (t, v) in enumerate(entry.top)}
                | {last.token_ids[0]: EngineLogprob(entry.chosen, None)}
            ]
        if made.request.position_ids is not None:
            # "shared-positions"
            fields["mrope_position_ids_handle"] = _shared(torch.from_numpy(made.request.position_ids.copy()))
            fields["mrope_position_deltas_handle"] = _shared(torch.tensor([[made.request.position_delta]]))
    return DisaggregatedParams(**fields)


def _shared(tensor: torch.Tensor) -> dict[str, Any]:
    return SharedTensorContainer.from_tensor(tensor).dump_to_dict()


def _remote(disagg: Any, n: int, sampling: Any) -> RemoteKV:
    state = disagg.opaque_state
    if not isinstance(state, bytes) or not state.startswith(b"\x00\xff") or not disagg.first_gen_tokens:
        refuse("generation-state", "generation_only needs what context_only returned")
    path = Path(state[2:].decode())
    kept = torch.load(path)
    path.unlink()
    if kept["tokens"] != n:
        refuse("generation-state", f"the prompt has {n} tokens, its KV {kept['tokens']}")

    async def fetch(first_block: int) -> torch.Tensor:
        return kept["kv"][first_block:]

    first = int(disagg.first_gen_tokens[0])
    logprob = None
    entries = getattr(disagg, "first_gen_log_probs", None)
    if entries and sampling.logprobs is not None:
        values = {int(t): float(entry.logprob) for t, entry in entries[0].items()}
        logprob = Logprob(values[first], tuple(sorted(values.items(), key=lambda pair: -pair[1])[: sampling.logprobs]))
    return RemoteKV(n, int(kept["kv"].shape[4]), first, fetch, logprob)


__all__ = ["Made", "digest_to_words", "engine_request", "handed_over", "switchable", "words_to_digest"]
