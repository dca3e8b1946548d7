# SPDX-License-Identifier: Apache-2.0
"""The frontend's sampling, stop and output options -> ``SamplingParams``. What is not honoured is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..contract.errors import InvalidRequest
from ..engine.base import Logprob, SamplingParams

# option -> the value that means "not used"; any other value is a request for something that no engine here does.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "guided_decoding": (),
}
_UNSUPPORTED_STOP: dict[str, tuple[Any, ...]] = {"max_thinking_tokens": ()}
_UNSUPPORTED_OUTPUT: dict[str, tuple[Any, ...]] = {"prompt_logprobs": ()}

MAX_TOP_LOGPROBS = 20


def parse_sampling(request: Mapping[str, Any], *, room: int, first_token_only: bool = False) -> SamplingParams:
    """Sampling parameters of a frontend request.

    Without a temperature, decoding is greedy (as TensorRT-LLM does when no sampling option is set).

    Args:
        room: tokens that fit behind the prompt; the default and the upper bound of ``max_tokens``.
        first_token_only: for a prefill worker, to which the frontend sends ``max_tokens=1`` in place of the caller's:
            whether ``min_tokens`` fits is for decode to say.

    Raises:
        InvalidRequest: an option that is out of range or not supported.
    """
    sampling = request.get("sampling_options") or {}
    stop = request.get("stop_conditions") or {}
    output = request.get("output_options") or {}
    for options, unsupported in ((sampling, _UNSUPPORTED), (stop, _UNSUPPORTED_STOP), (output, _UNSUPPORTED_OUTPUT)):
        for name, neutral in unsupported.items():
            value = options.get(name)
            if value is not None and value not in neutral:
                raise InvalidRequest(f"{name}={value!r} is not supported; leave it out")

    temperature = _number(sampling, "temperature", 0.0, low=0.0)
    top_p = _number(sampling, "top_p", 1.0, low=0.0, high=1.0)
    top_k = _integer(sampling, "top_k", 0, low=-1)
    if top_p == 0.0:
        raise InvalidRequest("top_p=0.0 keeps no token; use temperature=0 for greedy decoding")
    max_tokens = _integer(stop, "max_tokens", room, low=1)
    min_tokens = _integer(stop, "min_tokens", 0, low=0)
    if first_token_only:
        min_tokens = min(min_tokens, max_tokens)
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens={min_tokens} is more than max_tokens={max_tokens}")
    ends = {int(t) for name in ("stop_token_ids", "stop_token_ids_visible") for t in stop.get(name) or ()}
    if not stop.get("ignore_eos"):
        ends |= {int(t) for t in stop.get("stop_token_ids_hidden") or ()}
        ends |= {int(t) for t in request.get("eos_token_ids") or ()}
    logprobs = output.get("logprobs")
    if logprobs is not None and not 0 <= int(logprobs) <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"logprobs={logprobs!r} must be between 0 and {MAX_TOP_LOGPROBS}")
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        seed=None if sampling.get("seed") is None else int(sampling["seed"]),
        max_tokens=min(max_tokens, max(room, 1)),
        min_tokens=min_tokens,
        stop_token_ids=frozenset(ends),
        logprobs=None if logprobs is None else int(logprobs),
    )


def logprob_fields(token_ids: list[int], logprobs: list[Logprob], tokens: list[str]) -> dict[str, Any]:
    """``log_probs`` and ``top_logprobs`` of a chunk, in the SDK's form; ``tokens`` are the decoded ``token_ids``."""
    fields: dict[str, Any] = {"log_probs": [lp.chosen for lp in logprobs]}
    if any(lp.top for lp in logprobs):
        fields["top_logprobs"] = [
            [
                {"rank": rank, "token_id": t, "token": tokens[i] if t == token_ids[i] else None, "logprob": value}
                for rank, (t, value) in enumerate(lp.top, start=1)
            ]
            for i, lp in enumerate(logprobs)
        ]
    return fields


def _number(options: Mapping[str, Any], name: str, default: float, *, low: float, high: float | None = None) -> float:
    value = options.get(name)
    if value is None:
        return default
    value = float(value)
    if not low <= value <= (high if high is not None else float("inf")):
        raise InvalidRequest(f"{name}={value:g} must be at least {low:g}" + (f" and at most {high:g}" if high else ""))
    return value


def _integer(options: Mapping[str, Any], name: str, default: int, *, low: int) -> int:
    value = options.get(name)
    if value is None:
        return default
    if int(value) < low:
        raise InvalidRequest(f"{name}={value} must be at least {low}")
    return int(value)
