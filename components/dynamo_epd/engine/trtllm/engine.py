# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM behind the ``Engine`` protocol: embeddings and exact keys in, tokens and block events out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...contract.errors import ConfigError, InvalidMetadata, InvalidRequest, Unavailable
from ..base import BlocksRemoved, BlocksStored, EngineInfo, EngineOutput, EngineRequest, KVEventListener
from ..threads import to_its_end
from . import disagg
from .capabilities import Capabilities, check, probe
from .engine_args import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_NUM_TOKENS, EngineArgs, load, problems
from .events import UNKNOWN, EventTranslator, KnownPrompt
from .inputs import MediaTokens, drop_handles, generation_inputs, preprocessed_inputs
from .keys import KeyDecision, KeyPolicy, decide
from .names import Names, load_names
from .reading import new_events
from .sampling import HANDED_OVER, finish_reason, logprobs, sampling_options

logger = logging.getLogger(__name__)

_POLL_FIRST = 0.01
_POLL_LAST = 0.1
"""Seconds between two looks for block events: short after some were there, longer while there are none."""

ABORT_PATIENCE = 30.0
"""Seconds that an aborted decode request waits for its KV to have arrived before its engine is told."""


def create(
    *,
    model_dir: Path | str,
    config_file: Path | str | None = None,
    overrides: str | None = None,
    keys: str = "exact",
    device: str = "auto",
    dtype: str = "auto",
    kv_events: bool = True,
) -> TrtllmEngine:
    """A TensorRT-LLM engine for a Hugging Face checkpoint, not started yet.

    Args:
        config_file: engine YAML.
        overrides: JSON object that overrides it.
        keys: ``placeholder`` sends media without their metadata, which TensorRT-LLM then keys by placeholder tokens. It
            gives WRONG ANSWERS and exists to show them.
        kv_events: have the engine keep block events for ``listen``.

    Raises:
        ConfigError: TensorRT-LLM cannot be used, or not safely with this configuration.
    """
    if keys not in ("exact", "placeholder"):
        raise ConfigError(f"keys is {keys!r}, must be exact or placeholder")
    if device == "cpu":
        raise ConfigError("TensorRT-LLM runs on GPUs: leave out --device cpu, or choose --engine reference")
    args = load(config_file, overrides)
    for problem in problems(args.values):
        logger.warning("engine configuration: %s", problem)
    names = load_names()
    caps = probe(names)
    check(caps, block_reuse=args.block_reuse)
    if keys == "placeholder":
        logger.warning(
            "KV BLOCKS ARE KEYED BY PLACEHOLDER TOKENS: requests with different media share blocks and are answered "
            "from each other's media. This is for demonstration only; use --keys exact."
        )
    policy = KeyPolicy(caps, args.block_reuse, args.chunked_prefill, placeholder=keys == "placeholder")
    return TrtllmEngine(Path(model_dir), args, names, policy, dtype=dtype, kv_events=kv_events)


class TrtllmEngine:
    """See ``engine.base.Engine`` for the methods."""

    def __init__(
        self, model_dir: Path, args: EngineArgs, names: Names, policy: KeyPolicy, *, dtype: str, kv_events: bool
    ):
        self._model_dir, self._args, self._names, self._caps = model_dir, args, names, policy.caps
        if args.in_process:
            # A process cannot open the handles of its own device memory, and here it need not.
            self._caps = replace(self._caps, to_handle=False)
        self._policy, self._dtype = policy, dtype
        self._kv_events = kv_events and args.block_reuse and self._caps.kv_events and not policy.placeholder
        self._llm: Any = None
        self._info: EngineInfo | None = None
        self._fatal: str | None = None
        self._listeners: list[KVEventListener] = []
        self._events: EventTranslator | None = None
        self._poller: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def capabilities(self) -> Capabilities:
        return self._caps

    async def start(self) -> EngineInfo:
        options = self._args.llm_options(self._model_dir, self._dtype, events=self._kv_events)
        try:
            # On this thread: MPI and CUDA are initialised in it, as in all of TensorRT-LLM's own servers.
            self._llm = self._names.LLM(**options)
        except Exception as error:
            raise ConfigError(f"TensorRT-LLM {self._caps.version} does not start: {error}") from error
        args, values = getattr(self._llm, "args", None), self._args.values
        text = _text_config(self._model_dir, bool(values.get("trust_remote_code")))
        capacity = self._capacity()
        block = int(capacity.get("tokensPerBlock") or self._args.tokens_per_block)
        budget = self._args.kv_cache.get("max_tokens")

        def limit(name: str, default: int) -> int:
            return int(getattr(args, name, None) or values.get(name) or default)

        self._info = EngineInfo(
            tokens_per_block=block,
            total_blocks=int(capacity.get("maxNumBlocks") or (budget or 0) // block),
            max_seq_len=limit("max_seq_len", int(getattr(text, "max_position_embeddings", 0)) or 1),
            max_batch_size=limit("max_batch_size", DEFAULT_MAX_BATCH_SIZE),
            max_num_tokens=limit("max_num_tokens", DEFAULT_MAX_NUM_TOKENS),
            vocab_size=int(text.vocab_size),
            hidden_size=int(text.hidden_size),
            block_reuse=self._args.block_reuse,
        )
        self._mrope = _has_mrope(text)
        self._media_tokens = MediaTokens.of(self._llm, self._info.vocab_size)
        self._next_id = disagg.request_id_maker(self._names, self._caps)
        if self._kv_events:
            self._events = EventTranslator(block, self._info.vocab_size)
            self._poller = asyncio.create_task(self._poll(self._events), name="trtllm-block-events")
        return self._info

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._llm is None or self._fatal is not None:
            raise Unavailable(f"the engine is not running{f': {self._fatal}' if self._fatal else ''}")
        if request.lora_id is not None:
            raise InvalidRequest("adapters are not served by the TensorRT-LLM engine: leave lora out")
        n = len(request.layout)
        prefill = None
        if request.disaggregated_params is not None:
            prefill = disagg.parse(request.disaggregated_params, num_tokens=n)
            if prefill.finished is not None:
                yield disagg.finished_output(prefill)
                return
        elif request.remote_kv is not None:
            raise Unavailable("prefill ran the reference engine, this worker TensorRT-LLM: run the same on both")
        if (request.prefill_only or prefill is not None) and not self._args.transceiver:
            raise Unavailable(
                "cache_transceiver_config.backend is not set in the engine YAML: KV cannot be handed over"
            )
        cached = None if prefill is None else prefill.cached_tokens
        result = await self._submit(request, prefill)
        first_seen = prefill is None
        finished = False
        try:
            async with contextlib.aclosing(self._outputs(result, request, cached)) as outputs:
                async for output in outputs:
                    first_seen = True
                    finished = output.finish_reason is not None
                    yield output
        finally:
            if not finished:
                self._abort(result, now=first_seen)

    def listen(self, listener: KVEventListener) -> None:
        self._listeners.append(listener)

    def _capacity(self) -> dict[str, Any]:
        """The engine's own count of its blocks; empty where this release, or this way to run it, has none."""
        if not self._caps.capacity:
            return {}
        try:
            return self._llm.get_kv_cache_capacity() or {}
        except Exception as error:
            logger.warning("the engine does not tell its KV capacity, so that of the engine YAML counts: %r", error)
            return {}

    def used_blocks(self) -> int:
        """Blocks known to be reusable; the engine does not tell those in use."""
        return self._events.published_blocks if self._events is not None else 0

    async def stop(self) -> None:
        poller, self._poller = self._poller, None
        for task in [poller, *self._aborting]:
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    async def _submit(self, request: EngineRequest, prefill: disagg.PrefillParams | None) -> Any:
        """Hand one request to the engine; what is returned gives its outputs."""
        if self._mrope and request.position_ids is None:
            # TensorRT-LLM would find out in the middle of a step, and fail all requests of its batch.
            raise InvalidMetadata("position_ids", "are missing, and this model has rotary positions on three axes")
        n, most = len(request.layout), 0 if self._info is None else self._info.max_num_tokens
        if prefill is None and not self._args.chunked_prefill and n > most:
            raise InvalidRequest(
                f"the prompt has {n} tokens with its media, this worker computes {most} in one step: set "
                "enable_chunked_prefill: true, or a larger max_num_tokens"
            )
        decision = decide(request, self._policy)
        if decision.reason:
            logger.info("request %s: keys are %s: %s", request.request_id, decision.kind, decision.reason)
        options: dict[str, Any] = {"streaming": not request.prefill_only}
        if prefill is not None:
            options["disaggregated_params"] = disagg.generation_params(prefill, self._names, self._caps)
        elif request.prefill_only:
            options["disaggregated_params"] = disagg.context_params(self._names, self._caps, self._next_id())
        if self._caps.cache_salt and decision.cache_salt is not None:
            options["cache_salt"] = decision.cache_salt
        try:
            sampling = self._names.SamplingParams(
                **sampling_options(request.sampling, prefill_only=request.prefill_only)
            )
        except ValueError as error:
            raise InvalidRequest(f"TensorRT-LLM refuses the sampling options: {error}") from error
        make: Callable[..., Any] = preprocessed_inputs if prefill is None else generation_inputs
        inputs = await to_its_end(  # it copies embeddings
            None, make, self._names, self._caps, request, decision, self._media_tokens, undo=drop_handles
        )
        if self._llm is None:
            drop_handles(inputs)
            raise Unavailable("the engine is not running")
        self._remember(request, decision, inputs)
        try:
            result = self._llm.generate_async(inputs, sampling_params=sampling, **options)
        except Exception as error:
            if isinstance(error, ValueError) or self._rejected(error):
                drop_handles(inputs)
                raise InvalidRequest(f"TensorRT-LLM refuses the request: {error}") from error
            raise self._failure(error) from error
        self._asked.set()
        return result

    async def _outputs(
        self, result: Any, request: EngineRequest, cached: int | None
    ) -> AsyncGenerator[EngineOutput, None]:
        """What each step added, until one says that it was the last."""
        done = 0
        try:
            async for step in result:
                output = step.outputs[0]
                tokens = [int(t) for t in output.token_ids[done:]]
                entries = (getattr(output, "logprobs", None) or [])[done:] or None
                done += len(tokens)
                finished = bool(getattr(step, "finished", False) or output.finish_reason)
                if not tokens and not finished:
                    continue
                answer = EngineOutput(
                    token_ids=tokens,
                    finish_reason=finish_reason(output.finish_reason) if finished else None,
                    logprobs=logprobs(tokens, entries, request.sampling.logprobs),
                    cached_tokens=int(getattr(step, "cached_tokens", 0) or 0) if cached is None else cached,
                )
                if finished and request.prefill_only:
                    disagg.take_positions(getattr(output, "disaggregated_params", None), self._names)
                    self._hand_over(answer, output, len(request.layout))
                yield answer
                if finished:
                    return
        except Exception as error:
            raise self._failure(error) from error
        raise Unavailable("the engine ended the request without an answer")

    def _hand_over(self, answer: EngineOutput, output: Any, num_tokens: int) -> None:
        """Put what decode needs on prefill's last output."""
        if output.finish_reason in HANDED_OVER or output.finish_reason is None:
            answer.finish_reason = "length"
            answer.params = disagg.encode(
                getattr(output, "disaggregated_params", None),
                self._caps,
                num_tokens=num_tokens,
                cached_tokens=answer.cached_tokens,
            )
        elif answer.token_ids:
            answer.params = disagg.encode_finished(answer, num_tokens=num_tokens)
        else:
            raise Unavailable(f"prefill ended without a token: {output.finish_reason}")

    def _failure(self, error: Exception) -> Exception:
        """The typed error for one of the engine's; notes whether the engine is still alive."""
        if isinstance(error, (InvalidRequest, Unavailable)):
            return error
        healthy = getattr(self._llm, "_check_health", None)
        if self._llm is not None and not self._rejected(error) and (not callable(healthy) or not healthy()):
            self._fatal = f"{type(error).__name__}: {error}"
            logger.critical("the engine died, this worker must be restarted: %s", self._fatal)
        return Unavailable(f"the engine failed on this request: {type(error).__name__}: {error}")

    def _rejected(self, error: Exception) -> bool:
        """Whether the engine refused one request, and lives on."""
        return self._names.RequestError is not None and isinstance(error, self._names.RequestError)

    def _abort(self, result: Any, *, now: bool) -> None:
        if now:
            _tell_abort(result)
            return
        # A decode request whose KV is on its way must not be aborted before it is there: the sender would write into
        # blocks that are somebody else's by then.
        task = asyncio.ensure_future(_abort_after_first(result))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    def _remember(self, request: EngineRequest, decision: KeyDecision, inputs: Any) -> None:
        if self._events is None or (request.layout.num_items == 0 and decision.cache_salt is None):
            return
        layout, routing = request.layout, request.routing_token_ids
        if routing is None or not decision.reuse:
            told = (layout.member_item < 0) & decision.reuse
            routing = np.where(told, layout.token_ids, UNKNOWN).astype(np.int64)
        known = KnownPrompt(
            token_ids=np.asarray(inputs.prompt_token_ids, dtype=np.int64),
            routing_ids=routing,
            multimodal_input=decision.multimodal_input,
            engine_salt=decision.cache_salt,
            cache_salt=request.cache_salt,
        )
        self._events.remember(known, layout.slot_item >= 0)

    async def _poll(self, translator: EventTranslator) -> None:
        """Give the engine's block events to the listeners until cancelled. Nothing that an event holds ends it."""
        pause, trouble = _POLL_FIRST, ""
        await self._asked.wait()  # before the first request, asking for events is an error
        while self._fatal is None:
            seen = False
            try:
                async with contextlib.aclosing(new_events(self._llm)) as events:
                    async for event in events:
                        seen = True
                        for translated in translator.translate(event):
                            self._tell(translated)
            except Exception as error:
                translator.malformed += 1
                if trouble != (trouble := repr(error)):
                    logger.warning("block events could not be read: %s", trouble)
            pause = _POLL_FIRST if seen else min(_POLL_LAST, pause * 2)
            await asyncio.sleep(pause)

    def _tell(self, event: BlocksStored | BlocksRemoved) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on a block event")


async def _abort_after_first(result: Any) -> None:
    async def first() -> None:
        async for _ in result:
            return

    try:
        await asyncio.wait_for(first(), ABORT_PATIENCE)
    except Exception as error:
        logger.warning("an aborted request gave no first token: %r", error)
    _tell_abort(result)


def _tell_abort(result: Any) -> None:
    try:
        result.abort()
    except Exception as error:
        # The request may be over, or the engine gone: there is nothing left to stop then.
        logger.warning("a request could not be aborted: %r", error)


def _text_config(model_dir: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_dir}: the model's configuration cannot be read: {error}") from error
    return config.get_text_config(decoder=True)


def _has_mrope(text: Any) -> bool:
    """Whether positions have three axes; where it says so depends on the version of transformers."""
    settings = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    return any(isinstance(s, dict) and "mrope_section" in s for s in settings)
