# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd serve GRAPH -f CONFIG.yaml``: from a graph and a YAML file to running processes."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..contract.errors import ConfigError
from ..serve import config, discovery, graph, launch, processes
from ..serve.output import Output
from ..serve.placement import visible_gpus
from ..serve.supervisor import Policy, Supervisor

HELP = "run a graph of services on this host, or this host's part of it"
_POLICY = Policy()


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``serve``."""
    p = subparsers.add_parser(
        "serve",
        help=HELP,
        description=f"Run a graph of services: {', '.join(f'{name}:Frontend' for name in graph.ready_made())}, or your "
        "own. Ctrl-C stops it: services in the order in which requests meet them, each once the one before has ended.",
        epilog="--Service.key=value overrides a key of the file (--EncodeWorker.ServiceArgs.workers=2, "
        "--Frontend.http-port=8001). Exit status: 0 stopped as asked; 2 cannot run as configured; 3 a service kept "
        "failing; 4 stopped as asked, but something had to be killed; above 128 the launcher itself was killed.",
    )
    p.add_argument("graph", metavar="GRAPH", help="module:Name, for example graphs.epd:Frontend")
    p.add_argument("-f", "--config", type=Path, metavar="FILE", help="YAML file, a section per service")
    p.add_argument(
        "--service-name", action="append", default=[], metavar="NAME",
        help="run this service only, as one host of many does; may be given several times",
    )  # fmt: skip
    p.add_argument("--dry-run", action="store_true", help="print commands, environment and GPUs; start nothing")
    p.add_argument(
        "--working-dir", type=Path, default=Path(), metavar="DIR",
        help="where graphs are looked for and services run (default: here)",
    )  # fmt: skip
    p.add_argument("--gpus", metavar="LIST", help="GPUs to hand out (default: CUDA_VISIBLE_DEVICES, else all)")
    p.add_argument("--one-by-one", action="store_true", help="start a service when those it links to are ready")
    p.add_argument("--log-dir", type=Path, metavar="DIR", help="write each process's output to a file there too")
    p.add_argument("--start-timeout", type=float, default=_POLICY.start_timeout, metavar="S", help="until ready")
    p.add_argument("--stop-timeout", type=float, default=_POLICY.stop_timeout, metavar="S", help="for all together")
    p.add_argument("--max-restarts", type=int, default=_POLICY.max_restarts, metavar="N", help="in a row")
    p.set_defaults(run=run, overrides=())
    plain_parse = p.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        overrides, rest = _split(list(args))
        parsed, unknown = plain_parse(rest, namespace)
        parsed.overrides = overrides
        return parsed, unknown

    p.parse_known_args = parse_known_args  # type: ignore[method-assign]


def run(args: argparse.Namespace) -> int:
    """Run until stopped. Returns the exit status.

    Raises:
        ConfigError: the graph, the file or an option cannot be used; nothing was started.
    """
    _check(args)
    if args.dry_run:
        folder = Path(tempfile.gettempdir()) / "dynamo-epd-serve-XXXXXXXX"
        print(launch.describe(*_prepare(args, folder)))
        return 0
    outcome = processes.guard()
    return outcome if isinstance(outcome, int) else _supervise(args, outcome)


def _supervise(args: argparse.Namespace, folder: Path) -> int:
    _, planned = _prepare(args, folder)
    for instance in planned.instances:
        if instance.probe.port and not launch.is_free(instance.probe.port):
            raise ConfigError(
                f"{instance.name}: port {instance.probe.port} is taken; stop what listens there, or choose another "
                f"(--{instance.name}.http-port=...)"
            )
    for path in {i.env["DYN_FILE_KV"] for i in planned.instances if "DYN_FILE_KV" in i.env}:
        discovery.make_folder(Path(path))
    output = Output([i.name for i in planned.instances], log_dir=args.log_dir)
    for note in planned.notes:
        output.say(note)
    for instance in planned.instances:
        where = f"GPU {','.join(instance.gpus)}" if instance.gpus else "no GPU"
        output.say(f"{instance.name}: {where}, {instance.probe.host}:{instance.probe.port}")
    policy = Policy(args.start_timeout, args.stop_timeout, args.max_restarts)
    environ = dict(os.environ)
    if not sys.stdout.isatty():
        environ.setdefault("DYN_SDK_DISABLE_ANSI_LOGGING", "1")
    return asyncio.run(Supervisor(planned.instances, policy, output, environ, planned.url).run())


_PORTS = launch.Ports()


def _prepare(args: argparse.Namespace, folder: Path) -> tuple[graph.Graph, launch.Launch]:
    working_dir = args.working_dir.resolve()
    loaded = graph.load(args.graph, working_dir)
    sections = config.read(args.config)
    config.apply(sections, args.overrides)
    deployment = config.resolve(sections, loaded, args.service_name)
    gpus = visible_gpus() if args.gpus is None else tuple(filter(None, args.gpus.split(",")))
    notes: tuple[str, ...] = ()
    if args.dry_run and args.gpus is None and not gpus:
        wanted = sum(math.ceil(c.gpus) * c.workers for c in deployment.services if c.devices is None)
        gpus = tuple(map(str, range(wanted)))
        notes = (f"there is no GPU here: placed as if there were {wanted}",) if wanted else ()
    planned = launch.prepare(
        loaded,
        deployment,
        gpus=gpus,
        folder=folder,
        working_dir=working_dir,
        one_by_one=args.one_by_one,
        claim_port=_PORTS.claim,
    )
    return loaded, replace(planned, notes=notes + planned.notes)


def _check(args: argparse.Namespace) -> None:
    if not args.working_dir.is_dir():
        raise ConfigError(f"--working-dir {args.working_dir}: no such directory")
    for name in ("start_timeout", "stop_timeout"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
    if args.max_restarts < 0:
        raise ConfigError("--max-restarts must not be negative")


def _split(argv: Sequence[str]) -> tuple[list[config.Override], list[str]]:
    """Separate ``--Service.key=value`` and ``--Service.key value`` from the other arguments."""
    overrides: list[config.Override] = []
    rest: list[str] = []
    remaining = deque(argv)
    while remaining:
        arg = remaining.popleft()
        flag, equals, value = arg.partition("=")
        if not config.is_override(flag):
            rest.append(arg)
            continue
        if not equals:
            value = remaining.popleft() if remaining and not remaining[0].startswith("-") else "true"
        overrides.append(config.override(flag, value))
    return overrides, rest
