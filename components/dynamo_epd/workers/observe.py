# SPDX-License-Identifier: Apache-2.0
"""What a worker tells of its requests: metrics, spans and one log line each. No payloads, no URLs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynamo._core import Context
from dynamo.common.backend import telemetry
from prometheus_client import CollectorRegistry, Counter, Histogram

logger = logging.getLogger(__name__)

PREFIX = "dynamo_component_mm_"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Observer:
    """The metrics of one worker, in a registry that Dynamo's ``/metrics`` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.stages = Histogram(
            f"{PREFIX}stage_seconds",
            "Seconds that a request or an item spends in a stage.",
            ["stage"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.requests = Counter(f"{PREFIX}requests", "Requests by outcome.", ["outcome"], registry=registry)
        self.items = Counter(
            f"{PREFIX}items", "Media items by modality and source.", ["modality", "source"], registry=registry
        )
        self.keys = Counter(f"{PREFIX}keys", "Requests by how their blocks are keyed.", ["kind"], registry=registry)

    def request(self, context: Context) -> Observation:
        """Start to observe one request."""
        return Observation(self, context)


class Observation:
    """One request: time its stages, note what is worth a word, and close it with ``end``."""

    def __init__(self, observer: Observer, context: Context):
        self._observer = observer
        self._context = context
        self._start = time.perf_counter()
        self._notes: dict[str, Any] = {}
        self._stages: dict[str, float] = {}
        self._fault = ""

    @contextmanager
    def stage(self, name: str, **attributes: Any) -> Iterator[None]:
        """Time a stage and trace it as a child span of Dynamo's ``engine.generate``; stages may overlap."""
        start = time.perf_counter()
        try:
            with telemetry.start_span(self._context, f"mm.{name}", **attributes):
                yield
        finally:
            seconds = time.perf_counter() - start
            self._stages[name] = self._stages.get(name, 0.0) + seconds
            self._observer.stages.labels(name).observe(seconds)

    def note(self, **notes: Any) -> None:
        """Values for the log line; numbers noted twice add up."""
        for name, value in notes.items():
            if isinstance(value, (int, float)) and name in self._notes:
                value = self._notes[name] + value
            self._notes[name] = value

    def item(self, modality: str, source: str) -> None:
        """Count one media item. ``source``: ``kept`` (no work), ``encoded`` or ``file`` (an embedding file)."""
        self._observer.items.labels(modality, source).inc()
        self.note(items=1, kept=int(source == "kept"))

    def keyed(self, kind: str) -> None:
        """Count how the request's blocks are keyed; see ``metadata.KeyDecision``."""
        self._observer.keys.labels(kind).inc()
        self.note(keys=kind)

    def fault(self, outcome: str) -> None:
        """The request is answered, but what the answer tells is a fault."""
        self._fault = outcome

    def end(self, outcome: str, reason: str = "") -> None:
        """Count the request and write its line; ``outcome`` as ``faults.outcome`` says, ``ok`` or ``cancelled``."""
        outcome = self._fault or outcome
        self._observer.requests.labels(outcome).inc()
        words = [f"{name}={value}" for name, value in self._notes.items()]
        words += [f"{name}_ms={1e3 * seconds:.1f}" for name, seconds in self._stages.items()]
        words += [f"total_ms={1e3 * (time.perf_counter() - self._start):.1f}", f"outcome={outcome}"]
        if reason:
            words.append(f"reason={reason!r}")
        logger.info("request %s %s", self._context.id(), " ".join(words))
