# SPDX-License-Identifier: Apache-2.0
"""The demo over three hosts: frontend and encode on the first, prefill on the second, decode on the third.

What they print (``-s``) is in docs/operations/several-hosts.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from dynamo_epd.demo.plain import PlainTransformers, PromptPredictor
from dynamo_epd.demo.run import MODEL_NAME, ask_all
from dynamo_epd.demo.scenario import RED, scenario
from dynamo_epd.demo.toy_data import COLOUR, TOY_MODEL, Picture
from dynamo_epd.serve.client import Answer, chat, user

from .cluster import DEADLINE, Cluster, Part, cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2"),
    pytest.mark.skipif(not shutil.which("etcd"), reason="needs etcd (Debian: etcd-server)"),
]

WORKERS = ("EncodeWorker", "PrefillWorker", "DecodeWorker")
# Nothing but the cable may join the hosts, although they are one machine.
BY_CABLE = tuple(f"--{name}.transfer-mode=stream" for name in WORKERS) + ("--Environment.UCX_TLS=tcp",)
# As in configs/serve/epd.yaml: KV events go from host to host, too.
ROUTED = ("--Frontend.router-mode=kv", "--PrefillWorker.publish-kv-events=true")
COLOURS = ("green", "yellow", "purple", "orange", "black")


@dataclass
class Deployment:
    hosts: Cluster
    media: Path
    parts: dict[str, Part] = field(default_factory=dict)

    def serve(self, number: int, *services: str) -> Part:
        media = f"--EncodeWorker.allowed-local-media-path={self.media}"
        part = self.hosts.serve(self.hosts.hosts[number], *services, args=(*BY_CABLE, *ROUTED, media))
        self.parts[f"{services[-1]} on host {number + 1}"] = part
        return part

    @property
    def url(self) -> str:
        return f"http://{self.hosts.hosts[0].address}:8000"

    def ask(self, picture: Picture) -> Answer:
        """Ask for the colour of ``picture`` from the first host."""

        async def once() -> Answer:
            async with aiohttp.ClientSession() as session:
                return await chat(session, self.url, MODEL_NAME, [user(picture.draw(), COLOUR.text)], max_tokens=4)

        return self.hosts.run(self.hosts.hosts[0], once)

    def until_answered(self, picture: Picture) -> Answer:
        end = time.monotonic() + DEADLINE
        while (answer := self.ask(picture)).status != 200:
            assert time.monotonic() < end, answer
            time.sleep(1)
        return answer

    def metric(self, number: int, name: str, port: int = 8081) -> float:
        """The sum of a worker's samples of ``name``."""
        address = self.hosts.hosts[number].address

        async def scrape() -> str:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{address}:{port}/metrics") as response,
            ):
                return await response.text()

        lines = self.hosts.run(self.hosts.hosts[0], scrape).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def received(self, number: int) -> int:
        """Bytes that the kernel counted on the host's cable."""
        shown = ["ip", "netns", "exec", self.hosts.hosts[number].name, "cat", "/sys/class/net/eth0/statistics/rx_bytes"]
        return int(subprocess.run(shown, check=True, capture_output=True).stdout)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with cluster(tmp_path_factory.mktemp("logs")) as hosts:
        made = Deployment(hosts, tmp_path_factory.mktemp("media"))
        made.serve(0, "Frontend", "EncodeWorker")
        made.serve(1, "PrefillWorker")
        made.serve(2, "DecodeWorker")
        for part in made.parts.values():
            part.until("all are ready")
        yield made
        stopped = {name: part.stop() for name, part in made.parts.items()}
        assert stopped == dict.fromkeys(stopped, 0)
        left = [
            subprocess.run(["ip", "netns", "pids", h.name], capture_output=True).stdout.split() for h in hosts.hosts
        ]
        assert [len(pids) for pids in left] == [1, 0, 0], "only etcd, which was not started by the launcher"


def test_the_demo_passes_and_its_bytes_go_by_cable(deployment: Deployment) -> None:
    probe = RED.recoloured("white")
    deployment.until_answered(probe)
    plain, predictor = PlainTransformers(TOY_MODEL), PromptPredictor(TOY_MODEL)
    content = [{"type": "image", "image": probe.draw()}, {"type": "text", "text": COLOUR.text}]
    predictor.remember([{"role": "user", "content": content}])
    asks = list(scenario(deployment.media))
    before = {n: (deployment.received(n), _moved(deployment, n)) for n in (1, 2)}
    first = deployment.hosts.hosts[0]
    outcomes = deployment.hosts.run(first, lambda: ask_all(deployment.url, asks, plain, predictor, False))
    wrong = [o for o in outcomes if not o.ok]
    print(f"\n{len(outcomes) - len(wrong)} of {len(outcomes)} answers and cached tokens are as predicted")
    assert not wrong
    for name in ("PrefillWorker on host 2", "DecodeWorker on host 3"):
        log = deployment.parts[name].log.read_text()
        assert "go by stream" in log and "go by map" not in log
    for number, (received, moved) in before.items():
        received, moved = deployment.received(number) - received, int(_moved(deployment, number) - moved)
        print(f"host {number + 1}: {moved} bytes of embeddings and KV, {received} bytes on the cable")
        assert 0 < moved < received


def test_a_second_encode_worker_takes_part(deployment: Deployment) -> None:
    part = deployment.serve(2, "EncodeWorker")
    part.until("all are ready")
    first, end = _items(deployment, 8081, 0), time.monotonic() + DEADLINE
    while not _items(deployment, 8082, 2):
        assert deployment.ask(RED).text == "red"
        assert time.monotonic() < end, "no request reached the second encode worker"
    for colour in COLOURS:
        assert deployment.ask(RED.recoloured(colour)).text == colour
    first, second = _items(deployment, 8081, 0) - first, _items(deployment, 8082, 2)
    print(f"\nitems since it joined: {first:g} on host 1, {second:g} on host 3")
    assert first and second > 1
    assert part.stop() == 0
    assert [deployment.ask(RED).status for _ in range(6)] == [200] * 6, "the encode worker that left is still asked"


@pytest.mark.parametrize(("number", "name"), [(1, "PrefillWorker"), (2, "DecodeWorker")])
def test_a_host_that_is_cut_off_comes_back(deployment: Deployment, number: int, name: str) -> None:
    host, part = deployment.hosts.hosts[number], deployment.parts[f"{name} on host {number + 1}"]
    starts = part.said(f"{name} is ready")
    host.cut(True)
    cut = time.monotonic()
    print(f"\nhost {number + 1} is cut off")
    try:
        said = ""
        while part.said(f"{name} waits for etcd") < starts:
            begin = time.monotonic()
            assert begin - cut < DEADLINE, part.log.read_text()
            answer = deployment.ask(RED)
            told = answer.text or "(no words)"
            took = time.monotonic() - begin
            if told != said:
                print(f"  after {begin - cut:4.1f} s: HTTP {answer.status} in {took:.1f} s: {told}")
            said = told
            # Dynamo's KV router has a 500 of its own for having no worker to choose; without any decode worker, the
            # frontend no longer has the model at all.
            typed = {500: "Failed to generate completions", 404: "(no words)"}
            assert answer.status in (503, 504) or typed.get(answer.status) == told, answer
            assert took < 15
            time.sleep(0.5)
    finally:
        host.cut(False)
    back = time.monotonic()
    print(f"  after {back - cut:4.1f} s: {name} has ended, its launcher waits for etcd; the cable is back")
    part.until(f"{name} is ready", starts + 1)
    answer = deployment.until_answered(RED)
    print(f"  {time.monotonic() - back:4.1f} s later: {answer.text!r}")
    assert answer.text == "red"
    assert part.process.poll() is None


def test_a_cable_that_is_out_for_a_moment_restarts_nothing(deployment: Deployment) -> None:
    part = deployment.parts["PrefillWorker on host 2"]
    starts = part.said("starting it again")
    host = deployment.hosts.hosts[1]
    host.cut(True)
    try:
        assert deployment.ask(RED).status in (500, 503, 504)
    finally:
        host.cut(False)
    assert deployment.until_answered(RED).text == "red"
    assert part.said("starting it again") == starts


def _moved(deployment: Deployment, number: int) -> float:
    return deployment.metric(number, "dynamo_component_mm_transfer_bytes_total")


def _items(deployment: Deployment, port: int, number: int) -> float:
    return deployment.metric(number, "dynamo_component_mm_items_total", port)
