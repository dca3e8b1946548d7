# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dynamo_epd.contract.errors import EpdError
from dynamo_epd.engine.base import EngineOutput
from dynamo_epd.engine.trtllm.engine_args import problems

from .. import _blocks, _requests
from .._rules import EVENTS_BY_RPC, PREFIX_SUM, VARIANT, refuse
from ..executor.result import GenerationResult, Logprob
from ..executor.utils import RequestError
from ..inputs.multimodal import MultimodalParams
from ..sampling_params import SamplingParams
from .disagg_params import DisaggregatedParams

_IDS = itertools.count(1)


@dataclass
class PreprocessedInputs:
    prompt_token_ids: list[int]
    query_token_ids: list[int] | None = None
    multimodal_params: MultimodalParams | None = None


class _InputProcessor:
    """Which ids mean media: the model's own (recent releases), or ids behind the vocabulary (variant ``four``)."""

    def __init__(self, config: Any, vocab_size: int):
        names = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index")
        self._ids = [i for i in (getattr(config, name, None) for name in names) if i is not None]
        self._vocab_size = vocab_size
        if VARIANT == "four":
            self.tllm_multimodal_token_id = vocab_size + 1
        else:
            self.get_mm_token_ids = lambda: torch.tensor(self._ids, dtype=torch.int32)
            self.get_mm_special_token_ids = lambda: None

    def get_vocab_size(self) -> int:
        return self._vocab_size


class LLM:
    """Runs the reference engine in a thread with an event loop of its own, as the real one runs processes."""

    def __init__(self, model: str, **kwargs: Any):
        for problem in problems(kwargs):
            refuse("llm-args", f"LLM got invalid argument: {problem}")
        from transformers import AutoConfig

        from dynamo_epd.engine.reference.config import load_engine_config
        from dynamo_epd.engine.reference.engine import ReferenceEngine

        cache = dict(kwargs.get("kv_cache_config") or {})
        self._events_kept = cache.pop("event_buffer_max_size", 0)
        self._reuse = cache.get("enable_block_reuse", True)
        self._chunked = kwargs.get("enable_chunked_prefill", False)
        self._transceiver = bool((kwargs.get("cache_transceiver_config") or {}).get("backend"))
        settings = {**{k: v for k, v in kwargs.items() if k in _KNOWN}, "kv_cache_config": cache}
        config = load_engine_config(None, json.dumps(settings), model)
        engine = _requests.switchable(ReferenceEngine)(
            Path(model), config, device="cpu", dtype=kwargs.get("dtype", "auto")
        )
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="standin-executor", daemon=True)
        self._thread.start()
        self._fatal_error: Exception | None = None
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        try:
            self._info = self._call(engine.start()).result()
        except EpdError as error:
            self._end_thread()
            raise ValueError(str(error)) from error
        hf = AutoConfig.from_pretrained(model)
        self._mrope = engine._limits.mrope
        self.input_processor = _InputProcessor(hf, self._info.vocab_size)
        self.args = SimpleNamespace(
            max_seq_len=self._info.max_seq_len,
            max_batch_size=self._info.max_batch_size,
            max_num_tokens=self._info.max_num_tokens,
        )
        self._executor = SimpleNamespace(rpc_client=object() if EVENTS_BY_RPC else None)
        self._asked = False
        self._blocks = _blocks.Blocks(self._info.tokens_per_block, self._info.vocab_size)
        if self._events_kept:
            engine.listen(lambda event: [self._events.put(e) for e in self._blocks.events(event)])

    if VARIANT != "four":

        def get_kv_cache_capacity(self) -> dict[str, int]:
            return {"maxNumBlocks": self._info.total_blocks, "tokensPerBlock": self._info.tokens_per_block}

    if VARIANT == "four":

        def generate_async(
            self,
            inputs: Any,
            sampling_params: SamplingParams | None = None,
            streaming: bool = False,
            disaggregated_params: DisaggregatedParams | None = None,
            cache_salt: str | None = None,
        ) -> GenerationResult:
            return self._generate(inputs, sampling_params, streaming, disaggregated_params, cache_salt)

    else:

        def generate_async(  # type: ignore[misc]
            self,
            inputs: Any,
            sampling_params: SamplingParams | None = None,
            lora_request: Any = None,
            streaming: bool = False,
            disaggregated_params: DisaggregatedParams | None = None,
            trace_headers: Any = None,
            scheduling_params: Any = None,
            cache_salt: str | None = None,
            priority: float = 0.5,
        ) -> GenerationResult:
            if not 0 <= priority <= 1:
                refuse("priority", f"priority must be in [0, 1], got {priority}")
            return self._generate(inputs, sampling_params, streaming, disaggregated_params, cache_salt)

    def _generate(self, inputs: Any, sampling: Any, streaming: bool, disagg: Any, salt: str | None) -> GenerationResult:
        if self._fatal_error is not None or not self._thread.is_alive():
            raise RuntimeError("LLM is shutting down")
        if not isinstance(inputs, PreprocessedInputs):
            refuse("preprocessed", f"the stand-in takes PreprocessedInputs only, got {type(inputs)}", TypeError)
        ids = inputs.prompt_token_ids
        if type(ids) is not list or not all(type(t) is int for t in ids):
            refuse("preprocessed", "prompt_token_ids must be a list of token ids", TypeError)
        if disagg is not None and not self._transceiver and disagg.request_type != "context_and_generation":
            refuse("transceiver", "kv_cache_transceiver is disabled", AssertionError)
        if len(ids) >= self._info.max_seq_len:
            refuse("max-seq-len", f"the prompt has {len(ids)} tokens, max_seq_len is {self._info.max_seq_len}")
        if not self._chunked and len(ids) > self._info.max_num_tokens:
            refuse("max-num-tokens", f"prompt length {len(ids)} should not exceed max_num_tokens", RequestError)
        self._asked = True
        sampling = sampling or SamplingParams()
        task: list[Future[None]] = []
        result = GenerationResult(next(_IDS), lambda: [t.cancel() for t in task])  # type: ignore[arg-type, return-value]
        task.append(self._call(self._run(result, inputs, sampling, streaming, disagg, salt)))
        return result

    async def _run(
        self, result: Any, inputs: Any, sampling: Any, streaming: bool, disagg: Any, salt: str | None
    ) -> None:
        def fail(error: Exception) -> Any:
            def change() -> None:
                result.finished = True
                raise error

            return change

        params = inputs.multimodal_params
        if params is not None:
            params.to_tensor("multimodal_data")
        try:
            made = _requests.engine_request(
                str(result.request_id),
                inputs,
                sampling,
                disagg,
                salt,
                vocab_size=self._info.vocab_size,
                processor=self.input_processor,
                mrope=self._mrope,
                needs_prefix_sum=PREFIX_SUM and (self._reuse or self._chunked),
            )
            if self._events_kept and made.request.reuse:
                self._blocks.remember(made)
            token = _requests.PLACEHOLDER_KEYS.set(made.placeholder_keys)
            try:
                answer = self._engine.generate(made.request)
                whole: list[EngineOutput] = []
                async for output in answer:
                    whole.append(output)
                    if streaming or output.finish_reason:
                        new = [output] if streaming else whole
                        result._push(self._step(result, new, output, made, disagg))
            finally:
                _requests.PLACEHOLDER_KEYS.reset(token)
        except (EpdError, ValueError, AssertionError) as error:
            result._push(fail(RequestError(str(error))))
        except asyncio.CancelledError:
            result._push(fail(RequestError("cancelled")))
            raise
        except Exception as error:
            self._fatal_error = error
            result._push(fail(error))

    def _step(self, result: Any, new: list[EngineOutput], last: EngineOutput, made: Any, disagg: Any) -> Any:
        handed = _requests.handed_over(last, made, result.request_id, disagg) if last.finish_reason else None

        def change() -> None:
            completion = result.outputs[0]
            for output in new:
                completion.token_ids = [*completion.token_ids, *output.token_ids]
                for token, logprob in zip(output.token_ids, output.logprobs, strict=False):
                    best = dict(logprob.top) | {token: logprob.chosen}
                    ranked = sorted(best.items(), key=lambda pair: -pair[1])
                    completion.logprobs = [
                        *completion.logprobs,
                        {t: Logprob(v, rank) for rank, (t, v) in enumerate(ranked, start=1)},
                    ]
            result.cached_tokens = len(made.request.layout) if made.request.remote_kv else last.cached_tokens
            if last.finish_reason is not None:
                completion.finish_reason = last.finish_reason
                completion.disaggregated_params = handed
                result.finished = True

        return change

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[Any]:
        """``events-rpc``: waits for another process, so never in an event loop; ``events-queue``: not this way."""
        if not EVENTS_BY_RPC:
            refuse("events-queue", "the JSON object must be str, bytes or bytearray, not NoneType", TypeError)
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            refuse("events-rpc", "the event loop would stand still until the engine answers", AssertionError)
        events = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> Any:
        if EVENTS_BY_RPC:
            refuse("events-rpc", "the event loop would stand still until the engine answers", AssertionError)
        if not self._asked:
            refuse("events-queue", "KV Event IterationResult is not properly instantiated", AssertionError)
        return self._queued_events()

    async def _queued_events(self) -> Any:
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                raise asyncio.QueueEmpty from None
            yield event

    def _check_health(self) -> bool:
        return self._fatal_error is None

    def shutdown(self) -> None:
        if self._thread.is_alive():
            self._call(self._engine.stop()).result()
            self._end_thread()

    def _call(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


_KNOWN = ("max_seq_len", "max_batch_size", "max_num_tokens", "enable_chunked_prefill")
