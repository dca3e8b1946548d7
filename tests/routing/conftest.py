# SPDX-License-Identifier: Apache-2.0
"""Two workers of a kind behind a KV-aware frontend, and what that frontend's router says of every request."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynamo_epd.demo.toy_data import COLOUR, TOY_MODEL, Picture
from dynamo_epd.serve.client import Answer, chat, user
from dynamo_epd.serve.stack import Service, Stack, epd_services, free_port

MODEL = "toy"
BLOCK = 8
READY = 180.0
PHASE = {"e-pd": "Aggregated", "e-p-d": "Prefill"}
ROLE = {"e-pd": "agg", "e-p-d": "prefill"}
ENGINE = {
    "kv_cache_config": {"tokens_per_block": BLOCK, "max_tokens": 4096},
    "max_seq_len": 512,
    "max_batch_size": 8,
    "max_num_tokens": 512,
    "enable_chunked_prefill": True,
}


@dataclass(frozen=True)
class Route:
    """What the router decided: which worker, and how many blocks of the prompt it believed to be there."""

    worker: str
    overlap: int


@dataclass
class Routed:
    """A running stack with a KV-aware frontend."""

    stack: Stack
    topology: str
    round_robin_url: str
    _read: int = 0
    _routes: list[Route] = field(default_factory=list)

    def routes(self) -> list[Route]:
        """All decisions about the workers that compute prompts so far."""
        with self.stack.log_path("frontend").open("rb") as log:
            log.seek(self._read)
            while (line := log.readline()).endswith(b"\n"):
                self._read = log.tell()
                entry = json.loads(line) if b'"overlap_blocks"' in line else {}
                if entry.get("phase") == PHASE[self.topology]:
                    self._routes.append(Route(entry["worker_id"], int(entry["overlap_blocks"])))
        return self._routes

    async def ask(
        self, http: aiohttp.ClientSession, messages: list[dict[str, Any]], *, patience: float = 0, **options: Any
    ) -> tuple[Answer, Route]:
        """One request, when no other one is in flight, and its route.

        Args:
            patience: seconds in which errors of a worker that is gone are met by asking again.
        """
        end = time.monotonic() + patience
        before = len(self.routes())
        answer = await chat(http, self.stack.url, MODEL, messages, max_tokens=3, **options)
        while answer.status >= 500 and time.monotonic() < end:
            await asyncio.sleep(0.1)
            before = len(self.routes())
            answer = await chat(http, self.stack.url, MODEL, messages, max_tokens=3, **options)
        assert answer.status == 200, answer
        end = time.monotonic() + 10
        while len(self.routes()) == before and time.monotonic() < end:
            await asyncio.sleep(0.005)
        # The worker's events travel by themselves; nothing says when the router has taken them in.
        await asyncio.sleep(0.05)
        return answer, self.routes()[-1]


def routed_stack(topology: str, model: Path = TOY_MODEL) -> tuple[Stack, str]:
    """Two workers that compute prompts: the stack, and the URL of a second, round-robin frontend."""
    engine_args = ("--engine", "reference", "--override-engine-args", json.dumps(ENGINE), "--publish-kv-events")
    services = epd_services(
        model,
        MODEL,
        topology=topology,
        engine_args=engine_args,
        encode_args=("--multimodal-embedding-cache-capacity-gb", "0.05"),
    )
    http_port = free_port()
    twins: list[Service] = []
    for service in services:
        if service.name == ROLE[topology]:
            twins += [replace(service, name=f"{service.name}-{i}") for i in (1, 2)]
        else:
            twins.append(service)
    args = ("--http-host", "127.0.0.1", "--http-port", str(http_port), "--discovery-backend", "file")
    twins.append(Service("round-robin", (*args, "--router-mode", "round-robin"), module="dynamo.frontend"))
    stack = Stack(
        twins,
        MODEL,
        frontend_args=("--router-mode", "kv"),
        env={"DYN_LOGGING_JSONL": "1", "DYN_LOG": "info", "OMP_NUM_THREADS": "1"},
    )
    return stack, f"http://127.0.0.1:{http_port}"


def started(stack: Stack, topology: str, round_robin_url: str) -> Routed:
    """Waits until both frontends know everybody."""
    routed = Routed(stack, topology, round_robin_url)
    probe = user(Picture("white", "black", "square").draw(), COLOUR.text)
    stack.wait_ready(READY, probe=probe)
    asyncio.run(_both_seen(routed, probe))
    return routed


async def _both_seen(routed: Routed, probe: dict[str, Any]) -> None:
    end = time.monotonic() + READY
    async with aiohttp.ClientSession() as http:
        seen: set[str] = set()
        while len(seen) < 2 or (await chat(http, routed.round_robin_url, MODEL, [probe], max_tokens=1)).status != 200:
            routed.stack.check()
            assert time.monotonic() < end, "the two workers are not both in routing"
            # Texts that nobody has go to whoever has less to do, and to either where that is equal.
            _, route = await routed.ask(http, [user(f"{time.monotonic()} hello")])
            seen.add(route.worker)


@pytest.fixture(scope="session", params=["e-pd", pytest.param("e-p-d", marks=pytest.mark.slow)])
def routed(request):
    stack, url = routed_stack(request.param)
    with stack:
        yield started(stack, request.param, url)


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session
