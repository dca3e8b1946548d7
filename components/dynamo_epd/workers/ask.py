# SPDX-License-Identifier: Apache-2.0
"""Asks an encode worker directly, for requests that the frontend sent on without a handoff."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo.common.backend.engine import GenerateRequest
from dynamo.llm.exceptions import DynamoException
from dynamo.runtime import DistributedRuntime

from ..contract.errors import DeadlineExceeded, Unavailable


class EncodeClient:
    """A client of the encode workers at ``endpoint`` (``namespace.component.endpoint``), connected on first use.

    Args:
        timeout: seconds for one question.
        discovery_backend, request_plane: as this worker's own.
    """

    def __init__(self, endpoint: str, timeout: float, discovery_backend: str, request_plane: str):
        self._endpoint = endpoint
        self._timeout = timeout
        self._runtime = (discovery_backend, request_plane)
        self._client: Any = None

    async def ask(self, request: GenerateRequest) -> dict[str, Any]:
        """``encoder_result`` of one encode worker for ``request``.

        Raises:
            Unavailable: no encode worker is up, or it failed.
            DeadlineExceeded: none answered within the time-out.
        """
        try:
            return await asyncio.wait_for(self._ask(request), self._timeout)
        except asyncio.TimeoutError as error:
            raise DeadlineExceeded(f"no encode worker at {self._endpoint} answered in {self._timeout:g} s") from error

    async def _ask(self, request: GenerateRequest) -> dict[str, Any]:
        if self._client is None:
            runtime = DistributedRuntime(asyncio.get_running_loop(), *self._runtime)
            self._client = await runtime.endpoint(self._endpoint).client()
        if not self._client.instance_ids():
            raise Unavailable(f"no encode worker is up at {self._endpoint}")
        question = {k: v for k, v in request.items() if k not in ("encoder_result", "prefill_result")}
        try:
            async for answer in await self._client.round_robin(question):
                if answer.is_error():
                    raise Unavailable(f"the encode worker at {self._endpoint} failed: {answer.comments()}")
                data = answer.data()
                if data and data.get("encoder_result") is not None:
                    return data["encoder_result"]
        except DynamoException as error:
            raise Unavailable(f"the encode worker at {self._endpoint} cannot be reached: {error}") from error
        raise Unavailable(f"the encode worker at {self._endpoint} gave no encoder_result")
