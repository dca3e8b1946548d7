# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd bench serve``: what block reuse is worth on the real stack, over HTTP, and that it costs no answer."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..contract.errors import ConfigError

_QUICK = {"conversations": 16, "images": 4, "repeat": 2, "decode_tokens": 32, "worker_requests": 60}
_FULL = {"conversations": 200, "images": 20, "repeat": 5, "decode_tokens": 128, "worker_requests": 400}
_LEVELS = (1, 2, 4, 8)
_CURVE_REQUESTS = 24
_WIDTH = 110  # of the tables, where the output is no terminal


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``serve`` to the ``bench`` commands."""
    p = subparsers.add_parser(
        "serve",
        help="load the real stack with block reuse on, off and keyed by placeholders",
        description="A frontend and workers on this machine, one stack after the other, and conversations about a "
        "pool of pictures with prompts of 1,500 to 3,000 tokens. Every answer is compared with plain transformers'. "
        "Then the decode speed of the reference engine beside plain transformers', and the workers' own cost.",
    )
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the results as JSON (to stdout)")
    p.add_argument("--plots", type=Path, metavar="DIR", help="draw the two curves into DIR (needs matplotlib)")
    p.add_argument("--quick", action="store_true", help="two minutes: few conversations, few repetitions")
    p.add_argument("--topology", choices=["e-pd", "e-p-d"], default="e-pd", help="(default: %(default)s)")
    p.add_argument("--concurrency", type=int, default=4, metavar="N", help="conversations at a time")
    p.add_argument("--turns", type=int, default=3, choices=[1, 2, 3], help="requests of a conversation")
    for name, text in (
        ("conversations", "conversations held on each stack"),
        ("images", "pictures in the pool"),
        ("repeat", "measurements of each point and rounds of decoding"),
        ("decode_tokens", "length of the decoded answers"),
        ("worker_requests", "requests of each kind for the workers' own cost"),
    ):
        flag = f"--{name.replace('_', '-')}"
        p.add_argument(flag, type=int, metavar="N", help=f"{text} (default: {_FULL[name]}, quick: {_QUICK[name]})")
    p.add_argument("--deadline", type=float, default=240.0, metavar="S", help="seconds until a stack must be ready")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print tables, JSON on request. Exit status 1 where a right key gave a wrong answer."""
    for name, value in (_QUICK if args.quick else _FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if args.concurrency < 1:
        raise ConfigError("--concurrency must be at least 1")
    if not 2 <= args.images <= 1000:
        raise ConfigError("--images must be between 2 and 1000: with one picture there is none to mistake it for")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Torch's threads would spin while they wait, here and in the workers, on the cores that others compute on.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    progress_console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console) as progress:
        report = measure(args, progress)
    console = Console()
    if args.json == "-":
        print(json.dumps(report))
    else:
        if not console.is_terminal:
            console = Console(width=_WIDTH)
        for table in _tables(report):
            console.print(table)
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1))
    if args.plots:
        from .serve_plots import draw

        for path in draw(report, args.plots):
            progress_console.print(f"wrote {path}")
    right = all(report[side]["correct"] == report[side]["total"] for side in ("reuse_on", "reuse_off"))
    return 0 if right else 1


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The report, whose keys are the sides of ``serve_load.SIDES`` and one for each other measurement."""
    # Heavy imports, and only now: --help shall not wait for them.
    from .serve_decode import decode_speeds
    from .serve_load import SIDES, by_concurrency, by_shared_prefix, converse, serving
    from .serve_workers import worker_costs
    from .serve_workload import Workload

    workload = Workload(args.images, args.turns)
    advance = _bar(progress, "plain transformers' answers", args.conversations)
    conversations = workload.conversations(args.conversations, advance)
    report: dict[str, Any] = {"ttft_by_shared_prefix": {}, "requests_per_s_by_concurrency": {}}
    for side in SIDES:
        advance = _bar(progress, f"{side}: conversations", args.conversations * args.turns)
        with serving(side, args.topology, args.deadline) as stack:
            report[side] = asyncio.run(converse(stack, conversations, args.concurrency, advance))
            if side == "placeholder":
                continue
            advance = _bar(progress, f"{side}: shared prefixes", 7)
            curve = asyncio.run(by_shared_prefix(stack, workload.urls[0], args.repeat, advance))
            report["ttft_by_shared_prefix"][side] = curve
            advance = _bar(progress, f"{side}: concurrency", len(_LEVELS))
            some = [conversation[-1:] for conversation in conversations[:_CURVE_REQUESTS]]
            report["requests_per_s_by_concurrency"][side] = asyncio.run(by_concurrency(stack, some, _LEVELS, advance))
    advance = _bar(progress, "decode speed", args.repeat + 1)
    for way, speeds in decode_speeds(args.decode_tokens, args.repeat, advance).items():
        report[way] = {"decode_tokens_per_s": speeds}
    report |= worker_costs(args.worker_requests, _bar(progress, "workers without an engine", 4))
    return report


def _bar(progress: Progress, description: str, total: int) -> Callable[[], None]:
    if not progress.console.is_terminal:  # where bars are shown at the end only
        progress.console.print(f"{description} ...")
    task = progress.add_task(description, total=total)
    return lambda: progress.advance(task)


def _tables(report: dict[str, Any]) -> list[Table]:
    on, off = report["reuse_on"], report["reuse_off"]
    sides = Table(title="conversations", title_justify="left")
    for name in ("", "mean TTFT ms", "median TTFT ms", "requests/s", "cached", "right answers"):
        sides.add_column(name, justify="left" if not name else "right")
    for side in ("reuse_on", "reuse_off", "placeholder"):
        row = report[side]
        wrong = row["correct"] < row["total"]
        sides.add_row(
            side.replace("_", " "),
            f"{row['ttft_ms_mean']:.1f}",
            f"{row['ttft_ms_median']:.1f}",
            f"{row['requests_per_s']:.2f}",
            f"{row['cached_share']:.1%}",
            f"[red]{row['correct']} of {row['total']}[/red]" if wrong else f"{row['correct']} of {row['total']}",
        )
    sides.caption = (
        f"prompts of {on['prompt_tokens'][0]} to {on['prompt_tokens'][1]} tokens; on against off: mean TTFT "
        f"{off['ttft_ms_mean'] / on['ttft_ms_mean']:.1f} times lower, requests/s "
        f"{on['requests_per_s'] / off['requests_per_s']:.1f} times higher"
    )
    decode = Table(title="decode tokens/s", title_justify="left")
    for name in ("batch", "transformers", "reference engine", "ratio"):
        decode.add_column(name, justify="right")
    plain, own = (report[way]["decode_tokens_per_s"] for way in ("transformers", "reference"))
    for batch in plain:
        decode.add_row(batch, f"{plain[batch]:.0f}", f"{own[batch]:.0f}", f"{own[batch] / plain[batch]:.2f}")
    workers = Table(title="workers", title_justify="left")
    workers.add_column("")
    workers.add_column("", justify="right")
    hit, rates = report["encode_hit"], report["no_engine"]["requests_per_s_per_core"]
    workers.add_row("encode, image known, ms", f"{hit['worker_ms']:.2f}")
    workers.add_row("known image adds, encode and agg, ms", f"{hit['added_ms']:.2f}")
    workers.add_row("encode, requests/s per core", f"{rates['encode']:.0f}")
    workers.add_row("agg without engine, requests/s per core", f"{rates['agg']:.0f}")
    workers.add_row("agg without engine, text, requests/s per core", f"{rates['agg_text']:.0f}")
    return [sides, decode, workers]
