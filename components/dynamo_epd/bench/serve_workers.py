# SPDX-License-Identifier: Apache-2.0
"""What the workers themselves cost: encode's answer for media that it knows, and a request without an engine's work.

An encode and an agg worker run in this process with NIXL between them; the agg worker's engine is replaced by one that
answers at once. There is no frontend, so nothing but our own code and the Dynamo SDK's Python part is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from dynamo._core import Context

from ..demo.toy_data import COLOUR, TOY_MODEL, Picture
from ..engine.base import EngineInfo, EngineOutput, EngineRequest, KVEventListener
from ..serve.client import png_data_url
from ..workers.args import parse
from ..workers.main import create_worker

AT_ONCE = 16
_ids = itertools.count()


class _NoEngine:
    """Answers every request with one token and an end."""

    def __init__(self, info: EngineInfo, token: int):
        self._info, self._token = info, token

    async def start(self) -> EngineInfo:
        return self._info

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        yield EngineOutput([self._token], "stop")

    def listen(self, listener: KVEventListener) -> None:
        pass

    def used_blocks(self) -> int:
        return 0

    async def stop(self) -> None:
        pass


def worker_costs(count: int, advance: Callable[[], object]) -> dict[str, Any]:
    """Times of single requests, and requests per second of CPU time with several in flight.

    Args:
        count: requests of each kind.

    Returns:
        ``encode_hit``: ``worker_ms``, encode's part of a request with one image that it knows; ``added_ms``, what such
        an image adds to a request on encode and agg together; medians. ``no_engine``: ``requests_per_s_per_core`` of
        ``encode`` and ``agg`` for a request with an image, and of ``agg_text`` for one without.
    """
    return asyncio.run(_worker_costs(count, advance))


async def _worker_costs(count: int, advance: Callable[[], object]) -> dict[str, Any]:
    encode = await _start("encode", "--multimodal-embedding-cache-capacity-gb", "0.01")
    agg = None
    try:
        agg = await _start("agg", "--engine", "reference")
        tokenizer = agg._running.family.tokenizer
        agg._running = replace(agg._running, engine=_NoEngine(agg._running.info, int(tokenizer.eos_token_id)))
        text, image = _request(tokenizer, None), _request(tokenizer, Picture("blue", "red", "circle").draw())

        async def with_image() -> None:
            (chunk,) = await _generate(encode, image)
            await _generate(agg, image | {"encoder_result": chunk["encoder_result"]})

        async def encode_alone() -> None:
            (chunk,) = await _generate(encode, image)
            handed.append(chunk["encoder_result"])

        handed: list[dict[str, Any]] = []
        await _times((with_image, _call(agg, text)), 10)
        both_ms, text_ms = await _times((with_image, _call(agg, text)), count)
        advance()
        (encode_ms,) = await _times((encode_alone,), count)
        advance()
        encode_rate = await _rate([encode_alone] * count)
        advance()
        parts = [image | {"encoder_result": result} for result in handed]
        agg_rate = await _rate([_call(agg, part) for part in parts])
        text_rate = await _rate([_call(agg, text)] * count)
        advance()
    finally:
        for worker in (agg, encode):
            if worker is not None:
                await worker.cleanup()
    return {
        "encode_hit": {"worker_ms": round(encode_ms, 3), "added_ms": round(both_ms - text_ms, 3)},
        "no_engine": {
            "requests_per_s_per_core": {
                "encode": round(encode_rate, 1),
                "agg": round(agg_rate, 1),
                "agg_text": round(text_rate, 1),
            }
        },
    }


async def _start(role: str, *argv: str) -> Any:
    args, _ = parse(
        [
            *("--disaggregation-mode", role, "--model", str(TOY_MODEL), "--device", "cpu"),
            *("--transfer-host", "127.0.0.1", "--transfer-arena-bytes", str(32 << 20), *argv),
        ]
    )
    worker = create_worker(args)
    await worker.start(1)
    return worker


def _request(tokenizer: Any, image: Any) -> dict[str, Any]:
    """What a frontend sends for one question, about ``image`` or about nothing."""
    content = [*([{"type": "image"}] if image else []), {"type": "text", "text": COLOUR.text}]
    chat = [{"role": "user", "content": content}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    media = {"multi_modal_data": {"image_url": [{"Url": png_data_url(image)}]}} if image else {}
    return {
        "token_ids": list(ids),
        "stop_conditions": {"max_tokens": 4, "stop_token_ids_hidden": [int(tokenizer.eos_token_id)]},
        "sampling_options": {"temperature": 0.0},
        "output_options": {},
        "eos_token_ids": [int(tokenizer.eos_token_id)],
        **media,
    }


async def _generate(worker: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of an answer; request and chunks as JSON, as the request plane carries them."""
    chunks = worker.generate(json.loads(json.dumps(request)), Context(f"bench-{next(_ids)}"))
    return [json.loads(json.dumps(chunk)) async for chunk in chunks]


def _call(worker: Any, request: dict[str, Any]) -> Callable[[], Awaitable[Any]]:
    return lambda: _generate(worker, request)


async def _times(calls: Sequence[Callable[[], Awaitable[Any]]], count: int) -> list[float]:
    """Median ms of each of ``calls``, made in turns ``count`` times, one after the other."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(count):
        for call, of_call in zip(calls, times, strict=True):
            start = time.perf_counter()
            await call()
            of_call.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(of_call) for of_call in times]


async def _rate(calls: list[Callable[[], Awaitable[Any]]]) -> float:
    """Calls per second of CPU time of this process, ``AT_ONCE`` in flight."""
    waiting = iter(calls)

    async def client() -> None:
        for call in waiting:
            await call()

    start = time.process_time()
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return len(calls) / (time.process_time() - start)
