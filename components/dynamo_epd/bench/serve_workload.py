# SPDX-License-Identifier: Apache-2.0
"""The repeated-image workload of ``dynamo-epd bench serve``, with plain transformers' answer to every request.

A conversation is about a stack of pictures out of a small pool: all prompts begin with the same instructions, then come
2 to 20 pictures of 64 tokens each, beginning with the conversation's own, then a question; later turns ask on.
Pictures differ only in their pixels, so the prompts of two conversations with equally many pictures have the same
token ids: an engine that keys media by placeholder tokens takes one for the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, DynamicCache
from transformers.utils import logging

from ..demo.toy_data import BACKGROUND, COLOUR, SHAPE, TOY_MODEL, random_picture
from ..serve.client import png_data_url, user

SIDE = 224
"""Pixels a side of a picture."""

SLOTS = 64
"""Tokens of a picture."""

INSTRUCTION_TOKENS = 1400
FEWEST, MOST = 2, 20
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


class Plain:
    """Plain transformers' greedy answers to chats about the same pictures, which all come in the first message.

    What two such chats have in common, pictures and all, goes through the model once: the next one goes on from there
    in transformers' own cache. Without that, the answers would take longer than the load that they are for.

    Args:
        images: the pictures, ``SIDE`` pixels a side.
    """

    def __init__(self, processor: Any, model: Any, images: Sequence[Image.Image]):
        self._processor, self._model, self._images = processor, model, images
        self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        self._options = {name: self._cache, "use_cache": True, "logits_to_keep": 1}
        self._held: list[int] = []

    @torch.inference_mode()
    def answer(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> str:
        """The answer, without special tokens."""
        tokenizer = self._processor.tokenizer
        text = self._processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        if not self._held:
            inputs = self._processor(text=[text], images=list(self._images), return_tensors="pt")
            ids = inputs["input_ids"][0].tolist()
            logits = self._model(**inputs, **self._options).logits
            # Behind the pictures, a token's position is its index and this.
            self._delta = int(self._model.model.rope_deltas)
            self._text_from = len(ids) - ids[::-1].index(self._processor.image_token_id)
        else:
            token = self._processor.image_token
            ids = tokenizer(text.replace(token, token * SLOTS), add_special_tokens=False)["input_ids"]
            pairs = zip(self._held, ids[:-1], strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._held), len(ids) - 1))
            if common < self._text_from:
                raise ValueError("a chat about other pictures than those before")
            if common < len(self._held):
                self._cache.crop(common - len(self._held))
            logits = self._forward(ids[common:], common)
        answer: list[int] = []
        while True:
            answer.append(int(logits[0, -1].argmax()))
            if len(answer) == max_tokens or answer[-1] == tokenizer.eos_token_id:
                break
            logits = self._forward(answer[-1:], len(ids) + len(answer) - 1)
        self._held = [*ids, *answer[:-1]]
        return tokenizer.decode(answer, skip_special_tokens=True)

    def _forward(self, ids: Sequence[int], start: int) -> torch.Tensor:
        places = torch.arange(start, start + len(ids)) + self._delta
        return self._model(input_ids=torch.tensor([ids]), position_ids=places.expand(3, 1, -1), **self._options).logits


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
        logging.disable_progress_bar()
        self._processor = AutoProcessor.from_pretrained(TOY_MODEL, local_files_only=True)
        self._model = AutoModelForImageTextToText.from_pretrained(TOY_MODEL, local_files_only=True).eval()
        self._plain: dict[int, Plain] = {}
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
        if first not in self._plain:
            self._plain[first] = Plain(self._processor, self._model, [self._pool[i] for i in places])
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
                self._expected[key] = self._plain[first].answer(local, MAX_TOKENS)
            expected = self._expected[key]
            requests.append(Request(tuple(sent), expected))
            sent.append({"role": "assistant", "content": expected})
            local.append({"role": "assistant", "content": [{"type": "text", "text": expected}]})
        return tuple(requests)
