# SPDX-License-Identifier: Apache-2.0
"""A cache salt isolates its tenant: nothing is shared across salts, everything under one."""

from __future__ import annotations

from dynamo_epd.demo.toy_data import COLOUR, Picture
from dynamo_epd.serve.client import chat, user

from .conftest import MODEL

PICTURE = Picture("purple", "yellow", "triangle")


async def ask(http, stack, salt=None, uuid=None):
    options = {"nvext": {"cache_salt": salt}} if salt else {}
    message = user(PICTURE.draw(), COLOUR.text, uuid=uuid)
    answer = await chat(http, stack.url, MODEL, [message], max_tokens=4, **options)
    assert (answer.status, answer.text) == (200, "yellow")
    return answer


async def test_salts_share_with_themselves_only(http, stack):
    for salt in ("x", "y", None):
        first = await ask(http, stack, salt)
        if salt is not None:
            assert first.cached_tokens == 0
        else:
            assert first.cached_tokens < first.prompt_tokens - 1
        again = await ask(http, stack, salt)
        assert again.cached_tokens == again.prompt_tokens - 1


async def test_a_uuid_is_part_of_what_an_item_is(http, stack):
    await ask(http, stack)
    with_uuid = await ask(http, stack, uuid="u1")
    assert with_uuid.cached_tokens < 10
    again = await ask(http, stack, uuid="u1")
    assert again.cached_tokens == again.prompt_tokens - 1
    other = await ask(http, stack, uuid="u2")
    assert other.cached_tokens < 10
