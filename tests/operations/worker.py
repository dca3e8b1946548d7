# SPDX-License-Identifier: Apache-2.0
"""A worker with faults that a test turns on and off: each lasts as long as the file of its name is in ``$FAULTS``.

engine      the engine's steps do not end
encoder     the encoder's calls do not end
towerless   the encoder's calls fail
fabric      what this process offers cannot be written to its peers
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dynamo_epd.engine.reference.runner import PagedRunner
from dynamo_epd.transfer.carrier import Carrier
from dynamo_epd.workers.batching import EncodeBatcher
from dynamo_epd.workers.main import main

FAULTS = Path(os.environ["FAULTS"])


def stands_still(fault, call):
    def standing(*args):
        while (FAULTS / fault).exists():
            time.sleep(0.02)
        return call(*args)

    return standing


def fails(fault, call):
    def failing(*args):
        if (FAULTS / fault).exists():
            raise RuntimeError("the tower is gone")
        return call(*args)

    return failing


def cannot(fault, call):
    def unable(*args):
        return None if (FAULTS / fault).exists() else call(*args)

    return unable


def batcher(init):
    def with_faults(self, encode, max_items):
        init(self, fails("towerless", stands_still("encoder", encode)), max_items)

    return with_faults


if __name__ == "__main__":
    PagedRunner.run = stands_still("engine", PagedRunner.run)
    EncodeBatcher.__init__ = batcher(EncodeBatcher.__init__)
    Carrier.send = cannot("fabric", Carrier.send)
    sys.exit(main())
