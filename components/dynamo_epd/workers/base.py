# SPDX-License-Identifier: Apache-2.0
"""What all roles share: life cycle, cancellation, errors. Dynamo's ``Worker`` drives the rest."""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from dynamo._core import Context
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine
from dynamo.common.backend.health_check import is_probe
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.utils.token_ids import normalize_request_token_ids

from ..contract.errors import Unavailable
from ..transfer import open_transfer
from ..transfer.base import Transfer
from ..transfer.metrics import register_transfer_metrics
from . import faults
from .args import WorkerArgs, parse
from .observe import Observation, Observer

if TYPE_CHECKING:
    from dynamo._core.backend import EngineMetrics  # type: ignore[import-not-found]


_DRAIN_TICK = 0.05
_RESERVE = 5.0
"""Seconds that a worker keeps for ending its engine."""


class EpdWorker(LLMEngine):
    """Base of the three kinds of worker. Subclasses implement ``open``, ``serve`` and ``shut``."""

    def __init__(self, args: WorkerArgs):
        self.args = args
        self.transfer: Transfer | None = None
        self.observer = Observer()
        self._steps: dict[str, asyncio.Future[Any]] = {}
        self._unseen = Observer()
        self._probing = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[EpdWorker, WorkerConfig]:
        """A worker of this class and its registration, from the command line."""
        args, config = parse(argv)
        return cls(args), config

    @abstractmethod
    async def open(self) -> EngineConfig:
        """Load what the role needs; the transfer layer is open. Raises ``ConfigError``."""

    @abstractmethod
    def serve(self, request: GenerateRequest, context: Context, seen: Observation) -> AsyncIterator[GenerateChunk]:
        """Serve one request: an async generator that frees what it holds when it is closed."""

    @abstractmethod
    def probe(self, context: Context, seen: Observation) -> AsyncIterator[GenerateChunk]:
        """Do once what the role is for, with content of its own, and raise where it fails: Dynamo's health check.

        Nothing of it may be left where requests of users could meet it.
        """

    @abstractmethod
    async def shut(self) -> None:
        """Undo ``open``, also half of one."""

    async def start(self, worker_id: int) -> EngineConfig:
        transfer = await open_transfer(self.args.transfer)
        register_transfer_metrics(self.observer.registry, transfer)
        self.transfer = cast(Transfer, transfer)
        return await self.open()

    async def register_prometheus(self, metrics: EngineMetrics) -> None:
        register_engine_registry(metrics, self.observer.registry)

    async def cleanup(self) -> None:
        """Let what is in flight end, and then everything else. Dynamo 1.6.1 waits for the requests of prefill alone."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _patience()
        while self._steps and loop.time() < end:
            await asyncio.sleep(_DRAIN_TICK)
        for step in list(self._steps.values()):
            step.cancel()
        await self.shut()
        if self.transfer is not None:
            await self._drain(self.transfer, end)
            await self.transfer.close()
            self.transfer = None

    async def is_quiescent(self) -> bool:
        """Whether nobody waits for what this worker has: Dynamo may end it."""
        return not self._steps and (self.transfer is None or not self.transfer.offering)

    async def _drain(self, transfer: Transfer, end: float) -> None:
        """Keep what is offered until it is taken or its time to live is over, until ``end`` at the latest."""
        while transfer.offering and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_DRAIN_TICK)

    async def abort(self, context: Context) -> None:
        step = self._steps.get(_id(context))
        if step is not None:
            step.cancel()

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Run ``serve`` so that an abort interrupts it wherever it waits, and errors become HTTP statuses."""
        request_id = _id(context)
        probe = is_probe(request)
        if probe:
            seen = self._unseen.request(context)
            chunks = self._canary(context, seen)
        else:
            normalize_request_token_ids(request)
            seen = self.observer.request(context)
            chunks = self.serve(request, context, seen)
        outcome, reason, message = "abandoned", "", ""
        try:
            while True:
                step = asyncio.ensure_future(anext(chunks))
                self._steps[request_id] = step
                if context.is_stopped():
                    step.cancel()
                chunk = await step
                if chunk.get("finish_reason"):
                    outcome = "ok"
                    yield chunk
                    return
                yield chunk
        except asyncio.CancelledError:
            outcome = "cancelled"
            if not context.is_stopped():
                raise
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        except Exception as error:
            outcome, reason, message = faults.outcome(error), faults.reason(error), str(error)
            raise faults.to_dynamo(error, request_id) from error
        finally:
            self._steps.pop(request_id, None)
            await chunks.aclose()  # type: ignore[attr-defined]
            if probe:
                self.observer.canaries.labels("ok" if outcome == "ok" else "failed").inc()
            else:
                seen.end(outcome, reason, message)

    async def _canary(self, context: Context, seen: Observation) -> AsyncIterator[GenerateChunk]:
        """``probe``, one at a time: those that a wedged engine never answers must not pile up in it."""
        if self._probing:
            raise Unavailable("the health check before this one has not come back")
        self._probing = True
        try:
            async with aclosing(self.probe(context, seen)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        finally:
            self._probing = False


def _patience() -> float:
    """Seconds for what is in flight: what Dynamo leaves of its own limit, at which it ends the process by force."""

    def seconds(name: str, otherwise: float) -> float:
        try:
            return float(os.environ[name])
        except (KeyError, ValueError):  # as Dynamo does
            return otherwise

    limit = seconds("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", 30.0)
    return max(0.0, limit - seconds("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", 5.0) - _RESERVE)


def _id(context: Context) -> str:
    request_id = context.id()
    if request_id is None:
        raise RuntimeError("Dynamo gave a request without an id")
    return request_id
