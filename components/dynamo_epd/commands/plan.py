# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd plan``: how many workers of each kind, from measured stage times."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ..contract.errors import ConfigError
from ..serve.capacity import STAGES, Goal, Result, Stage, Workload, arena_bytes, plan, sweep

HELP = "size a deployment: numbers of workers and arenas from measured stage times"
_PERCENTILES = (50.0, 95.0, 99.0)
_RATES = tuple(np.linspace(0.2, 1.2, 11))
_SWEPT_REQUESTS = 20_000
_SERVICE: Mapping[Stage, str] = {"encode": "EncodeWorker", "prefill": "PrefillWorker", "decode": "DecodeWorker"}
_UNITS = {
    "qps": (float, "requests per second"),
    "encode_ms": (float, "encode, for one image that is not cached"),
    "prefill_ms": (float, "prefill, for one request"),
    "prefill_hit_ms": (float, "prefill of a request whose images were all seen before (default: no shorter)"),
    "images_per_request": (float, "mean"),
    "hit_rate": (float, "share of images whose embedding the encode worker still has"),
    "decode_ms": (float, "decode of one request, first token to last, on a full worker (default: no decode workers)"),
    "decode_slots": (int, "requests that a decode worker runs at once"),
    "variability": (float, "standard deviation over mean of these times; 0: constant, 1: exponential"),
    "embedding_mb": (float, "of one image"),
    "kv_mb": (float, "KV of one request"),
    "transfer_gb_per_s": (float, "rate at which embeddings and KV move"),
    "transfer_latency_ms": (float, "before they do"),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan``."""
    p = subparsers.add_parser(
        "plan",
        help=HELP,
        description="How many encode, prefill and decode workers a load needs, and how large their arenas, by "
        "simulating the queues in front of them. Times are of one worker, as `bench serve` or /metrics gives them.",
    )
    g = p.add_argument_group("load")
    for f in fields(Workload):
        if f.name in _UNITS:
            kind, text = _UNITS[f.name]
            needed = f.name in ("qps", "encode_ms", "prefill_ms")
            shown = text if needed or "default" in text else f"{text} (default: {f.default})"
            g.add_argument(_flag(f.name), type=kind, required=needed, default=f.default, help=shown)
    g.add_argument(
        "--routing", choices=["round-robin", "least-loaded"], default="round-robin",
        help="how the frontend picks workers (default: %(default)s, as Dynamo's)",
    )  # fmt: skip
    g = p.add_argument_group("goal")
    g.add_argument("--ttft-ms", type=float, help="time to first token that --percentile of requests must not exceed")
    g.add_argument("--percentile", type=float, default=95.0, help="(default: %(default)g)")
    g.add_argument("--max-utilisation", type=float, default=0.8, help="of any stage (default: %(default)g)")
    for stage in STAGES:
        g.add_argument(f"--{stage}-gpus", type=int, default=1, help=f"GPUs of one {stage} worker (default: 1)")
    g.add_argument("--cache-gb", type=float, default=0.0, help="embedding cache of an encode worker (default: 0)")
    g = p.add_argument_group("output")
    g.add_argument("--json", action="store_true", help="print JSON instead of a table")
    g.add_argument("--plot", type=Path, metavar="FILE.png", help="time to first token over requests per second")
    g.add_argument("--requests", type=int, default=50_000, help="to simulate (default: %(default)s)")
    g.add_argument("--seed", type=int, default=0, help="the same seed gives the same plan (default: %(default)s)")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns 0.

    Raises:
        ConfigError: values that make no sense, or a goal that cannot be reached.
    """
    if args.requests < 1000:
        raise ConfigError("--requests must be at least 1000: fewer say nothing about a percentile")
    if args.cache_gb < 0:
        raise ConfigError("--cache-gb must not be negative")
    load = Workload(**{f.name: getattr(args, f.name) for f in fields(Workload)})
    gpus: dict[Stage, int] = {stage: getattr(args, f"{stage}_gpus") for stage in STAGES}
    goal = Goal(args.ttft_ms, args.percentile, args.max_utilisation, gpus)
    result = plan(load, goal, requests=args.requests, seed=args.seed)
    report = _report(load, goal, result, args.cache_gb)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    if args.plot:
        _plot(args.plot, load, goal, result, args.seed)
        if not args.json:
            print(f"plot: {args.plot}")
    return 0


def _report(load: Workload, goal: Goal, result: Result, cache_gb: float) -> dict[str, Any]:
    stages = {
        stage: {
            "workers": found.workers,
            "gpus": found.workers * goal.gpus[stage],
            "utilisation": round(found.utilisation, 3),
            "wait_ms_mean": round(found.wait_ms, 2),
            f"wait_ms_p{goal.percent:g}": round(found.wait_tail_ms, 2),
            "transfer_arena_bytes": arena_bytes(found, cache_gb if stage == "encode" else 0.0),
        }
        for stage, found in result.stages.items()
        if load.load()[stage] > 0
    }
    percentiles = {f"p{p:g}": round(result.percentile(p), 1) for p in sorted({*_PERCENTILES, goal.percent})}
    return {
        "load": asdict(load),
        "stages": stages,
        "gpus": sum(stage["gpus"] for stage in stages.values()),
        "cache_gb": cache_gb,
        "ttft_ms": {"mean": round(float(result.ttft_ms.mean()), 1), **percentiles},
    }


def _print(report: dict[str, Any]) -> None:
    from ..transfer.config import TransferConfig

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    ttft = report["ttft_ms"]
    table = Table(
        title=f"{report['load']['qps']:g} requests per second: {report['gpus']} GPUs",
        caption=f"time to first token, ms: {', '.join(f'{name} {value:g}' for name, value in ttft.items())}",
    )
    titles = ("workers", "GPUs", "utilisation", "mean wait, ms", "wait, ms, at percentile", "arena of each, MiB")
    for title in ("stage", *titles):
        table.add_column(title, justify="left" if title == "stage" else "right")
    for name, stage in report["stages"].items():
        workers, gpus, utilisation, mean, tail, arena = stage.values()
        row = (str(workers), str(gpus), f"{utilisation:.0%}", f"{mean:.1f}", f"{tail:.1f}", f"{arena >> 20}")
        table.add_row(name, *row)
    console.print(table)
    print("for dynamo-epd serve (workers are those of all hosts together):")
    for name, stage in report["stages"].items():
        service, arena, usual = _SERVICE[name], stage["transfer_arena_bytes"], TransferConfig.arena_bytes
        flags = [f"--{service}.ServiceArgs.workers={stage['workers']}"]
        if name == "encode" and report["cache_gb"]:
            flags.append(f"--{service}.multimodal-embedding-cache-capacity-gb={report['cache_gb']:g}")
        # A smaller one than workers have anyway would only be in the way of what the YAML file says.
        if arena > usual:
            flags.append(f"--{service}.transfer-arena-bytes={arena}")
        print(" ", *flags)


def _plot(path: Path, load: Workload, goal: Goal, result: Result, seed: int) -> None:
    """Percentiles of the time to first token of the planned workers, at lower and higher rates than planned for."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'dynamo-epd[plots]'") from None
    workers = {stage: found.workers for stage, found in result.stages.items()}
    rates = [float(load.qps * share) for share in _RATES]
    swept = sweep(load, workers, rates, requests=_SWEPT_REQUESTS, seed=seed)
    figure = Figure(figsize=(7.5, 7), layout="constrained")
    times, use = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    for percent in sorted({*_PERCENTILES, goal.percent}):
        times.plot(rates, [one.percentile(percent) for one in swept], marker="o", label=f"{percent:g}th percentile")
    if goal.ttft_ms is not None:
        times.axhline(goal.ttft_ms, color="black", linestyle=":", label=f"goal, {goal.percent:g}th percentile")
    # At the right end, where queues hardly empty any more, times are many times those at the left.
    times.set_yscale("log")
    times.set_ylabel("time to first token, ms")
    used = [stage for stage in STAGES if load.load()[stage] > 0]
    times.set_title(", ".join(f"{workers[stage]} {stage}" for stage in used) + " workers")
    for stage in used:
        use.plot(rates, [one.stages[stage].utilisation * 100 for one in swept], marker=".", label=stage)
    use.set_ylim(0, 105)
    use.set_ylabel("utilisation, %")
    use.set_xlabel("requests per second")
    for axes in (times, use):
        axes.axvline(load.qps, color="grey", linestyle="--", linewidth=1, label="planned rate")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
