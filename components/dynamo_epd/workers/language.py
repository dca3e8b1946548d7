# SPDX-License-Identifier: Apache-2.0
"""The roles that run the language model: prefill, decode, and agg (both in one)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

import torch
from dynamo._core import Context
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest, LlmRegistration
from dynamo.common.backend.health_check import bos_token_id_or, build_health_check_payload, is_probe
from dynamo.common.backend.publisher import KvEventSource, PushSource

from .. import models
from ..contract.errors import InvalidRequest, Unavailable
from ..contract.handoff import (
    HANDOFF_VERSION,
    Handoff,
    PrefillHandoff,
    TensorRef,
    parse_prefill_handoff,
    to_json_object,
)
from ..engine import create_engine
from ..engine.base import Engine, EngineInfo, EngineOutput, EngineRequest, KVExport, Logprob, RemoteKV
from ..models.base import Family
from ..transfer.base import Transfer
from .ask import EncodeClient
from .base import EpdWorker
from .events import KVEventForwarder
from .prompt import Prompt, build_prompt, usable_handoff
from .sampling import logprob_fields, parse_sampling
from .trace import RequestTracer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Running:
    """What a started language worker holds."""

    family: Family
    engine: Engine
    info: EngineInfo
    transfer: Transfer


class LanguageWorker(EpdWorker):
    """Common part of prefill, decode and agg; ``engine_request`` is what they differ in."""

    async def open(self) -> EngineConfig:
        a = self.args
        if self.transfer is None:
            raise RuntimeError("open() before the transfer layer")
        family = await asyncio.to_thread(models.load, a.model, tower=False)
        self._engine: Engine = create_engine(
            a.engine,
            model_dir=a.model,
            config_file=a.engine_args,
            overrides=a.engine_overrides,
            keys=a.keys,
            device=a.device,
            dtype=a.dtype,
        )
        info = await self._engine.start()
        self._running = _Running(family, self._engine, info, self.transfer)
        self._encode = None
        if a.encode_fallback == "ask":
            self._encode = EncodeClient(a.encode_endpoint, a.encode_timeout, a.discovery_backend, a.request_plane)
        self._events = KVEventForwarder(self._engine, info.tokens_per_block) if a.publish_kv_events else None
        self._tracer = None
        if a.trace_requests:
            self._tracer = RequestTracer(a.trace_requests, family, role=a.role, tokens_per_block=info.tokens_per_block)
        return EngineConfig(
            model=str(a.model),
            served_model_name=a.served_model_name,
            llm=LlmRegistration(
                context_length=info.max_seq_len,
                kv_cache_block_size=info.tokens_per_block,
                total_kv_blocks=info.total_blocks,
                max_num_seqs=info.max_batch_size,
                max_num_batched_tokens=info.max_num_tokens,
            ),
        )

    async def shut(self) -> None:
        events = getattr(self, "_events", None)
        if events is not None:
            events.close()
        engine = getattr(self, "_engine", None)
        if engine is not None:
            await engine.stop()

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [PushSource(on_ready=self._events.publish_to)] if self._events else []

    async def health_check_payload(self) -> dict[str, Any]:
        return build_health_check_payload(bos_token_id_or(self._running.family.tokenizer, 0))

    async def handoff(self, request: GenerateRequest) -> Handoff | None:
        """The request's handoff; with ``--encode-fallback ask``, asked for here where the frontend brought none."""
        try:
            return usable_handoff(request, self._running.family)
        except Unavailable:
            if self._encode is None or request.get("encoder_result") is not None:
                raise
            answer = await self._encode.ask(request)
            return usable_handoff({**request, "encoder_result": answer}, self._running.family)

    async def prompt(self, request: GenerateRequest) -> Prompt:
        """Expand the prompt. A canary probe is plain text."""
        handoff = None if is_probe(request) else await self.handoff(request)
        return build_prompt(request, handoff, self._running.family, self.args.on_incomplete_metadata)

    def engine_request(self, prompt: Prompt, request: GenerateRequest, context: Context) -> EngineRequest:
        """The prompt as an engine request without embeddings or KV."""
        info = self._running.info
        n = len(prompt.layout.token_ids)
        room = info.max_seq_len - n
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {n} tokens with its media, the model takes {info.max_seq_len} with the answer; "
                "shorten it or send fewer or smaller media"
            )
        unknown = prompt.layout.token_ids[prompt.layout.token_ids >= info.vocab_size]
        if len(unknown):
            raise InvalidRequest(f"token id {int(unknown[0])} is not in the vocabulary")
        return EngineRequest(
            request_id=str(context.id()),
            layout=prompt.layout,
            sampling=parse_sampling(request, room=room),
            multimodal_input=prompt.multimodal_input,
            position_ids=prompt.position_ids,
            position_delta=prompt.position_delta,
            cache_salt=prompt.cache_salt,
            reuse=prompt.reuse,
            modalities=tuple(item.modality for item in prompt.items),
            routing_token_ids=prompt.routing_token_ids,
        )

    async def embeddings(self, prompt: Prompt, stack: AsyncExitStack) -> list[torch.Tensor]:
        """Fetch the items' embeddings; they stay valid until ``stack`` is closed."""
        slots = await self._running.transfer.fetch_all([item.embedding for item in prompt.items])
        for slot in slots:
            stack.callback(slot.release)
        return [
            slot.tensor(item.embedding.shape, item.embedding.dtype)
            for slot, item in zip(slots, prompt.items, strict=True)
        ]

    async def stream(
        self, engine_request: EngineRequest, cached: int | None = None
    ) -> AsyncGenerator[tuple[EngineOutput, GenerateChunk], None]:
        """Engine outputs with their chunks; the last chunk has usage.

        Args:
            cached: prompt tokens that the prefill worker took from its cache; None where this worker is the one to say.
        """
        prompt_tokens = len(engine_request.layout.token_ids)
        tokenizer = self._running.family.tokenizer
        done = 0
        async with aclosing(self._running.engine.generate(engine_request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                done += len(output.token_ids)
                chunk: GenerateChunk = {"token_ids": output.token_ids, "index": 0}
                if output.logprobs:
                    words = [tokenizer.decode([t]) for t in output.token_ids]
                    chunk.update(logprob_fields(output.token_ids, output.logprobs, words))  # type: ignore[typeddict-item]
                if output.finish_reason:
                    chunk["finish_reason"] = output.finish_reason
                    reused = output.cached_tokens if cached is None else cached
                    chunk["completion_usage"] = usage(prompt_tokens, done, reused)
                yield output, chunk

    def trace(self, prompt: Prompt, request: GenerateRequest, request_id: str) -> None:
        if self._tracer is not None:
            self._tracer.write(prompt, request["token_ids"], request_id)


class AggregatedWorker(LanguageWorker):
    """Prefill and decode in one worker; media still come from an encode worker."""

    async def serve(self, request: GenerateRequest, context: Context) -> AsyncIterator[GenerateChunk]:
        prompt = await self.prompt(request)
        engine_request = self.engine_request(prompt, request, context)
        self.trace(prompt, request, engine_request.request_id)
        async with AsyncExitStack() as stack:
            engine_request = replace(engine_request, embeddings=await self.embeddings(prompt, stack))
            async with aclosing(self.stream(engine_request)) as chunks:
                async for _, chunk in chunks:
                    yield chunk


class PrefillWorker(LanguageWorker):
    """Computes the prompt's KV and the first token, and offers the KV to a decode worker."""

    async def serve(self, request: GenerateRequest, context: Context) -> AsyncIterator[GenerateChunk]:
        prompt = await self.prompt(request)
        engine_request = replace(self.engine_request(prompt, request, context), prefill_only=not is_probe(request))
        self.trace(prompt, request, engine_request.request_id)
        async with AsyncExitStack() as stack:
            engine_request = replace(engine_request, embeddings=await self.embeddings(prompt, stack))
            async with aclosing(self.stream(engine_request)) as chunks:
                async for output, chunk in chunks:
                    if output.kv is not None:
                        stack.callback(output.kv.release)
                        kv = await self._offer(output.kv, engine_request.request_id)
                        chunk["disaggregated_params"] = to_json_object(
                            _prefill_handoff(engine_request, output, kv, self._running.info.tokens_per_block)
                        )
                    elif output.params is not None:
                        chunk["disaggregated_params"] = output.params
                    yield chunk

    async def _offer(self, kv: KVExport, request_id: str) -> TensorRef:
        transfer = self._running.transfer
        dtype = str(kv.dtype).removeprefix("torch.")
        nbytes = kv.dtype.itemsize
        for d in kv.shape:
            nbytes *= d
        slot = await transfer.allocate(nbytes)
        try:
            await asyncio.to_thread(kv.copy_to, slot.tensor(kv.shape, dtype))
            return transfer.offer(slot, digest=f"kv:{request_id}", shape=kv.shape, dtype=dtype)
        finally:
            slot.release()


class DecodeWorker(LanguageWorker):
    """Takes the KV from prefill and generates. Raw media in the request are ignored: the handoff says it all."""

    async def serve(self, request: GenerateRequest, context: Context) -> AsyncIterator[GenerateChunk]:
        async with AsyncExitStack() as stack:
            prefill = None if is_probe(request) else self._prefill_result(request, stack)
            prompt = await self.prompt(request)
            engine_request = self.engine_request(prompt, request, context)
            self.trace(prompt, request, engine_request.request_id)
            if prefill is not None:
                engine_request = replace(engine_request, remote_kv=self._remote_kv(prefill, prompt, stack))
            cached = None if prefill is None else prefill.cached_tokens
            async with aclosing(self.stream(engine_request, cached)) as chunks:
                async for _, chunk in chunks:
                    yield chunk

    def _prefill_result(self, request: GenerateRequest, stack: AsyncExitStack) -> PrefillHandoff:
        """What prefill handed over. Closing ``stack`` ends its offer, whatever becomes of the request here."""
        result = request.get("prefill_result") or {}
        if "disaggregated_params" not in result:
            raise Unavailable("the request came without prefill's result: no prefill worker could be reached")
        prefill = parse_prefill_handoff(result["disaggregated_params"])
        stack.callback(self._running.transfer.decline, prefill.kv)
        return prefill

    def _remote_kv(self, prefill: PrefillHandoff, prompt: Prompt, stack: AsyncExitStack) -> RemoteKV:
        n = len(prompt.layout.token_ids)
        if prefill.num_tokens != n:
            raise Unavailable(f"prefill computed {prefill.num_tokens} tokens, the prompt has {n}")
        transfer, kv = self._running.transfer, prefill.kv

        async def fetch(first_block: int) -> torch.Tensor:
            slot = await transfer.fetch(kv, first=first_block)
            stack.callback(slot.release)
            return slot.tensor((kv.shape[0] - first_block, *kv.shape[1:]), kv.dtype)

        logprob = None
        if prefill.first_logprob is not None:
            logprob = Logprob(prefill.first_logprob, prefill.first_top_logprobs)
        return RemoteKV(n, prefill.tokens_per_block, prefill.first_token, fetch, logprob)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI usage of a finished request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _prefill_handoff(
    request: EngineRequest, output: EngineOutput, kv: TensorRef, tokens_per_block: int
) -> PrefillHandoff:
    logprob = output.logprobs[0] if output.logprobs else None
    return PrefillHandoff(
        version=HANDOFF_VERSION,
        num_tokens=len(request.layout.token_ids),
        tokens_per_block=tokens_per_block,
        first_token=output.token_ids[0],
        cached_tokens=output.cached_tokens,
        kv=kv,
        first_logprob=logprob.chosen if logprob else None,
        first_top_logprobs=logprob.top if logprob else (),
    )
