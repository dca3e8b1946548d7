# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd bench prefill``: time to first token of a repeated prompt with images, block reuse on and off.

Measured at the reference engine on the toy model, from the request to the first token. What exact keys cost where they
buy nothing (the seven fields made and checked, the keys of all blocks derived) is timed between those runs and given as
a share of the time to first token without reuse. Timed by itself, because it is less than that time varies: a prompt of
as many tokens of text, which has no such fields, is measured as well, and shows by how much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from statistics import median

import numpy as np
import torch

from ..contract.block_keys import augmented_tokens, block_keys, root_key
from ..contract.errors import InvalidRequest
from ..contract.layout import PromptLayout
from ..demo.toy_data import TOY_MODEL
from ..engine.base import EngineRequest, SamplingParams
from ..engine.reference import ReferenceEngine, create

VISION_START, VISION_END, PLACEHOLDER = 363, 364, 366
TEXT_IDS = 256
SIDE = 16
"""Rows of embeddings along each side of an image: 256 tokens, about 450 x 450 pixels."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "prefill",
        help="time to first token with block reuse on and off",
        description="Time to first token of one repeated prompt with images, block reuse on and off, in one run.",
    )
    parser.add_argument("--tokens", type=int, default=2000, help="expanded prompt tokens (default: %(default)s)")
    parser.add_argument("--images", type=int, default=4, help="images of 256 tokens each (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=7, help="measurements of each kind (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.repeat < 1:
        raise InvalidRequest("--repeat must be at least 1")
    prompt = make_prompt(args.tokens, args.images)
    on, off, text, metadata = asyncio.run(measure(prompt, args.repeat))
    result = {
        "reuse_on_ttft_ms": round(median(on), 3),
        "reuse_off_ttft_ms": round(median(off), 3),
        "reuse_off_text_ttft_ms": round(median(text), 3),
        "ratio": round(median(off) / median(on), 2),
        "metadata_overhead_percent": round(100 * median(metadata) / median(off), 2),
    }
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{len(prompt.layout):,} tokens, {prompt.layout.num_items} images, median of {args.repeat}")
    print(f"time to first token, reuse on:  {result['reuse_on_ttft_ms']:8.2f} ms")
    print(f"time to first token, reuse off: {result['reuse_off_ttft_ms']:8.2f} ms  ({result['ratio']}x)")
    print(f"as many tokens of text, reuse off: {result['reuse_off_text_ttft_ms']:5.2f} ms")
    print(f"metadata, where nothing is reused: {result['metadata_overhead_percent']:.2f}% of the time to first token")
    return 0


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with images whose embeddings are random.

    Attributes:
        digests: hex digest of each image.
        embeddings: ``[256, hidden]`` each.
        position_ids, position_delta: as in ``EngineRequest``.
    """

    layout: PromptLayout
    digests: Sequence[str]
    embeddings: Sequence[torch.Tensor]
    position_ids: np.ndarray
    position_delta: int

    def text(self, name: str) -> EngineRequest:
        """A request for one token after as many tokens of text."""
        return EngineRequest(name, PromptLayout.text(self.layout.token_ids % TEXT_IDS), SamplingParams(max_tokens=1))

    def request(self, name: str) -> EngineRequest:
        """The request for one token."""
        return EngineRequest(
            name,
            self.layout,
            SamplingParams(max_tokens=1),
            multimodal_input=self.layout.multimodal_input(self.digests),
            embeddings=self.embeddings,
            position_ids=self.position_ids,
            position_delta=self.position_delta,
        )


def make_prompt(tokens: int, images: int) -> ImagePrompt:
    """Images with text around them, ``tokens`` tokens in all.

    Raises:
        InvalidRequest: the images alone take more.
    """
    rng = np.random.default_rng(0)
    rows = SIDE * SIDE
    text = tokens - images * (rows + 2)
    if images < 1 or text < images + 1:
        raise InvalidRequest(f"--tokens {tokens} is too few for {images} images of {rows + 2} tokens with text around")
    ids, item, places = [], [], []
    position = 0
    lengths = np.full(images + 1, text // (images + 1))
    lengths[: text % (images + 1)] += 1
    for i, length in enumerate(lengths.tolist()):
        words = rng.integers(1, TEXT_IDS, length).tolist()
        before, after = [VISION_END] if i else [], [VISION_START] if i < images else []
        ids += [*before, *words, *after]
        count = length + len(before) + len(after)
        item += [-1] * count
        places.append(np.tile(np.arange(position, position + count), (3, 1)))
        position += count
        if i < images:
            ids += [PLACEHOLDER] * rows
            item += [i] * rows
            y, x = np.divmod(np.arange(rows), SIDE)
            places.append(position + np.stack([np.zeros(rows, np.int64), y, x]))
            position += SIDE
    layout = PromptLayout.from_flat(ids, np.array(item), np.zeros(len(ids), bool), images)
    embeddings = [torch.tensor(rng.standard_normal((rows, 128)), dtype=torch.float32) for _ in range(images)]
    digests = [sha256(embedding.numpy().tobytes()).hexdigest() for embedding in embeddings]
    return ImagePrompt(layout, digests, embeddings, np.concatenate(places, 1), position - len(ids))


async def measure(prompt: ImagePrompt, repeat: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Milliseconds to the first token with reuse, without, and of text without; then those for the metadata alone."""
    async with AsyncExitStack() as stack:

        async def start(reuse: bool) -> ReferenceEngine:
            config = {
                "max_num_tokens": len(prompt.layout),
                "max_seq_len": len(prompt.layout) + 1,
                "kv_cache_config": {"enable_block_reuse": reuse, "max_tokens": 2 * len(prompt.layout) + 64},
            }
            engine = create(model_dir=TOY_MODEL, overrides=json.dumps(config), device="cpu")
            stack.push_async_callback(engine.stop)
            await engine.start()
            return engine

        reusing, plain = await start(True), await start(False)
        on: list[float] = []
        off: list[float] = []
        text: list[float] = []
        metadata: list[float] = []
        for i in range(repeat + 1):
            times = [
                await first_token(engine, partial(make, str(i)))
                for engine, make in ((reusing, prompt.request), (plain, prompt.request), (plain, prompt.text))
            ]
            began = time.perf_counter()
            mm = prompt.layout.multimodal_input(prompt.digests)
            ids = augmented_tokens(prompt.layout.token_ids, mm, plain.info.vocab_size)
            block_keys(ids, plain.info.tokens_per_block, root_key())
            if i:  # the first round fills the cache and warms up
                metadata.append(1e3 * (time.perf_counter() - began))
                for series, value in zip((on, off, text), times, strict=True):
                    series.append(value)
        return on, off, text, metadata


async def first_token(engine: ReferenceEngine, make: Callable[[], EngineRequest]) -> float:
    """Milliseconds from before the request is made to its first token."""
    began = time.perf_counter()
    async with aclosing(engine.generate(make())) as outputs:
        await anext(outputs)
        return 1e3 * (time.perf_counter() - began)
