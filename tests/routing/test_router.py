# SPDX-License-Identifier: Apache-2.0
"""A request goes to the worker that has its blocks, and the router never believes in blocks that are not there."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence

import numpy as np
import pytest

from dynamo_epd.demo.toy_data import BACKGROUND, COLOUR, FIRST_COLOUR, SECOND_SHAPE, SHAPE, TOY_MODEL, random_picture
from dynamo_epd.serve.client import chat, user

from ..families.media_files import url_of, video
from .conftest import BLOCK, MODEL, READY, ROLE, routed_stack, started

START = 4
"""Tokens before the first slot of a prompt that starts with an image: start, role, line break, start of vision."""
SLOTS = 9
LONG = 400
"""Tokens of a text of which the caches hold 20 or so."""


def letters(rng, count: int) -> str:
    """Letters that are a token each: the toy's merges are of words in lower case."""
    return "".join(rng.choice([*"BCDEFGHJKLMNPQRSTVXYZ"], count))


async def ask_all(http, url, requests: Sequence[tuple[list, dict]]):
    """All requests, one after the other: what a router saves by a hit, it must not owe to a worker being less busy."""
    answers = []
    for messages, options in requests:
        answers.append(await chat(http, url, MODEL, messages, max_tokens=3, **options))
        assert answers[-1].status == 200, answers[-1]
    return answers


async def hits(http, url, rng, firsts, seconds, shared) -> int:
    """How many of the second questions found at least ``shared`` tokens in the cache."""
    await ask_all(http, url, firsts)
    await asyncio.sleep(0.2)
    order = rng.permutation(len(seconds))
    answers = await ask_all(http, url, [seconds[i] for i in order])
    return sum(answer.cached_tokens >= shared for answer in answers)


def about_images(rng, count):
    drawn = [random_picture(rng).draw() for _ in range(count)]
    firsts = [([user(image, COLOUR.text)], {}) for image in drawn]
    return firsts, [([user(image, SHAPE.text)], {}) for image in drawn], START + SLOTS


def about_two_images(rng, count):
    """Half of the pairs are the other half's in the other order."""
    pairs = [[random_picture(rng).draw(), random_picture(rng).draw()] for _ in range(count // 2)]
    pairs += [[b, a] for a, b in pairs]
    firsts = [([user(a, b, FIRST_COLOUR.text)], {}) for a, b in pairs]
    return firsts, [([user(a, b, SECOND_SHAPE.text)], {}) for a, b in pairs], START + 2 * SLOTS


def about_texts(rng, count):
    texts = [letters(rng, 40) for _ in range(count)]
    return [([user(t + " yes?")], {}) for t in texts], [([user(t + " no?")], {}) for t in texts], 40


def about_images_with_uuids(rng, count):
    """The frontend has no value for these images: it is the text before them that it goes by."""
    chats = [(letters(rng, 40), random_picture(rng).draw(), f"u{i}") for i in range(count)]
    firsts = [([user(text, image, COLOUR.text, uuid=uuid)], {}) for text, image, uuid in chats]
    return firsts, [([user(text, image, SHAPE.text, uuid=uuid)], {}) for text, image, uuid in chats], 40 + SLOTS


def about_images_with_salts(rng, count):
    images = [random_picture(rng).draw() for _ in range(count // 2)]
    work = [(image, {"cache_salt": salt}) for image in images for salt in ("a", "b")]
    firsts = [([user(image, COLOUR.text)], salt) for image, salt in work]
    return firsts, [([user(image, SHAPE.text)], salt) for image, salt in work], START + SLOTS


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (about_images, 100),
        (about_two_images, 40),
        (about_texts, 40),
        (about_images_with_uuids, 40),
        (about_images_with_salts, 40),
    ],
)
async def test_a_second_question_goes_to_the_worker_that_has_the_first(http, routed, make, count):
    rng = np.random.default_rng(3)
    found = await hits(http, routed.stack.url, rng, *make(rng, count))
    assert found >= 0.95 * count


async def test_round_robin_finds_about_half(http, routed):
    rng = np.random.default_rng(4)
    found = await hits(http, routed.round_robin_url, rng, *about_images(rng, 100))
    assert 30 <= found <= 70


async def believes(http, routed, messages, known=None, **options):
    """Ask, and compare what the router believed with what was there.

    Args:
        known: tokens before the first one that the frontend has no value for; None where it has one for all.
    """
    answer, route = await routed.ask(http, messages, **options)
    # All but the last token of a prompt can be taken from the cache, the router also counts a block that ends with it.
    there = answer.cached_tokens + (answer.cached_tokens == answer.prompt_tokens - 1)
    there = min(there, answer.prompt_tokens if known is None else known)
    assert route.overlap == there // BLOCK, (answer, route)
    return answer, route


async def test_the_router_believes_what_is_there(http, routed):
    """Over a random mix that outgrows the caches: neither a block too many (evicted, other salt) nor one too few."""
    rng = np.random.default_rng(5)
    pool = [random_picture(rng).draw() for _ in range(6)]
    films = [url_of(video(seed, frames=4, size=(56, 56))) for seed in range(2)]
    texts = [letters(rng, LONG) for _ in range(16)]
    reused = evicted = 0
    stored = set()
    for _ in range(200):
        options = {"cache_salt": str(rng.choice(["a", "b"]))} if rng.random() < 0.3 else {}
        question = [COLOUR, SHAPE, BACKGROUND][int(rng.integers(3))].text
        image, other = (pool[i] for i in rng.choice(len(pool), 2))
        kind = rng.choice(["long", "image", "images", "uuid", "video"], p=[0.55, 0.2, 0.1, 0.1, 0.05])
        if kind == "long":
            which = int(rng.integers(len(texts)))
            answer, route = await believes(http, routed, [user(texts[which], question)], **options)
            evicted += (which, str(options)) in stored and route.overlap < LONG // BLOCK
            stored.add((which, str(options)))
        elif kind == "uuid":
            messages = [user(texts[0][:30], image, question, uuid="u")]
            answer, _ = await believes(http, routed, messages, known=START - 1 + 30, **options)
        elif kind == "video":
            film = {"type": "video_url", "video_url": {"url": films[int(rng.integers(2))]}}
            content = [{"type": "text", "text": texts[1][:30]}, film, {"type": "text", "text": question}]
            messages = [{"role": "user", "content": content}]
            answer, _ = await believes(http, routed, messages, known=START - 1 + 30, **options)
        else:
            parts = [image, other] if kind == "images" else [image]
            answer, _ = await believes(http, routed, [user(*parts, question)], **options)
        reused += answer.cached_tokens > BLOCK
    assert reused > 50 and evicted > 3, (reused, evicted)


async def test_the_workers_gauges(http, routed):
    await routed.ask(http, [user("gauges")])
    samples = await asyncio.to_thread(routed.stack.metrics, f"{ROLE[routed.topology]}-1")
    values = {
        sample.split("{")[0].removeprefix("dynamo_component_"): value
        for sample, value in samples.items()
        if "'dp_rank': '0'" in sample
    }
    assert values["total_blocks"] == 4096 // BLOCK
    assert values["gpu_cache_usage_percent"] == 0
    assert 0 < values["kv_cache_hit_rate"] < 1


@pytest.mark.slow
async def test_a_worker_that_was_killed_comes_back_empty(http, routed):
    """Its blocks are forgotten with it: the one that is started again gets no request for what the old one had."""
    rng = np.random.default_rng(6)
    pictures = [random_picture(rng) for _ in range(8)]
    images = [picture.draw() for picture in pictures]
    for image in images:
        await believes(http, routed, [user(image, COLOUR.text)])
    name = f"{ROLE[routed.topology]}-1"
    routed.stack.kill(name)
    for picture, image in zip(pictures, images, strict=True):
        answer, route = await routed.ask(http, [user(image, SHAPE.text)], patience=60)
        assert answer.text == picture.shape
    alone = route.worker
    await believes(http, routed, [user(images[0], BACKGROUND.text)], patience=60)
    routed.stack.start(name)
    deadline = time.monotonic() + READY
    while (await routed.ask(http, [user(letters(rng, 20))], patience=60))[1].worker == alone:
        assert time.monotonic() < deadline, "the worker does not come back"
    for image in [*images, *(random_picture(rng).draw() for _ in range(8)), *images]:
        await believes(http, routed, [user(image, COLOUR.text)], patience=60)


@pytest.mark.slow
async def test_a_family_that_the_frontend_does_not_know(http, tmp_path):
    """The frontend has no value for any image then, so the workers tell of the text before the first one only."""
    model = tmp_path / "model"
    shutil.copytree(TOY_MODEL, model, ignore=shutil.ignore_patterns("preprocessor_config.json"))
    stack, round_robin_url = routed_stack("e-pd", model)
    with stack:
        routed = await asyncio.to_thread(started, stack, "e-pd", round_robin_url)
        rng = np.random.default_rng(7)
        images, text = [random_picture(rng).draw() for _ in range(3)], letters(rng, 30)
        for _ in range(20):
            image, other = (images[i] for i in rng.choice(3, 2))
            await believes(http, routed, [user(text, image, COLOUR.text)], known=START - 1 + 30)
            await believes(http, routed, [user(image, other, SHAPE.text)], known=0)
