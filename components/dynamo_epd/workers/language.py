# SPDX-License-Identifier: Apache-2.0
"""What the roles share that run the language model: prefill, decode, and agg."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

import torch
from dynamo._core import Context
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest, LlmRegistration
from dynamo.common.backend.health_check import bos_token_id_or, build_health_check_payload
from dynamo.common.backend.publisher import KvEventSource, PushSource

from .. import models
from ..contract.errors import InvalidRequest, Unavailable
from ..contract.handoff import (
    Handoff,
)
from ..doctor import startup_checks
from ..engine import create_engine, resolve
from ..engine.base import Engine, EngineInfo, EngineOutput, EngineRequest
from ..models.base import Family
from ..models.checkpoint import weights_fingerprint
from ..transfer.base import Transfer
from .ask import EncodeClient
from .base import EpdWorker
from .events import KVEventForwarder, LoadReporter
from .observe import Observation
from .peers import LostPeers
from .prompt import Prompt, build_prompt, usable_handoff
from .sampling import logprob_fields, parse_sampling
from .trace import RequestTracer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Running:
    """What a started language worker holds."""

    family: Family
    weights: str
    engine: Engine
    info: EngineInfo
    transfer: Transfer


class LanguageWorker(EpdWorker):
    """Base of prefill, decode and agg; they differ in ``serve``."""

    async def open(self) -> EngineConfig:
        a = self.args
        if self.transfer is None:
            raise RuntimeError("open() before the transfer layer")
        kind = resolve(a.engine)
        await asyncio.to_thread(
            startup_checks, engine=kind, model=a.model, engine_args=a.engine_args, overrides=a.engine_overrides
        )
        family = await asyncio.to_thread(models.load, a.model, tower=False)
        weights = await asyncio.to_thread(weights_fingerprint, a.model)
        self.peers = LostPeers(a.transfer.offer_ttl)
        self._engine: Engine = create_engine(
            kind,
            model_dir=a.model,
            config_file=a.engine_args,
            overrides=a.engine_overrides,
            keys=a.keys,
            device=a.device,
            dtype=a.dtype,
        )
        info = await self._engine.start()
        self._running = _Running(family, weights, self._engine, info, self.transfer)
        self._encode = None
        if a.encode_fallback == "ask":
            self._encode = EncodeClient(a.encode_endpoint, a.encode_timeout, a.discovery_backend, a.request_plane)
        self._load = LoadReporter(info.total_blocks, info.tokens_per_block)
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

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._load.publish_to(publisher)

    async def health_check_payload(self) -> dict[str, Any]:
        return build_health_check_payload(bos_token_id_or(self._running.family.tokenizer, 0))

    async def probe(self, context: Context, seen: Observation) -> AsyncIterator[GenerateChunk]:
        """One token through the engine, of a prompt of one token; its block is nobody's."""
        if self.args.health_needs_peers:
            await self.peers.check()
        running = self._running
        request: GenerateRequest = {
            "token_ids": [bos_token_id_or(running.family.tokenizer, 0)],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        }
        prompt = build_prompt(request, None, running.family)
        engine_request = replace(self._engine_request(prompt, request, context), reuse=False)
        async with aclosing(running.engine.generate(engine_request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                chunk: GenerateChunk = {"token_ids": output.token_ids, "index": 0}
                if output.finish_reason:
                    chunk["finish_reason"] = output.finish_reason
                    chunk["completion_usage"] = usage(1, 1, 0)
                yield chunk

    async def handoff(self, request: GenerateRequest) -> Handoff | None:
        """The request's handoff; with ``--encode-fallback ask``, asked for here where the frontend brought none."""
        try:
            return usable_handoff(request, self._running.family)
        except Unavailable:
            if self._encode is None or request.get("encoder_result") is not None:
                raise
            answer = await self._encode.ask(request)
            return usable_handoff({**request, "encoder_result": answer}, self._running.family)

    async def prepare(
        self, request: GenerateRequest, context: Context, seen: Observation
    ) -> tuple[Prompt, EngineRequest]:
        """The expanded prompt, and the engine request without embeddings or KV.

        Where this fails, encode is told that nobody will fetch what it offered.
        """
        handoff = await self.handoff(request)
        try:
            prompt = build_prompt(request, handoff, self._running.family, self.args.on_incomplete_metadata)
            seen.keyed(prompt.key_kind, prompt.key_reason)
            seen.note(items=len(prompt.items), prompt_tokens=len(prompt.layout))
            engine_request = self._engine_request(prompt, request, context)
            if self._tracer is not None:
                self._tracer.write(prompt, request["token_ids"], engine_request.request_id)
        except Exception:
            for item in handoff.items if handoff is not None else ():
                self._running.transfer.decline(item.embedding)
            raise
        return prompt, engine_request

    def _engine_request(self, prompt: Prompt, request: GenerateRequest, context: Context) -> EngineRequest:
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
            sampling=parse_sampling(request, room=room, first_token_only=self.args.role == "prefill"),
            multimodal_input=prompt.multimodal_input,
            position_ids=prompt.position_ids,
            position_delta=prompt.position_delta,
            cache_salt=prompt.cache_salt,
            reuse=prompt.reuse,
            modalities=tuple(item.modality for item in prompt.items),
            routing_token_ids=prompt.routing_token_ids,
        )

    async def embeddings(self, prompt: Prompt, seen: Observation, stack: AsyncExitStack) -> list[torch.Tensor]:
        """Fetch the items' embeddings; they stay valid until ``stack`` is closed."""
        if not prompt.items:
            return []
        refs = [item.embedding for item in prompt.items]
        stage = seen.stage("transfer", items=len(refs), bytes=sum(ref.nbytes for ref in refs))
        with stage, self.peers.watch(refs):
            slots = await self._running.transfer.fetch_all(refs)
        for slot, ref in zip(slots, refs, strict=True):
            stack.callback(slot.release)
            self._running.transfer.keep(ref.digest, slot)
        return [
            slot.tensor(item.embedding.shape, item.embedding.dtype)
            for slot, item in zip(slots, prompt.items, strict=True)
        ]

    async def stream(
        self, engine_request: EngineRequest, seen: Observation, cached: int | None = None
    ) -> AsyncGenerator[tuple[EngineOutput, GenerateChunk], None]:
        """Engine outputs with their chunks.

        Args:
            cached: prompt tokens that the prefill worker took from its cache; None where this worker is the one to say.
        """
        prompt_tokens = len(engine_request.layout.token_ids)
        tokenizer = self._running.family.tokenizer
        done = 0
        decodes = self.args.role == "decode"
        with self._load.request(prompt_tokens) as load, ExitStack() as stages:
            # On a decode worker, what comes before the first token is the KV's way here, which is timed where it is.
            stage = None if decodes else stages.enter_context(seen.stage("prefill", prompt_tokens=prompt_tokens))
            async with aclosing(self._running.engine.generate(engine_request)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    if done == 0:
                        if stage is None:
                            seen.timed("queue", output.queue_seconds)
                            stage = stages.enter_context(seen.stage("decode"))
                        else:
                            stage.waited(output.queue_seconds)
                        stage.set(items=len(engine_request.modalities), cached_tokens=output.cached_tokens)
                        if not output.finish_reason:
                            stage.then("decode")
                    done += len(output.token_ids)
                    chunk: GenerateChunk = {"token_ids": output.token_ids, "index": 0}
                    if output.logprobs:
                        words = [tokenizer.decode([t]) for t in output.token_ids]
                        chunk.update(logprob_fields(output.token_ids, output.logprobs, words))  # type: ignore[typeddict-item]
                    reused = output.cached_tokens if cached is None else cached
                    # With every chunk: at a stop string the frontend ends the answer itself, with what it has by then.
                    chunk["completion_usage"] = usage(prompt_tokens, done, reused)
                    if output.finish_reason:
                        chunk["finish_reason"] = output.finish_reason
                        seen.note(cached_tokens=reused, completion_tokens=done)
                        seen.prompt(prompt_tokens, output.cached_tokens)
                        load.cached(prompt_tokens, output.cached_tokens)
                        if stage is not None:
                            stage.set(completion_tokens=done)
                        stages.close()
                    yield output, chunk


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI usage of a finished request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
