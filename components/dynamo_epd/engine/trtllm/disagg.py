# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's ``DisaggregatedParams`` as the JSON object that travels from prefill to decode, and back.

Only what decode needs travels: plain values, the opaque state as base64, the first token's log probabilities as lists.
Handles of shared memory mean nothing in another process tree and stay behind.
"""

from __future__ import annotations

import base64
import binascii
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...contract.errors import Unavailable
from ..base import EngineOutput, Logprob
from .capabilities import Capabilities
from .names import Names

logger = logging.getLogger(__name__)

PARAMS_VERSION = 1
ENGINE = "trtllm"
"""What tells these params from the reference engine's."""

_WORKER_SLOTS = 1021
"""TensorRT-LLM's ids have ten bits for the machine; a prime below 2**10 spreads what is taken modulo it."""
_PROCESS_BITS = 6

_SCALARS = (bool, int, float, str)
_POSITIONS = ("mrope_position_ids_handle", "mrope_position_deltas_handle")


class PrefillParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``disaggregated_params`` of the TensorRT-LLM engine.

    Attributes:
        version: ``PARAMS_VERSION``.
        engine: ``ENGINE``.
        num_tokens: prompt tokens that prefill computed or took from its cache.
        cached_tokens: those that it took from its cache.
        fields: the plain fields of ``DisaggregatedParams``.
        opaque_state: its ``opaque_state``, base64.
        first_gen_log_probs: its ``first_gen_log_probs`` in the same nesting; ``{"id": [logprob, rank]}`` innermost.
        finished: set where the first token ended the request: decode gives it back without asking its engine.
        first_token, first_logprob, first_top_logprobs: that token, only where ``finished`` is set.
    """

    version: int
    engine: str
    num_tokens: int
    cached_tokens: int = 0
    fields: dict[str, bool | int | float | str | list[int | str] | None] = {}
    opaque_state: str | None = None
    first_gen_log_probs: list[Any] | None = None
    finished: str | None = None
    first_token: int | None = None
    first_logprob: float | None = None
    first_top_logprobs: tuple[tuple[int, float], ...] = ()


def request_id_maker(names: Names, caps: Capabilities) -> Callable[[], int | None]:
    """A function that makes ids that are unique among all workers, or gives None where the version makes its own."""
    helper = names.get_global_disagg_request_id
    if caps.id_helper == "none" or "disagg_request_id" not in caps.disagg_fields:
        return lambda: None
    slot = secrets.randbelow(_WORKER_SLOTS)
    if caps.id_helper == "node_process":
        node, process = divmod(slot, 1 << _PROCESS_BITS)
        return lambda: int(helper(node, process))
    return lambda: int(helper(slot))


def context_params(names: Names, caps: Capabilities, request_id: int | None) -> Any:
    """``DisaggregatedParams`` of a prefill request."""
    fields: dict[str, Any] = {"request_type": "context_only"}
    if request_id is not None:
        fields["disagg_request_id"] = request_id
    return _made(names, caps, fields)


def encode(params: Any, caps: Capabilities, *, num_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """What prefill's engine returned, as a JSON object.

    Raises:
        Unavailable: the engine returned nothing to go on from.
    """
    if params is None:
        raise Unavailable("prefill's engine returned no disaggregated params: is cache_transceiver_config set?")
    plain: dict[str, Any] = {}
    for name in sorted(caps.disagg_fields - {"request_type", "opaque_state", "first_gen_log_probs"}):
        value = getattr(params, name, None)
        if isinstance(value, _SCALARS):
            plain[name] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(v, (int, str)) for v in value):
            plain[name] = list(value)
    state = getattr(params, "opaque_state", None)
    return msgspec.to_builtins(
        PrefillParams(
            version=PARAMS_VERSION,
            engine=ENGINE,
            num_tokens=num_tokens,
            cached_tokens=cached_tokens,
            fields=plain,
            opaque_state=None if state is None else base64.b64encode(bytes(state)).decode("ascii"),
            first_gen_log_probs=_to_json(getattr(params, "first_gen_log_probs", None)),
        )
    )


def take_positions(params: Any, names: Names) -> None:
    """Open the M-RoPE positions that prefill's engine shares with every answer, and let go of them.

    Decode gets its positions from the prompt, in another process tree, where these handles mean nothing. But the engine
    keeps the (device) memory behind a handle until somebody has opened it.
    """
    for name in _POSITIONS:
        handle = getattr(params, name, None)
        if handle is None or names.SharedTensorContainer is None:
            continue
        try:
            names.SharedTensorContainer.from_dict(handle).get_local_view()
        except Exception as error:
            logger.warning("prefill's engine keeps the memory of a %s, which cannot be opened: %r", name, error)


def encode_finished(output: EngineOutput, *, num_tokens: int) -> dict[str, Any]:
    """A request that its first token ended, as the JSON object that decode answers from."""
    logprob = output.logprobs[0] if output.logprobs else None
    return msgspec.to_builtins(
        PrefillParams(
            version=PARAMS_VERSION,
            engine=ENGINE,
            num_tokens=num_tokens,
            cached_tokens=output.cached_tokens,
            finished=output.finish_reason,
            first_token=output.token_ids[0],
            first_logprob=logprob.chosen if logprob else None,
            first_top_logprobs=logprob.top if logprob else (),
        )
    )


def parse(obj: object, *, num_tokens: int) -> PrefillParams:
    """What decode received.

    Raises:
        Unavailable: it is not of this version, is malformed, or belongs to a prompt of another length.
    """
    said = (obj.get("engine"), obj.get("version")) if isinstance(obj, Mapping) else None
    if said != (ENGINE, PARAMS_VERSION):
        raise Unavailable(
            f"disaggregated_params are of engine and version {said}, this worker understands "
            f"{(ENGINE, PARAMS_VERSION)}: run the same dynamo-epd release and engine on prefill and decode"
        )
    try:
        params = msgspec.convert(obj, PrefillParams)
    except msgspec.ValidationError as error:
        raise Unavailable(f"disaggregated_params are malformed: {error}") from error
    if params.num_tokens != num_tokens:
        raise Unavailable(f"prefill computed {params.num_tokens} tokens, the prompt has {num_tokens}")
    return params


def finished_output(params: PrefillParams) -> EngineOutput:
    """The whole answer to a request that ended in prefill."""
    if params.first_token is None:
        raise Unavailable("prefill says that the request ended, but not with which token")
    logprob = [] if params.first_logprob is None else [Logprob(params.first_logprob, params.first_top_logprobs)]
    reason = "length" if params.finished == "length" else "stop"
    return EngineOutput([params.first_token], reason, logprob, params.cached_tokens)  # type: ignore[arg-type]


def generation_params(params: PrefillParams, names: Names, caps: Capabilities) -> Any:
    """``DisaggregatedParams`` of a decode request.

    Raises:
        Unavailable: this worker's version cannot take what prefill's version gave.
    """
    unknown = params.fields.keys() - caps.disagg_fields
    if unknown:
        raise Unavailable(
            f"prefill's TensorRT-LLM gave {', '.join(sorted(unknown))}, which {caps.version} here does not know: run "
            "the same TensorRT-LLM on prefill and decode"
        )
    fields: dict[str, Any] = {**params.fields, "request_type": "generation_only"}
    if params.opaque_state is not None:
        try:
            fields["opaque_state"] = base64.b64decode(params.opaque_state, validate=True)
        except binascii.Error as error:
            raise Unavailable(f"disaggregated_params.opaque_state is not base64: {error}") from error
    if params.first_gen_log_probs is not None and names.Logprob is not None:
        try:
            fields["first_gen_log_probs"] = _from_json(params.first_gen_log_probs, names.Logprob)
        except (TypeError, ValueError) as error:
            raise Unavailable(f"disaggregated_params.first_gen_log_probs is malformed: {error}") from error
    return _made(names, caps, fields)


def _made(names: Names, caps: Capabilities, fields: dict[str, Any]) -> Any:
    if names.DisaggregatedParams is None:
        raise Unavailable(f"TensorRT-LLM {caps.version} has no DisaggregatedParams: run agg workers")
    try:
        return names.DisaggregatedParams(**fields)
    except (TypeError, ValueError, AssertionError) as error:
        raise Unavailable(f"TensorRT-LLM refuses the disaggregated params: {error}") from error


def _to_json(value: Any) -> Any:
    """Nested lists of ``{id: Logprob}`` with the mappings as ``{"id": [logprob, rank]}``."""
    if isinstance(value, Mapping):
        return {str(token): [float(entry.logprob), getattr(entry, "rank", None)] for token, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(entry) for entry in value]
    return value


def _from_json(value: Any, kind: Any) -> Any:
    if isinstance(value, Mapping):
        return {int(token): kind(logprob=number, rank=rank) for token, (number, rank) in value.items()}
    if isinstance(value, list):
        return [_from_json(entry, kind) for entry in value]
    return value
