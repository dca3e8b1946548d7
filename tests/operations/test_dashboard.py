# SPDX-License-Identifier: Apache-2.0
"""Every query of the dashboard and of the alerts, run by a real Prometheus that scrapes a stack under a small load."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from dynamo_epd.demo.toy_data import COLOUR, SHAPE, Picture
from dynamo_epd.serve.client import chat, user

from .conftest import MODEL, unseen, until
from .prometheus import ALERTS, api, draw, panels, prometheus, query

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="there is no prometheus (apt-get install prometheus)"
    ),
]

LOAD_SECONDS = 25.0


async def load(http, watched, seconds: float) -> None:
    """New and known pictures, text, what is refused, and what is cut off, a few at a time."""
    end = time.monotonic() + seconds
    turn = 0
    while time.monotonic() < end:
        turn += 1
        asked = [
            user(unseen(), COLOUR.text),
            user(Picture("blue", "red", "circle").draw(), (COLOUR, SHAPE)[turn % 2].text),
            user("Hello!"),
            user("data:image/png;base64,bm90IGEgcGljdHVyZQ==", COLOUR.text),
        ]
        await asyncio.gather(*(chat(http, watched.stack.url, MODEL, [m], max_tokens=6) for m in asked))
        await asyncio.sleep(0.15)


@pytest.fixture(scope="module")
def url(watched, tmp_path_factory):
    """A Prometheus that has seen the load."""
    stack = watched.stack
    targets = [urlsplit(stack.system_url(name)).netloc for name in stack.workers] + [urlsplit(stack.url).netloc]
    with prometheus(tmp_path_factory.mktemp("prometheus"), targets) as url:

        def scraped():
            try:
                return len([r for r in api(url, "query", query="up")["result"] if r["value"][1] == "1"]) == len(targets)
            except OSError:
                return False

        until("all are scraped", scraped)

        async def run():
            import aiohttp

            async with aiohttp.ClientSession() as session:
                await load(session, watched, LOAD_SECONDS)

        asyncio.run(run())
        yield url


TARGETS = [(p["title"], t["refId"], query(t)) for p in panels() for t in p["targets"]]


@pytest.mark.parametrize("title, ref, expr", TARGETS, ids=[f"{title} {ref}" for title, ref, _ in TARGETS])
def test_a_panel_has_data(url, title, ref, expr):
    result = api(url, "query", query=expr)["result"]
    assert any(math.isfinite(float(series["value"][1])) for series in result), result


def test_the_numbers_are_those_of_the_load(url):
    def value(expr):
        return float(api(url, "query", query=expr)["result"][0]["value"][1])

    def share(metric, source):
        return value(f'sum(rate({metric}{{source="{source}"}}[15s])) / sum(rate({metric}[15s]))')

    # Two pictures a turn are good, and one of these is always the same; a third of what encode sees is refused.
    assert share("dynamo_component_mm_items_total", "kept") > 0.3
    encode = 'dynamo_component_mm_requests_total{dynamo_component="encode"'
    refused = value(f'sum(rate({encode}, outcome="invalid", reason="item"}}[15s])) / sum(rate({encode}}}[15s]))')
    assert 0.2 < refused < 0.5
    assert 0.2 < share("dynamo_component_mm_prompt_tokens_total", "cached") < 1.0
    for stage in ("encode", "queue", "transfer", "prefill", "decode", "offer", "fetch", "digest"):
        assert value(f'sum(increase(dynamo_component_mm_stage_seconds_count{{stage="{stage}"}}[20s]))') > 0, stage


def test_the_alerts_are_evaluated_and_ask_for_what_is_there(url):
    def rules():
        return [rule for group in api(url, "rules")["groups"] for rule in group["rules"]]

    until("they are evaluated", lambda: all(rule["health"] == "ok" for rule in rules()), 20)
    expected = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules()] == expected
    known = set(api(url, "label/__name__/values"))
    for rule in rules():
        names = set(re.findall(r"dynamo_\w+(?=[\[{)\s])", rule["query"]))
        names = {name for name in names if name.startswith(("dynamo_component_", "dynamo_frontend_"))}
        assert names - {"dynamo_component"} and names - {"dynamo_component"} <= known, rule["query"]


def test_the_panels_can_be_drawn(url, tmp_path):
    png = Path(os.environ.get("DASHBOARD_PNG") or tmp_path / "dashboard.png")
    draw(url, png, LOAD_SECONDS + 5)
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size < 300_000
