# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the transfer layer, under the names that Dynamo gives its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .offers import OfferState

if TYPE_CHECKING:
    from .endpoint import Endpoint

PREFIX = "dynamo_component_"
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0)
_REASONS = ("timeout", "peer_lost", "expired", "arena_full", "too_large", "checksum", "generation", "protocol")


def register_transfer_metrics(
    registry: CollectorRegistry, transfer: Endpoint, labels: Mapping[str, str] | None = None
) -> None:
    """Add the metrics of ``transfer`` to ``registry``. They are read off when the registry is, at no other cost.

    Args:
        labels: put on every metric, as they are.

    Raises:
        ValueError: the registry has them already.
    """
    labels = dict(labels or {})
    names, values = list(labels), list(labels.values())
    seconds = Histogram(
        f"{PREFIX}mm_transfer_seconds",
        "Time from asking for memory to bytes that have arrived, per transfer.",
        names,
        registry=registry,
        buckets=_SECONDS,
    )
    transfer.effects.observe = (seconds.labels(*values) if names else seconds).observe
    registry.register(_Collector(transfer, names, values))


class _Collector:
    def __init__(self, transfer: Endpoint, names: list[str], values: list[str]):
        self._transfer = transfer
        self._names = names
        self._values = values

    def collect(self) -> Iterable[Metric]:
        transfer = self._transfer
        arena, store, offers = transfer.arena, transfer.store, transfer.offers
        kept = store.evictable()
        yield self._counter("mm_transfer_bytes", "Bytes moved into this process.", transfer.effects.moved_bytes)
        yield self._family(
            CounterMetricFamily,
            "mm_transfer_failures",
            "Fetches and allocations that failed.",
            "reason",
            {**dict.fromkeys(_REASONS, 0), **transfer.failures},
        )
        yield self._family(
            GaugeMetricFamily,
            "mm_arena_bytes",
            "Bytes of the registered memory: free, in use, kept but not in use, in quarantine.",
            "state",
            {
                "free": arena.free_bytes,
                "used": arena.used_bytes - kept - arena.quarantined_bytes,
                "kept": kept,
                "quarantined": arena.quarantined_bytes,
            },
        )
        yield self._family(
            GaugeMetricFamily,
            "mm_offers",
            "Offers that nobody has asked for yet, that are being taken, and writes that are not over.",
            "state",
            {**{state.value: offers.count(state) for state in OfferState}, "writing": offers.writing},
        )
        yield self._counter("mm_offers_expired", "Offers that nobody came for in time.", offers.expired)
        yield self._counter("embedding_cache_hits", "Contents that were found by digest.", store.hits)
        yield self._counter("embedding_cache_misses", "Contents that were not found by digest.", store.misses)
        yield self._counter("embedding_cache_evictions", "Contents dropped to make room.", store.evictions)
        capacity = arena.memory.size if store.capacity is None else store.capacity
        yield self._gauge(
            "embedding_cache_utilization", "Share of the capacity in use.", store.nbytes / max(capacity, 1)
        )
        yield self._gauge("embedding_cache_current_bytes", "Bytes kept.", store.nbytes)
        yield self._gauge("embedding_cache_entries", "Contents kept.", len(store))

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        family = kind(PREFIX + name, text, labels=[*self._names, label])
        for key, value in values.items():
            family.add_metric([*self._values, key], value)
        return family
