# SPDX-License-Identifier: Apache-2.0
"""The services that graphs are made of.

Every import gives new ones, because linking changes them: two graphs in one process must not see each other's links.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from fractions import Fraction
from functools import partial

from .graph import Service

Frontend: Service
EncodeWorker: Service
PrefillWorker: Service
DecodeWorker: Service
AggWorker: Service


def frontend_parser() -> argparse.ArgumentParser:
    """The flags of ``python -m dynamo.frontend``."""
    from dynamo.frontend.frontend_args import FrontendArgGroup

    parser = argparse.ArgumentParser()
    FrontendArgGroup().add_arguments(parser)
    return parser


def worker(name: str, role: str) -> Service:
    """A worker of this package; ``role`` is its ``--disaggregation-mode``."""
    return Service(
        name,
        module="dynamo_epd",
        args=("--disaggregation-mode", role),
        parser="dynamo_epd.workers.args:parser",
        aliases={"engine-args": "extra-engine-args", "block-size": "kv-block-size"},
        gpus=Fraction(1),
        health=True,
    )


_MAKE: dict[str, Callable[[], Service]] = {
    "Frontend": partial(
        Service,
        "Frontend",
        module="dynamo.frontend",
        parser=f"{__name__}:frontend_parser",
        aliases={
            "port": "http-port",
            "host": "http-host",
            "router": "router-mode",
            "block-size": "kv-cache-block-size",
        },
        entry=True,
    ),
    "EncodeWorker": partial(worker, "EncodeWorker", "encode"),
    "PrefillWorker": partial(worker, "PrefillWorker", "prefill"),
    "DecodeWorker": partial(worker, "DecodeWorker", "decode"),
    "AggWorker": partial(worker, "AggWorker", "agg"),
}


def __getattr__(name: str) -> Service:
    if name not in _MAKE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _MAKE[name]()
