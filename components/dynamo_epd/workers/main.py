# SPDX-License-Identifier: Apache-2.0
"""``python -m dynamo_epd --disaggregation-mode ...``: parse the flags, pick the role, let Dynamo run it."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig

from .args import Role, WorkerArgs, parse
from .base import EpdWorker


def create_worker(args: WorkerArgs) -> EpdWorker:
    """The worker of ``args.role``, not yet started."""
    if args.role == "encode":
        from .encode import EncodeWorker

        return EncodeWorker(args)
    from .language import AggregatedWorker, DecodeWorker, PrefillWorker

    roles: dict[Role, type[EpdWorker]] = {"prefill": PrefillWorker, "decode": DecodeWorker, "agg": AggregatedWorker}
    return roles[args.role](args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker until it is told to stop. Raises ``ConfigError`` for flags that cannot be used."""
    args, config = parse(argv)

    async def factory(_: list[str] | None) -> tuple[EpdWorker, WorkerConfig]:
        return create_worker(args), config

    run(EpdWorker, None, factory)
    return 0
