# SPDX-License-Identifier: Apache-2.0
"""The stacks of ``dynamo-epd bench serve`` (block reuse on, off, keyed by placeholders) and the load on them."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
import numpy as np

from ..contract.errors import EpdError
from ..demo.toy_data import COLOUR, TOY_MODEL, Picture
from ..serve.client import Answer, chat, open_client, user
from ..serve.stack import Stack, epd_services
from .serve_workload import MAX_TOKENS, Conversation, letters

MODEL_NAME = "toy"
SIDES = ("reuse_on", "reuse_off", "placeholder")
TEXT_TOKENS = 2700
"""Length of the prompts whose time to first token is plotted against how much of them is shared."""

Advance = Callable[[], object]


@contextmanager
def serving(side: str, topology: str, deadline: float) -> Iterator[Stack]:
    """A running stack.

    Args:
        side: one of ``SIDES``.
        deadline: seconds until it must be ready.

    Raises:
        StackError: it is not.
    """
    engine = {
        "kv_cache_config": {
            "enable_block_reuse": side != "reuse_off",
            "tokens_per_block": 32,
            "max_tokens": 1 << 17,
        },
        "max_seq_len": 4096,
        "max_batch_size": 16,
        "max_num_tokens": 4096,
        "enable_chunked_prefill": True,
    }
    keys = ("--keys", "placeholder") if side == "placeholder" else ()
    services = epd_services(
        TOY_MODEL,
        MODEL_NAME,
        topology=topology,
        engine_args=("--engine", "reference", "--override-engine-args", json.dumps(engine), *keys),
        encode_args=("--multimodal-embedding-cache-capacity-gb", "0.1"),
    )
    with Stack(services, MODEL_NAME) as stack:
        stack.wait_ready(deadline, probe=user(Picture("white", "black", "square").draw(), COLOUR.text))
        yield stack


async def converse(
    stack: Stack, conversations: Sequence[Conversation], concurrency: int, advance: Advance
) -> dict[str, Any]:
    """Hold all conversations, ``concurrency`` at a time, and say how it went.

    A later turn quotes the right answers to the earlier ones, whatever was answered, so that all sides do the same.
    """
    waiting = iter(conversations)
    answers: list[tuple[Answer, str]] = []

    async def client(http: aiohttp.ClientSession) -> None:
        for conversation in waiting:
            for request in conversation:
                answer = await chat(http, stack.url, MODEL_NAME, request.messages, max_tokens=MAX_TOKENS, timeout=600)
                if answer.status != 200:
                    stack.check()
                    raise EpdError(f"a request of the workload failed with {answer.status}: {answer.text}")
                answers.append((answer, request.expected))
                advance()

    async with open_client() as http:
        start = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
        seconds = time.perf_counter() - start
    ttfts = [answer.ttft_ms for answer, _ in answers]
    return {
        "ttft_ms_mean": round(statistics.fmean(ttfts), 2),
        "ttft_ms_median": round(statistics.median(ttfts), 2),
        "requests_per_s": round(len(answers) / seconds, 3),
        "correct": sum(answer.text == expected for answer, expected in answers),
        "total": len(answers),
        "prompt_tokens": [min(a.prompt_tokens for a, _ in answers), max(a.prompt_tokens for a, _ in answers)],
        "cached_share": round(sum(a.cached_tokens for a, _ in answers) / sum(a.prompt_tokens for a, _ in answers), 4),
    }


async def by_shared_prefix(stack: Stack, image: str, repeat: int, advance: Advance) -> list[dict[str, float]]:
    """Time to first token of prompts of one length, of which more and more is known; one request at a time.

    Args:
        image: URL of a picture that the text is followed by.
    """
    rng = np.random.default_rng(1)
    base = letters(rng, TEXT_TOKENS)
    points = []
    async with open_client() as http:

        async def ask(text: str) -> Answer:
            message = user(text, image, COLOUR.text)
            return await chat(http, stack.url, MODEL_NAME, [message], max_tokens=1, timeout=600)

        await ask(base)
        for shared in range(0, TEXT_TOKENS + 1, TEXT_TOKENS // 6):
            answers = [await ask(base[:shared] + letters(rng, TEXT_TOKENS - shared)) for _ in range(repeat)]
            points.append(
                {
                    "shared_tokens": shared,
                    "cached_tokens": statistics.median(a.cached_tokens for a in answers),
                    "ttft_ms": round(statistics.median(a.ttft_ms for a in answers), 2),
                }
            )
            advance()
    return points


async def by_concurrency(
    stack: Stack, conversations: Sequence[Conversation], levels: Sequence[int], advance: Advance
) -> dict[str, float]:
    """Requests per second with so many conversations at a time, all of them held before."""
    found = {}
    for level in levels:
        found[str(level)] = (await converse(stack, conversations, level, lambda: None))["requests_per_s"]
        advance()
    return found
