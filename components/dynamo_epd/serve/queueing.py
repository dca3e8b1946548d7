# SPDX-License-Identifier: Apache-2.0
"""Queues in a row, simulated exactly: no approximation but the finite number of requests.

A stage's workers serve in order of arrival, and nothing flows back, so a stage can be worked out at once from the times
at which requests reach it: by Lindley's recursion for one server, by a heap of the servers' next free times for many.
"""

from __future__ import annotations

import heapq
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Routing = Literal["round-robin", "least-loaded"]


class Served(NamedTuple):
    """What became of the jobs of one stage, in the order in which they were given. Seconds.

    Attributes:
        start: when each began to be served.
        end: when it was done.
        worker: who served it, from 0.
    """

    start: Array
    end: Array
    worker: npt.NDArray[np.int64]


def serve(arrival: Array, service: Array, workers: int, *, slots: int = 1, routing: Routing = "least-loaded") -> Served:
    """Serve jobs in order of arrival.

    Args:
        arrival: when each job comes, in any order.
        service: how long each takes once it has begun.
        slots: jobs that a worker serves at once.
        routing: ``round-robin`` deals jobs to workers in turn, whatever they are busy with. ``least-loaded`` gives each
            to the worker that can begin it first, which is the same as one queue for all.
    """
    order = np.argsort(arrival, kind="stable")
    start = np.empty_like(arrival)
    worker = np.empty(len(arrival), np.int64)
    if routing == "round-robin":
        for number in range(workers):
            mine = order[number::workers]
            start[mine] = (_one if slots == 1 else _many)(arrival[mine], service[mine], slots)[0]
            worker[mine] = number
    else:
        start[order], server = _many(arrival[order], service[order], workers * slots)
        worker[order] = server // slots
    return Served(start, start + service, worker)


def fullest(begin: Array, end: Array, size: Array, worker: npt.NDArray[np.int64]) -> float:
    """The peak of ``held`` of the worker that holds most."""
    order = np.argsort(worker, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(worker[order])) + 1)
    return max((held(begin[mine], end[mine], size[mine])[1] for mine in groups), default=0.0)


def held(begin: Array, end: Array, size: Array) -> tuple[float, float]:
    """Memory that is taken at ``begin`` and given back at ``end``: its mean over time, and its peak.

    The mean is over the time from the first ``begin`` to the last.
    """
    if not len(begin):
        return 0.0, 0.0
    times = np.concatenate([begin, end])
    order = np.argsort(times, kind="stable")
    level = np.cumsum(np.concatenate([size, -size])[order])
    times = times[order]
    until = begin.max()
    spans = np.diff(np.minimum(times, until))
    length = float(until - times[0])
    return (float(level[:-1] @ spans) / length if length else 0.0), float(level.max())


def _one(arrival: Array, service: Array, _: int) -> tuple[Array, npt.NDArray[np.int64]]:
    """Start times at one server, ends being ``end[i] = max(arrival[i], end[i - 1]) + service[i]``, without the loop."""
    before = np.cumsum(service) - service
    start = np.maximum.accumulate(arrival - before) + before
    return np.maximum(start, arrival), np.zeros(len(arrival), np.int64)


def _many(arrival: Array, service: Array, servers: int) -> tuple[Array, npt.NDArray[np.int64]]:
    """Start times at ``servers`` servers with one queue, and the server of each."""
    free = [(0.0, server) for server in range(servers)]
    start = np.empty_like(arrival)
    who = np.empty(len(arrival), np.int64)
    for i, (now, takes) in enumerate(zip(arrival.tolist(), service.tolist(), strict=True)):
        idle, server = free[0]
        begin = max(now, idle)
        heapq.heapreplace(free, (begin + takes, server))
        start[i], who[i] = begin, server
    return start, who
