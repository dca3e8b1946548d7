# SPDX-License-Identifier: Apache-2.0
"""Random prompts out of a small pool of texts and items, several at once in one scope: whatever they share is right.

Small caches make eviction the normal case, so that a prompt is found cut where nobody chose it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from .cases import TAKES, Part
from .conftest import Tiny, same
from .media_files import audio, image, video

TIE = 1e-5
"""Router logits closer than this are equal, as far as float32 goes."""

TEXTS = ["", "A", "Look at this: ", "\n\n", " and then ", "é 漢字 <|x|>", "Compare. ", "?"]


def pool(tiny: Tiny) -> list[Part]:
    """Items of several shapes; clips and videos of one shape, which transformers can take together."""
    items: dict[str, list[Part]] = {
        "image": [image(1), image(2), image(3, 40, 120), image(4, 200, 60)],
        "video": [video(5), video(6)],
        "audio": [audio(7), audio(8)],
    }
    return [item for modality in sorted(TAKES[tiny.name]) for item in items[modality]]


def prompt(draw: random.Random, items: Sequence[Part]) -> list[Part]:
    parts: list[Part] = [draw.choice(TEXTS)]
    for _ in range(draw.randint(1, 4)):
        parts += [draw.choice(items), draw.choice(TEXTS)]
    return [part for part in parts if part != ""]


def check(tiny: Tiny, seed: int, rounds: int, at_once: int) -> None:
    draw, items = random.Random(seed), pool(tiny)
    seen: list[list[Part]] = []
    shared = compared = 0
    for number in range(rounds):
        prompts = [prompt(draw, items) for _ in range(at_once)]
        if seen:
            earlier = draw.choice(seen)
            prompts[0] = [*earlier[: draw.randint(1, len(earlier))], draw.choice(items), draw.choice(TEXTS) or "!"]
        seen += prompts
        requests = [tiny.stack.request(tiny.text(p), [i for i in p if not isinstance(i, str)]) for p in prompts]
        workers = [None] if tiny.hybrid or number % 2 else [tiny.stack.agg]
        for answer, parts in zip(tiny.stack.ask_all(requests, on=workers[0]), prompts, strict=True):
            expected = tiny.plainly(parts)
            # Rounding differs with what else is computed at once. Where it decides which expert a token goes to, it
            # decides the answer; that is the model's tie, not a wrong block.
            if expected.routing > TIE:
                same(answer, expected, decided=0)
            compared += expected.routing > TIE
            shared += answer.cached
    assert tiny.hybrid or shared > 10 * rounds
    assert compared > 0.7 * rounds * at_once


@pytest.mark.parametrize("tiny", ["gemma3", "phi4_multimodal", "qwen2_5_omni", "qwen3_vl"], indirect=True)
def test_random_prompts(tiny: Tiny) -> None:
    check(tiny, seed=1, rounds=4, at_once=3)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", TAKES, indirect=True)
@pytest.mark.parametrize("seed", range(2, 5))
def test_many_random_prompts(tiny: Tiny, seed: int) -> None:
    check(tiny, seed, rounds=15, at_once=4)
