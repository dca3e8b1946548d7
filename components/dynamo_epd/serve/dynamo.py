# SPDX-License-Identifier: Apache-2.0
"""The ``dynamo`` command: ``dynamo serve ...``, as it was before Dynamo 1.0 dropped it.

Installed beside another program of this name, it steps back and says so.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from ..commands import serve
from ..contract.errors import EpdError

_OURS = "dynamo-epd"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo`` and return its exit status; 2 where another program has a better right to the name."""
    other = _namesake()
    if other:
        print(f"dynamo: {other}, which this command would hide; use `{_OURS} serve` instead", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(
        prog="dynamo",
        description="The graph launcher that Dynamo 1.x no longer has.",
        epilog=f"Everything else is `{_OURS} ...`, or `python -m dynamo.frontend`.",
    )
    serve.add_parser(parser.add_subparsers(metavar="COMMAND", required=True))
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except EpdError as error:
        print(f"dynamo: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _namesake() -> str:
    """Who else provides ``dynamo``: another installed distribution, or a program further along ``PATH``; else empty."""
    for script in entry_points(group="console_scripts", name="dynamo"):
        if script.dist is not None and script.dist.name.replace("_", "-").lower() != _OURS:
            return f"{script.dist.name} {script.dist.version} has a command of this name"
    ours = Path(sys.argv[0]).resolve()
    for folder in os.get_exec_path():
        program = Path(folder, "dynamo")
        if program.is_file() and os.access(program, os.X_OK) and program.resolve() != ours and not _is_ours(program):
            return f"there is another one at {program}"
    return ""


def _is_ours(program: Path) -> bool:
    """Whether it is a script that pip made for this module, in this or another environment."""
    try:
        return __name__.encode() in program.read_bytes()[:4096]
    except OSError:
        return False
