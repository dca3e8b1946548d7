# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd bench plan``: what ``dynamo-epd plan`` predicts for one worker of each kind, beside what they do.

Requests with a new picture and a new text are sent one at a time, then at random moments at a given rate. The workers'
own ``/metrics`` say how long a request kept each of them busy, waiting excluded; from that the queues are simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..contract.errors import ConfigError, EpdError
from ..demo.toy_data import COLOUR, TOY_MODEL, Picture, random_picture
from ..serve.capacity import Workload, simulate
from ..serve.client import chat, open_client, user
from ..serve.stack import Stack, epd_services
from .serve_workload import SIDE, letters

MODEL_NAME = "toy"
_ENCODE, _LANGUAGE = "encode", "agg"
_STAGES = {_ENCODE: ("digest", "decode", "encode", "offer"), _LANGUAGE: ("prefill",)}
_EMBEDDING_MB = 0.01


@dataclass(frozen=True)
class Measured:
    """What some requests took. Milliseconds, means over the requests.

    Attributes:
        encode_ms, prefill_ms: that a request kept the encode and the agg worker busy.
        ttft_ms: from the request to its first token; ``ttft_std_ms`` its standard deviation.
        seconds: from the first request to the last answer.
    """

    requests: int
    encode_ms: float
    prefill_ms: float
    ttft_ms: float
    ttft_std_ms: float
    seconds: float


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan`` to the ``bench`` commands."""
    p = subparsers.add_parser(
        "plan",
        help="what `plan` predicts for one worker of each kind, beside what they do",
        description="A frontend, an encode and an agg worker on this machine, each of which takes one request at a "
        "time. Exit status 1 where the time to first token under load is not as predicted from the times of the "
        "stages in the same load. On a machine whose CPUs others use too, the prediction from times without load "
        "says little: workers then slow each other down.",
    )
    p.add_argument("--requests", type=int, default=300, metavar="N", help="under load (default: %(default)s)")
    p.add_argument("--alone", type=int, default=30, metavar="N", help="one at a time (default: %(default)s)")
    p.add_argument("--utilisation", type=float, default=0.5, help="of the busiest worker (default: %(default)s)")
    p.add_argument("--prompt-tokens", type=int, default=1500, metavar="N", help="of text (default: %(default)s)")
    p.add_argument("--tolerance", type=float, default=0.25, help="share of the prediction (default: %(default)s)")
    p.add_argument("--deadline", type=float, default=240.0, metavar="S", help="seconds until the stack must be ready")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, predict and compare. Exit status 1 where they differ by more than the tolerance.

    Raises:
        ConfigError: an option makes no sense.
        EpdError: the stack did not start, or a request failed.
    """
    if min(args.requests, args.alone) < 2:
        raise ConfigError("--requests and --alone must be at least 2")
    if not 0 < args.utilisation < 1:
        raise ConfigError("--utilisation must lie between 0 and 1: a busier worker's queue never ends")
    if not 1 <= args.prompt_tokens <= 3500:
        raise ConfigError("--prompt-tokens must lie between 1 and 3500")
    alone, loaded, qps = asyncio.run(_measure(args))
    report = compare(alone, loaded, qps)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    return 0 if abs(report["ratio"] - 1) <= args.tolerance else 1


def compare(alone: Measured, loaded: Measured, qps: float) -> dict[str, Any]:
    """The report: what was measured, and the time to first token that ``plan`` gives from the times of the stages.

    Args:
        alone: requests that met nobody. The time that they spent in no stage, between the processes, is taken as given.
        loaded: requests that came at random, ``qps`` a second.

    Returns:
        ``ratio`` is measured over predicted time to first token under load, from the stages' times in that load.
    """
    elsewhere = max(0.0, alone.ttft_ms - alone.encode_ms - alone.prefill_ms)

    def predicted(times: Measured) -> dict[str, float]:
        load = Workload(
            qps=qps,
            encode_ms=times.encode_ms,
            prefill_ms=times.prefill_ms,
            variability=min(1.0, alone.ttft_std_ms / alone.ttft_ms),
            embedding_mb=_EMBEDDING_MB,
            transfer_latency_ms=elsewhere,
        )
        if max(load.load().values()) >= 1:
            return {"ttft_ms": math.inf}
        found = simulate(load, {"encode": 1, "prefill": 1, "decode": 1})
        return {
            "ttft_ms": round(float(found.ttft_ms.mean()), 1),
            **{f"{name}_utilisation": round(found.stages[name].utilisation, 3) for name in ("encode", "prefill")},
        }

    from_load = predicted(loaded)
    return {
        "qps": round(qps, 3),
        "alone": asdict(alone),
        "loaded": asdict(loaded),
        "predicted_from_alone": predicted(alone),
        "predicted_from_loaded": from_load,
        "ratio": round(loaded.ttft_ms / from_load["ttft_ms"], 3),
    }


async def _measure(args: argparse.Namespace) -> tuple[Measured, Measured, float]:
    engine = {
        "kv_cache_config": {"enable_block_reuse": True, "tokens_per_block": 32, "max_tokens": 1 << 15},
        "max_seq_len": 4096,
        "max_num_tokens": 4096,
        "max_batch_size": 1,
    }
    services = epd_services(
        TOY_MODEL,
        MODEL_NAME,
        topology="e-pd",
        engine_args=("--engine", "reference", "--override-engine-args", json.dumps(engine)),
        encode_args=("--encode-threads", "1", "--encode-batch-items", "1"),
    )
    rng = np.random.default_rng(0)
    with Stack(services, MODEL_NAME) as stack:
        stack.wait_ready(args.deadline, probe=user(Picture("white", "black", "square").draw(), COLOUR.text))
        async with open_client() as http:

            async def ask() -> float:
                picture = random_picture(rng, SIDE).draw()
                picture.putpixel((0, 0), tuple(rng.integers(0, 256, 3).tolist()))
                message = user(letters(rng, args.prompt_tokens), picture, COLOUR.text)
                answer = await chat(http, stack.url, MODEL_NAME, [message], max_tokens=1, timeout=600)
                if answer.status != 200:
                    stack.check()
                    raise EpdError(f"a request failed with {answer.status}: {answer.text}")
                return answer.ttft_ms

            async def one_by_one(count: int) -> list[float]:
                return [await ask() for _ in track(range(count), "one at a time", console=Console(stderr=True))]

            async def at_random(qps: float) -> list[float]:
                sent = []
                for _ in track(range(args.requests), "at random", console=Console(stderr=True)):
                    sent.append(asyncio.create_task(ask()))
                    await asyncio.sleep(float(rng.exponential(1 / qps)))
                return list(await asyncio.gather(*sent))

            await one_by_one(3)
            alone = await _observed(stack, lambda: one_by_one(args.alone))
            qps = args.utilisation * 1e3 / max(alone.encode_ms, alone.prefill_ms)
            loaded = await _observed(stack, lambda: at_random(qps))
    return alone, loaded, args.requests / loaded.seconds


async def _observed(stack: Stack, work: Callable[[], Any]) -> Measured:
    """Run ``work``, which gives a time to first token per request, and read off what the workers did meanwhile."""
    before, start = _busy_seconds(stack), time.perf_counter()
    ttfts: list[float] = await work()
    seconds = time.perf_counter() - start
    busy = {name: 1e3 * (after - before[name]) / len(ttfts) for name, after in _busy_seconds(stack).items()}
    mean, deviation = statistics.fmean(ttfts), statistics.stdev(ttfts)
    numbers = (busy[_ENCODE], busy[_LANGUAGE], mean, deviation, seconds)
    return Measured(len(ttfts), *(round(number, 3) for number in numbers))


def _busy_seconds(stack: Stack) -> Mapping[str, float]:
    found = {}
    for name, stages in _STAGES.items():
        samples = stack.metrics(name)
        found[name] = sum(
            samples.get(f"dynamo_component_mm_stage_seconds_sum{ {'stage': stage} }", 0.0) for stage in stages
        )
    return found


def _print(report: Mapping[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    table = Table(title=f"{report['qps']:g} requests per second, one worker of each kind; means in ms")
    for title in ("", "encode", "prefill", "time to first token"):
        table.add_column(title, justify="left" if not title else "right")
    for name in ("alone", "loaded"):
        row = report[name]
        table.add_row(f"measured, {name}", *(f"{row[key]:.1f}" for key in ("encode_ms", "prefill_ms", "ttft_ms")))
    for name in ("alone", "loaded"):
        row = report[f"predicted_from_{name}"]
        use = [
            f"{row[key]:.0%} busy" if key in row else "full" for key in ("encode_utilisation", "prefill_utilisation")
        ]
        table.add_row(f"predicted from {name}", *use, f"{row['ttft_ms']:.1f}")
    console.print(table)
    print(f"measured under load / predicted from the stages under load: {report['ratio']:.2f}")
