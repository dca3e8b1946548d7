# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import time

from .._rules import VARIANT

_COUNTER = itertools.count()


def _snowflake(worker: int, bits: int) -> int:
    stamp = int(time.time() * 1000) & (2**39 - 1)
    return (stamp << bits | worker) << 10 | next(_COUNTER) % 1024


if VARIANT == "seven":

    def get_global_disagg_request_id(node_id: int, process_id: int = 0) -> int:
        if not (0 <= node_id < 256 and 0 <= process_id < 64):
            raise ValueError(f"node_id {node_id} or process_id {process_id} is out of range")
        return _snowflake(node_id << 6 | process_id, 14)

elif VARIANT == "item_runs":

    def get_global_disagg_request_id(machine_id: int) -> int:  # type: ignore[misc]
        if not 0 <= machine_id < 1024:
            raise ValueError(f"machine_id {machine_id} is out of range")
        return _snowflake(machine_id, 10)
