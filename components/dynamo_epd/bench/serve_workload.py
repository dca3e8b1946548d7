# SPDX-License-Identifier: Apache-2.0
"""The repeated-image workload of ``dynamo-epd bench serve``, with plain transformers' answer to every request.

A conversation is about a stack of pictures out of a small pool: all prompts begin with the same instructions, then come
12 to 30 pictures of 64 tokens each, beginning with the conversation's own, then a question; later turns ask on.
Pictures differ only in their pixels, so the prompts of two conversations with equally many pictures have the same
token ids: an engine that keys media by placeholder tokens takes one for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..demo.plain import PlainTransformers
from ..demo.toy_data import BACKGROUND, COLOUR, SHAPE, TOY_MODEL, random_picture
from ..serve.client import png_data_url, user

SIDE = 224
"""Pixels a side: 8 x 8 tokens."""

INSTRUCTION_TOKENS = 720
FEWEST, MOST = 12, 30
MAX_TOKENS = 6
QUESTIONS = (COLOUR.text, SHAPE.text, BACKGROUND.text)
_LETTERS = [*"BCDEFGHJKLMNPQRSTVXYZ"]


@dataclass(frozen=True)
class Request:
    """One turn: its chat messages, and what plain transformers answers (greedy, at most ``MAX_TOKENS``)."""

    messages: tuple[dict[str, Any], ...]
    expected: str


Conversation = tuple[Request, ...]


def letters(rng: np.random.Generator, count: int) -> str:
    """A text of ``count`` tokens: letters of which the toy's tokenizer merges none."""
    return "".join(rng.choice(_LETTERS, count))


class Workload:
    """Conversations about the pictures of a pool; the same for the same arguments.

    Args:
        images: pictures in the pool.
        turns: requests of a conversation, at most as many as there are questions.
        seed: of pictures, texts and choices.
    """

    def __init__(self, images: int, turns: int, seed: int = 0):
        self._rng = np.random.default_rng(seed)
        self._turns = turns
        self._pool = [random_picture(self._rng, SIDE).draw() for _ in range(images)]
        self.urls = [png_data_url(image) for image in self._pool]
        self._instructions = letters(self._rng, INSTRUCTION_TOKENS)
        self._plain = PlainTransformers(TOY_MODEL)
        self._expected: dict[tuple[int, tuple[str, ...]], str] = {}

    def conversations(self, count: int, advance: Callable[[], object] = lambda: None) -> list[Conversation]:
        """``count`` conversations; every picture comes first in as many as any other, give or take one.

        Args:
            advance: called once for each.
        """
        made = []
        for i in range(count):
            start = int(self._rng.integers(len(QUESTIONS)))
            questions = [QUESTIONS[(start + turn) % len(QUESTIONS)] for turn in range(self._turns)]
            made.append(self._conversation(i % len(self._pool), questions))
            advance()
        order = self._rng.permutation(count)
        return [made[i] for i in order]

    def _conversation(self, first: int, questions: Sequence[str]) -> Conversation:
        pool = len(self._pool)
        shown = FEWEST + (MOST - FEWEST) * (first // 2 * 2) // max(1, pool - 1)
        places = [(first + i) % pool for i in range(shown)]
        sent: list[dict[str, Any]] = [{"role": "system", "content": self._instructions}]
        local: list[dict[str, Any]] = [{"role": "system", "content": self._instructions}]
        requests = []
        for turn, question in enumerate(questions):
            of_turn = places if turn == 0 else []
            sent.append(user(*(self.urls[i] for i in of_turn), question))
            pictures = [{"type": "image", "image": self._pool[i]} for i in of_turn]
            local.append({"role": "user", "content": [*pictures, {"type": "text", "text": question}]})
            key = first, tuple(questions[: turn + 1])
            if key not in self._expected:
                self._expected[key], _ = self._plain.answer(local, MAX_TOKENS)
            expected = self._expected[key]
            requests.append(Request(tuple(sent), expected))
            sent.append({"role": "assistant", "content": expected})
            local.append({"role": "assistant", "content": [{"type": "text", "text": expected}]})
        return tuple(requests)
