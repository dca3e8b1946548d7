# SPDX-License-Identifier: Apache-2.0
"""``python -m dynamo_epd --disaggregation-mode ...``: parse the flags, pick the role, let Dynamo run it."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig

from .args import Role, WorkerArgs, parse
from .base import EpdWorker

logger = logging.getLogger(__name__)

_ROLES: dict[Role, str] = {
    "encode": "encode:EncodeWorker",
    "prefill": "prefill:PrefillWorker",
    "decode": "decode:DecodeWorker",
    "agg": "agg:AggregatedWorker",
}


def create_worker(args: WorkerArgs) -> EpdWorker:
    """The worker of ``args.role``, not yet started."""
    module, _, name = _ROLES[args.role].partition(":")
    worker: EpdWorker = getattr(import_module(f".{module}", __package__), name)(args)
    return worker


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker until it is told to stop. Raises ``ConfigError`` for flags that cannot be used."""
    args, config = parse(argv)
    if foreign := sorted(name for name in os.environ if name.startswith("DYN_TRTLLM_")):
        logger.warning("variables of dynamo.trtllm are not read here, use the flags: %s", ", ".join(foreign))
    worker = create_worker(args)

    async def made(_: list[str] | None) -> tuple[EpdWorker, WorkerConfig]:
        return worker, config

    run(type(worker), None, made)
    if os.environ.get("DYN_HEALTH_CHECK_ENABLED", "").lower() in ("1", "true", "on", "yes"):
        _end()
    return 0


def _end() -> None:
    """End the process as its interpreter would, but for taking the interpreter down.

    The threads in which Dynamo 1.6.1 ran health checks still want the interpreter then, and abort the process: an exit
    status of 134 (SIGABRT, "exception not rethrown") for a worker that ended as it should.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
