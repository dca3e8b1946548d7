# SPDX-License-Identifier: Apache-2.0
"""The prefill worker: the prompt's KV and the first token, handed to a decode worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from dynamo._core import Context
from dynamo.common.backend.engine import GenerateChunk, GenerateRequest

from ..contract.digest import prompt_digest
from ..contract.handoff import HANDOFF_VERSION, PrefillHandoff, TensorRef, to_json_object
from ..engine.base import EngineOutput, EngineRequest, KVExport
from ..engine.threads import to_its_end
from .language import LanguageWorker
from .observe import Observation


class PrefillWorker(LanguageWorker):
    """Computes the prompt's KV and the first token, and offers the KV to a decode worker."""

    async def serve(
        self, request: GenerateRequest, context: Context, seen: Observation
    ) -> AsyncIterator[GenerateChunk]:
        prompt, engine_request = await self.prepare(request, context, seen)
        engine_request = replace(engine_request, prefill_only=True)
        async with AsyncExitStack() as stack:
            engine_request = replace(engine_request, embeddings=await self.embeddings(prompt, seen, stack))
            async with aclosing(self.stream(engine_request, seen)) as chunks:
                async for output, chunk in chunks:
                    if output.kv is not None:
                        stack.callback(output.kv.release)
                        with seen.stage("offer", blocks=output.kv.shape[0]) as stage:
                            kv = await self._offer(output.kv, engine_request.request_id)
                            stage.set(bytes=kv.nbytes)
                        chunk["disaggregated_params"] = to_json_object(
                            self._prefill_handoff(request, engine_request, output, kv)
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
            await to_its_end(None, kv.copy_to, slot.tensor(kv.shape, dtype))
            return transfer.offer(slot, digest=f"kv:{request_id}", shape=kv.shape, dtype=dtype)
        finally:
            slot.release()

    def _prefill_handoff(
        self, request: GenerateRequest, engine_request: EngineRequest, output: EngineOutput, kv: TensorRef
    ) -> PrefillHandoff:
        logprob = output.logprobs[0] if output.logprobs else None
        return PrefillHandoff(
            version=HANDOFF_VERSION,
            model=self._running.weights,
            prompt_digest=prompt_digest(request["token_ids"]),
            num_tokens=len(engine_request.layout),
            tokens_per_block=self._running.info.tokens_per_block,
            first_token=output.token_ids[0],
            kv=kv,
            first_logprob=logprob.chosen if logprob else None,
            first_top_logprobs=logprob.top if logprob else (),
        )
