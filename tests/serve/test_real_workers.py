# SPDX-License-Identifier: Apache-2.0
"""The launcher with Dynamo's frontend and this package's workers, on the toy model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from PIL import Image

from dynamo_epd.serve.client import chat, user

ROOT = Path(__file__).parents[2]
DEADLINE = 240.0
QUESTION = [user(Image.new("RGB", (64, 64), "red"), "what colour ?")]

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def serving(folder: Path, *args: str):
    """``dynamo-epd serve`` with the toy model; gives the process and its log. Stopped at the end, and checked."""
    log = folder / f"{len(list(folder.iterdir()))}.log"
    argv = ["-f", "configs/serve/toy.yaml", "--stop-timeout", "90", *args]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dynamo_epd", "serve", "graphs.epd:Frontend", *argv],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder), "DYN_LOG": "warn", "DYN_PREFILL_DRAIN_TIMEOUT_S": "5"},
        )
    try:
        yield process, log
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(DEADLINE)


def until(log: Path, text: str, times: int = 1) -> None:
    end = time.monotonic() + DEADLINE
    while log.read_text().count(text) < times:
        assert time.monotonic() < end, f"no {text!r}\n{log.read_text()}"
        time.sleep(0.1)


async def ask(port: int):
    async with aiohttp.ClientSession() as session:
        return await chat(session, f"http://127.0.0.1:{port}", "toy", QUESTION)


@pytest.fixture
def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


async def test_a_graph_answers_and_survives_the_end_of_a_worker(port, tmp_path):
    with serving(tmp_path, f"--Frontend.http-port={port}") as (_, log):
        until(log, "all are ready")
        first = await ask(port)
        assert first.status == 200 and first.text
        ready = next(line for line in log.read_text().splitlines() if "PrefillWorker is ready" in line)
        os.kill(int(ready.rpartition("pid ")[2].rstrip(")")), signal.SIGKILL)
        until(log, "PrefillWorker is ready", 2)
        end = time.monotonic() + 60
        while (again := await ask(port)).status != 200:
            assert time.monotonic() < end, again
            await asyncio.sleep(0.5)
        assert again.text == first.text
    stopped = [line.split()[2] for line in log.read_text().splitlines() if "ended with exit status 0" in line]
    assert stopped == ["Frontend", "EncodeWorker", "PrefillWorker", "DecodeWorker"]
    assert list(tmp_path.glob("dynamo-epd-serve*")) == []


async def test_parts_that_are_launched_on_their_own_find_each_other(port, tmp_path):
    names = ["--service-name=DecodeWorker", "--service-name=PrefillWorker"]
    with (
        serving(tmp_path, *names) as (_, language),
        serving(tmp_path, "--service-name=EncodeWorker") as (_, encode),
        serving(tmp_path, "--service-name=Frontend", f"--Frontend.http-port={port}") as (_, front),
    ):
        for log in (language, encode, front):
            until(log, "all are ready")
        end = time.monotonic() + 60
        while (answer := await ask(port)).status != 200:
            assert time.monotonic() < end, answer
            await asyncio.sleep(0.5)
        assert answer.text
