# SPDX-License-Identifier: Apache-2.0
"""What plain transformers answers, and how much of a prompt an exact block cache may share: the demo's yardstick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import logging

from .. import models
from ..contract.block_keys import AugmentedTokens, augmented_tokens
from ..contract.digest import item_digest
from ..contract.layout import PromptLayout, expand
from ..models.base import Media

Message = Mapping[str, Any]
"""A chat message; user content is a list of parts, an image part holding a PIL image under ``image``."""


class PlainTransformers:
    """Answers chats with ``generate`` on the whole model: no split, no cache between requests."""

    def __init__(self, model_dir: Path):
        logging.disable_progress_bar()
        self._processor = AutoProcessor.from_pretrained(model_dir, local_files_only=True)
        self._model = AutoModelForImageTextToText.from_pretrained(model_dir, local_files_only=True).eval()

    def answer(self, messages: Sequence[Message], max_tokens: int) -> tuple[str, list[int]]:
        """Greedy answer: as text without special tokens, and its ids with the stop token."""
        inputs = self._processor.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        with torch.inference_mode():
            output = self._model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        return self._processor.tokenizer.decode(ids, skip_special_tokens=True), ids


class PromptPredictor:
    """Expands prompts as the workers do and predicts what they share with earlier ones."""

    def __init__(self, model_dir: Path):
        self._family = models.load(model_dir, tower=False)
        self._seen: list[AugmentedTokens] = []

    def layout(self, messages: Sequence[Message]) -> tuple[PromptLayout, list[str]]:
        """The expanded prompt and a digest per image."""
        ids = self._family.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        images = _images(messages)
        if not images:
            return PromptLayout.text(ids), []
        places = self._family.placeholders(ids, {"image": len(images)})
        prepared = [self._family.prepare(Media("image", image), {}) for image in images]
        layout = expand(ids, self._family.replacements(ids, places, [p.expansion for p in prepared]), len(images))
        payloads = [image.convert("RGB") for image in images]
        return layout, [
            item_digest(modality="image", payload=p, payload_kind="decoded", model="demo") for p in payloads
        ]

    def shared(self, messages: Sequence[Message]) -> tuple[int, int]:
        """(prompt tokens, how many of them a remembered sequence has in common).

        The last token of a prompt is never counted: it has to be computed to get an answer.
        """
        tokens = self._tokens(messages)
        longest = max((tokens.common_prefix(earlier) for earlier in self._seen), default=0)
        return len(tokens), min(longest, len(tokens) - 1)

    def remember(self, messages: Sequence[Message], answer_ids: Sequence[int] = ()) -> None:
        """From now on others may share this prompt, and the generated tokens whose KV stays in the same cache."""
        self._seen.append(self._tokens(messages).append(answer_ids))

    def _tokens(self, messages: Sequence[Message]) -> AugmentedTokens:
        layout, digests = self.layout(messages)
        mm = layout.multimodal_input(digests, None)
        return augmented_tokens(layout.token_ids, mm, self._family.vocab_size)


def _images(messages: Sequence[Message]) -> list[Image.Image]:
    return [
        part["image"]
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]
