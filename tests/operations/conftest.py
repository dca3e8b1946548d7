# SPDX-License-Identifier: Apache-2.0
"""One real stack with everything that an operator looks at: health checks, traces, JSON logs, metrics."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
from PIL import Image

from dynamo_epd.demo.toy_data import COLOUR, TOY_MODEL, Picture
from dynamo_epd.serve.client import user
from dynamo_epd.serve.stack import Stack, epd_services

from .otlp import Span, receiver

ROOT = Path(__file__).parents[2]
MODEL = "toy"
PROBE = Picture("white", "black", "square")
DEADLINE = 60.0
ENGINE = {"kv_cache_config": {"tokens_per_block": 8, "max_tokens": 2048}, "max_seq_len": 512, "max_batch_size": 8}


@dataclass(frozen=True)
class Watched:
    """A stack, its spans, and the folders of its workers' faults by role."""

    stack: Stack
    spans: list[Span]
    faults: dict[str, Path]

    def get(self, name: str, path: str) -> tuple[int, str]:
        """Status and body of a worker's answer."""
        try:
            with urllib.request.urlopen(self.stack.system_url(name) + path, timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def health(self, name: str) -> int:
        """The status of ``/health``, which ``/live`` answers as well."""
        status, _ = self.get(name, "/health")
        return status

    def log(self, name: str) -> str:
        return self.stack.log_path(name).read_text()


def unseen() -> Image.Image:
    """A picture that no worker has an embedding of."""
    image = Picture("blue", "red", "circle").draw()
    image.putpixel((0, 0), tuple(os.urandom(3)))
    image.putpixel((0, 1), tuple(os.urandom(3)))
    return image


def until(what: str, holds: Callable[[], bool], deadline: float = DEADLINE) -> None:
    end = time.monotonic() + deadline
    while not holds():
        assert time.monotonic() < end, f"not within {deadline:g} s: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    services = epd_services(
        TOY_MODEL,
        MODEL,
        engine_args=("--engine", "reference", "--override-engine-args", json.dumps(ENGINE)),
        encode_args=("--multimodal-embedding-cache-capacity-gb", "0.05"),
    )
    faults = {service.name: folder / service.name for service in services}
    for path in faults.values():
        path.mkdir()
    workers = [
        replace(s, module="tests.operations.worker", env={"FAULTS": str(faults[s.name]), "OTEL_SERVICE_NAME": s.name})
        for s in services
    ]
    with receiver() as (url, spans):
        env = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            # Dynamo 1.6.1's frontend writes the whole URL of a picture that it cannot measure, at this target.
            "DYN_LOG": "info,mm_routing=error",
            "DYN_LOGGING_JSONL": "1",
            "DYN_HEALTH_CHECK_ENABLED": "true",
            "DYN_CANARY_WAIT_TIME": "1",
            "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "3",
            "OTEL_EXPORT_ENABLED": "true",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{url}/v1/traces",
            "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": f"{url}/v1/logs",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        with Stack(workers, MODEL, env=env) as stack:
            stack.wait_ready(180, probe=user(PROBE.draw(), COLOUR.text))
            yield Watched(stack, spans, faults)


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session
