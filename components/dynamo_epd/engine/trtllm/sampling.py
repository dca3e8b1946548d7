# SPDX-License-Identifier: Apache-2.0
"""Our sampling options -> TensorRT-LLM's, and its log probabilities back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..base import FinishReason, Logprob, SamplingParams

_FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "cancelled": "cancelled"}

HANDED_OVER = ("length", "not_finished")
"""How a prefill ends that a decode worker goes on from; anything else ended the request at its first token."""


def sampling_options(params: SamplingParams, *, prefill_only: bool = False) -> dict[str, Any]:
    """Keyword arguments of ``tensorrt_llm.SamplingParams``.

    Greedy decoding is asked for as ``top_k=1``, which every version takes so; sampling always names ``top_k`` and
    ``top_p``, because versions differ in what a temperature alone means. The token that stops a request is part of its
    output. Where nothing may stop it, the tokenizer's own end token must not either.
    """
    options: dict[str, Any] = {
        "max_tokens": 1 if prefill_only else params.max_tokens,
        "detokenize": False,
        "add_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    if params.temperature == 0 or params.top_k == 1:
        options["top_k"] = 1
    else:
        options |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
    if params.seed is not None:
        options["seed"] = params.seed & (2**63 - 1)
    if params.min_tokens:
        options["min_tokens"] = params.min_tokens
    if params.logprobs is not None:
        options["logprobs"] = max(1, params.logprobs)
    if params.stop_token_ids:
        end, *more = sorted(params.stop_token_ids)
        options |= {"end_id": end, "pad_id": end}
        if more:
            options["stop_token_ids"] = more
    else:
        options["ignore_eos"] = True
    return options


def finish_reason(reason: str | None) -> FinishReason:
    """Why a finished output ended; what the engine did not say, or says in words of its own, was not by choice."""
    return _FINISH.get(reason or "", "cancelled")


def logprobs(token_ids: Sequence[int], entries: Sequence[Any] | None, count: int | None) -> list[Logprob]:
    """Log probabilities of ``token_ids``.

    Args:
        entries: per token a mapping of id to an object with ``logprob`` (and ``rank``), or the chosen token's number.
        count: alternatives wanted per position, or None for no log probabilities.
    """
    if count is None or entries is None:
        return []
    return [_logprob(token, entry, count) for token, entry in zip(token_ids, entries, strict=False)]


def _logprob(token: int, entry: Any, count: int) -> Logprob:
    if isinstance(entry, (int, float)):
        return Logprob(float(entry))
    values = {int(t): float(getattr(value, "logprob", value)) for t, value in entry.items()}
    best = sorted(values.items(), key=lambda pair: -pair[1])[:count]
    chosen = values.get(token)
    return Logprob(min(values.values()) if chosen is None else chosen, tuple(best))
