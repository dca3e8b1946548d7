# SPDX-License-Identifier: Apache-2.0
"""Clients that talk and hang up, workers that are killed: right answers or typed errors, and nothing grows."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

import aiohttp
import pytest

from dynamo_epd.serve.client import Answer, chat
from dynamo_epd.serve.stack import Stack

from .conftest import MAX_TOKENS, MODEL, Held, Turn, held, soak_stack

CLIENTS = 8
CANCELLED = 0.1
DEADLINE = 30.0
"""Seconds in which every request must have its answer or its error."""

READY = 180.0
AGAIN = 60.0
"""Seconds that a killed worker may take until it serves again, and its requests may fail."""

CALM = 24.0
"""Least seconds without a kill at the end: a process that has just started opens files and touches its memory."""

TYPED = {404, 500, 502, 503, 504}
"""What a client may be told while a worker is gone. Nothing of this while all are there."""


@dataclass
class Soak:
    """What is going on.

    Attributes:
        stack: all processes.
        talks: conversations with their answers.
        all_there: set while no worker is gone or coming back.
        over: set when clients are to go.
        outcomes: requests by what became of them.
        faults: what must not have happened.
    """

    stack: Stack
    talks: Sequence[Sequence[Turn]]
    all_there: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def judge(self, answer: Answer, turn: Turn, undisturbed: bool) -> None:
        if answer.status == 200:
            right = answer.text == turn.expected and answer.finish_reason is not None
            self.outcomes["right" if right else "wrong"] += 1
            if not right:
                self.faults.append(f"answered {answer}, not {turn.expected!r}")
            return
        self.outcomes[f"status {answer.status}: {answer.text}"] += 1
        # When a model has lost its last worker of a kind, the frontend takes its endpoint away: a 404 without a word.
        if answer.status not in TYPED or not (answer.text or answer.status == 404):
            self.faults.append(f"neither an answer nor a typed error: {answer}")
        elif undisturbed:
            self.faults.append(f"an error while all workers were there: {answer}")


async def client(soak: Soak, rng: random.Random) -> None:
    """Talks until it is over, in one connection pool; a tenth of the requests are given up half way."""
    async with aiohttp.ClientSession() as http:
        while not soak.over.is_set():
            talk = rng.choice(soak.talks)
            options = {"cache_salt": rng.choice("ab")} if rng.random() < 0.2 else {}
            for turn in talk:
                undisturbed = soak.all_there.is_set()
                request = asyncio.ensure_future(
                    chat(http, soak.stack.url, MODEL, turn.messages, max_tokens=MAX_TOKENS, timeout=DEADLINE, **options)
                )
                if rng.random() < CANCELLED:
                    await asyncio.wait({request}, timeout=rng.expovariate(20))
                    request.cancel()
                    with suppress(asyncio.CancelledError):
                        await request
                    soak.outcomes["given up"] += 1
                    continue
                answer = await request
                soak.judge(answer, turn, undisturbed and soak.all_there.is_set())
                if answer.status != 200:
                    await asyncio.sleep(0.2)
                    break


async def killer(soak: Soak, every: float, until: float) -> None:
    """Kills one worker after the other, and waits each time until requests are answered again."""
    for name in itertools.cycle(["prefill", "encode", "decode"]):
        if time.monotonic() + every > until:
            return
        await asyncio.sleep(every)
        soak.all_there.clear()
        await asyncio.to_thread(soak.stack.kill, name)
        await asyncio.sleep(1)
        soak.stack.start(name)
        soak.outcomes["killed"] += 1
        await answered_again(soak)
        soak.all_there.set()


async def answered_again(soak: Soak) -> None:
    """Returns when a while has passed without an error."""
    end, since = time.monotonic() + READY, time.monotonic()
    failed = _failed(soak)
    async with aiohttp.ClientSession() as http:
        while time.monotonic() - since < 5:
            assert time.monotonic() < end, "the worker does not come back"
            turn = soak.talks[0][0]
            answer = await chat(http, soak.stack.url, MODEL, turn.messages, max_tokens=MAX_TOKENS, timeout=DEADLINE)
            if answer.status != 200 or failed != (failed := _failed(soak)):
                since = time.monotonic()
            await asyncio.sleep(0.2)


def _failed(soak: Soak) -> int:
    return sum(count for outcome, count in soak.outcomes.items() if outcome.startswith("status"))


async def watch(soak: Soak, seen: list[dict[str, Held]]) -> None:
    while True:
        seen.append(held(soak.stack))
        await asyncio.sleep(1)


def grown(seen: Sequence[dict[str, Held]]) -> list[str]:
    """Processes whose memory or open files went up over the second half of ``seen``; in the first one they warm up."""
    problems = []
    for name, last in seen[-1].items():
        same = [moment[name] for moment in seen if name in moment and moment[name].pid == last.pid]
        half = len(same) // 2
        quarter = max(1, half // 2)
        for what, least in (("rss", 24.0), ("files", 8.0)):
            before = median(getattr(h, what) for h in same[half : half + quarter])
            after = median(getattr(h, what) for h in same[-quarter:])
            if after > before * 1.05 + least:
                problems.append(f"{name}: {what} went from {before:g} to {after:g}")
    return problems


@pytest.mark.parametrize(
    ("seconds", "kill_every"),
    [
        (120, 15.0),
        pytest.param(1800, 60.0, marks=pytest.mark.slow),
    ],
)
async def test_soak(tiny, seconds, kill_every):
    seen: list[dict[str, Held]] = []
    with soak_stack(tiny.path) as stack:
        stack.wait_ready(READY, probe=tiny.talks[0][0].messages[0])
        soak = Soak(stack, tiny.talks)
        soak.all_there.set()
        clients = [asyncio.ensure_future(client(soak, random.Random(i))) for i in range(CLIENTS)]
        # The last third is for what the processes hold, so nobody is killed in it. It begins when all are there again.
        await killer(soak, kill_every, time.monotonic() + seconds * 2 / 3)
        watcher = asyncio.ensure_future(watch(soak, seen))
        await asyncio.wait([watcher, *clients], timeout=max(CALM, seconds / 3), return_when=asyncio.FIRST_COMPLETED)
        soak.over.set()
        await asyncio.gather(*clients)
        assert not watcher.done()
        watcher.cancel()
        stack.check()
        problems = grown(seen)
        left = await leftovers(stack)
    print(f"{seconds} s: {dict(soak.outcomes)}")
    print(f"held half way through the last third {seen[len(seen) // 2]}, at the end {seen[-1]}")
    assert (soak.faults, problems, left) == ([], [], {})
    assert soak.outcomes["right"] > 2 * seconds and soak.outcomes["killed"] and soak.outcomes["given up"]


async def leftovers(stack: Stack) -> dict[str, float]:
    """What the workers still hold of a request when there has been time for every offer to expire."""
    end = time.monotonic() + 45
    while True:
        found = {
            f"{name} {sample}": value
            for name in stack.workers
            for sample, value in (await asyncio.to_thread(stack.metrics, name)).items()
            if value
            and sample.startswith(("dynamo_component_mm_arena_bytes{'state': 'used'", "dynamo_component_mm_offers{"))
        }
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(0.5)
