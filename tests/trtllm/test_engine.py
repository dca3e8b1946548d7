# SPDX-License-Identifier: Apache-2.0
"""The engine against the stand-in: answers, reuse, prefill and decode, faults."""

from __future__ import annotations

from dynamo_epd.demo.toy_data import COLOUR, Picture

from .conftest import running
from .prompts import answer, expected, make_request

RED, BLUE = Picture("red", "white", "circle"), Picture("blue", "white", "circle")


async def test_reuse_gives_the_answer_of_each_image(variant):
    async with running() as engine:
        for picture in (RED, BLUE, RED, BLUE):
            tokens, _ = await answer(engine, make_request([picture], COLOUR.text))
            assert tokens == expected([picture], COLOUR.text)
        _, last = await answer(engine, make_request([RED], COLOUR.text))
        n = len(make_request([RED], COLOUR.text).layout)
        assert last.cached_tokens == n - 1
