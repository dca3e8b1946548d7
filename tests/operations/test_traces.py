# SPDX-License-Identifier: Apache-2.0
"""One trace from the HTTP request to the last token, through frontend, encode, prefill and decode."""

from __future__ import annotations

import secrets

import pytest

from dynamo_epd.demo.toy_data import COLOUR
from dynamo_epd.serve.client import chat, user

from .conftest import MODEL, unseen, until

pytestmark = pytest.mark.slow


async def trace(http, watched, *messages):
    """The answer, and the spans of the request's trace by service and name."""
    number = secrets.token_hex(16)
    http.headers["traceparent"] = f"00-{number}-{secrets.token_hex(8)}-01"
    answer = await chat(http, watched.stack.url, MODEL, list(messages), max_tokens=4)
    assert answer.status == 200, answer

    def spans():
        return {span.id: span for span in tuple(watched.spans) if span.trace == number}

    def whole():
        names = {(span.service, span.name) for span in spans().values()}
        return {("decode", "engine.generate"), ("prefill", "engine.generate"), ("dynamo", "http-request")} <= names

    until("the trace is there", whole)
    return answer, spans()


def attributes(spans, service, name):
    return [span.attributes for span in spans.values() if (span.service, span.name) == (service, name)]


async def test_all_spans_of_a_request_are_one_trace(http, watched):
    question = user(unseen(), unseen(), COLOUR.text)
    answer, spans = await trace(http, watched, question)
    found = {(span.service, span.name) for span in spans.values()}
    for role, stages in {
        "encode": ("fetch", "digest", "decode", "encode", "offer"),
        "prefill": ("transfer", "prefill", "offer"),
        "decode": ("kv_transfer", "decode"),
    }.items():
        assert {(role, f"mm.{stage}") for stage in stages} <= found, found
    # Every one of them hangs below the HTTP request.
    (root,) = (span for span in spans.values() if span.name == "http-request")
    for span in spans.values():
        at = span
        while at.parent in spans:
            at = spans[at.parent]
        assert at is root, span

    fetched, digested = attributes(spans, "encode", "mm.fetch"), attributes(spans, "encode", "mm.digest")
    assert [a["modality"] for a in fetched] == ["image", "image"]
    assert sorted(a["bytes"] for a in fetched) == sorted(a["bytes"] for a in digested)
    assert all(a["bytes"] > 50 for a in fetched)
    assert [a["items"] for a in attributes(spans, "encode", "mm.encode")] == [1, 1]
    (offer,) = attributes(spans, "encode", "mm.offer")
    (transfer,) = attributes(spans, "prefill", "mm.transfer")
    assert offer["items"] == transfer["items"] == 2
    assert offer["bytes"] == transfer["bytes"] == sum(a["bytes"] for a in attributes(spans, "encode", "mm.encode"))
    (prefill,) = attributes(spans, "prefill", "mm.prefill")
    assert (prefill["items"], prefill["prompt_tokens"]) == (2, answer.prompt_tokens)
    assert prefill["cached_tokens"] == answer.cached_tokens
    (kv,), (moved,) = attributes(spans, "prefill", "mm.offer"), attributes(spans, "decode", "mm.kv_transfer")
    assert kv["blocks"] >= moved["blocks"] > 0 and kv["bytes"] >= moved["bytes"] > 0
    (decode,) = attributes(spans, "decode", "mm.decode")
    assert decode["completion_tokens"] == answer.completion_tokens

    again, spans = await trace(http, watched, question)
    assert again.cached_tokens == answer.prompt_tokens - 1
    (prefill,) = attributes(spans, "prefill", "mm.prefill")
    assert prefill["cached_tokens"] == again.cached_tokens
    assert not attributes(spans, "encode", "mm.encode")
