# SPDX-License-Identifier: Apache-2.0
"""The two plots of ``dynamo-epd bench serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..contract.errors import ConfigError

_NAMES = {"reuse_on": "block reuse on", "reuse_off": "block reuse off"}


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``ttft.png`` and ``requests.png`` into ``folder``, which is made.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plots needs matplotlib: pip install 'dynamo-epd[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, key, labels in (
        ("ttft.png", "ttft_by_shared_prefix", {"xlabel": "tokens shared with an earlier prompt", "ylabel": "TTFT, ms"}),
        (
            "requests.png",
            "requests_per_s_by_concurrency",
            {"xlabel": "conversations at a time", "ylabel": "requests per second"},
        ),
    ):
        figure, axes = pyplot.subplots(figsize=(6.4, 4))
        for side, title in _NAMES.items():
            points = _points(report[key][side])
            axes.plot(*points, marker="o", label=title)
        axes.set(xticks=points[0], **labels)
        axes.set_ylim(bottom=0)
        axes.grid(True, alpha=0.3)
        axes.legend()
        paths.append(folder / name)
        figure.savefig(paths[-1], dpi=120, bbox_inches="tight")
        pyplot.close(figure)
    return paths


def _points(values: Any) -> tuple[list[float], list[float]]:
    if isinstance(values, dict):
        return [float(x) for x in values], list(values.values())
    return [point["shared_tokens"] for point in values], [point["ttft_ms"] for point in values]
