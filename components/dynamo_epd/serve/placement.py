# SPDX-License-Identifier: Apache-2.0
"""Which process gets which GPU of this host."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from ..contract.errors import ConfigError


class Need(NamedTuple):
    """What one process asks for: ``gpus`` whole GPUs or a fraction of one, or these very ``devices``."""

    name: str
    gpus: Fraction
    devices: tuple[str, ...] | None = None


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The GPUs that this process may hand out: those of ``CUDA_VISIBLE_DEVICES``, else all that ``nvidia-smi`` lists.

    Raises:
        ConfigError: ``nvidia-smi`` is there and fails.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        # CUDA stops at the first entry that is no device: "-1", and what follows it, hides.
        gpus = [part.strip() for part in chosen.split(",")]
        stop = next(
            (i for i, gpu in enumerate(gpus) if not gpu or gpu.startswith("-") or gpu == "NoDevFiles"), len(gpus)
        )
        return tuple(gpus[:stop])
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{' '.join(query)} failed: {error}; name the GPUs with --gpus") from None
    return tuple(line.strip() for line in listed.splitlines() if line.strip())


def place(needs: Sequence[Need], gpus: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Give each process its GPUs.

    A process with whole GPUs shares them with nobody; fractions fill a GPU up to one. GPUs that are named as
    ``devices`` are left to those who name them.

    Returns:
        GPUs by process name; none for a process that needs none.

    Raises:
        ConfigError: there are too few.
    """
    free = dict.fromkeys(gpus, Fraction(1))
    for need in needs:
        for device in need.devices or ():
            free.pop(device, None)
    placed: dict[str, tuple[str, ...]] = {}
    # Whole GPUs first: a fraction may sit anywhere, and must not break the last free one.
    for need in sorted(needs, key=lambda n: n.gpus < 1):
        if need.devices is not None:
            placed[need.name] = need.devices
            continue
        if need.gpus >= 1:
            found = [gpu for gpu, left in free.items() if left == 1][: int(need.gpus)]
        elif need.gpus:
            found = sorted((g for g, left in free.items() if left >= need.gpus), key=lambda g: free[g])[:1]
        else:
            found = []
        if len(found) < need.gpus:
            total = sum((n.gpus for n in needs if n.devices is None), Fraction(0))
            raise ConfigError(
                f"{need.name} needs {_number(need.gpus)} GPU, and too little is left of this host's {len(gpus)} "
                f"(all together ask for {_number(total)}); lower ServiceArgs.workers or resources.gpu (0 runs on the "
                "CPU, a fraction shares a GPU), or run services on other hosts with --service-name"
            )
        for gpu in found:
            free[gpu] -= min(need.gpus, Fraction(1))
        placed[need.name] = tuple(found)
    return {need.name: placed[need.name] for need in needs}


def _number(gpus: Fraction) -> str:
    return f"{float(gpus):g}"
