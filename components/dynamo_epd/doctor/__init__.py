# SPDX-License-Identifier: Apache-2.0
"""Looks at everything that workers depend on and says what is wrong and what to do about it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from ..contract.errors import ConfigError
from . import dynamo, engines, machine
from .finding import Finding, Status, is_red
from .nixl import nixl

__all__ = ["Finding", "Status", "examine", "is_red", "startup_checks"]

logger = logging.getLogger(__name__)


def examine(model: Path | None = None, engine_args: Path | None = None, overrides: str | None = None) -> list[Finding]:
    """All checks, in the order of the table. Takes some seconds; starts no engine."""
    return list(_all(model, engine_args, overrides))


def startup_checks(
    *, engine: str, model: Path, engine_args: Path | None = None, overrides: str | None = None
) -> list[Finding]:
    """The checks that a worker makes before it loads anything: those that take milliseconds.

    Args:
        engine: ``trtllm``, ``reference``, or ``none`` for an encode worker.

    Returns:
        What was found, none of it red. Yellow findings are logged.

    Raises:
        ConfigError: a finding is red; the message has its reason and remedy.
    """
    gpu, gb200 = machine.has_gpu()
    findings = [machine.python(), engines.family(model), machine.shared_memory()]
    findings += machine.transports(os.environ, gpu=gpu, gb200=gb200)
    if engine != "none":
        caps = None
        if engine == "trtllm":
            caps, lines = engines.capabilities()
            findings += [line for line in lines if line.status == "red"]
            findings += engines.environment()
        findings += engines.block_reuse(caps, engine_args, overrides, engines.model_type(model))
    for finding in findings:
        if finding.status == "red":
            raise ConfigError(f"{finding.check}: {finding.reason}. {finding.remedy}")
        if finding.status == "yellow":
            logger.warning("%s: %s. %s", finding.check, finding.reason, finding.remedy)
    return findings


def _all(model: Path | None, engine_args: Path | None, overrides: str | None) -> Iterator[Finding]:
    yield machine.python()
    yield dynamo.sdk()
    yield from dynamo.planes(os.environ)
    yield dynamo.media_policy()
    yield machine.devices()
    yield engines.transformers()
    if model is not None:
        yield engines.family(model)
    caps, lines = engines.capabilities()
    yield from lines
    yield from engines.environment()
    yield from engines.block_reuse(caps, engine_args, overrides, engines.model_type(model) if model else None)
    yield from nixl()
    gpu, gb200 = machine.has_gpu()
    yield from machine.transports(os.environ, gpu=gpu, gb200=gb200)
    yield machine.shared_memory()
    yield machine.peer_memory()
    yield machine.peer_files()
    locked = machine.locked_memory()
    if locked is not None:
        yield locked
