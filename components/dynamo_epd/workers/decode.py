# SPDX-License-Identifier: Apache-2.0
"""The decode worker: continues where prefill stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import torch
from dynamo._core import Context
from dynamo.common.backend.engine import GenerateChunk, GenerateRequest

from ..contract.digest import prompt_digest
from ..contract.errors import Unavailable
from ..contract.handoff import PrefillHandoff, parse_prefill_handoff
from ..engine.base import Logprob, RemoteKV
from .language import LanguageWorker
from .observe import Observation
from .prompt import Prompt


class DecodeWorker(LanguageWorker):
    """Takes the KV from prefill and generates. Raw media in the request are ignored: the handoff says it all."""

    async def serve(
        self, request: GenerateRequest, context: Context, seen: Observation
    ) -> AsyncIterator[GenerateChunk]:
        result = self._prefill_result(request)
        async with AsyncExitStack() as stack:
            params = result.get("disaggregated_params")
            own = params is None or "kv" not in params  # an engine that moves KV itself
            prefill = None if own else parse_prefill_handoff(params)
            if prefill is not None:
                # Whatever becomes of the request here, prefill need not hold its KV until the offer expires.
                stack.callback(self._running.transfer.decline, prefill.kv)
            prompt, engine_request = await self.prepare(request, context, seen)
            if prefill is None:
                engine_request = replace(engine_request, disaggregated_params=params)
            else:
                self._check(prefill, request, prompt)
                engine_request = replace(engine_request, remote_kv=self._remote_kv(prefill, seen, stack))
            cached = (result.get("prompt_tokens_details") or {}).get("cached_tokens")
            async with aclosing(self.stream(engine_request, seen, cached)) as chunks:
                async for _, chunk in chunks:
                    yield chunk

    def _prefill_result(self, request: GenerateRequest) -> dict[str, Any]:
        result = request.get("prefill_result") or {}
        if not isinstance(result.get("disaggregated_params"), dict):
            raise Unavailable(
                "the request came without prefill's result: no prefill worker could be reached", reason="no_prefill"
            )
        return result

    def _check(self, prefill: PrefillHandoff, request: GenerateRequest, prompt: Prompt) -> None:
        """Refuse KV that was computed by another model or for another prompt: it would stay in this worker's cache."""
        if prefill.model != self._running.weights:
            raise Unavailable(
                f"the prefill worker runs other weights ({prefill.model[:12]}) than this worker "
                f"({self._running.weights[:12]}): start both from the same model directory contents",
                reason="other_model",
            )
        n = len(prompt.layout)
        if prefill.num_tokens != n or prefill.prompt_digest != prompt_digest(request["token_ids"]):
            raise Unavailable(
                f"prefill computed the KV of another prompt ({prefill.num_tokens} tokens, not {n})",
                reason="other_prompt",
            )

    def _remote_kv(self, prefill: PrefillHandoff, seen: Observation, stack: AsyncExitStack) -> RemoteKV:
        transfer, kv = self._running.transfer, prefill.kv

        async def fetch(first_block: int) -> torch.Tensor:
            blocks = kv.shape[0] - first_block
            stage = seen.stage("kv_transfer", blocks=blocks, bytes=kv.nbytes // kv.shape[0] * blocks)
            with stage, self.peers.watch([kv]):
                slot = await transfer.fetch(kv, first=first_block)
            stack.callback(slot.release)
            return slot.tensor((blocks, *kv.shape[1:]), kv.dtype)

        logprob = None
        if prefill.first_logprob is not None:
            logprob = Logprob(prefill.first_logprob, prefill.first_top_logprobs)
        return RemoteKV(prefill.num_tokens, prefill.tokens_per_block, prefill.first_token, fetch, logprob)
