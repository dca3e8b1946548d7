# SPDX-License-Identifier: Apache-2.0
"""The ``dynamo-epd`` command: finds a subcommand's module and runs it, importing nothing else.

A subcommand is a module with ``add_parser(subparsers)``, which adds one parser under the name it has in ``COMMANDS``
and ends with ``set_defaults(run=f)``; ``f`` takes the parsed arguments and returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from . import __version__
from .contract.errors import EpdError

PROG = "dynamo-epd"
WORKER = "worker"


class Command(NamedTuple):
    """One subcommand: the module (below this package) that adds its parser, and its line in the help."""

    module: str
    help: str


COMMANDS: Mapping[str, Command | Mapping[str, Command]] = {
    "demo": Command("demo.run", "start a frontend and workers here, ask about images, check every answer"),
    "serve": Command("commands.serve", "run a graph of services on this host, or this host's part of it"),
    "plan": Command("commands.plan", "size a deployment: numbers of workers and arenas from measured stage times"),
    "doctor": Command(
        "commands.doctor", "check this machine, the model and the engine, with a remedy for each problem"
    ),
    "keys": Command("commands.keys", "print the KV block keys of a prompt"),
    "explain": Command("commands.explain", "say why two requests do, or do not, share KV blocks"),
    "layout": Command("commands.layout", "show where each media item's tokens sit in a prompt"),
    "bench": {
        "layout": Command("bench.layout", "time the prompt layout and the block keys"),
        "transfer": Command("bench.transfer", "time moving embeddings between two processes"),
        "encode": Command(
            "bench.encode", "images a second of an encode worker, one request at a time and many at once"
        ),
        "prefill": Command("bench.prefill", "time to first token with block reuse on and off"),
        "plan": Command("bench.plan", "what `plan` predicts for one worker of each kind, beside what they do"),
        "serve": Command("bench.serve", "load the real stack with block reuse on, off and keyed by placeholders"),
    },
}
"""Every subcommand; a nested mapping is a group (``dynamo-epd bench layout``)."""

GROUP_HELP = {"bench": "measurements"}


def _add(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    commands: Mapping[str, Command | Mapping[str, Command]],
    argv: Sequence[str],
) -> None:
    """Adds all of ``commands``: in full the one that ``argv`` names, the others by their help line alone."""
    named = next((arg for arg in argv if not arg.startswith("-")), None)
    for name, command in commands.items():
        if isinstance(command, Mapping):
            group = subparsers.add_parser(name, help=GROUP_HELP[name])
            rest = argv[argv.index(name) + 1 :] if name == named else ()
            _add(group.add_subparsers(metavar="COMMAND", required=True), command, rest)
        elif name == named:
            importlib.import_module(f"{__package__}.{command.module}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=command.help)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Disaggregated multimodal encode, prefill and decode workers for NVIDIA Dynamo.",
        epilog=f"Options without a command start a worker: {PROG} --disaggregation-mode encode --model DIR ...",
    )
    parser.add_argument("-V", "--version", action="version", version=f"{PROG} {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    subparsers.add_parser(WORKER, help=f"run a Dynamo worker (`{PROG} {WORKER} --help` lists its options)")
    _add(subparsers, COMMANDS, argv)
    return parser


def _dispatch(argv: Sequence[str]) -> int:
    first = argv[0] if argv else ""
    if first == WORKER or (first.startswith("--") and first not in ("--help", "--version")):
        workers = importlib.import_module(f"{__package__}.workers.main")
        return workers.main(list(argv[1:] if first == WORKER else argv))
    args = _parser(argv).parse_args(argv)
    return args.run(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: the arguments after the program's name; None takes them from ``sys.argv``.

    Returns:
        What the command returned; 2 after an ``EpdError``, whose message goes to stderr as one line; 130 after an
        interrupt. Any other exception is a fault of this package, or a package that cannot be imported, and is raised.
    """
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except EpdError as error:
        print(f"{PROG}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
