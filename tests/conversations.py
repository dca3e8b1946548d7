# SPDX-License-Identifier: Apache-2.0
"""Random conversations over HTTP, each answer compared with plain transformers'."""

from __future__ import annotations

import asyncio

import numpy as np

from dynamo_epd.demo.plain import PlainTransformers, PromptPredictor
from dynamo_epd.demo.toy_data import QUESTIONS, TOY_MODEL, random_picture
from dynamo_epd.serve.client import chat, user

MAX_TOKENS = 6
AT_ONCE = 8


def random_conversation(rng, pool):
    """One to four turns; the first has one to three pictures, a later one sometimes another."""
    turns = []
    for turn in range(int(rng.integers(1, 5))):
        count = int(rng.integers(1, 4)) if turn == 0 else int(rng.random() < 0.3)
        pictures = [pool[int(rng.integers(len(pool)))] for _ in range(count)]
        turns.append((*pictures, QUESTIONS[int(rng.integers(len(QUESTIONS)))].text))
    return turns


async def converse(http, url, model, plain, predictor, turns, gate):
    """Have one conversation. Returns the answers that are not plain transformers', and the cached tokens of all."""
    sent, local, wrong, cached = [], [], [], 0
    for turn in turns:
        images = [p.draw() for p in turn[:-1]]
        sent.append(user(*images, turn[-1]))
        parts = [{"type": "image", "image": image} for image in images]
        local.append({"role": "user", "content": [*parts, {"type": "text", "text": turn[-1]}]})
        async with gate:
            answer = await chat(http, url, model, sent, max_tokens=MAX_TOKENS)
        expected, _ = await asyncio.to_thread(plain.answer, local, MAX_TOKENS)
        length = len(predictor.layout(local)[0])
        if (answer.status, answer.text, answer.prompt_tokens) != (200, expected, length):
            wrong.append((turn, answer, expected, length))
        assert answer.cached_tokens < length
        cached += answer.cached_tokens
        sent.append({"role": "assistant", "content": expected})
        local.append({"role": "assistant", "content": [{"type": "text", "text": expected}]})
    return wrong, cached


async def wrong_answers(http, stack, model, conversations, seed):
    """So many conversations, ``AT_ONCE`` requests at a time; some tokens must have been cached."""
    rng = np.random.default_rng(seed)
    # Few pictures, so that prefixes are shared and differ in one picture; of several sizes, so that cuts fall anywhere.
    pool = [random_picture(rng, side) for side in (56, 84, 84, 84, 112) for _ in range(2)]
    gate, plain, predictor = asyncio.Semaphore(AT_ONCE), PlainTransformers(TOY_MODEL), PromptPredictor(TOY_MODEL)
    work = [random_conversation(rng, pool) for _ in range(conversations)]
    results = await asyncio.gather(*(converse(http, stack.url, model, plain, predictor, t, gate) for t in work))
    stack.check()
    assert sum(cached for _, cached in results) > 0
    return [entry for wrong, _ in results for entry in wrong]
