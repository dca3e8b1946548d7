# SPDX-License-Identifier: Apache-2.0
"""``/health`` and ``/live`` of running workers: green, red while something in them stands still, and green again."""

from __future__ import annotations

import urllib.error

import pytest

from dynamo_epd.demo.toy_data import COLOUR, Picture
from dynamo_epd.serve.client import chat, user

from .conftest import MODEL, until

pytestmark = pytest.mark.slow

ROLES = ("encode", "prefill", "decode")


async def ask(http, watched, picture, **options):
    return await chat(http, watched.stack.url, MODEL, [user(picture.draw(), COLOUR.text)], max_tokens=4, **options)


@pytest.mark.parametrize(
    "role, fault",
    [
        ("encode", "encoder"),
        ("encode", "towerless"),
        ("encode", "fabric"),
        ("prefill", "engine"),
        ("decode", "engine"),
    ],
)
async def test_a_fault_turns_a_worker_red_and_it_recovers(http, watched, role, fault):
    for name in ROLES:
        until(f"{name} is green", lambda name=name: watched.health(name) == 200)
    failed = watched.stack.metrics(role)["dynamo_component_mm_canaries_total{'outcome': 'failed'}"]
    file = watched.faults[role] / fault
    file.touch()
    try:
        until(f"{role} is red", lambda: watched.health(role) == 503)
        status, body = watched.get(role, "/live")
        assert status == 503 and '"notready"' in body
        assert [watched.health(name) for name in ROLES if name != role] == [200, 200]
        # Those that are not answered do not pile up: one is in the worker, the others are refused.
        until(
            "more canaries fail",
            lambda: (
                watched.stack.metrics(role)["dynamo_component_mm_canaries_total{'outcome': 'failed'}"] >= failed + 2
            ),
        )
    finally:
        file.unlink()
    until(f"{role} is green again", lambda: watched.health(role) == 200)
    assert watched.get(role, "/live")[0] == 200
    answer = await ask(http, watched, Picture("blue", "red", "circle"))
    assert (answer.status, answer.text) == (200, "red")


async def test_canaries_leave_nothing_behind(watched):
    """Many of them, and nothing is offered, kept or counted as a request."""
    before = {name: watched.stack.metrics(name) for name in ROLES}

    def canaries(name):
        return watched.stack.metrics(name)["dynamo_component_mm_canaries_total{'outcome': 'ok'}"]

    start = {name: canaries(name) for name in ROLES}
    for name in ROLES:
        until(f"{name} was checked", lambda name=name: canaries(name) >= start[name] + 3)
    for name in ROLES:
        after = watched.stack.metrics(name)
        kept = (
            "dynamo_component_mm_requests",
            "dynamo_component_mm_stage",
            "dynamo_component_mm_items",
            "dynamo_component_mm_keys",
            "dynamo_component_mm_prompt",
            "dynamo_component_embedding",
            "dynamo_component_mm_arena_bytes{'state': 'kept'}",
        )
        for sample, value in before[name].items():
            if sample.startswith(kept):
                assert after[sample] == value, (name, sample)
    until(
        "nothing is offered",
        lambda: watched.stack.metrics("encode")["dynamo_component_mm_offers{'state': 'open'}"] == 0,
    )


async def test_a_dead_peer_is_seen_by_the_frontend_and_its_own_probe_alone(http, watched):
    """The others can still serve what does not need it, so that they must not be restarted for it."""
    watched.stack.kill("encode")
    with pytest.raises(urllib.error.URLError):
        watched.health("encode")
    answer = await ask(http, watched, Picture("green", "purple", "circle"), timeout=20)
    assert answer.status >= 400
    assert [watched.health(name) for name in ("prefill", "decode")] == [200, 200]
    watched.stack.start("encode")

    def green():
        try:
            return watched.health("encode") == 200
        except urllib.error.URLError:
            return False

    until("encode is green again", green, 120)
    for _ in range(100):
        answer = await ask(http, watched, Picture("green", "purple", "circle"), timeout=20)
        if answer.status == 200:
            break
    assert (answer.status, answer.text) == (200, "purple")
