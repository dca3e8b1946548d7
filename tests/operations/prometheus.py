# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus on a free port, what it answers, and a drawing of the dashboard's panels from that.

``python -m tests.operations.prometheus URL PNG`` draws them from a Prometheus that runs already.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dynamo_epd.serve.stack import free_port

DASHBOARD = Path(__file__).parents[2] / "docs" / "operations" / "dashboard.json"
ALERTS = DASHBOARD.with_name("alerts.yaml")
_UNITS = {
    "s": (1e3, "ms"),
    "bytes": (2**-10, "KiB"),
    "Bps": (2**-10, "KiB/s"),
    "reqps": (1.0, "/s"),
    "ops": (1.0, "/s"),
    "percentunit": (1e2, "%"),
    "none": (1.0, ""),
}
"""Grafana's units: what to multiply by, and what to call it."""


@contextlib.contextmanager
def prometheus(folder: Path, targets: Sequence[str]) -> Iterator[str]:
    """The URL of a Prometheus that scrapes ``targets`` (host:port) every second and evaluates ``ALERTS``."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "dynamo", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def api(url: str, path: str, **arguments: object) -> Any:
    """``data`` of an answer of Prometheus's API. Raises ``OSError`` for a query that it refuses."""
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}", timeout=10) as response:
        return json.load(response)["data"]


def panels() -> Iterator[Mapping[str, Any]]:
    yield from json.loads(DASHBOARD.read_text())["panels"]


def query(target: Mapping[str, str], interval: str = "15s") -> str:
    """The query of a panel, with what Grafana would fill in."""
    return target["expr"].replace("$__rate_interval", interval)


def draw(url: str, png: Path, seconds: float = 60.0) -> None:
    """The dashboard's panels as Prometheus answers them for the last ``seconds``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    every = list(panels())
    figure, axes = pyplot.subplots(-(-len(every) // 4), 4, figsize=(20, 14), constrained_layout=True)
    end = time.time()
    for panel, axis in zip(every, axes.flat, strict=False):
        scale, unit = _UNITS[panel["fieldConfig"]["defaults"]["unit"]]
        zeros = 0
        for target in panel["targets"]:
            answer = api(url, "query_range", query=query(target), start=end - seconds, end=end, step=1)
            for series in answer["result"]:
                points = [(float(t) - end, scale * float(v)) for t, v in series["values"] if math.isfinite(float(v))]
                label = target["legendFormat"]
                for name, value in series["metric"].items():
                    label = label.replace("{{" + name + "}}", value or "-")
                if any(value for _, value in points):
                    axis.plot(*zip(*points, strict=True), label=label, linewidth=1.3)
                zeros += bool(points) and not any(value for _, value in points)
        if zeros:
            axis.plot(
                [-seconds, 0], [0, 0], color="grey", label=f"{zeros} more are 0" if axis.lines else f"all {zeros} are 0"
            )
        axis.set_title(f"{panel['title']} ({unit})" if unit else panel["title"], fontsize=11)
        axis.set_xlim(-seconds, 0)
        if unit == "KiB":
            axis.set_yscale("symlog", linthresh=1)
        axis.set_ylim(bottom=0, top=None if axis.get_ylim()[1] > 0.06 else 1)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7, ncols=2, framealpha=0.6, loc="best")
    figure.supxlabel("seconds before now", fontsize=10)
    figure.savefig(png, dpi=70)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1], Path(sys.argv[2]))
