# SPDX-License-Identifier: Apache-2.0
"""The agg worker: prefill and decode in one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from dynamo._core import Context
from dynamo.common.backend.engine import GenerateChunk, GenerateRequest

from .language import LanguageWorker
from .observe import Observation


class AggregatedWorker(LanguageWorker):
    """Prefill and decode in one worker; media still come from an encode worker."""

    async def serve(
        self, request: GenerateRequest, context: Context, seen: Observation
    ) -> AsyncIterator[GenerateChunk]:
        prompt, engine_request = await self.prepare(request, context, seen)
        async with AsyncExitStack() as stack:
            engine_request = replace(engine_request, embeddings=await self.embeddings(prompt, seen, stack))
            async with aclosing(self.stream(engine_request, seen)) as chunks:
                async for _, chunk in chunks:
                    yield chunk
