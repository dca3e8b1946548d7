# SPDX-License-Identifier: Apache-2.0
"""From measured stage times to the number of workers of each kind and the sizes of their arenas.

Requests come at random (Poisson). Each has images, some of which the encode worker knows already (hits) and need no
encoder. One encode worker encodes all other images of a request, one after the other; a request without any skips that
queue. Its embeddings then move to a prefill worker, where it waits for its turn; its KV moves to a decode worker, where
it takes a slot and gives its first token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..contract.errors import ConfigError
from .queueing import Array, Routing, Served, fullest, serve

Stage = Literal["encode", "prefill", "decode"]
Mask = npt.NDArray[np.bool_]
STAGES: tuple[Stage, ...] = ("encode", "prefill", "decode")
MB = 1e6
_ROUND = 64 << 20
_HEADROOM = 1.25
_LARGEST = 2_000_000
_SETTLED = (0.2, 0.98)
"""The part of the simulated time that counts: after the queues have filled, before the last requests run dry."""


@dataclass(frozen=True)
class Workload:
    """What comes in, and how long one worker takes for it. Milliseconds, megabytes (10^6), requests per second.

    Attributes:
        images_per_request: mean; a request has the whole number below or above.
        hit_rate: share of images that encode need not encode, because it has their embedding.
        encode_ms: for one image.
        prefill_ms: for one request.
        prefill_hit_ms: for a request all of whose images are hits, so that its KV blocks are reused; None: no shorter.
        decode_ms: from the first token of a request to its last, with ``decode_slots`` requests on the worker; 0 leaves
            decode out.
        variability: standard deviation over mean of all these times (gamma distributed); 0 makes them constant, 1
            exponential.
        embedding_mb: of one image. kv_mb: of one request.
        transfer_gb_per_s, transfer_latency_ms: how fast embeddings and KV move.
    """

    qps: float
    encode_ms: float
    prefill_ms: float
    images_per_request: float = 1.0
    hit_rate: float = 0.0
    prefill_hit_ms: float | None = None
    decode_ms: float = 0.0
    decode_slots: int = 32
    variability: float = 0.5
    embedding_mb: float = 4.0
    kv_mb: float = 0.0
    transfer_gb_per_s: float = 10.0
    transfer_latency_ms: float = 0.5
    routing: Routing = "round-robin"

    def __post_init__(self) -> None:
        for name in ("qps", "encode_ms", "prefill_ms", "transfer_gb_per_s", "decode_slots"):
            _require(getattr(self, name) > 0, name, "must be above 0")
        for name in ("images_per_request", "decode_ms", "variability", "embedding_mb", "kv_mb", "transfer_latency_ms"):
            _require(getattr(self, name) >= 0, name, "must not be negative")
        _require(0 <= self.hit_rate <= 1, "hit_rate", "must lie between 0 and 1")
        _require(self.prefill_hit_ms is None or self.prefill_hit_ms > 0, "prefill_hit_ms", "must be above 0")

    def load(self) -> dict[Stage, float]:
        """How many workers each stage keeps busy on average."""
        few = math.floor(self.images_per_request)
        more = self.images_per_request - few
        reused = ((1 - more) * self.hit_rate**few if few else 0.0) + more * self.hit_rate ** (few + 1)
        prefill_ms = reused * self.reused_ms + (1 - reused) * self.prefill_ms
        return {
            "encode": self.qps * self.images_per_request * (1 - self.hit_rate) * self.encode_ms / 1e3,
            "prefill": self.qps * prefill_ms / 1e3,
            "decode": self.qps * self.decode_ms / 1e3 / self.decode_slots,
        }

    @property
    def reused_ms(self) -> float:
        """Milliseconds of prefill where all images are hits."""
        return self.prefill_ms if self.prefill_hit_ms is None else self.prefill_hit_ms


@dataclass(frozen=True)
class StageResult:
    """One stage in steady state.

    Attributes:
        workers: how many.
        utilisation: share of their time (of their slots, for decode) in use.
        wait_ms: mean wait, over requests that use the stage. wait_tail_ms: at the chosen percentile.
        arena: most bytes that the fullest worker's arena held of what is on the move, caches not counted.
    """

    workers: int
    utilisation: float
    wait_ms: float
    wait_tail_ms: float
    arena: float


@dataclass(frozen=True)
class Result:
    """A simulated deployment. ``ttft_ms`` holds the time to first token of each request after the warm-up."""

    stages: Mapping[Stage, StageResult]
    ttft_ms: Array

    def percentile(self, percent: float) -> float:
        """Milliseconds to the first token that ``percent`` of requests do not exceed."""
        return float(np.percentile(self.ttft_ms, percent))


def simulate(
    load: Workload, workers: Mapping[Stage, int], *, requests: int = 50_000, percent: float = 95.0, seed: int = 0
) -> Result:
    """Run ``requests`` requests (more where they are over before a steady state) through the stages.

    Raises:
        ConfigError: a steady state would take more than two million requests.
    """
    alone = load.encode_ms * math.ceil(load.images_per_request) + load.prefill_ms + load.decode_ms
    requests = max(requests, math.ceil(load.qps * alone / 1e3 * 10))
    _require(requests <= _LARGEST, "decode_ms", f"times qps needs {requests} requests to simulate; that is too many")
    rng = np.random.default_rng(seed)

    def times(mean_ms: float, count: Array) -> Array:
        """Seconds that ``count`` jobs in a row take: a sum of gamma times is one of as many times the shape."""
        if load.variability == 0:
            return count * mean_ms / 1e3
        return rng.gamma(count / load.variability**2, mean_ms / 1e3 * load.variability**2)

    def move(megabytes: Array) -> Array:
        return np.where(megabytes > 0, load.transfer_latency_ms / 1e3 + megabytes / 1e3 / load.transfer_gb_per_s, 0.0)

    arrive = np.cumsum(rng.exponential(1 / load.qps, requests))
    few = math.floor(load.images_per_request)
    images: npt.NDArray[np.int64] = few + (rng.random(requests) < load.images_per_request - few)
    misses = rng.binomial(images, 1 - load.hit_rate).astype(np.float64)
    once = np.ones(requests)

    some = misses > 0
    encode = serve(arrive[some], times(load.encode_ms, misses[some]), workers["encode"], routing=load.routing)
    encoded = arrive.copy()
    encoded[some] = encode.end
    pixels = np.asarray(images * load.embedding_mb * MB, np.float64)
    reach_prefill = encoded + move(pixels / MB)
    takes = np.where((images > 0) & ~some, times(load.reused_ms, once), times(load.prefill_ms, once))
    prefill = serve(reach_prefill, takes, workers["prefill"], routing=load.routing)
    kv = load.kv_mb * MB * once
    reach_decode = prefill.end + move(kv / MB)
    decode = Served(reach_decode, reach_decode, np.zeros(requests, np.int64))
    if load.decode_ms:
        takes = times(load.decode_ms, once)
        decode = serve(reach_decode, takes, workers["decode"], slots=load.decode_slots, routing=load.routing)

    first, last = arrive[-1] * _SETTLED[0], arrive[-1] * _SETTLED[1]
    settled = (arrive >= first) & (arrive <= last)

    def stage(name: Stage, served: Served, reach: Array, counted: Mask, slots: int, arena: float) -> StageResult:
        wait = (served.start - reach)[counted] * 1e3
        busy = (served.end - served.start)[counted].sum()
        return StageResult(
            workers=workers[name],
            utilisation=float(busy / ((last - first) * workers[name] * slots)),
            wait_ms=float(wait.mean()) if len(wait) else 0.0,
            wait_tail_ms=float(np.percentile(wait, percent)) if len(wait) else 0.0,
            arena=arena,
        )

    new = (misses * load.embedding_mb * MB)[some]
    offered = fullest(encode.end, reach_prefill[some], new, encode.worker)
    received = fullest(
        np.concatenate([encoded, prefill.end]),
        np.concatenate([prefill.end, decode.start]),
        np.concatenate([pixels, kv]),
        np.concatenate([prefill.worker, prefill.worker]),
    )
    landing = fullest(prefill.end, reach_decode, kv, decode.worker)
    return Result(
        {
            "encode": stage("encode", encode, arrive[some], settled[some], 1, offered),
            "prefill": stage("prefill", prefill, reach_prefill, settled, 1, received),
            "decode": stage("decode", decode, reach_decode, settled, load.decode_slots, landing),
        },
        (decode.start - arrive)[settled] * 1e3,
    )


@dataclass(frozen=True)
class Goal:
    """What a deployment must reach.

    Attributes:
        ttft_ms: that ``percent`` of requests do not exceed; None: no such goal.
        utilisation: that no stage exceeds.
        gpus: of one worker of each kind; the search prefers cheap workers.
    """

    ttft_ms: float | None = None
    percent: float = 95.0
    utilisation: float = 0.8
    gpus: Mapping[Stage, int] = field(default_factory=lambda: {"encode": 1, "prefill": 1, "decode": 1})

    def __post_init__(self) -> None:
        _require(self.ttft_ms is None or self.ttft_ms > 0, "ttft_ms", "must be above 0")
        _require(0 < self.percent < 100, "percentile", "must lie between 0 and 100")
        _require(0 < self.utilisation < 1, "max_utilisation", "must lie between 0 and 1")
        for name, gpus in self.gpus.items():
            _require(gpus >= 1, f"{name}_gpus", "must be at least 1")

    def met(self, result: Result) -> bool:
        return self.ttft_ms is None or result.percentile(self.percent) <= self.ttft_ms


def plan(load: Workload, goal: Goal, *, requests: int = 50_000, seed: int = 0) -> Result:
    """The fewest workers that reach ``goal``, found from below.

    Every stage starts with what its load needs at ``goal.utilisation``. As long as the time to first token is too long,
    the stage whose queue costs most per GPU gets more; workers that turn out not to be needed are taken away again.

    Raises:
        ConfigError: not even workers without end would reach the goal.
    """
    used = [stage for stage in STAGES if load.load()[stage] > 0]
    least = {stage: max(1, math.ceil(load.load()[stage] / goal.utilisation)) for stage in STAGES}

    def run(workers: Mapping[Stage, int]) -> Result:
        return simulate(load, workers, requests=requests, percent=goal.percent, seed=seed)

    idle = run({stage: count * 10 + 100 for stage, count in least.items()})
    if not goal.met(idle):
        raise ConfigError(
            f"no number of workers gives {goal.percent:g}% of requests their first token within {goal.ttft_ms:g} ms: "
            f"with no queue at all it takes {idle.percentile(goal.percent):.0f} ms"
        )
    workers = dict(least)
    result = run(workers)
    while not goal.met(result):
        worst = max(used, key=lambda stage: result.stages[stage].wait_tail_ms / (goal.gpus[stage] * workers[stage]))
        workers[worst] += max(1, workers[worst] // 20)
        result = run(workers)
    for stage in sorted(used, key=lambda stage: -goal.gpus[stage]):
        while workers[stage] > least[stage]:
            fewer = run({**workers, stage: workers[stage] - 1})
            if not goal.met(fewer):
                break
            workers[stage], result = workers[stage] - 1, fewer
    return result


def arena_bytes(result: StageResult, cache_gb: float) -> int:
    """What to give to ``--transfer-arena-bytes``: the peak with a quarter more, and the cache, which lies there too."""
    return math.ceil((result.arena * _HEADROOM + cache_gb * (1 << 30)) / _ROUND) * _ROUND


def sweep(
    load: Workload, workers: Mapping[Stage, int], rates: Sequence[float], *, requests: int, seed: int
) -> list[Result]:
    """The same workers at other rates of requests, in requests per second."""
    return [simulate(replace(load, qps=qps), workers, requests=requests, seed=seed) for qps in rates]


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise ConfigError(f"--{name.replace('_', '-')} {problem}")
