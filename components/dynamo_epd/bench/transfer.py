# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd bench transfer``: how long an embedding takes from one process to another, by this and by other ways."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from ..contract.errors import ConfigError

WAYS = ("dynamo-epd", "trtllm", "nixl-read", "nixl-write", "local", "socket", "memcpy")
COPY_IN = "dynamo-epd+copy"
_MB = 1 << 20
_BLOCKS = 4
_START_S = 120.0
_BLOCK_S = 120.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``transfer`` to the ``bench`` commands."""
    parser = subparsers.add_parser(
        "transfer",
        help="time moving embeddings between two processes",
        description="Two processes per way, measured in turns; a pair that is not being measured is stopped, because "
        "upstream's agents keep a core busy each. Times run from the encoder's output in one process to the tensor in "
        "the other. dynamo-epd lets the encoder write to registered memory; dynamo-epd+copy counts a copy into it.",
    )
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the results as JSON (to stdout)")
    parser.add_argument("--tls", choices=("unset", "tcp"), default="unset", help="UCX_TLS of the processes")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 2, 8, 32], metavar="MB", help="2^20 bytes")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], metavar="N", help="requests at a time")
    parser.add_argument("--count", type=int, default=60, help="transfers per way, size and concurrency")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, COPY_IN), default=WAYS, help="what to measure")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the medians (needs matplotlib)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table; JSON on request."""
    sizes = [int(size * _MB) for size in args.sizes]
    if any(size < 4096 or size % 4096 or size > 64 * _MB for size in sizes):
        raise ConfigError("--sizes: between 1/256 and 64 MB, in steps of 1/256")
    if args.count < 8 or min(args.concurrency) < 1:
        raise ConfigError("--count must be at least 8, --concurrency at least 1")
    results = measure(args.ways, sizes, args.concurrency, args.count, args.tls)
    # Machines read the standard output, people the table.
    _print_table(results, args.tls, sys.stderr if args.json == "-" else sys.stdout)
    if args.json == "-":
        print(json.dumps({"results": results}))
    elif args.json:
        Path(args.json).write_text(json.dumps({"results": results}, indent=1))
    if args.plot:
        _draw(results, args.tls, args.plot)
    return 0


def measure(
    ways: Sequence[str], sizes: Sequence[int], concurrencies: Sequence[int], count: int, tls: str
) -> list[dict[str, Any]]:
    """Medians and 99th percentiles in ms, and requests per second, for each way, size (bytes) and concurrency."""
    times: dict[tuple[str, int, int], list[float]] = {}
    seconds: dict[tuple[str, int, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        pairs = {way: stack.enter_context(_Pair(way, tls)) for way in ways}
        for block in range(_BLOCKS):
            for size in sizes:
                for lanes in concurrencies:
                    # Another order in each block, so that no way always follows the same one.
                    for way in [*ways[block % len(ways) :], *ways[: block % len(ways)]]:
                        share = max(count // _BLOCKS // lanes, 2) * lanes
                        warmup = max((5 if block else 10) // lanes, 1)
                        got = pairs[way].measure(size, share, warmup, lanes)
                        times.setdefault((way, size, lanes), []).extend(got["times"])
                        seconds.setdefault((way, size, lanes), []).append(got["seconds"] / len(got["times"]))
    return [
        {
            "way": way,
            "bytes": size,
            "concurrency": lanes,
            "median_ms": round(statistics.median(values) * 1e3, 4),
            "p99_ms": round(sorted(values)[min(len(values) - 1, int(len(values) * 0.99))] * 1e3, 4),
            "requests_per_s": round(1 / statistics.median(seconds[way, size, lanes]), 1),
        }
        for (way, size, lanes), values in times.items()
    ]


class _Pair:
    """The two processes of one way; both are stopped while another way is measured."""

    def __init__(self, way: str, tls: str):
        self._way = way
        self._environment = {key: value for key, value in os.environ.items() if key != "UCX_TLS"}
        self._environment["OMP_NUM_THREADS"] = "1"
        if tls != "unset":
            self._environment["UCX_TLS"] = tls
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> _Pair:
        self._errors = tempfile.TemporaryFile("w+")
        try:
            port = self._answer(self._start("encode"), _START_S)
            self._answer(self._start("prefill", port.strip()), _START_S)
        except BaseException:
            self.__exit__()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._errors.close()

    def measure(self, nbytes: int, count: int, warmup: int, concurrency: int) -> dict[str, Any]:
        """``times`` (s) of ``count`` transfers, and the ``seconds`` they took; at least ``warmup`` in each lane before.

        Raises:
            ConfigError: one of the processes failed; what it printed is in the message.
        """
        prefill = self._processes[1]
        self._signal(signal.SIGCONT)
        try:
            job = {"bytes": nbytes, "count": count, "warmup": warmup, "concurrency": concurrency}
            if prefill.stdin is not None:
                prefill.stdin.write(json.dumps(job) + "\n")
                prefill.stdin.flush()
            return dict(json.loads(self._answer(prefill, _BLOCK_S)))
        finally:
            self._signal(signal.SIGSTOP)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        role, *rest = arguments
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.transfer_ways", role, self._way, *rest],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._processes.append(process)
        return process

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _answer(self, process: subprocess.Popen[str], timeout: float) -> str:
        """The next line that a process answers with."""
        out = process.stdout
        line = out.readline() if out is not None and select.select([out], [], [], timeout)[0] else ""
        if not line:
            self._errors.seek(0)
            raise ConfigError(f"a process of {self._way} gave no answer: {self._errors.read().strip()[-1000:]}")
        return line


def _print_table(results: list[dict[str, Any]], tls: str, out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    for lanes in sorted({r["concurrency"] for r in results}):
        rows = [r for r in results if r["concurrency"] == lanes]
        sizes = sorted({r["bytes"] for r in rows})
        table = Table(title=f"UCX_TLS {tls}, {lanes} at a time", caption="median / p99 ms, per second, times trtllm")
        table.add_column("way")
        for size in sizes:
            table.add_column(f"{size / _MB:g} MB", justify="right")
        base = {r["bytes"]: r for r in rows if r["way"] == "trtllm"}
        for way in dict.fromkeys(r["way"] for r in rows):
            cells = []
            for size in sizes:
                row = next(r for r in rows if r["way"] == way and r["bytes"] == size)
                cell = f"{row['median_ms']:.3g} / {row['p99_ms']:.3g}  {row['requests_per_s']:.0f}/s"
                if size in base and way != "trtllm":
                    slower = base[size]
                    ratio = (
                        slower["median_ms"] / row["median_ms"]
                        if lanes == 1
                        else row["requests_per_s"] / slower["requests_per_s"]
                    )
                    cell += f"  {ratio:.1f}x"
                cells.append(cell)
            table.add_row(way, *cells)
        Console(file=out, width=None if out.isatty() else 160).print(table)


def _draw(results: list[dict[str, Any]], tls: str, path: Path) -> None:
    """Median time over size, one line per way, at the lowest concurrency.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'dynamo-epd[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lanes = min(r["concurrency"] for r in results)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for way in dict.fromkeys(r["way"] for r in results):
        rows = sorted((r for r in results if r["way"] == way and r["concurrency"] == lanes), key=lambda r: r["bytes"])
        axes.plot([r["bytes"] / _MB for r in rows], [r["median_ms"] for r in rows], marker="o", label=way)
    axes.set(xscale="log", yscale="log", xlabel="embedding, MB", ylabel="median, ms", title=f"UCX_TLS {tls}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
