# SPDX-License-Identifier: Apache-2.0
"""What a worker tells of its requests: metrics, spans and one log line each. No payloads, no URLs.

Stages are the same word in all three: the label of ``stage_seconds``, the span ``mm.<stage>`` below Dynamo's
``engine.generate``, and ``<stage>_ms`` in the log line.

    encode          fetch, digest, decode (media to the encoder's input), queue, encode, offer
    prefill, agg    transfer (embeddings), queue, prefill, offer (KV, prefill only), decode (tokens, agg only)
    decode          kv_transfer, queue, decode (from the first token to the last)
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynamo._core import Context
from dynamo.common.backend import telemetry
from prometheus_client import CollectorRegistry, Counter, Histogram

logger = logging.getLogger(__name__)

PREFIX = "dynamo_component_mm_"
_REASONS = {
    "ok": ("",),
    "cancelled": ("",),
    "abandoned": ("",),
    "invalid": ("item", "request", "metadata"),
    "unavailable": (
        "no_handoff",
        "no_prefill",
        "other_model",
        "other_prompt",
        "deadline",
        "unavailable",
        "timeout",
        "peer_lost",
        "expired",
        "arena_full",
        "too_large",
        "checksum",
        "generation",
        "protocol",
        "cancelled",
    ),
    "failed": ("internal",),
}
"""The reasons that ``faults.reason`` gives, by outcome."""

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def json_lines() -> bool:
    """Whether Dynamo writes its log as JSON lines (``DYN_LOGGING_JSONL``, or ``DYN_LOGGING_CONSOLE_FORMAT=jsonl``)."""
    on = os.environ.get("DYN_LOGGING_JSONL", "").lower() in ("1", "true", "on", "yes")
    return on or os.environ.get("DYN_LOGGING_CONSOLE_FORMAT", "").lower() == "jsonl"


class Observer:
    """The metrics of one worker, in a registry that Dynamo's ``/metrics`` shows.

    Requests of every outcome and reason are there with 0 from the start: an alert on the first of its kind needs the
    zero before it. Of keys and items, only the commonest are.
    """

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
        self.requests = Counter(
            f"{PREFIX}requests",
            "Requests by outcome, and by the reason of one that is not ok.",
            ["outcome", "reason"],
            registry=registry,
        )
        self.items = Counter(
            f"{PREFIX}items", "Media items by modality and source.", ["modality", "source"], registry=registry
        )
        self.keys = Counter(
            f"{PREFIX}keys",
            "Requests by how their blocks are keyed, and by what kept the keys from being exact.",
            ["kind", "reason"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            f"{PREFIX}prompt_tokens",
            "Prompt tokens of finished requests: cached here, or not.",
            ["source"],
            registry=registry,
        )
        self.canaries = Counter(
            f"{PREFIX}canaries", "Health checks of this worker by outcome.", ["outcome"], registry=registry
        )
        for outcome, reasons in _REASONS.items():
            for reason in reasons:
                self.requests.labels(outcome, reason)
        for kind, reason in (("exact", ""), ("text", ""), ("content", "engine"), ("uncacheable", "multimodal_input")):
            self.keys.labels(kind, reason)
        for source in ("cached", "computed"):
            self.prompt_tokens.labels(source)
        for outcome in ("ok", "failed"):
            self.canaries.labels(outcome)

    def request(self, context: Context) -> Observation:
        """Start to observe one request."""
        return Observation(self, context)


class Stage:
    """A stage that runs: its time becomes a sample and a span when it ends, or when the next one follows it."""

    def __init__(self, seen: Observation, name: str, attributes: dict[str, Any]):
        self._seen = seen
        self._open(name, attributes)

    def _open(self, name: str, attributes: dict[str, Any]) -> None:
        self.name = name
        self._start = time.perf_counter()
        self._before = 0.0
        self._span = telemetry.start_span(self._seen.context, f"mm.{name}", **attributes)

    def then(self, name: str, **attributes: Any) -> None:
        """End the stage, and start ``name`` in its place; nothing happens where ``name`` runs already."""
        if name != self.name:
            self.end()
            self._open(name, attributes)

    def set(self, **attributes: Any) -> None:
        """Attributes of the span that are known only now."""
        for name, value in attributes.items():
            self._span.set_attribute(name, value)

    def waited(self, seconds: float) -> None:
        """Of the time since the start, so much was spent in the stage ``queue``."""
        self._before = seconds
        self._seen.timed("queue", seconds)
        self.set(queue_ms=round(1e3 * seconds, 3))

    def end(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._span.set_status("error", type(error).__name__)
        self._span.close()
        self._seen.timed(self.name, max(0.0, time.perf_counter() - self._start - self._before))


class Observation:
    """One request: time its stages, note what is worth a word, and close it with ``end``."""

    def __init__(self, observer: Observer, context: Context):
        self._observer = observer
        self.context = context
        self._start = time.perf_counter()
        self._notes: dict[str, Any] = {}
        self._stages: dict[str, float] = {}
        self._fault: tuple[str, str, str] | None = None

    @contextmanager
    def stage(self, name: str, **attributes: Any) -> Iterator[Stage]:
        """Time a stage and trace it as a child span of Dynamo's ``engine.generate``; stages may overlap."""
        stage = Stage(self, name, attributes)
        error: BaseException | None = None
        try:
            yield stage
        except GeneratorExit:
            raise  # whoever wanted it has all of it
        except BaseException as fault:
            error = fault
            raise
        finally:
            stage.end(error)

    def timed(self, stage: str, seconds: float) -> None:
        """``seconds`` were spent in ``stage``."""
        self._stages[stage] = self._stages.get(stage, 0.0) + seconds
        self._observer.stages.labels(stage).observe(seconds)

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

    def keyed(self, kind: str, reason: str) -> None:
        """Count how the request's blocks are keyed; see ``metadata.KeyDecision``.

        Args:
            reason: of ``KeyDecision``; counted by the field that it begins with, else as the engine's.
        """
        field = reason.partition(":")[0].partition("[")[0]
        self._observer.keys.labels(kind, (field if field.isidentifier() else "engine") if reason else "").inc()
        self.note(keys=kind)

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt's tokens, ``cached`` of which this worker had."""
        self._observer.prompt_tokens.labels("cached").inc(cached)
        self._observer.prompt_tokens.labels("computed").inc(tokens - cached)

    def fault(self, outcome: str, reason: str, message: str) -> None:
        """The request is answered, but what the answer tells is a fault; as for ``end``."""
        self._fault = outcome, reason, message

    def end(self, outcome: str, reason: str = "", message: str = "") -> None:
        """Count the request and write its line.

        Args:
            outcome: as ``faults.outcome`` says, ``ok``, ``cancelled`` or ``abandoned``.
            reason: as ``faults.reason`` says; empty for these three.
            message: what went wrong.
        """
        outcome, reason, message = self._fault or (outcome, reason, message)
        self._observer.requests.labels(outcome, reason).inc()
        line: dict[str, Any] = {"request": self.context.id(), **self._trace(), **self._notes}
        line.update((f"{name}_ms", round(1e3 * seconds, 2)) for name, seconds in self._stages.items())
        line.update(total_ms=round(1e3 * (time.perf_counter() - self._start), 2), outcome=outcome)
        if reason:
            line.update(reason=reason, error=message)
        if json_lines():
            logger.info("%s", json.dumps(line))
        else:
            words = (f"{name}={value!r}" if name == "error" else f"{name}={value}" for name, value in line.items())
            logger.info("%s", " ".join(words))

    def _trace(self) -> dict[str, str]:
        """The id of the request's trace, where it is traced."""
        parts = (telemetry.trace_headers(self.context) or {}).get("traceparent", "").split("-")
        return {"trace": parts[1]} if len(parts) == 4 else {}
