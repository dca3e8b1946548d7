# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd doctor``: one table of what workers depend on, with a remedy for every line that is not green."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

from ..doctor.finding import Finding, is_red

_WIDTH = 150  # of the table, where the output is no terminal


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, the model and the engine, with a remedy for each problem",
        description="Check what workers depend on. Exit status 1 if a line is red.",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face model directory")
    parser.add_argument("--engine-args", "--extra-engine-args", type=Path, metavar="FILE", help="engine YAML")
    parser.add_argument("--override-engine-args", metavar="JSON", help="engine keys that override the YAML")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..doctor import examine

    with _stdout_to_stderr() if args.json else nullcontext():
        findings = examine(args.model, args.engine_args, args.override_engine_args)
    if args.json:
        print(json.dumps({"ok": not is_red(findings), "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        _print(findings)
    return 1 if is_red(findings) else 0


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep what libraries write to standard output, UCX's warnings for one, out of the JSON."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _print(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = Text(finding.status, style=f"bold {finding.status}")
        table.add_row(mark, Text(finding.check), Text(finding.reason), Text(finding.remedy))
    console.print(table)
    bad = sum(f.status == "red" for f in findings)
    console.print(f"{bad} red, {sum(f.status == 'yellow' for f in findings)} yellow, {len(findings)} checks")
