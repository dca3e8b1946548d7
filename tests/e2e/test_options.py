# SPDX-License-Identifier: Apache-2.0
"""Sampling options and usage, as an OpenAI client sees them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dynamo_epd.demo.toy_data import COLOUR, SHAPE, Picture
from dynamo_epd.serve.client import chat, user

from .conftest import MODEL, TRACES

RED = Picture("blue", "red", "circle")


async def completion(http, stack, *parts, **options):
    body = {"model": MODEL, "messages": [user(*parts)], "max_tokens": 6, **options}
    async with http.post(f"{stack.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_logprobs_reach_the_client_from_both_workers(http, stack):
    answer = await completion(http, stack, RED.draw(), COLOUR.text, logprobs=True, top_logprobs=3)
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "red"
    for position in content:
        top = position["top_logprobs"]
        assert len(top) == 3 and top[0]["logprob"] == max(t["logprob"] for t in top)
        assert position["logprob"] == pytest.approx(top[0]["logprob"])


async def test_a_seed_repeats_and_seeds_differ(http, stack):
    async def words(seed):
        options = {"temperature": 2.0, "seed": seed, "max_tokens": 12, "ignore_eos": True}
        answer = await completion(http, stack, RED.draw(), COLOUR.text, **options)
        return answer["choices"][0]["message"]["content"]

    first = [await words(seed) for seed in (1, 2, 3)]
    assert first == [await words(seed) for seed in (1, 2, 3)]
    assert len(set(first)) == 3


async def test_max_tokens_and_stop(http, stack):
    long = await completion(http, stack, RED.draw(), COLOUR.text, max_tokens=9, ignore_eos=True)
    assert long["usage"]["completion_tokens"] == 9 and long["choices"][0]["finish_reason"] == "length"
    short = await completion(http, stack, RED.draw(), COLOUR.text, max_tokens=1)
    assert short["usage"]["completion_tokens"] == 1 and short["choices"][0]["message"]["content"] == "red"
    ended = await completion(http, stack, RED.draw(), COLOUR.text)
    assert ended["choices"][0]["finish_reason"] == "stop"


async def test_usage_after_a_stop_string_counts_the_expanded_prompt(http, stack):
    whole = (await completion(http, stack, RED.draw(), COLOUR.text))["usage"]
    cut = (await completion(http, stack, RED.draw(), COLOUR.text, stop=["re"]))["usage"]
    assert (cut["prompt_tokens"], cut["completion_tokens"]) == (whole["prompt_tokens"], 1)
    assert cut["prompt_tokens_details"]["cached_tokens"] == whole["prompt_tokens"] - 1


async def test_min_tokens_holds_off_the_end(http, stack):
    ended = await completion(http, stack, RED.draw(), COLOUR.text, max_tokens=9)
    assert ended["usage"]["completion_tokens"] < 5
    longer = await completion(http, stack, RED.draw(), COLOUR.text, max_tokens=9, min_tokens=5)
    assert 5 <= longer["usage"]["completion_tokens"] <= 9


async def test_usage_tells_cached_tokens_of_prefill(http, stack):
    await completion(http, stack, RED.draw(), SHAPE.text)
    again = (await completion(http, stack, RED.draw(), SHAPE.text))["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


async def test_traces_explain_what_two_requests_share(http, stack, media):
    for file in (media / TRACES).glob("*.json"):
        file.unlink()
    for picture in (RED, RED.recoloured("green")):
        await chat(http, stack.url, MODEL, [user(picture.draw(), COLOUR.text)], max_tokens=4)
    role = "agg" if "agg" in stack.workers else "prefill"
    traces = sorted((media / TRACES).glob(f"*.{role}.json"), key=lambda p: p.stat().st_mtime)
    assert len(traces) == 2
    shown = subprocess.run(
        [sys.executable, "-m", "dynamo_epd", "explain", *map(str, traces)], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert "item 1's content differs" in shown.stdout
