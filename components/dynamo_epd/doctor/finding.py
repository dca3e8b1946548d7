# SPDX-License-Identifier: Apache-2.0
"""One line of the doctor's table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["green", "yellow", "red"]


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: what was looked at.
        status: ``green``; ``yellow``: works, but not as well or not everything; ``red``: workers will not work.
        reason: what was seen.
        remedy: what to do about it; empty where nothing has to be done.
    """

    check: str
    status: Status
    reason: str
    remedy: str = ""


def green(check: str, reason: str) -> Finding:
    return Finding(check, "green", reason)


def yellow(check: str, reason: str, remedy: str) -> Finding:
    return Finding(check, "yellow", reason, remedy)


def red(check: str, reason: str, remedy: str) -> Finding:
    return Finding(check, "red", reason, remedy)


def is_red(findings: Iterable[Finding]) -> bool:
    return any(finding.status == "red" for finding in findings)
