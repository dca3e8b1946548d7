# SPDX-License-Identifier: Apache-2.0
"""One line per request at info, JSON where Dynamo's log is, and nothing in it that is not for everybody."""

from __future__ import annotations

import json
import secrets

import pytest

from dynamo_epd.demo.toy_data import COLOUR, Picture
from dynamo_epd.serve.client import chat, png_data_url, user

from .conftest import MODEL, unseen, until

pytestmark = pytest.mark.slow


def lines(watched, role):
    """The request lines of a worker's log, parsed; every line of Dynamo's own is checked to be JSON too."""
    found = []
    for line in watched.log(role).splitlines():
        if not line.startswith("{"):
            assert "NIXL" in line or "UCX" in line, line
            continue
        message = json.loads(line)["message"]
        if message.startswith('{"request"'):
            found.append(json.loads(message))
    return found


async def line_of(http, watched, role, *messages, **options):
    """The answer, and the line that ``role`` writes about the request."""
    before = len(lines(watched, role))
    answer = await chat(http, watched.stack.url, MODEL, list(messages), max_tokens=4, **options)
    until("the line is there", lambda: len(lines(watched, role)) > before)
    return answer, lines(watched, role)[-1]


async def test_a_line_says_what_was_done_and_how_long_it_took(http, watched):
    picture = unseen()
    question = user(picture, COLOUR.text)
    sizes = len(png_data_url(picture))
    _, encode = await line_of(http, watched, "encode", question)
    assert (encode["items"], encode["kept"], encode["outcome"]) == (1, 0, "ok")
    assert 0 < encode["bytes"] < sizes
    assert {"fetch_ms", "digest_ms", "decode_ms", "queue_ms", "encode_ms", "offer_ms", "total_ms"} <= set(encode)

    answer, prefill = await line_of(http, watched, "prefill", question)
    assert (prefill["items"], prefill["keys"], prefill["outcome"]) == (1, "exact", "ok")
    assert prefill["prompt_tokens"] == answer.prompt_tokens
    assert prefill["cached_tokens"] == answer.cached_tokens == answer.prompt_tokens - 1
    assert {"transfer_ms", "queue_ms", "prefill_ms", "offer_ms", "total_ms"} <= set(prefill)

    _, decode = await line_of(http, watched, "decode", question)
    assert {"queue_ms", "decode_ms", "total_ms"} <= set(decode)
    same = [
        line for role in ("encode", "prefill") for line in lines(watched, role) if line["request"] == decode["request"]
    ]
    assert [line["trace"] for line in same] == [decode["trace"]] * 2


async def test_no_query_no_password_and_no_payload_is_logged(http, watched):
    secret = secrets.token_hex(12)
    payload = png_data_url(Picture("red", "white", "circle").draw())
    for url in (
        f"https://user-{secret}:{secret}@media.invalid/one.png?token={secret}#{secret}",
        f"data:image/png;base64,{secret}{secret}",
        payload,
    ):
        answer, line = await line_of(http, watched, "encode", user(url, f"{secret}?"))
        assert answer.status == (200 if url is payload else 400), answer
        if url is not payload:
            assert (line["outcome"], line["reason"]) == ("invalid", "item")
            assert line["error"].startswith("image 1: ")
    for role in ("frontend", "encode", "prefill", "decode"):
        log = watched.log(role)
        assert secret not in log, role
        assert payload[30:90] not in log, role
