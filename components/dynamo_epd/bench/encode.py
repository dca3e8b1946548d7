# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd bench encode``: how many images a second an encode worker takes, one request at a time and many at once.

A real encode worker in this process, from the request to the handoff: fetch, digest, decode, preprocess, encode, offer.
Every request has one image that no other has, and nothing is cached. What concurrent requests gain is that their items
share calls of the encoder.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
from dynamo._core import Context
from dynamo.common.backend.engine import GenerateRequest
from PIL import Image

from .. import models
from ..contract.errors import InvalidRequest
from ..contract.handoff import parse_handoff, raise_for_error
from ..demo.toy_data import TOY_MODEL
from ..workers.args import parse
from ..workers.encode import EncodeWorker

Request = dict[str, Any]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "encode",
        help="images a second of an encode worker, one request at a time and many at once",
        description="Images a second of an encode worker in this process, one request at a time and many at once.",
    )
    parser.add_argument("--model", type=Path, default=TOY_MODEL, metavar="DIR", help="default: the toy model")
    parser.add_argument("--device", default="cpu", help="where the encoder runs (default: %(default)s)")
    parser.add_argument("--side", type=int, default=84, help="pixels on a side of an image (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=96, help="requests of one measurement (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each kind (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name in ("side", "concurrency", "requests", "repeat"):
        if getattr(args, name) < 1:
            raise InvalidRequest(f"--{name} must be at least 1")
    single, batched = asyncio.run(measure(args))
    result = {
        "batched_items_per_s": round(batched, 1),
        "single_items_per_s": round(single, 1),
        "ratio": round(batched / single, 2),
    }
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{args.requests} requests with an image of {args.side} x {args.side} pixels, median of {args.repeat}")
    print(f"one at a time:  {single:8.1f} images/s")
    print(f"{args.concurrency:3} at once:     {batched:8.1f} images/s  ({result['ratio']}x)")
    return 0


async def measure(args: argparse.Namespace) -> tuple[float, float]:
    """Images a second one request at a time, and with ``args.concurrency`` at once."""
    # Nobody fetches anything: the arena needs no NIXL, which writes its log to stdout.
    transfer = ("--transfer-mode", "map", "--transfer-host", "127.0.0.1")
    flags = ("--disaggregation-mode", "encode", "--model", str(args.model), "--device", args.device, *transfer)
    worker_args, _ = parse([*flags, "--multimodal-embedding-cache-capacity-gb", "0"])
    worker = EncodeWorker(worker_args)
    prompt = _prompt(args.model)
    random = np.random.default_rng(0)
    rates: dict[int, list[float]] = {1: [], args.concurrency: []}
    try:
        await worker.start(1)
        for turn in range(args.repeat + 1):
            for concurrency, found in rates.items():
                requests = [_request(prompt, random, args.side) for _ in range(args.requests)]
                rate = await _rate(worker, requests, concurrency)
                if turn:  # the first turn warms up
                    found.append(rate)
    finally:
        await worker.cleanup()
    return median(rates[1]), median(rates[args.concurrency])


async def _rate(worker: EncodeWorker, requests: Sequence[Request], concurrency: int) -> float:
    """Requests a second, ``concurrency`` in flight at any time."""
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            await _encode(worker, request)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return len(requests) / (time.perf_counter() - start)


async def _encode(worker: EncodeWorker, request: Request) -> None:
    """Serve one request, and let nobody fetch what it offers."""
    transfer = worker.transfer
    if transfer is None:
        raise RuntimeError("the worker is closed")
    async for chunk in worker.generate(cast(GenerateRequest, request), Context(request["request_id"])):
        handoff = parse_handoff(chunk["encoder_result"])
        raise_for_error(handoff)
        for item in handoff.items:
            transfer.withdraw(item.embedding)


def _prompt(model: Path) -> list[int]:
    """A user's turn with one image, as the chat template writes it."""
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    ids = models.load(model, tower=False).tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(ids["input_ids"])


def _request(prompt: Sequence[int], random: np.random.Generator, side: int) -> Request:
    """A request with a picture of eight times eight coloured squares, which no other request has."""
    squares = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    squares.resize((side, side), Image.Resampling.NEAREST).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {
        "request_id": f"bench-{random.integers(1 << 62)}",
        "token_ids": list(prompt),
        "multi_modal_data": {"image_url": [{"Url": url}]},
    }
